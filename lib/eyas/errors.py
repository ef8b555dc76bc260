"""The one exception for things that a person can put right: what was found, what was expected, what to type next."""

import re
import sys
import traceback


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

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in place of a traceback (IPython asks for it by this name): the message, a line for each part, and where it came from."""
        places = [
            frame
            for frame in traceback.extract_tb(self.__traceback__)
            if "/eyas/" in frame.filename
        ]
        where = (
            f"(eyas/{places[-1].filename.rpartition('/eyas/')[2]}, line {places[-1].lineno})"
            if places
            else ""
        )
        lines = [f"EyasError: {self.found}  {where}".rstrip()]
        if self.expected:
            lines.append(f"expected: {self.expected}")
        if self.next_command:
            lines.append(f"next: {self.next_command}{_as_in_this_notebook(self.next_command)}")
        return lines


def _as_in_this_notebook(next_command: str) -> str:
    """A command that a message names is for the run at hand: with the settings of the notebook that shows it, where they are not the defaults."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    options = getattr(shell.user_ns.get("config") if shell is not None else None, "options", None)
    here = (
        options(unless=next_command) if options is not None and takes_settings(next_command) else ""
    )
    return f", with {here} as here" if here else ""


WITHOUT_SETTINGS = (
    "data (?:list|rm)|doctor|drafter layer-ids|job|prompts (?:build|import)"
    "|report (?:index|summary)|settings"
)


def takes_settings(command: str) -> bool:
    """Whether a command of ours that a message names takes `--profile` and `-p`."""
    return bool(
        re.search(f"python -m eyas (?!{WITHOUT_SETTINGS})", command)
    ) and not command.endswith("--help")
