"""`python -m eyas ...`: thin. Each command parses, calls one function of the library, prints, and returns an exit code."""

import argparse
import sys

from eyas.errors import EyasError


def _config(args):
    from eyas.config import Config

    return Config.load(args.profile, **dict(args.p or []))


def _with_profile(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--profile", default="demo", help="name under notebooks/profiles, or a YAML file (default: demo)")
    parser.add_argument("-p", nargs=2, action="append", metavar=("NAME", "VALUE"), help="override one setting of the profile")
    return parser


def _profile(args) -> int:
    print(_config(args))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eyas", description="EAGLE-3 drafters from the hidden states that a real SGLang server computes")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    profile = _with_profile(commands.add_parser("profile", help="print every setting of a profile, with its meaning"))
    profile.add_argument("--explain", action="store_true", help="the same; named in error messages")
    profile.set_defaults(run=_profile)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except EyasError as error:
        print(f"eyas: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
