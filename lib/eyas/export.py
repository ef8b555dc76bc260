"""The drafter in the layout that SGLang's `LlamaForCausalLMEagle3` loads, and back.

    python -m eyas export --profile demo      # writes the run's export folder; serve it with --speculative-draft-model-path

Written from, and tested against, SGLang's own `models/llama_eagle3.py` and the target families' `set_eagle3_layers_to_capture`.
SGLang's loader drops weights whose names it does not know and leaves what is missing at random values, both without a word, so
export and import check every key.

This module also holds the one place where an engine's layer ids and our boundaries meet: `engine_ids` and `engine_boundaries`.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from eyas.drafter import Drafter, DrafterConfig
from eyas.errors import EyasError
from eyas.files import read_json, write_json, write_safetensors
from eyas.target import Target
from eyas.vocab import DraftVocab

ENGINE_VERSION = "0.5.23"  # SGLang

# What an id x in `eagle_aux_hidden_state_layer_ids` means, by version and architecture of the target.
#   after:   the output of block x, so boundary x + 1
#   first_1: as `after` when the first id is 1, else boundary x
#   last_N:  boundary x when the largest id is N, else as `after`; the only one that can capture boundary N
CONVENTIONS = {
    "0.5.23": {
        "LlamaForCausalLM": "after",
        "Qwen2ForCausalLM": "after",
        "Qwen3ForCausalLM": "after",
        "Qwen3MoeForCausalLM": "after",
        "DeepseekV2ForCausalLM": "first_1",
        "DeepseekV3ForCausalLM": "first_1",
        "KimiK25ForConditionalGeneration": "first_1",  # delegates to deepseek_v2
        "GptOssForCausalLM": "last_N",
    }
}

LAYER = "layers.0."
LAYER_KEYS = (
    *(f"{LAYER}self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"{LAYER}{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
)
KEYS = ("fc.weight", *LAYER_KEYS, "norm.weight", "lm_head.weight", "d2t", "t2d")  # and fc_norm.0.weight ... where a norm stands before fc
OPTIONAL_KEYS = ("t2d", "embed_tokens.weight")  # SGLang ignores the one and puts the target's in the place of the other


def _convention(architecture: str, version: str) -> str:
    if version not in CONVENTIONS:
        raise EyasError(f"layer ids of SGLang {version} are not known", "SGLang " + ", ".join(CONVENTIONS), f"pip install sglang=={ENGINE_VERSION}")
    if architecture not in CONVENTIONS[version]:
        raise EyasError(f"layer ids of {architecture} in SGLang {version} are not known", "one of " + ", ".join(CONVENTIONS[version]))
    return CONVENTIONS[version][architecture]


def engine_ids(boundaries: tuple[int, ...], architecture: str, n_blocks: int, version: str = ENGINE_VERSION) -> list[int]:
    """The ids that make this SGLang capture exactly these (ascending) boundaries of a target of that architecture.

    EyasError for a choice that it cannot capture, boundary N first of all: most families capture before a block runs, and no block
    runs on boundary N. The order of ids carries no meaning for SGLang (it captures while it walks the blocks).
    """
    convention = _convention(architecture, version)
    if not boundaries or list(boundaries) != sorted(set(boundaries)) or boundaries[0] < 0 or boundaries[-1] > n_blocks:
        raise EyasError(f"boundaries {list(boundaries)}", f"ascending ids from 0 to {n_blocks}, none twice")
    if convention == "last_N":
        return list(boundaries) if boundaries[-1] == n_blocks else [b - 1 for b in boundaries]
    if boundaries[-1] == n_blocks:
        raise EyasError(
            f"SGLang {version} cannot serve a drafter fed from boundary {n_blocks} of {architecture}: it captures what enters a block, and no block follows",
            f"boundaries below {n_blocks}", "choose other boundaries and train again, e.g. -p boundaries '[2, N//2, N-3]'",
        )
    if convention == "after":
        return [b - 1 for b in boundaries]
    if boundaries[0] != 1:  # first_1: ids are boundaries as long as the first one is not 1 ...
        return list(boundaries)
    if len(boundaries) == 1:
        raise EyasError(f"SGLang {version} cannot capture boundary 1 alone of {architecture}: it reads a first id of 1 as boundary 2", "another choice")
    return [*boundaries[1:], 1]  # ... so it goes last


def engine_boundaries(ids: list[int] | None, architecture: str, n_blocks: int, version: str = ENGINE_VERSION) -> tuple[int, ...]:
    """The boundaries that this SGLang captures for these ids, in the order in which it concatenates them (ascending).

    `None` is SGLang's own default, boundaries 2, N//2, N-3.
    """
    convention = _convention(architecture, version)
    if ids is None:
        return (2, n_blocks // 2, n_blocks - 3)
    plain = (convention == "first_1" and ids[0] != 1) or (convention == "last_N" and max(ids) == n_blocks)
    return tuple(sorted(ids if plain else [x + 1 for x in ids]))


def architecture(target: Target) -> str:
    return target.config["architectures"][0]


def check_servable(config: DrafterConfig, target: Target, version: str = ENGINE_VERSION) -> None:
    """EyasError, which says why, where this SGLang cannot feed a drafter of that shape its boundaries."""
    if len(config.boundaries) * config.target_hidden_size == config.hidden_size:
        raise EyasError(f"SGLang {version} cannot serve a drafter fed from boundary {config.boundaries[0]} alone: it tells states that still need fc by their width",
                        "two boundaries or more", "choose other boundaries and train again, e.g. -p boundaries '[2, N//2, N-3]'")
    engine_ids(config.boundaries, architecture(target), target.n_blocks, version)


def export_sglang(drafter: Drafter, target: Target, folder: Path, version: str = ENGINE_VERSION) -> Path:
    """Write `config.json` and `model.safetensors`; gives the folder.

    The embedding is left out: SGLang takes the target's. EyasError where this SGLang cannot feed the drafter its boundaries.
    """
    config, folder = drafter.config, Path(folder)
    check_servable(config, target, version)
    text = target.config.get("text_config", target.config)
    record = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "num_aux_hidden_states": len(config.boundaries),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": engine_ids(config.boundaries, architecture(target), target.n_blocks, version),
            "use_aux_hidden_state": True,
            "norm_before_fc": False,
        },
        "dtype": text.get("dtype") or text.get("torch_dtype") or "bfloat16",  # in which it is served: the target's
    }
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items() if name != "embed_tokens.weight"}
    weights |= {"d2t": drafter.vocab.d2t, "t2d": drafter.vocab.t2d}
    _check_keys(weights, config.fc_norm * len(config.boundaries))
    write_safetensors(folder / "model.safetensors", weights, {"format": "pt"})
    write_json(folder / "config.json", record)
    return folder


def load_export(folder: Path, target: Target, version: str = ENGINE_VERSION) -> Drafter:
    """A drafter from a folder in SGLang's layout, ours or somebody else's, with the target's embedding (as SGLang does it).

    Reads weights named `layers.0.*` or `midlayer.*`. EyasError names what is wrong: no such folder; not a LlamaForCausalLMEagle3; parts that
    our drafter does not have; another target's hidden size or vocabulary; unknown or missing weights; a wrong shape; `d2t` that
    points below 0, beyond the vocabulary or twice at one token; `t2d` that disagrees with `d2t`.
    """
    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise EyasError(f"no {name} in {folder.name!r}", "an exported drafter", "python -m eyas export --profile demo")
    record = read_json(folder / "config.json")
    if record.get("architectures") != ["LlamaForCausalLMEagle3"]:
        raise EyasError(f"architectures {record.get('architectures')} in {folder.name!r}", "['LlamaForCausalLMEagle3']")
    eagle = record.get("eagle_config") or {}
    extra = [name for name in ("norm_before_fc", "bias", "attention_bias", "tie_word_embeddings")
             if record.get(name) or eagle.get(name)]
    if extra or record.get("num_hidden_layers") != 1 or not eagle.get("use_aux_hidden_state", True):
        what = ", ".join(extra) or f"{record.get('num_hidden_layers')} layers or no captured boundaries"
        raise EyasError(f"{folder.name!r} is a drafter with {what}", "one layer, captured boundaries, and none of these switches")
    for name, found, expected in (
        ("hidden size of the target", record.get("target_hidden_size", record["hidden_size"]), target.hidden_size),
        ("hidden size", record["hidden_size"], target.hidden_size),  # the embedding is the target's
        ("vocabulary", record["vocab_size"], target.vocab_size),
    ):
        if found != expected:
            raise EyasError(f"{folder.name!r} is a drafter for another target: {name} {found}", f"{expected}, as {target.name} has it")
    weights = {name.replace("midlayer.", LAYER): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    config = _config_of(record, engine_boundaries(eagle.get("eagle_aux_hidden_state_layer_ids"), architecture(target), target.n_blocks, version))
    _check_keys(weights, config.fc_norm * len(config.boundaries))
    vocab, order = _vocab_of(weights.pop("d2t"), weights.pop("t2d", None), config)
    weights["lm_head.weight"] = weights["lm_head.weight"][order]
    weights["embed_tokens.weight"] = target.embedding().float()
    drafter = Drafter(config, vocab)
    for name, tensor in drafter.state_dict().items():
        if weights[name].shape != tensor.shape:
            raise EyasError(f"{name} has the shape {list(weights[name].shape)}", f"{list(tensor.shape)}, from config.json and the boundaries")
    drafter.load_state_dict(weights)
    return drafter


def _config_of(record: dict, boundaries: tuple[int, ...]) -> DrafterConfig:
    """Our description of a drafter from its config.json. EyasError where RoPE is scaled."""
    rope = record.get("rope_parameters") or {}
    scaling = record.get("rope_scaling") or rope
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise EyasError(f"a drafter with rope_scaling {scaling}", "plain RoPE")
    n_heads = record["num_attention_heads"]
    return DrafterConfig(
        hidden_size=record["hidden_size"],
        target_hidden_size=record.get("target_hidden_size", record["hidden_size"]),
        vocab_size=record["vocab_size"],
        draft_vocab_size=record["draft_vocab_size"],
        n_heads=n_heads,
        n_kv_heads=record.get("num_key_value_heads", n_heads),
        head_dim=record.get("head_dim") or record["hidden_size"] // n_heads,
        intermediate_size=record["intermediate_size"],
        rms_norm_eps=record["rms_norm_eps"],
        rope_theta=float(record.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        max_position_embeddings=record["max_position_embeddings"],
        boundaries=boundaries,
        fc_norm=bool(record.get("fc_norm") or record.get("use_aux_norm")),
        norm_output=bool(record.get("norm_output")),
    )


def _check_keys(weights: dict[str, torch.Tensor], n_fc_norms: int) -> None:
    """SGLang would drop the unknown ones and leave the missing ones at random values, silently."""
    keys = {*KEYS, *(f"fc_norm.{i}.weight" for i in range(n_fc_norms))}
    unknown, missing = sorted(set(weights) - keys - {*OPTIONAL_KEYS}), sorted(keys - {*weights, *OPTIONAL_KEYS})
    if unknown or missing:
        found = " and ".join(text for text in (f"unknown weights: {', '.join(unknown)}" * bool(unknown), f"missing weights: {', '.join(missing)}" * bool(missing)) if text)
        raise EyasError(found, "exactly " + ", ".join(sorted(keys)))


def _vocab_of(d2t: torch.Tensor, t2d: torch.Tensor | None, config: DrafterConfig) -> tuple[DraftVocab, torch.Tensor]:
    """The draft vocabulary in ascending order of target ids, and the rows of the head that stand for it (others sort by frequency)."""
    if list(d2t.shape) != [config.draft_vocab_size]:
        raise EyasError(f"d2t has the shape {list(d2t.shape)}", f"[{config.draft_vocab_size}], the draft vocabulary")
    ids = d2t.to(torch.int64) + torch.arange(len(d2t))  # [D]
    for wrong, text in ((ids < 0, "below 0"), (ids >= config.vocab_size, f"beyond the vocabulary ({config.vocab_size})")):
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise EyasError(f"d2t points {text}: draft id {at} + {int(d2t[at])} = {int(ids[at])}", "offsets: target id = draft id + d2t[draft id]")
    ids, order = ids.sort()
    if (ids[1:] == ids[:-1]).any():
        raise EyasError(f"d2t maps two draft ids to target id {int(ids[1:][ids[1:] == ids[:-1]][0])}", "one draft id for each (is it absolute, not an offset?)")
    vocab = DraftVocab(ids, config.vocab_size)
    if t2d is not None and not torch.equal(t2d.bool(), vocab.t2d):
        raise EyasError("t2d and d2t disagree" + (f" at target id {int((t2d.bool() != vocab.t2d).nonzero()[0])}" if t2d.shape == vocab.t2d.shape else " in length"),
                        "t2d true exactly where d2t points")
    return vocab, order
