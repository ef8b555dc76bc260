"""Other projects' files against Hugging Face's own states, against `datasets`, and, where they are
installed, against their own readers.
"""

import gzip
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.capture.verify import verify
from eyas.cli import main
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import read_json, write_json
from eyas.models.target import Head, load_target
from eyas.store.formats.common import POST, PRE, Sample
from eyas.store.formats.exporting import export_store
from eyas.store.formats.importing import import_store
from eyas.store.formats.known import FORMATS
from eyas.store.formats.norm_check import check_norm
from eyas.store.reader import Rows, Store
from eyas.store.writer import StoreWriter
from eyas.training.trainer import train
from helpers.peer import peer
from helpers.stores import write_store
from helpers.tiny import make_tiny_target

N, BOUNDARIES, N_SAMPLES = 4, (1, 2, 3), 25
each_format = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny", n_blocks=N))
    )


@pytest.fixture(scope="module")
def model(target):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def samples(model, target) -> list[Rows]:
    """What Hugging Face's model computes: boundaries 1, 2, 3 from its hidden states, N as the last
    block gives it, before the norm.
    """
    rows, last, g = [], [], torch.Generator().manual_seed(0)
    hook = model.model.layers[-1].register_forward_hook(
        lambda module, args, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    for i in range(N_SAMPLES):
        length = int(torch.randint(5, 40, (1,), generator=g))
        ids = torch.randint(3, target.vocab_size, (length,), generator=g)
        with torch.no_grad():
            states = model.model(ids[None], output_hidden_states=True).hidden_states
        states = {b: states[b][0] for b in BOUNDARIES} | {N: last[-1].reshape(length, -1)}
        rows.append(
            Rows(
                f"s{i}",
                "heldout" if i % 6 == 5 else "train",
                "chat",
                ids,
                torch.arange(length) >= 2,
                states,
            )
        )
    hook.remove()
    return rows


@pytest.fixture(scope="module")
def store(target, samples, tmp_path_factory):
    manifest = {
        "target": {
            "name": "tiny",
            "fingerprint": target.fingerprint,
            "rms_norm_eps": target.rms_norm_eps,
        },
        "engine": {"name": "sglang", "version": "0.5.23"},
        "boundaries": [*BOUNDARIES, N],
        "dtype": "bfloat16",
        "hidden_size": target.hidden_size,
        "prompts": {"hash": "p", "max_length": 64, "seed": 0},
    }
    return write_store(
        tmp_path_factory.mktemp("run") / "store",
        manifest,
        target.head(),
        samples,
        shard_bytes=2**14,
    )


@pytest.fixture(scope="module")
def exported(store, tmp_path_factory) -> dict[str, Path]:
    """The store in each format. Tests that alter files copy them first."""
    folders = {name: tmp_path_factory.mktemp("out") / name for name in FORMATS}
    for name, folder in folders.items():
        export_store(store, name, folder, BOUNDARIES)
    return folders


@pytest.fixture
def files(exported, tmp_path) -> dict[str, Path]:
    return {
        name: Path(shutil.copytree(folder, tmp_path / "files" / name))
        for name, folder in exported.items()
    }


def config_for(target, **values) -> Config:
    return Config.create(
        **{
            "run_name": "imported",
            "target": str(target.folder),
            "boundaries": BOUNDARIES,
            "threads": 1,
            **values,
        }
    )


def tensors_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return {path in the folder: every tensor of that file, as torch and safetensors read it}."""
    found = {}
    for path in sorted(
        p for p in folder.rglob("*") if p.suffix in (".pt", ".ckpt", ".safetensors")
    ):
        content = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, weights_only=True)
        )
        flat = {}
        for key, value in content.items():
            flat |= (
                {f"{key}.{i}": t for i, t in enumerate(value)}
                if isinstance(value, list)
                else {key: value}
            )
        found[str(path.relative_to(folder))] = flat
    return found


def assert_same_files(a: Path, b: Path) -> None:
    a, b = tensors_of(a), tensors_of(b)
    assert list(a) == list(b) and len(a) > 0
    for path in a:
        assert list(a[path]) == list(b[path])
        for key, tensor in a[path].items():
            assert tensor.dtype == b[path][key].dtype and torch.equal(tensor, b[path][key]), (
                path,
                key,
            )


def normed64(states: torch.Tensor, target) -> torch.Tensor:
    """The final norm in float64."""
    x, weight = states.double(), target.tensor("model.norm.weight").double()
    return x / (x.square().mean(-1, keepdim=True) + target.rms_norm_eps).sqrt() * weight


# ---- out


def test_speculators_v1_files(exported, samples, target):
    folder = exported["speculators-v1"]
    assert sorted(os.listdir(folder)) == sorted(
        [f"data_{i}.pt" for i in range(N_SAMPLES)] + ["data_config.json", "sample_lengths.json"]
    )
    for i, sample in enumerate(samples):
        found = torch.load(folder / f"data_{i}.pt", weights_only=True)
        assert torch.equal(found["input_ids"], sample.input_ids) and torch.equal(
            found["loss_mask"], sample.loss_mask.long()
        )
        assert len(found["hidden_states"]) == 4 and all(
            torch.equal(a, b) for a, b in zip(found["hidden_states"], sample.states.values())
        )
        assert {t.dtype for t in found["hidden_states"]} == {torch.bfloat16}
    assert read_json(folder / "sample_lengths.json") == {
        str(i): len(s.input_ids) for i, s in enumerate(samples)
    }
    config = read_json(folder / "data_config.json")
    assert config["version"] == "2.0" and config["hidden_states"]["layer_ids"] == [
        0,
        1,
        2,
        3,
    ]  # id x is the output of layer x: boundary x + 1
    assert (
        set(config) >= {"reproducibility", "model", "data", "hidden_states", "generation", "format"}
        and config["model"]["hidden_size"] == target.hidden_size
    )


def test_specforge_files(exported, samples, model, target):
    folder = exported["specforge"]
    for i, sample in enumerate(samples):
        found = torch.load(folder / "rows_0-2000" / f"data_{i}.ckpt", weights_only=True)
        assert torch.equal(found["input_ids"], sample.input_ids) and torch.equal(
            found["loss_mask"], sample.loss_mask.long()
        )
        assert torch.equal(
            found["aux_hidden_state"],
            torch.cat([sample.states[b] for b in BOUNDARIES], dim=-1)[None],
        )
        last = found["hidden_state"]
        assert (
            last.shape == (1, len(sample.input_ids), target.hidden_size)
            and last.dtype == torch.bfloat16
        )
        exact = normed64(sample.states[N], target)
        assert (
            (last[0].double() - exact).abs() <= exact.abs() * 2**-8
        ).all()  # one rounding to bfloat16
        theirs = model.model.norm(sample.states[N])  # rounds twice
        torch.testing.assert_close(last[0], theirs, rtol=2**-7, atol=0)


def test_speculators_files_are_a_data_set_that_datasets_loads(exported, samples):
    import datasets  # of the lock, seconds to import

    rows = datasets.load_from_disk(str(exported["speculators"]))
    assert rows.column_names == ["input_ids", "loss_mask", "seq_len"] and len(rows) == N_SAMPLES
    for i, sample in enumerate(samples):
        assert torch.equal(rows[i]["input_ids"], sample.input_ids) and torch.equal(
            rows[i]["loss_mask"], sample.loss_mask.long()
        )
        assert rows[i]["seq_len"] == len(sample.input_ids)
        found = load_file(exported["speculators"] / "hidden_states" / f"hs_{i}.safetensors")
        assert torch.equal(found["token_ids"], sample.input_ids)
        assert torch.equal(found["hidden_states"], torch.stack(list(sample.states.values()), dim=1))


def test_one_split_and_some_boundaries(store, samples, tmp_path):
    export_store(store, "speculators-v1", tmp_path / "out", (2,), split="heldout")
    chosen = [s for s in samples if s.split == "heldout"]
    assert len(list((tmp_path / "out").glob("data_*.pt"))) == len(chosen)
    found = torch.load(tmp_path / "out" / "data_1.pt", weights_only=True)["hidden_states"]
    assert (
        len(found) == 2
        and torch.equal(found[0], chosen[1].states[2])
        and torch.equal(found[1], chosen[1].states[N])
    )


def test_an_export_that_cannot_be_right_is_refused(store, exported, target, data, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").touch()
    with pytest.raises(EyasError, match="not empty"):
        export_store(store, "specforge", tmp_path / "used", BOUNDARIES)
    with pytest.raises(EyasError, match=r"not \[0\]"):
        export_store(store, "specforge", tmp_path / "out", (0, 2))
    post = import_store(config_for(target), target, "specforge", exported["specforge"]).store
    with pytest.raises(EyasError, match="can't be undone.*--to specforge"):
        export_store(post, "speculators-v1", tmp_path / "out", BOUNDARIES)
    assert not (tmp_path / "out").exists()


# ---- in, and out again


@each_format
def test_round_trip(data, target, exported, tmp_path, name):
    imported = import_store(config_for(target), target, name, exported[name])
    assert imported.imported == N_SAMPLES and not imported.failed
    store = imported.store
    assert set(store.index["topic"]) == {""}
    assert store.manifest["last_state"] == FORMATS[name].norm and store.boundaries == (
        *BOUNDARIES,
        N,
    )
    assert store.samples()[:2] == [f"{name}-000000", f"{name}-000001"] and store.samples(
        "heldout"
    ) == [f"{name}-000000", f"{name}-000020"]
    export_store(store, name, tmp_path / "again", BOUNDARIES)
    assert_same_files(exported[name], tmp_path / "again")
    for path, tensors in tensors_of(
        tmp_path / "again"
    ).items():  # and not, with every view, the whole shard
        assert (tmp_path / "again" / path).stat().st_size < sum(
            t.nbytes for t in tensors.values()
        ) + 4096
    report = verify(store.folder)
    assert report.ok, report
    assert (
        import_store(config_for(target), target, name, exported[name]).imported == 0
    )  # nothing left to do


@pytest.mark.parametrize("name", ["speculators-v1", "specforge"])
def test_numbers_with_gaps_stay(data, target, files, tmp_path, name):
    folder = files[name]
    if name == "specforge":
        (folder / "rows_0-2000" / "data_3.ckpt").unlink()
        (folder / "rows_2000-4000").mkdir()
        (folder / "rows_0-2000" / "data_7.ckpt").rename(
            folder / "rows_2000-4000" / "data_2007.ckpt"
        )
    else:
        (folder / "data_3.pt").unlink()
        (folder / "sample_lengths.json").unlink()
        (folder / "data_7.pt").rename(folder / "data_2007.pt")
    store = import_store(config_for(target), target, name, folder).store
    assert store.samples()[3] == f"{name}-000004" and store.samples()[-1] == f"{name}-002007"
    export_store(store, name, tmp_path / "again", BOUNDARIES)
    assert_same_files(folder, tmp_path / "again")


def test_compressed_specforge_files(data, target, files, exported, tmp_path):
    for path in files["specforge"].rglob("*.ckpt"):
        with gzip.open(f"{path}.gz", "wb") as file:
            file.write(path.read_bytes())
        path.unlink()
    export_store(
        import_store(config_for(target), target, "specforge", files["specforge"]).store,
        "specforge",
        tmp_path / "again",
        BOUNDARIES,
    )
    assert_same_files(exported["specforge"], tmp_path / "again")


def test_a_data_set_of_datasets_own_making(data, target, files, exported, samples, tmp_path):
    """Other integer widths and several files, as `save_to_disk` writes them."""
    import datasets  # of the lock, seconds to import

    for path in [*files["speculators"].glob("*.arrow"), *files["speculators"].glob("*.json")]:
        path.unlink()
    features = datasets.Features(
        {
            "input_ids": datasets.LargeList(datasets.Value("int32")),
            "loss_mask": datasets.List(datasets.Value("int8")),
            "seq_len": datasets.Value("int64"),
        }
    )
    rows = {
        "input_ids": [s.input_ids.tolist() for s in samples],
        "loss_mask": [s.loss_mask.int().tolist() for s in samples],
        "seq_len": [len(s.input_ids) for s in samples],
    }
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(
        str(files["speculators"]), num_shards=3
    )
    assert len(list(files["speculators"].glob("*.arrow"))) == 3
    store = import_store(config_for(target), target, "speculators", files["speculators"]).store
    export_store(store, "speculators", tmp_path / "again", BOUNDARIES)
    assert_same_files(exported["speculators"], tmp_path / "again")
    assert (
        datasets.load_from_disk(str(tmp_path / "again"))[4]["loss_mask"].tolist()
        == samples[4].loss_mask.long().tolist()
    )


def test_fp8_states_of_speculators(data, target, files, samples):
    """Dequantised by the arithmetic of their reader: both factors rounded to bfloat16, then the
    product.
    """
    for i, sample in enumerate(samples):
        states = torch.stack(list(sample.states.values()), dim=1).float()  # [T, 4, H]
        scale = states.abs().amax(dim=(1, 2), keepdim=True) / 448
        save_file(
            {
                "hidden_states": (states / scale).to(torch.float8_e4m3fn),
                "hidden_states_scales": scale,
                "token_ids": sample.input_ids,
            },
            files["speculators"] / "hidden_states" / f"hs_{i}.safetensors",
        )
    store = import_store(config_for(target), target, "speculators", files["speculators"]).store
    assert store.manifest["dtype"] == "bfloat16"
    for id, sample in zip(store.samples(), samples):
        states = torch.stack(list(sample.states.values()), dim=1).float()
        scale = states.abs().amax(dim=(1, 2), keepdim=True) / 448
        want = (states / scale).to(torch.float8_e4m3fn).to(torch.bfloat16) * scale.to(
            torch.bfloat16
        )
        assert torch.equal(torch.stack(list(store.read(id)["states"].values()), dim=1), want)


@each_format
def test_an_imported_store_gives_the_targets_own_logits(
    data, target, model, samples, exported, name
):
    """Whether its last states stand before or after the norm: the store's head gives what Hugging
    Face's model gives, to bf16 rounding.
    """
    store = import_store(config_for(target), target, name, exported[name]).store
    last = store.read(store.samples()[2], (N,))["states"][N]
    logits = normed64(samples[2].states[N], target) @ target.tensor("lm_head.weight").double().T
    torch.testing.assert_close(store.head().logits(last).double(), logits, rtol=0, atol=0.05)
    assert (
        logits - model.lm_head(samples[2].states[N]).double()
    ).abs().max() > 1  # what a norm that is forgotten gives


def test_an_imported_store_trains_like_the_one_it_came_from(data, target, store, exported):
    """Before the norm: the very same weights.

    After it: the same but for the rounding of the teacher's states.
    """
    common = dict(
        draft_vocab_size=64, epochs=1.0, batch_tok=128, train_dtype="float32", without_parity=True
    )
    losses = {}
    for name in FORMATS:
        config = config_for(target, run_name=name, **common)
        imported = import_store(config, target, name, exported[name], heldout_every=0).store
        seen = []
        train(config, imported, target, on_step=lambda done: seen.append(done["loss"]))
        losses[name] = seen
    assert losses["speculators"] == losses["speculators-v1"] and len(losses["specforge"]) > 2
    np.testing.assert_allclose(losses["specforge"], losses["speculators"], rtol=0.01)
    assert losses["specforge"] != losses["speculators"]


# ---- before or after the norm?


@each_format
def test_states_that_are_not_what_the_format_says_are_asked_about(
    data, target, files, samples, name
):
    """SpecForge's with a last state before the norm, the others with one after it."""
    swap = PRE if FORMATS[name].norm == POST else POST
    for path in files[name].rglob("*"):
        if path.suffix not in (".pt", ".ckpt", ".safetensors"):
            continue
        sample = samples[int(path.stem.split("_")[1])]
        last = sample.states[N] if swap == PRE else normed64(sample.states[N], target).bfloat16()
        if path.suffix == ".safetensors":
            found = load_file(path)
            found["hidden_states"] = torch.cat(
                [found["hidden_states"][:, :-1], last[:, None]], dim=1
            ).clone()
            path.unlink()
            save_file(found, path)
        else:
            found = torch.load(path, weights_only=True)
            if name == "specforge":
                found["hidden_state"] = last[None]
            else:
                found["hidden_states"][-1] = last
            torch.save(found, path)
    with pytest.raises(EyasError, match=f"are {FORMATS[name].norm}, these look {swap}.*--norm"):
        import_store(config_for(target), target, name, files[name])
    assert not (data / "runs").exists()
    store = import_store(
        config_for(target), target, name, files[name], norm=swap.removesuffix("-norm")
    ).store
    logits = normed64(samples[2].states[N], target) @ target.tensor("lm_head.weight").double().T
    torch.testing.assert_close(
        store.head().logits(store.read(store.samples()[2])["states"][N]).double(),
        logits,
        rtol=0,
        atol=0.05,
    )


def test_the_two_witnesses():
    """A head that predicts the text speaks up; one that contradicts the RMS, or a norm weight of
    zero with a head that predicts nothing, leaves it open.
    """
    g = torch.Generator().manual_seed(0)
    H = V = 64
    weight = torch.rand(H, generator=g) + 0.5
    ids = torch.randint(0, V, (40,), generator=g)
    pre = torch.randn(40, H, generator=g) * 3
    post = pre / pre.square().mean(-1, keepdim=True).sqrt() * weight

    def check(states, lm_head, weight=weight):
        return check_norm(Head(weight, lm_head, 1e-6), [Sample(0, ids, torch.ones(40), [states])])

    blind = torch.zeros(V, H)
    assert (
        check(pre, blind).norm == PRE
        and check(post, blind).norm == POST
        and check(post, blind).unit_share == 1
    )
    seeing = torch.zeros(V, H)  # least squares: the normed state at t scores token t+1 high
    seeing[ids[1:].unique()] = torch.stack(
        [20 * post[:-1][ids[1:] == i].mean(0) / H for i in ids[1:].unique()]
    )
    assert check(pre, seeing).norm == PRE and check(pre, seeing).nll[PRE] < 2
    assert check(pre, blind, weight * (torch.arange(H) > 0)).norm == ""
    # A head that wants states 30 times as large as the norm makes them predicts well only when it
    # is given these; their RMS says the norm made them.
    loud = seeing / 30
    assert check(post * 30, loud).norm == "" and check(post * 30, loud).unit_share == 0


# ---- files that cannot be read, or must not be


def damage(name: str, folder: Path) -> Path:
    return {
        "speculators-v1": folder / "data_7.pt",
        "specforge": folder / "rows_0-2000" / "data_7.ckpt",
        "speculators": folder / "hidden_states" / "hs_7.safetensors",
    }[name]


@each_format
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
def test_a_torn_file_is_named_before_anything_is_written(data, target, files, name, keep):
    path = damage(name, files[name])
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(EyasError, match=f"{path.name} is torn"):
        import_store(config_for(target), target, name, files[name])
    assert not (data / "runs").exists()


@pytest.mark.parametrize("name", ["speculators-v1", "specforge"])
def test_other_peoples_code_is_not_run(data, target, files, tmp_path, name):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    path = damage(name, files[name])
    torch.save({"input_ids": Trap()}, path)
    with pytest.raises(EyasError, match=f"{path.name} is not read.*tensors only"):
        import_store(config_for(target), target, name, files[name])
    path.write_bytes(pickle.dumps({"input_ids": Trap()}))
    with pytest.raises(EyasError, match=path.name):
        import_store(config_for(target), target, name, files[name])
    assert not (tmp_path / "trapped").exists() and not (data / "runs").exists()


@each_format
@pytest.mark.parametrize("what", ["file", "folder"])
def test_nothing_outside_the_folder_is_read(data, target, files, tmp_path, name, what):
    path = damage(name, files[name])
    link = path if what == "file" or name == "speculators-v1" else path.parent
    shutil.move(link, tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EyasError, match="leads out of the folder"):
        import_store(config_for(target), target, name, files[name])


@pytest.mark.parametrize("name", ["../data.arrow", "sub/data.arrow", "", ".."])
def test_a_data_set_that_names_files_elsewhere(data, target, files, name):
    state = read_json(files["speculators"] / "state.json")
    write_json(files["speculators"] / "state.json", state | {"_data_files": [{"filename": name}]})
    with pytest.raises(EyasError, match="names the data file|leads out"):
        import_store(config_for(target), target, "speculators", files["speculators"])


@pytest.mark.parametrize("file", ["state.json", "data-00000-of-00001.arrow"])
def test_a_torn_data_set(data, target, files, file):
    path = files["speculators"] / file
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(EyasError, match=f"{file} is torn"):
        import_store(config_for(target), target, "speculators", files["speculators"])


def alter(path: Path, **values) -> None:
    torch.save(torch.load(path, weights_only=True) | values, path)


def test_values_that_are_of_no_use_fail_by_name_and_the_rest_comes(data, target, files, samples):
    folder = files["speculators-v1"]
    states = [t.clone() for t in samples[1].states.values()]
    states[2][3, 5] = float("nan")
    alter(folder / "data_1.pt", hidden_states=states)
    alter(folder / "data_2.pt", input_ids=samples[2].input_ids + target.vocab_size)
    alter(folder / "data_4.pt", loss_mask=samples[4].loss_mask.long() * 2)
    alter(folder / "data_5.pt", loss_mask=torch.zeros_like(samples[5].input_ids))
    (folder / "data_6.pt").unlink()  # sample_lengths.json still names it
    imported = import_store(config_for(target), target, "speculators-v1", folder)
    reasons = {int(id.rsplit("-", 1)[1]): reason for id, reason in imported.failed.items()}
    assert list(reasons) == [1, 2, 4, 5, 6] and imported.imported == N_SAMPLES - 5 == len(
        imported.store.samples()
    )
    for number, words in {
        1: "state 3 of 4 holds NaN",
        2: "outside the target's vocabulary of 512",
        4: "other values than 0 and 1",
        5: "zero everywhere",
        6: "no file",
    }.items():
        assert words in reasons[number]
    assert "failed 5" in str(imported) and "speculators-v1-000005" in str(imported)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"input_ids": torch.arange(3)}, "loss_mask"),
        ({"hidden_states": [torch.zeros(9, 64)] * 3}, "holds 3 states"),
        ({"hidden_states": 4}, "holds 0 states"),
        ({"loss_mask": "x"}, "in the place of a tensor"),
        (
            {"hidden_states": [torch.zeros(1).expand(10**9, 64)] * 4},
            "in the place of a tensor|a state is",
        ),
    ],
)
def test_other_shapes_are_named(data, target, files, values, words):
    alter(files["speculators-v1"] / "data_7.pt", **values)
    with pytest.raises(EyasError, match=f"data_7.pt.*({words})"):
        import_store(config_for(target), target, "speculators-v1", files["speculators-v1"])


