"""Layer ids against SGLang's own functions, exports against SGLang's own model, and drafter files
with something wrong in them.
"""

import ast
import functools
import itertools
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import List, Optional  # noqa: UP035  (SGLang's source names it)

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.cli import main
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import sha256_file
from eyas.models.drafter import (
    DraftCache,
    Drafter,
    load_drafter,
    read_record,
)
from eyas.models.export import export_sglang, export_speculators
from eyas.models.import_drafter import read_checkpoint
from eyas.models.layer_ids import (
    ENGINES,
    FAMILIES,
    PLUS_ONE,
    SGLANG,
    engine_boundaries,
    engine_ids,
    round_trip,
    rule,
)
from eyas.models.target import load_target
from eyas.store.formats.speculators_v1 import SpeculatorsV1
from helpers.peer import peer
from helpers.random_drafters import BOUNDARIES, IMPORTED, LLAMA3, make_drafter
from helpers.sglang_models import FAMILY_NAMES, SETTER, find_method, run_sglang, sglang_classes
from helpers.tiny import make_tiny_target

# ---- layer ids: the independent reference is SGLang's own source, run without its imports

NOT_IN_THE_TABLE = {  # of SGLang's classes that have the method
    "drafters": re.compile("NextN$|Eagle3?$|MTP$|Assistant"),
    "several media, or embeddings": re.compile(
        "^(Cosmos3|Gemma3For|Gemma4.*Conditional|Glm5Next|Intern|Llama4|Qwen.*(VL|3_5|"
        "4Exp)|EmbeddingGemma|MindSpore)"
    ),
    "a capture of their own, which nobody has read yet": re.compile(
        "^(Gemma3ForCausalLM|IQuestCoder|LongcatFlash|Mellum|Ministral3|Sarvam|TeleFLM)"
    ),
}


@functools.cache
def sglang_method(architecture: str):
    """`set_eagle3_layers_to_capture` of the class that SGLang serves an architecture with, compiled
    alone.
    """
    parallel = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True))
    names = {"Optional": Optional, "List": List, "get_parallel": lambda: parallel}  # noqa: UP006
    exec(
        compile(
            ast.Module([find_method(sglang_classes()[1][architecture], architecture)], []),
            architecture,
            "exec",
        ),
        names,
    )
    return names[SETTER]


def captured(architecture: str, ids: list[int] | None, n_blocks: int) -> list[int]:
    """The boundaries that SGLang captures for these ids: its method sets the blocks before which it
    does, in ascending order.
    """
    model = SimpleNamespace(
        layers_to_capture=[], layers=[SimpleNamespace() for _ in range(n_blocks)]
    )
    model.set_eagle3_layers_to_capture = lambda layer_ids: setattr(
        model, "layers_to_capture", layer_ids
    )  # some keep them one level down
    fake = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=True),
        config=SimpleNamespace(num_hidden_layers=n_blocks),
        model=model,
    )
    fake.config.text_config = fake.config
    if architecture.startswith(
        "KimiK25"
    ):  # hands the ids to its language model, a DeepseekV3ForCausalLM
        inner, outer = sglang_method("DeepseekV3ForCausalLM"), fake
        outer.language_model = SimpleNamespace(
            **vars(fake), set_eagle3_layers_to_capture=lambda layer_ids: inner(outer, layer_ids)
        )
    sglang_method(architecture)(fake, ids)
    return sorted(model.layers_to_capture)


@pytest.mark.parametrize("architecture", FAMILY_NAMES)
def test_engine_ids_make_sglang_capture_exactly_these_boundaries(architecture):
    n, name = 8, rule(SGLANG, architecture)
    for size in (1, 2, 3):
        for boundaries in itertools.combinations(range(n + 1), size):
            try:
                ids = engine_ids(boundaries, architecture, n)
            except EyasError:
                # only what the family cannot capture is refused
                assert (n in boundaries and name != "last_N") or (
                    boundaries == (1,) and name == "first_1"
                )
                continue
            assert captured(architecture, ids, n) == list(boundaries), (boundaries, ids)
            assert engine_boundaries(ids, architecture, n) == boundaries
    assert (
        engine_boundaries(None, architecture, n)
        == tuple(captured(architecture, None, n))
        == ((3, 5, 6) if architecture in PLUS_ONE else (2, 4, 5))
    )


def read(ids, architecture: str, n: int, engine: str = SGLANG) -> tuple[int, ...]:
    """What the table says, () where it refuses."""
    try:
        return engine_boundaries(list(ids), architecture, n, engine)
    except EyasError:
        return ()


