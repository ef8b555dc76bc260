"""Define what the foreign formats share: a sample, and safe reading of other people's files."""

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

PRE = "pre-norm"
POST = "post-norm"
LENGTHS = "sample_lengths.json"


@dataclass(frozen=True)
class Sample:
    """Hold one sample of such files.

    states: [T, H] each; the drafter's boundaries in ascending order, then the last one.
    """

    number: int
    input_ids: torch.Tensor  # [T]
    loss_mask: torch.Tensor  # [T]
    states: list[torch.Tensor]

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(t.nbytes for t in (self.input_ids, self.loss_mask, *self.states))


def numbered(source: Path, paths, pattern: str) -> dict[int, Path]:
    """Return {number: file}, ascending, of the paths whose names match `pattern`.

    Raise EyasError if a number occurs twice, or if a file leads out of `source` by a link.
    """
    files: dict[int, Path] = {}
    for path in paths:
        match = re.fullmatch(pattern, path.name)
        if not match:
            continue
        number = int(match[1])
        if number in files:
            raise EyasError(
                f"sample {number} is there twice:"
                f" {files[number].relative_to(source)} and {path.relative_to(source)}",
                "one file a sample",
                "remove one of them",
            )
        files[number] = inside(source, path)
    return dict(sorted(files.items()))


def inside(source: Path, path: Path) -> Path:
    """Return the path. Raise EyasError if it leads out of the folder `source`."""
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(source)):
        raise EyasError(
            f"{path.name} leads out of the folder {source.name!r}",
            "files of that folder only",
            "copy the file there if it is meant",
        )
    return path


def read_described(source: Path, path: Path) -> dict:
    """Return a JSON object of the folder. Raise EyasError if it does not exist or is none."""
    try:
        content = read_json(inside(source, path))
    except FileNotFoundError:
        raise EyasError(
            f"{source.name!r} has no {path.name}",
            "a folder of this format",
            "python -m eyas data import --help",
        ) from None
    except (OSError, ValueError) as error:
        raise torn(path, error) from None
    if not isinstance(content, dict):
        raise EyasError(f"{path.name} is not a JSON object", "one", "make this file again")
    return content


def unpickled(path: Path, keys: tuple[str, ...]) -> dict:
    """Return the dict of a torch.save file, memory-mapped unless it is compressed.

    Only tensors and plain values are read. Raise EyasError for anything else, for a torn file, and
    if a key is missing.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                content = io.BytesIO(file.read())
            loaded = torch.load(content, weights_only=True, map_location="cpu")
        else:
            loaded = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        lines = str(error).splitlines()
        named = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
        reason = named[0] if named else "code in place of tensors"
        raise EyasError(
            f"{path.name} is not read: {reason.strip()[:120]}",
            "tensors only; nothing is unpickled that could run code",
            "make this file again",
        ) from None
    # torch has no common class for what can be wrong with bytes of unknown origin.
    except Exception as error:
        raise torn(path, error) from None
    missing = [name for name in keys if not isinstance(loaded, dict) or name not in loaded]
    if missing:
        raise EyasError(
            f"{path.name} has no {', '.join(missing)}",
            ", ".join(keys),
            "is it of another format? python -m eyas data import --help",
        )
    return loaded


def torn(path: Path, error: Exception) -> EyasError:
    """Return the error for a file that cannot be read."""
    reason = type(error).__name__
    if str(error):
        reason = str(error).splitlines()[0][:120]
    return EyasError(f"{path.name} is torn: {reason}", "a whole file", "copy or make it again")


def without_batch(value):
    """Return a tensor [1, T, H] as [T, H], and anything else unchanged."""
    is_batch = isinstance(value, torch.Tensor) and value.ndim == 3 and len(value) == 1
    return value[0] if is_batch else value


def checked(name: str, sample: Sample, n_states: int, hidden_size: int) -> Sample:
    """Return the sample. Raise EyasError, which names the file, if its shapes are not the format's.

    n_states: the drafter's boundaries and the last one.
    """
    tensors = [sample.input_ids, sample.loss_mask, *sample.states]
    if not all(_is_plain_tensor(t) for t in tensors):
        raise EyasError(
            f"{name} holds something else in the place of a tensor",
            "plain tensors",
            "make this file again",
        )
    ids = sample.input_ids
    mask = sample.loss_mask
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


def _is_plain_tensor(value) -> bool:
    """Return whether a value is a dense tensor whose storage holds all of it."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.untyped_storage().nbytes() >= value.nbytes
    )


def torch_save(path: Path, content: dict) -> None:
    """Write tensors, and lists of tensors, with torch.save; the file is whole or absent.

    torch.save writes a tensor's whole storage, which for a view into a shard is the shard. So every
    tensor is cloned first.
    """
    own_storage = {}
    for name, value in content.items():
        if isinstance(value, list):
            own_storage[name] = [t.clone() for t in value]
        else:
            own_storage[name] = value.clone()

    def write(temporary: Path) -> None:
        # An open file, not a path: torch writes a path's name into the archive.
        with open(temporary, "wb") as file:
            torch.save(own_storage, file)

    write_atomic(path, write)


def need_room(folder: Path, need_bytes: int, otherwise: str) -> None:
    """Raise EyasError if the disk of a folder is too small for `need_bytes`."""
    free = free_bytes(folder)
    if free < 1.02 * need_bytes + 2**26:
        raise EyasError(
            f"{bytes_text(free)} free, {bytes_text(need_bytes)} will be written",
            "room for them",
            f"free some, or {otherwise}",
        )
