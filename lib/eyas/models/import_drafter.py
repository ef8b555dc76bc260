"""Drafters that others trained, as drafters of ours, so that `decode`, `walk`, `serve-check` and notebook 05 judge them.

    python -m eyas import-drafter FOLDER -p run_name theirs          # writes the run's drafter
    python -m eyas decode -p drafter_run theirs                      # judged on the prompts of the run demo

Two layouts are read: that of SGLang, SpecForge and EAGLE (`midlayer.*` or `layers.0.*`, `eagle_config`) and that of speculators and vLLM
(`transformer_layer_config`). Weights in safetensors, whole or sharded, or in `pytorch_model.bin`, of which nothing is unpickled that could run code.
What our drafter cannot be is refused by name: several layers, biases, another attention.
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

SGLANG_LAYOUT, SPECULATORS_LAYOUT = "SGLang", "speculators"
ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
)  # SGLang, SpecForge; vLLM, AngelSlim; EAGLE's own code
LEGACY = {
    "midlayer.": LAYER,
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
OF_THE_VERIFIER = (
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)  # speculators needs them in training only
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SAVE_AGAIN = "save or copy the checkpoint again, whole and not quantised; then the same command"
UNSUPPORTED = ("bias", "attention_bias", "mlp_bias", "qkv_bias")


@dataclass(frozen=True)
class Checkpoint:
    """A drafter as it was read, and where it came from: layout, weight files and their hashes, layer ids and how they were read."""

    drafter: Drafter
    origin: dict

    def __str__(self) -> str:
        config, o = self.drafter.config, self.origin
        norms = [
            name
            for name in ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
            if getattr(config, name)
        ]
        return (
            f"{o['folder']}: {o['layout']} layout, D {config.draft_vocab_size:,} of {config.vocab_size:,}; {', '.join(norms) or 'no further norms'}; embedding {o['embedding']}\n"
            f"boundaries {', '.join(map(str, config.boundaries))}: {o['boundaries_from']}"
            + "".join(f"\nnote: {remark}" for remark in o["remarks"])
        )


def import_drafter(
    folder: Path,
    target: Target,
    out: Path,
    ids_of: str = "",
    boundaries: tuple[int, ...] = (),
    norm_before_residual: bool | None = None,
) -> Checkpoint:
    """Read a public checkpoint and save it as a run's drafter in `out`. Arguments and errors as `read_checkpoint`; EyasError where one lies there already."""
    taken = EyasError(
        f"run {out.parent.name!r} has a drafter already",
        "a run without one",
        "python -m eyas import-drafter FOLDER -p run_name ANOTHER",
    )
    if not is_free(out):
        raise taken
    found = read_checkpoint(folder, target, ids_of, boundaries, norm_before_residual)
    with only_one(out):
        if not is_free(out):  # a training started meanwhile
            raise taken
        record = {
            "target": {"name": target.name, "fingerprint": target.fingerprint},
            "imported": found.origin,
        }
        save_drafter(found.drafter, out, record)
    return found


