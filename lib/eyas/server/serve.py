"""Start, wait for, inspect and stop the SGLang server of a run.

`python -m eyas server up|wait|status|down --profile P`

The server runs in a session of its own, on 127.0.0.1. Its log and `server.json` (pid, port,
command) are in the run's server folder, so that it outlives a notebook's kernel and is found again.
Everything is stopped by that pid.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import data_dir, read_json, write_json
from eyas.models.boundaries import boundaries_of
from eyas.models.target import Target, load_target, target_of
from eyas.passthrough import read_flags, read_variables
from eyas.processes import still_running

LOG_TAIL_LINES = 15
# SGLang keeps a few positions for output; a prompt as long as the context must be captured too.
CONTEXT_MARGIN_TOK = 8
PORT_TRIES = 3
SERVING_CHUNK_TOK = 2048  # prefill of a server that serves, as SGLang does on a small GPU
# For every client that threads share. The number of threads bounds the connections: with a bound
# of its own httpcore closes idle connections, also one that another thread was given just now,
# whose answer is then lost. An idle connection is closed before the server does (uvicorn: 5 s).
LIMITS = httpx.Limits(keepalive_expiry=2.0)


@dataclasses.dataclass(frozen=True)
class Server:
    """Name a server that Eyas started (pid > 0), or one that the user runs (pid 0).

    A server with pid 0 is never stopped by Eyas.
    """

    url: str
    pid: int = 0
    started: int = 0  # `started_ticks(pid)`: a pid alone may be another process by now
    folder: Path | None = None
    owner: str = ""  # who started it: 'hand' (`server up`), 'report PID', or 'notebook'

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    def process(self) -> psutil.Process | None:
        """Return the running process, or None when it has ended (a zombie has)."""
        try:
            process = psutil.Process(self.pid)
            same = started_ticks(self.pid) == self.started
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except (psutil.NoSuchProcess, OSError):
            return None

    def wait(self, timeout_s: float) -> "Server":
        """Wait until the server answers, and return it.

        Raise EyasError with the end of its log as soon as its process has died.
        """
        end = time.monotonic() + timeout_s
        while True:
            if self.pid and self.process() is None:
                raise EyasError(
                    f"the server died while starting; the end of {shown(self.log)}:\n"
                    f"{log_tail(self.log)}\n",
                    "",
                    "python -m eyas doctor",
                )
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            except httpx.InvalidURL as error:
                raise EyasError(
                    f"{self.url!r} is no address: {error}",
                    "http://host:port",
                    "-p server_url http://127.0.0.1:30000",
                ) from None
            except httpx.HTTPError:
                pass
            if time.monotonic() > end:
                tail = f"; the end of its log:\n{log_tail(self.log)}\n" if self.pid else ""
                raise EyasError(
                    f"no answer from {self.url} after {timeout_s:.0f} s{tail}",
                    "",
                    "python -m eyas server up -p server_timeout_s 600",
                )
            time.sleep(0.3)

    def status(self) -> dict:
        """Return what matters, read back from the running server and not from our flags."""
        try:
            answer = httpx.get(f"{self.url}/server_info", timeout=httpx.Timeout(120, connect=30))
            answer.raise_for_status()
            info = dict(answer.json())
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError) as error:
            raise EyasError(
                f"no answer from {self.url}: {type(error).__name__}",
                "a running SGLang server",
                "python -m eyas server up"
                if self.pid
                else "start it, or leave server_url (serve_url) empty",
            ) from None
        capture, drafter = (
            next((state[name] for state in info.get("internal_states", []) if name in state), None)
            for name in ("eyas_capture", "eyas_drafter")
        )
        return {
            "url": self.url,
            "pid": self.pid or None,
            "model": info.get("model_path"),
            "sglang": info.get("version"),
            "device": info.get("device"),
            "dtype": info.get("dtype"),
            "context_tok": info["context_length"] - CONTEXT_MARGIN_TOK
            if info.get("context_length")
            else None,
            "max_total_tok": info.get("max_total_num_tokens"),
            "radix_cache": not info.get("disable_radix_cache", False),
            "chunked_prefill": (info.get("chunked_prefill_size") or -1) > 0,
            "overlap": not info.get("disable_overlap_schedule", False),
            "prefill_graph": info.get("cuda_graph_backend_prefill") not in (None, "disabled"),
            "capture": capture,  # None: the plugin captures nothing
            "drafter": _drafter(info, drafter),  # None: the server doesn't draft
            "flags": {
                name: info.get(name)
                for name in ("attention_backend", "sampling_backend", "tp_size", "random_seed")
            },
        }

    def down(self, timeout_s: float = 20.0) -> None:
        """Stop the processes of a server that Eyas started; never anybody else's."""
        if not self.pid:
            return
        process = self.process()
        family = (
            self._left_behind() if process is None else [process, *process.children(recursive=True)]
        )
        for sign, members, patience_s in (
            (signal.SIGTERM, family, 1.0),
            (signal.SIGKILL, family[:1], timeout_s),
            (signal.SIGKILL, family, 10.0),
        ):
            # The first process looks for a SIGTERM every 5 s only. Once the others have ended it
            # has nothing to do, so it is killed next.
            for member in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.send_signal(sign)
            if not still_running(family, patience_s):
                break
        (self.folder / "server.json").unlink(missing_ok=True)

    def _left_behind(self) -> list[psutil.Process]:
        """Return SGLang's processes whose first process died: those of its session.

        Only processes of SGLang count: after a restart of the machine the session's number may be
        anybody's. Where the pid is another process by now, nothing was left behind.
        """
        try:
            if started_ticks(self.pid) != self.started:
                return []
        except OSError:  # no such process; none gets the number while its session exists
            pass
        return [
            process
            for process in psutil.process_iter()
            if _session(process.pid) == self.pid and _is_sglang(process)
        ]

    def done(self) -> None:
        """Stop the server where this process started it.

        A server of `server up`, or of a notebook whose server a report uses, keeps running.
        """
        if self.owner == _owner():
            self.down()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        self.down()


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:  # just ended
        return -1


