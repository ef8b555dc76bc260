"""One forward pass: the fast training pass, and serving, equal what `Drafter` defines.

The fast pass (`eyas.training.steps`, with gradients written by hand) is compared with autograd over
`Drafter` (`eyas.training.reference`) for every option, in float64. tests/test_train.py compares it
with a slow reference that shares no code with either, and tests/test_export.py compares `Drafter`
with SGLang's and speculators' own models.
"""

import dataclasses

import pytest
import torch

import eyas.training.head_loss
from eyas.models.drafter import DraftCache, Drafter, DrafterConfig, ImportedConfig
from eyas.models.vocab import DraftVocab
from eyas.training.batch import pack
from eyas.training.head_loss import Teacher
from eyas.training.losses import LOSSES
from eyas.training.reference import reference_losses
from eyas.training.ttt import SLOW_PARTS, batch_loss, has_fast_pass, step_weights
from helpers.drafters import BOUNDARIES, SHAPE, H, V, make_sample
from helpers.slow_reference import MASKS, make_head, reference_loss

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OPTIONS = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "both norms": {"fc_norm": True, "norm_output": True},
    "one key for all heads": {"n_kv_heads": 1},
    "a key for each head": {"n_kv_heads": 4},
    "one boundary": {"boundaries": BOUNDARIES[:1], "fc_norm": True},
    "another width than the target's": {"hidden_size": 8, "fc_norm": True},
    "whole vocabulary": {"draft_vocab_size": V},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama3 rope": {"rope_scaling": LLAMA3},
    "yarn rope": {"rope_scaling": YARN, "norm_output": True},
}
SLOW = {
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True, "norm_output": True},
}


def make_drafter(switches: dict) -> Drafter:
    """Return a drafter that is random in every weight, norms too, in float64."""
    torch.manual_seed(0)
    config = ImportedConfig(**dataclasses.asdict(SHAPE) | switches)
    vocab = DraftVocab(torch.randperm(V)[: config.draft_vocab_size].sort().values, V)
    drafter = Drafter(config, vocab).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(std=0.5)
    return drafter


def losses_and_gradients(
    compute, switches, masks, n_steps, loss="kl", mask_shift=1, shares=None, grid=False
):
    """Return (total, loss, hits, slots, gradients by name) of `compute` on these samples."""
    drafter = make_drafter(switches)
    samples = [make_sample(mask, seed=i) for i, mask in enumerate(masks)]
    boundaries = drafter.config.boundaries
    batch = pack(samples, boundaries, drafter.vocab, n_steps, torch.float64, mask_shift, shares)
    teacher = Teacher(make_head(), drafter.vocab, torch.float64, LOSSES[loss].whole_vocab)
    counts = [len(batch.tokens)] * n_steps if grid else None
    weights = step_weights(n_steps, 0.8)
    found = compute(drafter, batch, teacher, LOSSES[loss], weights, counts)
    found.total.backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.requires_grad}
    return float(found.total.detach()), found.loss, found.hits, found.slots, gradients


def assert_same(ours, reference):
    (total, loss, hits, slots, gradients), (total_r, loss_r, hits_r, slots_r, gradients_r) = (
        ours,
        reference,
    )
    assert slots == slots_r and hits == hits_r and sum(slots) > 0
    assert total == pytest.approx(total_r, abs=1e-9)
    assert loss == pytest.approx(loss_r, abs=1e-9)
    assert set(gradients) == set(gradients_r)
    for name, gradient in gradients_r.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-9, msg=name)
    for name in ("fc.weight", "norm.weight", "layers.0.self_attn.k_proj.weight"):
        assert float(gradients_r[name].abs().max()) > 1e-4, name


def assert_fast_is_exact(*arguments, **options):
    fast = losses_and_gradients(batch_loss, *arguments, **options)
    assert_same(fast, losses_and_gradients(reference_losses, *arguments, **options))


@pytest.mark.parametrize("n_steps", range(1, 8))
@pytest.mark.parametrize("switches", OPTIONS.values(), ids=OPTIONS)
def test_the_fast_pass_equals_the_drafter(switches, n_steps, monkeypatch):
    monkeypatch.setattr(eyas.training.head_loss, "LOGIT_ROWS", 7)  # more than one chunk
    monkeypatch.setattr(eyas.training.head_loss, "PIECE_ROWS", 3)
    assert has_fast_pass(make_drafter(switches).config)
    assert_fast_is_exact(switches, MASKS["packed"], n_steps)


