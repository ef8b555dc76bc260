"""Offline training of the drafter from a store, with training-time test. `python -m eyas train --profile demo`

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m eyas train --profile demo      # two ranks

What is computed is in `eyas.training.ttt`; here is the life of a run. An optimiser step takes a pack of whole samples, at most `batch_tok` tokens, in an order that
is a function of seed and epoch. Its slots may be cut into passes (`pass_tok`) and dealt to ranks and, on a CPU, to processes, one for each of `threads`
(`eyas.training.workers`): every part counts by the slots of the whole step, so the step is the same, to rounding, whatever the passes, ranks and threads. (A drafter's operators
are too small for two threads to share one.) The samples of the next step are read and packed while this one is computed.

Files in the run's drafter folder, each whole or absent:
  checkpoints/step-*.pt   the last few; resume gives bit for bit the weights of an undisturbed run on a CPU, to rounding where it goes on with other threads,
                          pass_tok or ranks. Nothing random happens after the weights are initialised but the order of the samples, so the step number
                          is all the state that the order needs
  best.safetensors        the drafter with the longest held-out acceptance so far (`eyas.evaluation.offline` over the stored held-out states)
  drafter.safetensors     at the end: the last weights, or the best where `patience` ended the run early
  imported.safetensors    the imported drafter that this training continued (`initial_weights drafter`), as it was
  metrics.parquet         tidy, COLUMNS, every few seconds;  tensorboard/: the same as event files
Checkpoints and drafters carry their record: data and settings, parity certificate, code version.
"""

import contextlib
import dataclasses
import math
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

import pandas as pd
import torch
from torch import nn

from eyas.config import Config
from eyas.errors import EyasError
from eyas.evaluation.offline import walk
from eyas.files import code_version, read_parquet, sha256_json, write_atomic
from eyas.models.boundaries import Boundaries, drafter_boundaries
from eyas.models.continuation import check_nothing_is_lost, keep_imported, only_one, read_start
from eyas.models.drafter import (
    BEST,
    FILE,
    IMPORTED,
    Drafter,
    DrafterConfig,
    initial_drafter,
    read_record,
    save_drafter,
)
from eyas.models.target import Target
from eyas.models.vocab import choose_vocab, count_tokens, coverage
from eyas.progress import Progress
from eyas.store.certificate import need_certificate
from eyas.store.mixture import Mixture
from eyas.training import distributed
from eyas.training.batch import Batch, pack, slots_of
from eyas.training.head_loss import Teacher
from eyas.training.losses import get_loss
from eyas.training.schedule import deal, plan, schedule, share
from eyas.training.ttt import Losses, batch_loss, step_weights
from eyas.training.workers import Team, freed_memory_kept, shared

ALL = "all of the store"  # where a setting is no part of an identity: nothing is left out
CLIP_NORM = 1.0
SLOT_ROWS = 4  # what a draft step of an active slot takes is what so many packed rows do, about
METRICS_S = 5.0  # how often the metrics are written anew
JUDGED = 8  # held-out samples of one pass, at most
RECENT = 50  # batches that a loss is compared with, to call it a spike
COLUMNS = [
    "step",
    "epoch",
    "split",
    "draft_step",
    "loss",
    "accuracy",
    "slots",
    "tok",
    "seconds",
    "acceptance_length",
]
SETTINGS = (
    "seed",
    "boundaries",
    "draft_vocab_size",
    "draft_steps",
    "step_decay",
    "epochs",
    "batch_tok",
    "learning_rate",
    "warmup_ratio",
    "train_dtype",
    "mix",
    "loss",
    "fc_norm",
    "norm_output",
    "initial_weights",
    "eval_steps",
    "patience",
)


