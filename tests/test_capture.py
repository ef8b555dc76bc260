"""The capture plugin's spool without a server: what the scheduler hands over is written by another
thread, and never more than the quota waits.
"""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from eyas_capture import hooks
from eyas_capture.hooks import Capture, Spool, drafter_state


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_file_is_complete_when_it_is_seen(tmp_path):
    spool, rows = (
        Spool(tmp_path / "spool", 10**9),
        {"boundary_1": torch.randn(5000, 64).bfloat16(), "input_ids": torch.arange(5000)},
    )
    paths = [spool.put(f"n{n}", rows) for n in range(10)]
    for path in paths:
        wait_for(path.exists)
        found = load_file(path)
        assert torch.equal(found["boundary_1"], rows["boundary_1"]) and torch.equal(
            found["input_ids"], rows["input_ids"]
        )
    wait_for(lambda: spool.queued_bytes == 0)
    assert spool.written == 10 and sorted(p.name for p in spool.folder.iterdir()) == sorted(
        p.name for p in paths
    )


def test_a_disk_that_hangs_does_not_hold_the_scheduler_and_the_quota_holds(tmp_path, monkeypatch):
    """Three requests of 100 tokens at a quota of two and a half: the third is told to come again,
    at once, and gets in when a client has taken a file.
    """
    disk = threading.Event()
    write = Spool._write
    monkeypatch.setattr(Spool, "_write", lambda *args: disk.wait(20) and write(*args))
    one = 100 * (2 * 64 * 2 + 8)
    capture = Capture.__new__(Capture)
    capture.spool, capture.boundaries, capture.captured, capture.failed = (
        Spool(tmp_path / "spool", int(2.5 * one)),
        (1, 2),
        0,
        0,
    )
    capture.rows = {b: torch.randn(300, 64).bfloat16() for b in (1, 2)}
    request = SimpleNamespace(origin_input_ids=list(range(100)))
    first, second = (
        capture.hand_over(name, lambda: capture.whole(request, start, 100))
        for name, start in (("a", 0), ("b", 100))
    )
    assert "path" in first and "path" in second and not list(capture.spool.folder.iterdir())
    refused = capture.hand_over("c", lambda: capture.whole(request, 200, 100))
    assert refused["again"] is True and "spool is full" in refused["error"]
    disk.set()
    wait_for(lambda: len(list(capture.spool.folder.glob("*.safetensors"))) == 2)
    assert capture.hand_over("c", lambda: capture.whole(request, 200, 100)).get(
        "again"
    )  # nobody has taken one yet
    (tmp_path / "spool" / "a.safetensors").unlink()
    wait_for(lambda: "path" in capture.hand_over("c", lambda: capture.whole(request, 200, 100)))
    wait_for((tmp_path / "spool" / "c.safetensors").exists)
    assert torch.equal(
        load_file(tmp_path / "spool" / "c.safetensors")["boundary_2"], capture.rows[2][200:]
    )


def test_a_server_that_drafts_without_a_model_is_no_error():
    """SGLang's n-gram worker says None where an EAGLE worker has its drafter."""
    assert drafter_state(SimpleNamespace(draft_worker=None)) is None
    assert drafter_state(SimpleNamespace(draft_worker=SimpleNamespace(draft_worker=None))) is None


def test_a_request_larger_than_the_quota_is_refused_for_good(tmp_path):
    capture = Capture.__new__(Capture)
    capture.spool, capture.boundaries, capture.captured, capture.failed = (
        Spool(tmp_path / "spool", 1000),
        (1,),
        0,
        0,
    )
    capture.rows = {1: torch.randn(100, 64).bfloat16()}
    refused = capture.hand_over(
        "a", lambda: capture.whole(SimpleNamespace(origin_input_ids=list(range(100))), 0, 100)
    )
    assert "more than the spool's quota of 1,000" in refused["error"] and not refused["again"]


def test_a_file_that_cannot_be_written_has_its_reason(tmp_path):
    spool = Spool(tmp_path / "spool", 10**9)
    spool.folder.rmdir()
    (tmp_path / "spool").write_text("not a folder any more")
    spool.put("lost", {"input_ids": torch.arange(3)})
    wait_for(lambda: "lost" in spool.failures)
    assert "Not a directory" in spool.failures["lost"] and spool.written == 0
    (tmp_path / "spool").unlink()
    spool.folder.mkdir()
    path = spool.put("found", {"input_ids": torch.arange(3)})  # the thread goes on
    wait_for(path.exists)


@pytest.mark.parametrize(
    "rows, said", [(99, "99 rows for 100 prompt tokens"), (101, "101 rows for 100")]
)
def test_missing_or_merged_rows_are_refused(tmp_path, rows, said):
    capture = Capture.__new__(Capture)
    capture.spool, capture.boundaries, capture.captured, capture.failed = (
        Spool(tmp_path / "spool", 10**9),
        (1,),
        0,
        0,
    )
    capture.rows = {1: torch.randn(200, 8)}
    assert (
        said
        in capture.hand_over(
            "a", lambda: capture.whole(SimpleNamespace(origin_input_ids=list(range(100))), 0, rows)
        )["error"]
    )


class Block(torch.nn.Module):
    """A decoder block as the hooks see one: its stage boundary sums and hands out rows."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.attn_boundary = SimpleNamespace(capture_output=self.capture_output)

    def capture_output(self, hidden_states, forward_batch):
        self.calls += 1
        return hidden_states, hidden_states.clone()

    def forward(self, hidden_states, forward_batch):
        return hidden_states + 1


class Norm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, hidden, residual):
        return hidden + residual


@pytest.mark.parametrize("writes", [True, False])
def test_a_rank_that_does_not_write_takes_part_and_keeps_no_rows(tmp_path, monkeypatch, writes):
    """Under tensor parallelism one rank writes. The others join the sum and hold nothing."""
    monkeypatch.setattr(hooks, "_is_writer", lambda: writes)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Block(), Block(), Block()])
    model.norm = Norm(4)
    capture = Capture(model, [1, 2, 3], Spool(tmp_path / "spool", 10**6))
    capture.armed = True
    hidden = torch.zeros(5, 4)
    for block in model.layers:
        hidden = block(hidden, forward_batch=None)
    model.norm(hidden, hidden)
    assert [block.calls for block in model.layers] == [0, 1, 1], "every rank takes part"
    kept = {b: rows[0, 0].item() for b, rows in capture.rows.items()}
    assert kept == ({1: 1.0, 2: 2.0, 3: 6.0} if writes else {})
