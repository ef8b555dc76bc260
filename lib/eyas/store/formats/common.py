"""What the foreign formats share: a sample, and reading files that somebody else wrote."""

import gzip
import io
import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.errors import EyasError
from eyas.files import read_json, write_atomic
from eyas.progress import bytes_text
from eyas.store.reader import free_bytes

PRE, POST = "pre-norm", "post-norm"
LENGTHS = "sample_lengths.json"


@dataclass(frozen=True)
class Sample:
    """One sample as these files have it. states: the drafter's boundaries in ascending order, then the last one, [T, H] each."""

    number: int
    input_ids: torch.Tensor  # [T]
    loss_mask: torch.Tensor  # [T]
    states: list[torch.Tensor]

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in (self.input_ids, self.loss_mask, *self.states))


def numbered(source: Path, paths, pattern: str) -> dict[int, Path]:
    """Number -> file, ascending; each inside `source`, however it is linked."""
    found: dict[int, Path] = {}
    for path in paths:
        match = re.fullmatch(pattern, path.name)
        if not match:
            continue
        number = int(match[1])
        if number in found:
            raise EyasError(
                f"sample {number} is there twice: {found[number].relative_to(source)} and {path.relative_to(source)}",
                "one file a sample",
                "remove one of them",
            )
        found[number] = inside(source, path)
    return dict(sorted(found.items()))


def inside(source: Path, path: Path) -> Path:
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(source)):
        raise EyasError(
            f"{path.name} leads out of the folder {source.name!r}",
            "files of that folder only",
            "copy the file there if it is meant",
        )
    return path


def read_described(source: Path, path: Path) -> dict:
    try:
        found = read_json(inside(source, path))
    except FileNotFoundError:
        raise EyasError(
            f"{source.name!r} has no {path.name}",
            "a folder of this format",
            "python -m eyas data import --help",
        ) from None
    except (OSError, ValueError) as error:
        raise torn(path, error) from None
    if not isinstance(found, dict):
        raise EyasError(f"{path.name} is not a JSON object", "one", "make this file again")
    return found


def unpickled(path: Path, keys: tuple[str, ...]) -> dict:
    """The dict of a torch.save file, memory-mapped where it isn't compressed. Tensors and plain values only: anything else is refused unread."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                found = torch.load(io.BytesIO(file.read()), weights_only=True, map_location="cpu")
        else:
            found = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        why = next(
            (line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line),
            "code in place of tensors",
        )
        raise EyasError(
            f"{path.name} is not read: {why.strip()[:120]}",
            "tensors only; nothing is unpickled that could run code",
            "make this file again",
        ) from None
    except (
        Exception
    ) as error:  # bytes of unknown origin: torch has no one class for what can be wrong with them
        raise torn(path, error) from None
    missing = [name for name in keys if not isinstance(found, dict) or name not in found]
    if missing:
        raise EyasError(
            f"{path.name} has no {', '.join(missing)}",
            ", ".join(keys),
            "is it of another format? python -m eyas data import --help",
        )
    return found


def torn(path: Path, error: Exception) -> EyasError:
    return EyasError(
        f"{path.name} is torn: {str(error).splitlines()[0][:120] if str(error) else type(error).__name__}",
        "a whole file",
        "copy or make it again",
    )


def without_batch(value):
    return (
        value[0]
        if isinstance(value, torch.Tensor) and value.ndim == 3 and len(value) == 1
        else value
    )


def checked(name: str, sample: Sample, n_states: int, hidden_size: int) -> Sample:
    """The same sample, or an EyasError naming the file whose shapes aren't those of the format."""
    tensors = [sample.input_ids, sample.loss_mask, *sample.states]
    if not all(
        isinstance(t, torch.Tensor)
        and t.layout == torch.strided
        and t.untyped_storage().nbytes() >= t.nbytes
        for t in tensors
    ):
        raise EyasError(
            f"{name} holds something else in the place of a tensor",
            "plain tensors",
            "make this file again",
        )
    ids, mask = sample.input_ids, sample.loss_mask
    if ids.ndim != 1 or ids.is_floating_point() or mask.shape != ids.shape:
        raise EyasError(
            f"{name}: input_ids {tuple(ids.shape)} {ids.dtype}, loss_mask {tuple(mask.shape)}",
            "[T] both, ids as integers",
            "make this file again",
        )
    if len(sample.states) != n_states:
        raise EyasError(
            f"{name} holds {len(sample.states)} states of {hidden_size} values a token",
            f"{n_states}: this run's {n_states - 1} boundaries and the last one",
            "-p boundaries '[...]' with the boundaries that were captured, and -p target FOLDER",
        )
    wrong = [
        t
        for t in sample.states
        if t.shape != (len(ids), hidden_size)
        or not t.is_floating_point()
        or t.dtype != sample.states[0].dtype
    ]
    if wrong:
        raise EyasError(
            f"{name}: a state is {tuple(wrong[0].shape)} {wrong[0].dtype}",
            f"[{len(ids)}, {hidden_size}], all of one dtype",
            "-p target FOLDER with the target that it was made from",
        )
    return sample


def torch_save(path: Path, found: dict) -> None:
    """torch.save writes the whole storage of a tensor: of a view into a shard, the shard. So every tensor is given a storage of its own size."""
    found = {
        name: [t.clone() for t in value] if isinstance(value, list) else value.clone()
        for name, value in found.items()
    }

    def write(temporary: Path) -> None:
        with open(
            temporary, "wb"
        ) as file:  # a file, not a path: torch puts the path's name into the archive
            torch.save(found, file)

    write_atomic(path, write)


def need_room(folder: Path, need_bytes: int, otherwise: str) -> None:
    free = free_bytes(folder)
    if free < 1.02 * need_bytes + 2**26:
        raise EyasError(
            f"{bytes_text(free)} free, {bytes_text(need_bytes)} will be written",
            "room for them",
            f"free some, or {otherwise}",
        )
