"""The server's acceptance beside ours: how each answer is counted, a real server that serves a
taught drafter, and checkpoints with a fault each.
"""

import dataclasses
import json
import os
import shlex
import shutil
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.cli import main
from eyas.config import Config
from eyas.errors import EyasError
from eyas.evaluation import decode, verdict
from eyas.evaluation.acceptance import Prompt, measure
from eyas.evaluation.decode import TargetStream, greedy_decode
from eyas.evaluation.offline import against_decoding, run_walk
from eyas.evaluation.served import (
    ServedAcceptance,
    check,
    check_or_reason,
    our_decoding,
    round_trip,
    round_trip_table,
    same_settings,
    served_record,
    side_table,
    sides,
    walked_prompts,
)
from eyas.evaluation.served_client import Answer, read_answer
from eyas.evaluation.served_counting import agree, compare_prompts, count
from eyas.evaluation.served_diagnosis import cause_table, causes, checkpoint_causes, with_faults
from eyas.evaluation.served_throughput import read_throughput
from eyas.files import ROOT, read_json, write_json
from eyas.models.drafter import Drafter, ImportedConfig, load_drafter, save_drafter
from eyas.models.export import WRITTEN_FOR, export_sglang, export_speculators
from eyas.models.import_drafter import import_drafter
from eyas.models.layer_ids import engine_boundaries
from eyas.models.target import load_target
from eyas.report import plots, summary
from eyas.report import run as report
from eyas.report.parameters import Answer as NotebookAnswer
from eyas.server.serve import serving_up
from eyas.store.reader import Rows
from helpers.stores import write_store
from helpers.taught import make_prompts, teach
from helpers.tiny import make_tiny_target

sys.path.insert(0, str(ROOT / "benchmarks"))
import serving as serving_benchmark

BOUNDARIES, STEPS, NEW_TOK, END = (1, 3, 5), 3, 30, 2


# ---- counting


def answer(ids: list[int], accepted: list[int], end_id: int | None = None) -> Answer:
    return Answer(ids, end_id, accepted, 5, 1.0)


@pytest.mark.parametrize(
    "ids, accepted, end_id, most, expected",
    [
        # 1 from the prefill, then 2, 4 and 1 tokens; asked for 5: the step that crosses is counted
        # whole, the one after it is not
        ([1] * 8, [1, 3, 0], None, 5, ([1, 3], [3, 3], 5)),
        ([1] * 8, [1, 3, 0], None, 7, ([1, 3], [3, 3], 7)),
        ([1] * 8, [1, 3, 0], None, 8, ([1, 3, 0], [3, 3, 3], 8)),
        # the text ends at the second draft of a step whose three drafts the server accepted: the
        # third is neither accepted nor proposed
        ([1, 1, 1, 1, END], [1, 3], END, 20, ([1, 2], [3, 2], 5)),
        ([1, 1, 1, END], [1, 3], END, 20, ([1, 1], [3, 1], 4)),  # at the first draft
        (
            [1, 1, 1, 1, 1, 1, END],
            [1, 3],
            END,
            20,
            ([1, 3], [3, 3], 7),
        ),  # at the bonus token: all three drafts count
        (
            [1, 1, 1, END],
            [1, 0],
            END,
            20,
            ([1, 0], [3, 3], 4),
        ),  # at the bonus token of a step that accepted nothing
        (
            [1, 1, 1, 1, 1, END],
            [1, 3],
            END,
            20,
            ([1, 3], [3, 3], 6),
        ),  # at the third of three drafts: the bonus token behind it is lost
        (
            [1, 1, 1, 1, END],
            [1, 3],
            END,
            4,
            ([1, 2], [3, 2], 4),
        ),  # beyond the tokens that were asked for, inside the last step
        ([END], [], END, 20, ([], [], 1)),  # the prefill's own token
        ([1], [], None, 1, ([], [], 1)),
    ],
    ids=str,
)
def test_counts_of_hand_made_answers(ids, accepted, end_id, most, expected):
    kept, drafted, tok = expected
    found = count(answer(ids, accepted, end_id), STEPS, most)
    assert (found["tok"], found["verify_steps"], found["accepted"]) == (tok, len(kept), sum(kept))
    for i in (1, 2, 3):
        assert found[f"accepted_{i}"] == sum(n >= i for n in kept)
        assert found[f"proposed_{i}"] == sum(n >= i for n in drafted)
        assert found[f"reached_{i}"] == sum(min(n + 1, d) >= i for n, d in zip(kept, drafted))


@pytest.mark.parametrize("ids, accepted", [([1] * 8, [1, 3]), ([1] * 5, [1, 3])])
def test_steps_that_do_not_make_up_the_text_are_refused(ids, accepted):
    with pytest.raises(EyasError, match="verify steps"):
        count(answer(ids, accepted), STEPS, 20)


