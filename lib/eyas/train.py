"""Offline training of the drafter from a store, with training-time test. `python -m eyas train --profile demo`

Slot j takes hidden state j and token j+1 and predicts token j+2. Step s (0 .. K-1) at slot j is what serving does s drafts later: token
j+1+s, the output of step s-1 at slot j as hidden state, RoPE position j+s; it attends to the keys of step 0 of the slots up to j and to the
keys of steps 1..s of its own slot. Step s of slot j is *active* iff loss_mask[j+1 .. j+1+s] are all true, so the first drafted token of every
turn is trained and no prompt is (the right shift; loss_mask[j] is off by one).

The teacher of step s at slot j is the target's distribution at position j+1+s, over the draft vocabulary: softmax of the stored last state
through the copied final norm and head, D rows only. An active slot is *supervised* when the token that follows there, the target's own
choice, is in the draft vocabulary. Loss: soft cross-entropy, summed over the supervised slots of a step and divided by their number;
steps weighted by step_decay**s, divided by the sum of the weights.

What makes it quick, all of it exact:
- samples are packed without padding; prompt slots are keys and values of step 0 and nothing else, the drafter having one layer;
- all steps share one head product and one teacher: the teacher of step s at a slot is the teacher of step 0 at the slot s further on;
- the loss makes its gradient in place of the logits, a few rows at a time (`SoftCrossEntropy`), so they pass through the cache and not the memory.

Files in the run's drafter folder, each whole or absent: `checkpoint.pt` (resume; bit for bit the same weights as an undisturbed run on a CPU),
`metrics.parquet` (tidy: COLUMNS), and at the end `drafter.safetensors`. Nothing random happens after the weights are initialised but the
order of the samples, which is a function of seed and epoch; so the step number is all the state that the order needs.

Axes: T tokens of a sample, S packed slots, A active slots of step 0, M supervised slots of all steps, B boundaries, H hidden size, D draft vocabulary.
"""

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from eyas.certificate import need_certificate
from eyas.config import Config
from eyas.drafter import Drafter, DrafterConfig, initial_drafter, save_drafter
from eyas.errors import EyasError
from eyas.files import write_atomic
from eyas.progress import Progress
from eyas.target import Head, Target
from eyas.vocab import DraftVocab, choose_vocab, count_tokens, coverage

CHECKPOINT_STEPS = 100  # optimiser steps between checkpoints; there is one at the end of every epoch too
CLIP_NORM = 1.0
TINY = 1.0e-12  # probabilities below it count as 0: their gradients, squared by Adam, would be denormal numbers, which a CPU computes up to 20 times slower
LOGIT_ROWS, PIECE_ROWS = 1024, 32  # rows of one head product; rows whose logits stay in the CPU's cache
COLUMNS = ["step", "epoch", "split", "draft_step", "loss", "accuracy", "slots", "tok", "seconds"]
SETTINGS = ("seed", "boundaries", "draft_vocab_size", "draft_steps", "step_decay", "epochs", "batch_tok", "learning_rate", "warmup_ratio", "train_dtype")


@dataclass(frozen=True)
class Batch:
    """Samples packed without padding. A slot's row here is its place in the pack; active slots are rows of step 0 that are supervised by the mask."""

    ids: list[str]
    spans: list[tuple[int, int]]  # rows of each sample
    tokens: torch.Tensor  # int64 [S], token j+1 of slot j
    positions: torch.Tensor  # int64 [S], j
    states: torch.Tensor  # [S, B*H], boundaries in ascending order
    active: torch.Tensor  # int64 [A], rows of the active slots of step 0, ascending
    run: torch.Tensor  # int64 [A], steps for which each is active: the run of true mask values from j+1 on, at most K
    last: torch.Tensor  # [A, H], the last state at j+1: the teacher of step 0
    labels: torch.Tensor  # int64 [A], draft id of token j+2; -1: outside the draft vocabulary, or no such token


