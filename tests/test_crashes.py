"""The crash matrix: whatever breaks during an extraction, the same command again ends with the very
bytes of an undisturbed run.

Most of it is played against `faulty.FaultyServer`; test_soak.py and the slow tests here take the
real server.
"""

import contextlib
import errno
import json
import os
import signal
import threading
import time

import pytest

import eyas.capture.extract
import eyas.files
import eyas.store.reader
from eyas.capture.extract import Fleet, extract
from eyas.capture.plan import SPARE_BYTES, Plan, check_room
from eyas.capture.verify import verify
from eyas.cli import main
from eyas.config import Config
from eyas.errors import EyasError
from eyas.models.target import load_target
from eyas.prompts.prompt_set import load_prompts
from eyas.server.serve import Server, need_servers, server_up
from eyas.store.reader import Store
from eyas.store.summary import last_run
from eyas.store.writer import StoreWriter
from helpers.faulty import FaultyServer
from helpers.prompts import write_prompts
from helpers.stores import bytes_of
from helpers.tiny import make_tiny_target

BOUNDARIES = (1, 2, 4)
N_TRAIN, N_HELDOUT = 40, 8


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return load_prompts(
        write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", N_TRAIN, N_HELDOUT)
    )


@pytest.fixture
def job(data, target, prompts, tmp_path, monkeypatch):
    """job(name, *servers, **settings) -> (config, run); run() is one `eyas extract`."""
    monkeypatch.setattr(eyas.capture.extract, "BACK_OFF_S", 0.01)

    def make(name, *servers, **settings):
        config = Config.create(
            run_name=name,
            target=str(target.folder),
            boundaries=(1, 2),
            train_samples=N_TRAIN,
            heldout_samples=N_HELDOUT,
            max_length=128,
            concurrency=4,
            server_url=",".join(s.url for s in servers),
            **{"request_timeout_s": 30.0} | settings,
        )

        def run(**options):
            return extract(config, need_servers(config), target, prompts, **options)

        return config, run

    return make


@pytest.fixture
def serve(target, tmp_path):
    """serve(fault, port) -> a FaultyServer, closed at the end."""
    started = []

    def start(fault=lambda n: "", port=0, spool="spool"):
        started.append(FaultyServer(target, BOUNDARIES, tmp_path / spool, fault, port))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """About six samples a shard."""
    init = StoreWriter.__init__
    monkeypatch.setattr(
        StoreWriter,
        "__init__",
        lambda self, folder, manifest, head, shard_bytes: init(
            self, folder, manifest, head, 64 * 1024
        ),
    )


@pytest.fixture
def undisturbed(job, serve, prompts):
    config, run = job("undisturbed", serve())
    assert run().extracted == N_TRAIN + N_HELDOUT
    assert len(list((config.store_dir / "shards").iterdir())) > 4
    index = Store.open(config.store_dir).index
    assert dict(zip(index["id"], index["topic"])) == {c.id: c.topic for c in prompts.conversations}
    return bytes_of(config)


def whole(config, undisturbed, prompts, target, spool) -> None:
    assert bytes_of(config) == undisturbed
    assert verify(config.store_dir, prompts, target.tokenizer()).ok
    assert not list(spool.iterdir())


def adds_up(summary) -> bool:
    return (
        summary.asked == summary.extracted + summary.skipped + summary.failed == N_TRAIN + N_HELDOUT
    )


@pytest.mark.parametrize("fault", [500, 429, "cut", "torn", "late", "lacks"])
def test_every_third_request_fails_once_and_the_run_does_not(
    job, serve, undisturbed, prompts, target, fault
):
    server = serve(lambda n: fault if n % 3 == 0 else "")
    config, run = job("disturbed", server)
    summary = run()
    if summary.failed:  # three attempts of one sample may all have been third ones
        summary = run()
    assert adds_up(summary) and summary.failed == 0
    whole(config, undisturbed, prompts, target, server.spool)


