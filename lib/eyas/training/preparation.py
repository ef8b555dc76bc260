"""What a training works on, checked before anything is computed.

`prepare` opens the stores, checks certificate, target, boundaries and masks, and chooses the draft
vocabulary and the samples of each optimizer step.
"""

import dataclasses
from dataclasses import dataclass

import pandas as pd
import torch

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import code_version, sha256_json
from eyas.models.boundaries import Boundaries, drafter_boundaries
from eyas.models.continuation import Start, read_start
from eyas.models.drafter import Drafter, DrafterConfig, initial_drafter
from eyas.models.target import Target
from eyas.models.vocab import DraftVocab, choose_vocab, count_tokens, coverage
from eyas.store.certificate import need_certificate
from eyas.store.mixture import Mixture
from eyas.training.schedule import plan

RMS_SAMPLES = 8  # samples whose states are measured, for a drafter with a norm before fc
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


@dataclass(frozen=True)
class Ablation:
    """Hold what only benchmarks/ablations.py changes, to measure what the right choice is worth.

    `mask_shift`: slot j learns where loss_mask[j + mask_shift]; 0 is the common mistake.
    `loss_mean`: a step's loss is divided by its supervised "slots", or by the whole "grid" with
    prompts. Every drafter's record names both.
    """

    mask_shift: int = 1
    loss_mean: str = "slots"


@dataclass(frozen=True)
class Prepared:
    """A training before its first step."""

    data: Mixture
    start: Start | None  # the drafter that it continues
    boundaries: Boundaries
    shape: DrafterConfig
    vocab: DraftVocab
    steps: list[tuple[int, list[str]]]  # (epoch, keys of its samples) of each optimizer step
    lengths: dict[str, int]  # tokens of each sample
    heldout: list[str]  # keys
    coverage: dict[str, tuple[int, int]]  # split -> supervised tokens in the vocabulary, and all
    identity: dict  # a checkpoint is only continued where this is the same
    record: dict  # what the drafter's file says about its training


def prepare(config: Config, store, target: Target, ablation: Ablation) -> Prepared:
    """Return what a training works on. Raise EyasError for what does not fit (see `train`)."""
    data = Mixture.open(config, store)
    certificates = {}
    if not config.without_parity:
        certificates = {name: need_certificate(each, name) for name, each in data.stores.items()}
    _check_target(data, target)
    start = read_start(config, target)
    boundaries = _boundaries(config, target, start)
    _check_boundaries(data, boundaries)
    rows = data.rows("train")
    _check_samples(rows)
    counts = count_tokens(data, list(rows["key"]))
    if start is None:
        sizes = (config.draft_vocab_size, config.fc_norm, config.norm_output)
        shape = DrafterConfig.from_target(target, boundaries.feeding, *sizes)
        vocab = choose_vocab(counts, config.draft_vocab_size)
    else:
        shape, vocab = start.drafter.config, start.drafter.vocab
    lengths = data.lengths("train")
    heldout = data.samples("heldout")
    covered = {
        "train": coverage(vocab, counts),
        "heldout": coverage(vocab, count_tokens(data, heldout)),
    }
    identity = _identity(config, ablation, data, boundaries, shape, start)
    return Prepared(
        data=data,
        start=start,
        boundaries=boundaries,
        shape=shape,
        vocab=vocab,
        steps=plan(lengths, config.epochs, config.batch_tok, config.seed, data.epoch_keys),
        lengths=lengths | data.lengths("heldout"),
        heldout=heldout,
        coverage=covered,
        identity=identity,
        record=_record(target, certificates, identity, covered, start),
    )


def _check_target(data: Mixture, target: Target) -> None:
    made_for = data.manifest["target"]
    if made_for["fingerprint"] != target.fingerprint:
        raise EyasError(
            "the store was made for another target: "
            f"{made_for['name']} ({made_for['fingerprint'][:12]}...)",
            f"{target.name} ({target.fingerprint[:12]}...)",
            "train with that target, or extract into another run: -p run_name NAME",
        )


def _boundaries(config: Config, target: Target, start: Start | None) -> Boundaries:
    if start is None:
        return drafter_boundaries(config, target.n_blocks)
    return Boundaries(start.drafter.config.boundaries, target.n_blocks)


