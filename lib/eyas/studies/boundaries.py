"""Which boundaries should feed the drafter? Many drafters from one wide store, the same tokens, order and steps for each: the study of notebook 06.

A *choice* is an ascending tuple of boundaries. Every choice is trained with the first seed; the default and the contenders, the best of that seed, with
all of them. All are judged by the same walk (`eyas.evaluation.offline`) over the same held-out samples, so that differences are paired by sample; what another seed
would have given shows in the seeds' spread, which no interval over samples holds.

Besides the choices that have a name (`named_choices`), a greedy forward selection looks for better ones: from no boundary on, each round adds the one that
gives the longest acceptance. Not every candidate is trained: `Foresight`, notebook 03's linear probe for several boundaries and for a drafter's own task,
says which few are. Whether it deserves that is measured too: the rank correlation of what it said with what training gave.
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
from eyas.intervals import difference_interval, interval_text, ratio_interval
from eyas.models.boundaries import Boundaries, default_boundaries
from eyas.models.drafter import DrafterConfig
from eyas.models.export import check_servable
from eyas.models.target import Head, Target
from eyas.store.reader import Store, token_bytes
from eyas.studies.sweep import Member, Sweep, gather

Choice = tuple[int, ...]
FIT_TOK, TUNE_TOK, SCORE_TOK = 1536, 512, 1024  # tokens of the probe, at most
FORWARD_SIZE = 4  # boundaries at which the greedy forward selection ends, at most
TABLES = ("runs", "counts", "table", "forward", "probes")  # of a study, each a file
PENALTIES = (
    0.03,
    0.1,
    0.3,
    1.0,
)  # of its ridge regression, in units of a standardised input's variance


def label(boundaries: Iterable[int]) -> str:
    return " ".join(map(str, boundaries))


def named_choices(n_blocks: int) -> dict[Choice, str]:
    """Choice -> what it is called. Of two names for one choice the first counts. EyasError below 7 blocks.

    Singles and pairs are of five boundaries spread over the target, 2, N/3, N/2, 2N/3, N-1, and the single N.
    """
    n, third, half, two_thirds = n_blocks, n_blocks // 3, n_blocks // 2, 2 * n_blocks // 3
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
    """Why stock SGLang cannot serve a drafter fed from these; '' where it can."""
    try:
        check_servable(DrafterConfig.from_target(target, boundaries, 1), target)
    except EyasError as error:
        return error.found
    return ""


def stored_bytes(boundaries: Choice, n_blocks: int, hidden_size: int, dtype: str) -> int:
    """Bytes of a token in a store for this choice: its boundaries, the last state, which the teacher needs, id and mask."""
    return token_bytes(len(Boundaries(boundaries, n_blocks).with_last), hidden_size, dtype)


# ---- what guides the search


class Foresight:
    """A linear map's view of a drafter's first task: from some boundaries' states of a token and the embedding of the next one to what the head reads at that next one.

    A ridge regression as in `stats.probes` (unit rows, standardised; fitted, tuned and scored on different samples), but of several boundaries at once and
    one token further. It is solved in the space of tokens, where the inputs of several boundaries are the sum of their Gram matrices: each is made once.
    """

    def __init__(self, tokens: Tokens, head: Head, embedding: torch.Tensor, seed: int):
        """`embedding` [V, H]. EyasError where the samples leave nothing to fit, tune or score on."""
        rng = np.random.default_rng(seed)
        rank = torch.from_numpy(rng.permutation(len(tokens.ids)))[
            tokens.sample
        ]  # [S], of the token's sample
        n_score, n_tune = max(len(tokens.ids) // 4, 1), max(len(tokens.ids) // 8, 1)
        usable = (
            tokens.predicts[1:]
            & (tokens.sample[1:] == tokens.sample[:-1])
            & (tokens.position[:-1] > 0)
        )  # token j with j+2 supervised
        rank = rank[:-1]
        parts = []
        for part, limit in (
            (rank >= n_score + n_tune, FIT_TOK),
            ((rank >= n_score) & (rank < n_score + n_tune), TUNE_TOK),
            (rank < n_score, SCORE_TOK),
        ):
            at = torch.nonzero(usable & part).squeeze(1).numpy()
            if not len(at):
                raise EyasError(
                    "no supervised token in some of the drawn samples",
                    "supervised tokens in all of them",
                    "python -m eyas verify",
                )
            parts.append(torch.from_numpy(np.sort(rng.permutation(at)[:limit])))
        self.tok = tuple(map(len, parts))
        last = tokens.states[max(tokens.states)]
        goal, self._check, self._truth = (head.normed(last[at + 1]) for at in parts)  # [n, H]
        self._mean, self._goal = goal.mean(dim=0), goal - goal.mean(dim=0)
        self._grams = {
            b: self._gram([unit_rows(rows[at]) for at in parts])
            for b, rows in tokens.states.items()
        }
        self._next = self._gram([unit_rows(embedding[tokens.input_ids[at + 1]]) for at in parts])
        self._said: dict[Choice, float] = {}

    @staticmethod
    def _gram(parts: list[torch.Tensor]) -> torch.Tensor:
        """[fit + tune + score, fit]: inner products of all rows with the fitted ones, of standardised columns."""
        fit = parts[0]
        mean, scale = fit.mean(dim=0), fit.std(dim=0).clamp(min=1e-12)
        rows = torch.cat([(part - mean) / scale for part in parts])
        return rows @ rows[: len(fit)].T

    def __call__(self, boundaries: Choice) -> float:
        """R² of the normed last state of the next token, on samples that were neither fitted nor tuned on."""
        if boundaries not in self._said:
            gram = sum((self._grams[b] for b in boundaries), start=self._next)
            n_fit, n_tune, _ = self.tok
            fit, tune, score = (
                gram[:n_fit].double(),
                gram[n_fit : n_fit + n_tune],
                gram[n_fit + n_tune :],
            )
            best = (-np.inf, 0.0)
            for penalty in PENALTIES:
                weights = torch.cholesky_solve(
                    self._goal.double(),
                    torch.linalg.cholesky(
                        fit + n_fit * penalty * torch.eye(n_fit, dtype=torch.float64)
                    ),
                ).float()
                best = max(
                    best,
                    (
                        r_squared(self._check, tune @ weights + self._mean),
                        r_squared(self._truth, score @ weights + self._mean),
                    ),
                )
            self._said[boundaries] = best[1]
        return self._said[boundaries]


def shortlist(options: list[Choice], guide: Callable[[Choice], float], size: int) -> list[Choice]:
    """The options that the guide puts first, at most `size`. Boundaries next to one that is in already come last: neighbours tell nearly the same.

    The options differ in one boundary each, all else being common to them.
    """
    common = set.intersection(*map(set, options)) if len(options) > 1 else set()
    ordered = sorted(options, key=guide, reverse=True)
    first: list[Choice] = []
    for option in ordered:
        own = set(option) - common
        if all(abs(a - b) > 1 for a in own for other in first for b in set(other) - common):
            first.append(option)
    return [*first, *(option for option in ordered if option not in first)][:size]


def forward_selection(
    candidates: Iterable[int],
    measure: Callable[[list[Choice]], dict[Choice, float]],
    guide: Callable[[Choice], float],
    tried: int,
    size: int,
) -> pd.DataFrame:
    """Greedy search: each round adds the boundary that gives the highest measure, until none gives more than the round before or there are `size`.

    `measure` gets the `tried` options of a round that the guide puts first and gives their values; it may leave some out, which failed, and give others, which
    were measured anyway and count too. A row per measured option: round, boundaries, value, guide, asked (was it among those), chosen.
    """
    candidates = list(candidates)
    chosen, best, rows = (), -np.inf, []
    while len(chosen) < size:
        options = [tuple(sorted({*chosen, b})) for b in candidates if b not in chosen]
        if not options:
            break
        asked = shortlist(options, guide, tried)
        found = measure(asked)
        measured = {option: found[option] for option in options if option in found}
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
        chosen, best = top, measured[top]
    return pd.DataFrame(rows, columns=["round", "boundaries", "value", "guide", "asked", "chosen"])


# ---- the study


@dataclass(frozen=True)
class Study:
    """What came out. `runs`: a row a training (`sweep.gather`: name is the choice's label, boundaries, seed, state, minutes, problem, notebook).
    `counts`: a row for each choice, seed and held-out sample. `table`: a row a choice (`choices_table`). `forward`: that of `forward_selection`. `probes`: that
    of `stats.probes`, with `foresight` of each boundary alone. `guided`: rank correlation of the guide with acceptance, over the choices trained."""

    runs: pd.DataFrame
    counts: pd.DataFrame
    table: pd.DataFrame
    forward: pd.DataFrame
    probes: pd.DataFrame
    guided: float
    record: dict


def check_wide(store: Store, n_blocks: int) -> None:
    """EyasError for a store without some boundary."""
    missing = sorted(set(range(n_blocks + 1)) - set(store.boundaries))
    if missing:
        raise EyasError(
            f"the store has {len(store.boundaries)} boundaries, not {label(missing)}",
            f"all from 0 to {n_blocks}",
            "python -m eyas extract -p extra_boundaries all -p run_name NAME, and that run_name here",
        )


def run_study(config: Config, store: Store, target: Target) -> Study:
    """Train what is not trained yet, gather, compare, and write sweep/*.parquet and sweep/study.json.

    EyasError: a store without some boundary or without held-out samples; a target of too few blocks; the default's training failed, so nothing can be compared.
    """
    names, n = named_choices(target.n_blocks), target.n_blocks
    check_wide(store, n)
    if len(store.samples("heldout")) < 2:
        raise EyasError(
            f"the store has {len(store.samples('heldout'))} held-out samples",
            "two at least, better a hundred",
            "python -m eyas extract -p heldout_samples 100",
        )
    torch.set_num_threads(config.threads)
    tokens, head = read_tokens(store, draw(store, config.seed)), store.head()
    guide = Foresight(tokens, head, target.embedding(), config.seed)
    probed = probes(tokens, head, config.seed)
    probed["foresight"] = [guide((b,)) for b in probed["boundary"]]
    del tokens
    trained: dict[Choice, dict[int, Member]] = {}
    with Sweep(config, store) as sweep:

        def train(choices: Iterable[Choice], seeds: Iterable[int]) -> None:
            asked = [(choice, seed) for choice in choices for seed in seeds]
            for (choice, seed), member in zip(
                asked, sweep.run({"boundaries": choice, "seed": seed} for choice, seed in asked)
            ):
                trained.setdefault(choice, {})[seed] = member

        def lengths() -> dict[Choice, float]:
            """Acceptance length with the first seed, of what was trained."""
            return {
                choice: _length(members[config.seed].counts())
                for choice, members in trained.items()
                if members[config.seed].finished
            }

        def measure(options: list[Choice]) -> dict[Choice, float]:
            train(options, [config.seed])
            return lengths()

        train(names, [config.seed])
        first = trained[default_boundaries(n)][config.seed]
        if not first.finished:
            raise EyasError(
                f"the default's training failed: {first.problem() or first.record['state']}",
                "one to compare with",
                f"see {first.notebook.relative_to(config.run_dir)} in the run's folder; then python -m eyas sweep, which goes on",
            )
        candidates = [
            b
            for b in range(n + 1)
            if not not_servable(tuple(sorted({b, n // 2, n // 2 + 1})), target)
        ]
        forward = forward_selection(candidates, measure, guide, config.forward_tried, FORWARD_SIZE)
        found = lengths()
        train(
            contenders(
                found,
                default_boundaries(n),
                config.contenders,
                {choice for choice in found if not_servable(choice, target)},
            ),
            range(config.seed, config.seed + config.sweep_seeds),
        )
    runs, counts = gather(
        {label(choice): list(members.values()) for choice, members in trained.items()}
    )
    table = choices_table(counts, target, store, names, config.seed)
    guided = (
        pd.Series({choice: guide(choice) for choice in found}).rank().corr(pd.Series(found).rank())
    )
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
        "guided": float(guided),
    }
    record["sentence"] = sentence(table, counts, record["target"], config.seed)
    study = Study(runs, counts, table, forward, probed, float(guided), record)
    save_study(config, study)
    return study


def save_study(config: Config, study: Study) -> None:
    for name in TABLES:
        frame = getattr(study, name)
        write_atomic(
            config.sweep_dir / f"{name}.parquet", lambda path: frame.to_parquet(path, index=False)
        )
    write_json(config.sweep_dir / "study.json", study.record)


def load_study(config: Config) -> Study:
    """What `run_study` wrote. EyasError where it has not."""
    folder = config.sweep_dir
    if not (folder / "study.json").is_file():
        raise EyasError(
            f"run {config.run_name!r} has no study of layers",
            "one that is finished",
            "python -m eyas sweep",
        )
    found = {name: read_parquet(folder / f"{name}.parquet") for name in TABLES}
    found["forward"]["boundaries"] = [
        tuple(map(int, b)) for b in found["forward"]["boundaries"]
    ]  # Parquet knows no tuples
    record = read_json(folder / "study.json")
    return Study(**found, guided=record["guided"], record=record)


def contenders(
    found: dict[Choice, float], default: Choice, size: int, unservable: set[Choice]
) -> list[Choice]:
    """The default, the `size` best that can be served, and the best of the others where it is better than those: trained with every seed."""
    ranked = sorted(found, key=found.get, reverse=True)
    best = [choice for choice in ranked if choice not in unservable and choice != default][:size]
    others = [choice for choice in ranked if choice in unservable][:1]
    return [
        default,
        *best,
        *(choice for choice in others if not best or found[choice] > found[best[0]]),
    ]


def _length(counts: pd.DataFrame) -> float:
    return float(counts["accepted"].sum() / counts["verify_steps"].sum() + 1)


# ---- numbers that follow from the counts


def pooled(counts: pd.DataFrame, name: str, seeds: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens given, verify steps) of each held-out sample, in the order of ids, these seeds together: what `eyas.intervals` takes."""
    rows = (
        counts[(counts["name"] == name) & counts["seed"].isin(list(seeds))]
        .groupby("id", sort=True)[["accepted", "verify_steps"]]
        .sum()
    )
    return (rows["accepted"] + rows["verify_steps"]).to_numpy(), rows["verify_steps"].to_numpy()


def seeds_of(counts: pd.DataFrame, *names: str) -> list[int]:
    """Seeds that all of these have, ascending."""
    return sorted(
        set.intersection(*(set(counts.loc[counts["name"] == name, "seed"]) for name in names))
    )


def compare(
    counts: pd.DataFrame, first: str, second: str, seed: int, seeds: list[int] | None = None
) -> dict:
    """Acceptance length of the first choice minus that of the second, over the seeds that both have (or these): value, low, high (95 %, paired by held-out
    sample, the seeds of a sample together), by_seed, seeds."""
    seeds = seeds_of(counts, first, second) if seeds is None else seeds
    difference = difference_interval(
        pooled(counts, first, seeds), pooled(counts, second, seeds), seed
    )
    by_seed = [
        difference_interval(pooled(counts, first, [s]), pooled(counts, second, [s]), seed).value
        for s in seeds
    ]
    return difference.as_dict() | {"by_seed": by_seed, "seeds": seeds}


def choices_table(
    counts: pd.DataFrame, target: Target, store: Store, names: dict[Choice, str], seed: int
) -> pd.DataFrame:
    """A row a choice, the longest acceptance first.

    name (its label), kind, boundaries (how many), seeds; acceptance_length, low, high (95 % over held-out samples, bonus token included), by_seed;
    difference, difference_low, difference_high to the default, difference_by_seed; fed_bytes and stored_bytes of a token; not_servable: why, or ''.
    """
    default = label(default_boundaries(target.n_blocks))
    kinds = {label(choice): kind for choice, kind in names.items()}
    rows = []
    for name in counts["name"].unique():
        choice, seeds = tuple(map(int, name.split())), seeds_of(counts, name)
        length, difference = (
            ratio_interval(*pooled(counts, name, seeds), seed),
            compare(counts, name, default, seed),
        )
        width = torch.empty((), dtype=getattr(torch, store.manifest["dtype"])).itemsize
        rows.append(
            {
                "name": name,
                "kind": kinds.get(name, "forward"),
                "boundaries": len(choice),
                "seeds": len(seeds),
                "acceptance_length": length.value,
                "low": length.low,
                "high": length.high,
                "by_seed": [ratio_interval(*pooled(counts, name, [s]), seed).value for s in seeds],
                "difference": difference["value"],
                "difference_low": difference["low"],
                "difference_high": difference["high"],
                "difference_by_seed": difference["by_seed"],
                "fed_bytes": len(choice) * store.manifest["hidden_size"] * width,
                "stored_bytes": stored_bytes(
                    choice, target.n_blocks, store.manifest["hidden_size"], store.manifest["dtype"]
                ),
                "not_servable": not_servable(choice, target),
            }
        )
    return pd.DataFrame(rows).sort_values("acceptance_length", ascending=False, ignore_index=True)


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table of choices for a reader: intervals as text, whether SGLang can serve it as yes or no."""

    def interval(row, name: str, low: str, high: str) -> str:
        return interval_text({"value": row[name], "low": row[low], "high": row[high]})

    return pd.DataFrame(
        {
            "boundaries": table["name"],
            "kind": table["kind"],
            "seeds": table["seeds"],
            "acceptance length": [
                interval(row, "acceptance_length", "low", "high") for _, row in table.iterrows()
            ],
            "against the default": [
                ""
                if row["kind"] == "default"
                else interval(row, "difference", "difference_low", "difference_high")
                for _, row in table.iterrows()
            ],
            "by seed": [
                "" if kind == "default" else ", ".join(f"{value:+.3f}" for value in values)
                for kind, values in zip(table["kind"], table["difference_by_seed"])
            ],
            "bytes fed": table["fed_bytes"],
            "bytes stored": table["stored_bytes"],
            "SGLang": ["no" if why else "yes" for why in table["not_servable"]],
        }
    )


def by_position(counts: pd.DataFrame, names: list[str], seed: int) -> pd.DataFrame:
    """Of drafts at each position whose drafts before were accepted, the share that is too: a row for each of these choices and position, with value, low, high."""
    rows = []
    for name in names:
        own = counts[counts["name"] == name]
        position = 1
        while f"reached_{position}" in own:
            sums = own.groupby("id", sort=True)[
                [f"accepted_{position}", f"reached_{position}"]
            ].sum()
            interval = ratio_interval(
                sums[f"accepted_{position}"], sums[f"reached_{position}"], seed
            )
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
    """A line for each reason: the choices that stock SGLang cannot serve."""
    reasons: dict[str, list[str]] = {}
    for name, reason in zip(table["name"], table["not_servable"]):
        if reason:
            reasons.setdefault(
                re.sub(r"boundary \d+ alone", "one boundary alone", reason), []
            ).append(name)
    return (
        "\n".join(f"{reason}: {', '.join(sorted(names))}" for reason, names in reasons.items())
        or "stock SGLang can serve all of them"
    )


def pair_map(table: pd.DataFrame) -> tuple[list[int], np.ndarray]:
    """(boundaries, [n, n] acceptance lengths) of the pairs that were trained, singles on the diagonal; NaN for those that were not."""
    few = table[table["boundaries"] <= 2]
    at = sorted({int(b) for name in few["name"] for b in name.split()})
    lengths = np.full((len(at), len(at)), np.nan)
    for name, value in zip(few["name"], few["acceptance_length"]):
        i, j = at.index(int(name.split()[0])), at.index(int(name.split()[-1]))
        lengths[i, j] = lengths[j, i] = value
    return at, lengths


def sentence(table: pd.DataFrame, counts: pd.DataFrame, target: str, seed: int) -> str:
    """What follows, with its uncertainty: the best choice that can be served, against the default; whether a better one can't be served, and whether less would do."""
    default = table[table["kind"] == "default"].iloc[0]
    most = table["seeds"].max()
    servable, asked = (
        table[table["not_servable"] == ""],
        table[table["seeds"] == most],
    )  # one seed's best is flattered: contenders only
    others = asked[(asked["not_servable"] == "") & (asked["name"] != default["name"])]
    if others.empty:
        return f"Nothing but the default, {default['name']}, was trained with {most} seeds: no comparison."
    best = others.iloc[0]
    found = compare(counts, best["name"], default["name"], seed)
    tries = f"paired over {counts['id'].nunique()} held-out samples" + (
        f", {most} seeds: {', '.join(f'{d:+.3f}' for d in found['by_seed'])}"
        if most > 1
        else ", one seed"
    )
    numbers = (
        f"{found['value']:+.3f}"
        + ("" if found["low"] is None else f" [{found['low']:+.3f}, {found['high']:+.3f}]")
        + f" ({tries})"
    )
    lengths = f"{best['acceptance_length']:.3f} tokens a verify step against {default['acceptance_length']:.3f}"
    if found["low"] is not None and found["low"] > 0 and min(found["by_seed"]) > 0:
        text = f"For {target}, feed the drafter from boundaries {best['name']}: {lengths} from the default {default['name']}, {numbers}."
    elif found["high"] is not None and found["high"] < 0:
        text = f"For {target}, the default {default['name']} is the best choice tried that can be served; the next, {best['name']}, gives {lengths}, {numbers}."
    else:
        text = f"For {target}, no choice that can be served is clearly better than the default {default['name']}; the best, {best['name']}, gives {lengths}, {numbers}."
    if most > 1:
        fresh = compare(counts, best["name"], default["name"], seed, found["seeds"][1:])
        text += f" It is the best of {len(servable)} tried; by the seeds that had no part in naming the contenders alone, {fresh['value']:+.3f} [{fresh['low']:+.3f}, {fresh['high']:+.3f}]."
    if best["stored_bytes"] != default["stored_bytes"]:
        text += f" It costs {best['stored_bytes']:,} bytes a token in the store, the default {default['stored_bytes']:,}."
    cheaper = [
        (row.stored_bytes, row.name_, compare(counts, row.name_, best["name"], seed))
        for row in servable.rename(columns={"name": "name_"}).itertuples()
        if row.stored_bytes < best["stored_bytes"]
    ]
    close = [
        (bytes, name, d) for bytes, name, d in cheaper if d["high"] is not None and d["high"] >= 0
    ]
    if close:
        bytes, name, d = min(close, key=lambda one: (one[0], -one[2]["value"]))
        text += f" Not clearly worse, with {bytes:,} bytes: {name}, {interval_text(d)}" + (
            ", with one seed." if len(d["seeds"]) == 1 else "."
        )
    above = asked[
        (asked["not_servable"] != "") & (asked["acceptance_length"] > best["acceptance_length"])
    ]
    if len(above):
        d = compare(counts, above.iloc[0]["name"], best["name"], seed)
        text += f" Longer still by {interval_text(d)} is {above.iloc[0]['name']}, but: {above.iloc[0]['not_servable']}."
    return text


def summary(study: Study) -> str:
    """The sentence and how many trainings it rests on."""
    record = study.record
    return (
        f"{record['sentence']}\n{record['trainings']} trainings of {record['choices']} choices, {record['failed']} failed; rank correlation of the probe that guided the search "
        f"with acceptance {record['guided']:.2f}"
    )
