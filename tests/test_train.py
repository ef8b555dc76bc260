"""Training against a slow and obvious float64 reference, and what a run promises: repeatable,
resumable, refusing what does not fit.
"""

import errno
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import eyas.training.attention
import eyas.training.head_loss
import eyas.training.trainer
from eyas.config import Config
from eyas.errors import EyasError
from eyas.evaluation.offline import walk
from eyas.files import code_version
from eyas.models.drafter import load_drafter
from eyas.models.target import load_target
from eyas.store.reader import Store
from eyas.training.batch import pack
from eyas.training.head_loss import Teacher
from eyas.training.losses import LOSSES
from eyas.training.schedule import plan, schedule, split_work
from eyas.training.trainer import Training, train
from eyas.training.ttt import Losses, batch_loss, step_weights
from helpers.drafters import BOUNDARIES, make_drafter, make_sample
from helpers.slow_reference import MASKS, make_head, reference_loss
from helpers.stores import write_random_store
from helpers.tiny import make_tiny_target

# ---- the loss and its gradient: one slot, one step, one key at a time, full attention, from the
# definition


def both_losses(masks, n_steps, decay, loss="kl", mask_shift=1, grid=False, **switches):
    """(packed implementation, reference), each with the gradients of its own drafter's weights."""
    head, results = make_head(), []
    samples = {str(i): make_sample(mask, seed=i) for i, mask in enumerate(masks)}
    for reference in (False, True):
        drafter = make_drafter(**switches)
        if reference:
            total, *rest = reference_loss(
                drafter, samples.values(), head, n_steps, decay, loss, mask_shift, grid
            )
        else:
            batch = pack(
                list(samples.values()),
                BOUNDARIES,
                drafter.vocab,
                n_steps,
                torch.float64,
                mask_shift,
            )
            teacher, counts = (
                Teacher(head, drafter.vocab, torch.float64, LOSSES[loss].whole_vocab),
                [len(batch.tokens)] * n_steps if grid else None,
            )
            losses = batch_loss(
                drafter, batch, teacher, LOSSES[loss], step_weights(n_steps, decay), counts
            )
            total, rest = losses.total, [losses.loss, losses.hits, losses.slots]
        total.backward()
        results.append(
            (
                float(total.detach()),
                *rest,
                {name: p.grad for name, p in drafter.named_parameters() if p.requires_grad},
            )
        )
    return results


def assert_equal_losses(ours, reference):
    (total, loss, hits, slots, grads), (total_r, loss_r, hits_r, slots_r, grads_r) = ours, reference
    assert slots == slots_r and sum(slots) > 0 and hits == hits_r
    assert total == pytest.approx(total_r, abs=1e-9) and loss == pytest.approx(loss_r, abs=1e-9)
    for name, grad in grads_r.items():
        torch.testing.assert_close(
            grads[name],
            torch.zeros_like(grads[name]) if grad is None else grad,
            rtol=0,
            atol=1e-9,
            msg=name,
        )


@pytest.mark.parametrize("n_steps", range(1, 8))
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_loss_and_gradients_equal_the_reference(masks, n_steps, monkeypatch):
    monkeypatch.setattr(
        eyas.training.head_loss, "LOGIT_ROWS", 7
    )  # more than one chunk, the last one cut
    monkeypatch.setattr(eyas.training.head_loss, "PIECE_ROWS", 3)
    assert_equal_losses(*both_losses(masks, n_steps, decay=0.8))


@pytest.mark.parametrize("masks", [MASKS["turns"], MASKS["packed"]], ids=["turns", "packed"])
@pytest.mark.parametrize(
    "change",
    [
        {"mask_shift": 0},
        {"grid": True},
        {"fc_norm": True},
        {"norm_output": True},
        {"mask_shift": 0, "grid": True, "fc_norm": True, "norm_output": True, "loss": "lk_lambda"},
    ],
    ids=str,
)
def test_every_variant_equals_the_reference(masks, change):
    assert_equal_losses(*both_losses(masks, 3, 0.8, **change))


@pytest.mark.parametrize("n_steps", range(1, 8))
@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "kl"])
def test_every_loss_equals_the_reference(loss, n_steps):
    ours, reference = both_losses(
        [[0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1]], n_steps, 0.8, loss
    )
    assert_equal_losses(ours, reference)
    assert all(reference[3]), "every step has a supervised slot"


def test_attention_without_the_fused_kernel_is_the_same(monkeypatch):
    """Without the CPU's kernel the plain formulas run, with the same joint log-sum-exp."""
    fused = both_losses(MASKS["packed"], 4, 0.8)[0]
    monkeypatch.setattr(eyas.training.attention, "FUSED_ON", ())
    plain = both_losses(MASKS["packed"], 4, 0.8)[0]
    assert plain[1] == pytest.approx(fused[1], abs=1e-9)
    for name, grad in fused[-1].items():
        torch.testing.assert_close(plain[-1][name], grad, rtol=0, atol=1e-9, msg=name)


