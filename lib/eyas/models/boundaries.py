"""The boundaries of a run: those that feed the drafter, and those that its store holds.

- `boundaries_of` and `drafter_boundaries` make a `Boundaries` from a run's settings. A profile that
  names none gets the target's own: 2, N//2, N-3.
- `tensor_name` is the name of a boundary's states in a shard and in a file of the capture plugin.

Only the standard library is imported here: `python -m eyas doctor` runs where packages are missing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from eyas.errors import EyasError

MIN_BLOCKS = 7  # below, two of 2, N//2, N-3 are the same boundary


@dataclass(frozen=True)
class Boundaries:
    """The boundaries of a run with a target of N blocks. Raise EyasError for one outside 0..N.

    feeding: those that feed the drafter, ascending. n_blocks: N. extra: more that the store holds.
    """

    feeding: tuple[int, ...]
    n_blocks: int
    extra: tuple[int, ...] = ()

    def __post_init__(self):
        if not self.feeding or list(self.feeding) != sorted(set(self.feeding)):
            expected = "ascending ids, one at least, none twice"
            raise EyasError(f"boundaries {list(self.feeding)}", expected, _retry(self.n_blocks))
        check_boundaries((*self.feeding, *self.extra), self.n_blocks)

    @property
    def last(self) -> int:
        """Return N, the boundary that leaves the last block."""
        return self.n_blocks

    @property
    def with_last(self) -> tuple[int, ...]:
        """Return what a training reads: the boundaries that feed the drafter, and N."""
        return tuple(sorted({*self.feeding, self.last}))

    @property
    def stored(self) -> tuple[int, ...]:
        """Return what a store holds: the boundaries that feed the drafter, the extra ones and N."""
        return tuple(sorted({*self.with_last, *self.extra}))

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.feeding))
        return f"boundaries {shown} feed the drafter; the target has {self.n_blocks} blocks"


def drafter_boundaries(config, n_blocks: int) -> Boundaries:
    """Return the boundaries that feed a run's drafter, and N, without the extra ones of its store.

    This is the only place where empty `boundaries` become the target's own.
    """
    return Boundaries(config.boundaries or default_boundaries(n_blocks), n_blocks)


def boundaries_of(config, n_blocks: int) -> Boundaries:
    """Return the boundaries of a run, as its settings and the blocks of its target say."""
    feeding = drafter_boundaries(config, n_blocks).feeding
    return Boundaries(feeding, n_blocks, config.extra_boundary_ids(n_blocks))


def default_boundaries(n_blocks: int) -> tuple[int, int, int]:
    """Return 2, N//2, N-3, the default of SGLang, vLLM and EAGLE's own code.

    Raise EyasError below 7 blocks, where two of them are the same.
    """
    triple = (2, n_blocks // 2, n_blocks - 3)
    if n_blocks < MIN_BLOCKS:
        shown = ", ".join(map(str, triple))
        raise EyasError(
            f"the target has {n_blocks} blocks: "
            f"the default boundaries 2, N//2, N-3 would be {shown}",
            f"{MIN_BLOCKS} or more blocks, or boundaries of your own",
            _retry(n_blocks),
        )
    return triple


def check_boundaries(boundaries: Iterable[int], n_blocks: int) -> None:
    """Raise EyasError when one of them is outside 0..N."""
    outside = sorted({b for b in boundaries if not 0 <= b <= n_blocks})
    if outside:
        ends = f"0: the embedding, {n_blocks}: what leaves the last block"
        raise EyasError(
            f"boundaries {outside} are outside this target",
            f"ids from 0 to {n_blocks} ({ends})",
            _retry(n_blocks),
        )


def tensor_name(boundary: int) -> str:
    """Return the name of this boundary's states, [T, H], in a file."""
    return f"boundary_{boundary}"


def _retry(n_blocks: int) -> str:
    """Return what to type for boundaries that a target of this many blocks has."""
    if n_blocks >= MIN_BLOCKS:
        fit = default_boundaries(n_blocks)
    else:
        fit = sorted({0, n_blocks // 2, n_blocks - 1})
    return f"the same command with -p boundaries '{list(fit)}'"
