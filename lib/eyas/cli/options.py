"""What the commands share: how a command is declared, and the options of a profile."""

import argparse
from collections.abc import Callable

PROG = "python -m eyas"


class Help(argparse.HelpFormatter):
    """Lists commands as argparse lists options, without a line for the word COMMAND."""

    def _iter_indented_subactions(self, action):
        subactions = getattr(action, "_get_subactions", list)
        yield from subactions()

    def _format_action(self, action):
        text = super()._format_action(action)
        is_list = isinstance(action, argparse._SubParsersAction)
        return text.partition("\n")[2] if is_list else text


def add_command(
    group: argparse._SubParsersAction,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    *,
    profile: bool = True,
) -> argparse.ArgumentParser:
    """Declare one command that `run` carries out, with --profile and -p where `profile` says so."""
    parser = _add_parser(group, name, text)
    if profile:
        add_profile(parser)
    parser.set_defaults(run=run, command=parser.prog.removeprefix(f"{PROG} "))
    return parser


def add_group(
    group: argparse._SubParsersAction,
    name: str,
    text: str,
    default: Callable[[argparse.Namespace], int] | None = None,
) -> argparse._SubParsersAction:
    """Declare a command that has commands of its own; `default` runs where none is named."""
    parser = _add_parser(group, name, text)
    parser.set_defaults(run=default, command=name)
    return parser.add_subparsers(required=default is None, metavar="COMMAND", title="commands")


def _add_parser(group: argparse._SubParsersAction, name: str, text: str) -> argparse.ArgumentParser:
    description = f"{text[0].upper()}{text[1:]}."
    return group.add_parser(name, help=text, description=description, formatter_class=Help)


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the settings of the run."""
    parser.add_argument(
        "--profile",
        default="demo",
        help="a name under notebooks/profiles, or a YAML file (default: demo)",
    )
    parser.add_argument(
        "-p",
        nargs=2,
        action="append",
        metavar=("NAME", "VALUE"),
        help="override one setting of the profile; may be repeated",
    )


def config_of(args: argparse.Namespace):
    """Return the Config that --profile and -p ask for."""
    from eyas.config import Config

    return Config.load(args.profile, **dict(args.p or []))


def at_least_0(kind: type):
    """Return a function that reads a number of this kind that is not negative."""

    def number(text: str):
        value = kind(text)
        if not 0 <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not 0 or more")
        return value

    return number