def test_parts_have_equal_shares_of_the_work():
    """Five samples, one of them twice as a mix of stores can have it: every slot in one part, and
    each part's work the same, give or take the slots where it begins and ends.
    """
    sizes = [("a", 5, 40), ("b", 11, 12), ("a", 5, 40), ("c", 1, 30), ("d", 8, 9), ("e", 0, 7)]
    for slot_rows in (1, 12):
        work = {id: slot_rows + rows / active for id, active, rows in sizes if active}
        for n in (1, 2, 3, 7):
            parts = split_work(sizes, n, slot_rows)
            slots = [
                (id, slot)
                for part in parts
                for id, share in part
                for slot in range(share.start, share.stop)
            ]
            assert (
                sorted(slots)
                == sorted((id, slot) for id, active, _ in sizes for slot in range(active))
                and len(parts) == n
            )
            of_parts = [
                sum(work[id] * (share.stop - share.start) for id, share in part) for part in parts
            ]
            assert all(abs(found - sum(of_parts) / n) <= max(work.values()) for found in of_parts)
    assert split_work([("a", 1, 9)], 2, 12)[0] == [] or split_work([("a", 1, 9)], 2, 12)[1] == []


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_sample_that_is_cut_gives_what_it_gives_whole(n_steps):
    """Each part of a sample learns from its share of the active slots, with all keys: losses and
    gradients add up.
    """
    samples = {str(i): make_sample(mask, seed=i) for i, mask in enumerate(MASKS["packed"])}
    head, found = make_head(), []
    for cuts in ([slice(None)], [slice(0, 2), slice(2, None)]):
        drafter, total, slots = make_drafter(), 0.0, 0
        for share in cuts:
            batch = pack(
                list(samples.values()),
                BOUNDARIES,
                drafter.vocab,
                n_steps,
                torch.float64,
                shares=[share] * len(samples),
            )
            losses = batch_loss(
                drafter,
                batch,
                Teacher(head, drafter.vocab, torch.float64),
                LOSSES["kl"],
                step_weights(n_steps, 0.8),
                [10] * n_steps,
            )
            losses.total.backward()
            total, slots = total + float(losses.total.detach()), slots + sum(losses.slots)
        found.append(
            (
                total,
                slots,
                {name: p.grad for name, p in drafter.named_parameters() if p.requires_grad},
            )
        )
    assert found[0][:2] == pytest.approx(found[1][:2], abs=1e-9)
    for name, grad in found[0][2].items():
        torch.testing.assert_close(found[1][2][name], grad, rtol=0, atol=1e-9, msg=name)


def test_order_and_packing_change_nothing():
    head, samples = (
        make_head(),
        {str(i): make_sample(mask, seed=i) for i, mask in enumerate(MASKS["packed"])},
    )

    def losses(*packs, counts=None):
        drafter, found = make_drafter(), []
        for ids in packs:
            batch = pack([samples[id] for id in ids], BOUNDARIES, drafter.vocab, 3, torch.float64)
            found.append(
                batch_loss(
                    drafter,
                    batch,
                    Teacher(head, drafter.vocab, torch.float64),
                    LOSSES["kl"],
                    step_weights(3, 1.0),
                    counts,
                )
            )
            found[-1].total.backward()  # gradients of several packs add up
        sums = [
            [sum(column) for column in zip(*parts)]
            for parts in zip(*((each.loss, each.hits, each.slots) for each in found))
        ]
        return (
            sum(float(each.total.detach()) for each in found),
            *sums,
            {name: p.grad for name, p in drafter.named_parameters() if p.requires_grad},
        )

    whole = losses("01234")
    assert whole[-1]["layers.0.self_attn.k_proj.weight"].abs().max() > 1e-3
    for others in (
        losses("40321"),
        losses(*"01234", counts=whole[3]),
        losses("31", "024", counts=whole[3]),
    ):
        assert_equal_losses(others, whole)


def test_supervised_slots_by_hand():
    """Tokens 3 ..

    6 are the answer. Step 0 is supervised at slots 2 .. 5: it takes tokens 3 .. 6, and no slot
    before.
    """
    drafter = make_drafter()
    sample = make_sample([0, 0, 0, 1, 1, 1, 1, 0])
    batch = pack([sample], BOUNDARIES, drafter.vocab, 3, torch.float64)
    assert (
        batch.active.tolist() == [2, 3, 4, 5]
        and batch.run.tolist() == [3, 3, 2, 1]
        and batch.spans == [(0, 6)]
    )
    assert torch.equal(batch.tokens[batch.active], sample.input_ids[3:7]) and torch.equal(
        batch.last, sample.states[3][3:7]
    )
    assert torch.equal(batch.labels, drafter.vocab.to_draft(sample.input_ids[4:8]))


def test_schedule_and_plan():
    factors = [schedule(step, 20, 4) for step in range(20)]
    assert (
        factors[:4] == [0.25, 0.5, 0.75, 1.0]
        and factors[4] == 1.0
        and factors == sorted(factors[:4]) + sorted(factors[4:], reverse=True)
    )
    assert factors[12] == pytest.approx(0.5) and 0 < factors[-1] < 0.02
    lengths = {f"s{i}": 10 + i for i in range(10)}  # 145 tokens
    steps = plan(lengths, 2.5, 40, seed=1)
    by_epoch = [[id for epoch, ids in steps if epoch == e for id in ids] for e in range(3)]
    assert (
        [len(ids) for ids in by_epoch] == [10, 10, 5]
        and sorted(by_epoch[0]) == sorted(lengths)
        and by_epoch[0] != by_epoch[1]
    )
    assert all(sum(lengths[id] for id in ids) <= 40 for _, ids in steps)
    assert (
        steps
        == plan(dict(reversed(lengths.items())), 2.5, 40, seed=1)
        != plan(lengths, 2.5, 40, seed=2)
    )
    assert plan({"long": 100, "short": 10}, 1.0, 40, seed=0)[0][1] in (
        ["long"],
        ["short"],
    )  # a sample above the limit has a pack of its own


