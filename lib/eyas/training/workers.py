"""Processes that share a step of training on one CPU.

They are copies of this process. Each does the same work on its part, in memory that all see.
Threads would wait for each other: an operator of a drafter takes a fraction of a millisecond, and
after each one a thread has to get Python's lock back.
"""

import contextlib
import ctypes
import mmap
import multiprocessing
import signal
import traceback
from multiprocessing.connection import Connection

import torch

from eyas.errors import EyasError

END_S = 10.0  # until a process that was told to end is killed


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on pages that this process shares with processes that start later.

    The pages are no file, and no limit of /dev/shm counts them.
    """
    pages = mmap.mmap(-1, tensor.nbytes)
    return (
        torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel())
        .view(tensor.shape)
        .copy_(tensor)
    )


@contextlib.contextmanager
def freed_memory_kept():
    """Let the C library keep the memory of freed tensors for new ones, in this block.

    It does not ask the system for new pages, which would have to be filled with zeros first. A step
    of training is a tenth faster. With another C library than glibc nothing changes.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        yield
        return
    trim_threshold, mmap_threshold, mmap_max = -1, -3, -4  # of malloc.h
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_max, 0)
    try:
        yield
    finally:  # what these grow to by themselves in a process with large tensors
        libc.mallopt(trim_threshold, 64 * 2**20)
        libc.mallopt(mmap_threshold, 32 * 2**20)
        libc.mallopt(mmap_max, 65536)
        libc.malloc_trim(0)


class Team:
    """`n` processes, this one included, that call the same methods of `member`.

    The others are copies of this one as it is now. Each has its number as `member.number`.
    """

    def __init__(self, member, n: int):
        self.member, self.others = member, []
        context = multiprocessing.get_context("fork")  # what is there already is not loaded again
        for number in range(1, n):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(
                    member,
                    number,
                    theirs,
                    [ours, *(connection for connection, _ in self.others)],
                ),
                name=f"train-{number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self.others.append((ours, process))

    def each(self, method: str, *args) -> list:
        """Call member.method(*args) in every process at once and return the results by number.

        An error in any process is raised here, once all have answered.
        """
        for connection, _ in self.others:
            # the answer of a process that ended will be missing
            with contextlib.suppress(ConnectionError):
                connection.send((method, args))
        found, error = [], None
        try:
            found.append(getattr(self.member, method)(*args))
        except Exception as ours:
            error = ours
        for connection, process in self.others:
            try:
                value, theirs = connection.recv()
            except (EOFError, ConnectionError):
                process.join(END_S)
                value, theirs = None, _ended(process.exitcode)
            found.append(value)
            error = error or theirs
        if error is not None:
            raise error
        return found

    def close(self) -> None:
        for connection, _ in self.others:
            connection.close()
        for _, process in self.others:
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join()


def _ended(code: int | None) -> EyasError:
    how = (
        "was killed, as the system does where memory ends"
        if code == -signal.SIGKILL
        else f"ended by itself (exit code {code})"
    )
    return EyasError(
        f"a process that shares the training {how}",
        "one for each of the threads",
        "the same command, which goes on at the last checkpoint; "
        "it needs less memory with -p threads 1 or a -p pass_tok",
    )


def _serve(member, number: int, connection: Connection, not_ours: list[Connection]) -> None:
    """Answer calls in another process until the first one has ended, however that happened."""
    for other in not_ours:
        other.close()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all; the first one ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    member.number = number
    while True:
        try:
            method, args = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = getattr(member, method)(*args), None
        except Exception as error:
            if not isinstance(error, (EyasError, MemoryError)):
                traceback.print_exc()
                error = RuntimeError(f"{type(error).__name__}: {error}")
            answer = None, error
        try:
            connection.send(answer)
        except ConnectionError:
            return
