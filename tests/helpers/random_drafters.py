"""A drafter with random weights, of any shape that the library knows."""

import dataclasses

import torch

from eyas.models.drafter import Drafter, DrafterConfig, ImportedConfig
from eyas.models.vocab import DraftVocab

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BOUNDARIES = (2, 3, 4)
IMPORTED = {
    "norm_before_fc": True,
    "norm_before_residual": True,
    "own_embedding": True,
    "rope_scaling": LLAMA3,
}


def make_drafter(target, boundaries=BOUNDARIES, **switches) -> Drafter:
    """Random, the norms too: a norm left at 1 would hide one that is forgotten."""
    torch.manual_seed(4)
    ids = torch.randperm(target.vocab_size)[:200].sort().values
    config = DrafterConfig.from_target(target, boundaries, len(ids))
    config = (ImportedConfig if {*switches} & {*IMPORTED} else DrafterConfig)(
        **dataclasses.asdict(config) | switches
    )
    drafter = Drafter(config, DraftVocab(ids, target.vocab_size))
    for name, weight in drafter.named_parameters():
        weight.data.uniform_(0.5, 1.5) if "norm" in name else weight.data.normal_(
            std=weight.shape[-1] ** -0.5
        )
    if not config.own_embedding:
        drafter.embed_tokens.weight.data.copy_(target.embedding().float())
    return drafter.eval()