# ---- runs, on a tiny target with a store of its own

N_BLOCKS = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny", n_blocks=N_BLOCKS))
    )


@pytest.fixture
def store(tmp_path, target):
    return Store.open(write_random_store(tmp_path / "store", target))


def config_for(**values) -> Config:
    return Config.create(
        **{
            "run_name": "tiny",
            "boundaries": (2, 3),
            "threads": 1,
            "draft_vocab_size": 40,
            "epochs": 3.0,
            "batch_tok": 64,
            "max_length": 512,
            "without_parity": True,
            **values,
        }
    )


@pytest.mark.parametrize(
    "change, settings",
    [
        ({"pass_tok": 24}, {}),
        ({"threads": 3}, {}),
        ({"pass_tok": 24, "threads": 2}, {}),
        ({"threads": 2}, {"fc_norm": True}),
        ({"threads": 16}, {"epochs": 1.0}),  # more than weights, and than slots of a step
    ],
    ids=str,
)
def test_passes_and_threads_change_nothing(data, store, target, monkeypatch, change, settings):
    """A step cut into passes is the step: same order of samples, same slots, weights and held-out
    losses that differ by rounding alone; threads repeat bit for bit.
    """
    monkeypatch.setattr(
        eyas.training.trainer, "JUDGED", 1
    )  # more groups of held-out samples than processes
    drafters, tables = [], []
    for name, values in (("whole", {}), ("passes", change), ("again", change)):
        folder = train(
            config_for(
                **{
                    "run_name": name,
                    "train_dtype": "float32",
                    "batch_tok": 128,
                    **settings,
                    **values,
                }
            ),
            store,
            target,
        )
        drafters.append(load_drafter(folder, target).state_dict())
        tables.append(pd.read_parquet(folder / "metrics.parquet").drop(columns="seconds"))
    whole, passes, again = tables
    pd.testing.assert_frame_equal(
        whole.drop(columns=["accuracy", "acceptance_length"]),
        passes.drop(columns=["accuracy", "acceptance_length"]),
        rtol=1e-4,
    )
    pd.testing.assert_frame_equal(passes, again)
    assert passes["acceptance_length"].notna().any()
    for name, tensor in drafters[0].items():
        torch.testing.assert_close(
            drafters[1][name], tensor.float(), rtol=1e-3, atol=2e-5, msg=name
        )
        assert torch.equal(drafters[1][name], drafters[2][name]), name


RANKS = """
import sys
from pathlib import Path
from eyas.training import distributed as ranks
from eyas.config import Config
from eyas.store.reader import Store
from eyas.models.target import load_target
from eyas.training.trainer import Training, train
judge, judged = Training._judge, []
Training._judge = lambda self, keys: judged.extend(keys) or judge(self, keys)
train(Config.create(**eval(sys.argv[1])), Store.open(sys.argv[2]), load_target(sys.argv[3]))
Path(sys.argv[4], f"judged-{ranks.RANK}").write_text(" ".join(judged))
"""


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_ranks_give_the_result_of_one(data, store, target, tmp_path, parallel, capsys):
    """With gloo on this machine, under torchrun; some steps have a single sample, so one rank has
    nothing of its own. Each judges its share of the held-out samples. A checkpoint of two ranks
    goes on with one.
    """
    values = {
        name: getattr(config_for(), name)
        for name in ("boundaries", "threads", "draft_vocab_size", "batch_tok", "without_parity")
    } | {"train_dtype": "float32", "parallel": parallel}
    single = load_drafter(
        train(Config.create(**values, run_name="single", epochs=3.0), store, target), target
    ).state_dict()
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(eyas.__file__).parents[1]),
        "EYAS_DATA": str(data),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    done = subprocess.run(
        [
            *command,
            repr(values | {"run_name": "two", "epochs": 3.0}),
            str(store.folder),
            str(target.folder),
            str(tmp_path),
        ],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = data / "runs" / "two" / "drafter"
    two = load_drafter(folder, target).state_dict()
    for name, tensor in single.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=2e-5, msg=name)
    metrics, alone = (
        pd.read_parquet(data / "runs" / name / "drafter" / "metrics.parquet")
        for name in ("two", "single")
    )
    assert metrics["slots"].equals(alone["slots"]) and metrics["tok"].equals(alone["tok"])
    assert metrics["loss"].tolist() == pytest.approx(alone["loss"].tolist(), rel=1e-3) and 1 in {
        len(ids) for _, ids in plan(lengths_of(store), 3.0, 64, 0)
    }
    assert (
        metrics["acceptance_length"].equals(alone["acceptance_length"])
        and metrics["acceptance_length"].notna().sum() == 9
    )
    shares = [(tmp_path / f"judged-{rank}").read_text().split() for rank in (0, 1)]
    assert len(shares[0]) == len(shares[1]) == 3 and set(shares[0]) | set(shares[1]) == set(
        store.samples("heldout")
    ) == {"s5", "s11"}  # of three evaluations
    for kept in sorted((folder / "checkpoints").iterdir())[1:]:
        kept.unlink()
    steps = []
    capsys.readouterr()
    train(
        Config.create(**values, run_name="two", epochs=3.0),
        store,
        target,
        on_step=lambda done: steps.append(done["step"]),
    )
    assert steps and steps[0] > 1
    assert (
        "note: begun with ranks 2, now 1: the same training to rounding, no longer bit for bit"
        in capsys.readouterr().out
    )
    for name, tensor in load_drafter(folder, target).state_dict().items():
        torch.testing.assert_close(tensor, single[name], rtol=1e-3, atol=2e-5, msg=name)


