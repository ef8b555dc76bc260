"""A profile without `boundaries`: every command takes the target's own 2, N//2, N-3.

The right ids are written out by hand here for each number of blocks.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from eyas.cli import main
from eyas.errors import EyasError
from eyas.models.boundaries import Boundaries
from eyas.models.drafter import FILE
from eyas.models.target import load_target
from eyas.store.reader import Store
from helpers.faulty import FaultyServer
from helpers.prompts import write_prompts
from helpers.tiny import make_tiny_target

OWN = {28: [2, 14, 25], 36: [2, 18, 33]}  # blocks of the target: what feeds its drafter by default
SIZES = ["--samples", "10", "--tok", "1000"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a target folder for each number of blocks."""
    parent = tmp_path_factory.mktemp("targets")
    return {n: make_tiny_target(parent / f"blocks{n}", n_blocks=n, hidden=32) for n in (4, *OWN)}


@pytest.fixture
def said(data, capsys):
    """Return a function that runs one command line and gives its exit code and its output."""

    def run(*words) -> tuple[int, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def small_run(target: Path, prompts: Path, url: str, run_name: str) -> list:
    """Return the settings of a run that extracts ten samples and trains on them for a moment."""
    settings = {
        "target": target,
        "prompt_set": prompts,
        "server_url": url,
        "run_name": run_name,
        "threads": 1,
        "without_parity": True,
        "draft_vocab_size": 40,
        "epochs": 1.0,
    }
    return [word for name, value in settings.items() for word in ("-p", name, value)]


def captured(command: str) -> list[int]:
    """Return the boundaries that a server would capture which this command starts."""
    return json.loads(re.search(r"EYAS_CAPTURE='(.*)' ", command)[1])["boundaries"]


@pytest.mark.parametrize("n_blocks", OWN)
def test_every_command_takes_the_targets_own_boundaries(said, folders, n_blocks):
    own, folder = OWN[n_blocks], folders[n_blocks]
    shown = ", ".join(map(str, own))
    assert f"default boundaries   {shown}\n" in said("doctor", "--target", folder)[1]
    assert f"default boundaries   {shown}, ids" in said("doctor", "--target", folder)[1]
    plan = said("plan", "-p", "target", folder, *SIZES)
    assert plan[0] == 0 and f"boundaries {[*own, n_blocks]}," in plan[1]
    command = said("server", "command", "-p", "target", folder)
    assert command[0] == 0 and captured(command[1]) == [*own, n_blocks]
    wide = ["-p", "extra_boundaries", "0,5"]
    assert captured(said("server", "command", "-p", "target", folder, *wide)[1]) == sorted(
        [0, 5, *own, n_blocks]
    )


@pytest.mark.parametrize("n_blocks", OWN)
def test_a_target_elsewhere_has_the_boundaries_of_its_number_of_blocks(said, n_blocks):
    elsewhere = ["-p", "target", "models/elsewhere", "--blocks", n_blocks]
    plan = said("plan", *elsewhere, "--hidden-size", 64, *SIZES)[1]
    assert f"boundaries {[*OWN[n_blocks], n_blocks]}," in plan
    assert captured(said("server", "command", *elsewhere)[1]) == [*OWN[n_blocks], n_blocks]


def test_the_embedded_targets_own_boundaries_are_2_15_27(embedded, said):
    assert "boundaries [2, 15, 27, 30]," in said("plan", "-p", "target", embedded.folder, *SIZES)[1]
    assert captured(said("server", "command", "-p", "target", embedded.folder)[1]) == [
        2,
        15,
        27,
        30,
    ]


def test_a_profile_that_names_boundaries_keeps_them(said, folders, tmp_path):
    profile = tmp_path / "mine.yaml"
    profile.write_text(f"run_name: mine\ntarget: {folders[36]}\nboundaries: [10, 20, 29]\n")
    assert "boundaries [10, 20, 29, 36]," in said("plan", "--profile", profile, *SIZES)[1]
    assert captured(said("server", "command", "--profile", profile)[1]) == [10, 20, 29, 36]
    assert (
        "boundaries [2, 18, 33, 36],"
        in said("plan", "--profile", profile, *SIZES, "-p", "boundaries", "[]")[1]
    )


@pytest.mark.parametrize("command", [["plan", *SIZES], ["server", "command"], ["server", "up"]])
def test_a_target_of_few_blocks_is_refused_with_what_to_type(said, folders, command):
    code, text = said(*command, "-p", "target", folders[4])
    assert code == 2 and "the target has 4 blocks" in text
    assert "-p boundaries '[0, 2, 3]'" in text
    if command[-1] != "up":  # what to type works
        assert said(*command, "-p", "target", folders[4], "-p", "boundaries", "[0, 2, 3]")[0] == 0


def test_sizes_of_another_target_do_not_plan_for_this_one(said, folders):
    """61 and 7,168 are Kimi-K2.5's."""
    plan = ["plan", "-p", "target", folders[36], *SIZES]
    code, text = said(*plan, "--blocks", 61, "--hidden-size", 7168)
    assert code == 2 and "--blocks 61, and blocks36 has 36" in text
    assert "neither --blocks nor --hidden-size; next: python -m eyas plan" in text
    code, text = said(*plan)
    assert code == 0 and "boundaries [2, 18, 33, 36], hidden size 32," in text


def test_extraction_and_training_take_the_same_and_record_what_they_are(
    said, data, folders, tmp_path
):
    """A store and a drafter of a profile without boundaries are those of one that names the same
    ids.
    """
    target = load_target(str(folders[36]))
    server = FaultyServer(target, tuple(range(37)), tmp_path / "spool")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8, 2)
    common = small_run(folders[36], prompts, server.url, "own")
    code, text = said("extract", *common)
    assert code == 0, text
    store = Store.open(data / "runs" / "own" / "store")
    assert store.manifest["boundaries"] == [2, 18, 33, 36]

    code, text = said("train", *common)
    assert code == 0, text
    drafter = data / "runs" / "own" / "drafter" / FILE
    with safe_open(drafter, "pt") as file:
        described = json.loads(file.metadata()["drafter"])
    assert described["record"]["settings"]["boundaries"] == [2, 18, 33]
    assert described["config"]["boundaries"] == [2, 18, 33]

    # The last checkpoint is continued by a profile that names the same, and the drafter keeps its
    # bytes
    before = drafter.read_bytes()
    assert list(drafter.parent.glob("checkpoints/step-*.pt"))
    drafter.unlink()
    code, text = said("train", *common, "-p", "boundaries", "[2, 18, 33]")
    assert code == 0 and drafter.read_bytes() == before, text
    shutil.rmtree(drafter.parent)
    code, text = said("train", *common, "-p", "boundaries", "[2, 18, 33]")
    assert code == 0 and drafter.read_bytes() == before, text

    code, text = said("data", "export", "--to", "specforge", "--out", tmp_path / "files", *common)
    assert code == 0 and "boundaries [2, 18, 33] are its layer ids [1, 17, 32]" in text, text


