"""The store without a server: what it promises to whoever writes, reads, is killed or meets altered
bytes.
"""

import errno
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

import eyas.files
from eyas.capture.verify import repair, verify
from eyas.errors import EyasError
from eyas.files import is_sealed, read_json, read_parquet, seal, write_safetensors
from eyas.models.target import Head
from eyas.store.reader import (
    Planned,
    Rows,
    Store,
    StoreDamaged,
    content_hash,
    from_fp8,
    lock_for_reading,
    read_index,
    to_fp8,
)
from eyas.store.summary import last_run, write_data_config
from eyas.store.writer import StoreWriter
from helpers.stores import write_store

H, BOUNDARIES = 16, (1, 3, 4)
MANIFEST = {
    "target": {"name": "tiny", "fingerprint": "f", "rms_norm_eps": 1e-5, "hidden_size": H},
    "boundaries": list(BOUNDARIES),
    "dtype": "bfloat16",
    "hidden_size": H,
    "prompts": {"hash": "p", "max_length": 64},
    "tokenizer_hash": "t",
    "template_hash": "c",
}


def head() -> Head:
    return Head(torch.ones(H), torch.arange(5 * H).reshape(5, H).float(), 1e-5)


def rows(id: str, length: int = 7, split: str = "train") -> Rows:
    generator = torch.Generator().manual_seed(sum(id.encode()) + length)
    states = {b: torch.randn(length, H, generator=generator).bfloat16() for b in BOUNDARIES}
    return Rows(
        id,
        split,
        "chat",
        torch.arange(length) + len(id),
        torch.arange(length) >= 3,
        states,
        topic=f"about {id}",
    )


def made(ids) -> list[Rows]:
    return [rows(id, 5 + n) for n, id in enumerate(ids)]


def write(folder, ids, shard_bytes=1000, **changes) -> Store:
    """With changes to the manifest."""
    store = write_store(folder, MANIFEST | changes, head(), made(ids), shard_bytes)
    write_data_config(store, {})
    return store


def everything(folder) -> dict[str, bytes]:
    """Every byte that an undisturbed run would leave; the report of a verification has a date and
    is left out.
    """
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in ("verification.json", "data_config.json")
    }


def test_what_is_written_is_read_and_nothing_is_padded(tmp_path):
    ids = [f"s{n}" for n in range(9)]
    store = write(tmp_path / "store", ids)
    assert store.samples() == ids and store.boundaries == BOUNDARIES
    for n, id in enumerate(ids):
        want, read = rows(id, 5 + n), store.read(id)
        assert torch.equal(read["input_ids"], want.input_ids) and torch.equal(
            read["loss_mask"], want.loss_mask
        )
        assert all(torch.equal(read["states"][b], want.states[b]) for b in BOUNDARIES)
        assert list(store.read(id, (3,))["states"]) == [3]
    assert list(store.index["topic"]) == [f"about {id}" for id in ids]
    tokens = sum(5 + n for n in range(9))
    on_disk = sum(
        t.nbytes for path in (store.folder / "shards").iterdir() for t in load_file(path).values()
    )
    assert on_disk == tokens * (len(BOUNDARIES) * H * 2 + 8 + 1) == tokens * store.token_bytes


def test_texts_are_those_of_read_and_each_shard_is_read_once(tmp_path, monkeypatch):
    ids = [f"s{n}" for n in range(9)]
    store, read = write(tmp_path / "run" / "store", ids, shard_bytes=1500), []
    monkeypatch.setattr(
        Store,
        "stored",
        lambda self, row, boundaries, stored=Store.stored: (
            read.append((row["shard"], boundaries)) or stored(self, row, boundaries)
        ),
    )
    asked = ["s8", "s2", "s0", "s8"]
    texts = list(store.texts(asked))
    assert sorted(id for id, *_ in texts) == sorted(asked)
    for id, input_ids, loss_mask in texts:
        want = rows(id, 5 + ids.index(id))
        assert (
            torch.equal(input_ids, want.input_ids)
            and torch.equal(loss_mask, want.loss_mask)
            and loss_mask.dtype == torch.bool
        )
    assert sorted(read) == sorted({(store.row(id)["shard"], ()) for id in asked}) and len(
        read
    ) == 2 < len(set(store.index["shard"]))
    assert list(store.texts([])) == []
    for path in (store.folder / "shards").iterdir():
        os.truncate(path, 300)
    store = Store.open(store.folder)
    for wrong, said in (
        ("s9", "not in the store"),
        ("s1", "holds sample 's1', cannot be read.*verify --repair -p run_name run"),
    ):
        with pytest.raises(EyasError, match=said):
            list(store.texts([wrong]))
    store.index.loc[1, "state"] = "failed"
    with pytest.raises(EyasError, match="'s1' was not extracted"):
        list(store.texts(["s0", "s1"]))