def lengths_of(store) -> dict[str, int]:
    rows = store.index[store.index["split"] == "train"]
    return dict(zip(rows["id"], rows["length"].astype(int)))


def test_learns_and_reports(data, store, target):
    seen = []
    config = config_for(epochs=30.0, train_dtype="float32")
    folder = train(config, store, target, on_step=seen.append)
    metrics = pd.read_parquet(folder / "metrics.parquet")
    assert list(metrics.columns) == [
        "step",
        "epoch",
        "split",
        "draft_step",
        "loss",
        "accuracy",
        "slots",
        "tok",
        "seconds",
        "acceptance_length",
    ]
    training = metrics[metrics["split"] == "train"]
    by_epoch = training[training["draft_step"] == 0].groupby("epoch")["loss"].mean()
    assert by_epoch.iloc[-1] < by_epoch.iloc[0] - 0.5
    assert metrics[metrics["split"] == "heldout"].groupby("epoch").size().tolist() == [3] * 30
    assert (
        len(seen) == training["step"].max() == len(training) // 3
        and not metrics[["loss", "slots"]].isna().any().any()
    )
    assert load_drafter(folder, target).config.draft_vocab_size == 40


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seed_repeats_bit_for_bit(data, store, target, dtype):
    a, b, c = (
        load_drafter(
            train(config_for(run_name=name, seed=seed, train_dtype=dtype), store, target), target
        )
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
    assert not torch.equal(a.fc.weight, c.fc.weight)


KILLED = """
import os, signal, sys
import torch
import eyas.training.metrics
from eyas.config import Config
from eyas.store.reader import Store
from eyas.models.target import load_target
from eyas.training.trainer import Training, train
eyas.training.metrics.METRICS_S = 0.0  # the metrics are ahead of the last checkpoint

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def half_written(state, path, save=torch.save):
    save(state, path)
    if state["step"] == step:
        os.truncate(path, os.path.getsize(path) // 2)
        die()

def judged(self, evaluate=Training.evaluate):
    evaluate(self)
    if self.step == step:
        die()

store, target = Store.open(sys.argv[2]), load_target(sys.argv[3])
for name, (where, step, values) in eval(sys.argv[1]).items():
    if child := os.fork():
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    if where == "while a checkpoint is written":
        torch.save = half_written
    if where == "between evaluation and checkpoint":
        Training.evaluate = judged
    try:
        train(Config.create(**values), store, target, on_step=lambda done: where == "behind a \
step" and done["step"] == step and die())
    finally:
        os._exit(1)
"""
ENDS = (5, 10)  # last steps of the two epochs
# where, at which step, threads, and the checkpoints that are there then: of every second step and
# each epoch's end the last two
KILLS = {
    "before any checkpoint": ("behind a step", 1, 1, []),
    "at an epoch's end": ("behind a step", 5, 1, [4, 5]),
    "at a checkpoint": ("behind a step", 6, 1, [5, 6]),
    "a step behind a checkpoint": ("behind a step", 7, 1, [5, 6]),
    "with two threads": ("behind a step", 7, 2, [5, 6]),
    "while a checkpoint is written": ("while a checkpoint is written", 6, 1, [4, 5]),
    "between evaluation and checkpoint": ("between evaluation and checkpoint", 5, 1, [2, 4]),
}


@pytest.fixture(scope="module")
def killed(target, tmp_path_factory):
    """(data folder, store, config of a case's run): each of KILLS begun and killed, in a process of
    its own.
    """
    folder = tmp_path_factory.mktemp("killed")
    store = Store.open(write_random_store(folder / "store", target))
    assert [epoch for epoch, _ in plan(lengths_of(store), 2.0, 64, 0)] == [0] * ENDS[0] + [1] * (
        ENDS[1] - ENDS[0]
    )
    configs = {
        name: config_for(
            run_name=name.replace(" ", "-").replace("'", ""),
            epochs=2.0,
            threads=threads,
            checkpoint_steps=2,
        )
        for name, (_, _, threads, _) in KILLS.items()
    }
    cases = {
        name: (KILLS[name][0], KILLS[name][1], config.changed) for name, config in configs.items()
    }
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(eyas.__file__).parents[1]),
        "EYAS_DATA": str(folder / "data"),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, "-c", KILLED, repr(cases), str(store.folder), str(target.folder)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert [line for line in process.stdout.splitlines() if line.rpartition(" ")[0] in KILLS] == [
        f"{name} {-signal.SIGKILL}" for name in KILLS
    ], process.stdout + process.stderr
    return folder / "data", store, configs


@pytest.fixture(scope="module")
def undisturbed(killed, target):
    """undisturbed(threads) -> the drafter folder of a run that nothing happened to, made once."""
    data, store, _ = killed
    made = {}

    def make(threads: int) -> Path:
        if threads not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("EYAS_DATA", str(data))
                made[threads] = train(
                    config_for(run_name=f"undisturbed-{threads}", epochs=2.0, threads=threads),
                    store,
                    target,
                )
        return made[threads]

    return make