def test_read_answer():
    meta = {
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 7,
        "spec_verify_ct": 2,
        "spec_num_correct_drafts": 4,
        "eyas_accepted": [None, 1, None, 3, None],
    }
    found = read_answer({"output_ids": [5] * 5, "meta_info": meta}, 2.0)
    assert found == Answer([5] * 5, None, [1, 3], 7, 2.0)
    stopped = meta | {"finish_reason": {"type": "stop", "matched": END}}
    assert read_answer({"output_ids": [5], "meta_info": stopped}).end_id == END
    plain = {"finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 7}
    assert read_answer({"output_ids": [5], "meta_info": plain}).accepted == []
    for change, words in (
        ({"spec_num_correct_drafts": 5}, "SGLang's own counts, 2 and 5"),
        ({"eyas_accepted": None}, "not in which step"),
        ({"finish_reason": {"type": "abort", "message": "x"}}, "abort"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "NaN"),
    ):
        with pytest.raises(EyasError, match=words):
            read_answer({"output_ids": [5] * 5, "meta_info": meta | change})


def test_agree():
    def interval(value, low, high):
        return {"value": value, "low": low, "high": high}

    none = interval(0.01, -0.1, 0.1)
    assert agree(
        {"server": interval(1.7, 1.6, 1.8), "ours": interval(1.75, 1.6, 1.9), "difference": none}
    )
    assert (
        agree(
            {
                "server": interval(1.7, 1.6, 1.8),
                "ours": interval(1.81, 1.6, 1.9),
                "difference": none,
            }
        )
        is False
    )  # outside the server's
    assert (
        agree(
            {
                "server": interval(1.7, 1.6, 1.8),
                "ours": interval(1.75, 1.71, 1.9),
                "difference": none,
            }
        )
        is False
    )  # outside ours
    assert (
        agree(
            {
                "server": interval(1.7, 1.6, 1.8),
                "ours": interval(1.75, 1.6, 1.9),
                "difference": interval(0.1, 0.02, 0.2),
            }
        )
        is False
    )  # paired
    assert (
        agree(
            {
                "server": interval(1.7, None, None),
                "ours": interval(1.75, None, None),
                "difference": none,
            }
        )
        is None
    )


# ---- a real server


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(config, target, drafter, prompts), all decoded by us.

    Two of the texts end by themselves, one of them inside a verify step.
    """
    folder = tmp_path_factory.mktemp("served")
    before = os.environ.get("EYAS_DATA")
    os.environ["EYAS_DATA"] = str(folder / "data")
    prompts = make_prompts(lengths=(2, 7, 19, 40, 33, 12))
    target = load_target(str(make_tiny_target(folder / "tiny", n_blocks=6)))
    drafter = teach(
        target, decode.load_model(target, torch.float32, "cpu"), prompts, BOUNDARIES, levels=3
    )
    end_texts(target, drafter, prompts)
    target = load_target(str(target.folder))
    config = Config.create(
        run_name="x",
        target=str(target.folder),
        boundaries=BOUNDARIES,
        threads=1,
        decode_new_tok=NEW_TOK,
        speculative_num_steps=STEPS,
        serve_timed_prompts=2,
        max_total_tok=4096,
        context_tok=512,
        max_length=256,
        concurrency=4,
        check_bf16_prompts=1,
        baseline_prompts=1,
        server_timeout_s=900.0,
    )
    save_drafter(
        drafter,
        config.drafter_dir,
        {"target": {"name": target.name, "fingerprint": target.fingerprint}},
    )
    asked = [Prompt(f"p{i}", "random", ids) for i, ids in enumerate(prompts)]
    measure(config, target, drafter, asked)
    yield config, target, drafter, asked
    os.environ.pop("EYAS_DATA") if before is None else os.environ.update(EYAS_DATA=before)


def end_texts(target, drafter, prompts: list[list[int]]) -> None:
    """Make two tokens the target's ends: one that is an accepted draft with more accepted behind
    it, and in another text one that is a bonus token.
    """
    model = decode.load_model(target, torch.float32, "cpu")
    found: dict[str, list[tuple[int, int]]] = {"draft": [], "bonus": []}  # (prompt, token)
    for n, prompt in enumerate(prompts):
        trace, at = (
            decode.speculative_decode(model, decode.EagleDraft(drafter, STEPS), prompt, NEW_TOK),
            1,
        )
        for step in trace.steps[:-1]:
            here = trace.tokens[at : at + len(step.accepted) + 1]
            for kind, token in (("draft", here[0]), ("bonus", here[-1])):
                if (
                    len(here) > 2 - (kind == "bonus")
                    and token not in trace.tokens[: at + (len(here) - 1) * (kind == "bonus")]
                ):
                    found[kind].append((n, token))
            at += len(here)
    draft, bonus = next(
        (a, b) for a in found["draft"] for b in found["bonus"] if a[0] != b[0] and a[1] != b[1]
    )
    for name in ("config.json", "generation_config.json"):
        write_json(
            target.folder / name,
            read_json(target.folder / name) | {"eos_token_id": [draft[1], bonus[1]]},
        )


@pytest.fixture(scope="module")
def checked(world):
    return check(*world)


server = pytest.mark.server


@server
def test_the_server_accepts_what_our_decoding_does(world, checked):
    """Float32: the same accepted drafts at each position of each prompt, the same text, and so the
    same numbers.
    """
    config, _, _, prompts = world
    table, record = checked.prompts, checked.record
    assert table["same_counts"].all() and record["same_counts"] == len(prompts)
    assert list(table["accepted"]) == list(table["ours_accepted"]) and table["accepted"].sum() > 20
    ours = pd.read_parquet(config.acceptance_dir / "acceptance.parquet")
    for name in (
        "tok",
        "verify_steps",
        *(f"{kind}_{i}" for i in (1, 2, 3) for kind in ("proposed", "reached", "accepted")),
    ):
        assert list(table[name]) == list(ours[name]), name
    assert (ours["tok"] < NEW_TOK).sum() >= 2, "two texts end by themselves"
    assert record["identical"] == {"prompts": len(prompts), "differing": 0}
    assert record["difference"]["value"] == 0 and not record["off"] and checked.passed
    assert record["round_trip"] == {
        "served": list(BOUNDARIES),
        "trained": list(BOUNDARIES),
        "ids": [0, 2, 4],
        "equal": True,
    }
    assert (
        record["headline"]["value"]
        == read_json(config.acceptance_dir / "acceptance.json")["acceptance_length"]["value"]
    )
    assert read_json(config.acceptance_dir / "served.json") == json.loads(json.dumps(record))
    assert record["speed_ratio"]["value"] > 0 and record["speed_prompts"] == 2


@server
def test_nothing_is_wrong_with_an_honest_checkpoint(checked):
    wrong = [row for row in checked.record["causes"] if row["ok"] is False]
    assert not wrong
    assert "causes" not in str(checked) and "agree" in str(checked)
    assert list(round_trip_table(checked.record)["served"][:2]) == [
        str(list(BOUNDARIES)),
        "[0, 2, 4]",
    ]


@server
def test_no_server_is_left(world, checked):
    config = world[0]
    assert not list(config.server_dir.rglob("server.json")) and list(
        config.server_dir.rglob("server.log")
    )


@server
def test_three_sides(world, checked):
    decoded = read_json(world[0].acceptance_dir / "acceptance.json")
    walked = decoded | {"counts": {"samples": 4}}
    found = sides(walked, checked.record)
    assert (
        found[1]["survival"] == [p["survival"] for p in decoded["by_position"]]
        and found[1]["acceptance_length"] == decoded["acceptance_length"]
    )
    table = side_table(found)
    assert table.shape == (1 + STEPS, 4) and (table.iloc[:, 2] == table.iloc[:, 3]).all()
    assert len(plots.plot_sides(found).get_legend().get_texts()) == 3


# ---- without a server


def made_up(world, accepted) -> ServedAcceptance:
    """The check's record of answers whose verify steps accept what `accepted(step)` says, all of 30
    tokens, and a server that says what an honest one does.
    """
    config, target, drafter, prompts = world
    steps = []
    while sum(n + 1 for n in steps) + 1 < NEW_TOK:
        steps.append(accepted(len(steps)))
    decoded, ours = our_decoding(config, prompts)
    table = compare_prompts(
        config,
        prompts,
        [
            Answer([5] * (1 + sum(n + 1 for n in steps)), None, steps, len(p.input_ids), 1.0)
            for p in prompts
        ],
        ours,
        None,
    )
    trip = {
        "served": list(BOUNDARIES),
        "trained": list(BOUNDARIES),
        "ids": [0, 2, 4],
        "equal": True,
    }
    record = served_record(config, target, drafter, honest(world), trip, decoded, table)
    record |= {
        "speed_ratio": None,
        "speed_prompts": 0,
        "causes": causes(config, target, drafter, honest(world), record, table),
    }
    return ServedAcceptance(record, table)


def honest(world, **drafting) -> dict:
    """What a server of the export would say of itself."""
    config, target, drafter, _ = world
    told = {
        "algorithm": "EAGLE3",
        "path": str(export_sglang(drafter, target, config.export_dir)),
        "num_steps": STEPS,
        "topk": 1,
        "draft_tokens": STEPS + 1,
        "boundaries": list(BOUNDARIES),
        "ids": [0, 2, 4],
    }
    return {
        "url": "x",
        "sglang": "0.5.23",
        "device": "cpu",
        "dtype": "float32",
        "overlap": False,
        "model": str(target.folder),
        "drafter": told | drafting,
    }


def test_a_server_that_accepts_nothing_is_looked_at(world):
    """Exactly 1: every step gives the bonus token alone, as under EAGLE for EAGLE3.

    One accepted draft in all is already something else.
    """
    nothing = made_up(world, lambda step: 0)
    record = nothing.record
    assert (
        record["acceptance_length"]["value"] == 1.0
        and record["verdict"] == "the server accepts nothing"
        and record["off"]
        and not nothing.passed
    )
    assert "the server accepts nothing" in str(nothing) and "what is known to cause that" in str(
        nothing
    )
    little = made_up(world, lambda step: int(step == 0)).record
    assert (
        1 < little["acceptance_length"]["value"] < 1.1
        and little["verdict"] == "they differ beyond the interval"
        and little["off"]
    )


def test_an_export_for_something_else_is_named(world):
    """Its config.json says for which engine, version, boundaries and target it was written; what
    runs is compared, and an export of others, without the key, is not accused.
    """
    config, target, drafter, _ = world
    found, status = made_up(world, lambda step: 1), honest(world)
    path = config.export_dir / "config.json"
    whole = read_json(path)
    assert whole[WRITTEN_FOR] == {
        "engine": "sglang",
        "version": "0.5.23",
        "boundaries": [1, 3, 5],
        "target": target.name,
        "target_fingerprint": target.fingerprint,
    }

    def looked_at(**changed) -> dict[str, bool | None]:
        write_json(
            path, {name: value for name, value in (whole | changed).items() if value is not None}
        )
        rows = causes(config, target, drafter, status, found.record, found.prompts)
        write_json(path, whole)
        return {
            row["cause"].split(" that the export")[0]: row["ok"]
            for row in rows
            if "export was written for" in row["cause"]
        }

    fine = {"engine and version": True, "boundaries": True, "target": True}
    assert looked_at() == fine
    assert looked_at(**{WRITTEN_FOR: whole[WRITTEN_FOR] | {"version": "0.5.14"}}) == fine | {
        "engine and version": False
    }
    assert looked_at(**{WRITTEN_FOR: whole[WRITTEN_FOR] | {"boundaries": [2, 3, 5]}}) == fine | {
        "boundaries": False
    }
    assert looked_at(
        **{WRITTEN_FOR: whole[WRITTEN_FOR] | {"target_fingerprint": "0" * 64}}
    ) == fine | {"target": False}
    assert looked_at(**{WRITTEN_FOR: None}) == dict.fromkeys(fine)


def store_of(config, target, prompts: list[Prompt]):
    """The run's store: of each prompt the target's own greedy response, with the states of all
    boundaries.
    """
    model, head, kept = (
        decode.load_model(target, torch.float32, "cpu"),
        target.head(),
        (*BOUNDARIES, target.n_blocks),
    )
    samples = []
    for prompt in prompts:
        ids = prompt.input_ids + greedy_decode(model, prompt.input_ids, NEW_TOK).tokens
        with TargetStream(model, kept) as stream, torch.inference_mode():
            states = stream.forward(ids, keep=1)[1].clone().split(target.hidden_size, dim=-1)
        samples.append(
            Rows(
                prompt.id,
                "heldout",
                "random",
                torch.tensor(ids),
                torch.arange(len(ids)) >= len(prompt.input_ids),
                {b: s.bfloat16() for b, s in zip(kept, states)},
            )
        )
    manifest = {
        "target": {"name": target.name, "fingerprint": target.fingerprint, "rms_norm_eps": 1e-5},
        "boundaries": list(kept),
        "dtype": "bfloat16",
        "hidden_size": target.hidden_size,
        "prompts": {"hash": None},
    }
    return write_store(config.judged_store_dir, manifest, head, samples)


def cells_from(part: str) -> list[str]:
    """Code cells of notebook 05 from the first one that says `part` on."""
    code = [
        "".join(c["source"])
        for c in read_json(ROOT / "notebooks" / "05_acceptance.ipynb")["cells"]
        if c["cell_type"] == "code"
    ]
    return code[next(i for i, cell in enumerate(code) if part in cell and "import" not in cell) :]


def test_the_page_of_a_drafter_that_sglang_cannot_serve(world, tmp_path, monkeypatch, capsys):
    """speculators' default drafter, with norm_before_residual, imported and judged by the page's
    own cells: they say why there is no server, name a command that works, and go on to the end.
    """
    config, target, taught, prompts = world
    shape = ImportedConfig(**dataclasses.asdict(taught.config) | {"norm_before_residual": True})
    theirs = Drafter(shape, taught.vocab)
    theirs.load_state_dict(taught.state_dict())
    run = dataclasses.replace(config, run_name="theirs", baseline_prompts=1)
    import_drafter(
        export_speculators(theirs, target, tmp_path / "theirs", STEPS), target, run.drafter_dir
    )
    drafter = load_drafter(run.drafter_dir, target)
    assert drafter.config.norm_before_residual
    store, acceptance = store_of(run, target, prompts), measure(run, target, drafter, prompts)
    write_json(run.acceptance_dir / "served.json", {"headline": "of the drafter before"})
    monkeypatch.setattr(report, "_data_sentence", lambda config: "6 conversations")
    monkeypatch.setattr(report, "_parity_sentence", lambda config: "not asked")
    names = {
        "config": run,
        "model": target,
        "answer": NotebookAnswer(),
        "drafter": drafter,
        "prompts": prompts,
        "store": store,
        "walked": run_walk(run, drafter, store),
        "record": acceptance.record,
    }
    exec("\n".join(line for line in cells_from("")[2].splitlines() if "import" in line), names)
    exec("from eyas.evaluation import acceptance as accepting", names)
    capsys.readouterr()
    for cell in cells_from("exported("):
        exec(cell, names)
    said, reason = (
        capsys.readouterr().out,
        "sglang 0.5.23 cannot serve a drafter with norm_before_residual",
    )
    assert (
        f"not exported for SGLang: {reason}" in said
        and f"not served: {reason}" in said
        and not run.export_dir.exists()
    )
    assert [column["name"] for column in names["columns"]] == [
        "offline estimate, 6 prompts",
        "our decoding, 6 prompts",
    ]
    assert names["columns"][1]["acceptance_length"] == acceptance.record["acceptance_length"]
    assert list(cause_table(names["served"].record)["found"]) == [
        reason + ": its residual stream starts in front of the norm"
    ]
    assert list(round_trip_table(names["served"].record)["served"]) == ["not served"]
    told = report.headline(run)
    assert (
        told["served"] is None
        and told["not_served"].startswith(reason)
        and verdict.verdict(told) in said
    )
    assert summary.served({**told}).startswith(f"not served: {reason}") and summary.served_lead(
        {"headline": told}
    ).startswith(f"Not served: {reason}")
    command = next(
        line for line in said.splitlines() if line.startswith("next: python -m eyas drafter export")
    )
    assert (
        main(shlex.split(command)[4:]) == 0 and (run.export_dir / "vllm" / "config.json").is_file()
    )
    with pytest.raises(
        EyasError, match="decoded with other settings"
    ):  # what else is wrong still stops the page
        check_or_reason(dataclasses.replace(run, decode_new_tok=7), target, drafter, prompts)


def test_the_offline_column_is_of_the_same_prompts(world):
    """The three columns stand on the prompts that the server answered: the estimate is
    offline.json's where that is of all of them, and a part of it where the server answers a part.
    """
    config, target, drafter, prompts = world
    run = dataclasses.replace(config, run_name="stored", drafter_run="x")
    store, acceptance = (
        store_of(dataclasses.replace(run, drafter_run=""), target, prompts[:4]),
        measure(run, target, drafter, prompts),
    )
    offline = against_decoding(run, target, drafter, store, prompts, acceptance)
    served = {
        "counts": {"prompts": 6},
        "decoded": {"acceptance_length": acceptance.record["acceptance_length"]},
        "acceptance_length": acceptance.record["acceptance_length"],
        "by_position": [
            {"ours": p["survival"], "server": p["survival"]}
            for p in acceptance.record["by_position"]
        ],
    }
    same = walked_prompts(run, drafter, store, prompts)
    assert (
        offline["greedy"]["prompts"] == 4
        and same["acceptance_length"] == offline["greedy"]["offline"]
    )
    walked = run_walk(run, drafter, store)
    found = sides(walked, served, same)
    assert [side["name"] for side in found] == [
        "offline estimate, 4 of these prompts",
        "our decoding, 6 prompts",
        "the server, 6 prompts",
    ]
    assert (
        found[0]["acceptance_length"] == offline["greedy"]["offline"]
        and len(found[0]["survival"]) == STEPS
    )
    few = dataclasses.replace(run, serve_prompts=2)
    two = walked_prompts(few, drafter, store, prompts)
    shown = sides(walked, served | {"counts": {"prompts": 2}}, two)[0]
    assert (
        two["counts"] == {"prompts": 2}
        and shown["name"] == "offline estimate, 2 prompts"
        and shown["survival"] == [p["survival"] for p in two["by_position"]]
    )
    assert (
        shown["acceptance_length"]
        == against_decoding(
            few,
            target,
            drafter,
            store,
            prompts,
            dataclasses.replace(
                acceptance,
                prompts=acceptance.prompts[:2],
                traces={
                    "float32": {
                        name: traces[:2] for name, traces in acceptance.traces["float32"].items()
                    }
                },
            ),
        )["greedy"]["offline"]
        != walked["acceptance_length"]
    )
    assert (
        walked_prompts(run, drafter, store, prompts[4:]) is None
        and walked_prompts(dataclasses.replace(run, temperature=1.0), drafter, store, prompts)
        is None
    )
    assert (
        sides(walked, served)[0]["name"] == "offline estimate, 4 samples"
        and sides(walked, served)[0]["acceptance_length"] == walked["acceptance_length"]
    )


ROW = {
    "plain_tok": 100,
    "plain_steps": 0,
    "plain_accepted": 0,
    "drafting_tok": 50,
    "drafting_steps": 20,
    "drafting_accepted": 15,
}
ROUNDS = [
    ROW | {"round": n, "parallel": parallel, "plain_s": 4.0 + n, "drafting_s": 1.0 * parallel}
    for n in (0, 1)
    for parallel in (4, 1)
]


def test_throughput_belongs_to_a_drafter(world, monkeypatch):
    """A record of the benchmark's own function is shown where drafter and draft settings are the
    ones at hand, and the run's verdict is made of it; another's is left out, and a line says so.
    """
    config, target, drafter, _ = world
    run = dataclasses.replace(config, run_name="fast")
    path = run.acceptance_dir / "throughput.json"
    save_drafter(
        drafter,
        run.drafter_dir,
        {"target": {"name": target.name, "fingerprint": target.fingerprint}},
    )
    shutil.copytree(config.acceptance_dir, run.acceptance_dir)
    monkeypatch.setattr(report, "_data_sentence", lambda config: "")
    monkeypatch.setattr(report, "_parity_sentence", lambda config: "")
    nothing, said = read_throughput(run)
    assert nothing is None and said.endswith(
        "not measured; next: .venv/bin/python benchmarks/serving.py --profile PROFILE, on "
        "a quiet machine"
    )
    assert report.headline(run)["served_throughput"] is None
    write_json(path, serving_benchmark.record("demo", run, ROUNDS, 16, False))
    found, said = read_throughput(run)
    assert (
        [row["parallel"] for row in found["ratios"]] == [1, 4]
        and found["settings"]["dtype"] == "bfloat16"
        and "2 rounds" in said
        and "without SGLang's overlap scheduler" in said
    )
    # plain seconds for as many tokens, (4 + 5) / 2, over 1 + 1 and 4 + 4 seconds drafting
    assert [row["ratio"]["value"] for row in found["ratios"]] == [4.5 / 2, 4.5 / 8]
    told = report.headline(run)
    assert (
        told["served_throughput"]["value"] == 2.25
        and told["served_throughput"]["at"][1]["value"] == 0.5625
        and told["served_throughput"]["prompts"] == 16
    )
    assert verdict.verdict(told).startswith(
        "With this drafter SGLang is 2.2× faster for one request at a time. At four it is "
        "slower: 0.6× as fast. "
        "Tokens per second divided by those of the same server without the drafter: 2.25 "
        "at 1 request at a time"
    )
    ax = plots.plot_throughput(found["ratios"])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "4"] and list(
        ax.lines[1].get_ydata()
    ) == [2.25, 0.5625]
    other, said = read_throughput(dataclasses.replace(run, speculative_num_steps=2))
    assert (
        other is None and "(speculative_num_steps, speculative_num_draft_tokens): not shown" in said
    )
    torn = Drafter(drafter.config, drafter.vocab)
    torn.load_state_dict(drafter.state_dict())
    torn.fc.weight.data += 1
    save_drafter(
        torn, run.drafter_dir, {"target": {"name": target.name, "fingerprint": target.fingerprint}}
    )
    other, said = read_throughput(run)
    assert (
        other is None
        and "(drafter_sha256): not shown; next: .venv/bin/python benchmarks/serving.py" in said
        and report.headline(run)["served_throughput"] is None
    )


def test_the_benchmark_leaves_its_numbers_with_the_run(world, tmp_path, monkeypatch):
    """Its command line with servers and rounds taken away: throughput.json in the acceptance folder
    of the judged run, and --out beside it.
    """
    config, _, _, _ = world

    class Up:
        def __enter__(self):
            return SimpleNamespace(url="http://x", status=lambda: {"overlap": True})

        def __exit__(self, *_):
            pass

    for name, value in (
        ("serving_up", lambda *a, **k: Up()),
        ("eval_prompts", lambda config, target: [1] * config.decode_prompts),
        ("measure", lambda *a: ROUNDS),
    ):
        monkeypatch.setattr(serving_benchmark, name, value)
    given = [
        ("run_name", "x"),
        ("target", config.target),
        ("threads", "1"),
        ("boundaries", "[1,3,5]"),
    ]
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "serving.py",
            "--profile",
            "reference",
            "--prompts",
            "8",
            "--out",
            str(tmp_path / "out.json"),
            *(word for pair in given for word in ("-p", *pair)),
        ],
    )
    serving_benchmark.main()
    run = Config.load("reference", **dict(given))
    try:
        assert (
            read_throughput(run)[0]
            == read_json(run.acceptance_dir / "throughput.json")
            == read_json(tmp_path / "out.json")
        )
        assert (
            read_json(tmp_path / "out.json")["settings"]["profile"] == "reference"
            and "with SGLang's overlap scheduler" in read_throughput(run)[1]
            and read_throughput(run)[0]["prompts"] == 8
        )
    finally:
        (run.acceptance_dir / "throughput.json").unlink()


# ---- faults


def broken(folder, fault: str, out):
    """A copy of an exported drafter with one fault."""
    shutil.copytree(folder, out)
    config, weights = read_json(out / "config.json"), load_file(out / "model.safetensors")
    if fault == "d2t":
        weights["d2t"] = weights["d2t"] + torch.arange(len(weights["d2t"]))
    elif fault == "zero":
        weights["d2t"] = torch.zeros_like(weights["d2t"])
    elif fault == "names":
        weights = {name.replace("mlp.", "ffn."): tensor for name, tensor in weights.items()}
    elif fault == "norm_output":
        config["norm_output"] = not config["norm_output"]
    elif fault == "fc_norm":
        config["fc_norm"] = True
    elif fault == "norm":
        weights["norm.weight"] = torch.ones_like(weights["norm.weight"])
    elif fault == "old":
        weights["fc.weight"] = weights["fc.weight"] * 0.9
    write_json(out / "config.json", config)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


NAMED = {  # fault -> the row that names it, and what it says
    "d2t": ("d2t", "absolute target ids"),
    "zero": ("d2t", "other offsets"),
    "names": ("weights that the loader drops", "layers.0.ffn.down_proj.weight"),
    "norm_output": ("norm_output", "True"),
    "fc_norm": ("fc_norm", "True"),
    "norm": ("final norm", "apart"),
    "old": ("weights other than the trained ones", "fc.weight"),
}


@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_of_the_checkpoint_is_named(world, tmp_path, fault):
    _, target, drafter, _ = world
    out = broken(export_sglang(drafter, target, tmp_path / "export"), fault, tmp_path / "broken")
    wrong = [
        row
        for row in checkpoint_causes(
            read_json(out / "config.json"), load_file(out / "model.safetensors"), drafter
        )
        if row["ok"] is False
    ]
    row, words = NAMED[fault]
    assert any(found["cause"].startswith(row) and words in found["found"] for found in wrong), wrong
    others = {"names": 2, "norm": 2}.get(
        fault, 1
    )  # a dropped weight is missing too; the norm is a trained weight
    assert len(wrong) == others


@pytest.mark.server
def test_what_the_server_says_of_itself_is_looked_at(world, checked):
    """EAGLE for EAGLE3, other draft steps, another target, dtype, prompts with a token more: each
    by its own row, and only that.
    """
    config, target, drafter, _ = world
    status = {
        "drafter": {**checked.record["drafter"], "path": str(config.export_dir)},
        "dtype": "float32",
        "sglang": "0.5.23",
        "model": str(target.folder),
        "url": "x",
    }

    def wrong(table=checked.prompts, drafting=(), **changed) -> list[str]:
        found = causes(
            config,
            target,
            drafter,
            status | changed | {"drafter": status["drafter"] | dict(drafting)},
            checked.record,
            table,
        )
        return [row["cause"].split(":")[0].split(",")[0] for row in found if row["ok"] is False]

    assert wrong() == []
    assert wrong(drafting={"algorithm": "EAGLE"}) == ["algorithm"]
    assert wrong(drafting={"num_steps": 2, "draft_tokens": 3}) == ["draft steps"]
    assert wrong(drafting={"boundaries": [2, 3, 5]}) == ["boundaries that feed the drafter"]
    assert wrong(dtype="bfloat16") == ["dtype"]
    assert wrong(
        table=checked.prompts.assign(server_prompt_tok=checked.prompts["prompt_tok"] + 1)
    ) == ["prompt tokens"]
    assert (
        wrong(drafting={"path": str(config.export_dir / "nowhere")}) == []
    )  # of a server elsewhere: not known


def test_a_server_that_drafts_with_other_settings_is_named():
    config = Config(run_name="x", speculative_num_steps=3)
    told = {"num_steps": 3, "topk": 1, "draft_tokens": 4}
    same_settings({"drafter": told}, config)
    with pytest.raises(
        EyasError,
        match=(
            "drafts with speculative_num_steps 5, speculative_num_draft_tokens 6; expected "
            "speculative_num_steps 3, .* 4; next: .*-p speculative_num_steps 5"
        ),
    ):
        same_settings({"drafter": told | {"num_steps": 5, "draft_tokens": 6}}, config)


@pytest.mark.slow
@server
def test_served_with_a_fault(world, tmp_path):
    """A real server of a checkpoint with d2t all zero and half of the weights dropped, as a server
    of one's own: less is accepted, and both are named.
    """
    config, target, drafter, prompts = world
    bad = broken(
        broken(export_sglang(drafter, target, tmp_path / "export"), "zero", tmp_path / "zero"),
        "names",
        tmp_path / "both",
    )
    with serving_up(
        dataclasses.replace(config, dtype="float32"), bad, tmp_path / "server", tied=True
    ) as up:
        own = dataclasses.replace(config, serve_url=up.url, run_name="own", drafter_run="x")
        shutil.copytree(config.acceptance_dir, own.acceptance_dir)
        found = check(own, target, drafter, prompts)
    assert found.record["off"] and not found.passed and found.record["identical"] is None
    assert (
        1
        <= found.record["acceptance_length"]["value"]
        < found.record["decoded"]["acceptance_length"]["value"] - 0.3
    )
    wrong = cause_table(found.record)
    wrong = wrong[wrong[""] == "LOOK"]
    assert {
        "other offsets",
        "layers.0.ffn.down_proj.weight, layers.0.ffn.gate_proj.weight, layers.0.ffn.up_proj.weight",
    } <= set(wrong["found"])
    assert "other offsets" in str(found)


def test_a_server_that_dies_of_its_checkpoint(world, tmp_path):
    """With d2t absolute a draft can lie beyond the vocabulary, which ends SGLang: the message says
    what is wrong with the checkpoint.
    """
    _, target, drafter, _ = world
    export = export_sglang(drafter, target, tmp_path / "export")
    gone = EyasError("no answer from http://x: RemoteProtocolError", "a running SGLang server")
    found = with_faults(
        gone, {"drafter": {"path": str(broken(export, "d2t", tmp_path / "broken"))}}, drafter
    )
    assert (
        "RemoteProtocolError; the checkpoint" in found.found
        and "absolute target ids" in found.found
    )
    assert with_faults(gone, {"drafter": {"path": str(export)}}, drafter) is gone
    assert with_faults(gone, {"drafter": {"path": str(tmp_path / "nowhere")}}, drafter) is gone


def test_other_boundaries_are_refused(world):
    """Ids that somebody wrote as boundaries, where SGLang takes the block before."""
    _, target, drafter, _ = world
    status = {
        "url": "x",
        "drafter": {
            "boundaries": list(engine_boundaries([1, 2, 4], "LlamaForCausalLM", target.n_blocks)),
            "ids": [1, 2, 4],
        },
    }
    with pytest.raises(
        EyasError,
        match=(
            r"boundaries \[2, 3, 5\] .* expected \[1, 3, 5\].*never seen.*"
            r"python -m eyas drafter export"
        ),
    ):
        round_trip(status, drafter)


def test_speed_of_many_requests():
    """benchmarks/serving.py: seconds for as many tokens, in rounds of equally many requests."""
    rows = [
        {
            "parallel": n,
            "plain_s": 4.0 * n,
            "plain_tok": 100,
            "drafting_s": 2.0,
            "drafting_tok": 50,
            "drafting_steps": 20,
            "drafting_accepted": 15,
        }
        for n in (1, 1, 4)
    ]
    found = serving_benchmark.summary(rows, 1)
    assert (
        found["rounds"] == 2
        and found["ratio"]["value"] == 1.0
        and found["ratio"]["low"] == 1.0
        and found["acceptance_length"] == 1.75
    )
    assert (found["plain_s"], found["drafting_tok"]) == (8.0, 100)
    assert serving_benchmark.summary(rows, 4)["ratio"] == {
        "value": 4.0,
        "low": None,
        "high": None,
        "level": 0.95,
    }


# ---- refusals


def test_what_there_is_to_compare_with(world, data):
    config, _, drafter, prompts = world
    with pytest.raises(EyasError, match="has not decoded.*python -m eyas evaluate decode"):
        our_decoding(config, prompts)  # another data folder
    with pytest.raises(EyasError, match="no prompts"):
        our_decoding(config, [])
    with pytest.raises(EyasError, match="runs without a drafter"):
        round_trip({"url": "http://x", "drafter": None}, drafter)


def test_other_settings_and_prompts_are_refused(world):
    config, _, _, prompts = world
    with pytest.raises(EyasError, match="temperature 0.0, not 0.7"):
        our_decoding(dataclasses.replace(config, temperature=0.7), prompts)
    with pytest.raises(EyasError, match="speculative_num_steps 3, not 2"):
        our_decoding(dataclasses.replace(config, speculative_num_steps=2), prompts)
    with pytest.raises(EyasError, match="1 of 2 are not among them, other first"):
        our_decoding(config, [prompts[0], Prompt("other", "random", [1])])
    with pytest.raises(EyasError, match="1 of 1"):
        our_decoding(
            config, [Prompt(prompts[0].id, "random", [1])]
        )  # the same name, another prompt
    record, table = our_decoding(config, prompts[::-1])
    assert list(table["id"]) == [p.id for p in prompts[::-1]]