def sglang_reads(ids, architecture: str, n: int) -> tuple[int, ...]:
    """What SGLang captures, () where that is nothing for some id: a block that isn't there, or
    boundary N where the loop ends before it.
    """
    theirs = captured(architecture, list(ids), n)
    return () if theirs[-1] > n - (architecture != "GptOssForCausalLM") else tuple(theirs)


@pytest.mark.parametrize("architecture", FAMILY_NAMES)
def test_engine_boundaries_reads_any_ids_as_sglang_does(architecture):
    for ids in itertools.permutations(range(9), 3):
        assert read(ids, architecture, 8) == sglang_reads(ids, architecture, 8), ids


def test_a_wrong_mapping_is_caught(monkeypatch):
    """A member of each family under every other rule: the comparison above fails."""
    families = dict(FAMILIES[SGLANG])
    for name, other in itertools.permutations(families, 2):
        monkeypatch.setitem(FAMILIES, SGLANG, {other: families[name]})
        assert any(
            read(ids, families[name][0], 8) != sglang_reads(ids, families[name][0], 8)
            for ids in itertools.permutations(range(9), 3)
        ), (name, other)


def test_every_class_that_can_capture_is_in_the_table_or_left_out_for_a_reason():
    able = {name for name, file in sglang_classes()[1].items() if find_method(file, name)}
    assert {*FAMILY_NAMES} <= able
    left = {
        name
        for name in able - {*FAMILY_NAMES}
        if not any(pattern.search(name) for pattern in NOT_IN_THE_TABLE.values())
    }
    assert not left


def test_known_rows_of_layer_ids():
    # TRAPS: ids 1, 14, 26 of a 30-layer Llama were boundaries 2, 15, 27, measured; Kimi-K2.5 at [3,
    # 31, 59] is boundaries 3, 31, 59;
    # gpt-oss-120b heads at [24, 30, 36] (N = 36) and at [1, 17, 32]
    assert engine_ids((2, 15, 27), "LlamaForCausalLM", 30) == [1, 14, 26]
    assert engine_ids((3, 31, 59), "KimiK25ForConditionalGeneration", 61) == [3, 31, 59]
    assert engine_boundaries([1, 29, 57], "KimiK25ForConditionalGeneration", 61) == (2, 30, 58)
    assert engine_boundaries([24, 30, 36], "GptOssForCausalLM", 36) == (24, 30, 36)
    assert engine_boundaries([1, 17, 32], "GptOssForCausalLM", 36) == (2, 18, 33)


@pytest.mark.parametrize(
    "engine, ids, boundaries",
    [
        ("vllm", [2, 15, 27], (2, 15, 27)),
        ("speculators", [2, 15, 27], (2, 15, 27)),
        ("eagle", [2, 15, 27], (2, 15, 27)),
        ("vllm", [2, 15, 30], (2, 15, 30)),  # the last block's output, before the final norm
        ("specforge", [1, 14, 26], (2, 15, 27)),
        ("angelslim", [1, 14, 26], (2, 15, 27)),
        ("modelopt", [1, 14, 26], (2, 15, 27)),
        ("torchspec", [1, 14, 26], (2, 15, 27)),
        ("automodel", [1, 14, 26], (2, 15, 27)),
        ("speculators-v1", [2, 15, 27], (3, 16, 28)),
    ],
)
def test_other_engines(engine, ids, boundaries):
    """The rows of the table of traps, for a Llama of 30 blocks: trainers count blocks, engines what
    enters one; the defaults agree but for speculators 0.3 and 0.4.
    """
    assert (
        engine_boundaries(ids, "LlamaForCausalLM", 30, engine) == boundaries
        and engine_ids(boundaries, "LlamaForCausalLM", 30, engine) == ids
    )
    assert engine_boundaries(None, "LlamaForCausalLM", 30, engine) == (
        (3, 16, 28) if engine == "speculators-v1" else (2, 15, 27)
    )


def test_the_stores_of_speculators_count_as_the_table_does():
    """`formats` writes the layer ids of speculators 0.3 into its data_config.json."""
    assert [b - SpeculatorsV1.id_is_boundary_minus for b in (3, 16, 28)] == engine_ids(
        (3, 16, 28), "LlamaForCausalLM", 30, "speculators-v1"
    )


