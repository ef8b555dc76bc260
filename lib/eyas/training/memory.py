"""Errors of memory that runs out, as errors for people."""

import contextlib
import re

import torch

from eyas.errors import EyasError

SAID = "(?i)can('|no)t allocate memory|not enough memory|bad_alloc|ALLOC_FAILED"


@contextlib.contextmanager
def memory(found: str, expected: str, next_command: str):
    """Turn an out-of-memory error in this block into an EyasError of these parts."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_memory and not re.search(SAID, str(error)):
            raise
        raise EyasError(found, expected, next_command) from None
