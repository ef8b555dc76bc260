"""Commands about reports: report, report index, report summary."""

import argparse
from pathlib import Path

from eyas.cli.options import add_command, config_of
from eyas.errors import EyasError

FOUR_HOURS_S = 4 * 3600.0


def declare_report(commands) -> None:
    parser = add_command(
        commands, "report", run_report, "run the notebooks and write the pages; or index, summary"
    )
    parser.add_argument(
        "--from",
        dest="start",
        metavar="NN",
        help="run this notebook, such as 04, and all after it, even those that are up to date",
    )
    parser.add_argument(
        "--all", action="store_true", help="run all notebooks, even those that are up to date"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where the pages go (default: reports/)"
    )
    parser.add_argument(
        "--cell-timeout-s",
        type=float,
        default=FOUR_HOURS_S,
        metavar="S",
        help="longest time of one cell, seconds (default: four hours)",
    )
    more = parser.add_subparsers(required=False, metavar="COMMAND", title="commands")
    index = add_command(
        more,
        "index",
        report_index,
        "write the index and the summaries of all reports again; no notebook runs",
        profile=False,
    )
    _add_reports_folder(index)
    summary = add_command(
        more,
        "summary",
        report_summary,
        "print one report as Markdown: answer, numbers with intervals, command, versions",
        profile=False,
    )
    summary.add_argument("run_name", metavar="RUN", help="a folder of the reports")
    _add_reports_folder(summary)


def _add_reports_folder(parser: argparse.ArgumentParser) -> None:
    """Add --out; without it the value that `report --out` has already set stays."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=argparse.SUPPRESS,
        help="where the reports are (default: reports/)",
    )


def run_report(args) -> int:
    from eyas.files import read_json
    from eyas.report import run

    notebooks = config_of(args).notebooks
    names = tuple(name for name in notebooks.split() if name >= (args.start or ""))
    if not names:
        raise EyasError(
            f"the profile runs no notebook from {args.start} on",
            f"a number among {notebooks}",
            f"python -m eyas report -p notebooks {args.start}",
        )
    folder = run.run_report(
        args.profile,
        dict(args.p or []),
        names,
        reports=args.out or run.REPORTS,
        cell_timeout_s=args.cell_timeout_s,
        again=args.all or bool(args.start),
    )
    record = read_json(folder / "run.json")
    text = f"{record['state']}: {folder.parent / 'index.html'}"
    if record["state"] == "interrupted":
        text += "; the same command resumes"
    print(text)
    return record["return_code"]


def report_index(args) -> int:
    from eyas.report import run

    print(run.write_index(args.out or run.REPORTS))
    return 0


def report_summary(args) -> int:
    from eyas.report import run, summary

    print(summary.markdown(run.read_report(args.run_name, args.out or run.REPORTS)), end="")
    return 0
