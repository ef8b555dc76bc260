"""Export a store to other projects' files.

python -m eyas data export --to FORMAT --out FOLDER
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from eyas.errors import EyasError
from eyas.progress import Progress, bytes_text
from eyas.store.formats.common import POST, PRE, Sample, need_room
from eyas.store.formats.known import FORMATS
from eyas.store.formats.specforge import write_specforge
from eyas.store.formats.speculators import write_speculators
from eyas.store.formats.speculators_v1 import write_speculators_v1
from eyas.store.reader import Store

WRITERS = {
    "speculators-v1": write_speculators_v1,
    "speculators": write_speculators,
    "specforge": write_specforge,
}


def export_store(
    store: Store, name: str, folder: Path, boundaries: tuple[int, ...], split: str | None = None
) -> str:
    """Write the extracted samples (of one split) as files of another project.

    Return a summary in one line.

    - The folder must be empty or absent.
    - Samples are numbered in the order of the index. Those of an import keep their numbers, except
      for `speculators`, whose rows have no gaps.
    - States keep their dtype; fp8 is written as bfloat16. For `specforge`, a last state before the
      norm is normed in float32 and rounded to its dtype.

    Raise EyasError if the store cannot be written in this format or the disk is too small.
    """
    format = FORMATS[name]
    folder = Path(folder).expanduser()
    missing = [b for b in boundaries if b not in store.boundaries[:-1]]
    if missing:
        raise EyasError(
            f"the store has boundaries {list(store.boundaries)}, not {missing} and the last",
            "",
            "-p boundaries '[...]' with some of them",
        )
    last_state = store.manifest.get("last_state", PRE)
    if last_state == POST and format.norm == PRE:
        raise EyasError(
            f"the store's last states are {POST}, files of {name} hold them {PRE},"
            " and the norm can't be undone",
            "a format with states after the norm",
            "--to specforge",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise EyasError(
            f"{folder.name!r} is not empty",
            "a folder that is empty or not there yet",
            "--out FOLDER",
        )
    ids = store.samples(split)
    if not ids:
        raise EyasError(
            "the store has no extracted sample" + (f" of split {split}" if split else ""),
            "one at least",
            "python -m eyas extract",
        )
    tokens = int(store.index.set_index("id").loc[ids, "length"].sum())
    itemsize = max(getattr(torch, store.manifest["dtype"]).itemsize, 2)  # fp8 becomes bfloat16
    row_bytes = (len(boundaries) + 1) * store.manifest["hidden_size"] * itemsize + 16
    need_room(folder, tokens * row_bytes, "--out FOLDER on a larger disk")
    folder.mkdir(parents=True, exist_ok=True)
    with Progress(len(ids)) as progress:
        samples = _outgoing(store, ids, boundaries, name, progress)
        WRITERS[name](folder, samples, store, boundaries)
    layers = [b - format.id_is_boundary_minus for b in boundaries]
    return (
        f"{len(ids)} samples, {tokens:,} tokens, {bytes_text(tokens * row_bytes)} for {name};"
        f" boundaries {list(boundaries)} are its layer ids {layers}"
    )


def _outgoing(
    store: Store, ids: list[str], boundaries: tuple[int, ...], name: str, progress: Progress
) -> Iterator[Sample]:
    """Yield the samples as the format has them: last state with or without norm, ids int64."""
    norming = FORMATS[name].norm == POST and store.manifest.get("last_state", PRE) == PRE
    head = store.head() if norming else None
    keeps_numbers = store.manifest["engine"]["name"] in FORMATS and name != "speculators"
    for place, id in enumerate(ids):
        sample = store.read(id, (*boundaries, store.boundaries[-1]))
        states = list(sample["states"].values())  # [T, H] each
        if head is not None:
            states[-1] = head.normed(states[-1]).to(states[-1].dtype)
        number = int(id.rsplit("-", 1)[1]) if keeps_numbers else place
        yield Sample(number, sample["input_ids"], sample["loss_mask"].long(), states)
        n_bytes = sum(t.nbytes for t in states)
        progress.update(samples=1, tok=len(sample["input_ids"]), bytes=n_bytes)
