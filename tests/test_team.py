"""Processes that share a step: memory in common, errors of any of them in the first, and an end
with it, however it ends.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import eyas.training.workers
from eyas.errors import EyasError
from eyas.training.workers import Team, shared


class Member:
    def __init__(self):
        self.number, self.seen = 0, shared(torch.zeros(3))

    def note(self, value: float) -> int:
        self.seen[self.number] = value + self.number
        return os.getpid()

    def fail(self, where: int, error: str) -> int:
        if self.number == where:
            if error == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if error == "exit":
                os._exit(3)
            raise {
                "eyas": EyasError("found", "expected", "next"),
                "memory": MemoryError("no more"),
                "other": ValueError("odd"),
            }[error]
        return self.number


@pytest.fixture
def team():
    team = Team(Member(), 3)
    yield team
    team.close()


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def wait_for(true, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def test_all_work_at_once_on_memory_in_common(team):
    pids = team.each("note", 5.0)
    assert pids[0] == os.getpid() and len(set(pids)) == 3
    assert team.member.seen.tolist() == [5.0, 6.0, 7.0]
    team.member.seen += 1.0
    assert team.each("fail", 9, "other") == [0, 1, 2]
    team.close()
    assert all(gone(pid) for pid in pids[1:])


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize(
    "error, kind, text",
    [
        ("eyas", EyasError, "found; expected expected; next: next"),
        ("memory", MemoryError, "no more"),
        ("other", (ValueError, RuntimeError), "odd"),
    ],
)
def test_an_error_of_any_is_raised_and_the_next_call_works(team, where, error, kind, text):
    with pytest.raises(kind, match=text):
        team.each("fail", where, error)
    assert team.each("fail", 9, error) == [0, 1, 2]


@pytest.mark.parametrize(
    "error, text",
    [
        ("killed", "training was killed, as the system does where memory ends; .*-p threads 1"),
        ("exit", r"ended by itself \(exit code 3\).*; next: the same command"),
    ],
)
def test_a_process_that_is_gone_is_said(team, error, text):
    for _ in range(2):
        with pytest.raises(EyasError, match=text):
            team.each("fail", 2, error)


def test_shared_memory_keeps_value_shape_and_dtype():
    for tensor in (
        torch.randn(3, 5),
        torch.zeros((), dtype=torch.float64),
        torch.arange(6).reshape(2, 3).T,
        torch.randn(7).bfloat16(),
    ):
        copy = shared(tensor)
        assert (
            copy.dtype == tensor.dtype and copy.shape == tensor.shape and torch.equal(copy, tensor)
        )


FAULTS = """
import resource, torch
from eyas.training.workers import freed_memory_kept

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(16 * 2**20)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with freed_memory_kept():
    faults()
    print(faults())
print(faults())
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc, whose allocator this is about"
)
def test_freed_memory_is_kept_inside_and_given_back_behind():
    environment = {**os.environ, "PYTHONPATH": str(Path(eyas.__file__).parents[1])}
    inside, behind = map(
        int,
        subprocess.run(
            [sys.executable, "-c", FAULTS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split(),
    )
    assert inside < 0.1 * behind, "page faults of ten large tensors"


FIRST = """
import os, time
from test_team import Member
from eyas.training.workers import Team

team = Team(Member(), 3)
print(*team.each("note", 0.0), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_first(how):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(Path(eyas.__file__).parents[1]), str(Path(__file__).parent)]
        ),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    try:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3 and pids[0] == process.pid and not any(gone(pid) for pid in pids)
        process.send_signal(how)
        process.wait(30)
        assert wait_for(lambda: all(gone(pid) for pid in pids))
    finally:
        process.kill()
        process.wait()


def test_interrupted_from_the_keyboard_the_first_alone_says_so():
    """Ctrl-C reaches the whole group; one traceback counts, and others would bury it."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(Path(eyas.__file__).parents[1]), str(Path(__file__).parent)]
        ),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1].count("Traceback") == 1
