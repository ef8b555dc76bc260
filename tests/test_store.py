"""The store without a server: what it promises to whoever writes, reads, is killed or meets altered bytes."""

import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from safetensors.torch import load_file

from eyas.errors import EyasError
from eyas.files import read_json
from eyas.store import Rows, Store, StoreWriter, content_hash
from eyas.target import Head
from eyas.verify import mend, verify

H, BOUNDARIES = 16, (1, 3, 4)
MANIFEST = {
    "target": {"name": "tiny", "fingerprint": "f", "rms_norm_eps": 1e-5, "hidden_size": H}, "boundaries": list(BOUNDARIES), "dtype": "bfloat16", "hidden_size": H,
    "prompts": {"hash": "p", "max_length": 64}, "tokenizer_hash": "t", "template_hash": "c",
}


def head() -> Head:
    return Head(torch.ones(H), torch.arange(5 * H).reshape(5, H).float(), 1e-5)


def rows(id: str, length: int = 7, split: str = "train") -> Rows:
    generator = torch.Generator().manual_seed(sum(id.encode()) + length)
    states = {b: torch.randn(length, H, generator=generator).bfloat16() for b in BOUNDARIES}
    return Rows(id, split, "chat", torch.arange(length) + len(id), torch.arange(length) >= 3, states)


def write(folder, ids, shard_bytes=1000) -> Store:
    writer = StoreWriter(folder, MANIFEST, head(), shard_bytes)
    for n, id in enumerate(ids):
        writer.add(rows(id, 5 + n))
    return writer.close()


def test_what_is_written_is_read_and_nothing_is_padded(tmp_path):
    ids = [f"s{n}" for n in range(9)]
    store = write(tmp_path / "store", ids)
    assert store.samples() == ids and store.boundaries == BOUNDARIES
    for n, id in enumerate(ids):
        want, read = rows(id, 5 + n), store.read(id)
        assert torch.equal(read["input_ids"], want.input_ids) and torch.equal(read["loss_mask"], want.loss_mask)
        assert all(torch.equal(read["states"][b], want.states[b]) for b in BOUNDARIES)
        assert list(store.read(id, (3,))["states"]) == [3]
    tokens = sum(5 + n for n in range(9))
    on_disk = sum(t.nbytes for path in (store.folder / "shards").iterdir() for t in load_file(path).values())
    assert on_disk == tokens * (len(BOUNDARIES) * H * 2 + 8 + 1)


