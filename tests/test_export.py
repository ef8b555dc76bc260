"""Layer ids against SGLang's own functions, exports against SGLang's own model, and drafter files with something wrong in them."""

import ast
import functools
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
from tiny import make_tiny_target

from eyas.drafter import DraftCache, Drafter, DrafterConfig
from eyas.errors import EyasError
from eyas.export import engine_boundaries, engine_ids, export_sglang, load_export
from eyas.target import load_target
from eyas.vocab import DraftVocab

# ---- layer ids: the independent reference is SGLang's own source, run without its imports

MODELS = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt" / "models"
FAMILIES = {
    "LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v2", "KimiK25ForConditionalGeneration": "kimi_k25",
    "GptOssForCausalLM": "gpt_oss",
}  # fmt: skip


@functools.cache
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


# ---- exports

BOUNDARIES = (2, 3, 4)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(make_tiny_target(tmp_path_factory.mktemp("target") / "tiny", n_blocks=6)))


def make_drafter(target, boundaries=BOUNDARIES, **switches) -> Drafter:
    """Random, the norms too: a norm left at 1 would hide one that is forgotten."""
    torch.manual_seed(4)
    ids = torch.randperm(target.vocab_size)[:200].sort().values
    drafter = Drafter(DrafterConfig.from_target(target, boundaries, len(ids), **switches), DraftVocab(ids, target.vocab_size))
    for name, weight in drafter.named_parameters():
        weight.data.uniform_(0.5, 1.5) if "norm" in name else weight.data.normal_(std=weight.shape[-1] ** -0.5)
    drafter.embed_tokens.weight.data.copy_(target.embedding().float())
    return drafter.eval()


@pytest.fixture(scope="module")
def drafter(target):
    return make_drafter(target)


def run_sglang(folder: Path, target, token_ids: torch.Tensor, states: torch.Tensor, tmp_path: Path) -> tuple[dict, dict]:
    """What SGLang's own model gives for the export (tests/sglang_drafter.py), and which of its parameters the loader left alone."""
    save_file({"embedding": target.embedding().float(), "token_ids": token_ids, "states": states}, tmp_path / "in.safetensors")
    command = [sys.executable, str(Path(__file__).with_name("sglang_drafter.py")), str(folder), str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "SGLANG_PLATFORM": "", "SGLANG_PLUGINS": ""})
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(tmp_path / "out.safetensors"), json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}], ids=["plain", "norms"])
@torch.no_grad()
def test_sglangs_own_model_loads_the_export_and_agrees(target, tmp_path, switches):
    drafter = make_drafter(target, **switches)
    folder = export_sglang(drafter, target, tmp_path / "export")
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, target.vocab_size, (13,), generator=generator)
    states = torch.randn(12, len(BOUNDARIES) * target.hidden_size, generator=generator)
    theirs, report = run_sglang(folder, target, token_ids, states, tmp_path)
    assert report == {"class": "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3", "untouched": ["model.embed_tokens.weight"]}  # the target's
    cache = DraftCache()
    hidden = drafter.extend(token_ids[:12], drafter.fuse(states), cache)
    hidden = torch.cat([hidden, drafter.extend(token_ids[12:], drafter.feed_back(hidden[-1:]), cache)])  # and one draft step
    torch.testing.assert_close(theirs["hidden"], drafter.feed_back(hidden), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(theirs["logits"], drafter.logits(hidden), atol=1e-5, rtol=1e-5)
    assert torch.equal(theirs["hot_token_id"], drafter.vocab.ids)


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True}, {"norm_output": True}], ids=["plain", "fc_norm", "norm_output"])
def test_export_and_import_are_inverse(target, tmp_path, switches):
    drafter = make_drafter(target, **switches)
    folder = export_sglang(drafter, target, tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3] and config["dtype"] == "bfloat16"
    again = load_export(folder, target)
    assert again.config == drafter.config and torch.equal(again.vocab.ids, drafter.vocab.ids)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def rewrite(folder: Path, change) -> None:
    """`change` edits the weights in place."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


def test_midlayer_names_and_another_order_of_the_vocabulary(target, drafter, tmp_path):
    """EAGLE's own names; Model-Optimizer keeps the vocabulary in order of frequency, and nobody needs t2d."""
    folder = export_sglang(drafter, target, tmp_path / "export")
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))

    def change(weights):
        for name in [name for name in weights if name.startswith("layers.0.")]:
            weights[name.replace("layers.0.", "midlayer.")] = weights.pop(name)
        weights["lm_head.weight"] = weights["lm_head.weight"][order]
        weights["d2t"] = drafter.vocab.ids[order] - torch.arange(200)
        del weights["t2d"]

    rewrite(folder, change)
    again = load_export(folder, target)
    assert torch.equal(again.vocab.ids, drafter.vocab.ids)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def _set(name, at, value):
    return lambda weights: weights[name].__setitem__(at, value)


