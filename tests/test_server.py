"""The real server: what it says of itself, and whether the captured rows are the target's, for any
mix of requests.
"""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import psutil
import pytest
import torch
from torch.nn.functional import cosine_similarity

import eyas.server.serve
from eyas.capture.extract import capture, extract
from eyas.capture.verify import repair, verify
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import ROOT, read_parquet, seal
from eyas.parity.references import Asked
from eyas.processes import still_running
from eyas.prompts.chat_template import Sample, encode
from eyas.prompts.prompt_set import chosen, load_prompts
from eyas.server.serve import (
    LIMITS,
    Server,
    check_for_capture,
    find_server,
    need_servers,
    server_up,
    started_ticks,
)
from eyas.store.reader import Store

pytestmark = pytest.mark.server
BOUNDARIES = (2, 15, 27, 30)


def sample(ids) -> Sample:
    ids = np.asarray(ids, dtype=np.int64)
    return Sample(
        id="x",
        input_ids=ids,
        loss_mask=np.ones(len(ids), bool),
        truncated=False,
        category="",
        split="train",
    )


@pytest.fixture
def send(server):
    """send([ids, ...]) -> [{boundary: [T, H]}, ...], all requests at once."""
    _, running = server

    def send_all(prompts):
        with (
            httpx.Client(base_url=running.url, timeout=600, limits=LIMITS) as client,
            ThreadPoolExecutor(min(len(prompts), 200)) as pool,
        ):
            return list(
                pool.map(
                    lambda ids: capture(client, sample(ids), BOUNDARIES, torch.bfloat16), prompts
                )
            )

    return send_all


@pytest.fixture(scope="module")
def conversations(embedded):
    prompts = load_prompts(ROOT / "data_manifests" / "eyas_chat.jsonl")
    return [
        encode(c, embedded.tokenizer(), 512).input_ids for c in prompts.select("heldout", 6, seed=1)
    ]


