"""The search over server settings: what it keeps, what it refuses, that it goes on after a kill,
and that what it writes is a profile; the command for eight GPUs.
"""

import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp

from eyas.capture.extract import SampleError
from eyas.cli import main
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import ROOT, read_json, seal, write_json, write_text
from eyas.models.target import Target, load_target
from eyas.prompts.prompt_set import load_prompts
from eyas.report.plots import plot_tuning
from eyas.server.serve import server_command, server_up
from eyas.studies.server_settings import (
    TEXTS,
    TUNABLE,
    Bench,
    Rows,
    Search,
    _check_rows,
    _with_change,
    find_result,
    how_to_tune,
    moved,
    noise_bound,
    options,
    paired_ratio,
    profile_text,
    summary,
    trials_table,
    tune,
    verdict,
)
from helpers.prompts import write_prompts
from helpers.tiny import make_tiny_target

# --- what decides


def test_the_interval_is_students_for_the_mean_logarithm():
    generator = np.random.default_rng(0)
    first = generator.uniform(90, 110, 7)
    second = first * generator.uniform(0.95, 1.15, 7)
    ratio = paired_ratio(list(first), list(second))
    expected = ttest_1samp(np.log(second / first), 0.0).confidence_interval(0.95)
    assert math.log(ratio["low"]) == pytest.approx(expected.low) and math.log(
        ratio["high"]
    ) == pytest.approx(expected.high)
    assert ratio["value"] == pytest.approx(np.prod(second / first) ** (1 / 7))
    swapped = paired_ratio(list(second), list(first))
    assert swapped["low"] == pytest.approx(1 / ratio["high"])
    assert noise_bound({"value": 1.0, "low": 0.8, "high": 1.1}) == 1.25


def test_equals_are_seldom_kept_and_the_interval_holds():
    """A thousand searches in which nothing helps, at the noise of a busy machine: the interval
    misses 1 about as often as it says.
    """
    generator = np.random.default_rng(1)
    rounds = generator.lognormal(0, 0.1, (1000, 2, 2, 6))  # [searches, measure, side, round]
    ratios = [
        {m: paired_ratio(*pair) for m, pair in zip(("prefill", "decode"), both)} for both in rounds
    ]
    missed = sum(not r["prefill"]["low"] < 1 < r["prefill"]["high"] for r in ratios)
    assert 30 <= missed <= 72  # 95 % of a thousand, four standard deviations of a binomial
    kept = sum(
        verdict(r, {m: noise_bound(other[m]) for m in r})[0] for r, other in zip(ratios[1:], ratios)
    )
    assert kept < 25, "both the interval and the noise of a pair of equals have to be passed"


@pytest.mark.parametrize(
    "prefill, decode, kept, why",
    [
        ((1.10, 1.05, 1.15), (1.00, 0.98, 1.02), True, "prefill faster"),
        ((1.10, 1.05, 1.15), (0.95, 0.92, 0.98), False, "decode slower"),
        ((1.02, 1.01, 1.03), (1.00, 0.98, 1.02), False, "no more than noise"),
        ((1.10, 0.99, 1.21), (1.20, 1.10, 1.30), True, "decode faster"),
        ((1.10, 1.05, 1.15), (1.20, 1.10, 1.30), True, "prefill and decode faster"),
        ((1.00, 0.9, 1.1), (1.00, 0.9, 1.1), False, "no more than noise"),
    ],
)
def test_what_is_kept(prefill, decode, kept, why):
    ratios = {
        m: dict(zip(("value", "low", "high"), r))
        for m, r in (("prefill", prefill), ("decode", decode))
    }
    assert verdict(ratios, {"prefill": 1.04, "decode": 1.04}) == (kept, why)