def test_the_table_for_people(capsys):
    assert main(["drafter", "layer-ids", "--blocks", "61"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert {line.split()[1] for line in lines[1:]} == {engine.split()[0] for engine in ENGINES}
    kimi = next(line for line in lines if line.startswith("| sglang") and "KimiK25" in line)
    assert [cell.strip() for cell in kimi.split("|")[2:6]] == [
        "0.5.23",
        "first_1",
        "2, 30, 58",
        "2, 30, 58",
    ]
    rows = {
        row["engine"]: row for row in round_trip(61, "KimiK25ForConditionalGeneration", (3, 31, 59))
    }
    assert [rows[name]["ids"] for name in ("sglang", "vllm", "angelslim")] == [
        "[3, 31, 59]",
        "[3, 31, 59]",
        "[2, 30, 58]",
    ]
    assert (
        "from boundary 61"
        in {
            row["engine"]: row
            for row in round_trip(61, "KimiK25ForConditionalGeneration", (3, 31, 61))
        }["sglang"]["ids"]
    )


def test_unservable_choices_are_said():
    with pytest.raises(EyasError, match="cannot serve a drafter fed from boundary 30"):
        engine_ids((2, 15, 30), "LlamaForCausalLM", 30)
    with pytest.raises(EyasError, match="after the final norm"):
        engine_ids((2, 15, 30), "LlamaForCausalLM", 30, "modelopt")
    with pytest.raises(EyasError, match="boundary 1 alone"):
        engine_ids((1,), "DeepseekV3ForCausalLM", 61)
    with pytest.raises(EyasError, match="MambaForCausalLM"):
        engine_ids((1, 2), "MambaForCausalLM", 30)
    with pytest.raises(EyasError, match="sglang 0.4.9"):
        engine_ids((1, 2), "LlamaForCausalLM", 30, "sglang 0.4.9")
    with pytest.raises(EyasError, match="from 0 to 30"):
        engine_ids((1, 31), "LlamaForCausalLM", 30)


# ---- exports


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("target") / "tiny", n_blocks=6))
    )


@pytest.fixture(scope="module")
def drafter(target):
    return make_drafter(target)


@pytest.mark.parametrize(
    "switches",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({"fc_norm": True, "norm_output": True}, id="norms"),
        pytest.param(
            {"norm_before_fc": True, "rope_scaling": LLAMA3}, id="imported", marks=pytest.mark.slow
        ),
    ],
)
@torch.no_grad()
def test_sglangs_own_model_loads_the_export_and_agrees(target, tmp_path, switches):
    drafter = make_drafter(target, **switches)
    folder = export_sglang(drafter, target, tmp_path / "export")
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, target.vocab_size, (13,), generator=generator)
    states = torch.randn(12, len(BOUNDARIES) * target.hidden_size, generator=generator)
    theirs, report = run_sglang(folder, target, token_ids, states, tmp_path)
    assert report == {
        "class": "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3",
        "untouched": ["model.embed_tokens.weight"],
    }  # the target's
    cache = DraftCache()
    hidden = drafter.extend(token_ids[:12], drafter.fuse(states), cache)
    hidden = torch.cat(
        [hidden, drafter.extend(token_ids[12:], drafter.feed_back(hidden[-1:]), cache)]
    )  # and one draft step
    torch.testing.assert_close(theirs["hidden"], drafter.feed_back(hidden), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(theirs["logits"], drafter.logits(hidden), atol=1e-5, rtol=1e-5)
    assert torch.equal(theirs["hot_token_id"], drafter.vocab.ids)


def agree(drafter: Drafter, again: Drafter) -> None:
    assert again.config == drafter.config and torch.equal(again.vocab.ids, drafter.vocab.ids)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"fc_norm": True},
        {"norm_output": True},
        {"norm_before_fc": True, "rope_scaling": LLAMA3},
    ],
    ids=lambda s: " ".join(s) or "plain",
)
def test_export_and_import_are_inverse(target, tmp_path, switches):
    drafter = make_drafter(target, **switches)
    folder = export_sglang(drafter, target, tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    assert (
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
        and config["dtype"] == "bfloat16"
    )
    assert config["eyas_export"] == {
        "engine": "sglang",
        "version": "0.5.23",
        "boundaries": list(BOUNDARIES),
        "target": target.name,
        "target_fingerprint": target.fingerprint,
    }
    agree(drafter, read_checkpoint(folder, target).drafter)


@pytest.mark.parametrize(
    "switches",
    [{}, {"fc_norm": True, "norm_output": True}, IMPORTED],
    ids=["plain", "norms", "imported"],
)
def test_the_layout_of_speculators_and_vllm_is_inverse_too(target, tmp_path, switches):
    drafter = make_drafter(
        target, (2, 3, 6), **switches
    )  # it can have the last block's output, SGLang can't
    folder = export_speculators(drafter, target, tmp_path / "export", 3)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Eagle3Speculator"] and config[
        "eagle_aux_hidden_state_layer_ids"
    ] == [2, 3, 6]
    assert config["eyas_export"] == {
        "engine": "vllm",
        "version": "",
        "boundaries": [2, 3, 6],
        "target": target.name,
        "target_fingerprint": target.fingerprint,
    }
    found = read_checkpoint(folder, target)
    agree(drafter, found.drafter)
    assert "[2, 3, 6] as speculators reads them" in str(found) and found.origin["embedding"] == (
        "its own" if switches == IMPORTED else "the target's"
    )


