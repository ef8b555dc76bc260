"""Define EyasError, the one exception for things that a person can correct.

It says what was found, what was expected, and what to type next.
"""

import re
import sys
import traceback


class EyasError(Exception):
    """Report a problem that a person can correct.

    found: what is wrong. expected: what would be right. next_command: what to type now.
    """

    def __init__(self, found: str, expected: str = "", next_command: str = ""):
        self.found = found
        self.expected = expected
        self.next_command = next_command
        message = found
        if expected:
            message += f"; expected {expected}"
        if next_command:
            message += f"; next: {next_command}"
        super().__init__(message)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows in place of a traceback.

        IPython calls this method by its name. The lines are the parts of the message, and the place
        in our code that raised the error.
        """
        frames = traceback.extract_tb(self.__traceback__)
        ours = [frame for frame in frames if "/eyas/" in frame.filename]
        where = ""
        if ours:
            module = ours[-1].filename.rpartition("/eyas/")[2]
            where = f"(eyas/{module}, line {ours[-1].lineno})"
        lines = [f"EyasError: {self.found}  {where}".rstrip()]
        if self.expected:
            lines.append(f"expected: {self.expected}")
        if self.next_command:
            lines.append(f"next: {self.next_command}{_as_in_this_notebook(self.next_command)}")
        return lines


def _as_in_this_notebook(next_command: str) -> str:
    """Return the settings to add to a command so that it applies to this notebook's run.

    The result is empty outside a notebook, for a command without settings, and for default
    settings.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return ""
    options = getattr(shell.user_ns.get("config"), "options", None)
    if options is None or not takes_settings(next_command):
        return ""
    settings = options(unless=next_command)
    return f", with {settings} as here" if settings else ""


WITHOUT_SETTINGS = (
    "data (?:list|rm)|doctor|drafter layer-ids|job|prompts (?:build|import)"
    "|report (?:index|summary)|settings"
)


def takes_settings(command: str) -> bool:
    """Return whether a command of ours in a message takes `--profile` and `-p`."""
    return bool(
        re.search(f"python -m eyas (?!{WITHOUT_SETTINGS})", command)
    ) and not command.endswith("--help")
