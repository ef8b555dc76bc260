"""The whole road for families of targets, each a tiny random checkpoint on a real server: capture,
parity, training, export, serving with a drafter.

Qwen3 (norms on queries and keys), Qwen3-MoE, and the shape of DeepSeek-V3 and Kimi-K2.5: latent
attention, yarn, a dense block and then experts. Llama's road is the embedded target's, in the other
tests. float32 throughout: in bf16 a router's ties send tokens to other experts. What of Kimi-K2.5
can't run here, its wrapper and its quantised experts, is compared with its class's own source.
"""

import ast
import copy
import dataclasses
import importlib.util
import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.capture.extract import extract
from eyas.config import Config
from eyas.doctor import check_family
from eyas.errors import EyasError
from eyas.evaluation.decode import EagleDraft, speculative_decode
from eyas.evaluation.offline import walk
from eyas.files import read_json, write_json
from eyas.models.drafter import DraftCache, DrafterConfig, initial_drafter, load_drafter
from eyas.models.export import architecture, export_sglang
from eyas.models.layer_ids import engine_boundaries
from eyas.models.sglang_source import family
from eyas.models.target import load_target
from eyas.models.vocab import DraftVocab
from eyas.parity.certify import certify
from eyas.prompts.prompt_set import load_prompts
from eyas.server.serve import server_up, serving_up
from eyas.store.reader import Store
from eyas.training.trainer import train
from eyas_capture.hooks import Capture, find_stack
from helpers.sglang_models import FAMILY_NAMES, find_method, run_sglang, sglang_classes
from helpers.taught import make_prompts, teach
from helpers.tiny import make_tiny_target

FAMILIES = ("Qwen3", "Qwen3Moe", "DeepseekV3")
IDS = {
    "Qwen3": [0, 3, 4],
    "Qwen3Moe": [0, 3, 4],
    "DeepseekV3": [4, 5, 1],
}  # of boundaries 1, 4, 5; DeepSeek reads a first id of 1 as boundary 2
CHAIN, TREE = (3, 1, 0), (3, 3, 8)  # steps, topk, draft tokens
# What a family is served with: shape of the drafts, and layer ids other than the export's, with the
# boundaries that they are to SGLang. Of Qwen3, whose attention is
# Llama's, a chain; trees of latent attention have a pool of their own whose rows are moved.
# DeepSeek's chain is asked for by ids of which the first is 1.
SERVED = {
    "Qwen3": [(CHAIN, None, (1, 4, 5))],
    "Qwen3Moe": [(TREE, None, (1, 4, 5))],
    "DeepseekV3": [(TREE, None, (1, 4, 5)), (CHAIN, [1, 3, 4], (2, 4, 5))],
}
ROUNDING = 1e-4  # of float32 through eight blocks, relative, of the worst token


@pytest.fixture(
    scope="module",
    params=[FAMILIES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])],
)
def case(request, tmp_path_factory):
    """(config, server, target, Hugging Face's model) of a family; EYAS_DATA is its own."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EYAS_DATA", str(folder / "data"))
        make_tiny_target(folder / "tiny", n_blocks=8, family=request.param)
        config = Config.create(
            run_name=request.param,
            target=str(folder / "tiny"),
            boundaries=(1, 4, 5),
            dtype="float32",
            train_dtype="float32",
            context_tok=512,
            max_total_tok=8192,
            max_length=160,
            train_samples=24,
            heldout_samples=8,
            parity_samples=2,
            draft_vocab_size=256,
            epochs=1.0,
            threads=1,
            server_timeout_s=1200,
        )
        with server_up(config, tied=True) as server:
            yield (
                config,
                server,
                load_target(config.target),
                AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32),
            )


@torch.no_grad()
def states_of(model, ids: torch.Tensor) -> list[torch.Tensor]:
    """Boundaries 0 .. N of Hugging Face's model, the last before its final norm."""
    last = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0][0]))
    found = model.model(ids[None], output_hidden_states=True).hidden_states
    hook.remove()
    return [*(state[0] for state in found[:-1]), last[0]]


