"""The notebooks as people live in them: each by itself on a real kernel, cells that are
interrupted, jobs that outlive kernel and cell.
"""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from queue import Empty

import nbformat
import psutil
import pytest
import torch
from jupyter_client.manager import start_new_kernel

from eyas import jobs
from eyas.capture.extract import extract
from eyas.capture.verify import verify
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import ROOT, read_json
from eyas.models.target import load_target
from eyas.progress import MARK
from eyas.prompts.prompt_set import load_prompts
from eyas.report.pages import notebook_page
from eyas.report.parameters import ANSWER, settings_read
from eyas.report.run import NOTEBOOKS
from eyas.server.serve import need_servers
from eyas.store.reader import Store
from eyas.studies import boundaries as layers
from eyas.training.trainer import train
from helpers.faulty import FaultyServer
from helpers.prompts import write_prompts
from helpers.stores import bytes_of, write_random_store
from helpers.tiny import make_tiny_target

pytestmark = pytest.mark.kernel
TIMEOUT_S = 300.0


class Kernel:
    """A real kernel, started in `cwd` as JupyterLab does it.

    `run` gives the outputs of a cell as nbformat has them; an error is the last one.
    """

    def __init__(self, cwd: Path):
        environment = os.environ | {"PYTHONPATH": str(ROOT / "lib"), "OMP_NUM_THREADS": "1"}
        self.shown: dict[str, dict] = {}  # display id -> output; a later cell may change it
        for tries_left in (2, 1, 0):
            try:
                self.manager, self.client = start_new_kernel(
                    kernel_name="python3", cwd=str(cwd), env=environment, startup_timeout=TIMEOUT_S
                )
                break
            except RuntimeError:  # somebody else took a port of its before it did
                if not tries_left:
                    raise

    def run(self, code: str, when=None, do=None) -> list[dict]:
        """`when(outputs so far)` is asked again and again; once it says yes, `do()` is done: by
        default the kernel is interrupted, as by the stop button.
        """
        asked, outputs, shown = self.client.execute(code), [], self.shown
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            if when is not None and when(outputs):
                (do or self.manager.interrupt_kernel)()
                when = None
            try:
                message = self.client.get_iopub_msg(timeout=0.05)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return outputs
            if kind == "update_display_data":
                shown[content["transient"]["display_id"]]["data"] = content["data"]
            elif kind in ("stream", "display_data", "execute_result", "error"):
                output = nbformat.v4.output_from_msg(message)
                outputs.append(output)
                if id := content.get("transient", {}).get("display_id"):
                    shown[id] = output
        raise AssertionError(f"no end of the cell after {TIMEOUT_S:.0f} s: {outputs}")

    def value(self, expression: str):
        (output,) = self.run(f"import json; print(json.dumps({expression}))")
        return json.loads(output["text"])

    def notebook(self, name: str, **changed) -> tuple[list[dict], dict | None]:
        """Run all, from the top, in an empty namespace:

        (outputs, the error that ended it). `changed` are edits to the parameters cell.
        """
        self.run("%reset -f")
        outputs = []
        for cell in nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells:
            if cell.cell_type == "code":
                edits = (
                    "".join(f"\n{n} = {v!r}" for n, v in changed.items())
                    if "parameters" in cell.metadata.get("tags", [])
                    else ""
                )
                outputs += self.run(cell.source + edits)
                if outputs and outputs[-1]["output_type"] == "error":
                    return outputs, outputs[-1]
        return outputs, None

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def text_of(outputs: list[dict]) -> str:
    return "".join(o.get("text", "") for o in outputs)


def bars_of(outputs: list[dict]) -> list[dict]:
    return [o["data"] for o in outputs if o.get("data", {}).get("text/html", "").startswith(MARK)]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = Kernel(NOTEBOOKS)
    yield kernel
    kernel.close()


@pytest.fixture
def lab(kernel, data):
    """(kernel, data folder): the kernel looks into the test's own data folder."""
    kernel.run(
        f"%reset -f\nimport os; os.environ['EYAS_DATA'] = {str(data)!r}; "
        f"os.chdir({str(NOTEBOOKS)!r})"
    )
    yield kernel, data
    for job in jobs.list_jobs():
        jobs.stop(job, patience_s=10)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny", n_blocks=6))
    )


