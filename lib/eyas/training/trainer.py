"""Offline training of the drafter from a store, with training-time test: the life of a run.

    python -m eyas train --profile demo
    # two ranks
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m eyas train --profile demo

- `eyas.training.preparation` checks the inputs and plans the steps; `eyas.training.ttt` computes
  the loss and its gradient; `eyas.training.checkpoints` saves and resumes; `eyas.training.metrics`
  writes the numbers. Here they are put together.
- An optimizer step takes a pack of whole samples, at most `batch_tok` tokens, in an order that is a
  function of seed and epoch. The samples of the next step are read and packed in the background.
- Its slots may be cut into passes (`pass_tok`), and divided over ranks and, on a CPU, over
  processes, one for each of `threads` (`eyas.training.workers`). Every part is weighted by the
  slots of the whole step. So passes, ranks and threads change a step only by rounding. (The
  operators of a drafter are too small for two threads to share one.)

Files in the run's drafter folder, each whole or absent:

  checkpoints/step-*.pt   the last few. A resumed run gives bit for bit the weights of an
                          uninterrupted one on a CPU, and the same up to rounding where it continues
                          with other threads, pass_tok or ranks. After the weights are initialised
                          only the order of the samples is random, and the step number gives it.
  best.safetensors        the drafter with the longest held-out acceptance so far
                          (`eyas.evaluation.offline` over the stored held-out states)
  drafter.safetensors     at the end: the last weights, or the best where `patience` ended the run
  imported.safetensors    the imported drafter that this training continued, as it was
  metrics.parquet         tidy, every few seconds;  tensorboard/: the same as event files

Checkpoints and drafters carry their record: data and settings, parity certificate, code version.
"""

import dataclasses
import math
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
from eyas.files import write_atomic
from eyas.models.continuation import check_nothing_is_lost, keep_imported, only_one
from eyas.models.drafter import BEST, FILE, Drafter, read_record, save_drafter
from eyas.models.target import Target
from eyas.progress import Progress
from eyas.training import distributed
from eyas.training.batch import Batch, pack, slots_of
from eyas.training.checkpoints import Checkpoints, note_changes
from eyas.training.head_loss import Teacher
from eyas.training.losses import Losses, get_loss
from eyas.training.memory import memory
from eyas.training.metrics import Metrics
from eyas.training.preparation import Ablation, describe, first_drafter, prepare
from eyas.training.schedule import partition_weights, schedule, split_work
from eyas.training.ttt import batch_loss, step_weights
from eyas.training.workers import Team, freed_memory_kept, shared

CLIP_NORM = 1.0
SLOT_ROWS = 4  # one draft step of an active slot costs about as much as this many packed rows
JUDGED = 8  # held-out samples of one pass, at most
RECENT = 50  # batches that a loss is compared with, to call it a spike


class Size(NamedTuple):
    """Active slots of a sample, its supervised slots by draft step, and its packed rows."""

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
class StepPart:
    """What one process does in an optimizer step.

    A pass is a pack with the weights of its draft steps. They are all 0 where the process has no
    slot in this step.
    """

    epoch: int
    ids: list[str]  # of the whole step
    passes: list[tuple[Batch, list[float]]]
    counts: list[float]  # the divisor of each draft step's sum, over all passes and processes


