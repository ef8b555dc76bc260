"""The drafter of the training tests, random and in float64, and a sample of random states."""

import dataclasses

import torch

from eyas.models.drafter import Drafter, DrafterConfig
from eyas.models.vocab import DraftVocab
from eyas.store.sample import Sample

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


def make_sample(mask: list[int], seed: int = 0, n_blocks: int = 3) -> Sample:
    g = torch.Generator().manual_seed(seed)
    states = {
        b: torch.randn(len(mask), H, generator=g, dtype=torch.float64)
        for b in (*BOUNDARIES, n_blocks)
    }
    ids = torch.randint(0, V, (len(mask),), generator=g)
    return Sample(str(seed), "train", "chat", ids, torch.tensor(mask).bool(), states)
