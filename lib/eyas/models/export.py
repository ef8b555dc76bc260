"""Export drafters in the layouts that engines load.

    python -m eyas drafter export --profile demo           # for SGLang, into the export folder
    python -m eyas drafter export --profile demo --to vllm # for vLLM, into export/vllm

- SGLang's layout is `LlamaForCausalLMEagle3`; serve it with --speculative-draft-model-path. The
  other is speculators' `eagle3`, which vLLM serves too.
- Both were written from, and are tested against, SGLang's own `models/llama_eagle3.py` and
  speculators' own `Eagle3DraftModel`.
- Loaders silently drop weights with unknown names and leave missing ones at random values. So
  export and import (`eyas.models.import_drafter`) check every key.
- `eyas.models.layer_ids` computes the layer ids.
"""

import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import set_aside, shown, write_json, write_safetensors
from eyas.models.drafter import Drafter, DrafterConfig, read_record
from eyas.models.layer_ids import SGLANG, VERSIONS, engine_ids
from eyas.models.target import Target

LAYER = "layers.0."
LAYER_KEYS = (
    *(f"{LAYER}self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(
        f"{LAYER}{name}.weight"
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    ),
)
# Key of config.json that no engine reads: the engine, its version, boundaries and target.
WRITTEN_FOR = "eyas_export"
# Weights of every drafter; `norm_keys` gives those of its further norms.
KEYS = ("fc.weight", *LAYER_KEYS, "norm.weight", "lm_head.weight", "d2t", "t2d")
# SGLang ignores the first, and uses the target's in place of the second.
OPTIONAL_KEYS = ("t2d", "embed_tokens.weight")
SPECULATORS_VERSION = "0.9.0"


def norm_keys(config: DrafterConfig) -> set[str]:
    """Return the names of the weights of the norms before fc."""
    n_norms = len(config.boundaries) if config.fc_norm else 0
    keys = {f"fc_norm.{i}.weight" for i in range(n_norms)}
    return keys | {"input_norm.weight"} if config.norm_before_fc else keys


def architecture(target: Target) -> str:
    """Return the architecture that the target's config.json names."""
    return target.config["architectures"][0]


def check_servable(config: DrafterConfig, target: Target, engine: str = SGLANG) -> None:
    """Raise EyasError if the engine cannot serve a drafter of this shape; the error says why."""
    if len(config.boundaries) * config.target_hidden_size == config.hidden_size:
        raise EyasError(
            f"{engine} cannot serve a drafter fed from boundary {config.boundaries[0]} alone:"
            " it recognises states that still need fc by their width",
            "two boundaries or more",
            "choose other boundaries and train again, e.g. -p boundaries '[2, N//2, N-3]'",
        )
    if config.norm_before_residual:
        raise EyasError(
            f"{engine} cannot serve a drafter with norm_before_residual:"
            " its residual stream starts in front of the norm",
            "one without",
            "python -m eyas drafter export --to vllm",
        )
    if config.own_embedding and config.hidden_size == config.target_hidden_size:
        raise EyasError(
            f"{engine} cannot serve a drafter with an embedding of its own:"
            " it uses the target's in its place",
            "the target's",
            "python -m eyas drafter export --to vllm",
        )
    engine_ids(config.boundaries, architecture(target), target.n_blocks, engine)


def unservable(run: Config, drafter: Drafter, target: Target) -> EyasError | None:
    """Return why this SGLang cannot serve a run's drafter; None if it can.

    The drafter is not at fault: the error has the command that exports it for vLLM.
    """
    try:
        check_servable(drafter.config, target)
    except EyasError as error:
        which = Config(
            run_name=run.run_name,
            member=run.member,
            target=run.target,
            trust_remote_code=run.trust_remote_code,
        ).options()
        return EyasError(
            error.found, error.expected, f"python -m eyas drafter export --to vllm {which}".rstrip()
        )
    return None


def exported(run: Config, drafter: Drafter, target: Target) -> str:
    """Export the drafter of a run for SGLang.

    Return the files with their bytes, or why it cannot be served.
    """
    refused = unservable(run, drafter, target)
    if refused:
        return f"not exported for SGLang: {refused}"
    folder = export_sglang(drafter, target, run.export_dir, made_from=made_from(run))
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return "\n".join(f"{path.name}: {path.stat().st_size:,} bytes" for path in files)


def made_from(run: Config) -> dict:
    """Return which weights an export is made from, for its config.json.

    These are the run and `drafter_weights`, and for trained ones the optimizer steps and the
    held-out acceptance length.
    """
    if not (run.drafter_dir / run.drafter_file).is_file():
        return {}
    record = read_record(run.drafter_dir, run.drafter_file)
    length = record.get("heldout_acceptance_length")
    if length is not None and math.isnan(length):  # JSON has no NaN
        length = None
    known = {"steps": record.get("steps"), "heldout_acceptance_length": length}
    return {
        "run_name": run.run_name,
        "drafter_weights": run.drafter_weights,
        **{name: value for name, value in known.items() if value is not None},
    }