def pack(samples: dict[str, dict], boundaries: tuple[int, ...], vocab: DraftVocab, n_steps: int, dtype: torch.dtype) -> Batch:
    """Samples as `Store.read` gives them (the last boundary is N), by id, to one batch with states in `dtype`. Slots behind the last active one are left out."""
    spans, parts, start = [], [], 0
    for sample in samples.values():
        ids, mask = sample["input_ids"], sample["loss_mask"]
        active = mask[1:].nonzero().squeeze(1)  # slots j with loss_mask[j+1]
        n = int(active[-1]) + 1 if len(active) else 0
        ends = (~mask).nonzero().squeeze(1)  # the run of true values from j+1 on ends at the first false one behind it
        at = torch.searchsorted(ends, active + 1)
        run = torch.cat([ends, torch.tensor([len(mask)])])[at] - (active + 1)
        following = torch.cat([vocab.to_draft(ids[2:]), torch.tensor([-1])])  # [T-1], draft id of token j+2
        states = torch.cat([sample["states"][b][:n] for b in boundaries], dim=-1).to(dtype)
        parts.append((ids[1 : n + 1], torch.arange(n), states, active + start, run.clamp(max=n_steps), sample["states"][max(sample["states"])][active + 1], following[active]))
        spans.append((start, start + n))
        start += n
    tokens, positions, states, active, run, last, labels = (torch.cat(column) for column in zip(*parts))
    return Batch(list(samples), spans, tokens, positions, states, active, run, last, labels)


def unroll(drafter: Drafter, batch: Batch, n_steps: int) -> list[torch.Tensor]:
    """The raw outputs [A_s, H] of every step at its active slots (those with run > s, in order)."""
    layer, wide = drafter.layers[0], drafter.fc.weight.dtype
    embeds = layer.input_layernorm(drafter.embed_tokens(batch.tokens))  # [S, H], once for all steps
    hidden = drafter.fuse(batch.states).to(wide)  # [S, H]; the residual stream keeps the precision of the weights
    x = layer.inputs(embeds, hidden)  # [S, 2H]
    keys, values = layer.self_attn.keys_values(x, batch.positions)  # [S, kv heads, head_dim]
    positions = batch.positions[batch.active]
    rows, own, outs = torch.arange(len(batch.active)), [], []  # rows: of the active slots, among those of step 0
    x, hidden = x.index_select(0, batch.active), hidden.index_select(0, batch.active)
    for s in range(n_steps):
        if s:
            kept = (batch.run[rows] > s).nonzero().squeeze(1)
            rows, hidden = rows[kept], outs[-1].index_select(0, kept)
            own = [tuple(t.index_select(0, kept) for t in pair) for pair in own]
            x = layer.inputs(embeds.index_select(0, batch.active[rows] + s), hidden)  # token j+1+s stands s rows further on
            own.append(layer.self_attn.keys_values(x, positions[rows] + s))
        queries = layer.self_attn.queries(x, positions[rows] + s)
        attended = attend(queries, batch.active[rows], keys, values, own, batch.spans)
        outs.append(layer.finish(attended, hidden))
    return outs


def attend(queries, slots, keys, values, own, spans) -> torch.Tensor:
    """One softmax over the keys of step 0 up to the slot itself, within its sample, and the slot's own keys of the later steps.

    queries [A_s, heads, head_dim] of the slots [A_s]; keys, values [S, kv heads, head_dim]; own: a pair of [A_s, kv heads, head_dim] each
    step. Gives [A_s, heads, head_dim].
    """
    n_kv, sizes = keys.shape[1], [end - start for start, end in spans]
    queries = queries.unflatten(1, (n_kv, -1)) * queries.shape[-1] ** -0.5  # [A_s, kv heads, group, head_dim]
    ends = torch.searchsorted(slots, torch.tensor([end for _, end in spans])).tolist()
    counts = [end - start for start, end in zip([0, *ends], ends)]  # queries of each sample
    own_scores = [(queries * k[:, :, None]).sum(-1).split(counts) for k, _ in own]  # [a, kv heads, group] each
    own_values = [v[:, :, None].split(counts) for _, v in own]
    samples = []
    # split, not slices: its gradient is one concatenation, where every slice's is a whole tensor of zeros to add
    for i, (q, k, v, slot) in enumerate(zip(queries.split(counts), keys.split(sizes), values.split(sizes), slots.split(counts))):
        scores = q.permute(1, 2, 0, 3) @ k.permute(1, 2, 0)[:, None]  # [kv heads, group, a, keys]
        scores = scores.masked_fill(torch.arange(*spans[i]) > slot[:, None], -torch.inf)
        scores = torch.cat([scores, *(o[i].permute(1, 2, 0)[..., None] for o in own_scores)], dim=-1)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype).split([len(k), *[1] * len(own)], dim=-1)
        sample = (weights[0] @ v.transpose(0, 1)[:, None]).permute(2, 0, 1, 3)
        for w, o in zip(weights[1:], own_values):
            sample = sample + w.permute(2, 0, 1, 3) * o[i]
        samples.append(sample)  # [a, kv heads, group, head_dim]
    return torch.cat(samples).flatten(1, 2)


