"""Checks of the config.json of a drafter that others trained, before anything is read from it.

- `check_config` refuses, by the field's name, what is not of its kind and what SGLang would compute
  and our drafter would not.
- `rope_of` returns the rotary embedding that SGLang builds from the file.
- `remarks` says in sentences what is read but needs a look.

The reference for every reading is SGLang 0.5.23: `models/llama.py`, `models/llama_eagle3.py` and
`layers/logits_processor.py`. A field without a value there has the default of transformers'
LlamaConfig.
"""

import math

from eyas.errors import EyasError

NEXT = "correct config.json, or copy the checkpoint again; then the same command"
DEFAULT_POSITIONS = 2048  # of LlamaConfig, where config.json names none
DEFAULT_THETA = 10000.0
NEEDED = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size", "rms_norm_eps")
COUNTS = (
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "num_hidden_layers",
    "target_hidden_size",
    "draft_vocab_size",
    "num_aux_hidden_states",
    "sliding_window",
)
NUMBERS = ("rms_norm_eps", "rope_theta")
SWITCHES = (
    "fc_norm",
    "use_aux_norm",
    "norm_output",
    "norm_before_fc",
    "norm_before_residual",
    "use_aux_hidden_state",
    "tie_word_embeddings",
    "bias",
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "rope_is_neox_style",
)
GROUPS = ("eagle_config", "rope_scaling", "rope_parameters", "transformer_layer_config")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
ROPE_NUMBERS = {  # kind -> the fields that it cannot do without
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
}
COMPUTED_ELSEWHERE = {  # field -> the only value that our drafter computes
    "partial_rotary_factor": 1,
    "rope_is_neox_style": True,
    "logit_scale": 1,
    "final_logit_softcapping": None,
    "quantization_config": None,
    "compression_config": None,
}


def check_config(name: str, record: dict) -> None:
    """Raise EyasError, which names the field, where a config.json cannot be used as SGLang would.

    name: the checkpoint's folder. record: its config.json, in SGLang's or speculators' layout.
    """
    for group in GROUPS:
        if record.get(group) is not None and not isinstance(record[group], dict):
            raise _wrong(name, group, record[group], "a mapping of names to values")
    parts = [record, record.get("transformer_layer_config"), record.get("eagle_config")]
    for part in parts:
        if part is not None:
            _check_kinds(name, part)
    layer = record.get("transformer_layer_config") or record
    _check_architectures(name, record)
    if missing := [field for field in NEEDED if layer.get(field) is None]:
        expected = "the file that save_pretrained wrote"
        raise EyasError(f"the config.json of {name!r} has no {', '.join(missing)}", expected, NEXT)
    _check_computed(name, [record, layer])
    _check_shape(name, record, layer)
    rope_of(name, layer)


def rope_of(name: str, layer: dict) -> dict:
    """Return the rotary embedding that SGLang builds: `rope_theta`, and `scaling` or None.

    layer: the part of config.json that describes the draft layer. SGLang reads `rope_parameters`
    and, only where they are absent, `rope_theta` and `rope_scaling`.
    """
    parameters = layer.get("rope_parameters")
    old = layer.get("rope_scaling")
    scaling = dict(parameters if parameters is not None else old or {})
    if parameters is not None and old is not None and _kind(parameters) != _kind(old):
        expected = f"the same kind as rope_parameters, {_kind(parameters)!r}"
        raise _wrong(name, "rope_scaling", _kind(old), expected)
    theta = scaling.pop("rope_theta", None) or layer.get("rope_theta") or DEFAULT_THETA
    if not _is_number(theta) or theta <= 0:
        raise _wrong(name, "rope_theta", theta, "a number above 0")
    kind = _kind(scaling)
    if kind not in ROPE_NUMBERS:
        raise EyasError(
            f"{name!r} is a drafter with RoPE of type {kind!r}",
            "one of " + ", ".join(ROPE_NUMBERS),
            "another drafter: this kind of RoPE is not computed here",
        )
    original = layer.get("original_max_position_embeddings")
    if kind != "default" and original:  # SGLang puts it there
        scaling["original_max_position_embeddings"] = original
    _check_computed(name, [scaling])
    for field in ROPE_NUMBERS[kind]:
        value = scaling.get(field)
        if value is None:
            raise EyasError(
                f"the RoPE of type {kind!r} in the config.json of {name!r} has no {field}",
                f"a number, as {kind} scaling needs it",
                NEXT,
            )
        if not _is_number(value) or value <= 0:
            raise _wrong(name, f"{field} of RoPE", value, "a number above 0")
    return {"rope_theta": float(theta), "scaling": None if kind == "default" else scaling}