def hugging_face_boundaries(folder, ids, dtype) -> list[torch.Tensor]:
    """Boundaries 0..N of one prompt, [T, H] float32 each, from an independent implementation."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    last = []
    model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    with torch.no_grad():
        states = model(
            torch.as_tensor(np.asarray(ids))[None], output_hidden_states=True
        ).hidden_states
    return [h[0].float() for h in (*states[:-1], last[0])]


def test_status_reads_back_what_matters(server, embedded):
    config, running = server
    status = running.status()
    assert (
        status["model"] == str(embedded.folder)
        and status["sglang"] == "0.5.23"
        and status["dtype"] == "bfloat16"
    )
    assert status["context_tok"] == config.context_tok
    assert not (
        status["radix_cache"]
        or status["chunked_prefill"]
        or status["overlap"]
        or status["prefill_graph"]
    )
    assert (
        status["capture"]["boundaries"] == list(BOUNDARIES)
        and status["capture"]["n_blocks"] == embedded.n_blocks
    )
    check_for_capture(status, BOUNDARIES, embedded)


def test_the_other_processes_are_copies_of_the_first(server):
    """On the plain CPU platform; spawned ones import everything again, which takes as long as all
    else at the start.
    """
    children = psutil.Process(server[1].pid).children(recursive=True)
    assert len(children) >= 2 and not any(
        "multiprocessing" in word for child in children for word in child.cmdline()
    )


@pytest.mark.parametrize(
    "change, said",
    [
        ({"capture": None}, "no capture plugin"),
        ({"radix_cache": True}, "--disable-radix-cache"),
        ({"chunked_prefill": True}, "--chunked-prefill-size"),
        ({"overlap": True}, "--disable-overlap-schedule"),
        ({"prefill_graph": True}, "--cuda-graph-backend-prefill"),
    ],
)
def test_a_server_that_would_lose_rows_is_refused_by_the_flag(server, embedded, change, said):
    with pytest.raises(EyasError, match=said):
        check_for_capture(server[1].status() | change, BOUNDARIES, embedded)


def test_a_server_without_the_boundaries_or_of_another_model_is_refused(server, embedded):
    status = server[1].status()
    with pytest.raises(EyasError, match=r"captures boundaries \[2, 15, 27, 30\], not \[3\]"):
        check_for_capture(status, (2, 3), embedded)
    with pytest.raises(EyasError, match="blocks"):
        check_for_capture(
            status | {"capture": status["capture"] | {"n_blocks": 12}}, BOUNDARIES, embedded
        )


def test_captured_boundaries_are_hugging_faces_and_their_neighbours_are_not(
    send, embedded, conversations
):
    """Per token: as near to the float32 reference as bf16 rounding allows (measured on Hugging Face
    itself), nearer than any other boundary.
    """
    ids = conversations[0]
    reference = hugging_face_boundaries(embedded.folder, ids, torch.float32)
    rounded = hugging_face_boundaries(embedded.folder, ids, torch.bfloat16)
    (rows,) = send([ids])
    for b in BOUNDARIES:
        mine, exact = rows[b].float(), reference[b]
        error = ((mine - exact).norm(dim=1) / exact.norm(dim=1)).median()
        floor = ((rounded[b] - exact).norm(dim=1) / exact.norm(dim=1)).median()
        assert error < 1.5 * floor + 1e-6, (b, error, floor)
        nearness = torch.stack(
            [cosine_similarity(mine, other, dim=1) for other in reference]
        )  # [N + 1, T]
        assert (nearness.argmax(0) == b).all(), b
        assert nearness[b].median() > 0.999
        neighbours = [k for k in (b - 1, b + 1) if k <= embedded.n_blocks]
        assert nearness[neighbours].max(0).values.median() < 0.99


def same_rows(one: dict, other: dict) -> None:
    for b in BOUNDARIES:
        assert one[b].shape == other[b].shape
        assert cosine_similarity(one[b].float(), other[b].float(), dim=1).min() > 0.995, (
            b
        )  # another batch, another bf16 rounding


def test_200_identical_prompts_at_once(send, conversations):
    ids = conversations[1][:24]
    (alone,) = send([ids])
    for rows in send([ids] * 200):
        same_rows(rows, alone)


def test_64_prompts_that_share_their_first_300_tokens(send, conversations):
    shared = np.resize(np.concatenate(conversations), 300)
    prompts = [np.concatenate([shared, [1000 + n] * (1 + n % 5)]) for n in range(64)]
    together = send(prompts)
    for rows, ids in zip(together, prompts, strict=True):
        assert len(rows[2]) == len(ids)
    for n in (0, 31, 63):
        same_rows(together[n], send([prompts[n]])[0])


def test_short_prompts_beside_a_long_one(send, conversations):
    text = np.resize(np.concatenate(conversations), 2000)
    prompts = [text[:n] for n in range(1, 11)] + [text]
    together = send(prompts)
    for rows, ids in zip(together, prompts, strict=True):
        same_rows(rows, send([ids])[0])


def test_a_prompt_as_long_as_the_context(send, server, conversations):
    ids = np.resize(np.concatenate(conversations), server[0].context_tok)
    (rows,) = send([ids])
    assert len(rows[30]) == server[0].context_tok


def test_end_of_text_inside_a_prompt(send, embedded, conversations):
    ids = np.concatenate(
        [conversations[2][:10], [embedded.tokenizer().eos_token_id, 0], conversations[3][:10]]
    )
    (rows,) = send([ids])
    reference = hugging_face_boundaries(embedded.folder, ids, torch.float32)
    assert cosine_similarity(rows[15].float(), reference[15], dim=1).min() > 0.999


def test_a_request_that_does_not_ask_is_served_as_ever(server, conversations):
    _, running = server
    before = running.status()["capture"]["captured"]
    answer = httpx.post(
        f"{running.url}/generate",
        timeout=120,
        json={
            "input_ids": conversations[0][:40].tolist(),
            "sampling_params": {"max_new_tokens": 8, "temperature": 0},
        },
    ).json()
    assert (
        answer["meta_info"]["completion_tokens"] == 8 and "eyas_capture" not in answer["meta_info"]
    )
    assert running.status()["capture"]["captured"] == before
    assert not list((server[0].server_dir / "spool").iterdir())


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden"])
def test_a_capture_name_never_leaves_the_spool(server, name):
    config, running = server
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 1, "custom_params": {"eyas_capture": name}},
    }
    answer = httpx.post(f"{running.url}/generate", timeout=120, json=body).json()
    assert "not a plain file name" in answer["meta_info"]["eyas_capture"][0]["error"]
    assert not list((config.server_dir / "spool").iterdir())


def test_rows_of_decoding_are_those_of_prefill(server, send, conversations):
    """A given text is decoded token by token, beside others; its rows and tokens are the prefilled
    ones.
    """
    texts, start = [ids[:60].tolist() for ids in conversations[:3]], 40

    def decode(ids):
        with Asked(server[1], BOUNDARIES) as asked:
            return asked.decode(ids, start, 20)

    with ThreadPoolExecutor(3) as pool:
        decoded = list(pool.map(decode, texts))  # refuses tokens other than the given ones
    for (positions, rows), whole in zip(decoded, send(texts), strict=True):
        assert positions.tolist() == list(range(start, 60))
        same_rows(rows, {b: states[start:] for b, states in whole.items()})


def test_rows_as_computed_of_a_prefill_are_all_of_them(server, send, conversations):
    ids = conversations[0][:50].tolist()
    with Asked(server[1], BOUNDARIES) as asked:
        positions, rows = asked.prefill_as_it_comes(ids, 0)
    assert positions.tolist() == list(range(50))
    same_rows(rows, send([ids])[0])


def test_a_free_port_that_was_taken_meanwhile_costs_a_new_start(tmp_path, monkeypatch):
    """The port is chosen half a minute before SGLang binds it.

    Here a plain HTTP server is started, which says what uvicorn says.
    """
    code = """if True:
        import http.server, sys
        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
        http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and doesn't listen: not seen before
        port, free, given = taken.getsockname()[1], eyas.server.serve._free_port, []
        monkeypatch.setattr(
            eyas.server.serve,
            "_free_port",
            lambda: given.append(free() if given else port) or given[-1],
        )
        config = Config(run_name="port", server_timeout_s=60)
        up = functools.partial(
            eyas.server.serve._up,
            command=lambda port: ([sys.executable, "-c", code, str(port)], {}),
            folder=tmp_path,
            tied=True,
        )
        server = up(config)
        try:
            assert (
                len(given) == 2
                and server.url == f"http://127.0.0.1:{given[1]}"
                and httpx.get(f"{server.url}/health").status_code == 200
            )
        finally:
            server.down()
        with pytest.raises(EyasError, match="died while starting[^$]*Address already in use"):
            up(Config(run_name="port", port=port))


