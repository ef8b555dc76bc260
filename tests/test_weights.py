"""Weights that config.json asks for: each one that is missing or has another shape is named by
every command; whole folders of every kind pass.
"""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import cli
from eyas.files import read_json, write_json
from eyas.models.target import load_target
from eyas.models.weights import compare
from helpers.errors import refused
from helpers.tiny import make_tiny_target

BLOCK = "model.layers.3.mlp.down_proj.weight"


def rewrite(folder, weights) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def without(folder, *names):
    weights = load_file(folder / "model.safetensors")
    rewrite(folder, {name: weight for name, weight in weights.items() if name not in names})
    return folder


def configure(folder, **changes) -> None:
    """Change config.json; None removes a key."""
    config = read_json(folder / "config.json") | changes
    write_json(
        folder / "config.json", {key: value for key, value in config.items() if value is not None}
    )


def run(capsys, *arguments) -> tuple[int, str]:
    code = cli.main([str(argument) for argument in arguments])
    streams = capsys.readouterr()
    return code, streams.out + streams.err


def one_of_each_kind(names: list[str]) -> list[str]:
    """Return the first weight of each kind: names that differ in numbers only are of one kind."""
    kinds = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "N", name), name)
    return list(kinds.values())


@pytest.mark.parametrize("which", ["kinds", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen3Moe", "DeepseekV3"])
def test_every_weight_that_is_missing_or_cut_is_named(tmp_path, family, which):
    folder = make_tiny_target(tmp_path / "tiny", n_blocks=2, family=family)
    config, weights = read_json(folder / "config.json"), load_file(folder / "model.safetensors")
    whole = compare(folder, config)
    assert not whole.faults and not whole.not_made and not whole.unused and whole.tied is False
    names = list(weights) if which == "all" else one_of_each_kind(list(weights))
    for name in names:
        weight = weights[name]
        rewrite(folder, {other: w for other, w in weights.items() if other != name})
        assert compare(folder, config).missing == (name,)
        rewrite(folder, weights | {name: weight[:-1]})
        (said,) = compare(folder, config).misshaped
        assert said == f"{name} {list(weight[:-1].shape)} instead of {list(weight.shape)}"


@pytest.mark.parametrize(
    "missing, tie", [(BLOCK, False), ("lm_head.weight", False), ("lm_head.weight", None)]
)
def test_every_command_refuses_a_target_that_lacks_a_weight(data, tmp_path, capsys, missing, tie):
    folder = without(make_tiny_target(tmp_path / "tiny", n_blocks=8), missing)
    configure(folder, tie_word_embeddings=tie)
    code, out = run(capsys, "doctor", "--target", folder)
    assert code == 1 and f"1 weight that config.json asks for is missing: {missing}" in out
    for command in (["plan"], ["server", "command"], ["server", "up"]):
        code, out = run(capsys, *command, "-p", "target", folder, "-p", "run_name", "lacks")
        assert code != 0 and missing in out and "python -m eyas doctor --target FOLDER" in out, (
            command
        )
    said = refused(load_target, str(folder))
    assert missing in said and ("tie_word_embeddings is false" in said) == (
        missing == "lm_head.weight"
    )


@pytest.mark.parametrize("family, tie", [("Llama", True), ("Qwen3", True), ("Gemma", None)])
def test_a_tied_head_may_be_absent_as_the_models_own_class_says(data, tmp_path, family, tie):
    """With the key absent, a Gemma is tied by its class and a Llama is not."""
    folder = without(
        make_tiny_target(tmp_path / "tiny", n_blocks=7, family=family), "lm_head.weight"
    )
    configure(folder, tie_word_embeddings=tie)
    target = load_target(str(folder))
    assert target.weights.tied and torch.equal(target.head().lm_head, target.embedding().float())
    without(folder, "model.embed_tokens.weight")
    assert "model.embed_tokens.weight" in refused(load_target, str(folder))


def test_the_embedded_target_is_whole(embedded):
    assert embedded.weights.tied and not embedded.weights.faults and not embedded.weights.not_made


def quantise(weights, kind: str, chosen) -> dict[str, torch.Tensor]:
    """Write a matrix as these formats name its parts; the values do not matter here."""
    parts = {}
    for name, weight in weights.items():
        stem, (rows, columns) = (
            name.removesuffix(".weight"),
            weight.shape if weight.ndim == 2 else (0, 0),
        )
        if weight.ndim != 2 or not any(word in name for word in chosen):
            parts[name] = weight
        elif kind == "compressed-tensors":
            parts[f"{stem}.weight_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
            parts[f"{stem}.weight_scale"] = torch.ones(rows, columns // 32, dtype=torch.bfloat16)
            parts[f"{stem}.weight_shape"] = torch.tensor([rows, columns])
        elif kind == "fp8":
            parts[name] = weight.to(torch.float8_e4m3fn)
            parts[f"{stem}.weight_scale_inv"] = torch.ones(1, 1)
        elif kind == "w8a8_int8":
            parts[name] = torch.zeros(rows, columns, dtype=torch.int8)
            parts[f"{stem}.weight_scale"] = torch.ones(rows, 1)
        else:
            parts[f"{stem}.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
            parts[f"{stem}.scales"] = torch.ones(1, rows, dtype=torch.float16)
            parts[f"{stem}.qzeros"] = torch.zeros(1, rows // 8, dtype=torch.int32)
            parts[f"{stem}.g_idx"] = torch.zeros(columns, dtype=torch.int32)
    return parts


@pytest.mark.parametrize(
    "family, kind, chosen",
    [
        ("DeepseekV3", "compressed-tensors", [".experts."]),
        ("DeepseekV3", "fp8", ["_proj"]),
        ("Qwen3Moe", "gptq", [".experts.", "self_attn"]),
        ("Llama", "w8a8_int8", ["_proj"]),
        ("Llama", "compressed-tensors", ["_proj"]),
    ],
)
def test_quantised_weights_count_with_all_their_parts(tmp_path, family, kind, chosen):
    folder = make_tiny_target(tmp_path / "tiny", n_blocks=2, family=family)
    configure(folder, quantization_config={"quant_method": kind})
    config, weights = (
        read_json(folder / "config.json"),
        quantise(load_file(folder / "model.safetensors"), kind, chosen),
    )
    rewrite(folder, weights)
    whole = compare(folder, config)
    assert not whole.faults and not whole.not_made and not whole.unused
    for name in weights:
        rewrite(folder, {other: w for other, w in weights.items() if other != name})
        assert name in compare(folder, config).missing, name


def test_layers_for_multi_token_prediction_are_extra(tmp_path, capsys):
    folder = make_tiny_target(tmp_path / "tiny", n_blocks=8, family="DeepseekV3")
    weights = load_file(folder / "model.safetensors")
    rewrite(
        folder,
        weights
        | {
            name.replace("layers.7.", "layers.8."): w.clone()
            for name, w in weights.items()
            if "layers.7." in name
        },
    )
    code, out = run(capsys, "doctor", "--target", folder)
    assert code == 0 and "unused weights" in out and "model.layers.8." in out


def test_an_index_that_is_wrong_is_refused(data, tmp_path):
    folder = make_tiny_target(tmp_path / "tiny", n_blocks=7)
    weights = load_file(folder / "model.safetensors")
    head = {"lm_head.weight": weights.pop("lm_head.weight")}
    rewrite(folder, weights)
    save_file(head, folder / "head.safetensors", {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    right = dict.fromkeys(weights, "model.safetensors") | {"lm_head.weight": "head.safetensors"}
    write_json(index, {"weight_map": right})
    assert load_target(str(folder)).weights.model == "LlamaForCausalLM"
    write_json(index, {"weight_map": right | {BLOCK: "head.safetensors"}})
    assert f"{BLOCK} is in model.safetensors, not in head.safetensors" in refused(
        load_target, str(folder)
    )
    write_json(index, {"weight_map": right | {"lm_head.weight": "model.safetensors"}})
    assert "missing: lm_head.weight" in refused(load_target, str(folder))
    write_json(index, {"weight_map": right | {"lm_head.weight": "absent.safetensors"}})
    assert "absent.safetensors does not exist" in refused(load_target, str(folder))
    write_json(index, {"weight_map": right | {"lm_head.weight": "../head.safetensors"}})
    assert "../head.safetensors is not a file of the folder itself" in refused(
        load_target, str(folder)
    )


def test_a_comparison_that_cannot_be_made_is_said(data, tmp_path, capsys):
    folder = make_tiny_target(tmp_path / "unknown", n_blocks=8)
    configure(
        folder,
        architectures=["OwnModel"],
        model_type="own",
        auto_map={"AutoConfig": "configuration_own.OwnConfig"},
    )
    load_target(str(folder))
    said = (
        "OwnModel is Python in the model's folder, which does not run without -p "
        "trust_remote_code true"
    )
    assert f"were not compared with its config.json: {said}" in capsys.readouterr().err
    assert f"not compared with config.json: {said}" in run(capsys, "doctor", "--target", folder)[1]


def test_the_comparison_is_made_once(data, tmp_path, monkeypatch):
    folder = make_tiny_target(tmp_path / "tiny", n_blocks=7)
    first = load_target(str(folder))
    monkeypatch.setattr(
        "eyas.models.target.compare", lambda *_: pytest.fail("compared a second time")
    )
    assert load_target(str(folder)).weights == first.weights
