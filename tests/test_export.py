"""Layer ids against SGLang's own functions, exports against SGLang's own model, and drafter files with something wrong in them."""

import ast
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import List, Optional

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError
from eyas.export import engine_boundaries, engine_ids, export_sglang, load_export

# ---- layer ids: the independent reference is SGLang's own source, run without its imports

MODELS = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt" / "models"
FAMILIES = {
    "LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v2", "KimiK25ForConditionalGeneration": "kimi_k25",
    "GptOssForCausalLM": "gpt_oss",
}  # fmt: skip


def sglang_method(file: str, owner: str):
    """`owner.set_eagle3_layers_to_capture` of a model file, compiled alone."""
    tree = ast.parse((MODELS / f"{file}.py").read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner).body
    method = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == "set_eagle3_layers_to_capture")
    names = {"Optional": Optional, "List": List}
    exec(compile(ast.Module([method], []), file, "exec"), names)
    return names["set_eagle3_layers_to_capture"]


def captured(architecture: str, ids: list[int] | None, n_blocks: int) -> list[int]:
    """The boundaries that SGLang captures for these ids: its method sets the blocks before which it does, in ascending order."""
    file = FAMILIES[architecture]
    if file == "kimi_k25":
        inner = SimpleNamespace(
            pp_group=SimpleNamespace(is_last_rank=True), config=SimpleNamespace(num_hidden_layers=n_blocks), model=SimpleNamespace(layers_to_capture=[])
        )
        method = sglang_method("deepseek_v2", "DeepseekV2ForCausalLM")
        inner.set_eagle3_layers_to_capture = lambda layer_ids: method(inner, layer_ids)
        sglang_method(file, architecture)(SimpleNamespace(language_model=inner), ids)
        return sorted(inner.model.layers_to_capture)
    model = SimpleNamespace(layers_to_capture=[])
    model.set_eagle3_layers_to_capture = lambda layer_ids: setattr(model, "layers_to_capture", layer_ids)  # qwen3_moe keeps them one level down
    owner = {"DeepseekV3ForCausalLM": "DeepseekV2ForCausalLM"}.get(architecture, architecture)  # inherits it
    fake = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), config=SimpleNamespace(num_hidden_layers=n_blocks), model=model)
    sglang_method(file, owner)(fake, ids)
    return sorted(model.layers_to_capture)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_engine_ids_make_sglang_capture_exactly_these_boundaries(architecture):
    n = 8
    for size in (1, 2, 3):
        for boundaries in itertools.combinations(range(n + 1), size):
            try:
                ids = engine_ids(boundaries, architecture, n)
            except EyasError:
                # only what the family cannot capture is refused
                assert (n in boundaries and architecture != "GptOssForCausalLM") or (boundaries == (1,) and FAMILIES[architecture] in ("deepseek_v2", "kimi_k25"))
                continue
            assert captured(architecture, ids, n) == list(boundaries), (boundaries, ids)
            assert engine_boundaries(ids, architecture, n) == boundaries
    assert engine_boundaries(None, architecture, n) == tuple(captured(architecture, None, n)) == (2, 4, 5)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_engine_boundaries_reads_any_ids_as_sglang_does(architecture):
    n = 8
    for ids in itertools.permutations(range(n + (architecture == "GptOssForCausalLM")), 3):
        assert list(engine_boundaries(list(ids), architecture, n)) == captured(architecture, list(ids), n), ids


def test_known_rows_of_layer_ids():
    # TRAPS: ids 1, 14, 26 of a 30-layer Llama were boundaries 2, 15, 27, measured; Kimi-K2.5 at [3, 31, 59] is boundaries 3, 31, 59;
    # gpt-oss-120b heads at [24, 30, 36] (N = 36) and at [1, 17, 32]
    assert engine_ids((2, 15, 27), "LlamaForCausalLM", 30) == [1, 14, 26]
    assert engine_ids((3, 31, 59), "KimiK25ForConditionalGeneration", 61) == [3, 31, 59]
    assert engine_boundaries([1, 29, 57], "KimiK25ForConditionalGeneration", 61) == (2, 30, 58)
    assert engine_boundaries([24, 30, 36], "GptOssForCausalLM", 36) == (24, 30, 36)
    assert engine_boundaries([1, 17, 32], "GptOssForCausalLM", 36) == (2, 18, 33)


def test_unservable_choices_are_said():
    with pytest.raises(EyasError, match="cannot serve a drafter fed from boundary 30"):
        engine_ids((2, 15, 30), "LlamaForCausalLM", 30)
    with pytest.raises(EyasError, match="boundary 1 alone"):
        engine_ids((1,), "DeepseekV3ForCausalLM", 61)
    with pytest.raises(EyasError, match="MambaForCausalLM"):
        engine_ids((1, 2), "MambaForCausalLM", 30)
    with pytest.raises(EyasError, match="SGLang 0.4.9"):
        engine_ids((1, 2), "LlamaForCausalLM", 30, "0.4.9")
    with pytest.raises(EyasError, match="from 0 to 30"):
        engine_ids((1, 31), "LlamaForCausalLM", 30)