@pytest.mark.parametrize(
    "fault, said",
    [
        (500, "HTTP 500"),
        ("cut", "RemoteProtocolError"),
        ("torn", "can't be read"),
        ("enospc", "No space left"),
        ("hang", "ReadTimeout"),
    ],
)
def test_from_the_tenth_request_on_everything_fails_and_the_job_stops_with_the_reason(
    job, serve, undisturbed, prompts, target, fault, said, monkeypatch
):
    server = serve(lambda n: fault if n >= 10 else "")
    config, run = job("disturbed", server, request_timeout_s=0.2 if fault == "hang" else 60.0)
    monkeypatch.setattr(eyas.capture.extract, "FAILURES_IN_A_ROW", 4)
    with pytest.raises(
        EyasError, match=f"4 samples failed in a row.*{said}.*the same command again"
    ):
        run()
    store = Store.open(config.store_dir)
    assert 0 < len(store.samples()) < 12 and set(store.index["state"]) == {"extracted", "pending"}
    assert not verify(config.store_dir).damaged
    server.fault = lambda n: ""
    config, run = job("disturbed", server)  # the short timeout was for the requests that hang
    assert adds_up(run())
    whole(config, undisturbed, prompts, target, server.spool)


def test_the_server_goes_away_and_comes_back(job, serve, undisturbed, prompts, target):
    gone = threading.Event()

    def go():
        first.http.shutdown()
        first.http.server_close()
        gone.set()

    first = serve(lambda n: "" if n < 15 else threading.Thread(target=go).start() or "cut")
    config, run = job("disturbed", first)
    with pytest.raises(EyasError, match="failed in a row"):
        run()
    assert gone.wait(30)
    again = serve(port=int(first.url.rsplit(":", 1)[1]))
    assert adds_up(run())
    whole(config, undisturbed, prompts, target, again.spool)


def test_two_servers_share_the_work_and_one_may_die(
    job, serve, undisturbed, prompts, target, monkeypatch
):
    one, other = serve(), serve(spool="other-spool")
    config, run = job("shared", one, other)
    assert run().extracted == N_TRAIN + N_HELDOUT and min(one.served, other.served) > 8
    whole(config, undisturbed, prompts, target, one.spool)
    one.fault = lambda n: 500
    monkeypatch.setattr(
        eyas.capture.extract, "BACK_OFF_S", 1.0
    )  # it rests, and a retry goes to the other one
    config, run = job("one-dead", one, other)
    assert run().failed == 0
    whole(config, undisturbed, prompts, target, other.spool)


@pytest.mark.parametrize(
    "fault, said",
    [
        ("nan", "NaN"),
        ("short", "rows for"),
        ("other", "other token ids"),
        ("nothing", "names no file"),
        (400, "HTTP 400"),
    ],
)
def test_a_sample_with_a_fault_of_its_own_is_listed_and_tried_again_only_when_asked(
    job, serve, undisturbed, prompts, target, fault, said
):
    server = serve(lambda n: fault if n in (7, 23) else "")
    config, run = job("disturbed", server)
    summary = run()
    assert adds_up(summary) and (summary.failed, summary.pending) == (2, 0)
    assert all(said in reason for reason in summary.reasons.values()) and "--retry-failed" in str(
        summary
    )
    again = run()
    assert (again.extracted, again.failed) == (0, 2)
    assert run(retry_failed=True).failed == 0
    whole(config, undisturbed, prompts, target, server.spool)


def test_client_killed_at_twelve_moments(job, serve, undisturbed, prompts, target):
    server = serve(lambda n: time.sleep(0.002) or "")
    config, run = job("disturbed", server)
    kills = 0
    for moment in range(12):
        child = os.fork()
        if not child:
            try:
                run()
            finally:  # never back into pytest
                os._exit(0)
        time.sleep(0.02 + 0.02 * moment)
        os.kill(child, signal.SIGKILL)
        kills += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        if (config.store_dir / "index.parquet").is_file():
            assert not verify(config.store_dir).damaged
    assert adds_up(run()) and kills >= 3
    whole(config, undisturbed, prompts, target, server.spool)