def test_a_confirmation_has_to_gain_more_than_the_noise(data, tmp_path, monkeypatch):
    """The real search with measurements that are given: two equal servers are 6 % apart, the change
    gains 10 % in its trial and 2 % in new servers.
    """
    gains = iter([1.06, 1.10, 1.02])
    monkeypatch.setattr(Search, "_rows_of", lambda self, config: Rows([], ()))
    monkeypatch.setattr(
        Search,
        "_measure",
        lambda self, first, second, reference, early: (
            {
                m: ([100.0, 100.1, 99.9], [100 * g, 100.1 * g, 99.9 * g])
                for g in [next(gains)]
                for m in ("prefill", "decode")
            },
            {},
        ),
    )
    for name in ("ahead", "ready", "close"):
        monkeypatch.setattr(Bench, name, lambda self, *_: None)
    monkeypatch.setattr(Bench, "alive", lambda self, side: True)
    config = Config.create(
        run_name="t",
        target=str(make_tiny_target(tmp_path / "tiny")),
        boundaries="[1,2]",
        prompt_set=str(write_prompts(tmp_path / "prompts.jsonl", 6, 1)),
        max_length=64,
        max_total_tok=2048,
        context_tok=256,
        tune_try="server_env:THP_MEM_ALLOC_ENABLE=1",
        tune_minutes=60,
    )
    result = tune(config, load_target(config.target), load_prompts(config.prompt_path))
    assert (
        [r["state"] for r in result["trials"]] == ["noise", "kept", "not kept"]
        and result["kept"] == {"server_env": "THP_MEM_ALLOC_ENABLE=1"}
        and not result["helped"]
    )
    assert (
        result["trials"][2]["reason"] == "no more than noise"
        and not (config.tune_dir / "tuned.yaml").exists()
    )


def test_rows_that_differ_are_refused():
    config, step = Config(), torch.finfo(torch.bfloat16).eps
    states = [{2: torch.randn(20, 32), 15: torch.randn(20, 32)} for _ in range(3)]
    reference = Rows(states, (0.0, 0.0))
    rounded = [{b: rows * (1 + step) for b, rows in sample.items()} for sample in states]
    assert _check_rows(reference, Rows(rounded, (0.0, 0.0)), config)["distance"] == pytest.approx(
        (step, step), rel=1e-3
    )
    for change in (
        lambda rows: rows.roll(1, 0),
        lambda rows: rows * 1.02,
        lambda rows: torch.where(torch.arange(20)[:, None] < 3, 0.0, rows),
        lambda rows: rows * math.nan,
    ):
        wrong = [states[0], {**states[1]}, states[2]]
        wrong = [{2: change(sample[2]), 15: sample[15]} for sample in wrong]
        with pytest.raises(Exception, match="captured rows differ"):
            _check_rows(reference, Rows(wrong, (0.0, 0.0)), config)
    assert _check_rows(
        Rows(states, (0.011, 0.011)),
        Rows([{b: r * 1.02 for b, r in s.items()} for s in states], (0.0, 0.0)),
        config,
    ), "another batch does as much"
    assert moved(states, states) == (0.0, 0.0)