def started_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since the machine started.

    Unlike the time of day, nobody sets it back. Raise OSError when the process has ended.
    """
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _drafter(info: dict, read_back: dict | None) -> dict | None:
    """Return the drafting settings, and the `boundaries` that feed the drafter.

    The plugin reads the boundaries from the running model; they are None where it is not on.
    """
    if not info.get("speculative_algorithm"):
        return None
    settings = {
        name: info.get(f"speculative_{flag}")
        for name, flag in (
            ("algorithm", "algorithm"),
            ("path", "draft_model_path"),
            ("num_steps", "num_steps"),
            ("topk", "eagle_topk"),
            ("draft_tokens", "num_draft_tokens"),
        )
    }
    return settings | {
        "boundaries": read_back and read_back["boundaries"],
        "ids": read_back and read_back["ids"],
    }


def server_command(
    config: Config,
    model: Path,
    boundaries: tuple[int, ...],
    port: int,
    spool: Path,
    chunk_tok: int = 0,
    draft: Path | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the exact command, and the variables that it needs beyond the caller's.

    Everything comes from the profile. Flags of server_args replace Eyas's own of the same name.
    `chunk_tok`: 0 for extraction. Otherwise the server has the prefix cache, and prefill in chunks
    of so many tokens, as servers run elsewhere.
    `draft`: an exported drafter (`eyas.models.export`) to draft with, as EAGLE3.

    Where nothing is captured, a GPU server has the overlap scheduler and prefill graphs, as in
    production: what the plugin tells of each verify step (`eyas_accepted`) and of the drafter is
    read when results are processed, in order and on the host, which neither changes. A CPU server
    has neither: SGLang itself turns overlap off for a server that drafts
    (`speculative_hook._disable_overlap_schedule_for_cpu`), so the plain server it is compared with
    has none either, and the platform has no graphs.
    """
    # A batch is computed, its rows are read, and only then the next batch is computed.
    synchronous = bool(boundaries) or config.device == "cpu"
    flags = {
        "--model-path": model,
        "--host": "127.0.0.1",
        "--port": port,
        "--device": config.device,
        "--dtype": config.dtype,
        "--tp-size": config.tensor_parallel,
        "--context-length": config.context_tok + CONTEXT_MARGIN_TOK,
        "--max-total-tokens": config.max_total_tok,
        "--max-prefill-tokens": config.max_prefill_tok or config.max_total_tok,
        "--chunked-prefill-size": chunk_tok or -1,  # -1: a sample's rows come in one piece
    }
    if synchronous:
        flags["--cuda-graph-backend-prefill"] = "disabled"  # hooks see every prefill
    flags["--random-seed"] = config.seed
    switches = ["--sleep-on-idle"]
    if synchronous:
        switches.append("--disable-overlap-schedule")
    switches.append("--skip-server-warmup")
    if not chunk_tok:
        switches.append("--disable-radix-cache")
    if draft is not None:
        flags |= {
            "--speculative-algorithm": "EAGLE3",  # EAGLE would run too, and accept nothing
            "--speculative-draft-model-path": draft,
            "--speculative-num-steps": config.speculative_num_steps,
            "--speculative-eagle-topk": config.speculative_eagle_topk,
            "--speculative-num-draft-tokens": config.verified_tok,
        }
        if config.speculative_use_rejection_sampling:
            switches.append("--speculative-use-rejection-sampling")
    environment = {
        "EYAS_CAPTURE": json.dumps(
            {
                "boundaries": list(boundaries),
                "spool": str(spool),
                "quota": int(config.spool_gib * 2**30),
            }
        ),
        "SGLANG_PLUGINS": "eyas_capture",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the margin
    }
    if config.device == "cpu":
        flags |= {
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--grammar-backend": "none",
            "--cuda-graph-backend-decode": "disabled",
            # max_total_tok bounds the cache. What other processes take counts against this.
            "--mem-fraction-static": 0.9,
        }
        environment |= {
            "SGLANG_PLATFORM": "eyas_cpu",
            "OMP_NUM_THREADS": str(config.threads),
        }
    if config.trust_remote_code:
        switches.append("--trust-remote-code")
    command = [sys.executable, "-m", "sglang.launch_server"]
    own = read_flags(config.server_args)
    for name, value in flags.items():
        if name not in own:
            command += [name, str(value)]
    command += switches
    for name, values in own.items():
        command += [name, *values]
    return command, environment | read_variables(config.server_env)