def tiny_settings(target, **values) -> dict:
    return {
        "run_name": "tiny",
        "target": str(target.folder),
        "boundaries": (2, 3),
        "threads": 1,
        "draft_vocab_size": 40,
        "batch_tok": 64,
        **values,
    }


@pytest.fixture
def capture(target, tmp_path, monkeypatch):
    """(server, prompts, config of run NAME): a server that takes a moment over each request, so
    that an interrupt comes in the middle.
    """
    server = FaultyServer(target, (2, 3, 6), tmp_path / "spool", lambda n: time.sleep(0.05) or "")
    path = write_prompts(tmp_path / "prompts.jsonl", 40, 8)

    def config(name: str) -> Config:
        return Config.create(
            run_name=name,
            target=str(target.folder),
            boundaries=(2, 3),
            prompt_set=str(path),
            train_samples=40,
            heldout_samples=8,
            max_length=128,
            concurrency=2,
            server_url=server.url,
        )

    yield server, load_prompts(path), config
    server.close()


# ---- open, run all, no edits


@pytest.mark.parametrize("folder", ["notebooks", "elsewhere"])
@pytest.mark.parametrize(
    ("name", "changed", "said", "next_command"),
    [
        ("02_extraction", {"prompt_set": "none.jsonl"}, "none.jsonl", "python -m eyas prompts "),
        ("03_shard_inspection", {}, "no store at 'store' of run 'demo'", "python -m eyas extract"),
        ("04_training", {}, "no store at 'store' of run 'demo'", "python -m eyas extract"),
        (
            "04_training",
            {"run_name": "mine"},
            "no store at 'store' of run 'mine'",
            "python -m eyas extract, with -p run_name mine as here",
        ),
        ("05_acceptance", {}, "no store at 'store' of run 'demo'", "python -m eyas extract"),
        ("06_layer_choice", {}, "no store at 'store' of run 'demo'", "python -m eyas extract"),
    ],
)
def test_a_missing_input_is_named_with_the_command_that_makes_it(
    lab, tmp_path, target, name, changed, said, next_command, folder
):
    kernel, _ = lab
    if folder == "elsewhere":
        kernel.run(f"os.chdir({str(tmp_path)!r})")
    if name == "02_extraction":
        changed = changed | {"target": str(target.folder)}
    _, error = kernel.notebook(name, **changed)
    assert error["ename"] == "EyasError"
    first, *_, last = error["traceback"]
    assert said in first and len(error["traceback"]) <= 3 and len("".join(error["traceback"])) < 500
    assert last.startswith("next: ") and next_command in last


def test_what_comes_after_the_store_is_asked_for_too(lab, target):
    kernel, data = lab
    config = Config.create(**tiny_settings(target))
    write_random_store(config.store_dir, target)
    for name, said, next_command in (
        (
            "04_training",
            "the store of run 'tiny' has no parity certificate",
            "python -m eyas parity -p run_name tiny",
        ),
        ("05_acceptance", "no drafter", "python -m eyas train"),
        (
            "06_layer_choice",
            "the store has 3 boundaries, not 0 1",
            "python -m eyas extract -p extra_boundaries all -p run_name NAME",
        ),
    ):
        _, error = kernel.notebook(
            name,
            **{
                n: v
                for n, v in tiny_settings(target).items()
                if n in settings_read(NOTEBOOKS / f"{name}.ipynb")
            },
        )
        assert error["ename"] == "EyasError" and said in error["traceback"][0], error
        assert next_command in error["traceback"][-1] and len(error["traceback"]) <= 3


def test_the_defaults_of_the_notebooks_are_the_demo(monkeypatch):
    """Else run-all after `make demo` would meet a drafter of another training."""
    assert Config.load("demo") == Config()