def test_a_file_is_what_safetensors_writes(tmp_path):
    tensors = {
        "b": torch.randn(5, 3).bfloat16(),
        "a": torch.arange(7),
        "c": torch.tensor([True, False]),
        "e": torch.zeros(0, 4),
        "f": torch.randn(3).to(torch.float8_e4m3fn),
    }
    pieces = {
        "b": [tensors["b"][:2], tensors["b"][2:2], tensors["b"][2:]],
        **{k: v for k, v in tensors.items() if k != "b"},
    }
    write_safetensors(tmp_path / "ours", pieces, {"x": "ä"})
    save_file(tensors, tmp_path / "theirs", {"x": "ä"})
    ours, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert {k: (t.dtype, t.shape) for k, t in ours.items()} == {
        k: (t.dtype, t.shape) for k, t in theirs.items()
    }
    assert all(torch.equal(ours[k].view(torch.uint8), theirs[k].view(torch.uint8)) for k in tensors)


def test_a_reader_of_some_boundaries_reads_only_their_bytes(tmp_path):
    """31 boundaries of 1 MiB in one shard; how much of the file this process has mapped in, as the
    kernel counts it, after reading three of them.
    """
    wide, length, hidden = tuple(range(31)), 512, 1024
    states = {b: torch.full((length, hidden), float(b)).bfloat16() for b in wide}
    sample = Rows(
        "s", "train", "chat", torch.arange(length), torch.ones(length, dtype=torch.bool), states
    )
    manifest = MANIFEST | {
        "boundaries": list(wide),
        "hidden_size": hidden,
        "target": MANIFEST["target"] | {"hidden_size": hidden},
    }
    write_store(tmp_path / "store", manifest, head(), [sample], 2**30)
    code = textwrap.dedent("""
        import re, sys
        from eyas.store.reader import Store
        store = Store.open(sys.argv[1])
        kept = store.read("s", (3, 15, 27))
        assert all((rows == b).all() for b, rows in kept["states"].items())
        maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read())
        print(sum(int(re.search(r"Rss: +([0-9]+) kB", m).group(1)) for m in maps if m and \
".safetensors" in m.splitlines()[0]))
    """)
    resident_kib = int(
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "store")],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    assert (
        3 * 1024 <= resident_kib < 6 * 1024
    )  # of 31 MiB; the kernel maps some pages around each one that is touched


def test_head_comes_with_the_store_and_gives_the_logits(tmp_path):
    stored = write(tmp_path / "store", ["a"]).head()
    x = torch.randn(3, H, dtype=torch.float64)
    expected = (
        x
        / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        @ torch.arange(5 * H).reshape(5, H).double().T
    )
    torch.testing.assert_close(stored.logits(x).double(), expected, rtol=1e-5, atol=1e-4)


def test_shards_are_boundary_major(tmp_path):
    """A reader of one boundary reads one piece of the file: all rows of a boundary lie together."""
    store = write(tmp_path / "store", ["a", "b"], shard_bytes=10**9)
    (path,) = (store.folder / "shards").iterdir()
    block = (
        torch.cat([rows("a", 5).states[3], rows("b", 6).states[3]])
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )
    assert block in path.read_bytes()