def command_text(config: Config, n_blocks: int = 0) -> str:
    """Return what `server up` would start, as a shell reads it: a line per variable and flag.

    Nothing is started. Target and GPU need not be on this machine: `n_blocks` is the number of
    blocks of a target that is elsewhere. Port 0 (a free one) is written as SGLang's own 30000.
    """
    folder = Path(config.target)
    if not n_blocks or folder.is_dir():
        target = target_of(config)
        folder = target.folder
        n_blocks = target.n_blocks
    boundaries = boundaries_of(config, n_blocks).stored
    spool = Path(config.spool_dir) if config.spool_dir else config.server_dir / "spool"
    command, environment = server_command(config, folder, boundaries, config.port or 30000, spool)
    lines = [f"{name}={shlex.quote(value)}" for name, value in environment.items()] + [
        "python -m sglang.launch_server"
    ]
    for word in command[3:]:
        if word.startswith("--"):
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n".join(lines)


def check_device(config: Config) -> None:
    """Raise EyasError where the server needs more GPUs than this machine shows."""
    if config.device != "cuda":
        return
    import torch  # seconds to import

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < config.tensor_parallel:
        raise EyasError(
            f"device = 'cuda' with tensor_parallel = {config.tensor_parallel}, "
            f"and torch {torch.__version__} sees {found} GPUs here",
            "as many as that, with requirements/gpu.txt installed",
            "python -m eyas server command, which prints what to start where they are, "
            "or -p device cpu -p tensor_parallel 1",
        )