def test_rows_and_files_that_do_not_belong_together(data, target, files):
    folder = files["speculators"]
    (folder / "hidden_states" / "hs_3.safetensors").unlink()
    imported = import_store(config_for(target), target, "speculators", folder)
    assert imported.failed == {"speculators-000003": "no file of states"}
    shutil.copy(
        folder / "hidden_states" / "hs_4.safetensors", folder / "hidden_states" / "hs_3.safetensors"
    )
    with pytest.raises(EyasError, match="hs_3.safetensors holds other token ids"):
        import_store(config_for(target), target, "speculators", folder)
    shutil.move(
        folder / "hidden_states" / "hs_3.safetensors",
        folder / "hidden_states" / "hs_25.safetensors",
    )
    with pytest.raises(EyasError, match="hs_25.safetensors has no row"):
        import_store(config_for(target), target, "speculators", folder)


def test_other_boundaries_and_targets(data, target, files, exported, tmp_path):
    with pytest.raises(
        EyasError, match=r"files hold boundaries \[1, 2, 3, 4\].*-p boundaries '\[1, 2, 3\]'"
    ):
        import_store(
            config_for(target, boundaries=(0, 1, 2)),
            target,
            "speculators-v1",
            exported["speculators-v1"],
        )
    with pytest.raises(EyasError, match="holds 4 states"):
        import_store(
            config_for(target, boundaries=(1, 3)), target, "specforge", exported["specforge"]
        )
    with pytest.raises(EyasError, match="boundaries below 4"):
        import_store(
            config_for(target, boundaries=(1, 2, 4)), target, "specforge", exported["specforge"]
        )
    wide = load_target(str(make_tiny_target(tmp_path / "wide", n_blocks=N, hidden=96)))
    with pytest.raises(EyasError, match="data_0.pt: a state is"):
        import_store(config_for(wide), wide, "speculators-v1", exported["speculators-v1"])
    other = load_target(
        str(make_tiny_target(tmp_path / "other", n_blocks=N, seed=1))
    )  # another norm: its states after the norm are not these
    with pytest.raises(EyasError, match="is it the right -p target"):
        import_store(config_for(other), other, "specforge", exported["specforge"])
    for name in FORMATS:
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(EyasError, match="no state.json|no file of"):
            import_store(config_for(target), target, name, tmp_path / "empty")
    assert not (data / "runs").exists()


