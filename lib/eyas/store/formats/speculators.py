"""Read and write the files of speculators >= 0.5.

They are hidden_states/hs_{i}.safetensors and an Arrow data set.
"""

import bisect
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open

from eyas.errors import EyasError
from eyas.files import sha256_json, write_atomic, write_json, write_safetensors
from eyas.store.formats.common import PRE, Sample, checked, inside, numbered, read_described, torn
from eyas.store.reader import Store

FP8_SCALES = "hidden_states_scales"


class Speculators:
    """Read a folder of these files. Row i of the Arrow data set belongs to hs_{i}.

    missing: numbers of the rows without a file.
    """

    norm = PRE
    id_is_boundary_minus = 0

    def __init__(self, source: Path, n_states: int, hidden_size: int):
        self.n_states = n_states
        self.hidden_size = hidden_size
        self.paths = numbered(
            source, (source / "hidden_states").glob("hs_*.safetensors"), r"hs_(\d+)\.safetensors"
        )
        self.starts: list[int] = []  # first row of each batch
        self.batches: list[pa.RecordBatch] = []  # memory-mapped
        rows = 0
        for name in _data_files(read_described(source, source / "state.json")):
            if not name or Path(name).name != name:
                raise EyasError(
                    f"state.json names the data file {name!r}",
                    "a file beside it",
                    "save the data set again: datasets.save_to_disk",
                )
            for batch in _arrow(source, source / name):
                self.starts.append(rows)
                self.batches.append(batch)
                rows += len(batch)
        strays = [number for number in self.paths if number >= rows]
        if strays:
            raise EyasError(
                f"{self.paths[strays[0]].name} has no row in the data set, which has {rows}",
                "a row for each file",
                "remove it, or save the data set again",
            )
        self.numbers = list(self.paths)
        self.missing = [number for number in range(rows) if number not in self.paths]

    @classmethod
    def said_boundaries(cls, source: Path) -> None:
        """Return None: the files do not name their layers."""

    def _row(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return input_ids [T] and loss_mask [T] of a row."""
        place = bisect.bisect_right(self.starts, number) - 1
        batch = self.batches[place]
        row = number - self.starts[place]

        def column(name: str) -> torch.Tensor:
            return torch.tensor(batch.column(name)[row].values.to_numpy(zero_copy_only=False))

        return column("input_ids"), column("loss_mask")

    def open(self, number: int) -> Sample:
        """Map a file and return its sample, with states in the dtype of the file."""
        return self._open(number)[0]

    def _open(self, number: int) -> tuple[Sample, torch.Tensor | None]:
        """Return the sample of a file, and its fp8 scales if it has them."""
        path = self.paths[number]
        try:
            with safe_open(path, framework="pt") as file:
                missing = {"hidden_states", "token_ids"} - set(file.keys())
                if missing:
                    raise EyasError(
                        f"{path.name} has no {', '.join(sorted(missing))}",
                        "hidden_states and token_ids",
                        "make this file again",
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise torn(path, error) from None
        ids, mask = self._row(number)
        if not torch.equal(tensors["token_ids"], ids.to(tensors["token_ids"].dtype)):
            raise EyasError(
                f"{path.name} holds other token ids than row {number} of the data set",
                "the same",
                "make this file again",
            )
        states = tensors["hidden_states"]  # [T, n_states, H]
        sample = Sample(number, ids, mask, list(states.unbind(1)) if states.ndim == 3 else [states])
        return checked(path.name, sample, self.n_states, self.hidden_size), tensors.get(FP8_SCALES)

    def read(self, number: int) -> Sample:
        """Read a sample. fp8 states are returned in bfloat16.

        They have one float32 scale a token over all layers; the arithmetic is that of speculators'
        own reader.
        """
        sample, scales = self._open(number)
        if sample.states[0].dtype != torch.float8_e4m3fn:
            return sample
        if scales is None or scales.numel() != len(sample.input_ids):
            raise EyasError(
                f"{self.paths[number].name} holds fp8 states without a scale per token",
                FP8_SCALES,
                "make this file again",
            )
        scales = scales.reshape(-1, 1).bfloat16()  # [T, 1]
        return Sample(
            number,
            sample.input_ids,
            sample.loss_mask,
            [states.bfloat16() * scales for states in sample.states],
        )


def _data_files(state: dict) -> list[str]:
    """Return the names of the data files; a missing or malformed one has an empty name."""
    entries = state.get("_data_files")
    if not isinstance(entries, list):
        return [""]
    return [str(e.get("filename")) if isinstance(e, dict) else "" for e in entries]


def _arrow(source: Path, path: Path) -> list[pa.RecordBatch]:
    """Return the batches of an Arrow file. Raise EyasError if it is torn or lacks a column."""
    try:
        with pa.ipc.open_stream(pa.memory_map(str(inside(source, path)))) as reader:
            batches = [batch for batch in reader if len(batch)]
            for batch in batches:
                batch.validate(full=True)
            schema = reader.schema
    except (OSError, pa.ArrowException) as error:
        raise torn(path, error) from None
    for name in ("input_ids", "loss_mask"):
        kind = schema.field(name).type if name in schema.names else None
        lists = (
            kind is not None
            and (pa.types.is_list(kind) or pa.types.is_large_list(kind))
            and pa.types.is_integer(kind.value_type)
        )
        if not lists or any(batch.column(name).null_count for batch in batches):
            raise EyasError(
                f"{path.name} has no whole column {name} of integers",
                "input_ids and loss_mask",
                "speculators' own data preparation writes them",
            )
    return batches


def write_speculators(
    folder: Path, samples: Iterator[Sample], store: Store, boundaries: tuple[int, ...]
) -> None:
    """Write the samples, and the data set as `datasets.save_to_disk` does.

    A data set is an Arrow stream and two JSON files that name its columns.
    """
    features = {
        name: {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "Sequence"}
        for name in ("input_ids", "loss_mask")
    }
    features["seq_len"] = {"dtype": "int64", "_type": "Value"}
    schema = pa.schema(
        [
            ("input_ids", pa.list_(pa.int64())),
            ("loss_mask", pa.list_(pa.int64())),
            ("seq_len", pa.int64()),
        ],
        {"huggingface": json.dumps({"info": {"features": features}})},
    )

    def write(path: Path) -> None:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as rows:
            for sample in samples:
                write_safetensors(
                    folder / "hidden_states" / f"hs_{sample.number}.safetensors",
                    {
                        "hidden_states": torch.stack(sample.states, dim=1),
                        "token_ids": sample.input_ids,  # [T, n, H], [T]
                    },
                    {},
                )
                columns = [
                    pa.array([t.numpy()], pa.list_(pa.int64()))
                    for t in (sample.input_ids, sample.loss_mask)
                ]
                rows.write_batch(
                    pa.record_batch(
                        [*columns, pa.array([len(sample.input_ids)], pa.int64())], schema=schema
                    )
                )

    name = "data-00000-of-00001.arrow"
    write_atomic(folder / name, write)
    write_json(
        folder / "dataset_info.json",
        {"citation": "", "description": "", "features": features, "homepage": "", "license": ""},
    )
    write_json(
        folder / "state.json",
        {
            "_data_files": [{"filename": name}],
            "_fingerprint": sha256_json([store.manifest, list(store.index["content_hash"])])[:16],
            "_format_columns": list(features),
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": None,
        },
    )
