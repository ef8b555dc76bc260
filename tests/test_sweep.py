"""The layer study: its search and its numbers against what is known by hand, and a real sweep
(papermill, Ray) that is killed, goes on, and survives a failure.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import ROOT, read_json, write_json
from eyas.inspection.stats import Tokens
from eyas.intervals import difference_interval
from eyas.models.target import Head, load_target
from eyas.report.parameters import settings_read
from eyas.report.run import NOTEBOOKS
from eyas.store.reader import Rows, Store
from eyas.studies import boundaries as layers
from eyas.studies import sweep
from eyas.studies.boundaries import (
    Foresight,
    compare,
    forward_selection,
    label,
    named_choices,
    pair_map,
    shortlist,
    stored_bytes,
)
from eyas.studies.sweep import Sweep, keep
from helpers import stores
from helpers.sweeps import FakeStore, made_counts
from helpers.tiny import make_tiny_target

N_BLOCKS, H = 8, 64

# ---- the search


def test_forward_selection_finds_what_an_exhaustive_search_finds():
    """Where what a boundary adds does not depend on the others, greedy is exact: every round's
    choice is the best set of its size.
    """
    worth = dict(zip(range(8), np.random.default_rng(0).permutation(8) + 1.0))

    def value(choice):
        return 1 + sum(worth[b] for b in choice) / 100

    asked = []

    def measure(options):
        asked.extend(options)
        return {option: value(option) for option in options}

    path = forward_selection(range(8), measure, lambda choice: 0.0, tried=8, size=4)
    for size, row in enumerate(path[path["chosen"]].itertuples(), start=1):
        assert row.boundaries == max(
            itertools.combinations(range(8), size), key=value
        ) and row.value == value(row.boundaries)
    assert len(path[path["chosen"]]) == 4 and len(asked) == 8 + 7 + 6 + 5
    # a right guide: one training a round gives the same path, but for neighbours, which are put
    # behind
    asked.clear()
    guided = forward_selection(range(8), measure, value, tried=1, size=4)
    assert list(guided["boundaries"]) == list(path[path["chosen"]]["boundaries"]) == asked


def test_forward_selection_ends_where_nothing_helps_and_passes_over_failures():
    values = {(1,): 1.2, (2,): 1.3, (3,): 1.1, (1, 2): 1.25, (2, 3): 1.29}
    path = forward_selection(
        (1, 2, 3),
        lambda options: {o: values[o] for o in options if o in values},
        lambda choice: 0.0,
        tried=3,
        size=3,
    )
    assert path[path["chosen"]]["boundaries"].tolist() == [(2,)] and set(path["boundaries"]) == set(
        values
    )
    # (2,) fails; (1,) was not asked for and was measured all the same
    path = forward_selection(
        (1, 2, 3),
        lambda options: {(1,): 1.2},
        {(2,): 3, (3,): 2, (1,): 1, (1, 2): 1, (1, 3): 1}.get,
        tried=2,
        size=3,
    )
    assert [(row.boundaries, row.asked, row.chosen) for row in path.itertuples()] == [
        ((1,), False, True)
    ]
    assert forward_selection((1, 2), lambda options: {}, lambda choice: 0.0, tried=2, size=2).empty


def test_shortlist_has_no_neighbours_while_there_are_others():
    guide = {(b,): float(b) for b in range(10)}.get
    assert shortlist([(b,) for b in range(10)], guide, 3) == [(9,), (7,), (5,)]
    assert shortlist([(8,), (9,)], guide, 3) == [(9,), (8,)]
    pairs = [tuple(sorted({4, b})) for b in range(10) if b != 4]
    assert shortlist(pairs, sum, 2) == [(4, 9), (4, 7)]


def test_named_choices():
    names = named_choices(30)
    assert len(names) >= 12 and names[2, 15, 27] == "default" and next(iter(names)) == (2, 15, 27)
    assert {"early", "middle", "late", "spread", "single", "pair", "four", "five"} <= set(
        names.values()
    )
    assert all(
        list(choice) == sorted(set(choice)) and 0 <= choice[0] and choice[-1] <= 30
        for choice in names
    )
    assert all(choice[-1] <= N_BLOCKS for choice in named_choices(N_BLOCKS)) and (
        2,
        4,
        5,
    ) in named_choices(N_BLOCKS)
    with pytest.raises(EyasError, match="7 or more blocks"):
        named_choices(6)


def test_what_can_be_served_and_what_it_costs(target):
    assert layers.not_servable((2, 4, 5), target) == "" == layers.not_servable((0, 7), target)
    assert "boundary 8" in layers.not_servable((2, 8), target) and "alone" in layers.not_servable(
        (4,), target
    )
    assert stored_bytes((2, 15, 27), 30, 576, "bfloat16") == 4 * 576 * 2 + 8 + 1
    assert (
        stored_bytes((10, 20, 30), 30, 576, "bfloat16") == 3 * 576 * 2 + 9
    )  # the last state is stored anyway
    assert stored_bytes((2,), 30, 576, "float8_e4m3fn") == 2 * (576 + 4) + 9


def test_foresight_finds_the_boundaries_that_tell_the_next_state():
    """The next token's last state is a linear map of boundary 1's state, of boundary 2's, and of
    the next token's embedding: R² grows to 1 as they come together.
    """
    g = torch.Generator().manual_seed(0)
    n_samples, length, h, vocab = 60, 24, 12, 50
    n = n_samples * length
    ids, embedding = (
        torch.randint(0, vocab, (n,), generator=g),
        torch.nn.functional.normalize(torch.randn(vocab, h, generator=g), dim=-1),
    )
    states = {
        b: torch.nn.functional.normalize(torch.randn(n, h, generator=g), dim=-1) for b in range(4)
    }
    maps = torch.randn(3, h, h, generator=g)
    last = torch.randn(n, h, generator=g)
    last[1:] = (
        states[1][:-1] @ maps[0] + 2 * states[2][:-1] @ maps[1] + embedding[ids[1:]] @ maps[2]
    )
    tokens = Tokens(
        [str(i) for i in range(n_samples)],
        torch.arange(n_samples).repeat_interleave(length),
        torch.arange(length).repeat(n_samples),
        ids,
        torch.ones(n, dtype=torch.bool),
        states | {4: last},
    )

    class Plain(Head):
        def normed(self, states):
            return states

    said = Foresight(
        tokens, Plain(torch.ones(h), torch.randn(vocab, h, generator=g), 1e-5), embedding, seed=0
    )
    assert said((1, 2)) > 0.98 and said((1, 2, 3)) > 0.97
    assert said((0,)) < 0.35 and abs(said((0,)) - said((3,))) < 0.05  # the embedding alone
    assert said((0,)) + 0.05 < said((1,)) < said((2,)) < 0.9
    assert said.tok[1] <= layers.TUNE_TOK and said.tok[2] <= layers.SCORE_TOK


# ---- the numbers


def test_differences_are_paired_by_sample_and_pool_the_seeds_that_both_have():
    rng = np.random.default_rng(0)
    steps = rng.integers(10, 30, 40)
    base = rng.integers(0, 10, 40)
    counts = made_counts(
        ("2 4 5", 0, base, steps),
        ("2 4 5", 1, base + 1, steps),
        ("1 2", 0, base + 2, steps),
        ("3", 0, base, steps),
    )
    found = compare(counts, "1 2", "2 4 5", seed=0)
    assert (
        found["seeds"] == [0]
        and found["value"] == pytest.approx(80 / steps.sum())
        and found["by_seed"] == [found["value"]]
    )
    expected = difference_interval(
        (base + 2 + steps, steps), (base + steps, steps), 0
    )  # the same samples side by side, whatever order the rows came in
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
    assert (
        found["high"] - found["low"] < 0.2 * found["value"] + 0.05
    )  # not the spread of the samples themselves
    same = compare(counts, "3", "2 4 5", seed=0)
    assert (same["value"], same["low"], same["high"]) == (0, 0, 0)
    top, bottom = layers.pooled(counts, "2 4 5", [0, 1])
    assert (top == 2 * base + 1 + 2 * steps).all() and (bottom == 2 * steps).all()


def test_table_and_sentence(target):
    steps = np.full(30, 20)
    default, better, single, last = (np.full(30, a) + np.arange(30) % 3 for a in (6, 8, 7, 9))
    rows = [("2 4 5", s, default + s % 2, steps) for s in range(3)] + [
        ("1 7", s, better + s % 2, steps) for s in range(3)
    ]
    counts = made_counts(*rows, ("4", 0, single, steps), ("5 8", 0, last, steps))
    table = layers.choices_table(
        counts, target, FakeStore, {(2, 4, 5): "default", (4,): "single"}, seed=0
    ).set_index("name")
    assert list(table.index) == ["5 8", "1 7", "4", "2 4 5"] and list(table["kind"]) == [
        "forward",
        "forward",
        "single",
        "default",
    ]
    assert (
        table.loc["1 7", "difference"] == pytest.approx(0.1)
        and table.loc["2 4 5", "difference"] == 0
    )
    assert table.loc["1 7", "acceptance_length"] == pytest.approx(
        1 + (better.sum() * 3 + 30) / (3 * 600)
    )
    assert (
        list(table["seeds"]) == [1, 3, 1, 3]
        and list(table["stored_bytes"]) == [2 * 128 + 9, 3 * 128 + 9, 2 * 128 + 9, 4 * 128 + 9]
        and list(table["fed_bytes"]) == [256, 256, 128, 384]
    )
    text = layers.sentence(table.reset_index(), counts, "tiny", seed=0)
    assert text.startswith(
        "For tiny, feed the drafter from boundaries 1 7: 1.467 tokens a verify step "
        "against 1.367 from the default 2 4 5, +0.100 [+0.100, +0.100]"
    )
    assert (
        "30 held-out samples, 3 seeds: +0.100, +0.100, +0.100" in text
        and "best of 2 tried" in text
        and "393 bytes a token in the store, the default 521" in text
    )
    assert (
        "boundary 8" not in text
    )  # the one that cannot be served has one seed, so it is no contender
    worse = counts.assign(
        accepted=np.where(counts["name"] == "1 7", counts["accepted"] - 4, counts["accepted"])
    )
    assert "the default 2 4 5 is the best choice tried" in layers.sentence(
        layers.choices_table(worse, target, FakeStore, {(2, 4, 5): "default"}, seed=0),
        worse,
        "tiny",
        seed=0,
    )
    equal = counts.assign(
        accepted=np.where(counts["name"] == "1 7", counts["accepted"] - 2, counts["accepted"])
    )
    assert "clearly better" in layers.sentence(
        layers.choices_table(equal, target, FakeStore, {(2, 4, 5): "default"}, seed=0),
        equal,
        "tiny",
        seed=0,
    )
    positions = layers.by_position(counts, ["1 7", "4"], seed=0).set_index(["name", "position"])
    assert (
        positions.loc[("4", 1), "value"] == pytest.approx(single.sum() / 600)
        and len(positions) == 2
    )


def test_contenders():
    found = {(2, 4, 5): 1.3, (1, 7): 1.4, (8,): 1.5, (3, 8): 1.45, (3,): 1.2, (2, 7): 1.35}
    unservable = {(8,), (3, 8), (3,)}
    assert layers.contenders(found, (2, 4, 5), 2, unservable) == [(2, 4, 5), (1, 7), (2, 7), (8,)]
    assert layers.contenders(found | {(8,): 1.1, (3, 8): 1.1}, (2, 4, 5), 1, unservable) == [
        (2, 4, 5),
        (1, 7),
    ]


def test_pair_map_is_empty_where_nothing_was_trained():
    table = pd.DataFrame(
        {
            "name": ["2", "7", "2 7", "2 4", "2 4 5"],
            "boundaries": [1, 1, 2, 2, 3],
            "acceptance_length": [1.1, 1.2, 1.4, 1.3, 1.9],
        }
    )
    at, lengths = pair_map(table)
    assert at == [2, 4, 7]
    assert np.array_equal(
        lengths,
        np.array([[1.1, 1.3, 1.4], [1.3, np.nan, np.nan], [1.4, np.nan, 1.2]]),
        equal_nan=True,
    )


# ---- the sweep


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(
            make_tiny_target(
                tmp_path_factory.mktemp("targets") / "tiny", n_blocks=N_BLOCKS, hidden=H
            )
        )
    )


def write_store(config: Config, target) -> Store:
    manifest = {
        "target": {
            "name": target.name,
            "fingerprint": target.fingerprint,
            "rms_norm_eps": target.rms_norm_eps,
        },
        "boundaries": list(range(N_BLOCKS + 1)),
        "dtype": "bfloat16",
        "hidden_size": H,
        "prompts": {"hash": None},
    }
    samples, g = [], torch.Generator().manual_seed(0)
    for i in range(12):
        length = int(torch.randint(12, 30, (1,), generator=g))
        states = {b: torch.randn(length, H, generator=g).bfloat16() for b in range(N_BLOCKS + 1)}
        samples.append(
            Rows(
                f"s{i}",
                "heldout" if i % 4 == 3 else "train",
                "chat",
                torch.randint(0, 60, (length,), generator=g),
                torch.arange(length) >= length // 2,
                states,
            )
        )
    return stores.write_store(config.store_dir, manifest, target.head(), samples)


def config_for(target, **values) -> Config:
    return Config.create(
        run_name="tiny",
        target=str(target.folder),
        threads=1,
        draft_vocab_size=40,
        epochs=1.0,
        batch_tok=64,
        without_parity=True,
        **values,
    )


def test_identity_of_a_training(data, target):
    """What decides the result, and nothing else."""
    config = config_for(target)
    store = write_store(config, target)
    first = Sweep(config, store).member({"boundaries": (2, 4), "seed": 0})
    assert (
        first.parameters["boundaries"] == [2, 4]
        and first.parameters["member"] == first.id
        and first.folder.parent == config.sweep_dir
        and str(first) == "boundaries 2 4, seed 0"
    )
    assert (
        Sweep(config_for(target, checkpoint_steps=7), store)
        .member({"boundaries": [2, 4], "seed": 0})
        .id
        == first.id
    )
    for other, settings in (
        (config, {"seed": 1}),
        (config, {"boundaries": (2, 5)}),
        (config_for(target, learning_rate=1e-3), {}),
        (config_for(target, speculative_num_steps=4), {}),
    ):
        assert (
            Sweep(other, store).member({"boundaries": (2, 4), "seed": 0} | settings).id != first.id
        )
    with pytest.raises(EyasError, match="does not declare the setting concurrency"):
        Sweep(config, store).member({"concurrency": 3})
    with Sweep(config, store), pytest.raises(EyasError, match="is running"), Sweep(config, store):
        pass
    plain, wordy, other = (
        "def f(x):\n    return x + 1",
        'def f(x):\n    """Adds."""\n    return (x\n            + 1)  # one',
        "def f(x):\n    return x + 2",
    )
    assert sweep._without_words(plain) == sweep._without_words(wordy) != sweep._without_words(other)


def test_notebook_06_hands_every_setting_of_a_training_on():
    assert settings_read(sweep.NOTEBOOK) - {"member", "boundaries"} <= settings_read(
        NOTEBOOKS / "06_layer_choice.ipynb"
    )


def test_kept_counts_and_problems(data, target):
    config = config_for(target)
    member = Sweep(config, write_store(config, target)).member({"boundaries": (2, 4), "seed": 0})
    assert not member.finished and member.record["state"] == "not run" and member.problem() == ""
    with pytest.raises(EyasError, match="not finished"):
        member.counts()
    own = Config.create(**member.parameters)
    (own.drafter_dir / "checkpoints").mkdir(parents=True)
    counts = pd.DataFrame({"id": ["a"], "accepted": [1], "verify_steps": [2]})
    keep(own, counts)
    assert not (own.drafter_dir / "checkpoints").exists()
    for code in ("another", member.identity["code"]):
        write_json(
            member.folder / "run.json",
            {"state": "running", "process": None, "identity": member.identity | {"code": code}},
        )
        with (
            pytest.raises(EyasError, match="edited while the sweep ran")
            if code == "another"
            else contextlib.nullcontext()
        ):
            keep(own, counts)
    write_json(
        member.folder / "run.json",
        {
            "state": "running",
            "process": {"pid": 2**22 + 1, "created": 0.0},
            "exception": None,
            "duration_s": None,
        },
    )
    assert member.record["state"] == "interrupted" and not member.finished
    write_json(
        member.folder / "run.json",
        {"state": "ok", "process": None, "exception": None, "duration_s": 3.0},
    )
    assert member.finished and member.counts().equals(counts)
    runs, gathered = sweep.gather({"2 4": [member]})
    assert runs.iloc[0][["name", "boundaries", "seed", "state"]].tolist() == [
        "2 4",
        "2 4",
        0,
        "ok",
    ] and gathered.iloc[0][["id", "name", "seed"]].tolist() == ["a", "2 4", 0]


DRIVER = """
import json, sys
from eyas.config import Config
from eyas.store.reader import Store
from eyas.studies.sweep import Sweep
config = Config.create(**json.loads(sys.argv[1]))
with Sweep(config, Store.open(config.store_dir)) as sweep:
    for member in sweep.run([{"boundaries": b, "seed": 0} for b in ((2, 4), (99,), (5,), (1, 7), \
(2, 4))]):
        print(member, member.record["state"], member.problem())