@pytest.mark.parametrize("case", KILLS)
def test_killed_and_started_again_gives_the_same_run(
    killed, undisturbed, target, monkeypatch, case
):
    data, store, configs = killed
    config, (where, at, threads, kept) = configs[case], KILLS[case]
    monkeypatch.setenv("EYAS_DATA", str(data))
    checkpoints = config.drafter_dir / "checkpoints"
    assert [
        int(path.stem.removeprefix("step-")) for path in sorted(checkpoints.glob("step-*"))
    ] == kept
    assert not (config.drafter_dir / "drafter.safetensors").exists() and (
        config.drafter_dir / "best.safetensors"
    ).exists() == (at >= ENDS[0])
    assert len(list(checkpoints.glob(".*.tmp"))) == (where == "while a checkpoint is written")
    assert pd.read_parquet(config.drafter_dir / "metrics.parquet")["step"].max() == at - (
        where == "between evaluation and checkpoint"
    )
    steps = []
    train(config, store, target, on_step=lambda done: steps.append(done["step"]))
    assert steps == list(range((kept or [0])[-1] + 1, ENDS[1] + 1))
    whole = undisturbed(threads)
    for name in ("drafter.safetensors", "best.safetensors"):
        ours, theirs = load_file(config.drafter_dir / name), load_file(whole / name)
        assert ours.keys() == theirs.keys() and all(
            torch.equal(tensor, theirs[key]) for key, tensor in ours.items()
        ), name
        ours, theirs = (
            drafter_record(folder / name) | {"code": ""} for folder in (config.drafter_dir, whole)
        )
        assert ours == theirs
    table, undisturbed_table = (
        pd.read_parquet(folder / "metrics.parquet").drop(columns="seconds")
        for folder in (config.drafter_dir, whole)
    )
    pd.testing.assert_frame_equal(table, undisturbed_table)
    assert not table.duplicated(["step", "split", "draft_step"]).any()
    assert not list(config.drafter_dir.rglob(".*.tmp"))
    before = (config.drafter_dir / "drafter.safetensors").stat()
    train(
        config,
        store,
        target,
        on_step=lambda done: pytest.fail("a finished run has nothing left to do"),
    )
    assert (config.drafter_dir / "drafter.safetensors").stat() == before, (
        "its record names the code that trained it, and what was judged since is not older than it"
    )


def test_going_on_with_other_parts_is_said(data, store, target, capsys):
    """Other threads or pass_tok are the same training to rounding: no error, and no silence.

    A checkpoint that does not name its parts, as once, is taken as it is.
    """
    train(config_for(epochs=1.0), store, target)
    for change, text in (
        ({"threads": 2}, "threads 1, now 2"),
        ({"pass_tok": 24}, "pass_tok 0, now 24"),
        ({}, ""),
    ):
        capsys.readouterr()
        train(config_for(epochs=1.0, **change), store, target)
        said = [line for line in capsys.readouterr().out.splitlines() if "rounding" in line]
        assert said == (
            [f"note: begun with {text}: the same training to rounding, no longer bit for bit"]
            if text
            else []
        )
    path = max((config_for().drafter_dir / "checkpoints").iterdir())
    state = torch.load(path, weights_only=True)
    assert state.pop("parts") == {"threads": 1, "pass_tok": 0, "ranks": 1}
    torch.save(state, path)
    train(
        config_for(epochs=1.0, threads=2),
        store,
        target,
        on_step=lambda done: pytest.fail("it had ended"),
    )
    assert "rounding" not in capsys.readouterr().out


def test_checkpoint_of_something_else_is_refused(data, store, target, tmp_path):
    train(config_for(epochs=1.0), store, target)
    for change, text in (
        ({"draft_vocab_size": 41}, "another drafter shape: draft_vocab_size 40, now 41"),
        ({"boundaries": (3,)}, r"another drafter shape: boundaries \[2, 3\], now \[3\]"),
        ({"learning_rate": 1e-4}, "another training: learning_rate 0.002, now 0.0001"),
    ):
        with pytest.raises(EyasError, match=text):
            train(config_for(**{"epochs": 1.0, **change}), store, target)
    with pytest.raises(EyasError, match="another store"):
        train(
            config_for(epochs=1.0),
            Store.open(write_random_store(tmp_path / "other", target, n_samples=11)),
            target,
        )
    path = max((config_for().drafter_dir / "checkpoints").iterdir())
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(EyasError, match="can't be read"):
        train(config_for(epochs=1.0), store, target)


def test_bad_input_gets_one_line(data, store, target, tmp_path):
    with pytest.raises(EyasError, match=r"the store has boundaries \[2, 3, 6\], not \[4\]"):
        train(config_for(boundaries=(2, 4)), store, target)
    with pytest.raises(EyasError, match="draft vocabulary of 513"):
        train(config_for(draft_vocab_size=513), store, target)
    with pytest.raises(EyasError, match="no training sample"):
        train(
            config_for(),
            Store.open(write_random_store(tmp_path / "empty", target, n_samples=0)),
            target,
        )
    other = load_target(
        str(make_tiny_target(tmp_path / "targets" / "other", n_blocks=N_BLOCKS, seed=1))
    )
    with pytest.raises(EyasError, match="store was made for another target: tiny"):
        train(config_for(), store, other)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_loss_that_is_not_finite_stops_and_names_the_sample(data, target, tmp_path, threads):
    store = Store.open(write_random_store(tmp_path / "bad", target, bad="s3"))
    with pytest.raises(EyasError, match=r"optimiser step \d+ is not finite; samples s3;"):
        train(config_for(threads=threads), store, target)
    assert not (config_for().drafter_dir / "drafter.safetensors").exists()


