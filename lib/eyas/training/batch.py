"""Pack samples without padding, and find the slots that are active in each draft step."""

from dataclasses import dataclass

import torch

from eyas.models.vocab import DraftVocab


@dataclass(frozen=True)
class Batch:
    """Samples packed without padding. A slot's row here is its place in the pack; active slots are rows of step 0 that are supervised by the mask."""

    ids: list[str]
    spans: list[tuple[int, int]]  # rows of each sample
    tokens: torch.Tensor  # int64 [S], token j+1 of slot j
    positions: torch.Tensor  # int64 [S], j
    states: torch.Tensor  # [S, B*H], boundaries in ascending order
    active: torch.Tensor  # int64 [A], rows of the active slots of step 0, ascending
    run: torch.Tensor  # int64 [A], steps for which each is active: the run of true mask values from j+1 on, at most K
    last: torch.Tensor  # [A', H], the last states that teach
    teachers: (
        torch.Tensor
    )  # int64 [A], row of `last` that teaches step 0; step s is taught by the row s further on
    labels: torch.Tensor  # int64 [A'], draft id of the token behind each of `last`; -1: outside the draft vocabulary, or no such token

    def supervised(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(numbers of the active slots, rows of `last` that teach them): those active in that step whose following token is in the draft vocabulary."""
        kept = (self.run > step).nonzero().squeeze(1)
        rows = self.teachers[kept] + step
        taught = self.labels[rows] >= 0
        return kept[taught], rows[taught]

    def to(self, device: torch.device) -> "Batch":
        moved = (
            getattr(self, name).to(device)
            for name in (
                "tokens",
                "positions",
                "states",
                "active",
                "run",
                "last",
                "teachers",
                "labels",
            )
        )
        return Batch(self.ids, self.spans, *moved)


@dataclass(frozen=True)
class Slots:
    """What token ids and loss mask of a sample say of its slots."""

    active: torch.Tensor  # int64 [A], slots j that are active in step 0
    run: torch.Tensor  # int64 [A], steps for which each is active, at most K
    teaching: torch.Tensor  # bool [T-1], by slot j: does any step learn from last state j+1?
    labels: torch.Tensor  # int64 [A'], draft id of token j+2 of the slots in `teaching`, or -1
    n: int  # rows that are read: slots up to the last active one and, for its later steps, the embeddings behind it

    def counts(self, n_steps: int) -> list[int]:
        """Supervised slots of each step."""
        at = self.teaching.cumsum(0) - 1
        return [
            int((self.labels[at[self.active[self.run > s] + s]] >= 0).sum()) for s in range(n_steps)
        ]


def slots_of(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    vocab: DraftVocab,
    n_steps: int,
    mask_shift: int = 1,
    share: slice = slice(None),
) -> Slots:
    """`mask_shift`: slot j is supervised by loss_mask[j + mask_shift]; 0 is the common mistake, kept to be measured. `share`: of the active slots, in order."""
    last = len(loss_mask) - 1
    active = (
        loss_mask[mask_shift : last + mask_shift].nonzero().squeeze(1)[share]
    )  # token j+1 is there
    ends = (
        (~loss_mask).nonzero().squeeze(1)
    )  # the run of true values from j+shift on ends at the first false one behind it
    run = torch.cat([ends, torch.tensor([len(loss_mask)])])[
        torch.searchsorted(ends, active + mask_shift)
    ] - (active + mask_shift)
    run = torch.minimum(run, last - active).clamp(max=n_steps)  # token j+1+s has to be there
    teaching = torch.zeros(last, dtype=torch.bool)
    for s in range(n_steps):
        teaching[active[run > s] + s] = True
    following = torch.cat(
        [vocab.to_draft(input_ids[2:]), torch.tensor([-1])]
    )  # [T-1], draft id of token j+2
    return Slots(
        active, run, teaching, following[teaching], int((active + run).max()) if len(active) else 0
    )


def pack(
    samples: list[tuple[str, dict]],
    boundaries: tuple[int, ...],
    vocab: DraftVocab,
    n_steps: int,
    dtype: torch.dtype,
    mask_shift: int = 1,
    shares: list[slice] | None = None,
) -> Batch:
    """(id, sample as `Store.read` gives it, the last boundary being N) to one batch with states in `dtype`. Slots behind the last active one are left out.

    `shares`: of each sample's active slots those that this batch learns from; the others are left to another batch, and nothing is lost or counted twice.
    """
    spans, parts, start, taught = [], [], 0, 0
    for (_, sample), share in zip(samples, shares or [slice(None)] * len(samples)):
        ids, states = sample["input_ids"], sample["states"]
        slots = slots_of(ids, sample["loss_mask"], vocab, n_steps, mask_shift, share)
        at = slots.teaching.cumsum(0) - 1 + taught
        parts.append(
            (
                ids[1 : slots.n + 1],
                torch.arange(slots.n),
                torch.cat([states[b][: slots.n] for b in boundaries], dim=-1).to(dtype),
                slots.active + start,
                slots.run,
                states[max(states)][1:][slots.teaching],
                at[slots.active],
                slots.labels,
            )
        )
        spans.append((start, start + slots.n))
        start, taught = start + slots.n, taught + len(slots.labels)
    return Batch([id for id, _ in samples], spans, *(torch.cat(column) for column in zip(*parts)))