@pytest.mark.parametrize(
    "switch, message",
    [
        ("norm_before_residual", "norm_before_residual"),
        ("own_embedding", "an embedding of its own"),
    ],
)
def test_export_for_sglang_refuses_what_it_would_not_serve(target, tmp_path, switch, message):
    with pytest.raises(EyasError, match=f"{message}.*export --to vllm"):
        export_sglang(make_drafter(target, **{switch: True}), target, tmp_path / "export")


def rewrite(folder: Path, change) -> None:
    """`change` edits the weights in place."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        folder / "model.safetensors",
    )


def test_midlayer_names_and_another_order_of_the_vocabulary(target, drafter, tmp_path):
    """EAGLE's own names; Model-Optimizer keeps the vocabulary in order of frequency, and nobody
    needs t2d.
    """
    folder = export_sglang(drafter, target, tmp_path / "export")
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))

    def change(weights):
        for name in [name for name in weights if name.startswith("layers.0.")]:
            weights[name.replace("layers.0.", "midlayer.")] = weights.pop(name)
        weights["lm_head.weight"] = weights["lm_head.weight"][order]
        weights["d2t"] = drafter.vocab.ids[order] - torch.arange(200)
        del weights["t2d"]

    rewrite(folder, change)
    agree(drafter, read_checkpoint(folder, target).drafter)


def _set(name, at, value):
    return lambda weights: weights[name].__setitem__(at, value)


@pytest.mark.parametrize(
    "change, message",
    [
        (_set("d2t", 0, -5), r"d2t points below 0: draft id 0 \+ -5 = -5"),
        (
            _set("d2t", 199, 500),
            r"d2t points beyond the vocabulary \(512\): draft id 199 \+ 500 = 699",
        ),
        (
            lambda w: w.update(d2t=torch.cat([w["d2t"][:1], w["d2t"][:1] - 1, w["d2t"][2:]])),
            "d2t maps two draft ids to target id",
        ),
        (lambda w: w.update(d2t=w["d2t"][:-1]), r"d2t has the shape \[199\]; expected \[200\]"),
        (lambda w: w.update(t2d=~w["t2d"]), "t2d and d2t disagree at target id 0"),
        (lambda w: w.update(t2d=w["t2d"][:-1]), "t2d and d2t disagree in length"),
        (lambda w: w.pop("lm_head.weight"), "missing weights: lm_head.weight"),
        (lambda w: w.pop("d2t"), "missing weights: d2t"),
        (
            lambda w: w.update({"layers.0.norm.weight": w["norm.weight"].clone()}),
            "unknown weights: layers.0.norm.weight",
        ),
        (
            lambda w: w.update({"model.fc.weight": w.pop("fc.weight")}),
            "unknown weights: model.fc.weight and missing weights: fc.weight",
        ),
        (
            lambda w: w.update({"fc.weight": w["fc.weight"][:, :-1]}),
            r"fc.weight has the shape \[64, 191\]; expected \[64, 192\]",
        ),
    ],
)
def test_wrong_drafter_files_are_refused_by_name(target, drafter, tmp_path, change, message):
    folder = export_sglang(drafter, target, tmp_path / "export")
    rewrite(folder, change)
    with pytest.raises(EyasError, match=message):
        read_checkpoint(folder, target).drafter


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"target_hidden_size": 4096},
            "another target: hidden size of the target 4096; expected 64",
        ),
        (
            {"target_hidden_size": None, "hidden_size": 4096},
            "another target: hidden size of the target 4096; expected 64",
        ),
        ({"hidden_size": 4096}, "hidden size 4096 without an embedding"),
        ({"vocab_size": 32000}, "another target: vocabulary 32000; expected 512"),
        ({"architectures": ["MambaForCausalLM"]}, r"architectures \['MambaForCausalLM'\]"),
        ({"speculators_model_type": "eagle"}, "a speculator of type 'eagle'"),
        ({"attention_bias": True}, "a drafter with attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4, 5]}},
            r"boundaries \[4, 5, 6\] of LlamaForCausalLM to sglang.*--ids-of ENGINE",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}},
            "different ones from 0 to 5",
        ),
        (
            {"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
            "outside of eagle_config.*--ids-of ENGINE",
        ),
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"hidden_size": None, "rms_norm_eps": None}, "has no hidden_size, rms_norm_eps"),
        ({"fc_norm": True}, "missing weights: fc_norm.0.weight"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "RoPE of type 'longrope'"),
    ],
)
def test_wrong_configs_are_refused_by_name(target, drafter, tmp_path, change, message):
    folder = export_sglang(drafter, target, tmp_path / "export")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(EyasError, match=message):
        read_checkpoint(folder, target).drafter


def test_export_refuses_what_sglang_cannot_serve(target, tmp_path):
    with pytest.raises(EyasError, match="cannot serve a drafter fed from boundary 6"):
        export_sglang(make_drafter(target, (2, 3, 6)), target, tmp_path / "last")
    with pytest.raises(EyasError, match="cannot serve a drafter fed from boundary 3 alone"):
        export_sglang(make_drafter(target, (3,)), target, tmp_path / "one")
    with pytest.raises(EyasError, match="no config.json"):
        read_checkpoint(tmp_path / "nothing", target)


# ---- drafters that others trained


def as_others_save(
    folder: Path, out: Path, change=lambda weights, config: None, file="model.safetensors"
) -> Path:
    """A copy of an export with the weights in this file, after `change` to weights and config."""
    weights, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    change(weights, config)
    out.mkdir()
    torch.save(weights, out / file) if file.endswith(".bin") else save_file(weights, out / file)
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_eagles_own_checkpoint(target, drafter, tmp_path):
    """Names of EAGLE's code, float16 in pytorch_model.bin, no layer ids, no further sizes, the
    target's embedding in it.
    """

    def change(weights, config):
        for name in [name for name in weights if name.startswith("layers.0.")]:
            weights[name.replace("layers.0.", "midlayer.")] = weights.pop(name)
        weights["embed_tokens.weight"] = target.embedding()
        for name in weights:
            weights[name] = (
                weights[name].half() if weights[name].is_floating_point() else weights[name]
            )
        for name in (
            "eagle_config",
            "target_hidden_size",
            "num_aux_hidden_states",
            "fc_norm",
            "norm_output",
            "head_dim",
            "rope_theta",
            "rope_scaling",
        ):
            del config[name]
        config["architectures"] = ["LlamaForCausalLM"]

    found = read_checkpoint(
        as_others_save(
            export_sglang(drafter, target, tmp_path / "export"),
            tmp_path / "eagle",
            change,
            "pytorch_model.bin",
        ),
        target,
        boundaries=BOUNDARIES,
    )
    assert (
        found.drafter.config == drafter.config
        and found.origin["boundaries_from"] == "as given"
        and found.origin["embedding"] == "the target's"
    )
    for name, weight in drafter.state_dict().items():
        expected = weight if name == "embed_tokens.weight" else weight.half().float()
        assert torch.equal(expected, found.drafter.state_dict()[name]), name
    with pytest.raises(EyasError, match="fc.weight has the shape"):  # no ids: three boundaries
        read_checkpoint(tmp_path / "eagle", target, boundaries=(2, 3))


def test_a_torn_index_is_said(target, drafter, tmp_path):
    folder = export_sglang(drafter, target, tmp_path / "export")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.wei')
    with pytest.raises(
        EyasError,
        match="model.safetensors.index.json in 'export' can't be read.*copy the checkpoint again",
    ):
        read_checkpoint(folder, target)


def test_without_a_draft_vocabulary(target, drafter, tmp_path):
    """D = V, and the target's head where there is none."""

    def change(weights, config):
        for name in ("lm_head.weight", "d2t", "t2d"):
            del weights[name]
        config["draft_vocab_size"] = None

    found = read_checkpoint(
        as_others_save(
            export_sglang(drafter, target, tmp_path / "export"), tmp_path / "all", change
        ),
        target,
    ).drafter
    assert torch.equal(found.vocab.ids, torch.arange(target.vocab_size)) and torch.equal(
        found.lm_head.weight, target.head().lm_head
    )


