"""EAGLE3 in the real SGLang on the plain CPU platform: its operations, trees, what feeds the
drafter, and output that drafting doesn't change.

Chains with an honest checkpoint, their acceptance and a drafter with faults are in test_served.py.
"""

import dataclasses
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
import torch
from scipy.stats import chisquare

from eyas.config import Config
from eyas.errors import EyasError
from eyas.evaluation import decode
from eyas.evaluation.decode import EagleDraft, greedy_decode, speculative_decode
from eyas.evaluation.served import check, check_serve_dtype
from eyas.files import ROOT, read_json, write_json
from eyas.models.export import export_sglang
from eyas.models.target import load_target
from eyas.prompts.chat_template import encode
from eyas.prompts.prompt_set import load_prompts
from eyas.server.serve import SERVING_CHUNK_TOK, server_command, serving_up
from helpers.taught import make_prompts, teach
from helpers.tiny import make_tiny_target

BOUNDARIES, NEW_TOK = (1, 3, 4), 30
server = pytest.mark.server


# ---- the operations


@pytest.fixture(scope="module")
def operations():
    """What tests/helpers/sglang_eagle_ops.py found."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_PLATFORM": "eyas_cpu",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/helpers/sglang_eagle_ops.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_operations_equal_sglangs_kernels(operations):
    assert set(operations["equal"]) == {
        "select_top_k_tokens",
        "build_tree",
        "verify_greedy",
        "fill_front",
        "fill_accept",
        "bonus_tokens",
        "draft_slots",
        "verify_slots",
        "write_slots",
        "keep",
        "linear",
    }


def test_the_plugins_check_names_what_is_gone(operations):
    whole, operation, seam = operations["said"]
    assert "EAGLE3: 13 functions" in whole
    assert operation.endswith("eagle_utils.build_tree_kernel_efficient_func") and seam.endswith(
        ": get_what_is_gone"
    )


def test_sampled_verification_has_the_targets_distribution(operations):
    """Whatever was drafted, and also behind an accepted draft; and drafts are accepted at all
    depths.
    """
    found = operations["sampled"]
    for counts, probs in ((found["first"], found["root"]), (found["second"], found["node"])):
        expected = [p * sum(counts) / sum(probs) for p in probs]
        assert chisquare(counts, expected).pvalue > 1e-3
    assert min(found["accepted"]) > 0 and sum(found["accepted"]) == 4000


# ---- real servers of a tiny target, float32


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A target of 6 blocks without an end of text, a drafter that was taught on it, prompts of
    several lengths.
    """
    folder = tmp_path_factory.mktemp("serving")
    made = make_tiny_target(folder / "tiny", n_blocks=6)
    for name in ("config.json", "generation_config.json"):
        write_json(made / name, read_json(made / name) | {"eos_token_id": None})
    target, prompts = load_target(str(made)), make_prompts(lengths=(1, 2, 7, 19, 40, 33))
    model = decode.load_model(target, torch.float32, "cpu")
    drafter = teach(target, model, prompts, BOUNDARIES, levels=3)
    return SimpleNamespace(
        folder=folder,
        target=target,
        model=model,
        drafter=drafter,
        prompts=prompts,
        export=export_sglang(drafter, target, folder / "export"),
    )


def serve(
    world, name: str, draft, steps: int = 3, topk: int = 1, tok: int = 0, **sampling
) -> SimpleNamespace:
    """A server's status, and its answers to all prompts, one after the other and all at once."""
    config = Config.create(
        run_name="x",
        target=str(world.target.folder),
        dtype="float32",
        threads=1,
        max_total_tok=4096,
        context_tok=256,
        max_length=256,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=tok,
    )
    with serving_up(config, draft, world.folder / name, tied=True) as up:
        single = [ask(up.url, ids, **sampling) for ids in world.prompts]
        with ThreadPoolExecutor(len(world.prompts)) as pool:
            together = list(pool.map(lambda ids: ask(up.url, ids, **sampling), world.prompts * 2))
        drawn = [
            ask(up.url, ids, temperature=1.0, top_k=20, top_p=0.9) for ids in world.prompts[:2]
        ]
        return SimpleNamespace(status=up.status(), single=single, together=together, drawn=drawn)


def ask(url: str, ids: list[int], n_tok: int = NEW_TOK, temperature: float = 0.0, **wishes) -> dict:
    sampling = {
        "temperature": temperature,
        "max_new_tokens": n_tok,
        "custom_params": {"eyas_accepted": True},
    }
    extra = {
        name: wishes.pop(name) for name in ("return_logprob", "top_logprobs_num") if name in wishes
    }
    return (
        httpx.post(
            f"{url}/generate",
            json={
                "input_ids": [int(i) for i in ids],
                "sampling_params": sampling | wishes,
                **extra,
            },
            timeout=600,
        )
        .raise_for_status()
        .json()
    )


