"""The draft vocabulary: what is kept, and SGLang's meaning of d2t and t2d."""

from types import SimpleNamespace

import pytest
import torch

from eyas.errors import EyasError
from eyas.models.vocab import DraftVocab, choose_vocab, count_tokens, coverage


def test_most_frequent_kept_lower_ids_first_among_equals():
    #                      0  1  2  3  4  5  6  7
    counts = torch.tensor([0, 5, 2, 2, 9, 2, 0, 1])
    assert choose_vocab(counts, 2).ids.tolist() == [1, 4]
    assert choose_vocab(counts, 4).ids.tolist() == [
        1,
        2,
        3,
        4,
    ]  # of the three tokens seen twice, the lower two
    assert choose_vocab(counts, 7).ids.tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        7,
    ]  # token 0 before token 6, both never seen
    assert choose_vocab(counts, 8).ids.tolist() == list(range(8))


def test_offsets_as_sglang_reads_them():
    vocab = DraftVocab(torch.tensor([1, 4, 6]), 8)
    assert vocab.d2t.tolist() == [1, 3, 4]
    assert (vocab.d2t + torch.arange(3)).tolist() == [1, 4, 6]  # `hot_token_id` of llama_eagle3.py
    assert vocab.t2d.tolist() == [False, True, False, False, True, False, True, False]
    assert vocab.to_draft(torch.tensor([[6, 0], [4, 1]])).tolist() == [[2, -1], [1, 0]]


def test_coverage_counts():
    counts = torch.tensor([0, 5, 2, 2, 9, 2, 0, 1])
    assert coverage(choose_vocab(counts, 2), counts) == (14, 21)


def test_only_supervised_positions_are_counted():
    samples = {
        "a": {
            "input_ids": torch.tensor([3, 1, 1, 2]),
            "loss_mask": torch.tensor([False, False, True, True]),
        },
        "b": {"input_ids": torch.tensor([1, 0, 3]), "loss_mask": torch.tensor([True, False, True])},
        "c": {"input_ids": torch.tensor([2, 2]), "loss_mask": torch.tensor([True, True])},
    }
    store = SimpleNamespace(
        texts=lambda ids: [(id, *samples[id].values()) for id in ids],
        head=lambda: SimpleNamespace(lm_head=torch.zeros(5, 2)),
    )
    assert count_tokens(store, ["a", "b"]).tolist() == [0, 2, 1, 1, 0]
    assert count_tokens(store, ["a", "b", "b"]).tolist() == [0, 3, 1, 2, 0]


@pytest.mark.parametrize("size", [0, 9])
def test_more_than_the_vocabulary_is_refused(size):
    with pytest.raises(EyasError, match="draft vocabulary of"):
        choose_vocab(torch.ones(8, dtype=torch.int64), size)


@pytest.mark.parametrize("ids", [[], [2, 1], [1, 1], [-1, 2], [3, 8]])
def test_ids_that_are_no_draft_vocabulary(ids):
    with pytest.raises(EyasError, match="not ascending"):
        DraftVocab(torch.tensor(ids, dtype=torch.int64), 8)
