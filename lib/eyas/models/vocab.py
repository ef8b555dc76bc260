"""Choose the draft vocabulary: the D target tokens that the drafter can propose.

They are counted where the drafter will propose them. `d2t` and `t2d` have SGLang's meaning:
d2t[draft id] is an *offset* (target id = draft id + d2t[draft id]), and t2d[target id] is true if
the draft vocabulary has the token. The ids are ascending, so offsets are never negative and never
decrease.
"""

import functools
from dataclasses import dataclass

import torch

from eyas.errors import EyasError


@dataclass(frozen=True)
class DraftVocab:
    """Hold a draft vocabulary.

    ids: int64 [D], ascending target ids, none twice. vocab_size: V of the target.
    """

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
        """Return the offsets, int64 [D]."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> torch.Tensor:
        """Return whether each target token is in, bool [V]."""
        return self._draft_ids >= 0

    @functools.cached_property
    def _draft_ids(self) -> torch.Tensor:
        table = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        table[self.ids] = torch.arange(len(self.ids))
        return table  # [V]

    def to_draft(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Return the draft ids (int64) of target ids of any shape; -1 outside the vocabulary."""
        return self._draft_ids[target_ids]


def count_tokens(store, ids: list[str]) -> torch.Tensor:
    """Count each token at the supervised positions of samples: int64 [V].

    `store` is a Store or a Mixture. A sample that is named twice counts twice.
    """
    counts = torch.zeros(len(store.head().lm_head), dtype=torch.int64)
    for _, input_ids, loss_mask in store.texts(ids):
        tok = input_ids[loss_mask]
        counts.index_add_(0, tok, torch.ones_like(tok))  # not bincount: no V additions a sample
    return counts


def choose_vocab(counts: torch.Tensor, draft_vocab_size: int) -> DraftVocab:
    """Return the D most frequent tokens; of equally frequent ones the lower ids.

    speculators sorts in the same way. counts: int64 [V]. Raise EyasError if D is larger than V.
    """
    check_size(draft_vocab_size, len(counts))
    order = (-counts).argsort(stable=True)  # stable: lower ids first among equals
    return DraftVocab(order[:draft_vocab_size].sort().values, len(counts))


def check_size(draft_vocab_size: int, vocab_size: int) -> None:
    """Raise EyasError unless D is from 1 to V."""
    if not 1 <= draft_vocab_size <= vocab_size:
        raise EyasError(
            f"a draft vocabulary of {draft_vocab_size:,} tokens",
            f"1 to {vocab_size:,}, the target's vocabulary",
            f"-p draft_vocab_size {min(8192, vocab_size)}",
        )


def coverage(vocab: DraftVocab, counts: torch.Tensor) -> tuple[int, int]:
    """Return how many of the counted tokens the draft vocabulary has, and how many there are.

    A token outside the draft vocabulary can never be drafted.
    """
    return int(counts[vocab.ids].sum()), int(counts.sum())
