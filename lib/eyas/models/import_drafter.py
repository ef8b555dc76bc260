"""Import drafters that others trained, so that this project's commands can judge them.

    python -m eyas drafter import FOLDER -p run_name theirs          # writes the run's drafter
    python -m eyas evaluate decode -p drafter_run theirs          # judges it on the run demo

- Two layouts are read: that of SGLang, SpecForge and EAGLE (`midlayer.*` or `layers.0.*`,
  `eagle_config`), and that of speculators and vLLM (`transformer_layer_config`).
- Weights are in safetensors, whole or sharded, or in `pytorch_model.bin`. Nothing is unpickled that
  could run code.
- What our drafter does not have is refused by name: several layers, biases, another attention.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas.errors import EyasError
from eyas.files import read_json, sha256_file
from eyas.models.boundaries import MIN_BLOCKS, check_boundaries, default_boundaries
from eyas.models.checkpoint_config import (
    DEFAULT_POSITIONS,
    LAYER_IDS,
    check_config,
    remarks,
    rope_of,
)
from eyas.models.continuation import is_free, only_one
from eyas.models.drafter import Drafter, DrafterConfig, ImportedConfig, save_drafter, scaled_rope
from eyas.models.export import LAYER, architecture, check_keys
from eyas.models.layer_ids import SGLANG, engine_boundaries
from eyas.models.target import Target
from eyas.models.vocab import DraftVocab

SGLANG_LAYOUT = "SGLang"
SPECULATORS_LAYOUT = "speculators"
ARCHITECTURES = (
    "LlamaForCausalLMEagle3",  # SGLang, SpecForge
    "Eagle3LlamaForCausalLM",  # vLLM, AngelSlim
    "LlamaForCausalLM",  # EAGLE's own code
)
LEGACY = {
    "midlayer.": LAYER,
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
# speculators only needs these in training.
OF_THE_VERIFIER = ("verifier_norm.weight", "verifier_lm_head.weight")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SAVE_AGAIN = "save or copy the checkpoint again, whole and not quantised; then the same command"
UNSUPPORTED = ("bias", "attention_bias", "mlp_bias", "qkv_bias")


@dataclass(frozen=True)
class Checkpoint:
    """Hold a drafter that was read, and its origin.

    origin: layout, weight files with their hashes, layer ids and how they were read.
    """

    drafter: Drafter
    origin: dict

    def __str__(self) -> str:
        config = self.drafter.config
        origin = self.origin
        switches = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
        norms = ", ".join(name for name in switches if getattr(config, name))
        boundaries = ", ".join(map(str, config.boundaries))
        lines = [
            f"{origin['folder']}: {origin['layout']} layout,"
            f" D {config.draft_vocab_size:,} of {config.vocab_size:,};"
            f" {norms or 'no further norms'}; embedding {origin['embedding']}",
            f"boundaries {boundaries}: {origin['boundaries_from']}",
        ]
        return "\n".join([*lines, *(f"note: {remark}" for remark in origin["remarks"])])


@dataclass(frozen=True)
class _Description:
    """Hold the config.json of a checkpoint and its two parts, in either layout.

    record: config.json. layer: the settings of the decoder layer. eagle: those of EAGLE-3.
    """

    name: str
    record: dict
    layer: dict
    eagle: dict
    is_speculators: bool

    @classmethod
    def of(cls, name: str, record: dict) -> "_Description":
        """Find the two parts in a config.json."""
        if record.get("speculators_model_type") is None:
            return cls(name, record, record, record.get("eagle_config") or {}, False)
        return cls(name, record, record.get("transformer_layer_config") or {}, record, True)


def import_drafter(
    folder: Path,
    target: Target,
    out: Path,
    ids_of: str = "",
    boundaries: tuple[int, ...] = (),
    norm_before_residual: bool | None = None,
) -> Checkpoint:
    """Read a public checkpoint and save it as a run's drafter in `out`.

    Arguments and errors are those of `read_checkpoint`. Raise EyasError too if `out` has a drafter.
    """
    taken = EyasError(
        f"run {out.parent.name!r} has a drafter already",
        "a run without one",
        "python -m eyas drafter import FOLDER -p run_name ANOTHER",
    )
    if not is_free(out):
        raise taken
    checkpoint = read_checkpoint(folder, target, ids_of, boundaries, norm_before_residual)
    with only_one(out):
        if not is_free(out):  # a training started in the meantime
            raise taken
        record = {
            "target": {"name": target.name, "fingerprint": target.fingerprint},
            "imported": checkpoint.origin,
        }
        save_drafter(checkpoint.drafter, out, record)
    return checkpoint


def read_checkpoint(
    folder: Path,
    target: Target,
    ids_of: str = "",
    boundaries: tuple[int, ...] = (),
    norm_before_residual: bool | None = None,
) -> Checkpoint:
    """Read a drafter in float32 from a folder in either layout.

    ids_of: the engine (of `eyas.models.layer_ids`) whose meaning the layer ids have; by default
    the layout's own engine. boundaries: replaces the layer ids. norm_before_residual: replaces the
    setting of a checkpoint in speculators' layout.
    The embedding is the target's if the checkpoint has none, or the same one.

    Raise EyasError, which names what is wrong, in these cases: the folder does not exist; it is
    another kind of model; it has parts that our drafter does not have; it was made for another
    target (hidden size, vocabulary); weights are unknown, missing or of a wrong shape; `d2t` points
    below 0, beyond the vocabulary or twice at one token; `t2d` disagrees with `d2t`; the files
    leave something open (the error names the flag to give).
    """
    folder = Path(folder)
    record = _config_file(folder)
    check_config(folder.name, record)
    description = _Description.of(folder.name, record)
    _check_kind(description)
    _check_target(description, target)
    feeding, boundaries_from = _boundaries(description, target, ids_of, boundaries)
    _check_count(folder.name, record, feeding)
    paths = _weight_files(folder)
    weights = _without_foreign_names(_weights(paths))
    residual = _norm_before_residual(description, norm_before_residual)
    own_embedding = _own_embedding(weights, target, description.layer)
    config = _config(description, feeding, residual, own_embedding)
    if config.draft_vocab_size == config.vocab_size and "d2t" not in weights:  # no draft vocabulary
        weights["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
        weights.setdefault("lm_head.weight", target.head().lm_head)
    check_keys(weights, config)
    _check_weights(folder.name, weights, config)
    vocab, order = _vocab(weights.pop("d2t"), weights.pop("t2d", None), config)
    weights["lm_head.weight"] = weights["lm_head.weight"][order]
    if not own_embedding:
        weights["embed_tokens.weight"] = target.embedding()
    drafter = Drafter(config, vocab)
    _load_weights(drafter, weights)
    origin = {
        "folder": folder.name,
        "layout": SPECULATORS_LAYOUT if description.is_speculators else SGLANG_LAYOUT,
        "files": {path.name: sha256_file(path) for path in paths},
        "config": record,
        "boundaries_from": boundaries_from,
        "embedding": "its own" if own_embedding else "the target's",
        "remarks": [
            *remarks(description.layer, target.context_tok),
            *_layer_id_remarks(description, target, ids_of, boundaries),
        ],
    }
    return Checkpoint(drafter.eval(), origin)


def _without_foreign_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights under our names, without those that only training needs."""
    for old, new in LEGACY.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    return {name: tensor for name, tensor in weights.items() if name not in OF_THE_VERIFIER}