def test_whose_ids(target, drafter, tmp_path):
    """The same file read as SGLang and as vLLM would; what the files leave open is asked."""
    folder = export_sglang(drafter, target, tmp_path / "export")
    assert read_checkpoint(folder, target).drafter.config.boundaries == (2, 3, 4)
    assert read_checkpoint(folder, target, ids_of="vllm").drafter.config.boundaries == (1, 2, 3)
    theirs = export_speculators(drafter, target, tmp_path / "theirs", 3)

    def forget(name):
        return as_others_save(theirs, tmp_path / name, lambda weights, config: config.pop(name))

    with pytest.raises(EyasError, match="names no layer ids.*--ids-of"):
        read_checkpoint(forget("eagle_aux_hidden_state_layer_ids"), target)
    with pytest.raises(
        EyasError, match=r"the default layer ids are boundaries \[3, 4, 4\]"
    ):  # six blocks are few
        read_checkpoint(
            tmp_path / "eagle_aux_hidden_state_layer_ids", target, ids_of="speculators-v1"
        )
    assert read_checkpoint(
        tmp_path / "eagle_aux_hidden_state_layer_ids", target, boundaries=(1, 2, 5)
    ).drafter.config.boundaries == (1, 2, 5)
    with pytest.raises(EyasError, match="--norm-before-residual yes"):
        read_checkpoint(forget("norm_before_residual"), target)
    assert read_checkpoint(
        tmp_path / "norm_before_residual", target, norm_before_residual=True
    ).drafter.config.norm_before_residual


