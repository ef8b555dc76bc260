"""Name the folders of the project, and write files that are whole or absent.

A file is written under a temporary name in the same folder, flushed, synced to disk and renamed.
"""

import hashlib
import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import torch  # takes seconds to import, and most commands do not need it

RUN_PARTS = (  # folders of a run
    "store",
    "drafter",
    "export",
    "acceptance",
    "prompts",
    "server",
    "notebooks",
    "tune",
    "sweep",
    "jobs",
)
ROOT = Path(__file__).resolve().parents[2]  # the repository


def data_dir() -> Path:
    """Return the folder of hidden states, checkpoints and converted models.

    It is EYAS_DATA, or data/ in the repository. git ignores it.
    """
    return Path(os.environ.get("EYAS_DATA") or ROOT / "data").absolute()


def write_atomic(path: Path, write: Callable[[Path], Any]) -> Path:
    """Call `write(temporary path)`, sync the file to disk and rename it to `path`.

    On any error the temporary file is removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.fchmod(handle, 0o644)  # mkstemp's files are only for their owner
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write a text file in UTF-8, whole or not at all."""
    return write_atomic(path, lambda p: p.write_text(text, encoding="utf-8"))


def write_json(path: Path, data: Any) -> Path:
    """Write a JSON file with an indent of 2, whole or not at all."""
    return write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def set_aside(folder: Path, names: Iterable[str], why: str) -> Path | None:
    """Move these files of a folder into its next free earlier-N folder, and print that.

    Return that folder, or None if none of the files exists. It keeps what another command or other
    settings made, when something new takes its place. `why` says what it was.
    """
    folder = Path(folder)
    existing = [name for name in names if (folder / name).is_file()]
    if not existing:
        return None
    kept = next(path for n in itertools.count(1) if not (path := folder / f"earlier-{n}").exists())
    kept.mkdir()
    for name in existing:
        os.replace(folder / name, kept / name)
    print(f"note: {why}; kept in {shown(kept)}: {', '.join(existing)}")
    return kept


def shown(path: Path) -> str:
    """Return a path as messages show it.

    It is relative to the data folder or the repository if it is inside, otherwise the name alone.
    """
    for root in (data_dir(), ROOT):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return path.name


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_parquet(path: Path) -> "pd.DataFrame":
    """Read a Parquet table that may be replaced at the same time.

    pandas and pyarrow open a path twice. If the file is replaced in between, they join the page
    headers of the first file with the bytes of the second. So the file is opened once here.
    """
    import pandas as pd

    with open(path, "rb") as file:
        return pd.read_parquet(file)


def seal(data: dict) -> dict:
    """Return the data with a `content_hash`, the xxh3-128 of the rest as canonical JSON.

    The hash detects every altered character that changes the content.
    """
    import xxhash  # not at the top: `doctor` runs without any package

    rest = {key: value for key, value in data.items() if key != "content_hash"}
    return rest | {"content_hash": xxhash.xxh3_128_hexdigest(_canonical(rest))}


def is_sealed(data: Any) -> bool:
    """Return whether `data` is a dict whose `content_hash` is right."""
    return (
        isinstance(data, dict)
        and "content_hash" in data
        and seal(data)["content_hash"] == data["content_hash"]
    )


SAFETENSORS_NAMES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


def write_safetensors(
    path: Path, tensors: "dict[str, torch.Tensor | list[torch.Tensor]]", metadata: dict[str, str]
) -> Path:
    """Write a safetensors file, byte for byte as `safetensors.torch.save_file` would.

    A list of tensors is written as their concatenation along the first axis. The pieces are written
    from where they are in memory: nothing is joined or copied first, which matters for a shard of
    several GiB.
    """
    import torch

    pieces = {}
    for name, value in tensors.items():
        parts = value if isinstance(value, list) else [value]
        pieces[name] = [t.contiguous() for t in parts]
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    # Wide types come first, so that every tensor starts at a multiple of its own width.
    names = sorted(pieces, key=lambda name: -pieces[name][0].element_size())
    end = 0
    for name in names:
        first = pieces[name][0]
        start = end
        end += sum(t.nbytes for t in pieces[name])
        shape = list(first.shape)
        if isinstance(tensors[name], list):
            shape[0] = sum(len(t) for t in pieces[name])
        header[name] = {
            "dtype": SAFETENSORS_NAMES[str(first.dtype)],
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(temporary: Path) -> None:
        with open(temporary, "wb", buffering=0) as file:
            _write_all(file, len(text).to_bytes(8, "little") + text)
            for name in names:
                for tensor in pieces[name]:
                    if tensor.numel():
                        _write_all(file, tensor.reshape(-1).view(torch.uint8).numpy().data)

    return write_atomic(path, write)


def _write_all(file, data) -> None:
    """Write all bytes to an unbuffered file, which may take fewer a call."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(data: Any) -> str:
    """Return the sha256 of the canonical JSON text, which is the same on every machine."""
    return hashlib.sha256(_canonical(data)).hexdigest()


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def git_state() -> dict[str, Any]:
    """Return the commit, and whether there are uncommitted changes outside reports/.

    Every run writes reports/. The commit is None without git.
    """

    def git(*arguments):
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--", ".", ":(exclude)reports")),
        }
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def code_version() -> str:
    """Return the commit, with + for uncommitted changes outside reports/; "unknown" without git."""
    state = git_state()
    if not state["commit"]:
        return "unknown"
    return state["commit"][:12] + ("+" if state["dirty"] else "")