def server_up(config: Config, tied: bool = False, chunk_tok: int = 0, owner: str = "") -> Server:
    """Start the run's server and wait until it serves with the capture plugin on.

    `tied` ends it with this process however that dies (tests); otherwise it runs until `down`.
    `chunk_tok` as in `server_command`. `owner`: who may stop it with `done`; by default the report
    or the notebook that this is.

    Raise EyasError where one is already up, the port is taken, a boundary is outside 0..N, the
    server died (with the end of its log), or it started without the plugin (it is stopped then).
    """
    check_device(config)
    target = target_of(config)
    boundaries = boundaries_of(config, target.n_blocks).stored
    folder = config.server_dir
    running = find_server(config)
    if config.server_url:
        raise EyasError(
            f"server_url = {config.server_url!r} names a server of your own",
            "an empty one to start another",
            "python -m eyas server up -p server_url ''",
        )
    if running is not None:
        raise EyasError(
            f"a server of run {config.run_name!r} is already up at {running.url} "
            f"(pid {running.pid})",
            "",
            f"python -m eyas server down {_profile_hint(config)}",
        )
    spool = Path(config.spool_dir) if config.spool_dir else folder / "spool"
    spool.mkdir(parents=True, exist_ok=True)
    if not config.spool_dir:
        for leftover in spool.iterdir():  # of a server that is gone
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    server = _up(
        config,
        lambda port: server_command(config, target.folder, boundaries, port, spool, chunk_tok),
        folder,
        tied,
        owner,
    )
    try:
        if server.status()["capture"] is None:
            raise EyasError(
                f"the server came up without the capture plugin; see {shown(server.log)}",
                "eyas_capture applied",
                "python -m eyas doctor",
            )
    except BaseException:
        server.down()
        raise
    return server


def serving_up(config: Config, draft: Path | None, folder: Path, *, tied: bool = False) -> Server:
    """Start a server as in production, with the exported drafter `draft`, and wait for it.

    It has the prefix cache and captures nothing. server.json and server.log go into `folder`;
    `tied` as in `server_up`. Its `status()["drafter"]` says which boundaries feed the drafter. With
    and without `draft` the flags are the same but for those of drafting, so that the speed of the
    two may be compared (`server_command` says what a CPU server has not).

    Raise EyasError for float32 on a GPU, a server of that folder that is up, a port that is taken,
    a draft folder without a drafter, a server that died, or started without drafter or plugin.
    """
    check_dtype(config, config.dtype, "dtype")
    target = target_of(config)
    if draft is not None and not (Path(draft) / "config.json").is_file():
        raise EyasError(
            f"no config.json in {Path(draft).name!r}",
            "an exported drafter",
            "python -m eyas drafter export --profile demo",
        )
    if draft is not None and config.speculative_use_rejection_sampling:
        _check_rejection_sampling(config, read_json(Path(draft) / "config.json"))
    running = started_server(folder)
    if running is not None:
        raise EyasError(
            f"a server of {shown(folder)} is already up at {running.url} (pid {running.pid})",
            "",
            f"stop it: kill {running.pid}",
        )
    folder.mkdir(parents=True, exist_ok=True)
    server = _up(
        config,
        lambda port: server_command(
            config, target.folder, (), port, folder, SERVING_CHUNK_TOK, draft
        ),
        folder,
        tied,
    )
    try:
        drafter = server.status()["drafter"]
        if draft is not None and (drafter is None or drafter["boundaries"] is None):
            raise EyasError(
                f"the server came up without {'its drafter' if drafter is None else 'the plugin'}; "
                f"see {shown(server.log)}",
                "both",
                "python -m eyas doctor",
            )
    except BaseException:
        server.down()
        raise
    return server