def test_opening_reads_no_states(tmp_path):
    store = write(tmp_path / "store", [f"s{n}" for n in range(9)])
    for path in (store.folder / "shards").iterdir():
        path.unlink()
    assert len(Store.open(store.folder).samples()) == 9


def test_another_manifest_is_refused_by_the_field_that_differs(tmp_path):
    write(tmp_path / "store", ["a"])
    other = MANIFEST | {
        "boundaries": [1, 2, 4],
        "prompts": MANIFEST["prompts"] | {"max_length": 32},
    }
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


def test_a_sample_of_another_length_than_planned_is_refused(tmp_path):
    writer = StoreWriter(tmp_path / "store", MANIFEST, head(), 1000)
    writer.plan([Planned("a", "train", "chat", 7)])
    with pytest.raises(ValueError, match="planned were 7"):
        writer.add(rows("a", 8))
    with pytest.raises(EyasError, match="has 9 tokens, the store planned 7"):
        writer.plan([Planned("a", "train", "chat", 9)])
    writer.close()


# --- fp8 ------------------------------------------------------------------------------------------


def test_fp8_has_a_scale_per_token_and_boundary(tmp_path):
    """A token 1,000 times as large beside the others costs them nothing; half an e4m3 step is 1/16
    of a value at most.
    """
    big = rows("a", 6)
    big.states[3][0] *= 1000
    store = write_store(tmp_path / "store", MANIFEST | {"dtype": "float8_e4m3fn"}, head(), [big])
    read = store.read("a")["states"]
    for b in BOUNDARIES:
        exact = big.states[b].double()
        error = (read[b].double() - exact).abs()
        assert read[b].dtype == torch.bfloat16
        assert (
            error
            <= exact.abs() / 16
            + exact.abs().amax(1, keepdim=True) * (2**-9 / 448 / 2)
            + exact.abs() * 2**-8
        ).all()
        relative = (error.norm(dim=1) / exact.norm(dim=1)).median()
        assert (
            store.row("a")[f"fp8_error_{b}"] == pytest.approx(float(relative), rel=1e-4)
            and 0.005 < relative < 0.05
        )
    stored = load_file(next((store.folder / "shards").iterdir()))
    assert stored["boundary_3"].dtype == torch.float8_e4m3fn and stored["scale_3"].shape == (6,)
    assert torch.equal(stored["scale_3"], big.states[3].float().abs().amax(1) / 448)
    assert verify(store.folder).damaged == {}


def test_fp8_of_zeros_is_zeros():
    assert torch.equal(from_fp8(*to_fp8(torch.zeros(2, 4))), torch.zeros(2, 4).bfloat16())


# --- altered, torn, missing, foreign --------------------------------------------------------------


def test_a_thousand_single_byte_changes_are_found_or_harmless(tmp_path, monkeypatch):
    """In every file of a store.

    Harmless ones leave every value of the store as it was: white space, unused bytes of Parquet.
    """
    monkeypatch.setattr(os, "fsync", lambda _: None)
    ids = [f"s{n}" for n in range(6)]
    folder = write(tmp_path / "store", ids, shard_bytes=500).folder
    values = {id: Store.open(folder).read(id) for id in ids}
    index = Store.open(folder).index
    files = [
        *sorted((folder / "shards").iterdir()),
        folder / "index.parquet",
        folder / "manifest.json",
        folder / "head.safetensors",
        folder / "data_config.json",
    ]
    chooser, harmless = random.Random(0), {path.name: 0 for path in files}
    found = 0
    for trial in range(1000):
        path = files[trial % len(files)]
        whole = path.read_bytes()
        altered = bytearray(whole)
        altered[chooser.randrange(len(whole))] ^= chooser.randrange(1, 256)
        path.write_bytes(altered)
        if verify(folder).ok:
            harmless[path.name] += 1
            assert path.suffix != ".safetensors", "a shard has no byte that does not count"
            store = Store.open(folder)
            assert (
                store.index.equals(index)
                and is_sealed(read_json(folder / "manifest.json"))
                and is_sealed(read_json(folder / "data_config.json"))
            )
            assert all(
                torch.equal(store.read(id)["states"][3], values[id]["states"][3]) for id in ids
            )
        else:
            found += 1
        path.write_bytes(whole)
    assert found + sum(harmless.values()) == 1000 and found > 600, harmless
    print("harmless:", harmless)


