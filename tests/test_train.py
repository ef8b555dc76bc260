"""Training against a slow and obvious float64 reference, and what a run promises: repeatable, resumable, refusing what does not fit."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from test_drafter import BOUNDARIES, H, SHAPE, V, make_drafter, make_sample
import stores
from tiny import make_tiny_target

import eyas.train
import eyas.ttt
from eyas.config import Config
from eyas.drafter import load_drafter
from eyas.errors import EyasError
from eyas.store import Rows, Store
from eyas.target import load_target
from eyas.losses import LOSSES
from eyas.target import Head
from eyas.train import plan, schedule, train
from eyas.ttt import Teacher, batch_loss, pack, step_weights

# ---- the loss and its gradient: one slot, one step, one key at a time, full attention, from the definition


def norm(x, weight):
    return x / (x.square().mean() + SHAPE.rms_norm_eps).sqrt() * weight


def rotate(x, position):
    """RoPE of one head: the pair (x[i], x[i + d/2]) turned by position * theta^(-2i/d)."""
    half, turned = len(x) // 2, list(x)
    for i in range(half):
        angle = position * SHAPE.rope_theta ** (-2 * i / len(x))
        turned[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        turned[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return torch.stack(turned)


def heads(x, weight, position=None):
    """[2H] -> list of heads, rotated where a position is given."""
    parts = (weight @ x).split(SHAPE.head_dim)
    return list(parts) if position is None else [rotate(part, position) for part in parts]


def reference_loss(weights, samples, head, vocab_ids, n_steps, decay):
    """(total, loss sums, hits, slots by draft step) of the samples, packed or not being no notion here."""
    layer = {name.removeprefix("layers.0."): w for name, w in weights.items()}
    sums, hits, slots = [torch.zeros((), dtype=torch.float64) for _ in range(n_steps)], [0] * n_steps, [0] * n_steps
    for sample in samples:
        ids, mask, states = sample["input_ids"].tolist(), sample["loss_mask"].tolist(), sample["states"]

        def mixed(token, hidden):
            return torch.cat([norm(weights["embed_tokens.weight"][token], layer["input_layernorm.weight"]), norm(hidden, layer["hidden_norm.weight"])])

        fused = [weights["fc.weight"] @ torch.cat([states[b][j] for b in sorted(BOUNDARIES)]) for j in range(len(ids))]
        x0 = [mixed(ids[j + 1], fused[j]) for j in range(len(ids) - 1)]
        keys0 = [heads(x, layer["self_attn.k_proj.weight"], j) for j, x in enumerate(x0)]
        values0 = [heads(x, layer["self_attn.v_proj.weight"]) for x in x0]
        for j in range(len(ids) - 1):
            hidden, keys, values = fused[j], keys0[: j + 1], values0[: j + 1]  # grows by the slot's own keys of the later steps
            for s in range(n_steps):
                if not (j + 1 + s < len(ids) and all(mask[j + 1 : j + 2 + s])):
                    break
                x = mixed(ids[j + 1 + s], hidden)
                if s:
                    keys, values = [*keys, heads(x, layer["self_attn.k_proj.weight"], j + s)], [*values, heads(x, layer["self_attn.v_proj.weight"])]
                attended = []
                for h, q in enumerate(heads(x, layer["self_attn.q_proj.weight"], j + s)):
                    group = h // (SHAPE.n_heads // SHAPE.n_kv_heads)
                    p = torch.stack([q @ k[group] / math.sqrt(SHAPE.head_dim) for k in keys]).softmax(0)
                    attended.append(sum(w * v[group] for w, v in zip(p, values)))
                hidden = hidden + layer["self_attn.o_proj.weight"] @ torch.cat(attended)
                normed = norm(hidden, layer["post_attention_layernorm.weight"])
                gate = layer["mlp.gate_proj.weight"] @ normed
                hidden = hidden + layer["mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * (layer["mlp.up_proj.weight"] @ normed))
                following = ids[j + 2 + s] if j + 2 + s < len(ids) else None
                if following not in vocab_ids:
                    continue
                log_q = (weights["lm_head.weight"] @ norm(hidden, weights["norm.weight"])).log_softmax(0)
                p = (head.lm_head[vocab_ids] @ head.normed(states[max(states)][j + 1 + s])).softmax(0)
                sums[s] = sums[s] - (p * log_q).sum()
                hits[s] += vocab_ids[int(log_q.argmax())] == following
                slots[s] += 1
    step_weights = [decay**s for s in range(n_steps)]
    total = sum(w / sum(step_weights) * loss / max(n, 1) for w, loss, n in zip(step_weights, sums, slots))
    return total, [float(loss.detach()) for loss in sums], hits, slots


class WideHead(Head):
    """In float64."""

    def normed(self, states):
        return states / (states.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.norm_weight


def make_head():
    g = torch.Generator().manual_seed(5)
    weight = torch.rand(H, generator=g, dtype=torch.float64) + 0.5
    return WideHead(weight, torch.randn(V, H, generator=g, dtype=torch.float64), 1e-5)


MASKS = {
    "one answer": [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0]],
    "turns": [[0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 1, 1, 1, 1, 0]],
    "cut": [[0, 0, 0, 1, 1, 1, 1, 1]],
    "from the first token": [[1, 1, 1, 1, 1, 1, 0, 0, 1, 1]],
    "packed": [[0, 0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 0], [0, 0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1, 1]],
}


def both_losses(masks, n_steps, decay):
    """(packed implementation, reference), each with the gradients of its own drafter's weights."""
    head, results = make_head(), []
    samples = {str(i): make_sample(mask, seed=i) for i, mask in enumerate(masks)}
    for reference in (False, True):
        drafter = make_drafter()
        if reference:
            total, *rest = reference_loss(dict(drafter.named_parameters()), samples.values(), head, drafter.vocab.ids.tolist(), n_steps, decay)
        else:
            batch = pack(list(samples.items()), BOUNDARIES, drafter.vocab, n_steps, torch.float64)
            losses = batch_loss(drafter, batch, Teacher(head, drafter.vocab, torch.float64), LOSSES["kl"], step_weights(n_steps, decay))
            total, rest = losses.total, [losses.loss, losses.hits, losses.slots]
        total.backward()
        results.append((float(total.detach()), *rest, {name: p.grad for name, p in drafter.named_parameters() if p.requires_grad}))
    return results