def check_dtype(config: Config, dtype: str, setting: str) -> None:
    """Raise EyasError for float32 on a GPU. `setting`: the one that asks for it.

    The attention that SGLang 0.5.23 chooses there (fa3, trtllm_mha, FlashInfer:
    `model_override_base`) takes no float32. Triton's does, and multiplies it in TF32 (`tl.dot`
    without input_precision), ten bits of fraction: then texts differ as they may in bfloat16, and
    the check would report a fault where there is none.
    """
    if config.device == "cuda" and dtype == "float32":
        raise EyasError(
            "float32 on a GPU: SGLang's attention takes none there, or multiplies it in TF32, "
            "in which texts need not be equal",
            "bfloat16, as in production; decode compares the texts in float32",
            f"-p {setting} bfloat16",
        )


def _check_rejection_sampling(config: Config, draft: dict) -> None:
    """Raise EyasError where the setting would end SGLang 0.5.23 after half a minute.

    So it would on a GPU with a small draft vocabulary, and on the plain CPU platform.
    """
    without = (
        "-p speculative_use_rejection_sampling false "
        "(sampled output has the target's own distribution all the same)"
    )
    if draft["draft_vocab_size"] != draft["vocab_size"]:
        raise EyasError(
            "speculative_use_rejection_sampling with a draft vocabulary of "
            f"{draft['draft_vocab_size']:,} of {draft['vocab_size']:,} tokens",
            "all of them: SGLang takes no fewer there",
            without,
        )
    if config.device == "cpu":
        raise EyasError(
            "speculative_use_rejection_sampling on a plain CPU",
            "a GPU: its kernel has no plain form",
            without,
        )


def _up(
    config: Config,
    command: Callable[[int], tuple[list[str], dict[str, str]]],
    folder: Path,
    tied: bool,
    owner: str = "",
) -> Server:
    """Start `command(port)` and wait.

    Another program may take the free port before the server does, within half a minute. Then the
    server is started again with another port.
    """
    for tries_left in reversed(range(PORT_TRIES)):
        port = _port_for(config)
        server = _start(*command(port), port, folder, tied, owner)
        try:
            return server.wait(config.server_timeout_s)
        except BaseException as error:
            server.down()
            if not (
                isinstance(error, EyasError)
                and not config.port
                and tries_left
                and "address already in use" in log_tail(server.log, 400).lower()
            ):
                raise
    raise AssertionError  # the last try returns or raises


def _start(
    command: list[str],
    environment: dict[str, str],
    port: int,
    folder: Path,
    tied: bool,
    owner: str = "",
) -> Server:
    """Start the process in a session of its own, with its log and server.json.

    It is not waited for.
    """
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | environment,
            start_new_session=True,
            preexec_fn=_die_with_parent if tied else None,
        )
    try:
        server = Server(
            f"http://127.0.0.1:{port}",
            process.pid,
            started_ticks(process.pid),
            folder,
            owner or _owner(),
        )
        write_json(
            folder / "server.json",
            {
                "url": server.url,
                "pid": server.pid,
                "started": server.started,
                "owner": server.owner,
                "command": command,
                "environment": environment,
            },
        )
    except BaseException:  # without server.json nobody would find it
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        (folder / "server.json").unlink(missing_ok=True)  # an interrupt may come after its rename
        raise
    return server


def find_server(config: Config) -> Server | None:
    """Return the server of this run if it is up.

    It is the (first) `server_url` of the profile, or the running one that server.json names.
    """
    if config.server_url:
        return Server(config.server_url.split(",")[0].strip().rstrip("/"))
    return started_server(config.server_dir)