@pytest.mark.parametrize(
    "was, now", [(b'"U8"', b'"I8"'), (b'"I64"', b'"U64"'), (b'"F32"', b'"I32"')]
)
def test_a_letter_that_changes_the_type_of_a_tensor_is_found(tmp_path, was, now):
    folder = write(tmp_path / "store", ["a"], dtype="float8_e4m3fn").folder
    for path in (folder / "shards" / "000000.safetensors", folder / "head.safetensors"):
        whole = path.read_bytes()
        if was in whole:
            path.write_bytes(whole.replace(was, now))
            assert not verify(folder).ok
            path.write_bytes(whole)
    assert verify(folder).ok


def test_an_altered_byte_marks_just_its_sample_and_is_mended_to_the_same_bytes(tmp_path):
    ids = [f"s{n}" for n in range(6)]
    folder = write(tmp_path / "store", ids, shard_bytes=10**9).folder
    undisturbed = everything(folder)
    (path,) = (folder / "shards").iterdir()
    whole = path.read_bytes()
    for position in (len(whole) - 1, 8 + int.from_bytes(whole[:8], "little") + 3):
        altered = bytearray(whole)
        altered[position] ^= 128
        path.write_bytes(altered)
        report = verify(folder)
        (bad,) = report.damaged
        assert not report.ok and not read_json(folder / "verification.json")["ok"]
        assert repair(folder, report) == ["1 samples: marked, extract makes just these again"]
        store = Store.open(folder)
        assert set(store.samples()) == set(ids) - {bad} and store.row(bad)["state"] == "pending"
        writer = StoreWriter(folder, MANIFEST, head(), 10**9)
        assert writer.plan(
            [Planned(r.id, r.split, r.category, len(r.input_ids), r.topic) for r in made(ids)]
        ) == [bad]
        writer.add(rows(bad, 5 + ids.index(bad)))
        write_data_config(writer.close(), {})
        assert everything(folder) == undisturbed and verify(folder).ok


@pytest.mark.parametrize(
    "content", [None, b"", b"\x00" * 4, b"not a shard at all, but longer than eight bytes"]
)
def test_a_torn_or_missing_shard_is_reported_and_does_not_stop_the_check(tmp_path, content):
    store = write(tmp_path / "store", ["a", "b"], shard_bytes=1)
    path = store.folder / "shards" / store.row("a")["shard"]
    path.unlink() if content is None else path.write_bytes(content)
    for deep in (True, False):
        report = verify(store.folder, deep=deep)
        assert list(report.damaged) == ["a"] and "cannot be read" in report.damaged["a"]


def test_a_file_that_nobody_planned_is_named_and_removed(tmp_path):
    folder = write(tmp_path / "store", ["a"]).folder
    (folder / "shards" / "000007.safetensors").write_bytes(b"x")
    report = verify(folder)
    assert report.extra == ["000007.safetensors"] and not report.ok
    assert (
        repair(folder, report) == ["000007.safetensors: removed, nobody planned it"]
        and verify(folder).ok
    )


