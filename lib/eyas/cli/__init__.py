"""`python -m eyas ...`: each command parses its arguments, calls one function of the library, and
returns an exit code.

    parser.py     all commands, in the order of `--help`
    machine.py    doctor, plan, job, settings
    states.py     server, prompts, extract, verify, parity, data
    drafters.py   train, drafter, evaluate, study
    reports.py    report
"""

import argparse
import os
import select
import shlex
import sys

from eyas.cli.parser import build_parser
from eyas.cli.renamed import renamed
from eyas.errors import EyasError, takes_settings

EXIT_BROKEN_PIPE = 141  # what a shell gives for a program that SIGPIPE ended


def main(argv: list[str] | None = None) -> int:
    """Carry out one command; return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if sentence := renamed(words):
        print(f"eyas: {sentence}", file=sys.stderr)
        return 2
    args = build_parser().parse_args(words)
    try:
        _say_without_effect(args)
        code = args.run(args)
        sys.stdout.flush()  # here a reader that has gone away can still be told from an error
        return code
    except EyasError as error:
        print(f"eyas: {error}{_as_here(args, error.next_command)}", file=sys.stderr)
        return 2
    except BrokenPipeError as error:
        if _nobody_reads():
            return EXIT_BROKEN_PIPE
        print(f"eyas: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a disk, a permission, a long name: a traceback would explain nothing
        print(f"eyas: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("eyas: interrupted", file=sys.stderr)
        return 130


def _say_without_effect(args: argparse.Namespace) -> None:
    """Say on stderr which settings that came with -p this command does not read."""
    names = [name for name, _ in getattr(args, "p", None) or []]
    first_process = os.environ.get("RANK", "0") == "0"  # under torchrun one process says it
    if not names or not first_process:
        return
    from eyas.cli.options import config_of
    from eyas.effects import without_effect

    command = " ".join(args.name) if args.command == "job start" else args.command
    if note := without_effect(command, names, config_of(args)):
        print(f"note: {note}", file=sys.stderr)


def _nobody_reads() -> bool:
    """Return whether the reader of our own output has gone away, as `| head` does.

    Nothing more is written then, or Python would complain at its end.
    """
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors and hang-ups are reported unasked
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _as_here(args: argparse.Namespace, next_command: str) -> str:
    """Return the options of this run, for a command that a message names.

    Options that the command already has are left out.
    """
    if not takes_settings(next_command):
        return ""
    options = []
    profile = getattr(args, "profile", "demo")
    if profile != "demo" and "--profile" not in next_command:
        options += ["--profile", profile]
    for name, value in getattr(args, "p", None) or []:
        if f"-p {name} " not in next_command:
            options += ["-p", name, value]
    return f", with {shlex.join(options)} as here" if options else ""
