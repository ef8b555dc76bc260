"""The message of an EyasError that has all its parts."""

import pytest

from eyas.errors import EyasError


def refused(function, *arguments) -> str:
    """The EyasError's message; one with what was found, what was expected and what to type next."""
    with pytest.raises(EyasError) as caught:
        function(*arguments)
    error = caught.value
    assert error.found and error.expected and error.next_command and "\n" not in str(error)
    return str(error)