def read_checkpoint(
    folder: Path,
    target: Target,
    ids_of: str = "",
    boundaries: tuple[int, ...] = (),
    norm_before_residual: bool | None = None,
) -> Checkpoint:
    """A drafter from a folder in either layout, in float32.

    Its layer ids are read as `ids_of` has them (an engine of `eyas.models.layer_ids`), by default as the layout's own engine does; `boundaries` says them
    outright. The embedding is the target's where the checkpoint has none, or the same one. EyasError names what is wrong: no such folder; another
    kind of model; parts that our drafter does not have; another target's hidden size or vocabulary; unknown or missing weights; a wrong shape; `d2t`
    that points below 0, beyond the vocabulary or twice at one token; `t2d` that disagrees with `d2t`; and the flag to give where the files don't say.
    """
    folder = Path(folder)
    record = _config_file(folder)
    check_config(folder.name, record)
    theirs = record.get("speculators_model_type") is not None
    layer = record.get("transformer_layer_config") or {} if theirs else record
    eagle = record if theirs else record.get("eagle_config") or {}
    _check_kind(folder.name, record, layer, eagle, theirs)
    _check_target(folder.name, record, layer, target)
    given = boundaries
    boundaries, said = _boundaries(folder.name, record, eagle, theirs, target, ids_of, boundaries)
    _check_count(folder.name, record, boundaries)
    paths = _weight_files(folder)
    weights = _weights(paths)
    for old, new in LEGACY.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    for name in OF_THE_VERIFIER:
        weights.pop(name, None)
    residual = record.get("norm_before_residual") if theirs else False
    if theirs and norm_before_residual is not None:
        residual = norm_before_residual
    if residual is None:
        raise EyasError(
            f"{folder.name!r} doesn't say whether its residual stream starts at the normed state (speculators: no, vLLM: yes where nothing is said)",
            "norm_before_residual in its config.json, or the flag",
            "the same command with --norm-before-residual yes, or no",
        )
    own = _own_embedding(weights, target, layer)
    config = _config(record, layer, eagle, boundaries, bool(residual), own)
    if config.draft_vocab_size == config.vocab_size and "d2t" not in weights:  # no draft vocabulary
        weights |= {"d2t": torch.zeros(config.vocab_size, dtype=torch.int64)}
        weights.setdefault("lm_head.weight", target.head().lm_head)
    check_keys(weights, config)
    _check_weights(folder.name, weights, config)
    vocab, order = _vocab(weights.pop("d2t"), weights.pop("t2d", None), config)
    weights["lm_head.weight"] = weights["lm_head.weight"][order]
    if not own:
        weights["embed_tokens.weight"] = target.embedding()
    drafter = Drafter(config, vocab)
    for name, tensor in drafter.state_dict().items():
        if weights[name].shape != tensor.shape:
            raise EyasError(
                f"{name} has the shape {list(weights[name].shape)}",
                f"{list(tensor.shape)}, from config.json and the boundaries",
            )
        if not weights[name].isfinite().all():
            raise EyasError(f"{name} is not finite", "numbers", "copy the checkpoint again")
    drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    origin = {
        "folder": folder.name,
        "layout": SPECULATORS_LAYOUT if theirs else SGLANG_LAYOUT,
        "files": {path.name: sha256_file(path) for path in paths},
        "config": record,
        "boundaries_from": said,
        "embedding": "its own" if own else "the target's",
        "remarks": [
            *remarks(layer, target.context_tok),
            *_layer_id_remarks(eagle, theirs, target, ids_of, given),
        ],
    }
    return Checkpoint(drafter.eval(), origin)