def _check_boundaries(data: Mixture, boundaries: Boundaries) -> None:
    missing = sorted(set(boundaries.with_last) - set(data.boundaries))
    if missing:
        others = [b for b in data.boundaries if b != boundaries.n_blocks]
        raise EyasError(
            f"the store has boundaries {list(data.boundaries)}, not {missing}",
            f"{list(boundaries.with_last)}",
            f"-p boundaries '{others}', or some of these; "
            "or extract the others into another run: -p run_name NAME",
        )


def _check_samples(rows: pd.DataFrame) -> None:
    """Raise EyasError where no sample is there to train on, or one has an empty loss mask."""
    if rows.empty:
        raise EyasError(
            "the store has no training sample",
            "at least one",
            "python -m eyas extract --profile demo",
        )
    unmasked = list(rows.loc[rows["loss_tok"] == 0, "key"])
    if unmasked:
        raise EyasError(
            f"the loss mask of {len(unmasked)} samples is zero everywhere: "
            f"{', '.join(unmasked[:3])}",
            "supervised tokens in each",
            "python -m eyas verify --repair",
        )


def _identity(
    config: Config,
    ablation: Ablation,
    data: Mixture,
    boundaries: Boundaries,
    shape: DrafterConfig,
    start: Start | None,
) -> dict:
    """Return what has to be the same for a checkpoint to be continued."""
    settings = {name: getattr(config, name) for name in SETTINGS}
    settings |= dataclasses.asdict(ablation)
    settings |= {"boundaries": list(boundaries.feeding)}
    for split, limited in data.limited.items():
        if limited.cut:  # where nothing is left out the training is that of the whole store
            settings[f"{split}_samples"] = limited.asked
    identity = {
        "drafter": dataclasses.asdict(shape) | {"boundaries": list(shape.boundaries)},
        "store": data.identity,
        "settings": settings,
    }
    if start is not None:
        identity["start"] = {"sha256": start.sha256}
    return identity


def _record(
    target: Target, certificates: dict, identity: dict, covered: dict, start: Start | None
) -> dict:
    """Return what the drafter's file says about its training."""
    record = {
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "store": identity["store"],
        "settings": identity["settings"],
        "parity": {name: sha256_json(certificate) for name, certificate in certificates.items()},
        "code": code_version(),
        "coverage": {split: list(pair) for split, pair in covered.items()},
    }
    if start is not None:
        record["continued_from"] = start.described()
    return record


def first_drafter(config: Config, prepared: Prepared, target: Target) -> Drafter:
    """Return the drafter as it is before the first step, in float32 on the CPU."""
    if prepared.start is not None:
        return prepared.start.drafter
    from_target = config.initial_weights == "target"
    last_rms = _last_rms(prepared) if config.fc_norm else 1.0
    return initial_drafter(
        prepared.shape, prepared.vocab, target, config.seed, from_target, last_rms
    )


def _last_rms(prepared: Prepared) -> float:
    """Return the root mean square of the states of the drafter's last boundary.

    It is measured over the supervised tokens of a few samples.
    """
    last = prepared.boundaries.feeding[-1]
    keys = sorted(prepared.data.samples("train"))[:RMS_SAMPLES]
    samples = [prepared.data.read(key, (last,)) for key in keys]
    parts = [sample.states[last][sample.loss_mask].float() for sample in samples]
    return float(torch.cat(parts).square().mean().sqrt())


def describe(config: Config, prepared: Prepared, target: Target) -> list[str]:
    """Return what a person may want to know before the first step, in lines."""
    lines = [str(prepared.start)] if prepared.start is not None else []
    for split, (covered, total) in prepared.coverage.items():
        if total:
            lines.append(
                f"draft vocabulary: {config.draft_vocab_size:,} of {target.vocab_size:,} tokens "
                f"cover {covered / total:.4f} of {total:,} supervised tokens ({split})"
            )
    for split, limited in prepared.data.limited.items():
        if limited.cut:
            lines.append(
                f"{split}_samples {limited.asked:,}: the first of the store's "
                f"{limited.stored:,} {split} samples, as extraction would choose them"
            )
        elif limited.asked > limited.stored:
            lines.append(
                f"{split}_samples {limited.asked:,}: the store was made with {limited.stored:,}"
            )
    for reason, n in prepared.data.dropped.items():
        if n:
            lines.append(f"not trained on: {n:,} samples with the {reason} of a held-out one")
    return lines