def test_import_is_a_run_of_its_own(target, drafter, tmp_path, monkeypatch, capsys):
    """The command writes an ordinary drafter, with its record; a second one is refused; what is
    judged is this run's store where that run has none.
    """
    monkeypatch.setenv("EYAS_DATA", str(tmp_path / "data"))
    folder = export_speculators(drafter, target, tmp_path / "theirs", 3)
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"] |= {
        "sliding_window": 2048,
        "layer_types": ["sliding_attention"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    command = [
        "drafter",
        "import",
        str(folder),
        "-p",
        "run_name",
        "theirs",
        "-p",
        "target",
        str(target.folder),
    ]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert (
        "boundaries 2, 3, 4: layer ids [2, 3, 4] as speculators reads them" in out
        and "a window of 2,048 tokens" in out
        and "decode -p drafter_run theirs" in out
    )
    run = Config.create(run_name="theirs", target=str(target.folder))
    agree(drafter, load_drafter(run.drafter_dir, target))
    record = read_record(run.drafter_dir)["imported"]
    assert (
        record["folder"] == "theirs"
        and record["files"] == {"model.safetensors": sha256_file(folder / "model.safetensors")}
        and record["config"] == config
    )
    assert main(command) == 2 and "has a drafter already" in capsys.readouterr().err
    given = [
        "-p",
        "run_name",
        "again",
        "-p",
        "boundaries",
        "1,2,3",
        "-p",
        "target",
        str(target.folder),
    ]
    assert (
        main([*command[:3], *given]) == 0
        and "boundaries 1, 2, 3: as given" in capsys.readouterr().out
    )
    judge = Config.create(run_name="mine", drafter_run="theirs")
    assert judge.judged_store_dir == judge.store_dir and judge.judged.drafter_dir == run.drafter_dir
    run.store_dir.mkdir()
    assert judge.judged_store_dir == run.store_dir


class Runs:
    """What a pickle could run."""

    def __reduce__(self):
        return os.system, ("exit 3",)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda path: torch.save({"fc.weight": Runs()}, path), "tensors only"),
        (lambda path: torch.save({"fc.weight": [1.0]}, path), "holds more than tensors"),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "can't be read"),
        (lambda path: path.unlink(), "no model.safetensors"),
    ],
)
def test_weights_that_are_not_weights(target, drafter, tmp_path, spoil, message):
    folder = as_others_save(
        export_sglang(drafter, target, tmp_path / "export"),
        tmp_path / "other",
        file="pytorch_model.bin",
    )
    spoil(folder / "pytorch_model.bin")
    with pytest.raises(EyasError, match=message):
        read_checkpoint(folder, target)


# ---- in the peers' own environments


def drafted(
    drafter: Drafter, input_ids: torch.Tensor, states: torch.Tensor, steps: int
) -> torch.Tensor:
    """Logits [steps, slots, D] as serving computes them: step s at slot j, its drafts being the
    text's own tokens.
    """
    hidden, rows = drafter.fuse(states), []
    for slot in range(len(input_ids) - 1 - steps):
        cache, row = DraftCache(), []
        out = drafter.extend(input_ids[1 : slot + 2], hidden[: slot + 1], cache)[-1:]
        for s in range(steps):
            if s:
                out = drafter.extend(
                    input_ids[slot + 1 + s : slot + 2 + s], drafter.feed_back(out), cache
                )
            row.append(drafter.logits(out)[0])
        rows.append(torch.stack(row))
    return torch.stack(rows, dim=1)