@pytest.mark.parametrize("n_steps", range(1, 8))
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_loss_and_gradients_equal_the_reference(masks, n_steps, monkeypatch):
    monkeypatch.setattr(eyas.ttt, "LOGIT_ROWS", 7)  # more than one chunk, the last one cut
    monkeypatch.setattr(eyas.ttt, "PIECE_ROWS", 3)
    (total, loss, hits, slots, grads), (total_r, loss_r, hits_r, slots_r, grads_r) = both_losses(masks, n_steps, decay=0.8)
    assert slots == slots_r and sum(slots) > 0 and hits == hits_r
    assert total == pytest.approx(total_r, abs=1e-9) and loss == pytest.approx(loss_r, abs=1e-9)
    for name, grad in grads_r.items():
        torch.testing.assert_close(grads[name], torch.zeros_like(grads[name]) if grad is None else grad, rtol=0, atol=1e-9, msg=name)


def test_order_and_packing_change_nothing():
    drafter, head = make_drafter(), make_head()
    samples = {str(i): make_sample(mask, seed=i) for i, mask in enumerate(MASKS["packed"])}
    teacher = Teacher(head, drafter.vocab, torch.float64)

    def losses(ids):
        batch = pack([(id, samples[id]) for id in ids], BOUNDARIES, drafter.vocab, 3, torch.float64)
        return batch_loss(drafter, batch, teacher, LOSSES["kl"], step_weights(3, 1.0))

    whole, turned, single = losses("01234"), losses("40321"), [losses(id) for id in "01234"]
    assert whole.slots == turned.slots and whole.hits == turned.hits and whole.loss == pytest.approx(turned.loss, abs=1e-9)
    assert float(whole.total.detach()) == pytest.approx(float(turned.total.detach()), abs=1e-9)
    assert [sum(part.loss[s] for part in single) for s in range(3)] == pytest.approx(whole.loss, abs=1e-9)
    assert [sum(part.slots[s] for part in single) for s in range(3)] == whole.slots