@pytest.mark.parametrize(
    "what", ["shards/", "index.parquet", "manifest.json", "head.safetensors", "data_config.json"]
)
def test_the_stores_disk_is_full(job, serve, undisturbed, prompts, target, monkeypatch, what):
    server = serve()
    config, run = job("disturbed", server)
    replace, left = os.replace, [2 if what in ("shards/", "index.parquet") else 0]

    def full(source, goal):
        if what in str(goal):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, goal)

    monkeypatch.setattr(eyas.files.os, "replace", full)
    with pytest.raises(
        EyasError, match="writing the store failed: No space left.*the same command again"
    ):
        run()
    monkeypatch.setattr(eyas.files.os, "replace", replace)
    assert adds_up(run())
    whole(config, undisturbed, prompts, target, server.spool)


def test_a_store_on_a_read_only_file_system_is_said(job, serve, monkeypatch):
    config, run = job("read-only", serve())
    config.store_dir.mkdir(parents=True)
    opened = open

    def refuse(path, mode="r", *args, **kwargs):
        if "w" in mode and str(path).startswith(str(config.store_dir)):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, mode, *args, **kwargs)

    monkeypatch.setattr(eyas.store.reader, "open", refuse, raising=False)
    with pytest.raises(EyasError, match="can't be written: Read-only file system"):
        run()


def test_a_clock_that_goes_backwards_changes_nothing(
    job, serve, undisturbed, prompts, target, monkeypatch
):
    server, now = serve(), [2e9]

    def backwards():
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", backwards)
    config, run = job("disturbed", server)
    summary = run()
    assert adds_up(summary) and 0 < summary.seconds < 600
    whole(config, undisturbed, prompts, target, server.spool)


def test_a_second_client_is_refused_while_the_first_one_runs(
    job, serve, undisturbed, prompts, target
):
    holding, go = threading.Event(), threading.Event()

    def hold(n):
        if n == 5:
            holding.set()
            go.wait(30)
        return ""

    server = serve(hold)
    config, run = job("disturbed", server)
    first = threading.Thread(target=run)
    first.start()
    assert holding.wait(30)
    servers = need_servers(config)
    fleet = Fleet(config, servers, [one.status() for one in servers])
    theirs = server.spool / f"{fleet.prefix}waits.safetensors"
    theirs.write_bytes(b"of the first client, which has yet to take it")
    with pytest.raises(
        EyasError, match="another process is writing to the store of run 'disturbed'"
    ):
        run()
    assert theirs.is_file()
    go.set()
    first.join()
    whole(config, undisturbed, prompts, target, server.spool)


def test_too_little_room_is_refused_with_the_numbers_or_allowed(job, serve, monkeypatch):
    server = serve()
    config, run = job("small", server)
    monkeypatch.setattr("eyas.capture.plan.free_bytes", lambda folder: 5000)
    with pytest.raises(
        EyasError,
        match=(
            r"has 4.88 KiB free, [\d.]+ [KM]iB will be written \(48 samples, [\d,]+ "
            r"tokens\).*--anyway"
        ),
    ):
        run()
    assert server.served == 0 and not len(
        Store.open(config.store_dir).index
    )  # fewer may be asked for next
    assert run(anyway=True).failed == 0


def test_room_is_counted_for_each_disk_and_in_what_the_servers_compute(tmp_path, monkeypatch):
    """100 tokens of which the servers keep 1,000 bytes each, in two spools beside the store:

    40,000 at most in the first, 100,000 in the other.
    """
    one, other = tmp_path / "one", tmp_path / "other"
    plan = Plan(1, 100, (1, 2), 64, "float8_e4m3fn", 10**6, 10**9, 0.0)
    one.mkdir()
    other.mkdir()
    need = plan.bytes + 140_000 + SPARE_BYTES
    for free in (need, need - 1):
        monkeypatch.setattr("eyas.capture.plan.free_bytes", lambda folder, free=free: free)
        with (
            contextlib.nullcontext()
            if free == need
            else pytest.raises(EyasError, match="the disk of the store and spool has")
        ):
            check_room(plan, tmp_path, {one: 40_000, other: 100_000, tmp_path / "unseen": 10**12})
    fleet = Fleet.__new__(Fleet)
    fleet.spools, fleet.quotas, fleet.token_bytes = [one, other], [40_000, 200_000], 1000
    assert fleet.spool_bytes(100) == {one: 40_000, other: 100_000}