class SoftCrossEntropy(torch.autograd.Function):
    """Weighted sum over rows of the cross-entropy between teacher and softmax(x W^T); the gradient is made together with it.

    x [M, H]; weight [D, H]; teacher [A, D] probabilities, of which row m takes `rows[m]`; labels [M] draft ids; scale [M] weight of each row.
    Products are computed in the teacher's dtype. Gives the weighted sum, the loss of each row [M], and whether each row's largest logit is
    its label's [M] (a tie counts).
    """

    @staticmethod
    def forward(ctx, x, weight, teacher, rows, labels, scale):
        low, wide = teacher.dtype, weight.dtype
        losses, hits = torch.empty(len(x), dtype=wide), torch.empty(len(x), dtype=torch.bool)
        weight_low, x_low = weight.detach().to(low), x.detach().to(low)
        x_scaled = (x.detach() * scale[:, None]).to(low)
        grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
        for start in range(0, len(x), LOGIT_ROWS):
            chunk = slice(start, start + LOGIT_ROWS)
            logits = x_low[chunk] @ weight_low.T  # [rows, D]
            for at in range(0, len(logits), PIECE_ROWS):
                piece = slice(start + at, start + min(at + PIECE_ROWS, len(logits)))
                z = logits[at : at + PIECE_ROWS].to(wide)
                log_q, p = z.log_softmax(-1), teacher[rows[piece]].to(wide)
                losses[piece] = -torch.linalg.vecdot(p, log_q)
                hits[piece] = z.gather(1, labels[piece, None]).squeeze(1) >= z.amax(-1)
                q = torch.nn.functional.threshold_(log_q.clamp_(min=math.log(TINY) - 1).exp_(), TINY, 0.0)  # exp of less is slow too
                logits[at : at + PIECE_ROWS] = q.sub_(p)  # the gradient takes the logits' place
            if ctx.needs_input_grad[0]:
                grad_x[chunk] = logits @ weight_low
                grad_weight += logits.T @ x_scaled[chunk]
        ctx.save_for_backward(grad_x.mul_(scale[:, None]), grad_weight)
        ctx.mark_non_differentiable(losses, hits)
        return (losses * scale).sum(), losses, hits

    @staticmethod
    def backward(ctx, grad, *_):
        grad_x, grad_weight = ctx.saved_tensors
        return grad * grad_x, grad * grad_weight, None, None, None, None


class Teacher:
    """The target's distribution over the draft vocabulary from its last state: the copied final norm, and D rows of the copied head."""

    def __init__(self, head: Head, vocab: DraftVocab, dtype: torch.dtype):
        self.head, self.rows = head, head.lm_head[vocab.ids].to(dtype)  # [D, H]

    @torch.no_grad()
    def __call__(self, last: torch.Tensor) -> torch.Tensor:
        """[A, H] before the final norm -> probabilities [A, D]."""
        probabilities = self.head.normed(last).to(self.rows.dtype) @ self.rows.T
        for start in range(0, len(probabilities), PIECE_ROWS):
            piece = probabilities[start : start + PIECE_ROWS]
            wide = piece.to(torch.promote_types(piece.dtype, torch.float32))
            piece.copy_(torch.nn.functional.threshold(wide.softmax(-1), TINY, 0.0))
        return probabilities


