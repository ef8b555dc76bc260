"""Where things lie, and writing that is whole or absent: temporary name in the same folder, flush, fsync, rename."""

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
    import torch  # seconds to import, and most commands do without

RUN_PARTS = (
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
)  # folders of a run
ROOT = Path(__file__).resolve().parents[2]  # the repository


def data_dir() -> Path:
    """The one ignored folder for hidden states, checkpoints and converted models: EYAS_DATA, else data/."""
    return Path(os.environ.get("EYAS_DATA") or ROOT / "data").absolute()


def write_atomic(path: Path, write: Callable[[Path], Any]) -> Path:
    """Call `write(temporary path)`, then fsync and rename to `path`. On any error the temporary file is removed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.fchmod(handle, 0o644)  # mkstemp's files are for their owner alone, reports are for everybody
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
    return write_atomic(path, lambda p: p.write_text(text, encoding="utf-8"))


def write_json(path: Path, data: Any) -> Path:
    return write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def set_aside(folder: Path, names: Iterable[str], why: str) -> Path | None:
    """Move these files of a folder into its next free earlier-N folder, and say so; None where none of them exists.

    For what another command or other settings made: it is kept where the new one takes its place. `why` says what it was.
    """
    folder = Path(folder)
    found = [name for name in names if (folder / name).is_file()]
    if not found:
        return None
    kept = next(path for n in itertools.count(1) if not (path := folder / f"earlier-{n}").exists())
    kept.mkdir()
    for name in found:
        os.replace(folder / name, kept / name)
    print(f"note: {why}; kept in {shown(kept)}: {', '.join(found)}")
    return kept


def shown(path: Path) -> str:
    """Return a path as people are told it: from the data folder or the repository on, where it is inside."""
    for root in (data_dir(), ROOT):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return path.name


def read_json(path: Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_parquet(path: Path) -> "pd.DataFrame":
    """A table that may be replaced meanwhile. pandas and pyarrow open a path twice, and join the first file's page headers with the second one's bytes."""
    import pandas as pd

    with open(path, "rb") as file:
        return pd.read_parquet(file)


def seal(data: dict) -> dict:
    """The same with `content_hash`, xxh3-128 of the rest as canonical JSON: an altered character that changes anything is found."""
    import xxhash  # not at the top: `doctor` runs without any package

    rest = {key: value for key, value in data.items() if key != "content_hash"}
    return rest | {"content_hash": xxhash.xxh3_128_hexdigest(_canonical(rest))}


def is_sealed(data: Any) -> bool:
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
    """`path` whole or absent, as `safetensors.torch.save_file` would write it. A list of tensors is written as their concatenation along the first axis.

    The pieces go to the file as they lie in memory: nothing is joined or copied first, which for a shard of some GiB is what counts.
    """
    import torch

    pieces = {
        name: [t.contiguous() for t in (value if isinstance(value, list) else [value])]
        for name, value in tensors.items()
    }
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    names = sorted(
        pieces, key=lambda name: -pieces[name][0].element_size()
    )  # wide types first: every tensor starts at a multiple of its own width
    end = 0
    for name in names:
        first, start = pieces[name][0], end
        end += sum(t.nbytes for t in pieces[name])
        shape = (
            list(first.shape)
            if not isinstance(tensors[name], list)
            else [sum(len(t) for t in pieces[name]), *first.shape[1:]]
        )
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
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(data: Any) -> str:
    """Hash of the canonical JSON text, the same on every machine."""
    return hashlib.sha256(_canonical(data)).hexdigest()


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def git_state() -> dict[str, Any]:
    """Commit and whether there are uncommitted changes outside reports/ (which every run writes); commit None without git."""

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
    """The commit, with + where there are uncommitted changes outside reports/; unknown without git."""
    state = git_state()
    return state["commit"][:12] + "+" * state["dirty"] if state["commit"] else "unknown"