def accepted(answer: dict) -> list[int]:
    return [n for n in answer["meta_info"]["eyas_accepted"] if n is not None]


@pytest.fixture(scope="module")
def plain(world):
    return serve(world, "plain", None)


@pytest.fixture(scope="module")
def tree(world):
    return serve(world, "tree", world.export, steps=3, topk=3, tok=8)


@pytest.fixture(scope="module")
def shifted(world):
    """A chain by a checkpoint that names boundaries where SGLang takes the blocks before them: the
    most common mistake.
    """
    folder = world.folder / "shifted"
    export_sglang(world.drafter, world.target, folder)
    record = read_json(folder / "config.json")
    record["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(BOUNDARIES)
    write_json(folder / "config.json", record)
    return serve(world, "shifted_server", folder)


@server
def test_a_server_without_drafter_says_so(world, plain):
    assert plain.status["drafter"] is None and plain.status["capture"] is None
    assert plain.status["radix_cache"] and plain.status["dtype"] == "float32"  # as one serves
    assert [a["output_ids"] for a in plain.single] == [
        greedy_decode(world.model, ids, NEW_TOK).tokens for ids in world.prompts
    ]


@server
@pytest.mark.parametrize("name", ["tree", pytest.param("shifted", marks=pytest.mark.slow)])
def test_drafting_does_not_change_the_output(request, plain, name):
    """One at a time, and twelve in a batch of several lengths; sampled requests are served too."""
    drafting = request.getfixturevalue(name)
    for one, other in ((plain.single, drafting.single), (plain.together, drafting.together)):
        assert [a["output_ids"] for a in one] == [a["output_ids"] for a in other]
    assert sum(sum(accepted(a)) for a in drafting.single) > 20
    assert all(len(a["output_ids"]) == NEW_TOK for a in drafting.drawn)


@server
def test_a_tree_accepts_what_our_decoding_does(world, tree):
    """The first two levels are equal; deeper ones see keys of another branch at times (SGLang keeps
    them by place), so few steps may differ.
    """
    assert tree.status["drafter"] | {"path": None} == {
        "algorithm": "EAGLE3",
        "path": None,
        "num_steps": 3,
        "topk": 3,
        "draft_tokens": 8,
        "boundaries": list(BOUNDARIES),
        "ids": [0, 2, 3],
    }
    ours = [
        [
            len(s.accepted)
            for s in speculative_decode(
                world.model, EagleDraft(world.drafter, 3, 3, 8), ids, NEW_TOK
            ).steps
        ]
        for ids in world.prompts
    ]
    theirs = [accepted(answer) for answer in tree.single]
    assert sum(mine == other for mine, other in zip(ours, theirs, strict=True)) >= 4, (ours, theirs)
    assert sum(map(sum, theirs)) == pytest.approx(sum(map(sum, ours)), rel=0.1)
    chain = [
        speculative_decode(world.model, EagleDraft(world.drafter, 3), ids, NEW_TOK).steps
        for ids in world.prompts
    ]
    assert sum(map(len, theirs)) < sum(
        map(len, chain)
    )  # more is accepted in a step, so there are fewer


@pytest.mark.slow
@server
def test_what_the_server_says_it_feeds_is_what_it_feeds(world, shifted):
    """Ids that mean other boundaries are seen in the running server, and our own decoding, fed with
    those, accepts the same drafts at each step.
    """
    told = shifted.status["drafter"]
    assert told["ids"] == list(BOUNDARIES) and told["boundaries"] == [b + 1 for b in BOUNDARIES]
    differs = False
    for answer, ids in zip(shifted.single, world.prompts, strict=True):
        steps = {}
        for boundaries in (tuple(told["boundaries"]), BOUNDARIES):
            method = EagleDraft(world.drafter, 3)
            method.boundaries = boundaries
            steps[boundaries] = [
                len(s.accepted) for s in speculative_decode(world.model, method, ids, NEW_TOK).steps
            ]
        assert accepted(answer) == steps[tuple(told["boundaries"])]
        differs |= accepted(answer) != steps[BOUNDARIES]
    assert differs


SYNCHRONOUS = ["--cuda-graph-backend-prefill", "--disable-overlap-schedule"]


@pytest.mark.parametrize(
    ("device", "boundaries", "expected"),
    [
        ("cuda", (), []),
        ("cuda", (2, 4), SYNCHRONOUS),
        ("cpu", (), SYNCHRONOUS),
        ("cpu", (2, 4), SYNCHRONOUS),
    ],
)
def test_only_a_server_that_captures_or_has_no_graphs_goes_without_overlap(
    tmp_path, device, boundaries, expected
):
    """A ratio's baseline on a GPU is a server as one has it.

    With a drafter it has the same flags, and those of drafting.
    """
    config, more = (
        Config(device=device),
        [
            "--speculative-algorithm",
            "--speculative-draft-model-path",
            "--speculative-num-steps",
            "--speculative-eagle-topk",
            "--speculative-num-draft-tokens",
        ],
    )
    plain, drafting = (
        server_command(config, tmp_path, boundaries, 1, tmp_path, SERVING_CHUNK_TOK, draft)[0]
        for draft in (None, tmp_path / "draft")
    )
    assert [flag for flag in SYNCHRONOUS if flag in plain] == expected
    assert [word for word in drafting if word.startswith("--") and word not in plain] == more and [
        word for word in plain if word not in drafting
    ] == []


def test_float32_on_a_gpu_is_refused_before_anything_starts(world, tmp_path):
    """SGLang's attention there takes none, or rounds it to TF32.

    A server of one's own is asked as it is.
    """
    config = Config.create(run_name="x", target=str(world.target.folder), device="cuda")
    for start in (
        lambda: check(config, world.target, world.drafter, []),
        lambda: check_serve_dtype(config),
    ):
        with pytest.raises(EyasError, match="float32 on a GPU.*next: -p serve_dtype bfloat16"):
            start()
    with pytest.raises(EyasError, match="float32 on a GPU.*next: -p dtype bfloat16"):
        serving_up(dataclasses.replace(config, dtype="float32"), world.export, tmp_path / "server")
    for fine in ({"serve_dtype": "bfloat16"}, {"serve_url": "http://x"}, {"device": "cpu"}):
        check_serve_dtype(dataclasses.replace(config, **fine))


def test_no_drafter_there(world, tmp_path):
    config = Config.create(run_name="x", target=str(world.target.folder))
    with pytest.raises(
        EyasError, match="no config.json in 'nothing'.*python -m eyas drafter export"
    ):
        serving_up(config, tmp_path / "nothing", tmp_path / "server")


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (512, "draft vocabulary of 512 of 1,024 tokens; expected all of them"),
        (1024, "on a plain CPU; expected a GPU"),
    ],
)
def test_rejection_sampling_is_refused_where_the_server_would_die_of_it(
    world, tmp_path, size, said
):
    write_json(tmp_path / "config.json", {"draft_vocab_size": size, "vocab_size": 1024})
    with pytest.raises(EyasError, match=f"{said}.*-p speculative_use_rejection_sampling false"):
        serving_up(
            Config.create(
                run_name="x",
                target=str(world.target.folder),
                speculative_use_rejection_sampling=True,
            ),
            tmp_path,
            tmp_path / "server",
        )


