"""Plan an extraction: bytes, files, time, and whether the disk has room, without a server.

`python -m eyas plan --profile P`
"""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import read_json
from eyas.models.boundaries import boundaries_of
from eyas.models.target import target_of
from eyas.progress import bytes_text, duration_text
from eyas.store.reader import free_bytes, token_bytes
from eyas.store.summary import last_run

SPARE_BYTES = 64 * 2**20  # index, head, and what a file system keeps for itself


@dataclass(frozen=True)
class Known:
    """Hold what `plan` cannot count on this machine; 0: count it here.

    `tok_per_s` is a measured rate of extraction; 0: the rate of this run's last extraction.
    """

    tok: int = 0
    samples: int = 0
    hidden_size: int = 0
    blocks: int = 0
    tok_per_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Hold the figures of an extraction.

    `tok_per_s` 0: nothing was measured yet. `states_bytes` is tokens x boundaries x hidden size x
    width. `bytes` adds token ids, masks and scales.
    """

    samples: int
    tok: int
    boundaries: tuple[int, ...]
    hidden_size: int
    dtype: str
    shard_bytes: int
    spool_bytes: int
    tok_per_s: float

    @property
    def bytes(self) -> int:
        return self.tok * token_bytes(len(self.boundaries), self.hidden_size, self.dtype)

    @property
    def states_bytes(self) -> int:
        return self.bytes - self.tok * token_bytes(len(self.boundaries), 0, self.dtype)

    @property
    def shards(self) -> int:
        return math.ceil(self.bytes / self.shard_bytes)

    @property
    def seconds(self) -> float | None:
        return self.tok / self.tok_per_s if self.tok_per_s else None

    def __str__(self) -> str:
        time = (
            "not known yet: no extraction of this run was measured"
            if self.seconds is None
            else (
                f"{self.seconds / 60:.0f} minutes at {self.tok_per_s:,.0f} tok/s"
                if self.seconds >= 60
                else f"{duration_text(self.seconds)} at {self.tok_per_s:,.0f} tok/s"
            )
        )
        return "\n".join(
            (
                f"{self.samples:,} samples, {self.tok:,} tokens, "
                f"boundaries {list(self.boundaries)}, "
                f"hidden size {self.hidden_size:,}, {self.dtype}",
                f"states  {bytes_text(self.states_bytes)} ({self.states_bytes:,} bytes)",
                f"files   {self.shards:,} of {bytes_text(self.shard_bytes)}, "
                f"{bytes_text(self.bytes)} with token ids and masks",
                f"spool   at most {bytes_text(self.spool_bytes)} at any moment",
                f"time    {time}",
            )
        )


def store_dtype(config: Config, computed: str) -> str:
    """Return the dtype in which states are stored that the server computes in `computed`."""
    return "float8_e4m3fn" if config.store_fp8 else computed


def make_plan(config: Config, known: Known | None = None) -> Plan:
    """Return the plan for the profile's prompt set and target.

    `known` gives the figures of what is not on this machine.
    """
    known = known or Known()
    if known.blocks and known.hidden_size:
        _check_sizes(config, known)
        n_blocks, hidden_size = known.blocks, known.hidden_size
    else:
        target = target_of(config)
        n_blocks, hidden_size = target.n_blocks, target.hidden_size
    if known.samples and known.tok:
        samples, tok = known.samples, known.tok
    else:
        lengths = _lengths(config)
        samples, tok = len(lengths), sum(lengths)
    return planned(config, samples, tok, n_blocks, hidden_size, config.dtype, known.tok_per_s)


def _check_sizes(config: Config, known: Known) -> None:
    """Raise EyasError where these are not the sizes of a target that is on this machine."""
    path = Path(config.target).expanduser() / "config.json"
    if not path.is_file():
        return
    text = read_json(path)
    text = text.get("text_config", text)
    for option, given, name in (
        ("--blocks", known.blocks, "num_hidden_layers"),
        ("--hidden-size", known.hidden_size, "hidden_size"),
    ):
        if given != text.get(name, given):
            raise EyasError(
                f"{option} {given:,}, and {path.parent.name} has {text[name]:,}",
                "the size of the target, or neither --blocks nor --hidden-size",
                "python -m eyas plan",
            )


def planned(
    config: Config,
    samples: int,
    tok: int,
    n_blocks: int,
    hidden_size: int,
    computed: str,
    tok_per_s: float = 0.0,
) -> Plan:
    """Return the plan for so many samples and tokens.

    `computed` is the dtype in which the server computes. `tok_per_s` 0 stands for the rate of
    this run's last extraction.
    """
    boundaries = boundaries_of(config, n_blocks).stored
    return Plan(
        samples,
        tok,
        boundaries,
        hidden_size,
        store_dtype(config, computed),
        config.shard_mib * 2**20,
        int(config.spool_gib * 2**30),
        tok_per_s or last_run(config.store_dir).get("tok_per_s", 0.0),
    )


def check_room(plan: Plan, store: Path, spools: dict[Path, int], anyway: bool = False) -> None:
    """Raise EyasError with the numbers where a disk is too small, unless `anyway`.

    `spools`: the most bytes that wait in each folder. A folder that does not exist here is on
    another machine. The client says so when it cannot see the first file.
    """
    disks: dict[int, tuple[list[str], Path, int]] = {}
    for name, folder, need in (
        ("store", store, plan.bytes),
        *(("spool", spool, need) for spool, need in spools.items() if spool.exists()),
    ):
        names, folder, total = disks.get(folder.stat().st_dev, ([], folder, 0))
        disks[folder.stat().st_dev] = ([*names, name], folder, total + need)
    for names, folder, need in disks.values():
        if not anyway and free_bytes(folder) < need + SPARE_BYTES:
            raise EyasError(
                f"the disk of the {' and '.join(dict.fromkeys(names))} has "
                f"{bytes_text(free_bytes(folder))} free, {bytes_text(need)} will be written "
                f"({plan.samples:,} samples, {plan.tok:,} tokens)",
                f"room for them and {bytes_text(SPARE_BYTES)} to spare",
                "free some, set EYAS_DATA to a larger disk, ask for fewer samples "
                "(-p train_samples N), -p store_fp8 true, or --anyway",
            )


def _lengths(config: Config) -> list[int]:
    from eyas.prompts.chat_template import encode
    from eyas.prompts.prompt_set import chosen, load_prompts

    tokenizer = target_of(config).tokenizer()
    lengths = []
    for conversation in chosen(config, load_prompts(config.answered_path)):
        with contextlib.suppress(EyasError):  # refused by the template; extraction will list it
            lengths.append(len(encode(conversation, tokenizer, config.max_length).input_ids))
    return lengths
