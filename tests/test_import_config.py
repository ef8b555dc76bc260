"""A foreign drafter config.json is read as SGLang reads it, or refused by the name of the field.

The reference for each reading is SGLang 0.5.23's own source, which the comments name.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError
from eyas.models.export import export_sglang, export_speculators
from eyas.models.import_drafter import read_checkpoint
from eyas.models.target import load_target
from helpers.random_drafters import make_drafter
from helpers.tiny import make_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target") / "tiny"
    return load_target(str(make_tiny_target(folder, n_blocks=8)))


@pytest.fixture(scope="module")
def drafter(target):
    return make_drafter(target, (2, 4, 5))


@pytest.fixture
def exported(target, drafter, tmp_path):
    """A folder in SGLang's layout."""
    return export_sglang(drafter, target, tmp_path / "export")


def change_config(folder, without=(), **changes):
    """Rewrite config.json with these fields, and without those."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if name not in without}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def change_weight(folder, name, weight):
    weights = load_file(folder / "model.safetensors") | {name: weight.contiguous()}
    save_file(weights, folder / "model.safetensors")
    return folder


# ---- a head of another size than the draft vocabulary


@pytest.mark.parametrize("rows", [150, 199, 201, 512])
def test_a_head_with_other_rows_than_the_draft_vocabulary_is_refused(target, exported, rows):
    change_weight(exported, "lm_head.weight", torch.randn(rows, 64))
    with pytest.raises(EyasError, match=rf"lm_head.weight of .*\[{rows}, 64\]; expected 200 rows"):
        read_checkpoint(exported, target)


@pytest.mark.parametrize(
    "name, dtype, message",
    [
        ("fc.weight", torch.float8_e4m3fn, "fc.weight of 'export' is stored as float8_e4m3fn"),
        ("lm_head.weight", torch.int8, "lm_head.weight of 'export' is stored as int8"),
        ("d2t", torch.float32, "d2t of 'export' is stored as float32; expected whole numbers"),
        ("t2d", torch.float32, "t2d of 'export' is stored as float32; expected bool"),
    ],
)
def test_weights_of_another_number_type_are_refused(target, exported, name, dtype, message):
    weight = load_file(exported / "model.safetensors")[name]
    change_weight(exported, name, weight.to(dtype))
    with pytest.raises(EyasError, match=message):
        read_checkpoint(exported, target)


# ---- the rotary embedding


@pytest.mark.parametrize("place", ["top", "rope_parameters", "rope_scaling"])
def test_a_partial_rotary_embedding_is_refused(target, exported, place):
    """SGLang turns that share of each head alone (models/llama.py, LlamaAttention)."""
    half = {"partial_rotary_factor": 0.5}
    absent = [] if place == "rope_parameters" else ["rope_parameters"]
    change_config(exported, absent, **(half if place == "top" else {place: half}))
    with pytest.raises(EyasError, match="a drafter with partial_rotary_factor 0.5"):
        read_checkpoint(exported, target)


def test_a_whole_rotary_embedding_may_be_named(target, drafter, exported):
    change_config(exported, partial_rotary_factor=1.0)
    again = read_checkpoint(exported, target).drafter
    assert torch.equal(again.fc.weight, drafter.fc.weight)


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"rope_type": "linear"}, "type 'linear' .* has no factor"),
        ({"type": "linear", "factor": "8"}, "factor of RoPE .* is '8'; expected a number above 0"),
        ({"rope_type": "yarn", "factor": 0}, "factor of RoPE .* is 0"),
        ({"rope_type": "llama3", "factor": 8.0}, "type 'llama3' .* has no low_freq_factor"),
        ({"rope_type": "dynamic", "factor": 2.0}, "RoPE of type 'dynamic'"),
        ("linear", "rope_scaling .* is 'linear'; expected a mapping"),
        (["linear", 2], "rope_scaling .* expected a mapping"),
    ],
)
def test_a_scaled_rotary_embedding_that_is_not_whole_is_refused(target, exported, scaling, message):
    change_config(exported, ["rope_parameters"], rope_scaling=scaling)
    with pytest.raises(EyasError, match=message):
        read_checkpoint(exported, target)


def test_scaling_is_read_from_rope_parameters_first_as_sglang_does(target, exported):
    """models/llama.py: rope_parameters, and rope_scaling only where they are absent."""
    new = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    change_config(exported, rope_parameters=new, rope_theta=123.0)
    config = read_checkpoint(exported, target).drafter.config
    assert (config.rope_theta, config.rope_scaling["factor"]) == (5000.0, 4.0)
    change_config(exported, rope_scaling={"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(EyasError, match="rope_scaling .* is 'yarn'; expected the same kind"):
        read_checkpoint(exported, target)


# ---- fields of another kind


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_size": "64"}, "hidden_size .* is '64'; expected a whole number above 0"),
        ({"vocab_size": 512.0}, "vocab_size .* is 512.0; expected a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads .* is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads .* is 3; expected a divisor"),
        ({"head_dim": 15}, "head_dim .* is 15; expected an even number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps .* is '1e-5'; expected a number above 0"),
        ({"rope_theta": "10000"}, "rope_theta .* is '10000'"),
        ({"max_position_embeddings": "2048"}, "max_position_embeddings .* is '2048'"),
        ({"draft_vocab_size": 513}, "draft_vocab_size .* is 513; expected at most vocab_size 512"),
        ({"norm_output": "false"}, "norm_output .* is 'false'; expected true or false"),
        ({"fc_norm": 1}, "fc_norm .* is 1; expected true or false"),
        ({"eagle_config": [1, 14, 26]}, "eagle_config .* expected a mapping"),
        ({"architectures": "LlamaForCausalLMEagle3"}, "architectures .* expected a list"),
        ({"logit_scale": 0.5}, "a drafter with logit_scale 0.5"),
        ({"final_logit_softcapping": 30.0}, "a drafter with final_logit_softcapping 30.0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "a drafter with quantization_config"),
        ({"rope_is_neox_style": False}, "a drafter with rope_is_neox_style False"),
        ({"model_type": "llama4_text"}, "model_type 'llama4_text'"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states .* is 4; expected 3"),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(target, exported, changes, message):
    change_config(exported, **changes)
    with pytest.raises(EyasError, match=message) as refused:
        read_checkpoint(exported, target)
    assert refused.value.next_command, "it says what to do"


@pytest.mark.parametrize("ids", [["1", "3", "4"], [1.0, 3, 4], [True, 3, 4], "1,3,4", [1, None, 4]])
def test_layer_ids_that_are_no_whole_numbers_are_refused(target, exported, ids):
    change_config(exported, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    with pytest.raises(EyasError, match="eagle_aux_hidden_state_layer_ids .*-p boundaries B,B,B"):
        read_checkpoint(exported, target)


def test_the_same_is_asked_of_the_layout_of_speculators(target, drafter, tmp_path):
    folder = export_speculators(drafter, target, tmp_path / "theirs", 3)
    record = json.loads((folder / "config.json").read_text())
    layer = record["transformer_layer_config"] | {"partial_rotary_factor": 0.25}
    change_config(folder, transformer_layer_config=layer)
    with pytest.raises(EyasError, match="a drafter with partial_rotary_factor 0.25"):
        read_checkpoint(folder, target)


# ---- what is read, with a remark


def test_a_missing_length_is_read_as_sglang_does_and_said(target, exported):
    """transformers' LlamaConfig, which SGLang loads config.json with, has 2,048."""
    from transformers import LlamaConfig

    change_config(exported, ["max_position_embeddings"])
    checkpoint = read_checkpoint(exported, target)
    expected = LlamaConfig().max_position_embeddings
    assert checkpoint.drafter.config.max_position_embeddings == expected == 2048
    assert "has no max_position_embeddings: 2,048" in str(checkpoint)


def test_positions_that_end_before_the_targets_context_are_said(target, exported):
    change_config(exported, max_position_embeddings=8)
    text = str(read_checkpoint(exported, target))
    assert "its positions end at 8 tokens" in text and "--context-length 8" in text
    change_config(exported, max_position_embeddings=target.context_tok)
    assert "positions end" not in str(read_checkpoint(exported, target))


def test_layer_ids_that_are_the_usual_boundaries_are_said(target, exported):
    """2, N//2, N-3 are boundaries to vLLM, speculators and EAGLE; SGLang reads ids one further."""
    change_config(exported, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    checkpoint = read_checkpoint(exported, target)
    assert checkpoint.drafter.config.boundaries == (3, 5, 6), "as SGLang reads them"
    assert "2, N//2, N-3" in str(checkpoint) and "--ids-of vllm" in str(checkpoint)
    said = read_checkpoint(exported, target, ids_of="vllm")
    assert said.drafter.config.boundaries == (2, 4, 5) and "note:" not in str(said)
    change_config(exported, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    assert "2, N//2, N-3" not in str(read_checkpoint(exported, target))
