"""Nobody outlives its driver: a small process that ends what another one started when that one is gone, however it went.

Ray's processes notice the death of a driver by themselves, but some of them take a minute over it, and what its workers started is not theirs.
    python -m eyas.processes PID [SPARED ...]        # a child of process PID; SPARED: children of PID that are not to be ended
"""

import contextlib
import os
import subprocess
import sys
import time

import psutil

EVERY_S = 0.5


def watch() -> subprocess.Popen:
    """Start one for this process and whatever it starts from now on; end it with `kill` when all of that has ended well."""
    spared = [str(p.pid) for p in psutil.Process().children(recursive=True)]
    return subprocess.Popen(
        [sys.executable, "-m", "eyas.processes", str(os.getpid()), *spared],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # a Ctrl-C in the terminal is not for it


def still_running(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that have not ended within that time. A zombie has ended: its own parent may be gone, and who inherited it may collect it late."""
    end = time.monotonic() + timeout_s
    while True:
        left = []
        for process in psutil.wait_procs(processes, timeout=0)[
            1
        ]:  # our own children are collected here
            with contextlib.suppress(psutil.NoSuchProcess):
                left += [process] * (process.status() != psutil.STATUS_ZOMBIE)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)


def _main(driver: int, spared: set[int]) -> None:
    seen: set[psutil.Process] = set()
    while os.getppid() == driver:
        with contextlib.suppress(psutil.Error):
            seen = {
                p
                for p in seen | set(psutil.Process(driver).children(recursive=True))
                if p.pid not in spared and p.is_running()
            }
        time.sleep(EVERY_S)
    for process in list(seen):
        with contextlib.suppress(psutil.Error):
            seen |= set(process.children(recursive=True))
    for process in seen:
        with contextlib.suppress(psutil.Error):
            process.kill()  # psutil makes sure that it is the same process still


if __name__ == "__main__":
    _main(int(sys.argv[1]), {os.getpid(), *map(int, sys.argv[2:])})
