"""Read the weights of a model folder as dense tensors by name, in whatever form they are stored.

- A weight in float32, bfloat16 or float16 is given as it is stored.
- A quantised weight is given dequantised, in float32: code times scale, computed exactly.
- Each weight is read when it is asked for. Nothing is kept.

| stored as | parts | read here |
|---|---|---|
| compressed-tensors `pack-quantized`, symmetric, 2/4/8 bits | weight_packed, _scale, _shape | yes |
| FP8 in blocks (DeepSeek-V3), also with a cut last block | weight, _scale_inv | yes |
| FP8 or int8 with one scale a tensor, a row, or a group of a row | weight, weight_scale | yes |
| GPTQ, AWQ, MXFP4, NVFP4, bitsandbytes, asymmetric or reordered codes | others | refused by name |

Sources: compressed-tensors 0.18 (`pack_quantized/helpers.py`), transformers' `finegrained_fp8`, and
the config.json of DeepSeek-V3 and Kimi-K2.5. `tests/test_dense_weights.py` compares with
compressed-tensors' own code and with references written out by hand.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eyas.errors import EyasError

DENSE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
PARTS = (  # endings of the parts that one weight is stored in; the longest that fits counts
    ".weight_zero_point",
    ".weight_global_scale",
    ".weight_scale_inv",
    ".weight_packed",
    ".weight_scale_2",
    ".weight_scale",
    ".weight_shape",
    ".weight_g_idx",
    ".weight",
    ".qweight",  # of GPTQ and AWQ, as the next three
    ".qzeros",
    ".scales",
    ".g_idx",
)
READ_METHODS = ("compressed-tensors", "fp8", "w8a8_fp8", "w8a8_int8", "modelopt")
PACKED_BITS = (2, 4, 8)  # a code never lies across two int32
BLOCK = (128, 128)  # of FP8 where config.json names none
NEXT = "-p initial_weights random, which reads no block of the target; or a dense copy of the model"


class DenseWeights(Mapping[str, torch.Tensor]):
    """Weights of a folder by the name of the dense weight, such as `model.norm.weight`.

    files: name of a stored tensor -> file of the folder. config: its config.json.
    """

    def __init__(self, folder: Path, files: dict[str, str], config: dict):
        text = config.get("text_config", config)
        self.folder = Path(folder)
        self.files = files
        self.scheme = text.get("quantization_config") or config.get("quantization_config") or {}
        self.parts: dict[str, dict[str, str]] = {}  # dense name -> part -> stored name
        for stored in files:
            name, part = _split(stored)
            self.parts.setdefault(name, {})[part] = stored

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __contains__(self, name: object) -> bool:  # of a Mapping it would read the weight
        return name in self.parts

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the dense weight.

        Raise EyasError if its file is torn, or if its kind is not read here.
        """
        parts = self.parts[name]
        if len(parts) == 1 and parts.keys() <= {".weight", ""}:
            return self._dense(name, self._stored(next(iter(parts.values()))))
        tensors = {part: self._stored(stored) for part, stored in parts.items()}
        unknown = {".weight_zero_point", ".weight_g_idx", ".weight_scale_2", ".weight_global_scale"}
        present = sorted(part for part in unknown & tensors.keys() if _matters(tensors[part]))
        if present:
            raise self._refusal(name, f"stored with {', '.join(part[1:] for part in present)}")
        if ".weight_packed" in tensors:
            return self._unpacked(name, tensors)
        if ".weight" not in tensors or tensors[".weight"].dtype not in CODES:
            kinds = ", ".join(part[1:] for part in sorted(tensors))
            raise self._refusal(name, f"stored as {kinds}")
        return self._scaled(name, tensors)

    def part(self, mark: str) -> "PartOfWeights":
        """Return the weights whose names contain `mark`, by what follows it.

        Each is read when it is used.
        """
        return PartOfWeights(self, mark)

    def how(self, name: str) -> str:
        """Return in words how a weight is stored; reads nothing but names."""
        parts = self.parts[name]
        if len(parts) == 1:
            return "as stored"
        method = self.scheme.get("quant_method", "scheme not said")
        return f"dequantised ({method}: {', '.join(part[1:] for part in sorted(parts))})"

    def _stored(self, stored: str) -> torch.Tensor:
        file = self.folder / self.files[stored]
        try:
            with safe_open(file, framework="pt") as shard:
                return shard.get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise EyasError(
                f"{file.name} of {self.folder.name} can't be read: {error}",
                "a whole safetensors file",
                "copy or save the model again",
            ) from None

    def _dense(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in DENSE:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise self._refusal(name, f"stored as {dtype} codes without a scale")
        return tensor

    def _unpacked(self, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Unpack codes of compressed-tensors.

        They have `bits` bits in int32, the first in the lowest bits, and half the range is added.
        """
        if ".weight_shape" not in tensors or ".weight_scale" not in tensors:
            raise self._refusal(name, "stored packed without its shape or scale")
        rows, columns = tensors[".weight_shape"].tolist()
        packed = tensors[".weight_packed"]  # [rows, columns * bits / 32]
        bits = next((b for b in PACKED_BITS if packed.shape[1] == math.ceil(columns * b / 32)), 0)
        if bits not in self._declared_bits() or packed.shape[0] != rows:
            said = ", ".join(map(str, sorted(self._declared_bits()))) or "none"
            raise self._refusal(
                name, f"packed as {list(packed.shape)} for {rows} x {columns} codes of {said} bits"
            )
        shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
        codes = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)  # [rows, words, codes a word]
        codes = codes.flatten(1)[:, :columns] - (1 << (bits - 1))
        return self._times_scale(name, codes.float(), tensors[".weight_scale"])

    def _declared_bits(self) -> set[int]:
        groups = (self.scheme.get("config_groups") or {}).values()
        return {(group.get("weights") or {}).get("num_bits") for group in groups} - {None}

    def _scaled(self, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        codes = tensors[".weight"].float()
        if ".weight_scale_inv" in tensors:
            scale = tensors[".weight_scale_inv"].float()
            return self._times_blocks(name, codes, scale, self._block())
        scale = tensors[".weight_scale"].float()
        block = self._declared_block()
        if block is not None and scale.ndim == 2 and scale.shape[0] != codes.shape[0]:
            return self._times_blocks(name, codes, scale, block)
        return self._times_scale(name, codes, scale)

    def _block(self) -> tuple[int, int]:
        return tuple(self.scheme.get("weight_block_size") or self._declared_block() or BLOCK)

    def _declared_block(self) -> tuple[int, int] | None:
        """Return the block of compressed-tensors' strategy `block`, or `weight_block_size`."""
        if self.scheme.get("weight_block_size"):
            return tuple(self.scheme["weight_block_size"])
        for group in (self.scheme.get("config_groups") or {}).values():
            structure = (group.get("weights") or {}).get("block_structure")
            if structure:
                return tuple(structure)
        return None

    def _times_blocks(
        self, name: str, codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]
    ) -> torch.Tensor:
        """codes [rows, columns], scale [row blocks, column blocks]; the last blocks may be cut."""
        if scale.numel() == 1:
            return codes * scale.reshape(())
        rows, columns = codes.shape
        expected = [math.ceil(rows / block[0]), math.ceil(columns / block[1])]
        if list(scale.shape) != expected:
            raise self._refusal(
                name,
                f"scaled by {list(scale.shape)} for {rows} x {columns} codes in blocks of"
                f" {block[0]} x {block[1]}, which are {expected}",
            )
        by_row = scale.repeat_interleave(block[0], 0)[:rows]
        return codes * by_row.repeat_interleave(block[1], 1)[:, :columns]

    def _times_scale(self, name: str, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Multiply codes [rows, columns] with their scales.

        There is one scale a tensor, a row ([rows] or [rows, 1]), or a group of a row.
        """
        scale = scale.float()
        if scale.numel() == 1:
            return codes * scale.reshape(())
        rows, columns = codes.shape
        if scale.ndim == 1:
            scale = scale[:, None]
        if scale.shape[0] != rows or columns % scale.shape[1]:
            raise self._refusal(name, f"scaled by {list(scale.shape)} for {rows} x {columns} codes")
        return codes * scale.repeat_interleave(columns // scale.shape[1], 1)

    def _refusal(self, name: str, stored: str) -> EyasError:
        method = self.scheme.get("quant_method")
        scheme = f" (quant_method {json.dumps(method)})" if method else ""
        expected = "dense weights, packed symmetric codes, or FP8 or int8 with scales"
        return EyasError(f"{name} of {self.folder.name} is {stored}{scheme}", expected, NEXT)


class PartOfWeights(Mapping[str, torch.Tensor]):
    """The weights of one module, by the names that they have in it."""

    def __init__(self, weights: DenseWeights, mark: str):
        self.weights = weights
        self.names = {name.split(mark, 1)[1]: name for name in weights if mark in name}

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[self.names[name]]


def _split(stored: str) -> tuple[str, str]:
    """Return the dense weight that a stored tensor belongs to, and which part of it this is."""
    for part in PARTS:
        if stored.endswith(part):
            return stored[: -len(part)] + ".weight", part
    for ending in (".input_scale", ".output_scale", ".k_scale", ".v_scale"):  # of activations
        if stored.endswith(ending):
            return stored, ending
    return stored, ""


def _matters(part: torch.Tensor) -> bool:
    """Return whether a part changes the weight: zero points of 0 do not."""
    return bool((part != 0).any())