def test_a_process_that_is_killed_ends_the_run_and_the_same_command_goes_on(
    data, store, target, monkeypatch
):
    """As the system kills one that takes too much memory, here when the other weights of step 8 are
    changed already: no half of a step is learned, and no process is left over.
    """
    update = Training._update

    def killed(self, norm):
        if self.number == 1 and self.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        update(self, norm)

    config = config_for(run_name="other-killed", threads=2, checkpoint_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(Training, "_update", killed)
        with pytest.raises(
            EyasError,
            match=(
                "a process that shares the training was killed.*the same command, which goes "
                "on at the last checkpoint"
            ),
        ):
            train(config, store, target)
    assert not multiprocessing.active_children()
    steps = []
    again = load_file(
        train(config, store, target, on_step=lambda done: steps.append(done["step"]))
        / "drafter.safetensors"
    )
    whole = load_file(
        train(config_for(run_name="whole", threads=2, checkpoint_steps=2), store, target)
        / "drafter.safetensors"
    )
    assert steps[0] == 7 and all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


def test_a_loss_that_jumps_stops_and_names_the_sample(data, store, target):
    """At step 30 the head is thirty times as sure of itself, and mostly wrong."""
    training = Training(config_for(epochs=30.0), store, target)
    training.begin()
    for _ in range(29):
        training.optimise()
    with torch.no_grad():
        training.drafter.lm_head.weight.mul_(30)
        alone = {
            id: float(
                batch_loss(
                    training.drafter,
                    training.read([id]),
                    training.teacher,
                    training.loss,
                    training.weights,
                ).total
            )
            for id in training.steps[29][1]
        }
    weights = {name: p.detach().clone() for name, p in training.trained.items()}
    worst = max(alone, key=alone.get)
    with pytest.raises(
        EyasError,
        match=(
            rf"step 30 jumped to [\d.]+, the median of the last 29 is 3.\d+; the most, "
            rf"{alone[worst]:.2f}, has sample {worst}; expected at most 3 times the median"
        ),
    ):
        training.optimise()
    assert all(
        torch.equal(weights[name], p) for name, p in training.trained.items()
    )  # nothing of it was learned
    training.close()
    calm = Training(config_for(epochs=30.0, spike_ratio=0.0), store, target)
    calm.begin()
    for _ in range(29):
        calm.optimise()
    with torch.no_grad():
        calm.drafter.lm_head.weight.mul_(30)
    assert calm.optimise()["step"] == 30
    calm.close()


def test_an_empty_mask_stops_and_names_the_sample(data, target, tmp_path):
    folder = write_random_store(tmp_path / "empty", target, empty="s2")
    with pytest.raises(EyasError, match="the loss mask of 1 samples is zero everywhere: s2"):
        train(config_for(), Store.open(folder), target)


def test_a_step_without_a_supervised_slot_stops_and_names_its_samples(data, target, tmp_path):
    """The answers' tokens after the first are in no draft vocabulary of one token."""
    with pytest.raises(EyasError, match=r"optimiser step \d+ has no supervised slot: samples s\d+"):
        train(
            config_for(draft_vocab_size=1, batch_tok=1, epochs=5.0),
            Store.open(write_random_store(tmp_path / "some", target)),
            target,
        )


ALLOCATOR = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 123 bytes."
)