def _norm_before_residual(description: _Description, flag: bool | None) -> bool:
    """Return whether the residual stream starts at the normed state.

    Only speculators' layout has this setting. Raise EyasError if neither the files nor the flag
    give it.
    """
    if not description.is_speculators:
        return False
    setting = description.record.get("norm_before_residual") if flag is None else flag
    if setting is None:
        raise EyasError(
            f"{description.name!r} does not say whether its residual stream starts at the normed"
            " state (speculators: no, vLLM: yes where nothing is said)",
            "norm_before_residual in its config.json, or the flag",
            "the same command with --norm-before-residual yes, or no",
        )
    return bool(setting)


def _load_weights(drafter: Drafter, weights: dict[str, torch.Tensor]) -> None:
    """Load the weights in float32. Raise EyasError for a wrong shape, and for NaN or infinity."""
    for name, tensor in drafter.state_dict().items():
        if weights[name].shape != tensor.shape:
            raise EyasError(
                f"{name} has the shape {list(weights[name].shape)}",
                f"{list(tensor.shape)}, from config.json and the boundaries",
            )
        if not weights[name].isfinite().all():
            raise EyasError(f"{name} is not finite", "numbers", "copy the checkpoint again")
    drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()})


def _config_file(folder: Path) -> dict:
    """Return the config.json of a folder. Raise EyasError if there is none, or if it is no dict."""
    if not (folder / "config.json").is_file():
        raise EyasError(
            f"no config.json in {folder.name!r}",
            "a drafter in SGLang's or speculators' layout",
            "python -m eyas drafter export --profile demo writes one of ours",
        )
    try:
        record = read_json(folder / "config.json")
    except ValueError as error:
        raise EyasError(
            f"the config.json of {folder.name!r} is not JSON: {error}",
            "the file that save_pretrained wrote",
        ) from None
    if not isinstance(record, dict):
        raise EyasError(
            f"the config.json of {folder.name!r} is no configuration",
            "the file that save_pretrained wrote",
        )
    return record


