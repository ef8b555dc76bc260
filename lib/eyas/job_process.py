"""The process of one background job: run a command and write `end.json` when it ends. `python -m eyas.job_process FOLDER COMMAND ...`"""

import signal
import sys
import traceback
from pathlib import Path

from eyas import progress
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.jobs import INTERRUPTED, now


def _main(folder: Path, arguments: list[str]) -> int:
    """Inside the job."""
    from eyas.cli import build_parser

    def interrupt(*_):
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # once is enough: what follows puts things in order
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell that starts one in the background has it ignored
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
        if (
            isinstance(error, KeyboardInterrupt) or error.code == signal.SIGTERM
        ):  # which is what Ray's own handler raises
            print("eyas: stopped", file=sys.stderr)
            end = {"state": "stopped", "code": INTERRUPTED}
    except BaseException:
        traceback.print_exc()
    write_json(folder / "end.json", end | {"ended": now()})
    return end["code"]


if __name__ == "__main__":
    raise SystemExit(_main(Path(sys.argv[1]), sys.argv[2:]))