@pytest.mark.parametrize("error", [ALLOCATOR, MemoryError()], ids=["torch", "Python"])
@pytest.mark.parametrize(
    "where, text",
    [
        (
            "batch_loss",
            (
                r"memory ran out in optimiser step 1: \d+ packed tokens in one pass, draft "
                r"vocabulary 40, 3 draft steps; .*-p pass_tok 64"
            ),
        ),
        (
            "pack",
            (
                r"memory ran out while the samples of optimiser step 1 were read: 5\d tokens; "
                r".*-p batch_tok 64, in another run: -p run_name NAME"
            ),
        ),
        (
            "walk",
            (
                r"memory ran out while held-out samples were judged after optimiser step 1: "
                r"3\d tokens in one pass, draft vocabulary 40, [12] passes at once; .*-p "
                r"pass_tok 64 or -p threads 1, which change"
            ),
        ),
        (
            "Training._update",
            (
                r"memory ran out in optimiser step 1: \d+ packed tokens in one pass, draft "
                r"vocabulary 40, 3 draft steps; .*-p pass_tok 64"
            ),
        ),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_that_runs_out_says_what_to_lower(
    data, store, target, monkeypatch, error, where, text, threads
):
    def full(*_):
        raise error

    owner, _, name = where.rpartition(".")
    monkeypatch.setattr(
        getattr(eyas.training.trainer, owner) if owner else eyas.training.trainer, name, full
    )
    with pytest.raises(EyasError, match=text):
        train(config_for(eval_steps=1, threads=threads), store, target)


def test_memory_for_other_processes_that_is_not_there(data, store, target, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(eyas.training.trainer, "shared", full)
    with pytest.raises(
        EyasError,
        match="memory ran out where 2 processes for the training were begun; .*-p threads 1",
    ):
        train(config_for(threads=2), store, target)


@pytest.mark.parametrize(
    "error, is_memory",
    [
        (ALLOCATOR, True),
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("std::bad_alloc"), True),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("memory"), False),
        (EyasError("memory"), False),
    ],
)
def test_which_errors_are_taken_for_memory(error, is_memory):
    raised = EyasError if is_memory else type(error)
    words = "found; expected less; next: lower it" if is_memory else re.escape(str(error))
    with (
        pytest.raises(raised, match=words),
        eyas.training.trainer.memory("found", "less", "lower it"),
    ):
        raise error


def test_held_out_samples_are_judged_by_pass_tok(data, target, tmp_path):
    """Five of 12 to 29 tokens: in one pass, or in several of at most 40; what is judged is the
    same. A sample above the limit has a pass of its own.
    """
    store, found = Store.open(write_random_store(tmp_path / "store", target, n_samples=30)), []
    lengths = {
        row.id: int(row.length)
        for row in store.index[store.index["split"] == "heldout"].itertuples()
    }
    for pass_tok in (0, 40, 1):
        training = Training(
            config_for(run_name=f"by-{pass_tok}", train_dtype="float32", pass_tok=pass_tok),
            store,
            target,
        )
        groups, judge = [], training._judge
        training._judge = lambda keys, groups=groups, judge=judge: (
            groups.append(keys) or judge(keys)
        )
        training.begin()
        training.step = 1  # with the first weights
        training.evaluate()
        training.close()
        found.append((groups, training.metrics))
    (whole, first), (several, _), (single, _) = found
    assert (
        (len(whole), len(single)) == (1, 5)
        and 1 < len(several) < 5
        and all(sum(groups, []) == list(lengths) for groups, _ in found)
    )
    assert all(sum(map(lengths.get, group)) <= 40 for group in several)
    exact = ["step", "draft_step", "accuracy", "slots", "tok", "acceptance_length"]
    for _, table in found[1:]:
        assert table[exact].equals(first[exact]) and table["loss"].tolist() == pytest.approx(
            first["loss"].tolist(), rel=1e-6
        )


def test_last_checkpoints_and_the_best_drafter_are_kept_with_their_record(data, store, target):
    config = config_for(epochs=4.0, checkpoint_steps=2, keep_checkpoints=3)
    folder = train(config, store, target)
    kept = sorted((folder / "checkpoints").iterdir())
    assert (
        len(kept) == 3
        and kept[-1].name == f"step-{len(plan(lengths_of(store), 4.0, 64, 0)):07d}.pt"
    )
    metrics = pd.read_parquet(folder / "metrics.parquet")
    judged = (
        metrics.dropna(subset="acceptance_length")
        .drop_duplicates("step")
        .set_index("step")["acceptance_length"]
    )
    best = drafter_record(folder / "best.safetensors")
    assert (
        len(judged) == 4
        and best["heldout_acceptance_length"] == judged.max()
        and best["steps"] == judged.idxmax()
    )
    for record in (
        best,
        drafter_record(folder / "drafter.safetensors"),
        torch.load(kept[0], weights_only=True)["record"],
    ):
        assert (
            record["store"] == store.identity
            and record["settings"]["learning_rate"] == config.learning_rate
            and record["code"] == code_version()
        )
    walked = walk(load_drafter(folder, target), store, store.samples("heldout"), config.draft_steps)
    assert judged.iloc[-1] == pytest.approx(
        walked["accepted"].sum() / walked["verify_steps"].sum() + 1
    )  # by the walk itself, on the saved drafter


def test_the_certificates_hash_is_in_checkpoint_and_drafter(data, store, target):
    """SHA-256 of its canonical JSON, here by hand. Without a certificate nothing is trained."""
    with pytest.raises(EyasError, match="the store of run 'tiny' has no parity certificate"):
        train(config_for(epochs=1.0, without_parity=False), store, target)
    certificate = {
        "tests": [{"name": "hidden", "ok": True}],
        "passed": True,
        "store": store.identity,
        "samples": ["s1", "s2"],
        "head": store.head_hash,
        "format": "eyas-parity-2",
    }
    (store.folder / "parity.json").write_text(json.dumps(certificate))
    folder = train(config_for(epochs=1.0, without_parity=False), store, target)
    text = (
        f'{{"format":"eyas-parity-2","head":"{store.head_hash}","passed":true,'
        f'"samples":["s1","s2"],"store":"{store.identity}",'
        '"tests":[{"name":"hidden","ok":true}]}'
    )
    expected = {"tiny": hashlib.sha256(text.encode()).hexdigest()}
    checkpoint = torch.load(max((folder / "checkpoints").iterdir()), weights_only=True)
    for record in (
        checkpoint["record"],
        drafter_record(folder / "drafter.safetensors"),
        drafter_record(folder / "best.safetensors"),
    ):
        assert record["parity"] == expected


def drafter_record(path: Path) -> dict:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["drafter"])["record"]