@pytest.mark.parametrize("n_steps", range(1, 8))
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_equals_the_drafter(loss, n_steps):
    assert_fast_is_exact({"fc_norm": True}, MASKS["turns"], n_steps, loss)


@pytest.mark.parametrize("masks", [MASKS["turns"], MASKS["packed"]], ids=["turns", "packed"])
@pytest.mark.parametrize(
    "options",
    [
        {"mask_shift": 0},
        {"grid": True},
        {"loss": "lk_lambda", "mask_shift": 0, "grid": True},
    ],
    ids=str,
)
def test_every_way_to_count_equals_the_drafter(masks, options):
    assert_fast_is_exact({"norm_output": True}, masks, 3, **options)


@pytest.mark.parametrize("share", [slice(0, 2), slice(2, None)], ids=str)
@pytest.mark.parametrize("switches", [OPTIONS["plain"], OPTIONS["both norms"]], ids=str)
def test_a_part_of_a_sample_equals_the_drafter(switches, share):
    masks = MASKS["packed"]
    assert_fast_is_exact(switches, masks, 4, shares=[share] * len(masks))


@pytest.mark.parametrize("n_steps", [1, 3, 7])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    "switches", [OPTIONS["plain"], OPTIONS["both norms"]], ids=["plain", "both norms"]
)
def test_the_drafter_equals_the_definition(switches, masks, n_steps):
    """Autograd over `Drafter`, against one slot, one step and one key at a time."""
    drafter = make_drafter(switches)
    samples = [make_sample(mask, seed=i) for i, mask in enumerate(masks)]
    total, loss, hits, slots = reference_loss(drafter, samples, make_head(), n_steps, 0.8)
    total.backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in drafter.named_parameters()
        if p.requires_grad
    }
    ours = losses_and_gradients(reference_losses, switches, masks, n_steps)
    assert_same(ours, (float(total.detach()), loss, hits, slots, gradients))


@pytest.mark.parametrize("switches", SLOW.values(), ids=SLOW)
def test_parts_that_the_fast_pass_lacks_are_trained_all_the_same(switches):
    drafter = make_drafter(switches)
    assert not has_fast_pass(drafter.config)
    ours = losses_and_gradients(batch_loss, switches, MASKS["turns"], 3)
    assert_same(ours, losses_and_gradients(reference_losses, switches, MASKS["turns"], 3))
    without = losses_and_gradients(batch_loss, {}, MASKS["turns"], 3)
    assert ours[0] != pytest.approx(without[0], abs=1e-3)
    if "norm_before_fc" in switches:
        assert float(ours[-1]["input_norm.weight"].abs().max()) > 1e-4


def test_slow_parts_are_parts_of_a_drafter():
    fields = {field.name for field in dataclasses.fields(ImportedConfig)}
    assert set(SLOW_PARTS) <= fields
    assert all(set(SLOW_PARTS) & set(switches) for switches in SLOW.values())
    assert not any(getattr(DrafterConfig, part) for part in SLOW_PARTS)


@torch.no_grad()
@pytest.mark.parametrize("switches", (OPTIONS | SLOW).values(), ids=OPTIONS | SLOW)
def test_draft_steps_equal_serving(switches):
    """Slot by slot with a cache, as serving does it, for every slot and step."""
    drafter, n_steps, n = make_drafter(switches), 4, 9
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, V, (n + n_steps,), generator=g)
    width = len(drafter.config.boundaries) * H
    hidden = drafter.fuse(torch.randn(n, width, generator=g, dtype=torch.float64))
    slots = torch.tensor([0, 2, 3, 7])
    out, steps = drafter.first_step(tokens[:n], hidden, slots)
    by_step = [dict(zip(slots.tolist(), out))]
    for s in range(1, n_steps):
        if s == 2:  # one slot ends
            steps.keep(torch.tensor([True, False, True, True]))
            out = out[torch.tensor([True, False, True, True])]
        out = drafter.next_step(tokens[steps.slots + s], drafter.feed_back(out), steps)
        by_step.append(dict(zip(steps.slots.tolist(), out)))
    assert [sorted(found) for found in by_step] == [[0, 2, 3, 7]] * 2 + [[0, 3, 7]] * 2
    for slot in slots.tolist():
        cache = DraftCache()
        out = drafter.extend(tokens[: slot + 1], hidden[: slot + 1], cache)[-1:]
        for s in range(n_steps):
            if s:
                token = tokens[slot + s, None]
                out = drafter.extend(token, drafter.feed_back(out), cache)
            if slot in by_step[s]:
                torch.testing.assert_close(out[0], by_step[s][slot], rtol=0, atol=1e-12)