def test_damage_that_a_run_meets_is_counted_once(job, serve, undisturbed, prompts, target):
    """A shard is written again for one sample, and another of its samples turns out to be damaged:
    no longer skipped, still to come.
    """
    server = serve(lambda n: "nan" if n == 3 else "")
    config, run = job("disturbed", server)
    (bad,) = run().reasons
    store = Store.open(config.store_dir)
    shard = store.index[store.index["shard"] == store.row(bad)["shard"]]
    path = config.store_dir / "shards" / store.row(bad)["shard"]
    content = bytearray(path.read_bytes())
    content[int(shard.loc[shard["id"] != bad, "offset"].iloc[0]) - int(shard["length"].sum())] ^= (
        1  # the loss masks lie last
    )
    path.write_bytes(content)
    summary = run(retry_failed=True)
    assert adds_up(summary) and (summary.extracted, summary.failed, summary.pending) == (1, 1, 1)
    assert adds_up(run())
    whole(config, undisturbed, prompts, target, server.spool)


def test_repair_goes_on_until_the_store_is_whole(job, serve, undisturbed, prompts, target, capsys):
    """The index is lost and with it what was known of a shard with an altered byte; the summary and
    the head are no better.
    """
    server = serve()
    config, run = job("disturbed", server)
    run()
    (config.store_dir / "index.parquet").unlink()
    (config.store_dir / "data_config.json").write_text("[]")
    for path in (
        config.store_dir / "shards" / "000001.safetensors",
        config.store_dir / "head.safetensors",
    ):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    settings = {
        "run_name": "disturbed",
        "target": target.folder,
        "boundaries": "[1,2]",
        "prompt_set": prompts.path,
        "train_samples": N_TRAIN,
        "heldout_samples": N_HELDOUT,
        "max_length": 128,
        "server_url": server.url,
    }
    command = [
        "verify",
        *(word for name, value in settings.items() for word in ("-p", name, str(value))),
    ]
    assert main(command) == 1 and "next: the same command with --repair" in capsys.readouterr().out
    assert main([*command, "--repair"]) == 0
    whole(config, undisturbed, prompts, target, server.spool)


def test_a_run_that_finds_all_there_keeps_the_measured_rate(job, serve):
    config, run = job("again", serve())
    run()
    rate = last_run(config.store_dir)["tok_per_s"]
    run()
    assert last_run(config.store_dir)["tok_per_s"] == rate > 0


def test_another_prompt_set_is_said_and_damages_no_sample(job, serve, prompts, target, tmp_path):
    config, run = job("p", serve())
    run()
    other = write_prompts(tmp_path / "other.jsonl", N_TRAIN, N_HELDOUT)
    other.write_text(other.read_text().replace("eagle", "buzzard").replace("p000", "p900"))
    report = verify(config.store_dir, load_prompts(other), target.tokenizer())
    assert (
        [name for name, ok, _ in report.checks if not ok] == ["prompt set"]
        and not report.damaged
        and report.foreign
    )