@contextlib.contextmanager
def memory(found: str, expected: str, next_command: str):
    """Where memory ends in here, an EyasError of these parts says so."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not re.search(
            "(?i)can('|no)t allocate memory|not enough memory|bad_alloc|ALLOC_FAILED", str(error)
        ):
            raise
        raise EyasError(found, expected, next_command) from None


@dataclasses.dataclass(frozen=True)
class Ablation:
    """Hold what only benchmarks/ablations.py changes, to measure what the right choice is worth.

    `mask_shift`: slot j learns where loss_mask[j + mask_shift]; 0 is the common mistake.
    `loss_mean`: a step's loss is divided by its supervised "slots", or by the whole "grid" with
    prompts. Every drafter's record names both.
    """

    mask_shift: int = 1
    loss_mean: str = "slots"


class Size(NamedTuple):
    """Of a sample: active slots, supervised ones by draft step, and packed rows."""

    active: int
    supervised: list[int]
    packed: int


class Model(nn.Module):
    """What DDP and FSDP2 hook into: the loss of a pack as one forward."""

    def __init__(self, drafter: Drafter):
        super().__init__()
        self.drafter = drafter

    def forward(self, *pass_):
        losses = batch_loss(self.drafter, *pass_)
        return losses.total, losses


@dataclasses.dataclass(frozen=True)
class Work:
    """What one process has to do in an optimiser step. `weights` of a pass are those of the draft steps, all 0 where the process has nothing of its own."""

    epoch: int
    ids: list[str]  # of the whole step
    passes: list[tuple[Batch, list[float]]]
    counts: list[
        float
    ]  # what the sum of each draft step is divided by: over all passes and processes


class Training:
    """One run's state: what is trained, on what, and how far it is."""

    def __init__(self, config: Config, store, target: Target, ablation: Ablation | None = None):
        self.config, self.target = config, target
        self.ablation = ablation or Ablation()
        self.data = Mixture.open(config, store)
        self.certificates = (
            {}
            if config.without_parity
            else {name: need_certificate(each, name) for name, each in self.data.stores.items()}
        )
        made_for = self.data.manifest["target"]
        if made_for["fingerprint"] != target.fingerprint:
            raise EyasError(
                f"the store was made for another target: {made_for['name']} ({made_for['fingerprint'][:12]}...)",
                f"{target.name} ({target.fingerprint[:12]}...)",
                "train with that target, or extract into another run: -p run_name NAME",
            )
        self.start = read_start(config, target)
        if self.start is None:
            self.boundaries = drafter_boundaries(config, target.n_blocks)
        else:
            self.boundaries = Boundaries(self.start.drafter.config.boundaries, target.n_blocks)
        missing = sorted(set(self.boundaries.with_last) - set(self.data.boundaries))
        if missing:
            others = [b for b in self.data.boundaries if b != target.n_blocks]
            raise EyasError(
                f"the store has boundaries {list(self.data.boundaries)}, not {missing}",
                f"{list(self.boundaries.with_last)}",
                f"-p boundaries '{others}', or some of these; or extract the others into another run: -p run_name NAME",
            )
        rows = self.data.rows("train")
        if rows.empty:
            raise EyasError(
                "the store has no training sample",
                "at least one",
                "python -m eyas extract --profile demo",
            )
        unmasked = list(rows.loc[rows["loss_tok"] == 0, "key"])
        if unmasked:
            raise EyasError(
                f"the loss mask of {len(unmasked)} samples is zero everywhere: {', '.join(unmasked[:3])}",
                "supervised tokens in each",
                "python -m eyas verify --repair",
            )
        self.device = (
            torch.device(config.device, distributed.LOCAL_RANK)
            if config.device == "cuda"
            else torch.device("cpu")
        )
        self.threads = (
            config.threads if self.device.type == "cpu" and distributed.WORLD == 1 else 1
        )  # processes that share a step
        self.number = 0  # which of them this is
        self.parts = {
            "threads": self.threads,
            "pass_tok": config.pass_tok,
            "ranks": distributed.WORLD,
        }  # what a step is cut into: other parts, other rounding
        self.dtype, self.loss, self.weights = (
            getattr(torch, config.train_dtype),
            get_loss(config.loss),
            step_weights(config.draft_steps, config.step_decay),
        )
        self.lengths, self.heldout = (
            self.data.lengths("train") | self.data.lengths("heldout"),
            self.data.samples("heldout"),
        )
        counts = count_tokens(self.data, list(rows["key"]))
        if self.start is None:
            shape = DrafterConfig.from_target(
                target,
                self.boundaries.feeding,
                config.draft_vocab_size,
                config.fc_norm,
                config.norm_output,
            )
            vocab = choose_vocab(counts, config.draft_vocab_size)
        else:
            shape, vocab = self.start.drafter.config, self.start.drafter.vocab
        self.coverage = {
            "train": coverage(vocab, counts),
            "heldout": coverage(vocab, count_tokens(self.data, self.heldout)),
        }
        self.steps = plan(
            self.data.lengths("train"),
            config.epochs,
            config.batch_tok,
            config.seed,
            self.data.epoch_keys,
        )
        settings = {name: getattr(config, name) for name in SETTINGS}
        settings |= dataclasses.asdict(self.ablation)
        settings |= {"boundaries": list(self.boundaries.feeding)}
        self.identity = {
            "drafter": dataclasses.asdict(shape) | {"boundaries": list(shape.boundaries)},
            "store": self.data.identity,
            "settings": settings,
        }
        for split, limited in self.data.limited.items():
            if limited.cut:  # where nothing is left out the training is that of the whole store
                self.identity["settings"][f"{split}_samples"] = limited.asked
        self.record = {
            "target": {"name": target.name, "fingerprint": target.fingerprint},
            "store": self.identity["store"],
            "settings": self.identity["settings"],
            "parity": {name: sha256_json(record) for name, record in self.certificates.items()},
            "code": code_version(),
            "coverage": {split: list(pair) for split, pair in self.coverage.items()},
        }
        if self.start is None:
            from_target = config.initial_weights == "target"
            drafter = initial_drafter(
                shape, vocab, target, config.seed, from_target, self._last_rms(list(rows["key"]))
            )
        else:
            drafter = self.start.drafter
            self.identity["start"] = {"sha256": self.start.sha256}
            self.record["continued_from"] = self.start.described()
        self.drafter = drafter.to(self.device)
        self.model = distributed.wrap(Model(self.drafter), config.parallel, self.device)
        self.trained = {name: p for name, p in self.drafter.named_parameters() if p.requires_grad}
        self.shares = share(list(self.trained.values()), self.threads)
        self.optimizers = [
            torch.optim.AdamW(
                [{"params": weights}],
                lr=config.learning_rate,
                betas=(0.9, 0.95),
                weight_decay=0.0,
                fused=True,
            )
            for weights in self.shares
        ]
        self.teacher = Teacher(
            self.data.head().to(self.device), vocab, self.dtype, self.loss.whole_vocab
        )
        self.vocab, self.step, self.rows = vocab, 0, []
        self.sizes: dict[str, Size] = {}  # of the samples that were asked for
        self.recent: list[float] = []  # losses of the last batches
        self.best, self.worse = (
            -math.inf,
            0,
        )  # the longest held-out acceptance, and how many evaluations since were no better
        self.whole = (
            self.drafter
        )  # with all its weights; FSDP's is put together for each evaluation
        self._ahead, self._next = (
            ThreadPoolExecutor(1, thread_name_prefix="read"),
            None,
        )  # its thread begins in each process for itself
        self.team: Team | None = None
        self._given: list[
            dict[torch.Tensor, torch.Tensor]
        ] = []  # by process: its gradients of the weights that others change
        self._written_s, self._board = 0.0, None
        self._lock: IO | None = None  # while this process writes into the drafter folder

    def _last_rms(self, keys: list[str]) -> float:
        """Root mean square of the states of the drafter's last boundary, over the supervised tokens of a few samples."""
        if not self.config.fc_norm:
            return 1.0
        last, parts = self.boundaries.feeding[-1], []
        for key in sorted(keys)[:8]:
            sample = self.data.read(key, (last,))
            parts.append(sample["states"][last][sample["loss_mask"]].float())
        return float(torch.cat(parts).square().mean().sqrt())

    def begin(self) -> None:
        """The processes that share a step: begun after what they all need is loaded and any checkpoint read, and before this process has threads of its own, which a copy of it would lack.

        EyasError where memory ends."""
        with memory(
            f"memory ran out where {self.threads} processes for the training were begun",
            "memory for the gradients of each",
            "-p threads 1, which changes no result but its rounding",
        ):
            if self.threads > 1:
                for optimizer, weights in zip(self.optimizers, self.shares):
                    for p in weights:
                        p.data = shared(p.data)
                        state = optimizer.state[p] or {
                            "step": torch.zeros(()),
                            "exp_avg": torch.zeros_like(p.data),
                            "exp_avg_sq": torch.zeros_like(p.data),
                        }
                        optimizer.state[p] = {name: shared(value) for name, value in state.items()}
                self._given = [
                    {
                        p: shared(torch.zeros_like(p.data))
                        for other in self.shares[:n] + self.shares[n + 1 :]
                        for p in other
                    }
                    for n in range(self.threads)
                ]
            self.team = Team(self, self.threads)

    # ---- what a step works on

    def read(self, keys: list[str], shares: list[slice] | None = None) -> Batch:
        samples = [(key, self.data.read(key, self.boundaries.with_last)) for key in keys]
        return pack(
            samples,
            self.boundaries.feeding,
            self.vocab,
            self.config.draft_steps,
            self.dtype,
            self.ablation.mask_shift,
            shares,
        )

    def sizes_of(self, keys: list[str]) -> list[Size]:
        """Of these samples; a mask is read when its sample is due for the first time, so that a run begins at once."""
        for key, *text in self.data.texts(
            [key for key in dict.fromkeys(keys) if key not in self.sizes]
        ):
            slots = slots_of(*text, self.vocab, self.config.draft_steps, self.ablation.mask_shift)
            self.sizes[key] = Size(
                len(slots.active), slots.counts(self.config.draft_steps), slots.n
            )
        return [self.sizes[key] for key in keys]

    def work(self, step: int) -> Work:
        """This process's part of optimiser step `step`. EyasError where nothing in it is supervised."""
        config, (epoch, ids), processes = (
            self.config,
            self.steps[step],
            distributed.WORLD * self.threads,
        )
        n_passes = (
            math.ceil(sum(self.lengths[id] for id in ids) / (config.pass_tok * processes))
            if config.pass_tok
            else 1
        )
        sizes = self.sizes_of(ids)
        parts = deal(
            [(id, size.active, size.packed) for id, size in zip(ids, sizes)],
            n_passes * processes,
            SLOT_ROWS * config.draft_steps,
        )
        counts = [sum(column) for column in zip(*(size.supervised for size in sizes))]
        if counts[0] == 0:
            raise EyasError(
                f"optimiser step {step + 1} has no supervised slot: samples {', '.join(ids)}",
                "answers of two tokens or more, with tokens of the draft vocabulary",
                "python -m eyas verify, or a larger draft_vocab_size",
            )
        if self.ablation.loss_mean == "grid":
            counts = [sum(size.packed for size in sizes)] * config.draft_steps
        passes = []
        for part in parts[distributed.RANK * self.threads + self.number :: processes]:
            keys, shares = zip(
                *(part or [(min(ids, key=self.lengths.get), slice(None))])
            )  # a process without a slot of its own still has to be there, with weight 0
            passes.append(
                (
                    self.read(list(keys), list(shares)).to(self.device),
                    [weight if part else 0.0 for weight in self.weights],
                )
            )
        return Work(epoch, ids, passes, counts)

    def _take(self) -> Work:
        """The work of the step at hand, and the next one's is begun in the background."""
        work = self._next.result() if self._next is not None else self.work(self.step)
        self._next = (
            self._ahead.submit(self.work, self.step + 1)
            if self.step + 1 < len(self.steps)
            else None
        )
        return work

    # ---- one step

    def optimise(self) -> dict:
        """One optimiser step; gives counts for the progress line. EyasError where loss or gradient is not finite, where the loss jumps, or where memory ends."""
        started_s, k = time.perf_counter(), self.config.draft_steps
        *flat, tok = distributed.total(
            [sum(column) for column in zip(*self.team.each("_passes", self.step))]
        )
        sums = [flat[:k], flat[k : 2 * k], flat[2 * k :]]
        with self._memory_of_a_step():
            norm = math.hypot(*self.team.each("_norm"))
            loss = sum(
                weight * part / max(n, 1)
                for weight, part, n in zip(self.weights, sums[0], self._work.counts)
            )
            self._check(self._work, loss, norm)
            self.team.each("_update", norm)
        self.step += 1
        self.recent = [*self.recent[1 - RECENT :], loss]
        self._note(self._work.epoch, "train", *sums, int(tok), time.perf_counter() - started_s)
        return {"step": self.step, "loss": loss, "tok": int(tok)}

    def _passes(self, step: int) -> list[float]:
        """In each process: the gradients of its part of optimiser step `step`; gives loss, hits and slots of each draft step and, last, the response tokens."""
        self.step, n_read = step, sum(self.lengths[id] for id in self.steps[step][1])
        with memory(
            f"memory ran out while the samples of optimiser step {step + 1} were read: {n_read:,} tokens",
            "steps of which two fit: one is read while another is computed",
            f"-p batch_tok {max(64, n_read // 2)}, in another run: -p run_name NAME",
        ):
            self._work = work = self._take()
        flat = [0.0] * (3 * self.config.draft_steps + 1)
        with self._memory_of_a_step():
            for n, (batch, weights) in enumerate(work.passes, start=1):
                with distributed.gradients(self.model, summed=n == len(work.passes)):
                    total, losses = self.model(batch, self.teacher, self.loss, weights, work.counts)
                    (total * distributed.WORLD).backward()  # DDP and FSDP2 average
                if any(weights):
                    flat = [
                        a + b
                        for a, b in zip(
                            flat, (*losses.loss, *losses.hits, *losses.slots, len(batch.active))
                        )
                    ]
            for p, given in self._given[self.number].items() if self._given else ():
                given.copy_(p.grad)
                p.grad = None
        return flat

    def _memory_of_a_step(self):
        n = max(len(batch.tokens) for batch, _ in self._work.passes)
        return memory(
            f"memory ran out in optimiser step {self.step + 1}: {n:,} packed tokens in one pass, draft vocabulary {self.config.draft_vocab_size:,}, {self.config.draft_steps} draft steps",
            "passes that fit",
            f"-p pass_tok {max(64, n // 2)}, which changes no result; then a smaller draft_vocab_size or draft_steps",
        )

    def _norm(self) -> float:
        """In each process: the norm of the whole gradient of the weights that it changes."""
        mine = self.shares[self.number]
        for n, given in enumerate(self._given):
            for p in mine if n != self.number else ():
                p.grad += given[p]
        return float(distributed.whole(nn.utils.get_total_norm([p.grad for p in mine])))

    @property
    def learning_rate(self) -> float:
        """Of the step at hand."""
        return self.config.learning_rate * schedule(
            self.step, len(self.steps), round(len(self.steps) * self.config.warmup_ratio)
        )

    def _update(self, norm: float) -> None:
        """In each process: clip the gradients of the weights that it changes, by the `norm` of all, and change them."""
        (group,) = self.optimizers[self.number].param_groups
        for p in group["params"] if norm > CLIP_NORM else ():
            p.grad *= CLIP_NORM / (norm + 1e-6)
        group["lr"] = self.learning_rate
        self.optimizers[self.number].step()
        for p in group["params"]:
            p.grad = None

    def _check(self, work: Work, loss: float, norm: float) -> None:
        ratio = self.config.spike_ratio
        finite = math.isfinite(loss) and math.isfinite(norm)
        usual = statistics.median(self.recent) if len(self.recent) >= RECENT // 2 else math.inf
        if finite and (not ratio or loss <= ratio * usual):
            return
        alone = {}
        with torch.no_grad():
            for id in dict.fromkeys(work.ids):
                batch = self.read([id]).to(self.device)
                total, _ = self.model(batch, self.teacher, self.loss, self.weights, None)
                alone[id] = float(total)
        if not finite:
            guilty = [id for id, value in alone.items() if not math.isfinite(value)] or work.ids
            raise EyasError(
                f"the loss of optimiser step {self.step + 1} is not finite; samples {', '.join(guilty)}",
                "finite states in the store",
                "python -m eyas verify --repair, or a smaller learning_rate if they are whole",
            )
        worst = max(alone, key=alone.get)
        raise EyasError(
            f"the loss of optimiser step {self.step + 1} jumped to {loss:.2f}, the median of the last {len(self.recent)} is {usual:.2f}; the most, {alone[worst]:.2f}, has sample {worst}",
            f"at most {ratio:g} times the median",
            "python -m eyas verify --deep, or a smaller learning_rate, or -p spike_ratio 0 to go on all the same",
        )

    # ---- held-out samples

    def evaluate(self) -> bool:
        """Loss, accuracy and acceptance on the held-out samples, each judged by one rank, added to the metrics; the best drafter is kept. Is it time to stop?

        EyasError where memory ends."""
        if not self.heldout:
            return False
        self.whole, k = self._whole_drafter(), self.config.draft_steps
        started_s, groups = time.perf_counter(), self._heldout_groups()
        most = max((sum(self.lengths[key] for key in keys) for keys in groups), default=0)
        with memory(
            f"memory ran out while held-out samples were judged after optimiser step {self.step}: {most:,} tokens in one pass, draft vocabulary {self.config.draft_vocab_size:,}, "
            f"{self.threads} passes at once",
            "passes that fit",
            f"-p pass_tok {max(64, most // 2)} or -p threads 1, which change no result; then a smaller draft_vocab_size",
        ):
            found = self.team.each("_judge_mine")
        judged = [found[n % self.threads][n // self.threads] for n in range(len(groups))]
        *flat, tok, accepted, verify_steps = distributed.total(
            [sum(column) for column in zip([0.0] * (3 * k + 3), *judged)]
        )
        length = accepted / verify_steps + 1 if verify_steps else math.nan
        self._note(
            self.steps[self.step - 1][0],
            "heldout",
            flat[:k],
            flat[k : 2 * k],
            flat[2 * k :],
            int(tok),
            time.perf_counter() - started_s,
            length,
        )
        if length > self.best:
            self.best, self.worse = length, 0
            if distributed.RANK == 0:
                save_drafter(
                    self.whole,
                    self.config.drafter_dir,
                    self.record | {"steps": self.step, "heldout_acceptance_length": length},
                    "best.safetensors",
                )
        else:
            self.worse += 1
        self.whole = self.drafter
        return (
            0 < self.config.patience <= self.worse
        )  # sums of whole numbers: every rank says the same

    def _heldout_groups(self) -> list[list[str]]:
        """This rank's held-out samples, those of a group being judged in one pass: JUDGED or fewer, of at most `pass_tok` tokens (or one longer sample)."""
        groups, size, most = [], 0, self.config.pass_tok or math.inf
        for key in self.heldout[distributed.RANK :: distributed.WORLD]:
            if groups and len(groups[-1]) < JUDGED and size + self.lengths[key] <= most:
                groups[-1].append(key)
                size += self.lengths[key]
            else:
                groups.append([key])
                size = self.lengths[key]
        return groups

    def _judge_mine(self) -> list[list[float]]:
        """In each process, of each of its groups: loss, hits and slots of each draft step, response tokens, accepted drafts and verify steps."""
        judged = [self._judge(keys) for keys in self._heldout_groups()[self.number :: self.threads]]
        return [
            [
                *losses.loss,
                *losses.hits,
                *losses.slots,
                tok,
                int(counts["accepted"].sum()),
                int(counts["verify_steps"].sum()),
            ]
            for losses, tok, counts in judged
        ]

    @torch.no_grad()
    def _judge(self, keys: list[str]) -> tuple[Losses, int, pd.DataFrame]:
        """Losses, response tokens and the walk's counts of some held-out samples."""
        batch = self.read(keys).to(self.device)
        return (
            batch_loss(self.whole, batch, self.teacher, self.loss, self.weights),
            len(batch.active),
            walk(self.whole, self.data, keys, self.config.draft_steps),
        )

    def _whole_drafter(self) -> Drafter:
        """The drafter with all its weights, on every rank that asks (all have to)."""
        if self.config.parallel != "fsdp" or distributed.WORLD == 1:
            return self.drafter
        drafter = Drafter(self.drafter.config, self.vocab).to(self.device)
        drafter.load_state_dict(
            {name: distributed.whole(tensor) for name, tensor in self.drafter.state_dict().items()}
        )
        return drafter

    def ends_epoch(self) -> bool:
        return (
            self.step == len(self.steps) or self.steps[self.step][0] != self.steps[self.step - 1][0]
        )

    def evaluates(self) -> bool:
        every = self.config.eval_steps
        return self.step == len(self.steps) or (
            self.step % every == 0 if every else self.ends_epoch()
        )

    # ---- metrics

    def _note(
        self,
        epoch: int,
        split: str,
        loss: list[float],
        hits: list[int],
        slots: list[int],
        tok: int,
        seconds: float,
        length: float = math.nan,
    ) -> None:
        for s, n in enumerate(slots):
            values = (
                self.step,
                epoch,
                split,
                s,
                loss[s] / n if n else math.nan,
                hits[s] / n if n else math.nan,
                int(n),
                tok,
                seconds,
                length,
            )
            self.rows.append(dict(zip(COLUMNS, values)))
        if distributed.RANK == 0 and self._board is not None:
            for s, row in enumerate(self.rows[-len(slots) :]):
                for name in ("loss", "accuracy"):
                    self._board.add_scalar(f"{split}/{name}/draft_step_{s}", row[name], self.step)
            for name, value in (
                (f"{split}/tok_per_s", tok / seconds),
                (f"{split}/acceptance_length", length),
                ("learning_rate", self.optimizers[0].param_groups[0]["lr"]),
            ):
                if not math.isnan(value):
                    self._board.add_scalar(name, value, self.step)

    @property
    def metrics(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows, columns=COLUMNS)

    def write_metrics(self, now: bool = True) -> None:
        """metrics.parquet anew: now, or when the last time is some seconds ago."""
        if distributed.RANK == 0 and (now or time.monotonic() - self._written_s > METRICS_S):
            write_atomic(
                self.config.drafter_dir / "metrics.parquet",
                lambda path: self.metrics.to_parquet(path, index=False),
            )
            self._written_s = time.monotonic()

    # ---- life of a run

    def save(self) -> None:
        """The metrics, then the checkpoint that counts them; older ones go."""
        weights = {name: distributed.whole(p).cpu() for name, p in self.trained.items()}
        state_of = {
            p: optimizer.state[p]
            for optimizer, weights in zip(self.optimizers, self.shares)
            for p in weights
        }
        moments = {
            name: {key: distributed.whole(value).cpu() for key, value in state_of[p].items()}
            for name, p in self.trained.items()
        }
        if distributed.RANK:
            return
        self.write_metrics()
        state = {
            "identity": self.identity,
            "record": self.record,
            "parts": self.parts,
            "step": self.step,
            "rows": self.rows,
            "recent": self.recent,
            "best": self.best,
            "worse": self.worse,
            "weights": weights,
            "optimizer": moments,
        }
        write_atomic(self._checkpoint(self.step), lambda path: torch.save(state, path))
        for old in self._checkpoints()[: -self.config.keep_checkpoints]:
            old.unlink()

    def _checkpoint(self, step: int) -> Path:
        return self.config.drafter_dir / "checkpoints" / f"step-{step:07d}.pt"

    def _checkpoints(self) -> list[Path]:
        return sorted((self.config.drafter_dir / "checkpoints").glob("step-*.pt"))

    def resume(self) -> None:
        """Go on at the last checkpoint, if there is one: bit for bit as if nothing had been, with the same threads, pass_tok and ranks; with others to rounding, which a note says.

        What a killed process has not written to its end is removed. EyasError: a torn checkpoint; one of another drafter shape, store or settings."""
        if distributed.RANK == 0:
            for stale in self.config.drafter_dir.rglob(".*.tmp"):
                stale.unlink(missing_ok=True)
        if not (found := self._checkpoints()):
            check_nothing_is_lost(self.config, self.identity, self.start)
            return
        path = found[-1]
        with_it = (
            ", and with it the imported drafter"
            if (self.config.drafter_dir / IMPORTED).is_file()
            else ""
        )
        again = f"another run, e.g. -p run_name NAME, or remove {path.parent.parent.name}/ of run {self.config.run_name!r}{with_it}"
        try:
            state = torch.load(path, weights_only=True)
            identity = state["identity"]
        except Exception as error:  # torch.load has no error of its own
            raise EyasError(
                f"the checkpoint {path.name} of run {self.config.run_name!r} can't be read ({type(error).__name__})",
                "a whole file",
                f"remove it and go on from {found[-2].name}" if found[1:] else again,
            ) from None
        parts = (
            ("drafter", "drafter shape"),
            ("store", "store (its samples differ)"),
            ("settings", "training"),
            ("start", "start (the drafter that it continues differs)"),
        )
        for part, what in parts:
            was, now = identity.get(part), self.identity.get(part)
            if was != now:
                named = part in ("drafter", "settings")
                fields = ": " + differences(was, now) if named else ""
                raise EyasError(
                    f"the checkpoint of run {self.config.run_name!r} is of another {what}{fields}",
                    "the same",
                    again,
                )
        if state["record"]["code"] != self.record["code"] and distributed.RANK == 0:
            print(
                f"note: begun with code {state['record']['code']}, going on with {self.record['code']}"
            )
        if (
            parts := state.get("parts", self.parts)
        ) != self.parts and distributed.RANK == 0:  # checkpoints had none once
            changed = ", ".join(
                f"{name} {parts[name]}, now {now}"
                for name, now in self.parts.items()
                if parts[name] != now
            )
            print(
                f"note: begun with {changed}: the same training to rounding, no longer bit for bit"
            )
        names = {p: name for name, p in self.trained.items()}
        with torch.no_grad():
            for optimizer, weights in zip(self.optimizers, self.shares):
                for p in weights:
                    p.copy_(distributed.placed(state["weights"][names[p]], p))
                    optimizer.state[p] = {
                        key: value if key == "step" else distributed.placed(value, p)
                        for key, value in state["optimizer"][names[p]].items()
                    }
        self.step, self.rows, self.recent, self.best, self.worse = (
            state[name] for name in ("step", "rows", "recent", "best", "worse")
        )

    def run(self, on_step=None) -> None:
        """All steps that are left, with evaluations and checkpoints, to the saved drafter."""
        stopped, begun = 0 < self.config.patience <= self.worse, self.step
        if begun < len(self.steps) and not stopped:
            self.begin()
        if distributed.RANK == 0:
            keep_imported(self.config, self.start)
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(
                str(self.config.drafter_dir / "tensorboard"), purge_step=self.step + 1
            )
        if begun and distributed.RANK == 0:
            print(
                f"goes on after optimiser step {begun} of {len(self.steps)}"
                if begun < len(self.steps) and not stopped
                else f"trained already, {begun} optimiser steps"
            )
        with (
            Progress(len(self.steps) - begun, "steps")
            if distributed.RANK == 0 and begun < len(self.steps) and not stopped
            else Silent() as progress
        ):
            while self.step < len(self.steps) and not stopped:
                done = self.optimise()
                if judged := self.evaluates():
                    stopped = self.evaluate()
                if judged or self.ends_epoch() or self.step % self.config.checkpoint_steps == 0:
                    self.save()
                self.write_metrics(now=False)
                progress.update(
                    samples=1,
                    tok=done["tok"],
                    note=f"loss {done['loss']:.3f}"
                    + (
                        f", held-out acceptance length {self.rows[-1]['acceptance_length']:.3f}"
                        if judged and self.heldout
                        else ""
                    ),
                )
                if on_step is not None:
                    on_step(done)
        self._finish(stopped, made=self.step > begun)

    def _finish(self, stopped: bool, made: bool) -> None:
        """The drafter, from the last weights or the best. What was finished before (no step `made` now) keeps its file, and with it the record of the code that made it."""
        drafter = self._whole_drafter()
        if distributed.RANK:
            return
        self._board.close()
        path = self.config.drafter_dir / FILE
        if stopped:
            print(
                f"stopped early: {self.worse} evaluations in a row without a longer held-out acceptance than {self.best:.3f}; the drafter is the one of then"
            )
            best = self.config.drafter_dir / "best.safetensors"
            if not path.is_file() or path.read_bytes() != best.read_bytes():
                write_atomic(path, lambda temporary: temporary.write_bytes(best.read_bytes()))
        elif made or not (
            path.is_file() and read_record(self.config.drafter_dir).get("steps") == self.step
        ):
            length = self.rows[-1]["acceptance_length"] if self.rows else math.nan
            save_drafter(
                drafter,
                self.config.drafter_dir,
                self.record | {"steps": self.step, "heldout_acceptance_length": length},
            )

    def lock(self) -> None:
        """Raise EyasError where another process trains the same drafter."""
        if distributed.RANK == 0:
            self._lock = only_one(self.config.drafter_dir)

    def close(self) -> None:
        self._ahead.shutdown(wait=True, cancel_futures=True)
        if self._lock is not None:
            self._lock.close()
        if self.team is not None:
            self.team.close()


class Silent:
    """In the place of Progress on the ranks that say nothing."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_) -> None:
        pass

    def update(self, **_) -> None:
        pass


def differences(was: dict, now: dict) -> str:
    """Return in words what differs between two identities."""
    names = [name for name in {**now, **was} if was.get(name) != now.get(name)]
    return ", ".join(f"{name} {was.get(name, ALL)}, now {now.get(name, ALL)}" for name in names)


def train(
    config: Config, store, target: Target, on_step=None, ablation: Ablation | None = None
) -> Path:
    """Train the run's drafter, or go on where a checkpoint is; gives its folder. `on_step(dict of step, loss, tok)` is called after each optimiser step.

    EyasError: a store without a passing parity certificate (unless `without_parity`), without training samples, with an empty loss mask, without the
    boundaries or of another target; a checkpoint of another drafter shape, store or settings; a drafter in the run that this training would replace, an
    imported one for instance; a start that does not fit the settings; D larger than the vocabulary; a loss that is not finite or jumps; a step without
    a supervised slot; no memory left.
    """
    torch.set_flush_denormal(True)  # Adam's moments of rare tokens fade into denormal numbers
    torch.set_num_threads(
        1 if config.device == "cpu" and distributed.WORLD == 1 else config.threads
    )  # processes share a step, and no threads an operator, whose barriers wait for whatever else runs
    with freed_memory_kept(), distributed.group(torch.device(config.device)):
        training = Training(config, store, target, ablation)
        try:
            training.lock()
            training.resume()
            if distributed.RANK == 0:
                if training.start is not None:
                    print(training.start)
                for split, (covered, total) in training.coverage.items():
                    if total:
                        print(
                            f"draft vocabulary: {config.draft_vocab_size:,} of {target.vocab_size:,} tokens cover {covered / total:.4f} of {total:,} supervised tokens ({split})"
                        )
                for split, limited in training.data.limited.items():
                    if limited.cut:
                        print(
                            f"{split}_samples {limited.asked:,}: the first of the store's {limited.stored:,} {split} samples, as extraction would choose them"
                        )
                    elif limited.asked > limited.stored:
                        print(
                            f"{split}_samples {limited.asked:,}: the store was made with {limited.stored:,}"
                        )
                for reason, n in training.data.dropped.items():
                    if n:
                        print(f"not trained on: {n:,} samples with the {reason} of a held-out one")
            training.run(on_step)
        finally:
            training.close()
    return config.drafter_dir


def summary(config: Config) -> str:
    """The last losses and accuracies of a run, a line a split and draft step, and the training speed."""
    metrics = read_parquet(config.drafter_dir / "metrics.parquet")
    steps = metrics[metrics["split"] == "train"].drop_duplicates("step")
    lines = [
        f"{len(steps)} optimiser steps, {steps['tok'].sum():,} response tokens in {steps['seconds'].sum():.0f} s: {steps['tok'].sum() / steps['seconds'].sum():,.0f} tok/s"
    ]
    for row in metrics[metrics["step"] == metrics["step"].max()].itertuples():
        lines.append(
            f"{row.split:8} draft step {row.draft_step + 1}: loss {row.loss:.3f}, accuracy {row.accuracy:.3f} over {row.slots:,} supervised slots"
        )
    judged = metrics.dropna(subset="acceptance_length").drop_duplicates("step")
    if len(judged):
        lines.append(
            f"held-out acceptance length by the offline walk, bonus token included: {judged['acceptance_length'].iloc[-1]:.3f} (best {judged['acceptance_length'].max():.3f})"
        )
    return "\n".join([*lines, *filter(None, [weights_text(config)])])


def weights_text(config: Config) -> str:
    """Return in words which step's weights are used, with the held-out acceptance of the best and of the last; "" where none were judged.

    `drafter_weights` decides: the drafter that is exported and judged is the one that this describes.
    """
    folder = config.drafter_dir
    if not (folder / BEST).is_file() or not (folder / "metrics.parquet").is_file():
        return ""
    judged = (
        read_parquet(folder / "metrics.parquet")
        .dropna(subset="acceptance_length")
        .drop_duplicates("step")
    )
    best, used = read_record(folder, BEST), read_record(folder, config.drafter_file)
    if judged.empty or "steps" not in used:
        return ""
    last_step, last_length = (
        int(judged["step"].iloc[-1]),
        float(judged["acceptance_length"].iloc[-1]),
    )
    best_step, best_length = best["steps"], best["heldout_acceptance_length"]
    names = [
        name for name, step in (("best", best_step), ("last", last_step)) if used["steps"] == step
    ]
    text = f"held-out acceptance length: best at step {best_step} ({best_length:.3f}), last at step {last_step} ({last_length:.3f}); "
    text += (
        f"this drafter is the {' and the '.join(names)}"
        if names
        else f"this drafter is that of step {used['steps']}"
    )
    return text + ("; the best: -p drafter_weights best" if "best" not in names else "")
