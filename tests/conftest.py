"""Shared by all tests: one real server for each process of tests, one data folder that is thrown away."""

import os
import sys
from pathlib import Path

import pytest

AT_ONCE = "PYTEST_XDIST_WORKER" in os.environ  # beside another process of tests, as in `make test`
os.environ.setdefault("OMP_NUM_THREADS", "1" if AT_ONCE else "2")
sys.path.insert(0, str(Path(__file__).parent))
LAST = (
    "crashes",
    "sweep",
    "tune",
    "served",
    "lab",
    "parity",
    "families",
    "serving",
    "server",
    "docs",
    "notebooks",
)  # minutes each; the longest begin first


def pytest_collection_modifyitems(items):
    """Fast files first."""
    places = {f"test_{name}": -place for place, name in enumerate(LAST)}
    items.sort(key=lambda item: places.get(item.path.stem, -len(LAST)))


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
    """(config, server): SmolLM2 in bf16 on the CPU platform, capturing boundaries 2, 15, 27 and 30. Started once."""
    monkeypatch.setenv("EYAS_DATA", str(server_data))
    return _server