def error(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative, of each token."""
    return (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)


@pytest.mark.server
def test_the_road_of_a_family(case, tmp_path):
    config, server, target, model = case
    extract(config, [server], target, load_prompts(config.answered_path))
    store = Store.open(config.store_dir)
    for id in store.samples()[:4]:
        sample = store.read(id)
        expected = states_of(model, sample["input_ids"])
        for b, rows in sample["states"].items():
            assert error(rows, expected[b]).max() < ROUNDING, f"boundary {b}"
            for other in {b - 1, b + 1} & set(range(target.n_blocks + 1)):
                assert error(rows, expected[other]).min() > 100 * ROUNDING, (
                    f"boundary {b} is {other} too"
                )
    record = certify(config, server, store, target, load_prompts(config.answered_path))
    assert record["passed"]
    train(config, store, target)
    drafter = load_drafter(config.drafter_dir, target)
    assert (
        drafter.config.boundaries == (1, 4, 5)
        and walk(drafter, store, store.samples("heldout"), 3)["verify_steps"].sum() > 100
    )
    exported = export_sglang(drafter, target, config.export_dir)
    ids = json.loads((exported / "config.json").read_text())["eagle_config"][
        "eagle_aux_hidden_state_layer_ids"
    ]
    assert ids == IDS[config.run_name] and engine_boundaries(
        ids, architecture(target), target.n_blocks
    ) == (1, 4, 5)
    if config.run_name != "Qwen3":  # its export differs by nothing that the drafter's class sees
        sample = store.read(store.samples("heldout")[0])
        tokens, states = (
            sample["input_ids"][:12],
            torch.cat([sample["states"][b] for b in (1, 4, 5)], dim=-1)[:11].float(),
        )
        theirs, report = run_sglang(exported, target, tokens, states, tmp_path)
        assert report["untouched"] == ["model.embed_tokens.weight"]
        with torch.no_grad():
            ours = drafter.logits(drafter.extend(tokens[:11], drafter.fuse(states), DraftCache()))
        torch.testing.assert_close(theirs["logits"][:11], ours, atol=1e-4, rtol=1e-4)


def generate(url: str, prompts: list[list[int]], n_tok: int) -> list[dict]:
    """The answers to all prompts at once, greedy."""
    sampling = {
        "temperature": 0,
        "max_new_tokens": n_tok,
        "ignore_eos": True,
        "custom_params": {"eyas_accepted": True},
    }
    return (
        httpx.post(
            f"{url}/generate", json={"input_ids": prompts, "sampling_params": sampling}, timeout=600
        )
        .raise_for_status()
        .json()
    )


@pytest.mark.server
@torch.no_grad()
def test_greedy_text_of_a_batch_is_hugging_faces(case):
    """Prompts of several lengths at once: prefill of each, then decoding of them together."""
    _, server, target, model = case
    g = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, target.vocab_size, (length,), generator=g) for length in (41, 3, 17)
    ]
    for prompt, answer in zip(
        prompts, generate(server.url, [p.tolist() for p in prompts], 8), strict=True
    ):
        text = prompt
        for token in answer["output_ids"]:
            logits = model(text[None]).logits[0, -1]
            assert logits.max() - logits[token] < 1e-3  # the first, or tied with it to rounding
            text = torch.cat([text, torch.tensor([token])])


@pytest.mark.server
def test_a_drafter_is_served(case, tmp_path):
    """Its output is the plain server's, also on prefixes that the cache holds; the running server
    feeds it the boundaries that its ids mean there; and each verify step accepts what ours does
    with those.
    """
    config, plain, target, model = case
    model.config.eos_token_id = model.generation_config.eos_token_id = (
        None  # ours go on behind it too
    )
    prompts = make_prompts(lengths=(2, 40, 7, 19))
    drafter = teach(target, model, prompts, config.boundaries, levels=3)
    texts = [answer["output_ids"] for answer in generate(plain.url, prompts, 30)]
    for (steps, topk, tok), ids, boundaries in SERVED[config.run_name]:
        folder = export_sglang(drafter, target, tmp_path / f"export{topk}")
        if ids:
            record = read_json(folder / "config.json")
            record["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
            write_json(folder / "config.json", record)
        settings = dataclasses.replace(
            config,
            speculative_num_steps=steps,
            speculative_eagle_topk=topk,
            speculative_num_draft_tokens=tok,
        )
        with serving_up(settings, folder, tmp_path / f"server{topk}", tied=True) as up:
            told, answers = (
                up.status()["drafter"],
                [generate(up.url, prompts, 30) for _ in range(2)],
            )
        assert [[answer["output_ids"] for answer in batch] for batch in answers] == [texts, texts]
        assert (tuple(told["boundaries"]), told["ids"], told["topk"]) == (
            boundaries,
            ids or IDS[config.run_name],
            topk,
        )
        method = EagleDraft(drafter, steps, topk, tok)
        method.boundaries = boundaries
        ours = [
            [len(step.accepted) for step in speculative_decode(model, method, prompt, 30).steps]
            for prompt in prompts
        ]
        for batch in answers:
            theirs = [
                [n for n in answer["meta_info"]["eyas_accepted"] if n is not None]
                for answer in batch
            ]
            assert (
                theirs == ours
                if topk == 1
                else sum(map(sum, theirs)) == pytest.approx(sum(map(sum, ours)), rel=0.1)
            )
            assert sum(map(sum, theirs)) > 20


# ---- what doctor and the plugin go by, against the source of every family's classes


def file_of(file: str, name: str) -> str:
    """Where a class is defined that a model file uses: there, or in one that it imports from,
    nearest first.
    """
    classes, _, imports = sglang_classes()
    files = [file]
    while (files[0], name) not in classes:
        files = [
            *files[1:],
            *(source for (user, _), (source, _) in imports.items() if user == files[0]),
        ]
    return files[0]


@pytest.mark.parametrize("architecture", FAMILY_NAMES)
def test_the_plugin_hooks_the_blocks_at_which_sglang_captures(architecture):
    """The blocks that `doctor` names hand their `attn_boundary` what their stack gives them to
    capture with, and the pre-hook takes the very call by which that stack runs them.
    """
    classes, entries, _ = sglang_classes()
    file, found = entries[architecture], family(architecture)
    assert (
        find_method(file, architecture) in classes[file_of(file, found.setter), found.setter].body
    )
    if architecture == "Qwen3NextForCausalLM":  # its linear blocks take the batch among **kwargs
        linear = find_method("qwen3_next", "Qwen3HybridLinearDecoderLayer", "forward")
        assert (
            found.block is None
            and linear.args.kwarg
            and "forward_batch" not in [a.arg for a in linear.args.args]
        )
        assert any(
            c.ok is False
            and (
                "no blocks with a stage boundary whose forward names hidden_states and "
                "forward_batch"
            )
            in c.detail
            for c in check_family(architecture)
        )
        return
    stack, block = (
        (file_of(file, found.stack), found.stack),
        (file_of(file, found.block), found.block),
    )
    assert found.block in ast.unparse(find_method(*stack, "__init__"))
    forward = find_method(*block, "forward")
    into = [
        call
        for call in ast.walk(forward)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "self.attn_boundary.prepare"
    ]
    taken = {
        ast.unparse(k.value)
        for call in into
        for k in call.keywords
        if k.arg in ("capture", "capture_gathered")
    }
    assert taken & {a.arg for a in forward.args.args}
    calls = [
        call
        for call in ast.walk(find_method(*stack, "forward"))
        if isinstance(call, ast.Call) and taken & {k.arg for k in call.keywords}
    ]
    assert calls
    for call in calls:
        check_hook(
            forward,
            [ast.unparse(a) for a in call.args],
            {k.arg: ast.unparse(k.value) for k in call.keywords if k.arg},
        )


def check_hook(forward: ast.FunctionDef, args: list[str], kwargs: dict[str, str]) -> None:
    """Each argument stands for itself: rows are of the states and the batch that the block is
    called with, and of all that it is called with only the states are another.
    """
    arguments = copy.deepcopy(forward.args)
    for a in (*arguments.args, *arguments.kwonlyargs):
        a.annotation = None
    arguments.args, arguments.defaults, arguments.kw_defaults = (
        arguments.args[1:],
        [ast.Constant(None) for _ in arguments.defaults],
        [d and ast.Constant(None) for d in arguments.kw_defaults],
    )
    signature = inspect.signature(
        eval(
            compile(
                ast.fix_missing_locations(
                    ast.Expression(ast.Lambda(arguments, ast.Constant(None)))
                ),
                "forward",
                "eval",
            )
        )
    )
    capture = Capture.__new__(Capture)
    capture.armed, capture.writes, capture.rows = True, True, {}
    block = SimpleNamespace(
        attn_boundary=SimpleNamespace(
            capture_output=lambda states, batch: ("handle", (states, batch))
        )
    )
    again, named = capture._block_hook(3, signature)(block, args, kwargs)
    assert capture.rows == {3: ("hidden_states", "forward_batch")}
    assert signature.bind(*again, **named).arguments == signature.bind(
        *args, **kwargs
    ).arguments | {"hidden_states": "handle"}


def test_blocks_that_the_plugin_cannot_hook_end_the_start():
    class Linear(torch.nn.Module):
        attn_boundary = None

        def forward(self, hidden_states, **kwargs):
            return hidden_states

    stack = torch.nn.Module()
    stack.layers, stack.norm = torch.nn.ModuleList([Linear()]), torch.nn.LayerNorm(2)
    with pytest.raises(
        RuntimeError, match="forward of Linear names no hidden_states and forward_batch"
    ):
        find_stack(stack)


@pytest.mark.parametrize(
    "architecture, stack, block",
    [
        ("Dots3NoteForCausalLM", "Dots3Model", "Dots3DecoderLayer"),  # in a folder of the models
        (
            "LlamaForCausalLMEagle3",
            "LlamaModel",
            "LlamaDecoderLayer",
        ),  # whose block is named as the one that it builds upon
    ],
)
def test_classes_that_lie_elsewhere_are_found(architecture, stack, block):
    found = family(architecture)
    assert (found.stack, found.block) == (stack, block)


# ---- Kimi-K2.5: what its classes say


def test_what_the_capture_plugin_hooks_in_kimi_is_deepseeks():
    kimi, deepseek = family("KimiK25ForConditionalGeneration"), family("DeepseekV3ForCausalLM")
    assert (
        (kimi.stack, kimi.block)
        == (deepseek.stack, deepseek.block)
        == ("DeepseekV2Model", "DeepseekV2DecoderLayer")
    )


def test_kimi_hands_its_ids_to_deepseek():
    """Its own method, run alone: nothing is added on the way."""
    path = (
        Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
        / "srt"
        / "models"
        / "kimi_k25.py"
    )
    node = next(
        n
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.FunctionDef) and n.name == "set_eagle3_layers_to_capture"
    )
    names = {"Optional": list, "List": list}
    node.args.args[1].annotation = node.returns = None
    exec(compile(ast.Module([node], []), "kimi", "exec"), names)
    got = []
    names[node.name](
        SimpleNamespace(language_model=SimpleNamespace(set_eagle3_layers_to_capture=got.append)),
        [3, 31, 59],
    )
    assert got == [[3, 31, 59]]
    with pytest.raises(AttributeError):
        names[node.name](SimpleNamespace(language_model=None), [3])


def test_a_target_that_wraps_its_language_model(tmp_path):
    """Kimi-K2.5's folder: sizes under text_config, weights under language_model; head, embedding
    and a first drafter are the language model's.
    """
    folder = make_tiny_target(tmp_path / "tiny", n_blocks=8, family="DeepseekV3")
    plain = load_target(str(folder))
    config, weights = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    wrapped = tmp_path / "kimi"
    wrapped.mkdir()
    save_file(
        {f"language_model.{name}": tensor for name, tensor in weights.items()}
        | {"vision_tower.blocks.0.weight": torch.zeros(4)},
        wrapped / "model.safetensors",
    )
    (wrapped / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["KimiK25ForConditionalGeneration"],
                "model_type": "kimi_k25",
                "text_config": config,
            }
        )
    )
    target = load_target(str(wrapped))
    assert (target.n_blocks, target.hidden_size, target.vocab_size) == (8, 64, 512)
    assert torch.equal(target.head().lm_head, plain.head().lm_head) and torch.equal(
        target.embedding(), plain.embedding()
    )
    vocab = DraftVocab(torch.arange(100), 512)
    first, again = (
        initial_drafter(DrafterConfig.from_target(t, (2, 4, 5), 100), vocab, t, 0)
        for t in (target, plain)
    )
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values())
    )
    export_sglang(first, target, tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["eagle_config"][
        "eagle_aux_hidden_state_layer_ids"
    ] == [2, 4, 5]
    with pytest.raises(EyasError, match="boundary 8 of KimiK25"):
        export_sglang(
            initial_drafter(
                dataclasses.replace(first.config, boundaries=(2, 4, 8)), vocab, target, 0
            ),
            target,
            tmp_path / "last",
        )