def test_a_killed_import_goes_on_and_other_files_are_refused(data, target, files, monkeypatch):
    folder, config, reader = files["speculators-v1"], config_for(target), FORMATS["speculators-v1"]
    monkeypatch.setattr(
        "eyas.store.formats.importing.StoreWriter",
        lambda folder, manifest, head, shard_bytes: StoreWriter(folder, manifest, head, 2**14),
    )
    whole = import_store(
        config_for(target, run_name="whole"), target, "speculators-v1", folder
    ).store
    assert len(set(whole.index["shard"])) > 5

    def read(self, number):
        if number == 15:
            raise KeyboardInterrupt
        return reader.open(self, number)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(reader, "read", read)
        import_store(config, target, "speculators-v1", folder)
    assert 0 < len(Store.open(config.store_dir).samples()) < 15
    store = import_store(config, target, "speculators-v1", folder).store
    assert store.index.equals(whole.index)
    assert [p.read_bytes() for p in sorted((store.folder / "shards").iterdir())] == [
        p.read_bytes() for p in sorted((whole.folder / "shards").iterdir())
    ]
    (folder / "data_9.pt").unlink()
    with pytest.raises(EyasError, match="made with another engine.files"):
        import_store(config, target, "speculators-v1", folder)


def test_damage_is_mended_by_the_same_import(data, target, exported, capsys):
    config = config_for(target)
    store = import_store(config, target, "specforge", exported["specforge"]).store
    (path,) = (store.folder / "shards").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5000] + b"!" + whole[-4999:])
    common = [
        "-p",
        "target",
        str(target.folder),
        "-p",
        "boundaries",
        "[1, 2, 3]",
        "-p",
        "run_name",
        "imported",
    ]
    assert (
        main(["verify", "--repair", *common]) == 1
        and "data import again" in capsys.readouterr().out
    )
    assert import_store(config, target, "specforge", exported["specforge"]).imported == 1
    assert path.read_bytes() == whole and main(["verify", *common]) == 0