def export_sglang(
    drafter: Drafter,
    target: Target,
    folder: Path,
    engine: str = SGLANG,
    made_from: dict | None = None,
) -> Path:
    """Write `config.json` and `model.safetensors` for SGLang; return the folder.

    The target's embedding is left out: SGLang takes it from the target. `made_from`: see the
    function of this name. Raise EyasError if the engine cannot serve the drafter.
    """
    config = drafter.config
    folder = Path(folder)
    check_servable(config, target, engine)
    record = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer(config),
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "num_aux_hidden_states": len(config.boundaries),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": engine_ids(
                config.boundaries, architecture(target), target.n_blocks, engine
            ),
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
        },
        "dtype": _dtype(target),  # the dtype of serving
        WRITTEN_FOR: written_for(engine, config, target) | (made_from or {}),
    }
    return _write(folder, record, _weights(drafter))


def export_speculators(
    drafter: Drafter,
    target: Target,
    folder: Path,
    draft_steps: int,
    engine: str = "vllm",
    made_from: dict | None = None,
) -> Path:
    """Write `config.json` and `model.safetensors` as speculators saves them; return the folder.

    speculators and vLLM load them. `draft_steps`: tokens that vLLM drafts by default. The embedding
    is included, and `d2t` and `t2d` are unless D = V. The target is named by its folder here; give
    vLLM another with `--model`. Raise EyasError if the engine cannot take these boundaries.
    """
    config = drafter.config
    folder = Path(folder)
    same_size = config.target_hidden_size == config.hidden_size
    record = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": draft_steps,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": str(target.folder),
                "architectures": target.config["architectures"],
            },
        },
        "transformer_layer_config": _layer(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if same_size else config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": engine_ids(
            config.boundaries, architecture(target), target.n_blocks, engine
        ),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": _dtype(target),
        WRITTEN_FOR: written_for(engine, config, target) | (made_from or {}),
    }
    weights = _weights(drafter) | {
        "embed_tokens.weight": drafter.embed_tokens.weight.detach().cpu()
    }
    if config.draft_vocab_size == config.vocab_size:
        del weights["d2t"], weights["t2d"]
    return _write(folder, record, weights)


def written_for(engine: str, config: DrafterConfig, target: Target) -> dict:
    """Return what the layer ids depend on, to compare it with the running server."""
    name, _, version = engine.partition(" ")
    return {
        "engine": name,
        "version": version or VERSIONS.get(name, ""),
        "boundaries": list(config.boundaries),
        "target": target.name,
        "target_fingerprint": target.fingerprint,
    }


def _layer(config: DrafterConfig) -> dict:
    """Return the Llama configuration of the draft layer."""
    scaling = config.rope_scaling
    if scaling:
        rope_type = scaling.get("rope_type") or scaling["type"]
        kept = {k: value for k, value in scaling.items() if k not in ("type", "rope_theta")}
        scaling = kept | {"rope_type": rope_type}
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
    }


def _dtype(target: Target) -> str:
    text = target.config.get("text_config", target.config)
    return text.get("dtype") or text.get("torch_dtype") or "bfloat16"


def _weights(drafter: Drafter) -> dict[str, torch.Tensor]:
    """Return the weights to write; the embedding only if it is the drafter's own."""
    own = drafter.config.own_embedding
    weights = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in drafter.state_dict().items()
        if own or name != "embed_tokens.weight"
    }
    weights |= {"d2t": drafter.vocab.d2t, "t2d": drafter.vocab.t2d}
    check_keys(weights, drafter.config)
    return weights


def _write(folder: Path, record: dict, weights: dict[str, torch.Tensor]) -> Path:
    """Write an export, and move an earlier one of another drafter aside."""
    if not _has_weights(folder / "model.safetensors", weights):
        set_aside(
            folder,
            ("config.json", "model.safetensors"),
            f"the export in {shown(folder)} was of another drafter",
        )
    write_safetensors(folder / "model.safetensors", weights, {"format": "pt"})
    write_json(folder / "config.json", record)
    return folder


def _has_weights(path: Path, weights: dict[str, torch.Tensor]) -> bool:
    """Return whether a file holds exactly these weights."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys()) == weights.keys() and all(
                torch.equal(file.get_tensor(name), weights[name]) for name in weights
            )
    except SafetensorError:
        return False


def check_keys(weights: dict[str, torch.Tensor], config: DrafterConfig) -> None:
    """Raise EyasError if weights are unknown or missing.

    Engines silently drop unknown weights and leave missing ones at random values.
    """
    keys = {*KEYS} | norm_keys(config)
    unknown = sorted(set(weights) - keys - {*OPTIONAL_KEYS})
    missing = sorted(keys - {*weights, *OPTIONAL_KEYS})
    faults = []
    if unknown:
        faults.append(f"unknown weights: {', '.join(unknown)}")
    if missing:
        faults.append(f"missing weights: {', '.join(missing)}")
    if faults:
        raise EyasError(" and ".join(faults), "exactly " + ", ".join(sorted(keys)))