def _check_kind(description: _Description) -> None:
    """Raise EyasError for another kind of drafter, or for parts that ours does not have."""
    name = description.name
    record = description.record
    layer = description.layer
    if description.is_speculators:
        if record["speculators_model_type"] != "eagle3":
            raise EyasError(
                f"{name!r} is a speculator of type {record['speculators_model_type']!r}", "'eagle3'"
            )
        if layer.get("model_type") != "llama":
            raise EyasError(
                f"{name!r} has a draft layer of type {layer.get('model_type')!r}", "'llama'"
            )
    elif (record.get("architectures") or [None])[0] not in ARCHITECTURES:
        raise EyasError(
            f"architectures {record.get('architectures')} in {name!r}",
            "one of " + ", ".join(ARCHITECTURES) + ", or speculators_model_type 'eagle3'",
        )
    extra = [part for part in UNSUPPORTED if layer.get(part)]
    if record.get("tie_word_embeddings"):
        extra.append("tie_word_embeddings")
    if layer.get("hidden_act", "silu") != "silu":
        extra.append(f"hidden_act {layer['hidden_act']}")
    n_layers = layer.get("num_hidden_layers")
    if extra or n_layers != 1 or not description.eagle.get("use_aux_hidden_state", True):
        what = ", ".join(extra) or f"{n_layers} layers or no captured boundaries"
        raise EyasError(
            f"{name!r} is a drafter with {what}",
            "one layer, captured boundaries, and none of these switches",
        )


def _check_target(description: _Description, target: Target) -> None:
    """Raise EyasError if the drafter has another hidden size or vocabulary than the target."""
    layer = description.layer
    hidden_size = description.record.get("target_hidden_size") or layer["hidden_size"]
    facts = [
        ("hidden size of the target", hidden_size, target.hidden_size),
        ("vocabulary", layer["vocab_size"], target.vocab_size),
    ]
    for what, theirs, expected in facts:
        if theirs != expected:
            raise EyasError(
                f"{description.name!r} is a drafter for another target: {what} {theirs}",
                f"{expected}, as {target.name} has it",
            )


def _boundaries(
    description: _Description, target: Target, ids_of: str, boundaries: tuple[int, ...]
) -> tuple[tuple[int, ...], str]:
    """Return the boundaries, ascending, and in words where they come from.

    Raise EyasError, which names the flag to give, if the files leave them open.
    """
    if boundaries:
        check_boundaries(boundaries, target.n_blocks)
        return tuple(boundaries), "as given"
    command = (
        "the same command with --ids-of ENGINE"
        " (python -m eyas drafter layer-ids shows what each means by an id),"
        " or -p boundaries B,B,B"
    )
    ids = _layer_ids(description, ids_of, command)
    default_engine = "speculators" if description.is_speculators else SGLANG
    engine = ids_of or default_engine
    family = architecture(target)
    try:
        feeding = engine_boundaries(ids or None, family, target.n_blocks, engine)
    except EyasError as error:
        raise EyasError(error.found, error.expected, command) from None
    if ids:
        return feeding, f"layer ids {ids} as {engine} reads them for {family}"
    return feeding, f"no layer ids: the default of {engine}"


def _layer_ids(description: _Description, ids_of: str, command: str) -> list[int] | None:
    """Return the files' layer ids, or None. Raise EyasError if their engine is not clear."""
    name = description.name
    ids = description.eagle.get(LAYER_IDS)
    if description.is_speculators:
        if not ids and not ids_of:
            raise EyasError(
                f"{name!r} names no layer ids: those that it was trained with are 2, N//2, N-3"
                " or, before speculators 0.5, one further",
                "the engine or the boundaries",
                command,
            )
        return ids
    outside = description.record.get(LAYER_IDS)
    if ids is not None or outside is None:
        return ids
    if not ids_of:
        raise EyasError(
            f"{name!r} has its layer ids {outside} outside of eagle_config,"
            " where vLLM reads them and SGLang does not: whose ids they are is not clear",
            "the engine",
            command,
        )
    return outside