def test_a_spool_that_cannot_be_cleared_costs_nothing(job, serve, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    server = serve(lambda n: 500 if n > 20 else "")
    config, run = job("kept", server)
    monkeypatch.setattr(
        eyas.capture.extract.Path,
        "glob",
        lambda self, pattern, glob=eyas.capture.extract.Path.glob: (
            refuse() if self == server.spool else glob(self, pattern)
        ),
    )
    with pytest.raises(EyasError, match="failed in a row"):
        run()
    assert len(Store.open(config.store_dir).samples()) > 10


@pytest.mark.parametrize("answer", ["<html>", "[1]", "1"])
def test_another_kind_of_server_is_said(job, serve, target, prompts, answer):
    server = serve()
    server.info = lambda: answer if answer == "<html>" else json.loads(answer)
    with pytest.raises(EyasError, match="no answer from .*expected a running SGLang server"):
        job("x", server)[1]()
    config, run = job("y", serve())
    with pytest.raises(EyasError, match="no answer from http://a:port: InvalidURL"):
        extract(config, [Server("http://a:port")], target, prompts)


def test_an_older_plugin_is_said(job, serve):
    server = serve()
    info = server.info()
    del info["internal_states"][0]["eyas_capture"]["quota"]
    server.info = lambda: info
    with pytest.raises(EyasError, match=r"older capture plugin \(fake\)"):
        job("x", server)[1]()


def test_servers_that_differ_are_refused(job, serve):
    one, other = serve(), serve(spool="other-spool")
    info = other.info
    other.info = lambda: info() | {"dtype": "float32"}
    with pytest.raises(EyasError, match="differ in version, dtype or flags"):
        job("differ", one, other)[1]()


def test_fp8_halves_the_store_and_wide_dumps_hold_what_was_asked(job, serve, target, tmp_path):
    exact, run = job("exact", serve())
    run()
    small, run = job("small", serve(spool="b"), store_fp8=True)
    run()
    assert (
        0.5
        < Store.open(small.store_dir).token_bytes / Store.open(exact.store_dir).token_bytes
        < 0.6
    )
    wide = FaultyServer(target, tuple(range(5)), tmp_path / "wide")
    config, run = job("wide", wide, extra_boundaries="all")
    run()
    wide.close()
    store, id = Store.open(config.store_dir), Store.open(exact.store_dir).samples()[3]
    assert store.boundaries == (0, 1, 2, 3, 4)
    assert store.read(id, (2,))["states"][2].equal(
        Store.open(exact.store_dir).read(id)["states"][2]
    )


# --- the real server ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.server
def test_real_server_under_kills_of_client_scheduler_and_server(tmp_path, monkeypatch):
    """The soak of benchmarks/soak.py, small: nothing lost, doubled or torn."""
    monkeypatch.setenv("EYAS_DATA", str(tmp_path))
    monkeypatch.syspath_prepend(str(eyas.files.ROOT / "benchmarks"))
    from soak import soak

    result = soak(samples=1500, kills=10, server_kills=4, folder=tmp_path)
    print(result)
    assert (result.extracted, result.doubled, result.damaged) == (1500, 0, 0)
    assert result.kills["scheduler"] == result.kills["server"] == 2 and result.kills["client"] >= 2


@pytest.mark.slow
@pytest.mark.server
def test_a_real_server_whose_spool_is_full_says_so_and_the_job_goes_on_elsewhere(
    data, target, prompts, monkeypatch
):
    """The spool's quota holds one sample at most; with a folder that cannot be written the reason
    comes from the server's own thread.
    """
    config = Config.create(
        run_name="full",
        target=str(target.folder),
        boundaries=(1, 2),
        train_samples=N_TRAIN,
        heldout_samples=N_HELDOUT,
        max_length=128,
        concurrency=4,
        spool_gib=50_000 / 2**30,
    )
    with server_up(config, tied=True) as server:
        summary = extract(config, need_servers(config), target, prompts)
        assert summary.extracted + summary.pending == summary.asked and summary.extracted > 0
        spool = config.server_dir / "spool"
        assert not list(spool.iterdir())
        spool.rmdir()
        spool.symlink_to("/dev/full")
        with pytest.raises(EyasError, match="failed in a row"):
            extract(
                Config.create(**{**config.__dict__, "run_name": "full2", "server_url": server.url}),
                need_servers(config),
                target,
                prompts,
            )
