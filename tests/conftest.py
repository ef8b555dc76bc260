"""What all tests share: the session's server, data folders that are thrown away, groups for xdist,
and a guard that keeps each tier to what its marks say.
"""

import os
import sys
from pathlib import Path

import pytest

AT_ONCE = "PYTEST_XDIST_WORKER" in os.environ  # another process of tests runs beside this one
os.environ.setdefault("OMP_NUM_THREADS", "1" if AT_ONCE else "2")
sys.path.insert(0, str(Path(__file__).parent))

# Files that take a minute or more, the longest first. They run after all others, so that a mistake
# in a fast test is seen early, and the longest start first, so that both processes end together.
LONG = ("notebooks", "docs", "server", "lab", "serving", "families", "parity", "served", "crashes")

# What a marked test may start, and how its command line is recognised.
STARTS = {"server": "sglang.launch_server", "kernel": "ipykernel_launcher"}
running: list[pytest.Item] = []  # the test that runs now


def pytest_collection_modifyitems(items):
    """Sort fast files to the front.

    Name the groups of tests that share a process (`--dist loadgroup`): a file each, and all tests
    of the session's server.
    """
    places = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, -1))
    for item in items:
        group = "session server" if "_server" in item.fixturenames else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    running.append(item)
    try:
        return (yield)
    finally:
        running.pop()


def refuse_unmarked_starts(event: str, arguments: tuple) -> None:
    """Raise if a test without the mark `server` or `kernel` starts one."""
    if event != "subprocess.Popen" or not running:
        return
    text = " ".join(map(os.fsdecode, arguments[1]))
    for mark, words in STARTS.items():
        if words in text and running[-1].get_closest_marker(mark) is None:
            raise RuntimeError(f"{running[-1].nodeid} starts a {mark}: mark it with {mark}")


sys.addaudithook(refuse_unmarked_starts)


@pytest.fixture(scope="session")
def embedded():
    """The embedded target, converted once into the ordinary data folder and kept there."""
    from eyas.models.target import load_target

    return load_target("embedded")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data folder of the test's own."""
    monkeypatch.setenv("EYAS_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture(scope="session")
def server_data(embedded, tmp_path_factory):
    """The data folder of the session's server; EYAS_DATA points at it while a test uses it."""
    return tmp_path_factory.mktemp("server") / "data"


@pytest.fixture(scope="session")
def _server(embedded, server_data):
    from eyas.config import Config
    from eyas.server.serve import server_up

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EYAS_DATA", str(server_data))
        config = Config.create(
            run_name="session",
            target=str(embedded.folder),
            context_tok=2048,
            max_total_tok=32768,
            threads=1,
        )
        server = server_up(config, tied=True)
    yield config, server
    server.down()


@pytest.fixture
def server(_server, server_data, monkeypatch):
    """(config, server):

    SmolLM2 in bfloat16 on the CPU platform. It captures boundaries 2, 15, 27 and 30, and starts
    once in a session.
    """
    monkeypatch.setenv("EYAS_DATA", str(server_data))
    return _server
