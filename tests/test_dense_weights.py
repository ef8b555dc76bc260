"""Quantised weights are read as the numbers that they stand for.

References: compressed-tensors' own packing, and formulas written out by hand, element by element.
"""

import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError
from eyas.models.drafter import DrafterConfig, initial_drafter
from eyas.models.target import load_target
from eyas.models.vocab import DraftVocab
from helpers.tiny import make_tiny_target

INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}
INT8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}},
}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 48]}


def stored_int4(stem: str, weight: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """(tensors of the file, the dense weight that they stand for)"""
    rows, columns = weight.shape
    scale = (weight.float().view(rows, -1, 32).abs().amax(-1) / 7).bfloat16()  # [rows, groups]
    wide = scale.float().repeat_interleave(32, 1)
    codes = (weight.float() / wide).round().clamp(-8, 7).to(torch.int8)
    tensors = {
        f"{stem}.weight_packed": pack_to_int32(codes, 4),
        f"{stem}.weight_scale": scale,
        f"{stem}.weight_shape": torch.tensor([rows, columns]),
    }
    return tensors, codes.float() * wide


def stored_fp8(stem: str, weight: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """Blocks of 32 x 48: 48 divides no matrix here, so the last blocks are cut."""
    rows, columns = weight.shape
    row_blocks, column_blocks = -(-rows // 32), -(-columns // 48)
    scale = torch.zeros(row_blocks, column_blocks)
    codes = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    dense = torch.zeros(rows, columns)
    for i in range(row_blocks):
        for j in range(column_blocks):
            place = slice(32 * i, 32 * i + 32), slice(48 * j, 48 * j + 48)
            scale[i, j] = weight[place].float().abs().max() / 448
            codes[place] = (weight[place].float() / scale[i, j]).to(torch.float8_e4m3fn)
            dense[place] = codes[place].float() * scale[i, j]
    return {f"{stem}.weight": codes, f"{stem}.weight_scale_inv": scale}, dense


def stored_int8(stem: str, weight: torch.Tensor) -> tuple[dict, torch.Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True) / 127  # [rows, 1]
    codes = (weight.float() / scale).round().to(torch.int8)
    dense = torch.stack([codes[row].float() * scale[row] for row in range(len(codes))])
    return {f"{stem}.weight": codes, f"{stem}.weight_scale": scale}, dense


KINDS = {"int4": (INT4, stored_int4), "fp8": (FP8, stored_fp8), "int8": (INT8, stored_int8)}


@pytest.fixture(params=KINDS)
def twins(request, tmp_path):
    """(a target that is quantised, its dense twin), in float32."""
    scheme, stored = KINDS[request.param]
    folder = make_tiny_target(tmp_path / "quantised", n_blocks=8, seed=5)
    twin = make_tiny_target(tmp_path / "twin", n_blocks=8, seed=5)
    quantised, dense = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj" in name:
            tensors, value = stored(name.removesuffix(".weight"), weight)
            quantised |= tensors
            dense[name] = value
        else:
            quantised[name] = dense[name] = weight
    write(folder, quantised, quantization_config=scheme)
    write(twin, dense)
    return load_target(str(folder)), load_target(str(twin))


def write(folder, weights, **config):
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def start(target):
    config = DrafterConfig.from_target(target, (2, 4, 5), 200)
    return initial_drafter(config, DraftVocab(torch.arange(200), target.vocab_size), target, 0)


def test_a_drafter_of_a_quantised_target_starts_as_that_of_its_dense_twin(twins):
    quantised, twin = (start(target).state_dict() for target in twins)
    for name, weight in twin.items():
        assert torch.equal(quantised[name], weight), name
    largest = quantised["layers.0.self_attn.q_proj.weight"].abs().max()
    assert 0.1 < largest < 2, "weights, not codes of up to 448 or 127"


def test_every_weight_equals_the_dense_twins(twins):
    quantised, twin = twins
    assert set(twin.dense) == set(quantised.dense)
    for name in twin.dense:
        assert torch.equal(quantised.dense[name].float(), twin.dense[name].float()), name


Q = "model.layers.7.self_attn.q_proj"


@pytest.mark.parametrize("twins", ["fp8"], indirect=True)
def test_blocks_that_do_not_fit_are_refused_by_name(twins):
    """576 rows with 4 scales of 128 rows each would leave the last 64 rows without one."""
    target = twins[0]
    wrong = {f"{Q}.weight_scale_inv": torch.ones(1, 2)}
    weights = load_file(target.folder / "model.safetensors") | wrong
    save_file(weights, target.folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(EyasError, match=rf"{Q}.weight .*\[1, 2\] for 64 x 64 .*-p initial_weights"):
        target.dense[f"{Q}.weight"]


@pytest.mark.parametrize("twins", ["int4"], indirect=True)
@pytest.mark.parametrize(
    "part, tensor, message",
    [
        (
            "weight_zero_point",
            torch.ones(64, 2, dtype=torch.int32),
            "stored with weight_zero_point",
        ),
        ("weight_g_idx", torch.arange(64, dtype=torch.int32), "stored with weight_g_idx"),
        ("weight_packed", torch.zeros(64, 16, dtype=torch.int32), "packed as .* codes of 4 bits"),
        ("weight_scale", torch.ones(64, 3), r"scaled by \[64, 3\] for 64 x 64 codes"),
    ],
)
def test_packed_codes_of_another_kind_are_refused_by_name(twins, part, tensor, message):
    target = twins[0]
    weights = load_file(target.folder / "model.safetensors") | {f"{Q}.{part}": tensor}
    save_file(weights, target.folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(EyasError, match=message):
        load_target(str(target.folder)).dense[f"{Q}.weight"]


@pytest.mark.parametrize(
    "method, tensors",
    [
        (
            "gptq",
            {
                "qweight": torch.zeros(8, 64, dtype=torch.int32),
                "scales": torch.ones(1, 64),
                "qzeros": torch.zeros(1, 8, dtype=torch.int32),
            },
        ),
        ("bitsandbytes", {"weight": torch.zeros(2048, 1, dtype=torch.uint8)}),
        ("fp8", {"weight": torch.zeros(64, 64).to(torch.float8_e4m3fn)}),
    ],
)
def test_a_kind_that_is_not_read_is_refused_and_never_taken_for_weights(tmp_path, method, tensors):
    folder = make_tiny_target(tmp_path / "other", n_blocks=8)
    weights = load_file(folder / "model.safetensors")
    del weights[f"{Q}.weight"]
    weights |= {f"{Q}.{part}": tensor for part, tensor in tensors.items()}
    write(folder, weights, quantization_config={"quant_method": method})
    from eyas.models.dense_weights import DenseWeights

    config = json.loads((folder / "config.json").read_text())
    files = dict.fromkeys(weights, "model.safetensors")
    dense = DenseWeights(folder, files, config)
    with pytest.raises(
        EyasError, match=f"{Q}.weight of other is stored .*{method}.*initial_weights random"
    ):
        dense[f"{Q}.weight"]
    assert torch.equal(dense["model.norm.weight"], weights["model.norm.weight"])
