"""Shared by all tests: one real server for the whole session, one data folder that is thrown away."""

import os
import sys
from pathlib import Path

import pytest

AT_ONCE = "PYTEST_XDIST_WORKER" in os.environ  # beside another process of tests, as in `make test`
os.environ.setdefault("OMP_NUM_THREADS", "1" if AT_ONCE else "2")
sys.path.insert(0, str(Path(__file__).parent))
LAST = ("test_crashes", "test_docs", "test_sweep", "test_parity", "test_lab", "test_families", "test_served", "test_tune", "test_serving", "test_notebooks", "server")  # minutes; the longest begin first


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Fast files first. Beside each other run files, not tests, which share what their file made; those that want the session's server stay together, so there is one."""
    def group(item):
        return "server" if "_server" in item.fixturenames else item.path.stem

    items.sort(key=lambda item: -LAST.index(group(item)) if group(item) in LAST else -len(LAST))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))


@pytest.fixture(scope="session")
def embedded():
    """The embedded target, converted once into the ordinary data folder and kept there."""
    from eyas.target import load_target

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
    from eyas.serve import server_up

    before = os.environ.get("EYAS_DATA")
    os.environ["EYAS_DATA"] = str(server_data)
    config = Config.create(run_name="session", target=str(embedded.folder), context_tok=2048, max_total_tok=32768, threads=1)
    server = server_up(config, tied=True)
    if before is None:
        del os.environ["EYAS_DATA"]
    else:
        os.environ["EYAS_DATA"] = before
    yield config, server
    server.down()


@pytest.fixture
def server(_server, server_data, monkeypatch):
    """(config, server): SmolLM2 in bf16 on the CPU platform, capturing boundaries 2, 15, 27 and 30. Started once."""
    monkeypatch.setenv("EYAS_DATA", str(server_data))
    return _server