def test_head_comes_with_the_store_and_gives_the_logits(tmp_path):
    stored = write(tmp_path / "store", ["a"]).head()
    x = torch.randn(3, H, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() @ torch.arange(5 * H).reshape(5, H).double().T
    torch.testing.assert_close(stored.logits(x).double(), expected, rtol=1e-5, atol=1e-4)


def test_shards_are_boundary_major(tmp_path):
    """A reader of one boundary reads one piece of the file: all rows of a boundary lie together."""
    store = write(tmp_path / "store", ["a", "b"], shard_bytes=10**9)
    (path,) = (store.folder / "shards").iterdir()
    block = torch.cat([rows("a", 5).states[3], rows("b", 6).states[3]]).view(torch.uint8).numpy().tobytes()
    assert block in path.read_bytes()


def test_another_manifest_is_refused_by_the_field_that_differs(tmp_path):
    write(tmp_path / "store", ["a"])
    other = MANIFEST | {"boundaries": [1, 2, 4], "prompts": MANIFEST["prompts"] | {"max_length": 32}}
    with pytest.raises(EyasError, match=r"boundaries .*prompts.max_length \(64, now 32\)"):
        StoreWriter(tmp_path / "store", other, head(), 1000)


def test_a_second_writer_is_refused_while_the_first_one_lives(tmp_path):
    first = StoreWriter(tmp_path / "store", MANIFEST, head(), 1000)
    with pytest.raises(EyasError, match="another process is writing"):
        StoreWriter(tmp_path / "store", MANIFEST, head(), 1000)
    first.close()
    StoreWriter(tmp_path / "store", MANIFEST, head(), 1000).close()


@pytest.mark.parametrize("name", ["no-store", "empty"])
def test_no_store_names_the_command(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(EyasError, match="python -m eyas extract"):
        Store.open(tmp_path / name)


def test_every_altered_byte_is_found_and_just_its_sample_marked(tmp_path):
    ids = [f"s{n}" for n in range(6)]
    store = write(tmp_path / "store", ids, shard_bytes=10**9)
    (path,) = (store.folder / "shards").iterdir()
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for position in range(0, header, 11):  # the header: no sample of the shard can be trusted
        altered = bytearray(whole)
        altered[position] ^= 4
        path.write_bytes(altered)
        assert set(verify(Store.open(store.folder)).damaged) == set(ids), position
    for position in [*range(header, len(whole), 97), len(whole) - 1]:
        for bit in (1, 128):
            altered = bytearray(whole)
            altered[position] ^= bit
            path.write_bytes(altered)
            assert len(verify(Store.open(store.folder)).damaged) == 1, position
    path.write_bytes(altered)
    store = Store.open(store.folder)
    report = verify(store)
    mend(store, report)
    (bad,) = report.damaged
    store = Store.open(store.folder)
    assert set(store.samples()) == set(ids) - {bad} and store.row(bad)["state"] == "failed"
    writer = StoreWriter(store.folder, MANIFEST, head(), 10**9)
    assert writer.extracted == set(ids) - {bad}
    writer.add(rows(bad, 5 + ids.index(bad)))
    store = writer.close()
    assert sorted(store.samples()) == ids and not verify(store).damaged


def test_an_altered_head_is_found(tmp_path):
    store = write(tmp_path / "store", ["a"])
    path = store.folder / "head.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert [name for name, ok, _ in verify(Store.open(store.folder)).checks if not ok and name == "head"]


@pytest.mark.parametrize("content", [b"", b"\x00" * 4, b"not a shard at all, but longer than eight bytes"])
def test_a_torn_shard_is_reported_and_does_not_stop_the_check(tmp_path, content):
    store = write(tmp_path / "store", ["a", "b"], shard_bytes=1)
    (store.folder / "shards" / store.row("a")["shard"]).write_bytes(content)
    report = verify(Store.open(store.folder))
    assert list(report.damaged) == ["a"] and "cannot be read" in report.damaged["a"]


def test_a_missing_shard_is_reported(tmp_path):
    store = write(tmp_path / "store", ["a", "b"], shard_bytes=1)
    (store.folder / "shards" / store.row("b")["shard"]).unlink()
    assert list(verify(Store.open(store.folder)).damaged) == ["b"]


def test_nan_is_reported_even_when_the_hash_agrees(tmp_path):
    writer = StoreWriter(tmp_path / "store", MANIFEST, head(), 10)
    bad = rows("bad")
    bad.states[3][2, 5] = float("nan")
    writer.add(bad)
    assert "NaN" in verify(writer.close()).damaged["bad"]


def test_content_hash_depends_on_every_part():
    a = rows("a")
    base = content_hash(a.input_ids, a.loss_mask, a.states)
    swapped = {1: a.states[3], 3: a.states[1], 4: a.states[4]}
    assert len({base, content_hash(a.input_ids + 1, a.loss_mask, a.states), content_hash(a.input_ids, ~a.loss_mask, a.states), content_hash(a.input_ids, a.loss_mask, swapped)}) == 4


def test_killed_at_any_moment_nothing_counted_is_lost_doubled_or_torn(tmp_path):
    """A writer that is killed again and again; each next one goes on, and every counted sample is whole."""
    code = textwrap.dedent("""
        import sys
        sys.path[:0] = [%r]
        from test_store import *
        writer = StoreWriter(sys.argv[1], MANIFEST, head(), 1500)
        for n in range(60):
            if f"s{n}" not in writer.extracted:
                writer.add(rows(f"s{n}", 5 + n))
        writer.close()
    """) % os.path.dirname(__file__)
    folder, kills = tmp_path / "store", 0
    for attempt in range(40):
        process = subprocess.Popen([sys.executable, "-c", code, str(folder)])
        index = folder / "index.parquet"
        before = index.stat().st_mtime_ns if index.is_file() else 0
        while process.poll() is None and (not index.is_file() or index.stat().st_mtime_ns == before):
            time.sleep(0.002)
        time.sleep(0.003 * (attempt % 5))
        if process.poll() is None:
            process.kill()
            kills += 1
        if process.wait() == 0:
            break
        store = Store.open(folder)
        assert not verify(store).damaged and len(store.samples()) == len(set(store.samples()))
    store = Store.open(folder)
    assert sorted(store.samples()) == sorted(f"s{n}" for n in range(60)) and not verify(store).damaged
    assert not list((folder / "shards").glob(".*")) and read_json(folder / "manifest.json")["boundaries"] == list(BOUNDARIES)
    assert kills >= 2