def started_server(folder: Path) -> Server | None:
    """Return the server that server.json of a run's server folder names, if it is running."""
    path = folder / "server.json"
    if not path.is_file():
        return None
    record = read_json(path)
    server = Server(
        record["url"], record["pid"], record["started"], folder, record.get("owner", "")
    )
    if server.process() is None:
        server.down()  # what it left behind, and the record
        return None
    return server


def need_server(config: Config) -> Server:
    server = find_server(config)
    if server is None:
        raise EyasError(
            f"run {config.run_name!r} has no server",
            "a running one",
            f"python -m eyas server up {_profile_hint(config)}",
        )
    return server


def need_servers(config: Config) -> list[Server]:
    """Return all servers of this run: `server_url` may name several, with commas between."""
    if "," in config.server_url:
        return [
            Server(url.strip().rstrip("/")) for url in config.server_url.split(",") if url.strip()
        ]
    return [need_server(config)]


def check_for_capture(status: dict, boundaries: tuple[int, ...], target: Target) -> None:
    """Raise EyasError for a server whose settings would lose or merge rows, or another model.

    The message names the flag.
    """
    again = "python -m eyas server down, then python -m eyas server up"
    capture = status["capture"]
    if capture is None:
        raise EyasError(
            f"the server at {status['url']} has no capture plugin",
            "eyas_capture on",
            "python -m eyas server up starts one with it; patches/README.md says how for your own",
        )
    if "quota" not in capture:
        raise EyasError(
            f"the server at {status['url']} has an older capture plugin ({capture['version']})",
            "this repository's",
            again,
        )
    for wrong, flag in (
        (
            status["radix_cache"],
            "--disable-radix-cache: tokens from the prefix cache pass no layer, "
            "their rows are lost",
        ),
        (
            status["chunked_prefill"],
            "--chunked-prefill-size -1: a long prompt's rows would come in pieces",
        ),
        (
            status["overlap"],
            "--disable-overlap-schedule: a batch's rows would be read while the next one "
            "is written",
        ),
        (
            status["prefill_graph"],
            "--cuda-graph-backend-prefill disabled: hooks do not run inside a graph",
        ),
    ):
        if wrong:
            raise EyasError(
                f"the server at {status['url']} runs without {flag}", "that flag", again
            )
    if capture["n_blocks"] != target.n_blocks or capture["hidden_size"] != target.hidden_size:
        raise EyasError(
            f"the server's model has {capture['n_blocks']} blocks of {capture['hidden_size']}",
            f"{target.name}: {target.n_blocks} of {target.hidden_size}",
            again,
        )
    model = Path(status["model"])
    if (
        (model / "config.json").is_file()
        and model.resolve() != target.folder.resolve()
        and load_target(str(model)).fingerprint != target.fingerprint
    ):
        raise EyasError(
            f"the server serves {model.name}, with other weights than {target.name}",
            f"the target {target.name}",
            again,
        )
    missing = sorted(set(boundaries) - set(capture["boundaries"]))
    if missing:
        raise EyasError(
            f"the server captures boundaries {capture['boundaries']}, not {missing}",
            f"{list(boundaries)}",
            again,
        )


def log_tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


def shown(path: Path) -> str:
    """Return a path as a message shows it: relative to the data folder where it can be."""
    try:
        return str(Path("data") / path.relative_to(data_dir()))
    except ValueError:
        return str(path)


def _is_sglang(process: psutil.Process) -> bool:
    try:
        return any("sglang" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _owner() -> str:
    return os.environ.get("EYAS_SERVER_OWNER", "notebook")  # `report` gives it to its notebooks


def _profile_hint(config: Config) -> str:
    return f"-p run_name {config.run_name}"


def _port_for(config: Config) -> int:
    port = config.port or _free_port()
    if _port_taken(port):
        raise EyasError(
            f"port {port} of 127.0.0.1 is taken by another server",
            "a free port",
            "python -m eyas server up -p port 0",
        )
    return port


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _port_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(
        1, signal.SIGKILL
    )  # PR_SET_PDEATHSIG; SGLang's own children die with it