def test_supervised_slots_by_hand():
    """Tokens 3 .. 6 are the answer. Step 0 is supervised at slots 2 .. 5: it takes tokens 3 .. 6, and no slot before."""
    drafter = make_drafter()
    sample = make_sample([0, 0, 0, 1, 1, 1, 1, 0])
    batch = pack([("a", sample)], BOUNDARIES, drafter.vocab, 3, torch.float64)
    assert batch.active.tolist() == [2, 3, 4, 5] and batch.run.tolist() == [3, 3, 2, 1] and batch.spans == [(0, 6)]
    assert torch.equal(batch.tokens[batch.active], sample["input_ids"][3:7]) and torch.equal(batch.last, sample["states"][3][3:7])
    assert torch.equal(batch.labels, drafter.vocab.to_draft(sample["input_ids"][4:8]))


def test_schedule_and_plan():
    factors = [schedule(step, 20, 4) for step in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0] and factors[4] == 1.0 and factors == sorted(factors[:4]) + sorted(factors[4:], reverse=True)
    assert factors[12] == pytest.approx(0.5) and 0 < factors[-1] < 0.02
    lengths = {f"s{i}": 10 + i for i in range(10)}  # 145 tokens
    steps = plan(lengths, 2.5, 40, seed=1)
    by_epoch = [[id for epoch, ids in steps if epoch == e for id in ids] for e in range(3)]
    assert [len(ids) for ids in by_epoch] == [10, 10, 5] and sorted(by_epoch[0]) == sorted(lengths) and by_epoch[0] != by_epoch[1]
    assert all(sum(lengths[id] for id in ids) <= 40 for _, ids in steps)
    assert steps == plan(dict(reversed(lengths.items())), 2.5, 40, seed=1) != plan(lengths, 2.5, 40, seed=2)
    assert plan({"long": 100, "short": 10}, 1.0, 40, seed=0)[0][1] in (["long"], ["short"])  # a sample above the limit has a pack of its own


# ---- runs, on a tiny target with a store of its own

N_BLOCKS = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny", n_blocks=N_BLOCKS)))