class Training:
    """One run's state: what is trained, on what, and how far it is."""

    def __init__(self, config: Config, store, target: Target, ablation: Ablation | None = None):
        self.config = config
        self.target = target
        self.ablation = ablation or Ablation()
        self.prepared = prepare(config, store, target, self.ablation)
        self.data = self.prepared.data
        self.steps = self.prepared.steps
        self.vocab = self.prepared.vocab
        self.boundaries = self.prepared.boundaries
        self.lengths = self.prepared.lengths
        self.heldout = self.prepared.heldout
        self.record = self.prepared.record
        self._choose_processes()
        self._make_model()
        self.sizes: dict[str, Size] = {}  # of the samples that were asked for
        # state that a checkpoint has
        self.step = 0
        self.metrics_of_run = Metrics(config.drafter_dir)
        self.recent: list[float] = []  # losses of the last batches
        self.best = -math.inf  # the longest held-out acceptance
        self.worse = 0  # evaluations since then
        self.checkpoints = Checkpoints(config)
        # this thread starts in each process for itself
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        self._next = None
        self.team: Team | None = None
        # by process: its gradients of the weights that others update
        self._given: list[dict[torch.Tensor, torch.Tensor]] = []
        self._lock: IO | None = None  # while this process writes into the drafter folder

    def _choose_processes(self) -> None:
        config = self.config
        self.device = torch.device("cpu")
        if config.device == "cuda":
            self.device = torch.device("cuda", distributed.LOCAL_RANK)
        # processes that share a step, and which of them this is
        alone_on_cpu = self.device.type == "cpu" and distributed.WORLD == 1
        self.threads = config.threads if alone_on_cpu else 1
        self.number = 0
        # what a step is cut into: other parts, other rounding
        self.parts = {
            "threads": self.threads,
            "pass_tok": config.pass_tok,
            "ranks": distributed.WORLD,
        }

    def _make_model(self) -> None:
        config = self.config
        self.dtype = getattr(torch, config.train_dtype)
        self.loss = get_loss(config.loss)
        self.weights = step_weights(config.draft_steps, config.step_decay)
        self.drafter = first_drafter(config, self.prepared, self.target).to(self.device)
        # with all its weights; under FSDP it is put together for each evaluation
        self.whole = self.drafter
        self.model = distributed.wrap(Model(self.drafter), config.parallel, self.device)
        self.trained = {name: p for name, p in self.drafter.named_parameters() if p.requires_grad}
        self.shares = partition_weights(list(self.trained.values()), self.threads)
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
        head = self.data.head().to(self.device)
        self.teacher = Teacher(head, self.vocab, self.dtype, self.loss.whole_vocab)

    def begin(self) -> None:
        """Start the processes that share a step. Raise EyasError where memory ends.

        They start after what they all need is loaded and any checkpoint is read, and before this
        process has threads of its own, which a copy of it would lack.
        """
        with memory(
            f"memory ran out where {self.threads} processes for the training were begun",
            "memory for the gradients of each",
            "-p threads 1, which changes no result but its rounding",
        ):
            if self.threads > 1:
                self._share_memory()
            self.team = Team(self, self.threads)

    def _share_memory(self) -> None:
        """Move weights, moments and exchanged gradients to memory that all processes see."""
        for optimizer, weights in zip(self.optimizers, self.shares):
            for p in weights:
                p.data = shared(p.data)
                state = optimizer.state[p] or {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(p.data),
                    "exp_avg_sq": torch.zeros_like(p.data),
                }
                optimizer.state[p] = {name: shared(value) for name, value in state.items()}
        for n in range(self.threads):
            others = [p for other in self.shares[:n] + self.shares[n + 1 :] for p in other]
            self._given.append({p: shared(torch.zeros_like(p.data)) for p in others})

    # ---- what a step works on

    def read(self, keys: list[str], shares: list[slice] | None = None) -> Batch:
        """Return a pack of these samples. shares: which of their active slots it learns from."""
        return pack(
            [self.data.read(key, self.boundaries.with_last) for key in keys],
            self.boundaries.feeding,
            self.vocab,
            self.config.draft_steps,
            self.dtype,
            self.ablation.mask_shift,
            shares,
        )

    def sizes_of(self, keys: list[str]) -> list[Size]:
        """Return the sizes of these samples.

        A mask is read when its sample is due for the first time, so that a run starts at once.
        """
        n_steps = self.config.draft_steps
        unknown = [key for key in dict.fromkeys(keys) if key not in self.sizes]
        for key, *text in self.data.texts(unknown):
            slots = slots_of(*text, self.vocab, n_steps, self.ablation.mask_shift)
            self.sizes[key] = Size(len(slots.active), slots.counts(n_steps), slots.n)
        return [self.sizes[key] for key in keys]

    def work(self, step: int) -> StepPart:
        """Return this process's part of an optimizer step.

        Raise EyasError where nothing in the step is supervised.
        """
        config = self.config
        epoch, ids = self.steps[step]
        sizes = self.sizes_of(ids)
        counts = self._counts(step, sizes)
        processes = distributed.WORLD * self.threads
        n_passes = 1
        if config.pass_tok:
            n_tok = sum(self.lengths[id] for id in ids)
            n_passes = math.ceil(n_tok / (config.pass_tok * processes))
        parts = split_work(
            [(id, size.active, size.packed) for id, size in zip(ids, sizes)],
            n_passes * processes,
            SLOT_ROWS * config.draft_steps,
        )
        # a process without a slot still has to take part, with weight 0 and the shortest sample
        placeholder = [(min(ids, key=self.lengths.get), slice(None))]
        passes = []
        for part in parts[distributed.RANK * self.threads + self.number :: processes]:
            keys, shares = zip(*(part or placeholder))
            batch = self.read(list(keys), list(shares)).to(self.device)
            passes.append((batch, self.weights if part else [0.0] * len(self.weights)))
        return StepPart(epoch, ids, passes, counts)

    def _counts(self, step: int, sizes: list[Size]) -> list[int]:
        """Return what the sum of each draft step is divided by."""
        counts = [sum(column) for column in zip(*(size.supervised for size in sizes))]
        if counts[0] == 0:
            raise EyasError(
                f"optimiser step {step + 1} has no supervised slot: "
                f"samples {', '.join(self.steps[step][1])}",
                "answers of two tokens or more, with tokens of the draft vocabulary",
                "python -m eyas verify, or a larger draft_vocab_size",
            )
        if self.ablation.loss_mean == "grid":
            return [sum(size.packed for size in sizes)] * self.config.draft_steps
        return counts

    def _take(self) -> StepPart:
        """Return the part of the step at hand, and start reading the next one's."""
        part = self._next.result() if self._next is not None else self.work(self.step)
        self._next = None
        if self.step + 1 < len(self.steps):
            self._next = self._reader.submit(self.work, self.step + 1)
        return part

    # ---- one step

    def optimise(self) -> dict:
        """Take one optimizer step and return its number, its loss and its response tokens.

        Raise EyasError where loss or gradient is not finite, the loss jumps, or memory ends.
        """
        started_s, k = time.perf_counter(), self.config.draft_steps
        by_process = self.team.each("_passes", self.step)
        *flat, tok = distributed.total([sum(column) for column in zip(*by_process)])
        sums = [flat[:k], flat[k : 2 * k], flat[2 * k :]]
        with self._memory_of_a_step():
            norm = math.hypot(*self.team.each("_norm"))
            by_draft_step = zip(self.weights, sums[0], self._part.counts)
            loss = sum(weight * part / max(n, 1) for weight, part, n in by_draft_step)
            self._check(self._part, loss, norm)
            self.team.each("_update", norm)
        self.step += 1
        self.recent = [*self.recent[1 - RECENT :], loss]
        self._note(self._part.epoch, "train", *sums, int(tok), time.perf_counter() - started_s)
        return {"step": self.step, "loss": loss, "tok": int(tok)}

    def _passes(self, step: int) -> list[float]:
        """In each process: compute the gradients of its part of an optimizer step.

        Return loss, hits and slots of each draft step and, last, the response tokens.
        """
        self.step = step
        n_read = sum(self.lengths[id] for id in self.steps[step][1])
        with memory(
            f"memory ran out while the samples of optimiser step {step + 1} were read: "
            f"{n_read:,} tokens",
            "steps of which two fit: one is read while another is computed",
            f"-p batch_tok {max(64, n_read // 2)}, in another run: -p run_name NAME",
        ):
            self._part = part = self._take()
        flat = [0.0] * (3 * self.config.draft_steps + 1)
        with self._memory_of_a_step():
            for n, (batch, weights) in enumerate(part.passes, start=1):
                with distributed.gradients(self.model, summed=n == len(part.passes)):
                    total, losses = self.model(batch, self.teacher, self.loss, weights, part.counts)
                    (total * distributed.WORLD).backward()  # DDP and FSDP2 average
                if any(weights):
                    found = (*losses.loss, *losses.hits, *losses.slots, len(batch.active))
                    flat = [a + b for a, b in zip(flat, found)]
            self._give_gradients()
        return flat

    def _give_gradients(self) -> None:
        """Hand the gradients of weights that other processes update to them."""
        if not self._given:
            return
        for p, given in self._given[self.number].items():
            given.copy_(p.grad)
            p.grad = None

    def _memory_of_a_step(self):
        n = max(len(batch.tokens) for batch, _ in self._part.passes)
        config = self.config
        return memory(
            f"memory ran out in optimiser step {self.step + 1}: {n:,} packed tokens in one pass, "
            f"draft vocabulary {config.draft_vocab_size:,}, {config.draft_steps} draft steps",
            "passes that fit",
            f"-p pass_tok {max(64, n // 2)}, which changes no result; "
            "then a smaller draft_vocab_size or draft_steps",
        )

    def _norm(self) -> float:
        """In each process: return the norm of the whole gradient of the weights that it updates."""
        mine = self.shares[self.number]
        for n, given in enumerate(self._given):
            for p in mine if n != self.number else ():
                p.grad += given[p]
        return float(distributed.whole(nn.utils.get_total_norm([p.grad for p in mine])))

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the step at hand."""
        n_steps = len(self.steps)
        warmup_steps = round(n_steps * self.config.warmup_ratio)
        return self.config.learning_rate * schedule(self.step, n_steps, warmup_steps)

    def _update(self, norm: float) -> None:
        """In each process: clip its weights' gradients by the norm of all, and update them."""
        (group,) = self.optimizers[self.number].param_groups
        for p in group["params"] if norm > CLIP_NORM else ():
            p.grad *= CLIP_NORM / (norm + 1e-6)
        group["lr"] = self.learning_rate
        self.optimizers[self.number].step()
        for p in group["params"]:
            p.grad = None

    def _check(self, part: StepPart, loss: float, norm: float) -> None:
        """Raise EyasError, with the guilty samples, if the loss is not finite or jumps."""
        ratio = self.config.spike_ratio
        finite = math.isfinite(loss) and math.isfinite(norm)
        usual = statistics.median(self.recent) if len(self.recent) >= RECENT // 2 else math.inf
        if finite and (not ratio or loss <= ratio * usual):
            return
        alone = self._losses_alone(part.ids)
        if not finite:
            guilty = [id for id, value in alone.items() if not math.isfinite(value)] or part.ids
            raise EyasError(
                f"the loss of optimiser step {self.step + 1} is not finite; "
                f"samples {', '.join(guilty)}",
                "finite states in the store",
                "python -m eyas verify --repair, or a smaller learning_rate if they are whole",
            )
        worst = max(alone, key=alone.get)
        raise EyasError(
            f"the loss of optimiser step {self.step + 1} jumped to {loss:.2f}, "
            f"the median of the last {len(self.recent)} is {usual:.2f}; "
            f"the most, {alone[worst]:.2f}, has sample {worst}",
            f"at most {ratio:g} times the median",
            "python -m eyas verify, or a smaller learning_rate, "
            "or -p spike_ratio 0 to go on all the same",
        )

    @torch.no_grad()
    def _losses_alone(self, ids: list[str]) -> dict[str, float]:
        """Return the loss of each sample by itself."""
        found = {}
        for id in dict.fromkeys(ids):
            batch = self.read([id]).to(self.device)
            total, _ = self.model(batch, self.teacher, self.loss, self.weights, None)
            found[id] = float(total)
        return found

    # ---- held-out samples

    def evaluate(self) -> bool:
        """Measure loss, accuracy and acceptance on the held-out samples, and keep the best drafter.

        Each sample is judged by one rank. Return whether it is time to stop: the sums are of whole
        numbers, so every rank says the same. Raise EyasError where memory ends.
        """
        if not self.heldout:
            return False
        self.whole = self._whole_drafter()
        started_s, k = time.perf_counter(), self.config.draft_steps
        groups = self._heldout_groups()
        with self._memory_of_an_evaluation(groups):
            found = self.team.each("_judge_mine")
        judged = [found[n % self.threads][n // self.threads] for n in range(len(groups))]
        columns = zip([0.0] * (3 * k + 3), *judged)
        *flat, tok, accepted, verify_steps = distributed.total([sum(column) for column in columns])
        sums = [flat[:k], flat[k : 2 * k], flat[2 * k :]]
        length = accepted / verify_steps + 1 if verify_steps else math.nan
        epoch, seconds = self.steps[self.step - 1][0], time.perf_counter() - started_s
        self._note(epoch, "heldout", *sums, int(tok), seconds, length)
        self._keep_best(length)
        self.whole = self.drafter
        return 0 < self.config.patience <= self.worse

    def _keep_best(self, length: float) -> None:
        """Save the drafter where its held-out acceptance length is the longest so far."""
        if not length > self.best:
            self.worse += 1
            return
        self.best, self.worse = length, 0
        if distributed.RANK == 0:
            record = self.record | {"steps": self.step, "heldout_acceptance_length": length}
            save_drafter(self.whole, self.config.drafter_dir, record, BEST)

    def _memory_of_an_evaluation(self, groups: list[list[str]]):
        most = max((sum(self.lengths[key] for key in keys) for keys in groups), default=0)
        return memory(
            f"memory ran out while held-out samples were judged after optimiser step {self.step}: "
            f"{most:,} tokens in one pass, "
            f"draft vocabulary {self.config.draft_vocab_size:,}, {self.threads} passes at once",
            "passes that fit",
            f"-p pass_tok {max(64, most // 2)} or -p threads 1, which change no result; "
            "then a smaller draft_vocab_size",
        )

    def _heldout_groups(self) -> list[list[str]]:
        """Return this rank's held-out samples in groups that are judged in one pass each.

        A group has at most JUDGED samples and `pass_tok` tokens, or one longer sample.
        """
        groups: list[list[str]] = []
        size, most = 0, self.config.pass_tok or math.inf
        for key in self.heldout[distributed.RANK :: distributed.WORLD]:
            if groups and len(groups[-1]) < JUDGED and size + self.lengths[key] <= most:
                groups[-1].append(key)
                size += self.lengths[key]
            else:
                groups.append([key])
                size = self.lengths[key]
        return groups

    def _judge_mine(self) -> list[list[float]]:
        """In each process: judge each of its groups.

        Return loss, hits and slots of each draft step, response tokens, accepted drafts and verify
        steps of each group.
        """
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
        """Return losses, response tokens and the walk's counts of some held-out samples."""
        batch = self.read(keys).to(self.device)
        losses = batch_loss(self.whole, batch, self.teacher, self.loss, self.weights)
        counts = walk(self.whole, self.data, keys, self.config.draft_steps)
        return losses, len(batch.active), counts

    def _whole_drafter(self) -> Drafter:
        """Return the drafter with all its weights. All ranks have to ask."""
        if self.config.parallel != "fsdp" or distributed.WORLD == 1:
            return self.drafter
        drafter = Drafter(self.drafter.config, self.vocab).to(self.device)
        parts = self.drafter.state_dict()
        drafter.load_state_dict({name: distributed.whole(part) for name, part in parts.items()})
        return drafter

    def ends_epoch(self) -> bool:
        """Return whether the last step was the last of its epoch."""
        if self.step == len(self.steps):
            return True
        return self.steps[self.step][0] != self.steps[self.step - 1][0]

    def evaluates(self) -> bool:
        """Return whether the held-out samples are judged after this step."""
        every = self.config.eval_steps
        if self.step == len(self.steps):
            return True
        return self.step % every == 0 if every else self.ends_epoch()

    # ---- metrics

    def _note(self, epoch: int, split: str, loss, hits, slots, tok: int, seconds: float, *length):
        rate = self.optimizers[0].param_groups[0]["lr"]
        row = (self.step, epoch, split, loss, hits, slots, tok, seconds, rate, *length)
        self.metrics_of_run.add(*row)

    @property
    def metrics(self) -> pd.DataFrame:
        """Return the metrics so far, as metrics.parquet has them."""
        return self.metrics_of_run.table

    # ---- checkpoints

    def save(self) -> None:
        """Write the metrics, then the checkpoint that counts them."""
        weights = {name: distributed.whole(p).cpu() for name, p in self.trained.items()}
        moments = self._moments()
        if distributed.RANK:
            return
        self.metrics_of_run.write()
        state = {
            "identity": self.prepared.identity,
            "record": self.record,
            "parts": self.parts,
            "step": self.step,
            "rows": self.metrics_of_run.rows,
            "recent": self.recent,
            "best": self.best,
            "worse": self.worse,
            "weights": weights,
            "optimizer": moments,
        }
        self.checkpoints.save(self.step, state)

    def _moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the state of the optimizers, by the name of each weight."""
        state_of = {}
        for optimizer, weights in zip(self.optimizers, self.shares):
            state_of |= {p: optimizer.state[p] for p in weights}
        return {
            name: {key: distributed.whole(value).cpu() for key, value in state_of[p].items()}
            for name, p in self.trained.items()
        }

    def resume(self) -> None:
        """Continue from the last checkpoint, if there is one.

        With the same threads, pass_tok and ranks the result is bit for bit that of an uninterrupted
        run; with others up to rounding, which a note says. What a killed process has not written to
        its end is removed. Raise EyasError for a checkpoint that is torn or of another training, or
        a drafter that this training would replace.
        """
        if distributed.RANK == 0:
            for stale in self.config.drafter_dir.rglob(".*.tmp"):
                stale.unlink(missing_ok=True)
        state = self.checkpoints.load(self.prepared.identity)
        if state is None:
            check_nothing_is_lost(self.config, self.prepared.identity, self.prepared.start)
            return
        if distributed.RANK == 0:
            note_changes(state, self.record, self.parts)
        self._load_weights(state)
        self.step = state["step"]
        self.metrics_of_run.rows = state["rows"]
        self.recent = state["recent"]
        self.best = state["best"]
        self.worse = state["worse"]

    @torch.no_grad()
    def _load_weights(self, state: dict) -> None:
        names = {p: name for name, p in self.trained.items()}
        for optimizer, weights in zip(self.optimizers, self.shares):
            for p in weights:
                p.copy_(distributed.placed(state["weights"][names[p]], p))
                optimizer.state[p] = {
                    key: value if key == "step" else distributed.placed(value, p)
                    for key, value in state["optimizer"][names[p]].items()
                }

    # ---- life of a run

    def _say_what_is_not_checked(self) -> None:
        """Print a note for each store whose samples are read in part, so without their hashes."""
        for name, store in self.data.stores.items():
            if not store.checks(self.boundaries.with_last):
                print(
                    f"note: the store of run {name!r} has more boundaries than this training reads,"
                    " so altered bytes are not noticed here;"
                    f" python -m eyas verify -p run_name {name} finds them"
                )

    def run(self, on_step=None) -> None:
        """Take all steps that are left, with evaluations and checkpoints, and save the drafter."""
        begun = self.step
        stopped = 0 < self.config.patience <= self.worse
        left = 0 if stopped else len(self.steps) - begun
        if left:
            self.begin()
        if distributed.RANK == 0:
            keep_imported(self.config, self.prepared.start)
            self.metrics_of_run.open_board(self.step)
            if left:
                self._say_what_is_not_checked()
            if begun and left:
                print(f"goes on after optimiser step {begun} of {len(self.steps)}")
            elif begun:
                print(f"trained already, {begun} optimiser steps")
        with Progress(left, "steps") if left and distributed.RANK == 0 else Silent() as progress:
            while self.step < len(self.steps) and not stopped:
                done = self.optimise()
                judged = self.evaluates()
                if judged:
                    stopped = self.evaluate()
                if judged or self.ends_epoch() or self.step % self.config.checkpoint_steps == 0:
                    self.save()
                if distributed.RANK == 0:
                    self.metrics_of_run.write(now=False)
                progress.update(samples=1, tok=done["tok"], note=self._progress_note(done, judged))
                if on_step is not None:
                    on_step(done)
        self._finish(stopped, made=self.step > begun)

    def _progress_note(self, done: dict, judged: bool) -> str:
        note = f"loss {done['loss']:.3f}"
        if judged and self.heldout:
            length = self.metrics_of_run.last_acceptance_length
            note += f", held-out acceptance length {length:.3f}"
        return note

    def _finish(self, stopped: bool, made: bool) -> None:
        """Save the drafter: the last weights, or the best where the run stopped early.

        Where this call made no step, a finished drafter keeps its file, and with it the record of
        the code that made it.
        """
        drafter = self._whole_drafter()
        if distributed.RANK:
            return
        self.metrics_of_run.close_board()
        folder = self.config.drafter_dir
        path = folder / FILE
        if stopped:
            print(
                f"stopped early: {self.worse} evaluations in a row without a longer held-out "
                f"acceptance than {self.best:.3f}; the drafter is the one of then"
            )
            best = (folder / BEST).read_bytes()
            if not path.is_file() or path.read_bytes() != best:
                write_atomic(path, lambda temporary: temporary.write_bytes(best))
            return
        finished = path.is_file() and read_record(folder).get("steps") == self.step
        if made or not finished:
            length = self.metrics_of_run.last_acceptance_length
            record = self.record | {"steps": self.step, "heldout_acceptance_length": length}
            save_drafter(drafter, folder, record)

    def lock(self) -> None:
        """Raise EyasError where another process trains the same drafter."""
        if distributed.RANK == 0:
            self._lock = only_one(self.config.drafter_dir)

    def close(self) -> None:
        """End the processes and give the lock back."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        if self._lock is not None:
            self._lock.close()
        if self.team is not None:
            self.team.close()


class Silent:
    """Take the place of Progress where nothing is shown."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_) -> None:
        pass

    def update(self, **_) -> None:
        pass


def train(
    config: Config, store, target: Target, on_step=None, ablation: Ablation | None = None
) -> Path:
    """Train the run's drafter, or continue from its last checkpoint, and return its folder.

    `on_step(dict of step, loss, tok)` is called after each optimizer step. Raise EyasError for:
    - a store without a passing parity certificate (unless `without_parity`), without training
      samples, with an empty loss mask, without the boundaries, or of another target;
    - a checkpoint of another drafter shape, store or settings;
    - a drafter in the run that this training would replace, an imported one for instance;
    - a start that does not fit the settings; a draft vocabulary larger than the vocabulary;
    - a loss that is not finite or jumps; a step without a supervised slot; no memory left.
    """
    torch.set_flush_denormal(True)  # Adam's moments of rare tokens fade into denormal numbers
    # Processes share a step, and no threads an operator: its barriers would wait for whatever else
    # runs on the machine.
    one_thread = config.device == "cpu" and distributed.WORLD == 1
    torch.set_num_threads(1 if one_thread else config.threads)
    with freed_memory_kept(), distributed.group(torch.device(config.device)):
        training = Training(config, store, target, ablation)
        try:
            training.lock()
            training.resume()
            if distributed.RANK == 0:
                for line in describe(config, training.prepared, target):
                    print(line)
            training.run(on_step)
        finally:
            training.close()
    return config.drafter_dir