@pytest.mark.parametrize(
    "name, said",
    [
        ("manifest.json", "written again from the index"),
        ("index.parquet", "made again from the shards, 9 samples"),
    ],
)
def test_manifest_and_index_come_back_from_each_other(tmp_path, name, said):
    folder = write(tmp_path / "store", [f"s{n}" for n in range(9)]).folder
    undisturbed = everything(folder)
    os.truncate(folder / name, (folder / name).stat().st_size // 2)
    with pytest.raises(StoreDamaged, match="python -m eyas verify --repair"):
        Store.open(folder)
    report = verify(folder)
    assert not report.ok
    assert repair(folder, report) == [f"{name}: {said}"]
    assert everything(folder) == undisturbed and verify(folder).ok


@pytest.mark.parametrize(
    "name, said",
    [
        ("manifest.json", "written again from the index"),
        ("index.parquet", "made again from the shards, 9 samples"),
    ],
)
def test_a_deleted_manifest_or_index_is_damage_and_comes_back(tmp_path, name, said):
    """Not a store that is empty or not there: a writer would start it over, and repair would remove
    its shards as nobody's.
    """
    ids = [f"s{n}" for n in range(9)]
    folder = write(tmp_path / "store", ids).folder
    undisturbed = everything(folder)
    (folder / name).unlink()
    for begin in (lambda: Store.open(folder), lambda: StoreWriter(folder, MANIFEST, head(), 1000)):
        with pytest.raises(
            StoreDamaged, match=f"{name} .*missing, torn or altered.*python -m eyas verify --repair"
        ):
            begin()
    report = verify(folder)
    assert not report.ok and repair(folder, report) == [f"{name}: {said}"]
    assert everything(folder) == undisturbed and verify(folder).ok


def test_the_manifest_of_another_store_is_found(tmp_path):
    folder, other = (
        write(tmp_path / "store", ["a"]).folder,
        write(tmp_path / "other", ["a"], tokenizer_hash="another").folder,
    )
    (folder / "manifest.json").write_bytes((other / "manifest.json").read_bytes())
    assert not verify(folder, deep=False).ok
    with pytest.raises(StoreDamaged, match="not the one that index.parquet was written with"):
        repair(folder, verify(folder))


def mended(folder, ids, **options) -> None:
    """What `verify --repair` does, to the end."""
    for _ in range(3):
        report = verify(folder)
        if report.ok:
            return
        repair(folder, report)
        run(folder, ids, **options)
        write_data_config(Store.open(folder), {})
    assert verify(folder).ok


@pytest.mark.parametrize(
    "damage, same", [("byte", True), ("truncated", True), ("header", False), ("deleted", False)]
)
def test_index_and_a_shard_damaged_together_with_holes_in_others(tmp_path, damage, same):
    """What the header still says is taken from it, to the same bytes; samples of a shard of which
    nothing is left are planned after the others, under its number.
    """
    ids = [f"s{n}" for n in range(30)]
    run(tmp_path / "undisturbed", ids)
    folder = tmp_path / "store"
    run(folder, ids, skip={"s3": True, "s9": False})
    path = folder / "shards" / "000002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(
            {"byte": content, "truncated": content[:-100], "header": b"x" + content}[damage]
        )
    (folder / "index.parquet").write_bytes(b"")
    mended(folder, ids)
    store, whole = Store.open(folder), Store.open(tmp_path / "undisturbed")
    assert sorted(store.samples()) == sorted(ids)
    assert all(torch.equal(store.read(id)["states"][3], whole.read(id)["states"][3]) for id in ids)
    ours, theirs = everything(folder), everything(tmp_path / "undisturbed")
    assert {name for name in theirs if ours[name] != theirs[name]} == (
        set() if same else {"index.parquet"}
    )


def test_a_copy_of_a_shard_is_not_taken_for_another_one(tmp_path):
    folder = write(tmp_path / "store", ["a", "b"], shard_bytes=1).folder
    undisturbed = everything(folder)
    (folder / "shards" / "000000 copy.safetensors").write_bytes(
        undisturbed["shards/000000.safetensors"]
    )
    (folder / "shards" / "folder").mkdir()
    (folder / "index.parquet").unlink()
    mended(folder, ["a", "b"])
    assert everything(folder) == undisturbed


def test_a_shard_that_was_written_again_just_before_a_kill_is_no_damage(tmp_path):
    ids = [f"s{n}" for n in range(9)]
    folder = tmp_path / "store"
    run(folder, ids, skip={"s3": True})
    index = (folder / "index.parquet").read_bytes()
    run(folder, ids)
    undisturbed = everything(folder)
    (folder / "index.parquet").write_bytes(index)
    assert not verify(folder).damaged
    run(folder, ids)
    assert everything(folder) == undisturbed


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b'{"last_run": 1}'])
def test_a_lost_summary_is_found_and_made_again(tmp_path, content):
    folder = write(tmp_path / "store", ["a"]).folder
    path = folder / "data_config.json"
    path.unlink() if content is None else path.write_bytes(content)
    report = verify(folder)
    assert [name for name, ok, _ in report.checks if not ok] == ["data_config.json"]
    repair(folder, report)
    assert verify(folder).ok and last_run(folder) == {}


