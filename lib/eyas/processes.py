"""End what a process started when that process is gone, however it ended.

A small watching process does this. Ray's processes notice the death of a driver by themselves, but
some need a minute, and what its workers started is not theirs.

    python -m eyas.processes PID [SPARED ...]    # watches process PID, whose child it must be

SPARED are children of PID that are not ended.
"""

import contextlib
import os
import subprocess
import sys
import time

import psutil

EVERY_S = 0.5  # between two looks at the process


def watch() -> subprocess.Popen:
    """Start a watching process for what this process starts from now on.

    End it with `kill` when all of that has ended well.
    """
    spared = [str(p.pid) for p in psutil.Process().children(recursive=True)]
    return subprocess.Popen(
        [sys.executable, "-m", "eyas.processes", str(os.getpid()), *spared],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal must not end it
    )


def still_running(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Return the processes that have not ended within `timeout_s` seconds.

    A zombie has ended: its parent may be gone, and whoever inherited it may collect it late.
    """
    end = time.monotonic() + timeout_s
    while True:
        left = []
        _, alive = psutil.wait_procs(processes, timeout=0)  # collects our own children
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)


def _main(driver: int, spared: set[int]) -> None:
    """Watch a process until it is gone, then kill what it and its children started."""
    seen: set[psutil.Process] = set()
    while os.getppid() == driver:
        with contextlib.suppress(psutil.Error):
            children = set(psutil.Process(driver).children(recursive=True))
            seen = {p for p in seen | children if p.pid not in spared and p.is_running()}
        time.sleep(EVERY_S)
    for process in list(seen):
        with contextlib.suppress(psutil.Error):
            seen |= set(process.children(recursive=True))
    for process in seen:
        with contextlib.suppress(psutil.Error):
            process.kill()  # psutil checks that the pid is still the same process


if __name__ == "__main__":
    _main(int(sys.argv[1]), {os.getpid(), *map(int, sys.argv[2:])})