def remarks(layer: dict, context_tok: int) -> list[str]:
    """Return in sentences what of a draft layer's config.json needs a look.

    context_tok: tokens of the target's context.
    """
    sentences = []
    positions = layer.get("max_position_embeddings")
    if positions is None:
        sentences.append(
            f"its config.json has no max_position_embeddings: {DEFAULT_POSITIONS:,}, as SGLang"
            " reads it"
        )
    limit = positions or DEFAULT_POSITIONS
    if limit < context_tok:
        sentences.append(
            f"its positions end at {limit:,} tokens (max_position_embeddings) and the target's"
            f" context has {context_tok:,}: longer texts were not trained, and SGLang serves it"
            f" only with --context-length {limit} or less"
        )
    window = layer.get("sliding_window")
    if window and "sliding_attention" in (layer.get("layer_types") or []):
        sentences.append(
            f"its attention has a window of {window:,} tokens, here it has none: the same for"
            " texts up to that"
        )
    return sentences


def _check_kinds(name: str, part: dict) -> None:
    """Raise EyasError for a field of one mapping that is not of its kind."""
    for field in COUNTS:
        value = part.get(field)
        if value is not None and (type(value) is not int or value < 1):
            raise _wrong(name, field, value, "a whole number above 0")
    for field in NUMBERS:
        value = part.get(field)
        if value is not None and (not _is_number(value) or value <= 0):
            raise _wrong(name, field, value, "a number above 0")
    for field in SWITCHES:
        value = part.get(field)
        if value is not None and not isinstance(value, bool):
            raise _wrong(name, field, value, "true or false")
    ids = part.get(LAYER_IDS)
    if ids is not None:
        is_list = isinstance(ids, list)
        if not is_list or any(type(id) is not int or id < 0 for id in ids):
            raise EyasError(
                f"{LAYER_IDS} in the config.json of {name!r} is {ids!r}",
                "a list of whole numbers such as [1, 14, 26]",
                "correct config.json, or the same command with -p boundaries B,B,B",
            )
    layer_types = part.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise _wrong(name, "layer_types", layer_types, "a list")


def _check_architectures(name: str, record: dict) -> None:
    architectures = record.get("architectures")
    if architectures is None:
        return
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise _wrong(name, "architectures", architectures, "a list of names")


def _check_computed(name: str, parts: list[dict]) -> None:
    """Raise EyasError for a field that SGLang computes with and our drafter does not."""
    for part in parts:
        for field, computed in COMPUTED_ELSEWHERE.items():
            value = part.get(field)
            if value is not None and value != computed:
                expected = "no such field" if computed is None else f"{computed}, or no such field"
                raise EyasError(
                    f"{name!r} is a drafter with {field} {value!r}",
                    f"{expected}: SGLang computes with it, Eyas does not",
                    "another drafter, or one that was trained without",
                )
    if parts[0].get("model_type") == "llama4_text":
        raise EyasError(
            f"{name!r} is a drafter of model_type 'llama4_text'",
            "a Llama layer, whose MLP has intermediate_size",
            "another drafter",
        )


def _check_shape(name: str, record: dict, layer: dict) -> None:
    """Raise EyasError where sizes that are right by themselves do not fit each other."""
    heads = layer["num_attention_heads"]
    kv_heads = layer.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise _wrong(name, "num_key_value_heads", kv_heads, f"a divisor of the {heads} heads")
    head_dim = layer.get("head_dim")
    if head_dim is None and layer["hidden_size"] % heads:
        expected = f"a divisor of hidden_size {layer['hidden_size']}, or head_dim"
        raise _wrong(name, "num_attention_heads", heads, expected)
    head_dim = head_dim or layer["hidden_size"] // heads
    if head_dim % 2:
        raise _wrong(name, "head_dim", head_dim, "an even number: RoPE turns pairs")
    draft_vocab = record.get("draft_vocab_size") or layer["vocab_size"]
    if draft_vocab > layer["vocab_size"]:
        expected = f"at most vocab_size {layer['vocab_size']}"
        raise _wrong(name, "draft_vocab_size", draft_vocab, expected)


def _kind(scaling: dict) -> str:
    return scaling.get("rope_type") or scaling.get("type") or "default"


def _is_number(value) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value)


def _wrong(name: str, field: str, value, expected: str) -> EyasError:
    return EyasError(f"{field} in the config.json of {name!r} is {value!r}", expected, NEXT)