def test_nobody_verifies_what_is_being_written_and_nobody_writes_what_is_being_verified(tmp_path):
    folder = write(tmp_path / "store", ["a"]).folder
    writer = StoreWriter(folder, MANIFEST, head(), 1000)
    with pytest.raises(EyasError, match="another process is writing"):
        verify(folder)
    writer.close()
    with lock_for_reading(folder):
        assert verify(folder).ok
        with pytest.raises(EyasError, match="or verifying it"):
            StoreWriter(folder, MANIFEST, head(), 1000)


def test_what_came_between_verify_and_repair_is_not_removed(tmp_path):
    folder = write(tmp_path / "store", ["a"]).folder
    report = verify(folder)
    report.extra = ["000001.safetensors"]
    write(folder, ["a", "b"], shard_bytes=1)
    repair(folder, report)
    assert Store.open(folder).samples() == ["a", "b"] and verify(folder).ok


def test_a_store_on_a_read_only_disk_is_verified(tmp_path, monkeypatch):
    folder = write(tmp_path / "store", ["a"]).folder
    monkeypatch.setattr(
        eyas.files.tempfile,
        "mkstemp",
        lambda **_: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system")),
    )
    assert verify(folder).ok


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(
        eyas.store.reader.fcntl,
        "flock",
        lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks available")),
    )
    with pytest.raises(EyasError, match="can't be locked: No locks available.*EYAS_DATA"):
        StoreWriter(tmp_path / "store", MANIFEST, head(), 1000)


def test_a_reader_of_a_damaged_store_is_told_what_to_type(tmp_path):
    store = write(tmp_path / "store", ["a", "b"], shard_bytes=1)
    os.truncate(store.folder / "shards" / "000000.safetensors", 300)
    (store.folder / "shards" / "000001.safetensors").unlink()
    (store.folder / "head.safetensors").write_bytes(
        (store.folder / "head.safetensors").read_bytes()[:-1] + b"x"
    )
    for act in (lambda: store.read("a"), lambda: store.read("b"), store.head):
        with pytest.raises(EyasError, match="python -m eyas verify --repair"):
            act()


def test_states_of_another_shape_or_type_are_refused(tmp_path):
    writer = StoreWriter(tmp_path / "store", MANIFEST, head(), 1000)
    writer.plan([Planned("a", "train", "chat", 7)])
    for change in (
        lambda states: states[:, :-1],
        lambda states: states[1:],
        lambda states: states.float(),
    ):
        wrong = rows("a")
        wrong.states[3] = change(wrong.states[3])
        with pytest.raises(ValueError, match="boundary 3 of a is"):
            writer.add(wrong)
    writer.close()


def test_both_lost_is_said(tmp_path):
    folder = write(tmp_path / "store", ["a"]).folder
    for name in ("manifest.json", "index.parquet"):
        (folder / name).write_bytes(b"{}")
    with pytest.raises(EyasError, match="manifest.json and index.parquet are both torn"):
        repair(folder, verify(folder))


def test_an_altered_head_is_found_and_written_again(tmp_path):
    store = write(tmp_path / "store", ["a"])
    undisturbed = everything(store.folder)
    path = store.folder / "head.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    report = verify(store.folder)
    assert [name for name, ok, _ in report.checks if not ok] == ["head"]
    repair(store.folder, report)
    StoreWriter(store.folder, MANIFEST, head(), 1000).close()
    assert everything(store.folder) == undisturbed