def test_a_store_of_other_boundaries_is_refused_with_those_that_it_has(said, folders, tmp_path):
    server = FaultyServer(load_target(str(folders[28])), tuple(range(29)), tmp_path / "spool")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8, 2)
    common = small_run(folders[28], prompts, server.url, "named")
    assert said("extract", *common, "-p", "boundaries", "[3, 14]")[0] == 0
    code, text = said("train", *common)
    assert (
        code == 2
        and "the store has boundaries [3, 14, 28], not [2, 25]" in text
        and "-p boundaries '[3, 14]'" in text
    )
    assert said("train", *common, "-p", "boundaries", "[3, 14]")[0] == 0
    code, text = said("data", "export", "--to", "specforge", "--out", tmp_path / "files", *common)
    assert code == 2 and "not [2, 25]" in text and "-p boundaries" in text
    code, text = said("extract", *common)
    assert code == 2 and "boundaries" in text


def test_the_settings_say_whose_the_default_is(said):
    lines = said("settings")[1].splitlines()
    line = next(line for line in lines if line.startswith("boundaries "))
    assert "the target's own: 2, N//2, N-3" in line and "15" not in line


def test_one_type_says_what_feeds_is_read_and_is_stored():
    boundaries = Boundaries((2, 18, 33), 36, extra=(0, 18))
    assert (boundaries.last, boundaries.with_last, boundaries.stored) == (
        36,
        (2, 18, 33, 36),
        (0, 2, 18, 33, 36),
    )
    assert Boundaries((5, 36), 36).with_last == (5, 36)
    for feeding, extra, wrong in (
        ((2, 37), (), "[37]"),
        ((2,), (40,), "[40]"),
        ((3, 2), (), "[3, 2]"),
        ((), (), "[]"),
    ):
        with pytest.raises(EyasError, match=re.escape(wrong)) as error:
            Boundaries(feeding, 36, extra)
        assert "-p boundaries '[2, 18, 33]'" in str(error.value)


def test_the_constant_of_the_embedded_target_is_no_default_anywhere():
    root = Path(__file__).parent.parent
    files = [
        *root.glob("lib/eyas/**/*.py"),
        *root.glob("notebooks/*.ipynb"),
        *root.glob("notebooks/profiles/*.yaml"),
        *root.glob("benchmarks/*.py"),
    ]
    assert len(files) > 50
    assert [
        path.name
        for path in files
        if re.search(r"\b2, ?15, ?27\b", path.read_text(encoding="utf-8"))
    ] == []