def test_what_may_be_tried():
    wanted = "max_prefill_tok:2048,4096 server_args:'--stream-interval 8' server_env:A=1,A=2"
    assert options(Config(tune_try=wanted)) == [
        ("max_prefill_tok", 2048),
        ("max_prefill_tok", 4096),
        ("server_args", "--stream-interval 8"),
        ("server_env", "A=1"),
        ("server_env", "A=2"),
    ]
    for wrong, said in (
        ("dtype:float32", "leave what is captured"),
        ("boundaries:1", "leave what is captured"),
        ("threads:x", "leave what is captured"),
        ("server_env", "no value for server_env"),
        ("server_args:'--x", "closed quotation marks"),
        ("max_prefill_tok:many", "max_prefill_tok = 'many'"),
        ("max_prefill_tok:100", "at least max_length"),
        ("server_args:--disable-radix-cache", "--disable-radix-cache"),
        ("server_env:NCCL_PROTO", "variables such as"),
    ):
        with pytest.raises(EyasError, match=said):
            options(Config(tune_try=wrong))
    usual = options(Config())
    assert {name for name, _ in usual} == set(TUNABLE) - {"max_total_tok"}
    texts = " ".join(value for name, value in usual if name in TEXTS)
    for tried in ("--stream-interval", "THP_MEM_ALLOC_ENABLE", "OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        assert tried in texts
    eight = str(options(Config(device="cuda", tensor_parallel=8)))
    for tried in ("PROTO", "ALGO", "MIN_NCHANNELS", "MAX_NCHANNELS"):
        assert f"NCCL_{tried}=" in eight
    assert "--enable-nccl-nvls" in eight and "--disable-custom-all-reduce" in eight
    assert "nccl" not in str(options(Config(device="cuda"))).lower()


def test_what_is_tried_adds_to_the_flags_and_variables_of_the_profile():
    config = Config(server_args="--attention-backend fa3", server_env="A=1 B=2")
    kept = _with_change(config, {}, "server_args", "--stream-interval 8")
    assert kept == {"server_args": "--attention-backend fa3 --stream-interval 8"}
    kept = _with_change(config, kept, "server_env", "B=3")
    assert kept["server_env"] == "A=1 B=3", "the same variable has the new value"
    kept = _with_change(config, kept, "server_args", "--attention-backend flashmla")
    assert kept["server_args"] == "--attention-backend flashmla --stream-interval 8"


# --- the command


def test_the_command_for_eight_gpus(capsys):
    assert main(["server", "command", "--profile", "kimi-k2.5", "--blocks", "61"]) == 0
    text = capsys.readouterr().out
    words = shlex.split(text.replace("\\\n", " "))
    start = words.index("python")
    variables, flags = dict(word.split("=", 1) for word in words[:start]), words[start:]
    assert (
        flags[:3] == ["python", "-m", "sglang.launch_server"]
        and variables["SGLANG_PLUGINS"] == "eyas_capture"
        and '"boundaries": [3, 31, 59, 61]' in variables["EYAS_CAPTURE"]
    )
    assert "OMP_NUM_THREADS" not in variables and "SGLANG_PLATFORM" not in variables
    value = {
        name: flags[flags.index(name) + 1]
        for name in (
            "--model-path",
            "--tp-size",
            "--device",
            "--mem-fraction-static",
            "--max-prefill-tokens",
            "--chunked-prefill-size",
        )
    }
    config = Config.load("kimi-k2.5")
    assert value == {
        "--model-path": "models/Kimi-K2.5",
        "--tp-size": "8",
        "--device": "cuda",
        "--mem-fraction-static": "0.8",
        "--max-prefill-tokens": str(config.max_prefill_tok),
        "--chunked-prefill-size": "-1",
    }
    for switch in ("--disable-radix-cache", "--disable-overlap-schedule", "--trust-remote-code"):
        assert switch in flags
    from sglang.srt.server_args import ServerArgs  # its own parser takes every flag

    parser = __import__("argparse").ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(flags[3:])
    assert parsed.tp_size == 8 and parsed.trust_remote_code


def test_settings_reach_the_command():
    folder = ROOT / "models"
    changed = Config(
        device="cuda",
        tensor_parallel=8,
        server_env="NCCL_PROTO=LL128 NCCL_ALGO=Tree NCCL_MIN_NCHANNELS=8 NCCL_MAX_NCHANNELS=16",
        server_args="--enable-nccl-nvls --disable-custom-all-reduce --attention-backend flashmla "
        "--cuda-graph-max-bs-decode 32 --mem-fraction-static=0.8",
    )
    command, environment = server_command(changed, folder, (3,), 1, folder)
    assert {
        name: environment.get(name)
        for name in ("NCCL_PROTO", "NCCL_ALGO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")
    } == {
        "NCCL_PROTO": "LL128",
        "NCCL_ALGO": "Tree",
        "NCCL_MIN_NCHANNELS": "8",
        "NCCL_MAX_NCHANNELS": "16",
    }
    for name, value in (
        ("--attention-backend", "flashmla"),
        ("--cuda-graph-max-bs-decode", "32"),
        ("--mem-fraction-static", "0.8"),
    ):
        assert command[command.index(name) + 1] == value
    assert "--enable-nccl-nvls" in command and "--disable-custom-all-reduce" in command
    plain, untouched = server_command(Config(device="cuda"), folder, (3,), 1, folder)
    assert not any(name.startswith("NCCL") for name in untouched) and not {
        "--attention-backend",
        "--mem-fraction-static",
        "--enable-nccl-nvls",
        "--disable-custom-all-reduce",
    } & set(plain)
    command, cpu = server_command(
        Config(
            server_env="OMP_NUM_THREADS=3 GOMP_SPINCOUNT=0 THP_MEM_ALLOC_ENABLE=1",
            server_args="--stream-interval 8 --attention-backend none-such",
        ),
        folder,
        (3,),
        1,
        folder,
    )
    assert (cpu["OMP_NUM_THREADS"], cpu["GOMP_SPINCOUNT"], cpu["THP_MEM_ALLOC_ENABLE"]) == (
        "3",
        "0",
        "1",
    )
    assert (
        command[command.index("--stream-interval") + 1] == "8" and "--stream-interval" not in plain
    )
    backends = [command[n + 1] for n, word in enumerate(command) if word == "--attention-backend"]
    assert backends == ["none-such"], "the profile's, in the place of torch_native"
    assert (
        server_command(Config(), folder, (3,), 1, folder)[1]
        .keys()
        .isdisjoint({"GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE"})
    )


# Stays: on a machine with GPUs nothing is missing that could be said.
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said where there is no GPU")
def test_a_gpu_that_is_not_there_is_said_before_anything_starts(data, capsys):
    with pytest.raises(
        EyasError, match="tensor_parallel = 8.*sees 0 GPUs.*python -m eyas server command"
    ):
        server_up(Config.load("kimi-k2.5"))
    assert (
        main(["server", "up", "-p", "device", "cuda"]) == 2
        and "sees 0 GPUs" in capsys.readouterr().err
    )
    assert not (data / "runs").exists()


# --- what is written


def made_result(helped: bool) -> dict:
    ratio = {"value": 1.2, "low": 1.1, "high": 1.31, "level": 0.95}
    trial = {
        "prefill": {"kept": [1.0], "tried": [1.2], "ratio": ratio},
        "decode": {"kept": [1.0], "tried": [1.2], "ratio": ratio},
        "seconds": 30.0,
        "reason": "",
    }
    trials = [
        {**trial, "kind": "noise", "kept": {}, "tried": {}, "state": "noise"},
        {
            **trial,
            "kind": "change",
            "kept": {},
            "tried": {"max_prefill_tok": 2048},
            "state": "kept",
            "reason": "prefill faster",
        },
        {
            "kind": "change",
            "kept": {"max_prefill_tok": 2048},
            "tried": {"server_args": "--stream-interval 8", "max_prefill_tok": 2048},
            "state": "refused",
            "reason": "the server died\nlog",
            "seconds": 9.0,
        },
        {
            **trial,
            "kind": "confirmation",
            "kept": {},
            "tried": {"max_prefill_tok": 2048},
            "state": "kept" if helped else "not kept",
        },
    ]
    measured = {
        m: {"baseline": 63.6, "tuned": 90.0, "ratio": ratio, "noise": 1.03, "drift": 0.99}
        for m in ("prefill", "decode")
    }
    return {
        "run_name": "mine",
        "kept": {"max_prefill_tok": 2048},
        "helped": helped,
        "measured": measured,
        "ended": "everything tried",
        "trials": trials,
        "seconds": 99.0,
        "device": "cpu",
        "cores": 2,
        "sglang": "0.5.23",
        "target": "t",
    }


def test_the_profile_that_is_written_loads(data, tmp_path):
    config = Config.load("reference", run_name="mine", learning_rate=1e-5, tune_minutes=1.0)
    path = write_text(tmp_path / "tuned.yaml", profile_text(config, made_result(True)))
    assert (
        "63.6 -> 90.0 tok/s, ratio 1.200 [1.100, 1.310]" in path.read_text()
        and "max_prefill_tok 0 -> 2048" in path.read_text()
    )
    loaded = Config.load(str(path))
    assert loaded.max_prefill_tok == 2048 and loaded.tune_minutes == Config().tune_minutes
    assert {**loaded.__dict__, "max_prefill_tok": 0, "tune_minutes": 1.0} == config.__dict__


def test_what_a_result_says(data):
    config = Config(run_name="mine")
    assert find_result(config) is None and "python -m eyas study server" in how_to_tune(config)
    write_json(config.tune_dir / "result.json", made_result(True))
    assert find_result(config) is None, "not sealed"
    write_json(config.tune_dir / "result.json", seal(made_result(True)))
    found = find_result(config)
    assert summary(found).startswith(
        "Kept: max_prefill_tok 2048. 2 changes tried, 1 refused, 1.6 minutes"
    )
    assert summary(made_result(False)).startswith(
        "No setting helped. (max_prefill_tok looked better in its trial and was not confirmed.)"
    )
    table = trials_table(found)
    assert (
        list(table["change"])
        == [
            "the same settings twice",
            "max_prefill_tok 2048",
            "server_args --stream-interval 8",
            "all that was kept, in new servers",
        ]
        and table["why"][2] == "the server died ... log"
    )
    ax = plot_tuning(table, {m: r["noise"] for m, r in found["measured"].items()})
    assert len(ax.get_yticks()) == 4


# --- the walk over the options, with trials whose outcome is given


class Given(Search):
    """Trials of a table of speeds: settings -> speed; noise is 1 %."""

    def __init__(self, config, speeds):
        self.config, self.folder, self.records, self.side, self.speeds = (
            config,
            config.tune_dir,
            [],
            0,
            speeds,
        )

    def trial(self, kind, kept, tried, noise=None):
        ratio = (
            {"value": 1.0, "low": 0.99, "high": 1.01}
            if kind == "noise"
            else dict.fromkeys(("value", "low", "high"), self.speeds(tried) / self.speeds(kept))
        )
        state = (
            "kept"
            if kind == "change" and verdict({"prefill": ratio, "decode": ratio}, noise)[0]
            else "not kept"
        )
        record = {
            "kind": kind,
            "kept": kept,
            "tried": tried,
            "state": state,
            "reason": "",
            "seconds": 60.0,
            "prefill": {"ratio": ratio},
            "decode": {"ratio": ratio},
        }
        self.records.append(record)
        return record


def test_the_walk_combines_what_helps_and_ends(data, capsys):
    def speed(
        settings,
    ):  # each helps, together more; a concurrency that helps only with the other one
        return (
            1
            + 0.1 * (settings.get("max_prefill_tok") == 2048)
            + 0.2
            * ("A=1" in settings.get("server_env", ""))
            * (1 + (settings.get("concurrency") == 32))
        )

    config = Config(
        tune_minutes=1000,
        tune_try="concurrency:32 max_prefill_tok:2048,4096 server_env:A=1",
    )
    kept, noise, ended = (search := Given(config, speed)).walk()
    assert (
        kept == {"max_prefill_tok": 2048, "server_env": "A=1", "concurrency": 32}
        and ended == "everything tried"
        and noise["decode"] == pytest.approx(1 / 0.99)
    )
    changes = [(r["kept"], r["tried"]) for r in search.records if r["kind"] == "change"]
    assert all(changes.count(change) == 1 for change in changes), (
        "each once, also where it is tried in vain in two passes"
    )
    assert search.records[1]["state"] == "not kept" and search.records[1]["tried"] == {
        "concurrency": 32
    }, "it is tried again beside the others"
    assert Given(Config(tune_minutes=4, tune_try=config.tune_try), speed).walk()[::2] == (
        {"max_prefill_tok": 2048},
        "4 minutes spent (tune_minutes)",
    )
    only_noise = Given(Config(tune_minutes=0), speed).walk()
    assert only_noise[::2] == ({}, "0 minutes spent (tune_minutes)")
    assert Given(config, lambda settings: 1.0).walk()[0] == {}


def test_a_walk_in_circles_ends(data, capsys):
    """Whatever is tried looks better than what is there."""
    search = Given(Config(tune_minutes=1000, tune_try="concurrency:8,32"), None)
    seen = iter(range(1, 1000))
    search.speeds = lambda settings: float(next(seen)) ** -1
    assert search.walk()[2] == "everything tried" and len(search.records) < 6


def test_tokens_that_come_in_one_piece_are_asked_for_again(monkeypatch):
    """On a busy machine: the time between the first piece and the last is then no measure."""
    bench = Bench(
        Config(tune_new_tok=8, boundaries=(1, 2)),
        Target(Path(), "t", 2, 8, 16, 64, 1e-5, "", ""),
        [],
    )
    pieces = iter([[(3.0, 8)], [(4.0, 1), (4.5, 8)], *[[(5.0, 8)]] * 5])
    monkeypatch.setattr(bench, "_stream", lambda server: next(pieces))
    assert bench.decode(None) == 14
    with pytest.raises(
        SampleError, match="all 8 tokens came in one piece, 5 times; raise tune_new_tok"
    ):
        bench.decode(None)


# --- the search itself, with real servers


@pytest.mark.slow
@pytest.mark.server
def test_a_killed_search_goes_on_and_a_setting_that_fails_is_refused(data, tmp_path):
    """Noise, then two trials: one changes the batches, one names attention that the server does not
    have. Killed in the first one.
    """
    folder = make_tiny_target(tmp_path / "tiny")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 6, 1)
    settings = {
        "run_name": "t",
        "target": folder,
        "boundaries": "[1,2]",
        "prompt_set": prompts,
        "max_length": 64,
        "max_total_tok": 2048,
        "context_tok": 256,
        "threads": 1,
        "concurrency": 2,
        "tune_minutes": 60,
        "tune_rounds": 3,
        "tune_samples": 4,
        "tune_new_tok": 32,
        "tune_try": "max_prefill_tok:64 server_args:'--attention-backend none-such'",
    }
    command = [
        sys.executable,
        "-m",
        "eyas",
        "study",
        "server",
        *(word for name, value in settings.items() for word in ("-p", name, str(value))),
    ]
    environment = os.environ | {
        "EYAS_DATA": str(data),
        "PYTHONPATH": str(ROOT / "lib"),
        "OMP_NUM_THREADS": "1",
    }
    folder = data / "runs" / "t" / "tune"
    said = tmp_path / "said"
    with open(said, "wb") as file:
        process, end = (
            subprocess.Popen(command, env=environment, stdout=file, stderr=file),
            time.monotonic() + 900,
        )
    try:
        while not list(folder.glob("noise-*.json")):
            assert process.poll() is None and time.monotonic() < end, (
                f"it ended before it could be killed: {said.read_text()}"
            )
            time.sleep(0.05)
    finally:
        process.kill()  # its servers are tied to it
        process.wait()
    before = read_json(next(folder.glob("noise-*.json")))
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = read_json(folder / "result.json")
    assert result["trials"][0] == before, "not measured again"
    assert [t["kind"] for t in result["trials"][:3]] == ["noise", "change", "change"] and result[
        "ended"
    ] == "everything tried"
    assert (
        result["trials"][1]["state"] in ("kept", "not kept")
        and len(result["trials"][1]["prefill"]["tried"]) == 3
    )
    assert (
        result["trials"][2]["state"] == "refused" and "none-such" in result["trials"][2]["reason"]
    )
    assert (folder / "tuned.yaml").is_file() == result["helped"] and (
        "No setting helped" in ended.stdout
    ) != result["helped"]
    assert not list((data / "runs").glob("t-tune-*")), "its servers and their folders are gone"

    config = Config.create(
        **{
            name: str(value) if not isinstance(value, int) else value
            for name, value in settings.items()
        }
    )
    with pytest.raises(EyasError, match="begun with tune_rounds = 3, now 4"):
        tune(
            Config.create(**{**config.__dict__, "tune_rounds": 4}),
            load_target(config.target),
            load_prompts(config.prompt_path),
        )


def test_the_kimi_profile_says_what_eight_gpus_need():
    config = Config.load("kimi-k2.5")
    assert config.tensor_parallel == 8 and not config.tune_together and config.trust_remote_code
    tried = " ".join(value for name, value in options(config) if name in TEXTS)
    for name in ("PROTO", "ALGO", "MIN_NCHANNELS", "MAX_NCHANNELS"):
        assert f"NCCL_{name}=" in tried
    for flag in ("--enable-nccl-nvls", "--disable-custom-all-reduce", "--attention-backend fa3"):
        assert flag in tried
    assert "--mem-fraction-static" in config.server_args