@dataclass(frozen=True)
class Losses:
    """total: the scalar to minimise; the others are sums by draft step [K], over `slots` supervised slots."""

    total: torch.Tensor
    loss: list[float]
    hits: list[int]
    slots: list[int]


def batch_loss(drafter: Drafter, batch: Batch, teacher: Teacher, n_steps: int, step_decay: float, dtype: torch.dtype) -> Losses:
    """Training-time test over K steps on a packed batch. `dtype`: that of the matrix products, bfloat16 or the weights' own."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        outs = unroll(drafter, batch, n_steps)
    rows, labels, kept, scale, slots = [], [], [], [], []
    step_weights = [step_decay**s for s in range(n_steps)]
    for s, out in enumerate(outs):
        ahead = (batch.run > s).nonzero().squeeze(1) + s  # the teacher of step s stands s rows further on
        supervised = batch.labels[ahead] >= 0
        ahead = ahead[supervised]
        rows.append(ahead)
        labels.append(batch.labels[ahead])
        kept.append(out[supervised])
        slots.append(len(ahead))
        scale.append(torch.full((len(ahead),), step_weights[s] / sum(step_weights) / max(len(ahead), 1), dtype=out.dtype))
    x = drafter.norm(torch.cat(kept))  # [M, H]
    total, losses, hits = SoftCrossEntropy.apply(x, drafter.lm_head.weight, teacher(batch.last), torch.cat(rows), torch.cat(labels), torch.cat(scale))
    return Losses(total, [float(part.sum()) for part in losses.split(slots)], [int(part.sum()) for part in hits.split(slots)], slots)


def schedule(step: int, n_steps: int, warmup_steps: int) -> float:
    """Factor of the learning rate for optimiser step `step` (from 0): linear warm-up, then a cosine to nothing."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, n_steps - warmup_steps)))


def plan(lengths: dict[str, int], epochs: float, batch_tok: int, seed: int) -> list[tuple[int, list[str]]]:
    """(epoch, ids) of every optimiser step: each epoch in an order of its own, cut into packs of at most `batch_tok` tokens (or one longer sample).

    The last epoch is a part where `epochs` is not whole.
    """
    ids, steps = sorted(lengths), []
    for epoch in range(math.ceil(epochs)):
        order = [ids[n] for n in torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()]
        order = order[: max(1, round(len(ids) * min(1.0, epochs - epoch)))]
        batch, size = [], 0
        for id in order:
            if batch and size + lengths[id] > batch_tok:
                steps.append((epoch, batch))
                batch, size = [], 0
            batch.append(id)
            size += lengths[id]
        steps.append((epoch, batch))
    return steps