SPECULATORS_RUNS = """
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig
given = load_file(sys.argv[2])
def run(folder):
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model, logits = SpeculatorModel.from_pretrained(folder, config=config, \
dtype=torch.float32).eval(), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    ids, n = given["ids"], len(given["ids"]) - 1
    with torch.no_grad():
        model(given["states"][None, :n], ids[None, 1:], torch.zeros(1, n, dtype=torch.long), \
ttt_steps=2)
    return model, torch.stack(logits)
"""


@pytest.fixture
def text(target, tmp_path):
    """(input_ids [T], states [T, B*H], the file of both)."""
    g = torch.Generator().manual_seed(0)
    ids, states = (
        torch.randint(0, target.vocab_size, (14,), generator=g),
        torch.randn(14, len(BOUNDARIES) * target.hidden_size, generator=g),
    )
    save_file({"ids": ids, "states": states}, tmp_path / "given.safetensors")
    return ids, states, str(tmp_path / "given.safetensors")


BLOCKS = (9, 30, 61)


@pytest.mark.peer
def test_speculators_own_layer_ids(tmp_path):
    """Its own default, and which ids it takes at all: boundary N, behind the last block, too."""
    for n in BLOCKS:
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "config.json").write_text(
            json.dumps({"model_type": "llama", "num_hidden_layers": n})
        )
    found = peer(
        "EYAS_PEER_SPECULATORS",
        "speculators==0.9.0",
        """
from speculators.models.utils import resolve_target_layer_ids
def taken(id, folder):
    try:
        return resolve_target_layer_ids([id], folder) == [id]
    except ValueError:
        return False
found = {n: (resolve_target_layer_ids(None, f"{sys.argv[2]}/{n}"), [id for id in range(-2, n + 3) \
if taken(id, f"{sys.argv[2]}/{n}")]) for n in map(int, sys.argv[3:])}
""",
        str(tmp_path / "found.pt"),
        str(tmp_path),
        *map(str, BLOCKS),
    )
    for n, (default, ids) in found.items():
        assert (
            engine_boundaries(None, "LlamaForCausalLM", n, "speculators")
            == tuple(default)
            == engine_boundaries(default, "LlamaForCausalLM", n, "speculators")
        )
        assert ids == [
            id for id in range(-2, n + 3) if read([id], "LlamaForCausalLM", n, "speculators")
        ]


@pytest.mark.peer
def test_layer_ids_of_speculators_before_0_5(tmp_path):
    """Its own default, and its own loop over the blocks (run alone: it asks for vLLM), each of
    which adds 1 to what it is given: a state says how many it has passed.
    """
    found = peer(
        "EYAS_PEER_SPECULATORS_V1",
        "speculators==0.3.0",
        """
import ast, importlib.util
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
folder = Path(importlib.util.find_spec("speculators").submodule_search_locations[0]) / \
"data_generation"
tree = ast.parse((folder / "vllm_hidden_states_generator.py").read_text())
default = next(n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) and \
ast.unparse(n.targets[0]) == "self.layer_ids" and isinstance(n.value, ast.List))
tree = ast.parse((folder / "custom_worker.py").read_text())
forward = next(n for n in tree.body if getattr(n, "name", "") == "_patched_forward")
group = SimpleNamespace(is_first_rank=True, is_last_rank=True, rank_in_group=0)
names = {"islice": islice, "get_pp_group": lambda: group, "get_tp_group": lambda: group}
exec(compile(ast.Module([forward], []), "forward", "exec"), names)
found = {}
for n in map(int, sys.argv[2:]):
    ids, kept = eval(ast.unparse(default), {"num_layers": n}), []
    layers = [lambda hidden_states, positions, residual: (hidden_states + 1, 0)] * n
    extension = SimpleNamespace(_layer_ids=frozenset(ids), _store_captured_states=kept.extend)
    model = SimpleNamespace(_extension=extension, layers=layers, start_layer=0, end_layer=n, \
norm=lambda states, residual: (states, residual))
    names["_patched_forward"](model, None, None, inputs_embeds=torch.zeros(()))
    found[n] = ids, [int(state) for state in kept]
""",
        str(tmp_path / "found.pt"),
        *map(str, BLOCKS),
    )
    for n, (ids, passed) in found.items():
        assert (
            engine_ids(tuple(passed[:3]), "LlamaForCausalLM", n, "speculators-v1") == ids[:3]
            and passed[3] == n
        )
        assert engine_boundaries(None, "LlamaForCausalLM", n, "speculators-v1") == tuple(passed[:3])