def _config_file(folder: Path) -> dict:
    if not (folder / "config.json").is_file():
        raise EyasError(
            f"no config.json in {folder.name!r}",
            "a drafter in SGLang's or speculators' layout",
            "python -m eyas export --profile demo writes one of ours",
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


def _check_kind(name: str, record: dict, layer: dict, eagle: dict, theirs: bool) -> None:
    """EyasError for another kind of drafter, or parts that ours does not have."""
    if theirs and record["speculators_model_type"] != "eagle3":
        raise EyasError(
            f"{name!r} is a speculator of type {record['speculators_model_type']!r}", "'eagle3'"
        )
    if not theirs and (record.get("architectures") or [None])[0] not in ARCHITECTURES:
        raise EyasError(
            f"architectures {record.get('architectures')} in {name!r}",
            "one of " + ", ".join(ARCHITECTURES) + ", or speculators_model_type 'eagle3'",
        )
    if theirs and layer.get("model_type") != "llama":
        raise EyasError(
            f"{name!r} has a draft layer of type {layer.get('model_type')!r}", "'llama'"
        )
    extra = [part for part in UNSUPPORTED if layer.get(part)] + ["tie_word_embeddings"] * bool(
        record.get("tie_word_embeddings")
    )
    extra += [f"hidden_act {layer['hidden_act']}"] * (layer.get("hidden_act", "silu") != "silu")
    if extra or layer.get("num_hidden_layers") != 1 or not eagle.get("use_aux_hidden_state", True):
        what = (
            ", ".join(extra) or f"{layer.get('num_hidden_layers')} layers or no captured boundaries"
        )
        raise EyasError(
            f"{name!r} is a drafter with {what}",
            "one layer, captured boundaries, and none of these switches",
        )


def _check_target(name: str, record: dict, layer: dict, target: Target) -> None:
    facts = [
        (
            "hidden size of the target",
            record.get("target_hidden_size") or layer["hidden_size"],
            target.hidden_size,
        ),
        ("vocabulary", layer["vocab_size"], target.vocab_size),
    ]
    for what, found, expected in facts:
        if found != expected:
            raise EyasError(
                f"{name!r} is a drafter for another target: {what} {found}",
                f"{expected}, as {target.name} has it",
            )


def _boundaries(
    name: str,
    record: dict,
    eagle: dict,
    theirs: bool,
    target: Target,
    ids_of: str,
    boundaries: tuple[int, ...],
) -> tuple[tuple[int, ...], str]:
    """The boundaries, ascending, and in words where they come from. EyasError where the files do not say, with the flag that does."""
    if boundaries:
        check_boundaries(boundaries, target.n_blocks)
        return tuple(boundaries), "as given"
    ask = "the same command with --ids-of ENGINE (python -m eyas export --table shows what each means by an id), or -p boundaries B,B,B"
    ids, outside = (
        eagle.get("eagle_aux_hidden_state_layer_ids"),
        record.get("eagle_aux_hidden_state_layer_ids"),
    )
    if not theirs and ids is None and outside is not None:
        if not ids_of:
            raise EyasError(
                f"{name!r} has its layer ids {outside} outside of eagle_config, where vLLM reads them and SGLang does not: whose ids they are isn't clear",
                "the engine",
                ask,
            )
        ids = outside
    if theirs and not ids and not ids_of:
        raise EyasError(
            f"{name!r} names no layer ids: those that it was trained with are 2, N//2, N-3 or, before speculators 0.5, one further",
            "the engine or the boundaries",
            ask,
        )
    engine = ids_of or ("speculators" if theirs else SGLANG)
    try:
        found = engine_boundaries(ids or None, architecture(target), target.n_blocks, engine)
    except EyasError as error:
        raise EyasError(error.found, error.expected, ask) from None
    return (
        found,
        f"layer ids {ids} as {engine} reads them for {architecture(target)}"
        if ids
        else f"no layer ids: the default of {engine}",
    )


def _check_count(name: str, record: dict, boundaries: tuple[int, ...]) -> None:
    """Raise EyasError where config.json names another number of boundaries than feed the drafter."""
    count = record.get("num_aux_hidden_states")
    if count not in (None, len(boundaries)):
        raise EyasError(
            f"num_aux_hidden_states in the config.json of {name!r} is {count}",
            f"{len(boundaries)}, one for each of the boundaries {list(boundaries)}",
            "correct config.json, or the same command with -p boundaries B,B,B",
        )


def _weight_files(folder: Path) -> list[Path]:
    """One or several in safetensors, or else pytorch_model.bin."""
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
    else:
        names = [
            next(
                (n for n in ("model.safetensors", "pytorch_model.bin") if (folder / n).is_file()),
                "model.safetensors",
            )
        ]
    for name in names:
        if name != Path(name).name or not (folder / name).is_file():
            raise EyasError(
                f"no {name} in {folder.name!r}", "its weights", "copy the checkpoint again"
            )
    return [folder / name for name in names]


def _weights(paths: list[Path]) -> dict[str, torch.Tensor]:
    weights = {}
    for path in paths:
        try:
            weights |= (
                torch.load(path, map_location="cpu", weights_only=True)
                if path.suffix == ".bin"
                else load_file(path)
            )
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
    if not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in weights.items()
    ):
        raise EyasError(
            f"{paths[0].name} of {paths[0].parent.name!r} holds more than tensors", "a state dict"
        )
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def _own_embedding(weights: dict[str, torch.Tensor], target: Target, layer: dict) -> bool:
    """Has it an embedding that is not the target's, in whichever of the two dtypes? The target's is taken out of the weights."""
    name = "embed_tokens.weight"
    if name in weights:
        mine, theirs = target.embedding(), weights[name]
        if mine.shape == theirs.shape and (
            torch.equal(mine.to(theirs.dtype), theirs) or torch.equal(theirs.to(mine.dtype), mine)
        ):
            del weights[name]
    if name not in weights and layer["hidden_size"] != target.hidden_size:
        raise EyasError(
            f"a drafter of hidden size {layer['hidden_size']} without an embedding",
            f"its own, or the target's hidden size {target.hidden_size}",
        )
    return name in weights