# ---- SmolLM2 in bfloat16, beside the session's server


@pytest.mark.slow
@server
def test_in_bfloat16_every_difference_is_a_tie(server, embedded, tmp_path):
    """Half of the prompts are those that the drafter was taught on.

    Where texts part, the plain server's two best were one bfloat16 step apart at most.
    """
    config, running = server
    conversations = load_prompts(ROOT / "data_manifests" / "eyas_chat.jsonl").select(
        "heldout", 4, seed=1
    )
    prompts = [encode(c, embedded.tokenizer(), 512) for c in conversations]
    prompts = [p.input_ids[: int(p.loss_mask.nonzero()[0][0])].tolist() for p in prompts]
    model = decode.load_model(embedded, torch.float32, "cpu")
    texts = [ids + greedy_decode(model, ids, NEW_TOK).tokens for ids in prompts[:2]]
    drafter = teach(
        embedded,
        model,
        prompts[:2],
        (2, 15, 27),
        ids=torch.tensor(sorted({token for ids in texts for token in ids})),
        levels=2,
    )
    folder = export_sglang(drafter, embedded, tmp_path / "export")
    settings = Config.create(
        run_name="x",
        target=str(embedded.folder),
        dtype="bfloat16",
        threads=1,
        max_total_tok=4096,
        context_tok=1024,
    )
    with (
        serving_up(settings, folder, tmp_path / "server", tied=True) as up,
        ThreadPoolExecutor(4) as pool,
    ):
        drafted = [
            *(ask(up.url, ids) for ids in prompts),
            *pool.map(lambda ids: ask(up.url, ids), prompts),
        ]
    plain = [ask(running.url, ids, return_logprob=True, top_logprobs_num=2) for ids in prompts] * 2
    assert sum(sum(accepted(a)) for a in drafted) > 40
    for ids, one, other in zip(prompts * 2, plain, drafted, strict=True):
        parts = [
            at for at, (a, b) in enumerate(zip(one["output_ids"], other["output_ids"])) if a != b
        ]
        if parts:
            (best, *_), (second, token, _) = one["meta_info"]["output_top_logprobs"][parts[0]]
            with torch.no_grad():
                logit = float(
                    model(torch.tensor([ids + one["output_ids"][: parts[0]]])).logits[0, -1].max()
                )
            assert other["output_ids"][parts[0]] == token
            assert best - second <= 2.0 ** (torch.tensor(logit).abs().log2().floor() - 7) * 1.01, (
                parts[0],
                best - second,
                logit,
            )
