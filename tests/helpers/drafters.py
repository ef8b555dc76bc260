"""Drafters of random weights, and a sample of random states."""

import dataclasses

import torch

from eyas.models.drafter import Drafter, DrafterConfig, ImportedConfig
from eyas.models.vocab import DraftVocab

H, V, D, BOUNDARIES = 12, 40, 15, (1, 2)
SHAPE = DrafterConfig(
    hidden_size=H,
    target_hidden_size=H,
    vocab_size=V,
    draft_vocab_size=D,
    n_heads=4,
    n_kv_heads=2,
    head_dim=6,
    intermediate_size=20,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    max_position_embeddings=64,
    boundaries=BOUNDARIES,
)

# Switches that only drafters of others have.
IMPORTED_SWITCHES = {"norm_before_fc", "norm_before_residual", "own_embedding", "rope_scaling"}


def make_drafter(seed: int = 0, **switches) -> Drafter:
    """Random in every weight, norms too, in float64."""
    torch.manual_seed(seed)
    drafter = Drafter(
        dataclasses.replace(SHAPE, **switches), DraftVocab(torch.randperm(V)[:D].sort().values, V)
    ).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(std=0.5)
    return drafter


def make_sample(mask: list[int], seed: int = 0, n_blocks: int = 3) -> dict:
    g = torch.Generator().manual_seed(seed)
    states = {
        b: torch.randn(len(mask), H, generator=g, dtype=torch.float64)
        for b in (*BOUNDARIES, n_blocks)
    }
    return {
        "input_ids": torch.randint(0, V, (len(mask),), generator=g),
        "loss_mask": torch.tensor(mask).bool(),
        "states": states,
    }


def random_drafter(target, boundaries=(2, 3, 4), **switches) -> Drafter:
    """Random, the norms too: a norm left at 1 would hide one that is forgotten."""
    torch.manual_seed(4)
    ids = torch.randperm(target.vocab_size)[:200].sort().values
    config = DrafterConfig.from_target(target, boundaries, len(ids))
    config_class = ImportedConfig if switches.keys() & IMPORTED_SWITCHES else DrafterConfig
    config = config_class(**dataclasses.asdict(config) | switches)
    drafter = Drafter(config, DraftVocab(ids, target.vocab_size))
    for name, weight in drafter.named_parameters():
        weight.data.uniform_(0.5, 1.5) if "norm" in name else weight.data.normal_(
            std=weight.shape[-1] ** -0.5
        )
    if not config.own_embedding:
        drafter.embed_tokens.weight.data.copy_(target.embedding().float())
    return drafter.eval()