def _check_count(name: str, record: dict, boundaries: tuple[int, ...]) -> None:
    """Raise EyasError if config.json names another number of boundaries than feed it."""
    count = record.get("num_aux_hidden_states")
    if count not in (None, len(boundaries)):
        raise EyasError(
            f"num_aux_hidden_states in the config.json of {name!r} is {count}",
            f"{len(boundaries)}, one for each of the boundaries {list(boundaries)}",
            "correct config.json, or the same command with -p boundaries B,B,B",
        )


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, or its pytorch_model.bin.

    Raise EyasError if one of them does not exist.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise EyasError(
                f"{index.name} in {folder.name!r} can't be read",
                "a weight_map",
                "copy the checkpoint again",
            ) from None
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    elif (folder / "pytorch_model.bin").is_file():
        names = ["pytorch_model.bin"]
    else:
        names = ["model.safetensors"]
    for name in names:
        if name != Path(name).name or not (folder / name).is_file():
            raise EyasError(
                f"no {name} in {folder.name!r}", "its weights", "copy the checkpoint again"
            )
    return [folder / name for name in names]


def _weights(paths: list[Path]) -> dict[str, torch.Tensor]:
    """Return all tensors of these files. Raise EyasError if one is torn or holds other things."""
    weights = {}
    for path in paths:
        try:
            if path.suffix == ".bin":
                weights |= torch.load(path, map_location="cpu", weights_only=True)
            else:
                weights |= load_file(path)
        except (
            OSError,
            SafetensorError,
            RuntimeError,
            pickle.UnpicklingError,
            EOFError,
            TypeError,
        ) as error:
            raise EyasError(
                f"{path.name} of {path.parent.name!r} can't be read: {str(error).splitlines()[0]}",
                "tensors only, whole",
                "copy the checkpoint again",
            ) from None
    for name, tensor in weights.items():
        if not (isinstance(name, str) and isinstance(tensor, torch.Tensor)):
            raise EyasError(
                f"{paths[0].name} of {paths[0].parent.name!r} holds more than tensors",
                "a state dict",
            )
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def _own_embedding(weights: dict[str, torch.Tensor], target: Target, layer: dict) -> bool:
    """Return whether the checkpoint has an embedding that is not the target's.

    The two are compared in the dtype of either. If they are equal, remove it from `weights`.
    Raise EyasError if the target's embedding does not fit.
    """
    name = "embed_tokens.weight"
    if name in weights and _equal_in_a_dtype(target.embedding(), weights[name]):
        del weights[name]
    if name not in weights and layer["hidden_size"] != target.hidden_size:
        raise EyasError(
            f"a drafter of hidden size {layer['hidden_size']} without an embedding",
            f"its own, or the target's hidden size {target.hidden_size}",
        )
    return name in weights