@pytest.mark.parametrize(
    "losses, lengths, evaluations",
    [
        ([3.0, 2.0, 1.0, 0.5], [1.5, 1.5, 1.4, 1.9], 3),
        ([1.0, 2.0, 3.0, 4.0], [1.1, 1.2, 1.3, 1.4], 4),
        ([3.0, 2.0, 1.0, 0.5], [1.5, 1.4, 1.6, 1.5], 4),
    ],
    ids=[
        "the loss falls, the acceptance does not grow",
        "the loss rises, and so does the acceptance",
        "an acceptance that grows again",
    ],
)
def test_stops_early_by_held_out_acceptance_and_not_by_loss(
    data, store, target, monkeypatch, losses, lengths, evaluations
):
    """What the judge says at each evaluation is given; patience is 2 evaluations without a longer
    acceptance.
    """
    said, snapshots = iter(zip(losses, lengths)), {}

    def judge(self, keys):
        loss, length = next(said)
        snapshots[self.step] = {
            name: tensor.clone() for name, tensor in self.whole.state_dict().items()
        }
        return (
            Losses(torch.tensor(loss), [loss * 10] * 3, [5] * 3, [10] * 3),
            20,
            pd.DataFrame({"accepted": [round(100 * (length - 1))], "verify_steps": [100]}),
        )

    monkeypatch.setattr(Training, "_judge", judge)
    config = config_for(epochs=4.0, patience=2)
    folder = train(config, store, target)
    judged = pd.read_parquet(folder / "metrics.parquet").query(
        "split == 'heldout' and draft_step == 0"
    )
    assert judged["loss"].tolist() == losses[:evaluations] and judged[
        "acceptance_length"
    ].tolist() == pytest.approx(lengths[:evaluations])
    stopped = evaluations < 4
    last = len(plan(lengths_of(store), 4.0, 64, 0))
    assert (pd.read_parquet(folder / "metrics.parquet")["step"].max() < last) == stopped
    at = judged["step"].iloc[lengths.index(max(lengths[:evaluations])) if stopped else -1]
    assert drafter_record(folder / "drafter.safetensors")["steps"] == at
    for name, tensor in load_file(folder / "drafter.safetensors").items():
        if name in snapshots[at]:
            assert torch.equal(tensor, snapshots[at][name]), name
    train(
        config,
        store,
        target,
        on_step=lambda done: pytest.fail("a run that has ended has nothing left to do"),
    )


def test_metrics_as_event_files(data, store, target):
    from tensorboardX.proto.event_pb2 import Event

    folder = train(config_for(epochs=1.0), store, target)
    (events,) = (folder / "tensorboard").iterdir()
    seen, raw = {}, events.read_bytes()
    while raw:  # length, its checksum, the message, its checksum
        size = int.from_bytes(raw[:8], "little")
        event = Event.FromString(raw[12 : 12 + size])
        seen |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        raw = raw[16 + size :]
    metrics = pd.read_parquet(folder / "metrics.parquet")
    for row in metrics.itertuples():
        assert seen[f"{row.split}/loss/draft_step_{row.draft_step}", row.step] == pytest.approx(
            row.loss, rel=1e-6
        )


def test_a_mix_of_stores_trains_on_both_and_holds_out_by_topic(data, target, capsys):
    """The other store's samples count twice; those of a topic that is held out here are not trained
    on.
    """
    own = Store.open(
        write_random_store(
            data / "runs" / "tiny" / "store", target, topics={"s5": "bees", "s11": "tides"}
        )
    )
    write_random_store(
        data / "runs" / "more" / "store",
        target,
        n_samples=5,
        seed=7,
        prefix="m",
        topics={"m1": "bees"},
    )
    config = config_for(epochs=1.0, mix="more:2")
    folder = train(config, own, target)
    assert "not trained on: 1 samples with the topic of a held-out one" in capsys.readouterr().out
    other = Store.open(data / "runs" / "more" / "store").index.set_index("id")
    expected = (
        own.index.loc[own.index["split"] == "train", "loss_tok"].sum()
        + 2 * other.loc[["m0", "m2", "m3", "m4"], "loss_tok"].sum()
    )
    metrics = pd.read_parquet(folder / "metrics.parquet")
    assert metrics[metrics["split"] == "train"].drop_duplicates("step")["tok"].sum() == expected
    with pytest.raises(EyasError, match="another store"):
        train(config_for(epochs=1.0, mix="more:1"), own, target)


def test_fp8_stores_train(data, target, tmp_path):
    folder = train(
        config_for(epochs=2.0),
        Store.open(write_random_store(tmp_path / "fp8", target, dtype="float8_e4m3fn")),
        target,
    )
    assert pd.read_parquet(folder / "metrics.parquet")["loss"].notna().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_byte_that_is_altered_after_the_certificate_stops_the_training(
    data, store, target, threads
):
    """Each sample's hash is compared when it is first read; the message says how to mend it."""
    shard = next((store.folder / "shards").glob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    config = config_for(epochs=1.0, threads=threads)
    with pytest.raises(EyasError, match="holds sample .* is torn or altered.*verify --repair"):
        train(config, Store.open(store.folder), target)
    assert not (config.drafter_dir / "drafter.safetensors").exists()


def test_what_a_training_does_not_check_is_said(data, store, target, capsys):
    """A read of some of a sample's boundaries cannot be compared with the hash of all of them."""
    train(config_for(epochs=1.0), store, target)
    assert "altered bytes" not in capsys.readouterr().out
    shutil.rmtree(config_for().drafter_dir)
    few = tuple(b for b in store.boundaries if b != target.n_blocks)[:1]
    train(config_for(epochs=1.0, boundaries=few), store, target)
    assert "altered bytes are not noticed here; python -m eyas verify" in capsys.readouterr().out