class Training:
    """One run's state: what is trained, on what, and how far it is."""

    def __init__(self, config: Config, store, target: Target):
        missing = {*config.boundaries, target.n_blocks} - set(store.boundaries)
        if missing:
            raise EyasError(f"the store has boundaries {list(store.boundaries)}, not {sorted(missing)}", f"{[*config.boundaries, target.n_blocks]}",
                            "extract them into another run, e.g. -p run_name NAME")
        made_for = store.manifest["target"]
        if made_for["fingerprint"] != target.fingerprint:
            raise EyasError(f"the store was made for another target: {made_for['name']} ({made_for['fingerprint'][:12]}...)", f"{target.name} ({target.fingerprint[:12]}...)",
                            "train with that target, or extract into another run: -p run_name NAME")
        rows = store.index[store.index["state"] == "extracted"]
        trainable = rows[(rows["split"] == "train") & (rows["loss_tok"] > 0)]
        if trainable.empty:
            raise EyasError("the store has no training sample", "at least one", "python -m eyas extract --profile demo")
        self.config, self.store, self.target = config, store, target
        self.dtype = getattr(torch, config.train_dtype)
        self.heldout = [id for id in store.samples("heldout")]
        shape = DrafterConfig.from_target(target, config.boundaries, config.draft_vocab_size)
        counts = count_tokens(store, list(trainable["id"]))
        vocab = choose_vocab(counts, config.draft_vocab_size)
        self.coverage = {"train": coverage(vocab, counts), "heldout": coverage(vocab, count_tokens(store, self.heldout))}
        self.steps = plan(dict(zip(trainable["id"], trainable["length"].astype(int))), config.epochs, config.batch_tok, config.seed)
        self.identity = {
            "drafter": dataclasses.asdict(shape) | {"boundaries": list(shape.boundaries)},
            "store": store.identity,
            "settings": {name: list(value) if isinstance(value := getattr(config, name), tuple) else value for name in SETTINGS},
        }
        self.drafter = initial_drafter(shape, vocab, target, config.seed)
        self.trained = {name: p for name, p in self.drafter.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.teacher = Teacher(store.head(), vocab, self.dtype)
        self.step, self.rows = 0, []

    def read(self, ids: list[str]) -> Batch:
        boundaries = (*self.config.boundaries, self.target.n_blocks)
        samples = {id: self.store.read(id, tuple(sorted(set(boundaries)))) for id in ids}
        return pack(samples, self.config.boundaries, self.drafter.vocab, self.config.draft_steps, self.dtype)

    def loss(self, ids: list[str]) -> tuple[Losses, Batch]:
        batch = self.read(ids)
        return batch_loss(self.drafter, batch, self.teacher, self.config.draft_steps, self.config.step_decay, self.dtype), batch

    def optimise(self) -> dict:
        """One optimiser step; gives counts for the progress line. EyasError where the loss or its gradient is not finite."""
        started_s = time.perf_counter()
        epoch, ids = self.steps[self.step]
        losses, batch = self.loss(ids)
        losses.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), CLIP_NORM)
        if not (torch.isfinite(norm) and torch.isfinite(losses.total)):
            with torch.no_grad():
                guilty = [id for id in ids if not torch.isfinite(self.loss([id])[0].total)]
            raise EyasError(f"the loss of optimiser step {self.step + 1} is not finite; samples {', '.join(guilty or ids)}", "finite states in the store",
                            "python -m eyas verify --repair, or a smaller learning_rate if they are whole")
        warmup = round(len(self.steps) * self.config.warmup_ratio)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * schedule(self.step, len(self.steps), warmup)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._note(epoch, "train", losses.loss, losses.hits, losses.slots, len(batch.active), time.perf_counter() - started_s)
        return {"step": self.step, "loss": float(losses.total.detach()), "tok": len(batch.active)}

    @torch.no_grad()
    def evaluate(self) -> None:
        """Loss and accuracy on the held-out samples, added to the metrics."""
        started_s, tok = time.perf_counter(), 0
        sums = [[0.0] * self.config.draft_steps, [0] * self.config.draft_steps, [0] * self.config.draft_steps]
        for start in range(0, len(self.heldout), 8):
            losses, batch = self.loss(self.heldout[start : start + 8])
            tok += len(batch.active)
            sums = [[a + b for a, b in zip(total, part)] for total, part in zip(sums, (losses.loss, losses.hits, losses.slots))]
        if self.heldout:
            self._note(self.steps[self.step - 1][0], "heldout", *sums, tok, time.perf_counter() - started_s)

    def _note(self, epoch: int, split: str, loss: list[float], hits: list[int], slots: list[int], tok: int, seconds: float) -> None:
        for s, n in enumerate(slots):
            self.rows.append(dict(zip(COLUMNS, (self.step, epoch, split, s, loss[s] / n if n else math.nan, hits[s] / n if n else math.nan, n, tok, seconds))))

    @property
    def metrics(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows, columns=COLUMNS)

    def ends_epoch(self) -> bool:
        return self.step == len(self.steps) or self.steps[self.step][0] != self.steps[self.step - 1][0]

    def save(self) -> None:
        """The metrics, then the checkpoint that counts them."""
        folder = self.config.drafter_dir
        write_atomic(folder / "metrics.parquet", lambda path: self.metrics.to_parquet(path, index=False))
        state = {
            "identity": self.identity, "step": self.step, "rows": self.rows,
            "weights": {name: p.detach() for name, p in self.trained.items()}, "optimizer": self.optimizer.state_dict(),
        }  # fmt: skip
        write_atomic(folder / "checkpoint.pt", lambda path: torch.save(state, path))

    def resume(self) -> None:
        """Go on at the checkpoint, if there is one. EyasError: a torn one; one of another drafter shape, store or settings."""
        path = self.config.drafter_dir / "checkpoint.pt"
        if not path.is_file():
            return
        again = f"another run, e.g. -p run_name NAME, or remove {path.parent.name}/ of run {self.config.run_name!r}"
        try:
            state = torch.load(path, weights_only=True)
            identity = state["identity"]
        except Exception as error:  # torch.load has no error of its own
            raise EyasError(f"the checkpoint of run {self.config.run_name!r} can't be read ({type(error).__name__})", "a whole checkpoint.pt", again) from None
        for part, what in (("drafter", "drafter shape"), ("store", "store (its samples differ)"), ("settings", "training")):
            if identity[part] != self.identity[part]:
                was, now = identity[part], self.identity[part]
                fields = "" if part == "store" else ": " + ", ".join(f"{k} {was.get(k)}, now {now[k]}" for k in now if was.get(k) != now[k])
                raise EyasError(f"the checkpoint of run {self.config.run_name!r} is of another {what}{fields}", "the same", again)
        with torch.no_grad():
            for name, p in self.trained.items():
                p.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.rows = state["step"], state["rows"]


