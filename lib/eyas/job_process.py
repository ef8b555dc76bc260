"""The process of one background job: it runs a command and writes `end.json` when it ends.

python -m eyas.job_process FOLDER COMMAND ...
"""

import signal
import sys
import traceback
from pathlib import Path

from eyas import progress
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.jobs import INTERRUPTED, now


def _main(folder: Path, arguments: list[str]) -> int:
    """Run the command inside the job, write `end.json`, and return the exit code."""
    from eyas.cli import build_parser

    signal.signal(signal.SIGTERM, _interrupt)
    # A shell that starts a process in the background has this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    progress.job_folder = folder
    end = {"state": "failed", "code": 1}
    try:
        args = build_parser().parse_args(arguments)
        end = {"state": "done", "code": args.run(args)}
    except EyasError as error:
        print(f"eyas: {error}", file=sys.stderr)
        end = {
            "state": "failed",
            "code": 2,
            "found": error.found,
            "expected": error.expected,
            "next_command": error.next_command,
        }
    except (KeyboardInterrupt, SystemExit) as error:
        terminated = isinstance(error, SystemExit) and error.code == signal.SIGTERM  # Ray's handler
        if isinstance(error, KeyboardInterrupt) or terminated:
            print("eyas: stopped", file=sys.stderr)
            end = {"state": "stopped", "code": INTERRUPTED}
    except BaseException:
        traceback.print_exc()
    write_json(folder / "end.json", end | {"ended": now()})
    return end["code"]


def _interrupt(*_) -> None:
    """Turn SIGTERM into what Ctrl-C does; a second one must not disturb the clean-up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(_main(Path(sys.argv[1]), sys.argv[2:]))