def test_nan_is_reported_even_when_the_hash_agrees(tmp_path):
    bad = rows("bad")
    bad.states[3][2, 5] = float("nan")
    assert (
        "NaN"
        in verify(write_store(tmp_path / "store", MANIFEST, head(), [bad]).folder).damaged["bad"]
    )


def test_content_hash_depends_on_every_part():
    base = {
        "input_ids": torch.arange(3),
        "loss_mask": torch.tensor([0, 1, 1], dtype=torch.uint8),
        "boundary_1": torch.randn(3, 2),
        "boundary_3": torch.randn(3, 2),
    }
    others = [
        base | {"input_ids": base["input_ids"] + 1},
        base | {"loss_mask": 1 - base["loss_mask"]},
        base | {"boundary_1": base["boundary_3"], "boundary_3": base["boundary_1"]},
    ]
    assert len({content_hash(t) for t in (base, *others)}) == 4


def test_a_seal_breaks_with_any_value():
    sealed = seal({"a": 1, "b": {"c": [1, 2]}})
    assert (
        is_sealed(json.loads(json.dumps(sealed, indent=4)))
        and not is_sealed(sealed | {"a": 2})
        and not is_sealed({"a": 1})
    )


# --- killed, failed, out of disk: the same command again ends with the same bytes -----------------


def run(folder, ids, skip=(), shard_bytes=1500, stop_after=None, retry_failed=False) -> StoreWriter:
    """What extraction does with a writer; `skip` fail with "again", or for good when retry_failed
    is to find them.
    """
    samples = {r.id: r for r in made(ids)}
    writer = StoreWriter(folder, MANIFEST, head(), shard_bytes)
    try:
        for n, id in enumerate(
            writer.plan(
                [
                    Planned(r.id, r.split, r.category, len(r.input_ids), r.topic)
                    for r in samples.values()
                ],
                retry_failed,
            )
        ):
            if n == stop_after:
                break
            if id in skip:
                writer.fail(id, "not now", again=skip[id])
            else:
                writer.add(samples[id])
    finally:
        try:
            writer.flush()
        finally:
            writer.release()
    return writer


def test_failed_and_pending_samples_find_their_places_again(tmp_path):
    ids = [f"s{n}" for n in range(30)]
    run(tmp_path / "undisturbed", ids)
    folder = tmp_path / "disturbed"
    run(folder, ids, skip={"s3": True, "s9": False, "s29": True}, stop_after=30)
    store = Store.open(folder)
    assert (
        store.row("s3")["state"] == "pending"
        and store.row("s9")["state"] == "failed"
        and len(store.samples()) == 27
    )
    assert verify(folder).damaged == {}
    run(folder, ids)
    assert set(ids) - set(Store.open(folder).samples()) == {"s9"}
    run(folder, ids, retry_failed=True)
    assert everything(folder) == everything(tmp_path / "undisturbed")


def test_stopped_anywhere_or_asked_for_more_later(tmp_path):
    ids = [f"s{n}" for n in range(30)]
    run(tmp_path / "undisturbed", ids)
    for stop in (0, 1, 7, 13):
        folder = tmp_path / f"stopped-{stop}"
        run(folder, ids, stop_after=stop)
        assert len(Store.open(folder).samples()) == stop and verify(folder).damaged == {}
        run(folder, ids)
        assert everything(folder) == everything(tmp_path / "undisturbed")
    before = everything(tmp_path / "undisturbed")
    run(tmp_path / "undisturbed", ids + ["more1", "more2"])
    after = everything(tmp_path / "undisturbed")
    assert {name for name in before if before[name] != after[name]} == {"index.parquet"}
    assert Store.open(tmp_path / "undisturbed").samples() == ids + ["more1", "more2"]


