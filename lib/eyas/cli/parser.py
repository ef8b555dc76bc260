"""All commands, in the order of the road from a model to an answer."""

import argparse

from eyas.cli import drafters, machine, reports, states
from eyas.cli.options import PROG, Help

ROAD = (
    machine.declare_doctor,
    machine.declare_plan,
    states.declare_server,
    states.declare_prompts,
    states.declare_extract,
    states.declare_verify,
    states.declare_parity,
    drafters.declare_train,
    drafters.declare_drafter,
    drafters.declare_evaluate,
    drafters.declare_study,
    reports.declare_report,
    machine.declare_job,
    states.declare_data,
    machine.declare_settings,
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m eyas`."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage=f"{PROG} COMMAND ...",
        description="Train EAGLE-3 drafters from hidden states that a real SGLang server computes.",
        epilog=f"{PROG} COMMAND --help explains one command.",
        add_help=False,
        formatter_class=Help,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(
        required=True,
        prog=PROG,
        metavar="COMMAND",
        title="commands, in the order of the road",
    )
    for declare in ROAD:
        declare(commands)
    return parser