def write_store(folder: Path, target, boundaries=(2, 3, N_BLOCKS), n_samples: int = 12, bad: str = "") -> Path:
    manifest = {
        "target": {"name": target.name, "fingerprint": target.fingerprint, "rms_norm_eps": target.rms_norm_eps}, "boundaries": list(boundaries),
        "dtype": "bfloat16", "hidden_size": target.hidden_size, "prompts": {"hash": None},
    }
    samples, g = [], torch.Generator().manual_seed(0)
    for i in range(n_samples):
        length = int(torch.randint(12, 30, (1,), generator=g))
        mask = torch.arange(length) >= length // 2
        states = {b: torch.randn(length, target.hidden_size, generator=g).bfloat16() for b in boundaries}
        if f"s{i}" == bad:
            states[boundaries[0]][length // 2, 0] = math.nan
        samples.append(Rows(f"s{i}", "heldout" if i % 6 == 5 else "train", "chat", torch.randint(0, 60, (length,), generator=g), mask, states))
    return stores.write_store(folder, manifest, target.head(), samples).folder


@pytest.fixture
def store(tmp_path, target):
    return Store.open(write_store(tmp_path / "store", target))


def config_for(**values) -> Config:
    return Config.create(**{"run_name": "tiny", "boundaries": (2, 3), "threads": 1, "draft_vocab_size": 40, "epochs": 3.0, "batch_tok": 64, "max_length": 512, "without_parity": True, **values})


def test_learns_and_reports(data, store, target):
    seen = []
    config = config_for(epochs=30.0, train_dtype="float32")
    folder = train(config, store, target, on_step=seen.append)
    metrics = pd.read_parquet(folder / "metrics.parquet")
    assert list(metrics.columns) == ["step", "epoch", "split", "draft_step", "loss", "accuracy", "slots", "tok", "seconds", "acceptance_length"]
    training = metrics[metrics["split"] == "train"]
    by_epoch = training[training["draft_step"] == 0].groupby("epoch")["loss"].mean()
    assert by_epoch.iloc[-1] < by_epoch.iloc[0] - 0.5
    assert metrics[metrics["split"] == "heldout"].groupby("epoch").size().tolist() == [3] * 30
    assert len(seen) == training["step"].max() == len(training) // 3 and not metrics[["loss", "slots"]].isna().any().any()
    assert load_drafter(folder, target).config.draft_vocab_size == 40


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seed_repeats_bit_for_bit(data, store, target, dtype):
    a, b, c = (load_drafter(train(config_for(run_name=name, seed=seed, train_dtype=dtype), store, target), target) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
    assert not torch.equal(a.fc.weight, c.fc.weight)


KILLED = """
import os, signal, sys
import eyas.train
from eyas.config import Config
from eyas.store import Store
from eyas.target import load_target
def kill(done):
    if done["step"] == 6:
        os.kill(os.getpid(), signal.SIGKILL)
config = Config.create(**eval(sys.argv[1]))
eyas.train.train(config, Store.open(sys.argv[2]), load_target(sys.argv[3]), on_step=kill)
"""


def test_killed_and_started_again_gives_the_same_weights(data, store, target):
    whole = load_drafter(train(config_for(run_name="whole"), store, target), target)
    config = config_for(run_name="killed", checkpoint_steps=2)
    values = {name: getattr(config, name) for name in ("run_name", "boundaries", "threads", "draft_vocab_size", "epochs", "batch_tok", "without_parity", "checkpoint_steps")}
    environment = {**os.environ, "PYTHONPATH": str(Path(eyas.train.__file__).parents[1]), "EYAS_DATA": str(data)}
    process = subprocess.run([sys.executable, "-c", KILLED, repr(values), str(store.folder), str(target.folder)], env=environment, capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert not (config.drafter_dir / "drafter.safetensors").exists()
    steps = []
    train(config, store, target, on_step=lambda done: steps.append(done["step"]))
    assert 1 < steps[0] <= 7  # it went on, from a checkpoint
    again = load_drafter(config.drafter_dir, target)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    tables = [pd.read_parquet(data / "runs" / name / "drafter" / "metrics.parquet").drop(columns="seconds") for name in ("whole", "killed")]
    pd.testing.assert_frame_equal(*tables)
    train(config, store, target, on_step=lambda done: pytest.fail("a finished run has nothing left to do"))


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
        train(config_for(epochs=1.0), Store.open(write_store(tmp_path / "other", target, n_samples=11)), target)
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
        train(config_for(), Store.open(write_store(tmp_path / "empty", target, n_samples=0)), target)
    other = load_target(str(make_tiny_target(tmp_path / "targets" / "other", n_blocks=N_BLOCKS, seed=1)))
    with pytest.raises(EyasError, match="store was made for another target: tiny"):
        train(config_for(), store, other)


def test_a_loss_that_is_not_finite_stops_and_names_the_sample(data, target, tmp_path):
    store = Store.open(write_store(tmp_path / "bad", target, bad="s3"))
    with pytest.raises(EyasError, match=r"optimiser step \d+ is not finite; samples s3;"):
        train(config_for(), store, target)
    assert not (config_for().drafter_dir / "drafter.safetensors").exists()
