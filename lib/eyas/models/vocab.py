"""The draft vocabulary: the D target tokens that the drafter can say, counted where it will have to say them.

`d2t` and `t2d` have SGLang's meaning: d2t[draft id] is an *offset* (target id = draft id + d2t[draft id]), t2d[target id] is true where
the token is in. The ids are ascending, so offsets never decrease and are never negative.
"""

import functools
from dataclasses import dataclass

import torch

from eyas.errors import EyasError


@dataclass(frozen=True)
class DraftVocab:
    """ids: int64 [D], ascending target ids, none twice; vocab_size: V of the target."""

    ids: torch.Tensor
    vocab_size: int

    def __post_init__(self):
        if (
            len(self.ids) == 0
            or (self.ids[1:] <= self.ids[:-1]).any()
            or self.ids[0] < 0
            or self.ids[-1] >= self.vocab_size
        ):
            raise EyasError(
                "a draft vocabulary that is not ascending ids of the target",
                f"each once, from 0 to {self.vocab_size - 1}",
            )

    @property
    def d2t(self) -> torch.Tensor:
        """int64 [D], offsets."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> torch.Tensor:
        """bool [V]."""
        return self._draft_ids >= 0

    @functools.cached_property
    def _draft_ids(self) -> torch.Tensor:
        table = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        table[self.ids] = torch.arange(len(self.ids))
        return table  # [V]

    def to_draft(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Target ids of any shape -> int64 draft ids, -1 outside the draft vocabulary."""
        return self._draft_ids[target_ids]


def count_tokens(store, ids: list[str]) -> torch.Tensor:
    """int64 [V]: how often each token stands at a supervised position of these samples of a Store or a Mixture; one named twice counts twice."""
    counts = torch.zeros(len(store.head().lm_head), dtype=torch.int64)
    for _, input_ids, loss_mask in store.texts(ids):
        tok = input_ids[loss_mask]
        counts.index_add_(0, tok, torch.ones_like(tok))  # not V additions a sample
    return counts


def choose_vocab(counts: torch.Tensor, draft_vocab_size: int) -> DraftVocab:
    """The D most frequent tokens; of equally frequent ones the lower ids (as speculators sorts). counts: int64 [V].

    EyasError where D is larger than the vocabulary.
    """
    check_size(draft_vocab_size, len(counts))
    order = (-counts).argsort(stable=True)  # stable: lower ids first among equals
    return DraftVocab(order[:draft_vocab_size].sort().values, len(counts))


def check_size(draft_vocab_size: int, vocab_size: int) -> None:
    if not 1 <= draft_vocab_size <= vocab_size:
        raise EyasError(
            f"a draft vocabulary of {draft_vocab_size:,} tokens",
            f"1 to {vocab_size:,}, the target's vocabulary",
            f"-p draft_vocab_size {min(8192, vocab_size)}",
        )


def coverage(vocab: DraftVocab, counts: torch.Tensor) -> tuple[int, int]:
    """(occurrences that the draft vocabulary covers, all occurrences): what lies outside can never be drafted."""
    return int(counts[vocab.ids].sum()), int(counts.sum())