def test_server_is_found_again_and_a_second_one_refused(server):
    config, running = server
    assert find_server(config).pid == running.pid
    with pytest.raises(EyasError, match="already up"):
        server_up(config)
    port = int(running.url.rsplit(":", 1)[1])
    with pytest.raises(EyasError, match=f"port {port} of 127.0.0.1 is taken"):
        server_up(Config.create(run_name="other", target=config.target, port=port))


# --- extraction, on the same server ---------------------------------------------------------------


def profile(server, **changes) -> Config:
    config, running = server
    return Config.create(
        target=config.target,
        server_url=running.url,
        train_samples=24,
        heldout_samples=6,
        max_length=96,
        shard_mib=1,
        concurrency=4,
        **changes,
    )


def test_extract_verify_damage_repair(server, embedded):
    config = profile(server, run_name="whole")
    prompts, tokenizer = load_prompts(config.prompt_path), embedded.tokenizer()
    running = need_servers(config)
    summary = extract(config, running, embedded, prompts)
    assert (summary.asked, summary.extracted, summary.skipped, summary.failed) == (30, 30, 0, 0)
    store = Store.open(config.store_dir)
    assert store.boundaries == BOUNDARIES and len(list((store.folder / "shards").iterdir())) > 3
    report = verify(config.store_dir, prompts, tokenizer)
    assert report.ok, str(report)
    for c in chosen(config, prompts)[::7]:
        read, want = store.read(c.id), encode(c, tokenizer, config.max_length)
        assert (
            read["input_ids"].tolist() == want.input_ids.tolist()
            and read["loss_mask"].tolist() == want.loss_mask.tolist()
        )
        assert all(
            rows.shape == (len(want.input_ids), 576) and rows.dtype == torch.bfloat16
            for rows in read["states"].values()
        )
    again = extract(config, running, embedded, prompts)
    assert (again.extracted, again.skipped, again.total_tok, again.bytes) == (
        0,
        30,
        summary.total_tok,
        summary.bytes,
    )

    ids, whole = (
        store.samples(),
        {path.name: path.read_bytes() for path in (store.folder / "shards").iterdir()},
    )
    victim = store.folder / "shards" / store.row(ids[5])["shard"]
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1  # the last byte of the last tensor: one sample
    victim.write_bytes(content)
    torn = store.folder / "shards" / store.row(ids[-1])["shard"]
    os.truncate(torn, torn.stat().st_size // 2)
    store = Store.open(config.store_dir)
    report = verify(config.store_dir, prompts, tokenizer)
    in_victim = [id for id in ids if store.row(id)["shard"] == victim.name]
    in_torn = [id for id in ids if store.row(id)["shard"] == torn.name]
    assert not report.ok and set(report.damaged) == {in_victim[-1], *in_torn}, report.damaged
    repair(config.store_dir, report)
    mended = extract(config, running, embedded, prompts)
    assert (mended.extracted, mended.skipped) == (1 + len(in_torn), 29 - len(in_torn))
    assert verify(config.store_dir, prompts, tokenizer).ok
    assert not list((server[0].server_dir / "spool").iterdir())
    assert set(whole) == {path.name for path in (store.folder / "shards").iterdir()}


def test_killed_halfway_the_same_command_finishes(server, embedded):
    config = profile(server, run_name="killed")
    overrides = [
        arg
        for name in (
            "run_name",
            "target",
            "server_url",
            "train_samples",
            "heldout_samples",
            "max_length",
            "shard_mib",
            "concurrency",
        )
        for arg in ("-p", name, str(getattr(config, name)))
    ]
    command = [
        sys.executable,
        "-m",
        "eyas",
        "extract",
        "--profile",
        "smoke",
        *overrides,
        "-p",
        "boundaries",
        "[2,15,27]",
    ]
    slowly = [*command, "-p", "concurrency", "1"]  # so that there is time to kill it
    process = subprocess.Popen(slowly, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    index = config.store_dir / "index.parquet"
    deadline = time.monotonic() + 240
    while not (index.is_file() and (read_parquet(index)["state"] == "extracted").sum() >= 8):
        assert process.poll() is None and time.monotonic() < deadline, (
            "it ended before it could be killed"
        )
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    counted = int((read_parquet(index)["state"] == "extracted").sum())
    assert 8 <= counted < 30
    end = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert end.returncode == 0, end.stderr
    assert (
        f"asked 30 = extracted {30 - counted} + skipped {counted} (already there) + failed 0"
        in end.stdout
    )
    store = Store.open(config.store_dir)
    assert len(store.samples()) == len(set(store.samples())) == 30
    assert verify(config.store_dir, load_prompts(config.prompt_path), embedded.tokenizer()).ok


def test_a_store_of_another_target_or_setting_is_refused_by_the_field(server, embedded):
    config = profile(server, run_name="other-store")
    prompts, running = load_prompts(config.prompt_path), need_servers(config)
    extract(
        Config.create(**{**config.__dict__, "train_samples": 1, "heldout_samples": 1}),
        running,
        embedded,
        prompts,
    )
    manifest = config.store_dir / "manifest.json"
    record = json.loads(manifest.read_text())
    record["target"]["fingerprint"] = "of-another-target"
    manifest.write_text(json.dumps(seal(record)))
    with pytest.raises(EyasError, match="target.fingerprint"):
        extract(config, running, embedded, prompts)


def test_too_little_disk_is_said_before_the_first_request(server, embedded, monkeypatch):
    import eyas.capture.plan

    config = profile(server, run_name="full")
    monkeypatch.setattr(eyas.capture.plan, "free_bytes", lambda folder: 1000)
    before = server[1].status()["capture"]["captured"]
    with pytest.raises(EyasError, match="the disk of the store.* has 0.977 KiB free"):
        extract(config, need_servers(config), embedded, load_prompts(config.prompt_path))
    assert server[1].status()["capture"]["captured"] == before


# --- life of a server, without a model ------------------------------------------------------------


def test_a_dead_server_is_noticed_at_once_with_the_end_of_its_log(tmp_path):
    with open(tmp_path / "server.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "print('no such weights'); raise SystemExit(3)"],
            stdout=log,
            start_new_session=True,
        )
    created = started_ticks(process.pid)
    started = time.monotonic()
    with pytest.raises(EyasError, match="(?s)died while starting.*no such weights"):
        Server("http://127.0.0.1:9", process.pid, created, tmp_path).wait(timeout_s=120)
    assert time.monotonic() - started < 60
    process.wait()


def test_down_ends_the_whole_family_and_nobody_else(tmp_path):
    stubborn = (
        "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN); "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
    parent = psutil.Process(process.pid)
    end = time.monotonic() + 60
    while not parent.children():
        assert time.monotonic() < end
        time.sleep(0.05)
    family = [parent, *parent.children()]
    Server("http://127.0.0.1:9", process.pid, started_ticks(process.pid) - 100, tmp_path).down(
        timeout_s=1
    )  # another process with this pid
    assert parent.is_running()
    Server("http://127.0.0.1:9", process.pid, started_ticks(process.pid), tmp_path).down(
        timeout_s=1
    )
    process.wait()
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)


def test_a_server_that_nobody_collects_is_down(tmp_path):
    """As in a report, which inherits the servers of its notebooks: they stay zombies until it ends,
    and down waited half a minute for them.
    """
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            (
                "import subprocess, time; print(subprocess.Popen(['sleep', '600'], "
                "start_new_session=True).pid, flush=True); time.sleep(600)"
            ),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    process = psutil.Process(int(holder.stdout.readline()))
    Server("http://127.0.0.1:9", process.pid, started_ticks(process.pid), tmp_path).down()
    assert process.status() == psutil.STATUS_ZOMBIE and still_running([process], 0.0) == []
    assert still_running([psutil.Process(holder.pid)], 0.0) != []
    holder.kill()
    holder.wait()


def test_what_a_dead_server_left_behind_is_ended_too(tmp_path):
    """SGLang's detokenizer has been seen to outlive a server that was killed.

    What else is in a session of that number is somebody's own: after a new start they count anew.
    """
    code = (
        "exec -a sglang::detokenizer sleep 600 & echo $!; exec -a other sleep 600 & echo $!; wait"
    )
    process = subprocess.Popen(
        ["bash", "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    ticks, child, stranger = (
        started_ticks(process.pid),
        *(psutil.Process(int(process.stdout.readline())) for _ in range(2)),
    )
    end = time.monotonic() + 60
    while stranger.cmdline()[:1] != ["other"] or child.cmdline()[:1] != ["sglang::detokenizer"]:
        assert time.monotonic() < end
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert child.is_running()
    Server("http://127.0.0.1:9", process.pid, ticks, tmp_path).down(timeout_s=1)
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running() and stranger.is_running()
    stranger.kill()


def test_a_server_whose_record_cannot_be_written_is_not_left(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(eyas.server.serve, "write_json", full)
    mark = f"sleep 600 # {tmp_path}"
    with pytest.raises(OSError, match="No space"):
        eyas.server.serve._start(["bash", "-c", mark], {}, 1, tmp_path, tied=True)
    assert not [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]


def test_an_address_that_is_none_is_said():
    with pytest.raises(EyasError, match="'http://host:port' is no address.*-p server_url"):
        Server("http://host:port").wait(5)


def test_boundaries_outside_the_target_are_refused_before_a_server_starts(embedded, data):
    with pytest.raises(EyasError, match=r"\[31\].*0 to 30"):
        server_up(Config.create(run_name="x", target=str(embedded.folder), boundaries=(2, 31)))


def test_a_plugin_for_another_sglang_ends_the_process(monkeypatch):
    import eyas_capture

    monkeypatch.setenv("EYAS_CAPTURE", json.dumps({"boundaries": [0], "spool": "spool"}))
    monkeypatch.setattr(eyas_capture, "SGLANG_VERSIONS", ("0.0.1",))
    with pytest.raises(SystemExit):
        eyas_capture.register()
