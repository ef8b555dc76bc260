"""Pack samples without padding, and find the slots that are active in each draft step."""

from dataclasses import dataclass, fields, replace

import torch

from eyas.models.vocab import DraftVocab
from eyas.store.sample import Sample


@dataclass(frozen=True)
class Batch:
    """Samples packed without padding.

    S packed slots, A active slots of step 0, A' last states that teach. The row of a slot is its
    place in the pack. Active slots are rows of step 0 that the mask supervises.
    """

    ids: list[str]
    spans: list[tuple[int, int]]  # rows of each sample
    tokens: torch.Tensor  # int64 [S], token j+1 of slot j
    positions: torch.Tensor  # int64 [S], j
    states: torch.Tensor  # [S, B*H], boundaries in ascending order
    active: torch.Tensor  # int64 [A], rows of the active slots of step 0, ascending
    run: torch.Tensor  # int64 [A], steps for which each is active, at most K
    last: torch.Tensor  # [A', H], the last states that teach
    teachers: (
        torch.Tensor
    )  # int64 [A], row of `last` that teaches step 0; step s: s rows further on
    labels: torch.Tensor  # int64 [A'], draft id of the token after each of `last`, or -1

    def supervised(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of the supervised slots of a step, and the rows that teach them.

        They are the active slots whose following token is in the draft vocabulary; the rows are
        those of `last`.
        """
        kept = (self.run > step).nonzero().squeeze(1)
        rows = self.teachers[kept] + step
        taught = self.labels[rows] >= 0
        return kept[taught], rows[taught]

    def to(self, device: torch.device) -> "Batch":
        """Return the batch with its tensors on this device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if torch.is_tensor(value)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


@dataclass(frozen=True)
class Slots:
    """What token ids and loss mask of a sample say of its slots.

    run: of each active slot, the steps in which it is active: the true mask values in a row from
    j+1 on, at most K. n: the rows that are read, up to the last active slot and, for its later
    steps, the embeddings after it.
    """

    active: torch.Tensor  # int64 [A], slots j that are active in step 0
    run: torch.Tensor  # int64 [A]
    teaching: torch.Tensor  # bool [T-1], by slot j: does any step learn from last state j+1?
    labels: torch.Tensor  # int64 [A'], draft id of token j+2 of the slots in `teaching`, or -1
    n: int

    @property
    def teachers(self) -> torch.Tensor:
        """Return, for each active slot, its place among the slots in `teaching`, int64 [A]."""
        return (self.teaching.cumsum(0) - 1)[self.active]

    def counts(self, n_steps: int) -> list[int]:
        """Return the number of supervised slots of each step."""
        places = self.teaching.cumsum(0) - 1
        by_step = [places[self.active[self.run > s] + s] for s in range(n_steps)]
        return [int((self.labels[rows] >= 0).sum()) for rows in by_step]


def slots_of(
    input_ids: torch.Tensor,  # int64 [T]
    loss_mask: torch.Tensor,  # bool [T]
    vocab: DraftVocab,
    n_steps: int,
    mask_shift: int = 1,
    share: slice = slice(None),
) -> Slots:
    """Return the slots of a sample.

    mask_shift: slot j is supervised by loss_mask[j + mask_shift]; 0 is a common mistake that can be
    measured. share: which of the active slots count, in order.
    """
    last = len(loss_mask) - 1
    supervised = loss_mask[mask_shift : last + mask_shift].nonzero().squeeze(1)
    active = supervised[share]  # token j+1 exists
    # the true values from j+shift on end at the first false one after it
    ends = (~loss_mask).nonzero().squeeze(1)
    next_end = torch.searchsorted(ends, active + mask_shift)
    run = torch.cat([ends, torch.tensor([len(loss_mask)])])[next_end] - (active + mask_shift)
    run = torch.minimum(run, last - active).clamp(max=n_steps)  # token j+1+s has to exist
    teaching = torch.zeros(last, dtype=torch.bool)
    for s in range(n_steps):
        teaching[active[run > s] + s] = True
    # draft id of token j+2 by slot, [T-1]
    following = torch.cat([vocab.to_draft(input_ids[2:]), torch.tensor([-1])])
    n = int((active + run).max()) if len(active) else 0
    return Slots(active, run, teaching, following[teaching], n)


def pack(
    samples: list[Sample],
    boundaries: tuple[int, ...],
    vocab: DraftVocab,
    n_steps: int,
    dtype: torch.dtype,
    mask_shift: int = 1,
    shares: list[slice] | None = None,
) -> Batch:
    """Pack samples with the states of the drafter's boundaries and N, in `dtype`.

    Slots after the last active one are left out. shares: which of each sample's active slots this
    batch learns from. The others are left to another batch, so that nothing is lost or counted
    twice.
    """
    spans, parts = [], []
    start, taught = 0, 0
    for sample, share in zip(samples, shares or [slice(None)] * len(samples)):
        slots = slots_of(sample.input_ids, sample.loss_mask, vocab, n_steps, mask_shift, share)
        states = [sample.states[b][: slots.n] for b in boundaries]
        parts.append(
            {
                "tokens": sample.input_ids[1 : slots.n + 1],
                "positions": torch.arange(slots.n),
                "states": torch.cat(states, dim=-1).to(dtype),
                "active": slots.active + start,
                "run": slots.run,
                "last": sample.last[1:][slots.teaching],
                "teachers": slots.teachers + taught,
                "labels": slots.labels,
            }
        )
        spans.append((start, start + slots.n))
        start += slots.n
        taught += len(slots.labels)
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Batch([sample.id for sample in samples], spans, **columns)