def test_commands(data, target, store, tmp_path, capsys):
    shutil.copytree(store.folder, data / "runs" / "own" / "store")
    common = ["-p", "target", str(target.folder), "-p", "boundaries", "[1, 2, 3]"]
    assert (
        main(
            [
                "data",
                "export",
                "--to",
                "speculators-v1",
                "--out",
                str(tmp_path / "out"),
                "-p",
                "run_name",
                "own",
                *common,
            ]
        )
        == 0
    )
    assert "25 samples" in capsys.readouterr().out
    arguments = [
        "data",
        "import",
        "--from",
        "speculators-v1",
        str(tmp_path / "out"),
        "-p",
        "run_name",
        "new",
        *common,
    ]
    assert (
        main(arguments) == 0
        and "last states pre-norm" in (said := capsys.readouterr().out)
        and "leave some of them out" not in said
    )
    assert (
        main([*arguments, "-p", "train_samples", "20"]) == 0
    )  # a training takes as many as the settings say, and the import took all
    assert (
        "all of them: python -m eyas train -p train_samples 23 -p heldout_samples 2"
        in capsys.readouterr().out
    )
    assert main(["verify", "-p", "run_name", "new", *common]) == 0
    assert (
        main(
            [
                "data",
                "import",
                "--from",
                "specforge",
                str(tmp_path / "out"),
                "-p",
                "run_name",
                "newer",
                *common,
            ]
        )
        == 2
    )
    assert "holds no file of specforge" in capsys.readouterr().err


