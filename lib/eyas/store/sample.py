"""One sample of a data set, as it is written to a store, read from it and trained on."""

from dataclasses import dataclass

import torch


@dataclass
class Sample:
    """Token ids, loss mask and hidden states of one text.

    T tokens, H hidden size. `states` has the boundaries that were asked for, perhaps none.
    """

    id: str
    split: str  # "train" or "heldout"
    category: str
    input_ids: torch.Tensor  # int64 [T]
    loss_mask: torch.Tensor  # bool [T]; true where the token is supervised
    states: dict[int, torch.Tensor]  # boundary -> [T, H]
    truncated: bool = False
    topic: str = ""  # empty: unknown

    @property
    def last(self) -> torch.Tensor:
        """Return the states [T, H] of the last boundary that was read: N in a training."""
        return self.states[max(self.states)]

    def at(self, boundaries: tuple[int, ...]) -> torch.Tensor:
        """Return the states at these boundaries side by side, [T, B*H], as a drafter reads them."""
        return torch.cat([self.states[b] for b in boundaries], dim=-1)

    # ---- parity, inspection and export read a sample as a dict of these three

    def keys(self) -> tuple[str, ...]:
        return "input_ids", "loss_mask", "states"

    def __getitem__(self, name: str):
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)