@pytest.mark.parametrize("change, message", [
    (_set("d2t", 0, -5), r"d2t points below 0: draft id 0 \+ -5 = -5"),
    (_set("d2t", 199, 500), r"d2t points beyond the vocabulary \(512\): draft id 199 \+ 500 = 699"),
    (lambda w: w.update(d2t=torch.cat([w["d2t"][:1], w["d2t"][:1] - 1, w["d2t"][2:]])), "d2t maps two draft ids to target id"),
    (lambda w: w.update(d2t=w["d2t"][:-1]), r"d2t has the shape \[199\]; expected \[200\]"),
    (lambda w: w.update(t2d=~w["t2d"]), "t2d and d2t disagree at target id 0"),
    (lambda w: w.update(t2d=w["t2d"][:-1]), "t2d and d2t disagree in length"),
    (lambda w: w.pop("lm_head.weight"), "missing weights: lm_head.weight"),
    (lambda w: w.pop("d2t"), "missing weights: d2t"),
    (lambda w: w.update({"layers.0.norm.weight": w["norm.weight"].clone()}), "unknown weights: layers.0.norm.weight"),
    (lambda w: w.update({"model.fc.weight": w.pop("fc.weight")}), "unknown weights: model.fc.weight and missing weights: fc.weight"),
    (lambda w: w.update({"fc.weight": w["fc.weight"][:, :-1]}), r"fc.weight has the shape \[64, 191\]; expected \[64, 192\]"),
])  # fmt: skip
def test_wrong_drafter_files_are_refused_by_name(target, drafter, tmp_path, change, message):
    folder = export_sglang(drafter, target, tmp_path / "export")
    rewrite(folder, change)
    with pytest.raises(EyasError, match=message):
        load_export(folder, target)


@pytest.mark.parametrize("change, message", [
    ({"target_hidden_size": 4096}, "another target: hidden size of the target 4096; expected 64"),
    ({"hidden_size": 4096}, "another target: hidden size 4096; expected 64"),
    ({"vocab_size": 32000}, "another target: vocabulary 32000; expected 512"),
    ({"architectures": ["LlamaForCausalLM"]}, r"architectures \['LlamaForCausalLM'\]"),
    ({"num_hidden_layers": 2}, "2 layers"),
    ({"fc_norm": True}, "missing weights: fc_norm.0.weight"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling"),
])  # fmt: skip
def test_wrong_configs_are_refused_by_name(target, drafter, tmp_path, change, message):
    folder = export_sglang(drafter, target, tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(EyasError, match=message):
        load_export(folder, target)


def test_export_refuses_what_sglang_cannot_serve(target, tmp_path):
    with pytest.raises(EyasError, match="cannot serve a drafter fed from boundary 6"):
        export_sglang(make_drafter(target, (2, 3, 6)), target, tmp_path / "last")
    with pytest.raises(EyasError, match="cannot serve a drafter fed from boundary 3 alone"):
        export_sglang(make_drafter(target, (3,)), target, tmp_path / "one")
    with pytest.raises(EyasError, match="no config.json"):
        load_export(tmp_path / "nothing", target)