# ---- their own readers, in their own environments (nothing of theirs is imported here)


@pytest.mark.peer
def test_speculators_reads_ours(exported, samples, tmp_path):
    found = peer(
        "EYAS_PEER_SPECULATORS",
        "speculators==0.9.0",
        """
from speculators.train.data import ArrowDataset
rows = ArrowDataset(4096, sys.argv[2], on_missing="raise")
found = [rows[i] for i in range(len(rows))]
""",
        str(tmp_path / "found.pt"),
        str(exported["speculators"]),
    )
    assert len(found) == N_SAMPLES
    for row, sample in zip(found, samples):
        assert torch.equal(row["input_ids"], sample.input_ids) and torch.equal(
            row["loss_mask"], sample.loss_mask.long()
        )
        assert torch.equal(
            row["hidden_states"], torch.cat([sample.states[b] for b in BOUNDARIES], dim=1)
        )
        assert torch.equal(row["verifier_last_hidden_states"], sample.states[N])


@pytest.mark.peer
def test_fp8_of_speculators_own_making(data, target, exported, files, tmp_path):
    """Their quantiser writes, their reader and our import read: the same bits."""
    found = peer(
        "EYAS_PEER_SPECULATORS",
        "speculators==0.9.0",
        """
from pathlib import Path
from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8
from hs_connectors.transfer import FP8Transfer
from safetensors.torch import load_file, save_file
found = []
for i, _ in enumerate(Path(sys.argv[2]).iterdir()):
    path = Path(sys.argv[2]) / f"hs_{i}.safetensors"
    tensors = {name: t.clone() for name, t in load_file(path).items()}
    tensors["hidden_states"], tensors[SCALES_KEY] = quantize_tensor_to_fp8(tensors["hidden_states"])
    path.unlink()
    save_file(tensors, path)
    found.append(FP8Transfer(path.parent).get_cached(i)["hidden_states"])
""",
        str(tmp_path / "found.pt"),
        str(files["speculators"] / "hidden_states"),
    )
    store = import_store(config_for(target), target, "speculators", files["speculators"]).store
    assert len(found) == N_SAMPLES
    for id, states in zip(store.samples(), found):
        assert torch.equal(torch.stack(list(store.read(id)["states"].values()), dim=1), states)