@pytest.mark.peer
def test_specforges_own_layer_ids(tmp_path):
    """Its default ids, given to SGLang's own method of each family, as it does."""
    found = peer(
        "EYAS_PEER_SPECFORGE",
        "-r requirements/cpu.txt --no-deps && PEER/bin/pip install --no-deps specforge==0.2.0",
        """
from types import SimpleNamespace
from specforge.algorithms.model_providers import resolve_eagle_capture_layers
run = SimpleNamespace(model=SimpleNamespace(aux_hidden_state_layer_ids=None))
found = {n: resolve_eagle_capture_layers(run, {}, SimpleNamespace(num_hidden_layers=n)) for n in \
map(int, sys.argv[2:])}
""",
        str(tmp_path / "found.pt"),
        *map(str, BLOCKS),
    )
    for n, ids in found.items():
        for architecture in FAMILY_NAMES:
            assert (
                engine_boundaries(None, architecture, n, "specforge")
                == tuple(captured(architecture, ids, n))
                == engine_boundaries(ids, architecture, n, "specforge")
            )


@pytest.mark.peer
@pytest.mark.parametrize(
    "switches",
    [{}, {"fc_norm": True, "norm_output": True}, IMPORTED],
    ids=["plain", "norms", "imported"],
)
@torch.no_grad()
def test_speculators_loads_the_export_and_agrees_and_we_load_what_it_saves(
    target, tmp_path, text, switches
):
    drafter, (ids, states, given) = make_drafter(target, **switches), text
    folder = export_speculators(drafter, target, tmp_path / "export", 3)
    found = peer(
        "EYAS_PEER_SPECULATORS",
        "speculators==0.9.0",
        SPECULATORS_RUNS
        + """
model, logits = run(sys.argv[3])
model.save_pretrained(sys.argv[4])
found = {"logits": logits, "class": type(model).__name__, "tok": \
model.config.speculators_config.proposal_methods[0].speculative_tokens}
""",
        str(tmp_path / "found.pt"),
        given,
        str(folder),
        str(tmp_path / "saved"),
    )
    ours = drafted(drafter, ids, states, 2)
    torch.testing.assert_close(found["logits"][:, : ours.shape[1]], ours, atol=2e-5, rtol=2e-5)
    assert (found["class"], found["tok"]) == ("Eagle3DraftModel", 3)
    agree(drafter, read_checkpoint(tmp_path / "saved", target).drafter)


@pytest.mark.peer
@torch.no_grad()
def test_what_specforge_saves_is_loaded_and_agrees(target, tmp_path, text):
    """Its own model class with random weights, its own save_pretrained; the first draft step of
    each slot.
    """
    ids, states, given = text
    found = peer(
        "EYAS_PEER_SPECFORGE",
        "-r requirements/cpu.txt --no-deps && PEER/bin/pip install --no-deps specforge==0.2.0",
        """
import os
os.environ["TORCHDYNAMO_DISABLE"] = "1"
from safetensors.torch import load_file
from specforge.modeling.auto import AutoDraftModel
from transformers import LlamaConfig
given = load_file(sys.argv[2])
torch.manual_seed(0)
config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=1, \
num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=1024, rms_norm_eps=1e-5, tie_word_embeddings=False, pad_token_id=2, \
architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=200)
model = AutoDraftModel.from_config(config, attention_backend="sdpa", \
torch_dtype=torch.float32).eval()
for name, weight in model.named_parameters():
    weight.data.uniform_(0.5, 1.5) if "norm" in name else weight.data.normal_(std=weight.shape[-1] \
** -0.5)
model.load_embedding(sys.argv[3])
ids = torch.randperm(512)[:200].sort().values
model.d2t.copy_(ids - torch.arange(200)); model.t2d.zero_(); model.t2d[ids] = True
n = len(given["ids"]) - 1
with torch.no_grad():
    hidden = model.project_hidden_states(given["states"][None, :n])
    mask = model.prepare_decoder_attention_mask(torch.ones(1, n, dtype=torch.bool), hidden, 1, n, \
0) if hasattr(model, "prepare_decoder_attention_mask") else None
    out = model.backbone(model.embed_input_ids(given["ids"][None, 1:]), hidden, [[], []], mask, \
torch.arange(n)[None])
    found = {"logits": model.compute_logits(out)[0]}
model.save_pretrained(sys.argv[4])
""",
        str(tmp_path / "found.pt"),
        given,
        str(target.folder),
        str(tmp_path / "saved"),
    )
    drafter = read_checkpoint(tmp_path / "saved", target, boundaries=BOUNDARIES).drafter
    ours = drafted(drafter, ids, states, 1)[0]
    torch.testing.assert_close(found["logits"][: len(ours)], ours, atol=2e-5, rtol=2e-5)
