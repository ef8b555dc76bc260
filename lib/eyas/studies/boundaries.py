"""Find which boundaries should feed the drafter: the study of notebook 06.

Many drafters are trained from one wide store, each with the same tokens, order and steps. A
*choice* is an ascending tuple of boundaries. Every choice is trained with the first seed. The
default and the contenders, which are the best with that seed, are trained with all seeds. The same
walk (`eyas.evaluation.offline`) judges all of them over the same held-out samples, so differences
are paired by sample. What another seed would have given shows in the spread of the seeds, which no
interval over samples contains.

Besides the choices that have a name (`named_choices`), a greedy forward selection looks for better
ones. It starts with no boundary; each round adds the one that gives the longest acceptance. Not
every candidate is trained: `Foresight` chooses a few. It is notebook 03's linear probe, for several
boundaries and for a drafter's own task. The study also measures how good a guide it is: the rank
correlation of what it predicted with what training gave.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
import torch

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import code_version, read_json, read_parquet, write_atomic, write_json
from eyas.inspection.stats import Tokens, draw, probes, r_squared, read_tokens, unit_rows
from eyas.intervals import Interval, difference_interval, interval_text, ratio_interval
from eyas.models.boundaries import Boundaries, default_boundaries
from eyas.models.drafter import DrafterConfig
from eyas.models.export import check_servable
from eyas.models.target import Head, Target
from eyas.store.reader import Store, token_bytes
from eyas.studies.sweep import Member, Sweep, gather

Choice = tuple[int, ...]
# Most tokens on which the probe is fitted, tuned and scored.
FIT_TOK = 1536
TUNE_TOK = 512
SCORE_TOK = 1024
FORWARD_SIZE = 4  # most boundaries of the greedy forward selection
TABLES = ("runs", "counts", "table", "forward", "probes")  # of a study, each a file
# Of the probe's ridge regression, in units of a standardised input's variance.
PENALTIES = (0.03, 0.1, 0.3, 1.0)


def label(boundaries: Iterable[int]) -> str:
    """Return boundaries as text, such as "2 15 27"."""
    return " ".join(map(str, boundaries))


def named_choices(n_blocks: int) -> dict[Choice, str]:
    """Return each choice with its name. Of two names for one choice the first counts.

    Singles and pairs are of five boundaries spread over the target: 2, N/3, N/2, 2N/3 and N-1. N
    alone is a single too.
    Raise EyasError below 7 blocks.
    """
    n = n_blocks
    third = n // 3
    half = n // 2
    two_thirds = 2 * n // 3
    spread = sorted({2, third, half, two_thirds, n - 1})
    choices: dict[Choice, str] = {default_boundaries(n): "default"}
    for name, *boundaries in (
        ("early", 1, 2, 3),
        ("middle", half - 1, half, half + 1),
        ("late", n - 3, n - 2, n - 1),
        ("spread", third, two_thirds, n - 1),
        ("spread to N", third, two_thirds, n),
        ("last three", n - 2, n - 1, n),
        ("four", 2, third, two_thirds, n - 1),
        ("five", *spread),
    ):
        choices.setdefault(tuple(sorted(set(boundaries))), name)
    for single in (*spread, n):
        choices.setdefault((single,), "single")
    for pair in combinations(spread, 2):
        choices.setdefault(pair, "pair")
    return choices


def not_servable(boundaries: Choice, target: Target) -> str:
    """Return why stock SGLang cannot serve a drafter fed from these; "" where it can."""
    try:
        check_servable(DrafterConfig.from_target(target, boundaries, 1), target)
    except EyasError as error:
        return error.found
    return ""


def stored_bytes(boundaries: Choice, n_blocks: int, hidden_size: int, dtype: str) -> int:
    """Return the bytes of a token in a store for this choice.

    They are those of its boundaries, the last state (which the teacher needs), id and mask.
    """
    return token_bytes(len(Boundaries(boundaries, n_blocks).with_last), hidden_size, dtype)


# ---- what guides the search


class Foresight:
    """Predict with a linear map how well boundaries serve a drafter's first task.

    The map goes from some boundaries' states of a token, and the embedding of the next token, to
    what the head reads at that next token. It is a ridge regression as in `stats.probes` (unit
    rows, standardised; fitted, tuned and scored on different samples), but of several boundaries at
    once and one token further. It is solved in the space of tokens. There the inputs of several
    boundaries are the sum of their Gram matrices, so each matrix is made once.
    """

    def __init__(self, tokens: Tokens, head: Head, embedding: torch.Tensor, seed: int):
        """Read what every prediction needs. embedding: [V, H].

        Raise EyasError if the samples leave nothing to fit, tune or score on.
        """
        parts = _split_positions(tokens, seed)  # fit, tune, score
        self.tok = tuple(map(len, parts))
        last = tokens.states[max(tokens.states)]
        fit, tune, score = parts
        goal = head.normed(last[fit + 1])  # [n, H]
        self._check = head.normed(last[tune + 1])  # [n, H]
        self._truth = head.normed(last[score + 1])  # [n, H]
        self._mean = goal.mean(dim=0)
        self._goal = goal - self._mean
        self._grams: dict[int, torch.Tensor] = {}
        for b, rows in tokens.states.items():
            self._grams[b] = self._gram([unit_rows(rows[positions]) for positions in parts])
        next_ids = [tokens.input_ids[positions + 1] for positions in parts]
        self._next = self._gram([unit_rows(embedding[ids]) for ids in next_ids])
        self._predictions: dict[Choice, float] = {}

    @staticmethod
    def _gram(parts: list[torch.Tensor]) -> torch.Tensor:
        """Return inner products of all rows with the fitted ones, [fit + tune + score, fit].

        parts: rows to fit, tune and score on, [n, H] each. Their columns are standardised.
        """
        fit = parts[0]
        mean = fit.mean(dim=0)
        scale = fit.std(dim=0).clamp(min=1e-12)
        rows = torch.cat([(part - mean) / scale for part in parts])
        return rows @ rows[: len(fit)].T

    def __call__(self, boundaries: Choice) -> float:
        """Return R² of the normed last state of the next token, on samples kept for scoring."""
        if boundaries not in self._predictions:
            self._predictions[boundaries] = self._predict(boundaries)
        return self._predictions[boundaries]

    def _predict(self, boundaries: Choice) -> float:
        gram = sum((self._grams[b] for b in boundaries), start=self._next)
        n_fit, n_tune, _ = self.tok
        fit = gram[:n_fit].double()
        tune = gram[n_fit : n_fit + n_tune]
        score = gram[n_fit + n_tune :]
        best = (-np.inf, 0.0)  # R² on the tuning samples, on the scoring samples
        for penalty in PENALTIES:
            regularised = fit + n_fit * penalty * torch.eye(n_fit, dtype=torch.float64)
            cholesky = torch.linalg.cholesky(regularised)
            weights = torch.cholesky_solve(self._goal.double(), cholesky).float()
            tuned = r_squared(self._check, tune @ weights + self._mean)
            scored = r_squared(self._truth, score @ weights + self._mean)
            best = max(best, (tuned, scored))
        return best[1]


def _split_positions(tokens: Tokens, seed: int) -> list[torch.Tensor]:
    """Return positions to fit, tune and score on, by sample, int64 [n] each.

    These are tokens whose next but one is supervised. Raise EyasError if a part has none.
    """
    rng = np.random.default_rng(seed)
    n = len(tokens.ids)
    n_score = max(n // 4, 1)
    n_tune = max(n // 8, 1)
    sample_rank = torch.from_numpy(rng.permutation(n))
    rank = sample_rank[tokens.sample][:-1]  # [S - 1], of the token's sample
    same_sample = tokens.sample[1:] == tokens.sample[:-1]
    usable = tokens.predicts[1:] & same_sample & (tokens.position[:-1] > 0)  # [S - 1]
    to_fit = rank >= n_score + n_tune
    to_score = rank < n_score
    parts = []
    for part, limit in (
        (to_fit, FIT_TOK),
        (~to_fit & ~to_score, TUNE_TOK),
        (to_score, SCORE_TOK),
    ):
        positions = torch.nonzero(usable & part).squeeze(1).numpy()
        if not len(positions):
            raise EyasError(
                "no supervised token in some of the drawn samples",
                "supervised tokens in all of them",
                "python -m eyas verify",
            )
        drawn = rng.permutation(positions)[:limit]
        parts.append(torch.from_numpy(np.sort(drawn)))
    return parts


def shortlist(options: list[Choice], guide: Callable[[Choice], float], size: int) -> list[Choice]:
    """Return the options that the guide puts first, at most `size`.

    Options with a neighbour of a boundary that is chosen already come last, because neighbours
    tell nearly the same. The options differ in one boundary each; all else is common to them.
    """
    common = set.intersection(*map(set, options)) if len(options) > 1 else set()
    ordered = sorted(options, key=guide, reverse=True)
    apart: list[Choice] = []  # no two of them are neighbours
    taken: list[int] = []  # the boundaries in which they differ
    for option in ordered:
        different = set(option) - common
        if all(abs(a - b) > 1 for a in different for b in taken):
            apart.append(option)
            taken += different
    neighbours = [option for option in ordered if option not in apart]
    return [*apart, *neighbours][:size]


def forward_selection(
    candidates: Iterable[int],
    measure: Callable[[list[Choice]], dict[Choice, float]],
    guide: Callable[[Choice], float],
    tried: int,
    size: int,
) -> pd.DataFrame:
    """Search greedily: each round adds the boundary that gives the highest measure.

    The search ends when a round gives no more than the one before, or at `size` boundaries.
    `measure` gets the `tried` options of a round that the guide puts first, and returns their
    values. It may leave some out, which failed. It may return others, which were measured anyway;
    they count too.
    Return a row a measured option: round, boundaries, value, guide, asked (was it among those),
    chosen.
    """
    candidates = list(candidates)
    chosen: Choice = ()
    best = -np.inf
    rows = []
    while len(chosen) < size:
        options = [tuple(sorted({*chosen, b})) for b in candidates if b not in chosen]
        if not options:
            break
        asked = shortlist(options, guide, tried)
        values = measure(asked)
        measured = {option: values[option] for option in options if option in values}
        if not measured:
            break
        top = max(measured, key=measured.get)
        better = measured[top] > best
        rows += [
            {
                "round": len(chosen) + 1,
                "boundaries": option,
                "value": value,
                "guide": guide(option),
                "asked": option in asked,
                "chosen": better and option == top,
            }
            for option, value in measured.items()
        ]
        if not better:
            break
        chosen = top
        best = measured[top]
    return pd.DataFrame(rows, columns=["round", "boundaries", "value", "guide", "asked", "chosen"])


# ---- the study


@dataclass(frozen=True)
class Study:
    """Hold the result of a study.

    runs: a row a training (`sweep.gather`): name is the choice's label, boundaries, seed, state,
        minutes, problem, notebook.
    counts: a row for each choice, seed and held-out sample.
    table: a row a choice (`choices_table`).
    forward: that of `forward_selection`.
    probes: that of `stats.probes`, with `foresight` of each boundary alone.
    guided: rank correlation of the guide with acceptance, over the choices trained.
    record: study.json.
    """

    runs: pd.DataFrame
    counts: pd.DataFrame
    table: pd.DataFrame
    forward: pd.DataFrame
    probes: pd.DataFrame
    guided: float
    record: dict


def check_wide(store: Store, n_blocks: int) -> None:
    """Raise EyasError if the store lacks a boundary."""
    missing = sorted(set(range(n_blocks + 1)) - set(store.boundaries))
    if missing:
        raise EyasError(
            f"the store has {len(store.boundaries)} boundaries, not {label(missing)}",
            f"all from 0 to {n_blocks}",
            "python -m eyas extract -p extra_boundaries all -p run_name NAME, "
            "and that run_name here",
        )


def run_study(config: Config, store: Store, target: Target) -> Study:
    """Train what is not trained yet, gather, compare, and write sweep/*.parquet and study.json.

    Raise EyasError if the store lacks a boundary or held-out samples, if the target has too few
    blocks, or if the default's training failed, so that nothing can be compared.
    """
    names = named_choices(target.n_blocks)
    check_wide(store, target.n_blocks)
    _check_heldout(store)
    torch.set_num_threads(config.threads)
    guide, probed = _probe(config, store, target)
    with Sweep(config, store) as sweep:
        trainings = _Trainings(config, sweep)
        trainings.train(names, [config.seed])
        _check_default(config, trainings, target.n_blocks)
        forward = forward_selection(
            _candidates(target), trainings.measure, guide, config.forward_tried, FORWARD_SIZE
        )
        lengths = trainings.lengths()
        unservable = {choice for choice in lengths if not_servable(choice, target)}
        default = default_boundaries(target.n_blocks)
        chosen = contenders(lengths, default, config.contenders, unservable)
        trainings.train(chosen, range(config.seed, config.seed + config.sweep_seeds))
    runs, counts = gather(trainings.by_label())
    table = choices_table(counts, target, store, names, config.seed)
    guided = _rank_correlation(guide, lengths)
    record = {
        "code": code_version(),
        "target": target.name,
        "store": {
            "identity": store.identity,
            "bytes": store.n_bytes,
            "boundaries": len(store.boundaries),
        },
        "heldout_samples": counts["id"].nunique(),
        "speculative_num_steps": config.speculative_num_steps,
        "trainings": len(runs),
        "failed": int((runs["state"] != "ok").sum()),
        "choices": len(table),
        "guided": guided,
        "sentence": sentence(table, counts, target.name, config.seed),
    }
    study = Study(runs, counts, table, forward, probed, guided, record)
    save_study(config, study)
    return study


class _Trainings:
    """Run the trainings of a study, and keep them by choice and seed."""

    def __init__(self, config: Config, sweep: Sweep):
        self.config = config
        self.sweep = sweep
        self.members: dict[Choice, dict[int, Member]] = {}

    def train(self, choices: Iterable[Choice], seeds: Iterable[int]) -> None:
        """Train each choice with each seed."""
        asked = [(choice, seed) for choice in choices for seed in seeds]
        members = self.sweep.run({"boundaries": choice, "seed": seed} for choice, seed in asked)
        for (choice, seed), member in zip(asked, members):
            self.members.setdefault(choice, {})[seed] = member

    def first(self, choice: Choice) -> Member:
        """Return the training of a choice with the first seed."""
        return self.members[choice][self.config.seed]

    def lengths(self) -> dict[Choice, float]:
        """Return the acceptance length with the first seed, of what finished."""
        return {
            choice: _length(self.first(choice).counts())
            for choice in self.members
            if self.first(choice).finished
        }

    def measure(self, options: list[Choice]) -> dict[Choice, float]:
        """Train options with the first seed; return `lengths`."""
        self.train(options, [self.config.seed])
        return self.lengths()

    def by_label(self) -> dict[str, list[Member]]:
        """Return all trainings by the choice's label."""
        return {label(choice): list(by_seed.values()) for choice, by_seed in self.members.items()}


def _check_heldout(store: Store) -> None:
    """Raise EyasError if the store has fewer than two held-out samples."""
    n_heldout = len(store.samples("heldout"))
    if n_heldout < 2:
        raise EyasError(
            f"the store has {n_heldout} held-out samples",
            "two at least, better a hundred",
            "python -m eyas extract -p heldout_samples 100",
        )


def _check_default(config: Config, trainings: _Trainings, n_blocks: int) -> None:
    """Raise EyasError if the default's training with the first seed failed."""
    first = trainings.first(default_boundaries(n_blocks))
    if not first.finished:
        notebook = first.notebook.relative_to(config.run_dir)
        raise EyasError(
            f"the default's training failed: {first.problem() or first.record['state']}",
            "one to compare with",
            f"see {notebook} in the run's folder; then python -m eyas study layers, which resumes",
        )


def _probe(config: Config, store: Store, target: Target) -> tuple[Foresight, pd.DataFrame]:
    """Return the guide, and the probes of each boundary alone. The states are read once."""
    tokens = read_tokens(store, draw(store, config.seed))
    head = store.head()
    guide = Foresight(tokens, head, target.embedding(), config.seed)
    probed = probes(tokens, head, config.seed)
    probed["foresight"] = [guide((b,)) for b in probed["boundary"]]
    return guide, probed


def _candidates(target: Target) -> list[int]:
    """Return the boundaries that SGLang can feed a drafter, in company of two in the middle."""
    half = target.n_blocks // 2
    return [
        b
        for b in range(target.n_blocks + 1)
        if not not_servable(tuple(sorted({b, half, half + 1})), target)
    ]


def _rank_correlation(guide: Foresight, lengths: dict[Choice, float]) -> float:
    """Return the rank correlation of the guide with the acceptance lengths."""
    predicted = pd.Series({choice: guide(choice) for choice in lengths})
    return float(predicted.rank().corr(pd.Series(lengths).rank()))


def save_study(config: Config, study: Study) -> None:
    """Write the tables of a study as Parquet, and last study.json."""
    for name in TABLES:
        frame = getattr(study, name)
        write_atomic(
            config.sweep_dir / f"{name}.parquet", lambda path: frame.to_parquet(path, index=False)
        )
    write_json(config.sweep_dir / "study.json", study.record)


def load_study(config: Config) -> Study:
    """Return what `run_study` wrote. Raise EyasError if it has written nothing."""
    folder = config.sweep_dir
    if not (folder / "study.json").is_file():
        raise EyasError(
            f"run {config.run_name!r} has no study of layers",
            "one that is finished",
            "python -m eyas study layers",
        )
    tables = {name: read_parquet(folder / f"{name}.parquet") for name in TABLES}
    forward = tables["forward"]
    forward["boundaries"] = [tuple(map(int, b)) for b in forward["boundaries"]]  # arrays in Parquet
    record = read_json(folder / "study.json")
    return Study(**tables, guided=record["guided"], record=record)


def contenders(
    lengths: dict[Choice, float], default: Choice, size: int, unservable: set[Choice]
) -> list[Choice]:
    """Return the choices to train with every seed.

    These are the default, the `size` best that can be served, and the best of the others where it
    is better than those. lengths: acceptance length by choice.
    """
    ranked = sorted(lengths, key=lengths.get, reverse=True)
    servable = [choice for choice in ranked if choice not in unservable and choice != default]
    chosen = [default, *servable[:size]]
    others = [choice for choice in ranked if choice in unservable]
    best = chosen[1] if len(chosen) > 1 else None
    if others and (best is None or lengths[others[0]] > lengths[best]):
        chosen.append(others[0])
    return chosen


def _length(counts: pd.DataFrame) -> float:
    """Return the acceptance length over all rows, bonus token included."""
    return float(counts["accepted"].sum() / counts["verify_steps"].sum() + 1)


# ---- numbers that follow from the counts


def pooled(counts: pd.DataFrame, name: str, seeds: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, verify steps) of each held-out sample, [samples] each.

    The samples are in the order of their ids; the seeds are summed. `eyas.intervals` takes these.
    """
    chosen = (counts["name"] == name) & counts["seed"].isin(list(seeds))
    sums = counts[chosen].groupby("id", sort=True)[["accepted", "verify_steps"]].sum()
    tokens = sums["accepted"] + sums["verify_steps"]
    return tokens.to_numpy(), sums["verify_steps"].to_numpy()


def seeds_of(counts: pd.DataFrame, *names: str) -> list[int]:
    """Return the seeds that all of these choices have, ascending."""
    seeds = [set(counts.loc[counts["name"] == name, "seed"]) for name in names]
    return sorted(set.intersection(*seeds))


def compare(
    counts: pd.DataFrame, first: str, second: str, seed: int, seeds: list[int] | None = None
) -> dict:
    """Return the acceptance length of the first choice minus that of the second.

    seeds: by default those that both have.
    The result has value, low, high (95 %, paired by held-out sample, the seeds of a sample
    together), by_seed and seeds.
    """
    if seeds is None:
        seeds = seeds_of(counts, first, second)

    def difference(chosen: list[int]) -> Interval:
        return difference_interval(
            pooled(counts, first, chosen), pooled(counts, second, chosen), seed
        )

    by_seed = [difference([one]).value for one in seeds]
    return difference(seeds).as_dict() | {"by_seed": by_seed, "seeds": seeds}


def choices_table(
    counts: pd.DataFrame, target: Target, store: Store, names: dict[Choice, str], seed: int
) -> pd.DataFrame:
    """Return one row a choice, the longest acceptance first.

    name (its label), kind, boundaries (how many), seeds;
    acceptance_length, low, high (95 % over held-out samples, bonus token included), by_seed;
    difference, difference_low, difference_high to the default, difference_by_seed;
    fed_bytes and stored_bytes of a token; not_servable: why, or "".
    """
    default = label(default_boundaries(target.n_blocks))
    kinds = {label(choice): kind for choice, kind in names.items()}
    hidden_size = store.manifest["hidden_size"]
    dtype = store.manifest["dtype"]
    value_bytes = torch.empty((), dtype=getattr(torch, dtype)).itemsize
    rows = []
    for name in counts["name"].unique():
        choice = tuple(map(int, name.split()))
        seeds = seeds_of(counts, name)
        length = ratio_interval(*pooled(counts, name, seeds), seed)
        by_seed = [ratio_interval(*pooled(counts, name, [s]), seed).value for s in seeds]
        difference = compare(counts, name, default, seed)
        rows.append(
            {
                "name": name,
                "kind": kinds.get(name, "forward"),
                "boundaries": len(choice),
                "seeds": len(seeds),
                "acceptance_length": length.value,
                "low": length.low,
                "high": length.high,
                "by_seed": by_seed,
                "difference": difference["value"],
                "difference_low": difference["low"],
                "difference_high": difference["high"],
                "difference_by_seed": difference["by_seed"],
                "fed_bytes": len(choice) * hidden_size * value_bytes,
                "stored_bytes": stored_bytes(choice, target.n_blocks, hidden_size, dtype),
                "not_servable": not_servable(choice, target),
            }
        )
    return pd.DataFrame(rows).sort_values("acceptance_length", ascending=False, ignore_index=True)


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of choices for a reader.

    Intervals are text; the last column says yes or no to whether SGLang can serve the choice.
    """
    return pd.DataFrame([_shown_row(row) for _, row in table.iterrows()])


def _shown_row(row: pd.Series) -> dict:
    length = {"value": row["acceptance_length"], "low": row["low"], "high": row["high"]}
    against = ""
    by_seed = ""
    if row["kind"] != "default":
        against = interval_text(
            {
                "value": row["difference"],
                "low": row["difference_low"],
                "high": row["difference_high"],
            }
        )
        by_seed = ", ".join(f"{value:+.3f}" for value in row["difference_by_seed"])
    return {
        "boundaries": row["name"],
        "kind": row["kind"],
        "seeds": row["seeds"],
        "acceptance length": interval_text(length),
        "against the default": against,
        "by seed": by_seed,
        "bytes fed": row["fed_bytes"],
        "bytes stored": row["stored_bytes"],
        "SGLang": "no" if row["not_servable"] else "yes",
    }


def by_position(counts: pd.DataFrame, names: list[str], seed: int) -> pd.DataFrame:
    """Return the conditional acceptance by position, a row for each of these choices and position.

    It is the share of reached draft tokens that are accepted: value, low, high.
    """
    rows = []
    for name in names:
        own_counts = counts[counts["name"] == name]
        position = 1
        while f"reached_{position}" in own_counts:
            accepted = f"accepted_{position}"
            reached = f"reached_{position}"
            sums = own_counts.groupby("id", sort=True)[[accepted, reached]].sum()
            interval = ratio_interval(sums[accepted], sums[reached], seed)
            rows.append(
                {
                    "name": name,
                    "position": position,
                    "value": interval.value,
                    "low": interval.low,
                    "high": interval.high,
                }
            )
            position += 1
    return pd.DataFrame(rows).astype({"value": float, "low": float, "high": float})


def why_not_served(table: pd.DataFrame) -> str:
    """Return a line for each reason why stock SGLang cannot serve a choice, with the choices."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in zip(table["name"], table["not_servable"]):
        if reason:
            general = re.sub(r"boundary \d+ alone", "one boundary alone", reason)
            names_by_reason.setdefault(general, []).append(name)
    if not names_by_reason:
        return "stock SGLang can serve all of them"
    return "\n".join(
        f"{reason}: {', '.join(sorted(names))}" for reason, names in names_by_reason.items()
    )


def pair_map(table: pd.DataFrame) -> tuple[list[int], np.ndarray]:
    """Return (boundaries, acceptance lengths [n, n]) of the trained pairs.

    Singles are on the diagonal. What was not trained is NaN.
    """
    few = table[table["boundaries"] <= 2]
    boundaries = sorted({int(b) for name in few["name"] for b in name.split()})
    lengths = np.full((len(boundaries), len(boundaries)), np.nan)
    for name, value in zip(few["name"], few["acceptance_length"]):
        choice = [int(b) for b in name.split()]
        i = boundaries.index(choice[0])
        j = boundaries.index(choice[-1])
        lengths[i, j] = value
        lengths[j, i] = value
    return boundaries, lengths


# ---- the answer in words


def sentence(table: pd.DataFrame, counts: pd.DataFrame, target: str, seed: int) -> str:
    """Return what follows from the study, with its uncertainty.

    It says which choice that can be served is best, against the default; whether a better one
    cannot be served; and whether one with fewer bytes would do.
    """
    default = table[table["kind"] == "default"].iloc[0]
    most_seeds = table["seeds"].max()
    servable = table[table["not_servable"] == ""]
    # The best of one seed is flattered by its choice, so only the contenders count.
    tested = table[table["seeds"] == most_seeds]
    others = tested[(tested["not_servable"] == "") & (tested["name"] != default["name"])]
    if others.empty:
        return (
            f"Nothing but the default, {default['name']}, was trained with {most_seeds} seeds: "
            "no comparison."
        )
    best = others.iloc[0]
    difference = compare(counts, best["name"], default["name"], seed)
    sentences = [_best_sentence(best, default, difference, counts, target, most_seeds)]
    if most_seeds > 1:
        fresh = compare(counts, best["name"], default["name"], seed, difference["seeds"][1:])
        sentences.append(
            f"It is the best of {len(servable)} tried; by the seeds that had no part in naming the "
            f"contenders alone, {fresh['value']:+.3f} [{fresh['low']:+.3f}, {fresh['high']:+.3f}]."
        )
    if best["stored_bytes"] != default["stored_bytes"]:
        sentences.append(
            f"It costs {best['stored_bytes']:,} bytes a token in the store, "
            f"the default {default['stored_bytes']:,}."
        )
    sentences += _cheaper_sentence(servable, best, counts, seed)
    sentences += _unservable_sentence(tested, best, counts, seed)
    return " ".join(sentences)


def _best_sentence(
    best: pd.Series,
    default: pd.Series,
    difference: dict,
    counts: pd.DataFrame,
    target: str,
    seeds: int,
) -> str:
    """Return whether the best choice beats the default, with the numbers."""
    basis = f"paired over {counts['id'].nunique()} held-out samples, one seed"
    if seeds > 1:
        by_seed = ", ".join(f"{value:+.3f}" for value in difference["by_seed"])
        basis = f"paired over {counts['id'].nunique()} held-out samples, {seeds} seeds: {by_seed}"
    interval = ""
    if difference["low"] is not None:
        interval = f" [{difference['low']:+.3f}, {difference['high']:+.3f}]"
    numbers = f"{difference['value']:+.3f}{interval} ({basis})"
    lengths = (
        f"{best['acceptance_length']:.3f} tokens a verify step "
        f"against {default['acceptance_length']:.3f}"
    )
    better = difference["low"] is not None and difference["low"] > 0
    if better and min(difference["by_seed"]) > 0:
        return (
            f"For {target}, feed the drafter from boundaries {best['name']}: "
            f"{lengths} from the default {default['name']}, {numbers}."
        )
    if difference["high"] is not None and difference["high"] < 0:
        return (
            f"For {target}, the default {default['name']} is the best choice tried that can be "
            f"served; the next, {best['name']}, gives {lengths}, {numbers}."
        )
    return (
        f"For {target}, no choice that can be served is clearly better than the default "
        f"{default['name']}; the best, {best['name']}, gives {lengths}, {numbers}."
    )


def _cheaper_sentence(
    servable: pd.DataFrame, best: pd.Series, counts: pd.DataFrame, seed: int
) -> list[str]:
    """Return the choice of fewest bytes that is not clearly worse, if there is one."""
    close = []
    cheaper = servable[servable["stored_bytes"] < best["stored_bytes"]]
    for name, n_bytes in zip(cheaper["name"], cheaper["stored_bytes"]):
        difference = compare(counts, name, best["name"], seed)
        if difference["high"] is not None and difference["high"] >= 0:
            close.append((n_bytes, name, difference))
    if not close:
        return []
    n_bytes, name, difference = min(close, key=lambda row: (row[0], -row[2]["value"]))
    seeds = ", with one seed" if len(difference["seeds"]) == 1 else ""
    return [
        f"Not clearly worse, with {n_bytes:,} bytes: {name}, {interval_text(difference)}{seeds}."
    ]


def _unservable_sentence(
    tested: pd.DataFrame, best: pd.Series, counts: pd.DataFrame, seed: int
) -> list[str]:
    """Return the choice that accepts more than the best but cannot be served, if there is one."""
    longer = tested["acceptance_length"] > best["acceptance_length"]
    above = tested[(tested["not_servable"] != "") & longer]
    if above.empty:
        return []
    first = above.iloc[0]
    difference = compare(counts, first["name"], best["name"], seed)
    return [
        f"Longer still by {interval_text(difference)} is {first['name']}, "
        f"but: {first['not_servable']}."
    ]


def study_text(study: Study) -> str:
    """Return the answer, and on how many trainings it is based."""
    record = study.record
    return (
        f"{record['sentence']}\n"
        f"{record['trainings']} trainings of {record['choices']} choices, "
        f"{record['failed']} failed; rank correlation of the probe that guided the search "
        f"with acceptance {record['guided']:.2f}"
    )