@pytest.mark.peer
def test_speculators_v1_reads_ours(exported, samples, tmp_path):
    found = peer(
        "EYAS_PEER_SPECULATORS_V1",
        "speculators==0.3.0",
        """
import builtins
builtins.torch = torch  # this release forgets the import beside a newer transformers
from speculators.train.data import Eagle3SampleFileDataset, standardize_data_v1
rows = Eagle3SampleFileDataset(4096, sys.argv[2], hidden_states_dtype=torch.bfloat16, \
standardize_fn=standardize_data_v1)
found = {path.name: rows[i] for i, path in enumerate(rows.data)}
""",
        str(tmp_path / "found.pt"),
        str(exported["speculators-v1"]),
    )
    assert len(found) == N_SAMPLES
    for i, sample in enumerate(
        samples
    ):  # their reader shifts by one: state t beside token, mask and last state t + 1
        row = found[f"data_{i}.pt"]
        assert torch.equal(row["input_ids"], sample.input_ids[1:]) and torch.equal(
            row["loss_mask"], sample.loss_mask.long()[1:]
        )
        assert torch.equal(
            row["hidden_states"], torch.cat([sample.states[b] for b in BOUNDARIES], dim=1)[:-1]
        )
        assert torch.equal(row["verifier_last_hidden_states"], sample.states[N][1:])


@pytest.mark.peer
def test_specforge_reads_ours(exported, samples, target, tmp_path):
    found = peer(
        "EYAS_PEER_SPECFORGE",
        "-r requirements/cpu.txt --no-deps && PEER/bin/pip install --no-deps specforge==0.2.0",
        """
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader
refs, features = OfflineManifestReader(sys.argv[2], validate_files=True).read(), LocalFeatureStore()
found = {ref.feature_store_uri.rsplit("/", 1)[1]: normalize_offline_sample(features.get(ref)[0], \
4096) for ref in refs}
""",
        str(tmp_path / "found.pt"),
        str(exported["specforge"]),
    )
    assert len(found) == N_SAMPLES
    for i, sample in enumerate(samples):
        row, mask = found[f"data_{i}.ckpt"], sample.loss_mask.long()
        mask[-1] = 0  # their reader's
        assert torch.equal(row["input_ids"][0], sample.input_ids) and torch.equal(
            row["loss_mask"][0], mask
        )
        assert torch.equal(
            row["hidden_state"][0], torch.cat([sample.states[b] for b in BOUNDARIES], dim=1)
        )
        assert torch.equal(row["target"][0], target.head().normed(sample.states[N]).bfloat16())
