"""How much an extraction will write, how long it will take, and whether there is room: `python -m eyas plan --profile P`, without a server."""

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
class Plan:
    """`tok_per_s` 0: nothing was measured yet. `states_bytes` are tokens x boundaries x hidden size x width; ids, masks and scales come on top in `bytes`."""

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
                f"{self.samples:,} samples, {self.tok:,} tokens, boundaries {list(self.boundaries)}, hidden size {self.hidden_size:,}, {self.dtype}",
                f"states  {bytes_text(self.states_bytes)} ({self.states_bytes:,} bytes)",
                f"files   {self.shards:,} of {bytes_text(self.shard_bytes)}, {bytes_text(self.bytes)} with token ids and masks",
                f"spool   at most {bytes_text(self.spool_bytes)} at any moment",
                f"time    {time}",
            )
        )


def store_dtype(config: Config, computed: str) -> str:
    """How states are stored that the server computes in `computed`."""
    return "float8_e4m3fn" if config.store_fp8 else computed


def make_plan(config: Config) -> Plan:
    """From the profile's prompt set and target as they lie here; `plan_*` settings stand in for what does not."""
    n_blocks, hidden_size = config.plan_blocks, config.plan_hidden_size
    if not (n_blocks and hidden_size):
        target = target_of(config)
        n_blocks, hidden_size = target.n_blocks, target.hidden_size
    else:
        _check_sizes(config)
    samples, tok = config.plan_samples, config.plan_tok
    if not (samples and tok):
        lengths = _lengths(config)
        samples, tok = len(lengths), sum(lengths)
    return planned(config, samples, tok, n_blocks, hidden_size, config.dtype)


def _check_sizes(config: Config) -> None:
    """Raise EyasError where plan_blocks or plan_hidden_size are not those of a target that is on this machine."""
    path = Path(config.target).expanduser() / "config.json"
    if not path.is_file():
        return
    text = read_json(path)
    text = text.get("text_config", text)
    for setting, name in (
        ("plan_blocks", "num_hidden_layers"),
        ("plan_hidden_size", "hidden_size"),
    ):
        planned_for = getattr(config, setting)
        if planned_for != text.get(name, planned_for):
            raise EyasError(
                f"{setting} = {planned_for}, and {path.parent.name} has {text[name]:,}",
                "the size of the target, or 0 to take it from the target",
                "-p plan_blocks 0 -p plan_hidden_size 0",
            )


def planned(
    config: Config, samples: int, tok: int, n_blocks: int, hidden_size: int, computed: str
) -> Plan:
    boundaries = boundaries_of(config, n_blocks).stored
    return Plan(
        samples,
        tok,
        boundaries,
        hidden_size,
        store_dtype(config, computed),
        config.shard_mib * 2**20,
        int(config.spool_gib * 2**30),
        config.plan_tok_per_s or last_run(config.store_dir).get("tok_per_s", 0.0),
    )


def check_room(plan: Plan, store: Path, spools: dict[Path, int], anyway: bool = False) -> None:
    """EyasError with the numbers when what will lie on a disk does not fit; `anyway` says that somebody knows better.

    `spools`: the most that waits in each. One that is not seen here lies on another machine; the client says so when the first file cannot be seen.
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
                f"the disk of the {' and '.join(dict.fromkeys(names))} has {bytes_text(free_bytes(folder))} free, {bytes_text(need)} will be written ({plan.samples:,} samples, {plan.tok:,} tokens)",
                f"room for them and {bytes_text(SPARE_BYTES)} to spare",
                "free some, set EYAS_DATA to a larger disk, ask for fewer samples (-p train_samples N), -p store_fp8 true, or --anyway",
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