def _config(
    record: dict,
    layer: dict,
    eagle: dict,
    boundaries: tuple[int, ...],
    norm_before_residual: bool,
    own_embedding: bool,
) -> DrafterConfig:
    """Our description of the drafter. EyasError where its RoPE is of a kind that we don't have."""
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
        norm_before_fc=bool(eagle.get("norm_before_fc", record.get("norm_before_fc", False))),
        norm_before_residual=norm_before_residual,
        own_embedding=own_embedding,
        rope_scaling=rope["scaling"],
    )
    config = ImportedConfig(**shape, **more) if any(more.values()) else DrafterConfig(**shape)
    if config.rope_scaling:
        scaled_rope(config)
    return config


def _layer_id_remarks(
    eagle: dict, theirs: bool, target: Target, ids_of: str, given: tuple[int, ...]
) -> list[str]:
    """Return a remark where SGLang's reading of the layer ids is probably not the trainer's."""
    ids = eagle.get(LAYER_IDS)
    if theirs or ids_of or given or not ids or target.n_blocks < MIN_BLOCKS:
        return []
    default = default_boundaries(target.n_blocks)
    if sorted(ids) != list(default) or engine_boundaries(
        ids, architecture(target), target.n_blocks, SGLANG
    ) == tuple(default):
        return []
    shown = ", ".join(map(str, default))
    return [
        f"its layer ids are {shown}, which is 2, N//2, N-3: as boundaries that is the usual default,"
        " and SGLang reads each id one further. If it was trained with vLLM, speculators or EAGLE's"
        " own code, import it again with --ids-of vllm, speculators or eagle"
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
    """The draft vocabulary in ascending order of target ids, and the rows of the head that stand for it (others sort by frequency)."""
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
            at = int(wrong.nonzero()[0])
            raise EyasError(
                f"d2t points {text}: draft id {at} + {int(d2t[at])} = {int(ids[at])}",
                "offsets: target id = draft id + d2t[draft id]",
            )
    ids, order = ids.sort()
    if (ids[1:] == ids[:-1]).any():
        raise EyasError(
            f"d2t maps two draft ids to target id {int(ids[1:][ids[1:] == ids[:-1]][0])}",
            "one draft id for each (is it absolute, not an offset?)",
        )
    vocab = DraftVocab(ids, config.vocab_size)
    if t2d is not None and not torch.equal(t2d.bool(), vocab.t2d):
        raise EyasError(
            "t2d and d2t disagree"
            + (
                f" at target id {int((t2d.bool() != vocab.t2d).nonzero()[0])}"
                if t2d.shape == vocab.t2d.shape
                else " in length"
            ),
            "t2d true exactly where d2t points",
        )
    return vocab, order