def test_03_runs_where_its_store_is(lab, target, capture):
    kernel, _ = lab
    _, prompts, config_of = capture
    config = config_of("tiny")
    extract(config, need_servers(config), target, prompts)
    outputs, error = kernel.notebook(
        "03_shard_inspection", run_name="tiny", target=str(target.folder), draft_vocab_size=40
    )
    assert error is None, error
    assert "48 samples, boundaries 2, 3, 6" in text_of(outputs)
    (answer,) = (o["data"]["text/html"] for o in outputs if ANSWER in str(o.get("data")))
    assert "supervised tokens are the head" in answer, "under the parameters, by a later cell"


def test_04_runs_where_its_store_is(lab, target):
    """Its training is a job, whose words and bar stand in the notebook."""
    kernel, _ = lab
    values = tiny_settings(target, epochs=4.0, without_parity=True)
    config = Config.create(**values)
    write_random_store(config.store_dir, target)
    outputs, error = kernel.notebook("04_training", **values)
    assert error is None, error
    assert "optimiser steps" in text_of(
        outputs
    ) and "held-out acceptance length, offline walk of 3 drafts" in text_of(outputs)
    (bar,) = bars_of(outputs)
    assert (
        re.match(r"(\d+)/\1 steps, 100 %", bar["text/plain"])
        and jobs.list_jobs()[0].state == "done"
    )
    assert sum("image/svg+xml" in o.get("data", {}) for o in outputs) >= 4, "its figures"


# ---- interrupted cells


EXTRACT = """
from eyas.config import Config
from eyas.capture.extract import extract
from eyas.prompts.prompt_set import load_prompts
from eyas.server.serve import need_servers
from eyas.models.target import load_target
config = Config.create(**{settings!r})
print(extract(config, need_servers(config), load_target(config.target), \
load_prompts(config.answered_path)))
"""


def test_an_interrupted_extraction_leaves_a_whole_store_and_goes_on(lab, target, capture):
    kernel, _ = lab
    server, prompts, config_of = capture
    config = config_of("stopped")
    cell = EXTRACT.format(settings=config.changed)
    outputs = kernel.run(cell, when=lambda _: server.served > 12)
    assert outputs[-1]["output_type"] == "error" and outputs[-1]["ename"] == "KeyboardInterrupt"
    assert "interrupted" in bars_of(outputs)[0]["text/plain"]
    store = Store.open(config.store_dir)
    assert 0 < len(store.samples()) < 48 and not list(server.spool.iterdir())
    assert not verify(config.store_dir, prompts, target.tokenizer()).damaged
    outputs = kernel.run(cell)
    assert "asked 48 = extracted" in text_of(outputs) and "failed 0" in text_of(outputs)
    undisturbed = config_of("undisturbed")
    extract(undisturbed, need_servers(undisturbed), target, prompts)
    assert bytes_of(config) == bytes_of(undisturbed)


TRAIN = """
from eyas.config import Config
from eyas.store.reader import Store
from eyas.models.target import load_target
from eyas.training.trainer import train
config = Config.create(**{settings!r})
train(config, Store.open(config.store_dir), load_target(config.target))
"""


@pytest.fixture
def to_train(target, data):
    """settings(name) of a training of some seconds, its store written; and the drafter that an
    undisturbed run of them ends with.
    """

    def settings(name: str) -> dict:
        values = tiny_settings(
            target, run_name=name, epochs=16.0, checkpoint_steps=5, without_parity=True
        )
        write_random_store(Config.create(**values).store_dir, target)
        return values

    config = Config.create(**settings("undisturbed"))
    train(config, Store.open(config.store_dir), target)
    return settings, weights(config)