"""


def started_by(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.kernel
def test_a_killed_sweep_goes_on_and_a_failure_stops_no_other(data, target, tmp_path):
    """SIGKILL of the driver after the first training that ended well; then the same again: what was
    finished is not repeated, what failed is said, nobody is left.
    """
    config = config_for(target)
    store = write_store(config, target)
    members = {
        label(b): Sweep(config, store).member({"boundaries": b, "seed": 0})
        for b in ((2, 4), (99,), (5,), (1, 7))
    }
    good = [name for name in members if name != "99"]
    values = json.dumps(
        {
            name: str(value) if isinstance(value, os.PathLike) else value
            for name, value in vars(config).items()
        }
    )
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "lib"),
        "TMPDIR": str(tmp_path),
    }  # too long for Ray's sockets
    command = [sys.executable, "-c", DRIVER, values]
    driver = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    until_s = time.monotonic() + 400
    while not any(members[name].finished for name in good):
        assert driver.poll() is None and time.monotonic() < until_s, driver.communicate()[1]
        time.sleep(0.1)
    family = started_by(driver.pid)
    names, listening = [], []
    for process in family:
        with contextlib.suppress(
            psutil.NoSuchProcess
        ):  # git, asked for the commit, has ended by now
            names.append(process.name())
            listening += [
                c.laddr.ip
                for c in process.net_connections("inet")
                if c.status == psutil.CONN_LISTEN
            ]
    assert any("raylet" in name for name in names)
    assert listening and all(
        ip.removeprefix("::ffff:") in ("127.0.0.1", "::1") for ip in listening
    ), listening
    driver.kill()
    driver.communicate()
    _, left = psutil.wait_procs(family, timeout=20)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    finished = {
        name: (members[name].record, members[name].counts_path.stat().st_mtime_ns)
        for name in good
        if members[name].finished
    }
    assert 1 <= len(finished) < 3

    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stderr
    said = again.stdout.splitlines()
    assert [line.split(", seed 0 ")[1].split()[0] for line in said] == [
        "ok",
        "failed",
        "ok",
        "ok",
        "ok",
    ] and "not [99]" in said[1]
    for name in good:
        record, counts = members[name].record, members[name].counts()
        assert (
            record["state"] == "ok"
            and record["return_code"] == 0
            and sorted(counts["id"]) == sorted(store.samples("heldout"))
            and members[name].notebook.is_file()
        )
        if name in finished:
            assert (record, members[name].counts_path.stat().st_mtime_ns) == finished[name]
    failed = members["99"].record
    assert (
        failed["state"] == "failed"
        and failed["return_code"] == 1
        and failed["exception"]["ename"] == "EyasError"
        and failed["exception"]["source"].startswith("folder = train")
    )
    assert "not [99]" in json.dumps(read_json(members["99"].notebook)) and str(
        data
    ) not in json.dumps(failed)


def test_study_needs_all_boundaries(data, target):
    config = config_for(target)
    store = write_store(config, target)
    store.manifest["boundaries"] = [2, 4, 8]
    store.boundaries = (2, 4, 8)
    with pytest.raises(EyasError, match="not 0 1 3 5 6 7; expected all from 0 to 8"):
        layers.run_study(config, store, target)
