"""The one exception for things that a person can put right: what was found, what was expected, what to type next."""


class EyasError(Exception):
    """`found` says what is wrong, `expected` what would have been right, `next_command` what to type now."""

    def __init__(self, found: str, expected: str = "", next_command: str = ""):
        self.found, self.expected, self.next_command = found, expected, next_command
        message = found
        if expected:
            message += f"; expected {expected}"
        if next_command:
            message += f"; next: {next_command}"
        super().__init__(message)