def train(config: Config, store, target: Target, on_step=None) -> Path:
    """Train the run's drafter, or go on where a checkpoint is; gives its folder. `on_step(dict of step, loss, tok)` is called after each optimiser step.

    EyasError: a store without a passing parity certificate (unless `without_parity`), without training samples, without the boundaries or of
    another target; a checkpoint of another drafter shape, store or settings; D larger than the vocabulary; a loss that is not finite.
    """
    if not config.without_parity:
        need_certificate(store, config.run_name)
    torch.set_flush_denormal(True)  # Adam's moments of rare tokens fade into denormal numbers
    torch.set_num_threads(config.threads)
    training = Training(config, store, target)
    training.resume()
    for split, (covered, total) in training.coverage.items():
        if total:
            print(f"draft vocabulary: {config.draft_vocab_size:,} of {target.vocab_size:,} tokens cover {covered / total:.4f} of {total:,} supervised tokens ({split})")
    with Progress(len(training.steps), "steps") as progress:
        progress.update(samples=training.step)
        while training.step < len(training.steps):
            done = training.optimise()
            if ends := training.ends_epoch():
                training.evaluate()
            if ends or training.step % CHECKPOINT_STEPS == 0:
                training.save()
            progress.update(samples=1, tok=done["tok"], note=f"loss {done['loss']:.3f}")
            if on_step is not None:
                on_step(done)
    record = {
        "target": {"name": target.name, "fingerprint": target.fingerprint}, "store": training.identity["store"], "settings": training.identity["settings"],
        "steps": training.step, "coverage": {split: list(pair) for split, pair in training.coverage.items()},
    }  # fmt: skip
    save_drafter(training.drafter, config.drafter_dir, record)
    return config.drafter_dir


def summary(config: Config) -> str:
    """The last losses and accuracies of a run, a line a split and draft step, and the training speed."""
    metrics = pd.read_parquet(config.drafter_dir / "metrics.parquet")
    steps = metrics[metrics["split"] == "train"].drop_duplicates("step")
    lines = [f"{len(steps)} optimiser steps, {steps['tok'].sum():,} response tokens in {steps['seconds'].sum():.0f} s: {steps['tok'].sum() / steps['seconds'].sum():,.0f} tok/s"]
    for row in metrics[metrics["step"] == metrics["step"].max()].itertuples():
        lines.append(f"{row.split:8} draft step {row.draft_step}: loss {row.loss:.3f}, accuracy {row.accuracy:.3f} over {row.slots:,} supervised slots")
    return "\n".join(lines)