def _equal_in_a_dtype(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are equal in the dtype of one of them."""
    if first.shape != second.shape:
        return False
    return torch.equal(first.to(second.dtype), second) or torch.equal(second.to(first.dtype), first)


def _config(
    description: _Description,
    boundaries: tuple[int, ...],
    norm_before_residual: bool,
    own_embedding: bool,
) -> DrafterConfig:
    """Return our settings of the drafter. Raise EyasError if we do not have its kind of RoPE."""
    record = description.record
    layer = description.layer
    rope = rope_of("the checkpoint", layer)
    n_heads = layer["num_attention_heads"]
    shape = dict(
        hidden_size=layer["hidden_size"],
        target_hidden_size=record.get("target_hidden_size") or layer["hidden_size"],
        vocab_size=layer["vocab_size"],
        draft_vocab_size=record.get("draft_vocab_size") or layer["vocab_size"],
        n_heads=n_heads,
        n_kv_heads=layer.get("num_key_value_heads") or n_heads,
        head_dim=layer.get("head_dim") or layer["hidden_size"] // n_heads,
        intermediate_size=layer["intermediate_size"],
        rms_norm_eps=layer["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        max_position_embeddings=layer.get("max_position_embeddings") or DEFAULT_POSITIONS,
        boundaries=boundaries,
        fc_norm=bool(record.get("fc_norm") or record.get("use_aux_norm")),
        norm_output=bool(record.get("norm_output")),
    )
    more = dict(
        norm_before_fc=bool(
            description.eagle.get("norm_before_fc", record.get("norm_before_fc", False))
        ),
        norm_before_residual=norm_before_residual,
        own_embedding=own_embedding,
        rope_scaling=rope["scaling"],
    )
    config = ImportedConfig(**shape, **more) if any(more.values()) else DrafterConfig(**shape)
    if config.rope_scaling:
        scaled_rope(config)
    return config


def _layer_id_remarks(
    description: _Description, target: Target, ids_of: str, given: tuple[int, ...]
) -> list[str]:
    """Return a remark if SGLang's reading of the layer ids is probably not the trainer's."""
    ids = description.eagle.get(LAYER_IDS)
    if description.is_speculators or ids_of or given or not ids or target.n_blocks < MIN_BLOCKS:
        return []
    default = default_boundaries(target.n_blocks)
    if sorted(ids) != list(default):
        return []
    as_sglang = engine_boundaries(ids, architecture(target), target.n_blocks, SGLANG)
    if as_sglang == tuple(default):
        return []
    shown = ", ".join(map(str, default))
    return [
        f"its layer ids are {shown}, which is 2, N//2, N-3: as boundaries that is the usual"
        " default, and SGLang reads each id one further. If it was trained with vLLM,"
        " speculators or EAGLE's own code, import it again with --ids-of vllm, speculators or"
        " eagle"
    ]


def _check_weights(name: str, weights: dict[str, torch.Tensor], config: DrafterConfig) -> None:
    """Raise EyasError for a weight that is no plain number type, and for a head of another size."""
    for key, tensor in weights.items():
        if key == "d2t":
            fits, expected = tensor.dtype in INTEGERS, "whole numbers (int64)"
        elif key == "t2d":
            fits, expected = tensor.dtype in (torch.bool, *INTEGERS), "bool"
        else:
            fits, expected = tensor.dtype in FLOATS, "float32, bfloat16 or float16"
        if not fits:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise EyasError(f"{key} of {name!r} is stored as {dtype}", expected, SAVE_AGAIN)
    head = weights["lm_head.weight"]
    if head.ndim != 2 or len(head) != config.draft_vocab_size:
        raise EyasError(
            f"lm_head.weight of {name!r} has the shape {list(head.shape)}",
            f"{config.draft_vocab_size} rows, the draft_vocab_size of its config.json",
            SAVE_AGAIN,
        )


def _vocab(
    d2t: torch.Tensor, t2d: torch.Tensor | None, config: DrafterConfig
) -> tuple[DraftVocab, torch.Tensor]:
    """Return the draft vocabulary in ascending order of target ids, and the order of its rows.

    The order [D] gives the row of the head for each draft id; other projects sort by frequency.
    Raise EyasError if d2t [D] or t2d [V] is wrong.
    """
    if list(d2t.shape) != [config.draft_vocab_size]:
        raise EyasError(
            f"d2t has the shape {list(d2t.shape)}",
            f"[{config.draft_vocab_size}], the draft vocabulary",
        )
    ids = d2t.to(torch.int64) + torch.arange(len(d2t))  # [D]
    for wrong, text in (
        (ids < 0, "below 0"),
        (ids >= config.vocab_size, f"beyond the vocabulary ({config.vocab_size})"),
    ):
        if wrong.any():
            draft_id = int(wrong.nonzero()[0])
            raise EyasError(
                f"d2t points {text}:"
                f" draft id {draft_id} + {int(d2t[draft_id])} = {int(ids[draft_id])}",
                "offsets: target id = draft id + d2t[draft id]",
            )
    ids, order = ids.sort()
    repeated = ids[1:][ids[1:] == ids[:-1]]
    if len(repeated):
        raise EyasError(
            f"d2t maps two draft ids to target id {int(repeated[0])}",
            "one draft id for each (is it absolute, not an offset?)",
        )
    vocab = DraftVocab(ids, config.vocab_size)
    if t2d is not None and not torch.equal(t2d.bool(), vocab.t2d):
        where = "in length"
        if t2d.shape == vocab.t2d.shape:
            where = f"at target id {int((t2d.bool() != vocab.t2d).nonzero()[0])}"
        raise EyasError(f"t2d and d2t disagree {where}", "t2d true exactly where d2t points")
    return vocab, order