@pytest.mark.parametrize("what", ["shards", "index.parquet"])
def test_a_full_disk_stops_the_writer_and_costs_nothing(tmp_path, monkeypatch, what):
    """ENOSPC at each write of a shard, or of the index, in turn."""
    ids = [f"s{n}" for n in range(20)]
    run(tmp_path / "undisturbed", ids, shard_bytes=4000)
    replace = os.replace
    for survived in range(4):
        folder, left = tmp_path / f"{what}-{survived}", [survived]

        def full(source, target, left=left):
            if what in str(target):
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
            replace(source, target)

        monkeypatch.setattr(eyas.files.os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            run(folder, ids, shard_bytes=4000)
        monkeypatch.setattr(eyas.files.os, "replace", replace)
        assert not list(folder.rglob(".*.tmp"))
        if (folder / "manifest.json").is_file():
            assert verify(folder).damaged == {}
        run(folder, ids, shard_bytes=4000)
        assert everything(folder) == everything(tmp_path / "undisturbed")


def test_killed_at_any_moment_the_store_ends_byte_for_byte_the_same(tmp_path):
    """A writer that is killed again and again; each next one goes on, every counted sample is
    whole, and the end is that of an undisturbed run.
    """
    ids, folder, kills = [f"s{n}" for n in range(60)], tmp_path / "store", 0
    for attempt in range(60):
        child = os.fork()
        if not child:
            try:
                run(folder, ids)
            finally:  # never back into pytest
                os._exit(0)
        time.sleep(0.001 * attempt)
        os.kill(child, signal.SIGKILL)
        kills += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        if (folder / "index.parquet").is_file():
            store = Store.open(folder)
            assert not verify(folder).damaged and len(store.samples()) == len(set(store.samples()))
    run(folder, ids)
    run(tmp_path / "undisturbed", ids)
    assert everything(folder) == everything(tmp_path / "undisturbed")
    assert not [path for path in folder.rglob(".*") if path.name != ".lock"] and kills >= 2


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    folder = write(tmp_path / "store", ["a"]).folder
    for leftover in (
        folder / ".index.parquet.x.tmp",
        folder / "shards" / ".tmpAb3",
        folder / "shards" / ".000001.safetensors.y.tmp",
    ):
        leftover.write_bytes(b"half")
    (folder / ".ipynb_checkpoints").mkdir()
    StoreWriter(folder, MANIFEST, head(), 1000).close()
    assert sorted(p.name for p in folder.rglob(".*")) == [".ipynb_checkpoints", ".lock"]


@pytest.mark.parametrize(
    "older, sealed", [("eyas-store-1", lambda manifest: manifest), ("eyas-store-2", seal)]
)
def test_an_older_format_is_refused_by_its_name(tmp_path, older, sealed):
    folder = write(tmp_path / "store", ["a"]).folder
    (folder / "manifest.json").write_text(json.dumps(sealed({"format": older, "boundaries": [1]})))
    for act in (Store.open, verify):
        with pytest.raises(EyasError, match=f"the store's format is '{older}'"):
            act(folder)
    with pytest.raises(EyasError, match=f"format \\({older}, now eyas-store-3\\)"):
        StoreWriter(folder, MANIFEST, head(), 1000)


def test_the_index_is_plain_parquet(tmp_path):
    table = pq.read_table(write(tmp_path / "store", ["a", "b"]).folder / "index.parquet")
    assert table.column("id").to_pylist() == ["a", "b"] and re.fullmatch(
        "[0-9a-f]{32}", table.column("content_hash")[0].as_py()
    )


def test_an_index_that_is_replaced_meanwhile_is_read_whole(tmp_path):
    """As an extraction does it, every few seconds.

    Given the path, pyarrow opens it twice, which met both files (some reads in a hundred here).
    """
    folder = write(tmp_path / "store", ["a", "b"]).folder
    index, ended = folder / "index.parquet", threading.Event()
    versions = [
        index.read_bytes(),
        (
            write(tmp_path / "longer", [f"another-{n}" for n in range(40)]).folder / "index.parquet"
        ).read_bytes(),
    ]

    def replace():
        for n in itertools.count():
            (tmp_path / "next").write_bytes(versions[n % 2])
            os.replace(tmp_path / "next", index)
            if ended.is_set():
                return

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        lengths = {
            len(frame) for _ in range(300) for frame in (read_index(folder)[0], read_parquet(index))
        }
    finally:
        ended.set()
        writer.join()
    assert lengths <= {2, 40}