def weights(config: Config) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(config.drafter_dir / "drafter.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def some_steps(config: Config):
    return lambda *_: any((config.drafter_dir / "checkpoints").glob("step-*.pt"))


def test_an_interrupted_training_goes_on_to_the_same_weights(lab, to_train):
    kernel, _ = lab
    settings, undisturbed = to_train
    values = settings("stopped")
    config, cell = Config.create(**values), TRAIN.format(settings=values)
    outputs = kernel.run(cell, when=some_steps(config))
    assert (
        outputs[-1]["ename"] == "KeyboardInterrupt"
        and not (config.drafter_dir / "drafter.safetensors").exists()
    )
    outputs = kernel.run(cell)
    assert (
        "goes on after optimiser step" in text_of(outputs) and outputs[-1]["output_type"] != "error"
    )
    assert same(weights(config), undisturbed)


@pytest.mark.server
def test_an_interrupt_leaves_the_real_server_serving(lab, server, server_data):
    """The kernel's interrupt goes to its whole process group; the server has a session of its own,
    and its spool is left empty.
    """
    kernel, _ = lab
    config, running = server
    kernel.run(f"os.environ['EYAS_DATA'] = {str(server_data)!r}")
    values = {
        "target": config.target,
        "run_name": "interrupted",
        "server_url": running.url,
        "train_samples": 60,
        "heldout_samples": 1,
        "concurrency": 2,
    }
    before = running.status()
    store = Config.create(**values).store_dir
    cell = EXTRACT.format(settings=values)
    outputs = kernel.run(
        cell,
        when=lambda _: running.status()["capture"]["captured"] > before["capture"]["captured"] + 5,
    )
    assert outputs[-1].get("ename") == "KeyboardInterrupt", outputs
    assert (
        running.process() is not None
        and running.status()["capture"]["boundaries"] == before["capture"]["boundaries"]
    )
    assert (
        not list(Path(before["capture"]["spool"]).iterdir())
        and len(Store.open(store).samples()) < 61
    )
    assert "failed 0" in text_of(kernel.run(cell)) and len(Store.open(store).samples()) == 61


@pytest.mark.server
def test_an_interrupt_while_the_server_starts_leaves_none(lab, target):
    kernel, _ = lab
    config, pids = Config.create(run_name="up", target=str(target.folder), boundaries=(2, 3)), []

    def started(*_):
        with contextlib.suppress(OSError):
            pids.append(read_json(config.server_dir / "server.json")["pid"])
        return bool(pids)

    outputs = kernel.run(
        (
            f"from eyas.config import Config\nfrom eyas.server.serve import "
            f"server_up\nserver_up(Config.create(**{config.changed!r}))"
        ),
        when=started,
    )
    assert outputs[-1]["ename"] == "KeyboardInterrupt"
    assert (
        not psutil.pid_exists(pids[0]) or psutil.Process(pids[0]).status() == psutil.STATUS_ZOMBIE
    )
    assert not (config.server_dir / "server.json").exists()


# ---- jobs


JOB = """
from eyas.config import Config
from eyas.jobs import follow, start
config = Config.create(**{settings!r})
follow(start(config, "train"))
"""


def test_a_job_outlives_interrupt_and_kernel_and_is_found_again(to_train, data, tmp_path):
    settings, undisturbed = to_train
    values = settings("job")
    config, cell = Config.create(**values), JOB.format(settings=values)
    first, held = Kernel(tmp_path), []

    # the job waits until somebody looks again, however fast this machine is
    def hold_and_interrupt():
        held.append(jobs.list_jobs("job")[0].process())
        held[0].suspend()
        first.manager.interrupt_kernel()

    try:
        outputs = first.run(cell, when=some_steps(config), do=hold_and_interrupt)
        assert (
            outputs[-1]["ename"] == "KeyboardInterrupt"
            and "continues in the background" in text_of(outputs)
            and "python -m eyas job stop train -p run_name job" in text_of(outputs)
        )
        (job,) = jobs.list_jobs("job")
        process = job.process()
        assert job.state == "running" and "steps" in job.where() and "running" in jobs.table([job])
        pid = first.value("__import__('os').getpid()")
        os.kill(pid, signal.SIGKILL)
    except BaseException:
        for process in held:
            process.resume()
        raise
    finally:
        first.close()
    assert process.is_running()
    with pytest.raises(
        EyasError,
        match=(
            "train of run 'job' is running with other settings: epochs 16.0, here "
            "31.0.*python -m eyas job stop train -p run_name job"
        ),
    ):
        jobs.start(Config.create(**values | {"epochs": 31.0}), "train")
    second = Kernel(NOTEBOOKS)
    try:
        outputs = second.run(
            cell, when=lambda outputs: "running already" in text_of(outputs), do=process.resume
        )
    finally:
        process.resume()
        second.close()
    assert outputs[-1]["output_type"] != "error", outputs[-1]
    assert (
        "running already" in text_of(outputs)
        and f"(process {process.pid}" in text_of(outputs)
        and "optimiser steps" in text_of(outputs)
    )
    (bar,) = bars_of(outputs)
    assert "100 %" in bar["text/plain"] and 'value="100.0"' in bar["text/html"]
    assert job.state == "done" and job.end()["code"] == 0 and same(weights(config), undisturbed)


def test_a_stopped_job_goes_on_where_it_was(to_train, data, capsys):
    settings, undisturbed = to_train
    config = Config.create(**settings("job"))
    job, ready = jobs.start(config, "train"), some_steps(config)
    while not ready():
        assert job.process() is not None, job.log.read_text()
        time.sleep(0.05)
    (stopped,) = jobs.stop_all(config)
    assert (
        stopped == job
        and job.state == "stopped"
        and job.process() is None
        and not jobs.stop(job)
        and jobs.stop_all(config) == []
    )
    with pytest.raises(
        EyasError, match="train of run 'job' was stopped; next: the same command again"
    ):
        jobs.follow(job)
    assert jobs.follow(jobs.start(config, "train")).state == "done"
    assert "goes on after optimiser step" in capsys.readouterr().out and same(
        weights(config), undisturbed
    )


def test_a_job_that_fails_or_is_killed_says_so(data, target, capsys):
    config = Config.create(**tiny_settings(target))
    with pytest.raises(
        EyasError,
        match="^no store at 'store' of run 'tiny'; expected .*; next: python -m eyas extract$",
    ):  # the job's own words
        jobs.follow(jobs.start(config, "train"))
    (job,) = jobs.list_jobs()
    assert job.state == "failed" and "no store" in job.log.read_text()
    (job.folder / "end.json").unlink()  # as after a kill
    with pytest.raises(
        EyasError,
        match=(
            "(?s)train of run 'tiny' was killed; the end of its log:.*no store.*next: the "
            "same command again"
        ),
    ):
        jobs.follow(job)
    with pytest.raises(EyasError, match="no background job 'decode'"):
        jobs.start(config, "decode")


def test_an_extraction_as_a_job_ends_with_the_same_store(data, target, capture, capsys):
    server, prompts, config_of = capture
    config, undisturbed = config_of("job"), config_of("undisturbed")
    job = jobs.start(config, "extract")
    while server.served < 12:
        assert job.process() is not None, job.log.read_text()
        time.sleep(0.01)
    assert jobs.stop(job) and not verify(config.store_dir, prompts, target.tokenizer()).damaged
    jobs.follow(jobs.start(config, "extract"))
    assert "asked 48 = extracted" in capsys.readouterr().out
    extract(undisturbed, need_servers(undisturbed), target, prompts)
    assert bytes_of(config) == bytes_of(undisturbed)


# ---- what is saved


def test_the_saved_page_has_the_last_state_of_a_bar(lab):
    kernel, _ = lab
    outputs = kernel.run(
        "from eyas.progress import Progress\nwith Progress(3) as progress:\n    for _ in "
        "range(3):\n        progress.update(samples=1, tok=1000)"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=outputs)])
    html = notebook_page(notebook, "t", "", "")
    assert (
        html.count("<progress") == 1
        and 'value="100.0"' in html
        and html.count("3/3 samples, 100 %") == 1
        and "<script" not in html
    )


def test_a_study_is_read_as_it_was_written(data):
    import pandas as pd

    config = Config.create(run_name="study")
    frames = {
        name: pd.DataFrame({"name": ["1 2", "2"], "value": [0.5, None]}) for name in layers.TABLES
    }
    frames["forward"]["boundaries"] = [(1, 2), (2,)]
    study = layers.Study(**frames, guided=0.5, record={"guided": 0.5, "sentence": "s"})
    with pytest.raises(EyasError, match="has no study of layers.*python -m eyas study layers"):
        layers.load_study(config)
    layers.save_study(config, study)
    found = layers.load_study(config)
    assert (
        found.record == study.record == read_json(config.sweep_dir / "study.json")
        and found.guided == 0.5
    )
    for name in layers.TABLES:
        pd.testing.assert_frame_equal(getattr(found, name), getattr(study, name))
    assert list(found.forward["boundaries"]) == [(1, 2), (2,)]
