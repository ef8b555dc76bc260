"""Numbers about a store, for a person who wants to see it: its states, its texts, its vocabulary, and where it parts from another store.

States come from a bounded draw of whole samples (`draw`, `read_tokens`), so that a page takes the same time for a store of any size.

No figure is decided by massive activations (single values thousands of times the others', most of them on the first token): whatever looks
at states leaves each sample's first token out or apart, and is per token, or made of *unit rows*, in which every token has length 1 and so weighs
the same. What is not needed from `Tokens` or `Store` is a plain tensor or list, so that the tests can use closed forms.

Axes: S packed tokens, n of them, B boundaries, H hidden size, V vocabulary, K draft steps.
"""

from collections import Counter
from dataclasses import dataclass
from html import escape

import numpy as np
import pandas as pd
import torch

from eyas.errors import EyasError
from eyas.evaluation.offline import jump
from eyas.intervals import ratio_interval
from eyas.models.target import Head
from eyas.models.vocab import choose_vocab
from eyas.prompts.chat_template import repeated_bigrams
from eyas.store.reader import Store

TOK, VALUES = 16384, 2**27  # what is read at most: tokens, and values (tokens x boundaries x H)
PAIR_TOK = 768  # tokens of the maps: their Gram matrices are PAIR_TOK x PAIR_TOK for each boundary
SPECTRUM_TOK = 4096  # tokens of the effective rank
LOGIT_TOK = 4096  # positions of the next-token probes, all boundaries together, within 256 to 1,024 for each
PROMPTS = 1536  # prompts compared with each other, pair by pair

LARGE = 100.0  # |x| above this is rare, and too coarse in bfloat16 to tell neighbours apart (steps of 0.5 and more)
OUTSTANDING = 100.0  # times the median |x| of a boundary; from about 1,000 times on, Sun et al. 2024 speak of massive activations
PENALTIES = (
    0.001,
    0.01,
    0.03,
    0.1,
    0.3,
    1.0,
)  # of the ridge probes, in units of a standardised input's variance
SHINGLE_TOK, NEAR = (
    5,
    0.8,
)  # neighbouring tokens of a shingle; Jaccard similarity from which two prompts are near-duplicates
VOCAB_SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


# ---- what is looked at


@dataclass(frozen=True)
class Tokens:
    """Whole samples of a store side by side. states: boundary -> [S, H] in the stored dtype."""

    ids: list[str]
    sample: torch.Tensor  # int64 [S], the number of the token's sample in `ids`
    position: torch.Tensor  # int64 [S]
    input_ids: torch.Tensor  # int64 [S]
    predicts: torch.Tensor  # bool [S], the token after this one is supervised: its choice is what a drafter has to foresee
    states: dict[int, torch.Tensor]


def draw(store: Store, seed: int, tok: int = TOK) -> list[str]:
    """Ids of samples drawn at random, as many as fit into `tok` tokens and VALUES values, but at least eight. EyasError where the store has not three."""
    lengths = store.index.set_index("id")["length"]
    ids = store.samples()
    if len(ids) < 3:
        raise EyasError(
            f"the store holds {len(ids)} samples",
            "three at least: probes are fitted, tuned and scored on different ones",
            "python -m eyas extract",
        )
    limit = min(tok, VALUES // (len(store.boundaries) * store.manifest["hidden_size"]))
    order = [ids[i] for i in np.random.default_rng(seed).permutation(len(ids))]
    fit = int((np.cumsum([lengths[id] for id in order]) <= limit).sum())
    return order[: max(fit, 8)]  # long samples, wide dumps: fewer would say little


def some(store: Store, limit: int, seed: int) -> list[str]:
    """At most `limit` ids of extracted samples, drawn without replacement, in index order."""
    ids = store.samples()
    chosen = np.random.default_rng(seed).choice(len(ids), size=min(limit, len(ids)), replace=False)
    return [ids[i] for i in sorted(chosen)]


def read_tokens(store: Store, ids: list[str]) -> Tokens:
    samples = [store.read(id) for id in ids]
    lengths = torch.tensor([len(s["input_ids"]) for s in samples])
    following = [torch.cat([s["loss_mask"][1:], torch.tensor([False])]) for s in samples]
    return Tokens(
        ids,
        torch.arange(len(ids)).repeat_interleave(lengths),
        torch.cat([torch.arange(n) for n in lengths]),
        torch.cat([s["input_ids"] for s in samples]),
        torch.cat(following),
        {b: torch.cat([s["states"][b] for s in samples]) for b in store.boundaries},
    )


def runs(mask) -> list[tuple[int, int]]:
    """(start, end) of each run of true values; in a loss mask, each response with its end-of-turn token. mask: bool [T]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask, dtype=np.int8), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def texts(store: Store, ids: list[str]) -> tuple[dict[str, list[int]], list[list[int]]]:
    """(prompt of each sample, all responses), as token ids; no states are read. A prompt is what is not supervised, up to the last response."""
    prompts, responses = {}, []
    for id in ids:
        sample = store.read(id, ())
        spans, tokens = runs(sample["loss_mask"]), sample["input_ids"].tolist()
        responses += [tokens[a:b] for a, b in spans]
        starts, ends = [0, *(b for _, b in spans)], [a for a, _ in spans]
        prompts[id] = [t for a, b in zip(starts, ends) for t in tokens[a:b]]
    return prompts, responses


# ---- samples


def counts_by_split(store: Store) -> pd.DataFrame:
    """A row per split and state: samples, tokens, supervised tokens, samples cut at max_length, median and longest length, GiB in the shards."""
    groups = store.index.groupby(["split", "state"], sort=True)
    table = groups.agg(
        samples=("id", "size"),
        tok=("length", "sum"),
        supervised_tok=("loss_tok", "sum"),
        cut=("truncated", "sum"),
        median_length_tok=("length", "median"),
        longest_tok=("length", "max"),
    ).reset_index()
    return table.assign(gib=table["tok"] * store.token_bytes / 2**30)


def example(store: Store, ids: list[str]) -> str:
    """The first of these samples that has several responses; where none has, the first."""
    return next((id for id in ids if len(runs(store.read(id, ())["loss_mask"])) > 1), ids[0])


def marked_text(sample: dict, tokenizer, end_of_turn: int) -> str:
    """A stored sample's text as HTML, turn by turn, the supervised tokens (loss mask) in <mark>. `sample` has input_ids [T] and loss_mask [T].

    A turn ends with the token `end_of_turn`, the one that closes the assistant's; a template that closes no others has question and answer in one.
    """
    ids, mask = sample["input_ids"].tolist(), sample["loss_mask"].tolist()
    ends = [i + 1 for i, token in enumerate(ids) if token == end_of_turn]
    parts = []
    for start, end in zip([0, *ends], [*ends, len(ids)]):
        text, at = "", start
        for i in range(start + 1, end + 1):
            if (
                i == end or mask[i] != mask[at]
            ):  # runs are decoded whole: one token alone may be half a character
                piece = escape(tokenizer.decode(ids[at:i], skip_special_tokens=False))
                text += f"<mark>{piece}</mark>" if mask[at] else piece
                at = i
        if text.strip():
            parts.append(
                f'<div class="muted">turn {len(parts) + 1}: {end - start} tokens, {sum(mask[start:end])} of them supervised</div>'
                f'<pre style="white-space: pre-wrap">{text.strip()}</pre>'
            )
    return "\n".join(parts)


# ---- states, boundary by boundary


def unit_rows(states: torch.Tensor) -> torch.Tensor:
    """[n, H] -> [n, H] float32, every row of Euclidean length 1 (or 0)."""
    return torch.nn.functional.normalize(states.float(), dim=-1)


def effective_rank(rows: torch.Tensor) -> float:
    """How many directions the rows [n, H] fill: exp of the entropy of p, where p are the squared singular values divided by their sum.

    Roy and Vetterli 2007 take the singular values themselves; squared, p is each direction's share of the variance.
    """
    rows = rows.double()
    squared = torch.linalg.eigvalsh(
        rows.T @ rows if rows.shape[0] > rows.shape[1] else rows @ rows.T
    ).clamp(min=0)
    if squared.sum() == 0:
        return 0.0
    p = squared / squared.sum()
    return float(torch.exp(-torch.xlogy(p, p).sum()))


def boundary_stats(tokens: Tokens) -> pd.DataFrame:
    """A row per stored boundary, ascending.

    tok: tokens looked at, first ones included. Of the tokens after the first: norm_p01/p05/p25/p50/p75/p95/p99, the Euclidean norm per token;
    largest, max |x|; effective_rank of the centred unit rows. first_norm_p50 and first_largest: the same of the first tokens alone.
    median: median |x|. Shares of all values: large, |x| > LARGE; saturated, |x| at the largest number of the stored dtype; bad, NaN or Inf, which
    count as 0 elsewhere. zero_rows: share of tokens whose state is zero everywhere.
    """
    later, table = tokens.position > 0, []
    for b, stored in tokens.states.items():
        rows = stored.float()  # [S, H]
        finite = torch.isfinite(rows)
        rows = rows.where(finite, 0)
        size, whole = rows.abs(), finite.all(dim=-1)  # [S, H], [S]
        norm, top = (
            torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64),
            size.amax(dim=-1),
        )  # [S]; saturated values overflow float32
        spread = unit_rows(rows[later & whole][:SPECTRUM_TOK])
        row = (
            {"boundary": b, "tok": len(rows)}
            | _percentiles("norm", norm[later], (1, 5, 25, 50, 75, 95, 99))
            | _percentiles("first_norm", norm[~later], (50,))
        )
        row |= {
            "largest": float(top[later].max()),
            "first_largest": float(top[~later].max()),
            "median": float(size.median()),
            "effective_rank": effective_rank(spread - spread.mean(dim=0)),
        }
        row |= {
            "large": _share(size > LARGE),
            "saturated": _share(size >= torch.finfo(stored.dtype).max),
            "bad": _share(~finite),
            "zero_rows": _share(top == 0),
        }
        table.append(row)
    return pd.DataFrame(table)


def _share(true: torch.Tensor) -> float:
    return int(true.count_nonzero()) / max(true.numel(), 1)


def _percentiles(name: str, values, points: tuple[int, ...]) -> dict[str, float]:
    found = np.percentile(values, points) if len(values) else [np.nan] * len(points)
    return {f"{name}_p{p:02d}": float(v) for p, v in zip(points, found)}


def massive_activations(tokens: Tokens) -> pd.DataFrame:
    """Where single values stand out: |x| > LARGE and > OUTSTANDING times the boundary's median |x|.

    A row for each dimension, kind of place (`first`: a sample's first token, or a later one) and token id. tok: how many tokens of that kind have
    one there, at the boundary where most do; boundaries: ascending tuple of those where any does; largest: the largest value, with its sign; times_median:
    the largest |x| in units of its boundary's median. The largest come first; no row where nothing stands out.
    """
    found = []
    for b, stored in tokens.states.items():
        size = stored.float().abs()
        median = float(size.median())
        at, dimension = torch.nonzero(size > max(LARGE, OUTSTANDING * median), as_tuple=True)
        value = stored[at, dimension].float()
        found.append(
            pd.DataFrame(
                {
                    "boundary": b,
                    "dimension": dimension,
                    "first": tokens.position[at] == 0,
                    "token": tokens.input_ids[at],
                    "value": value,
                    "size": value.abs(),
                    "times_median": value.abs() / max(median, 1e-30),
                }
            )
        )
    rows = []
    for (dimension, first, token), group in pd.concat(found).groupby(
        ["dimension", "first", "token"]
    ):
        per_boundary, largest = (
            group.groupby("boundary").size(),
            group["value"].iloc[group["size"].argmax()],
        )
        rows.append(
            (
                dimension,
                first,
                token,
                int(per_boundary.max()),
                tuple(per_boundary.index),
                largest,
                group["times_median"].max(),
            )
        )
    table = pd.DataFrame(
        rows,
        columns=["dimension", "first", "token", "tok", "boundaries", "largest", "times_median"],
    )
    return table.sort_values("largest", key=np.abs, ascending=False, ignore_index=True)


# ---- boundaries against each other


def cosine_map(tokens: Tokens, seed: int) -> np.ndarray:
    """[B, B]: median over tokens of the cosine between a token's states at two boundaries. First tokens are left out."""
    units = [unit_rows(rows) for rows in _some_rows(tokens, seed)]
    cosines = np.eye(len(units))
    for i, a in enumerate(units):
        for j in range(i):
            cosines[i, j] = cosines[j, i] = (a * units[j]).sum(dim=-1).median()
    return cosines


def cka_map(tokens: Tokens, seed: int) -> np.ndarray:
    """[B, B]: `cka` of the unit rows of two boundaries. First tokens are left out."""
    return cka([unit_rows(rows) for rows in _some_rows(tokens, seed)])


def cka(sets: list[torch.Tensor]) -> np.ndarray:
    """Linear centred kernel alignment of each two of these sets of rows [n, H_i] about the same n tokens: [B, B], 1 on the diagonal.

    1 where one set is the other, rotated, scaled and moved; around 0 where they are unrelated, for any n and H, since the estimator is the
    unbiased one (Song et al. 2012; with the usual one, Kornblith et al. 2019, unrelated sets seem alike when H is not far below n). It may be
    a little below 0. At least 4 rows.
    """
    n = len(sets[0])
    if n < 4:
        raise EyasError(
            f"{n} tokens to compare", "4 at least", "python -m eyas extract -p train_samples N"
        )
    grams = []
    for rows in sets:
        rows = rows.double()
        rows = rows - rows.mean(dim=0)  # changes nothing but rounding
        grams.append((rows @ rows.T).fill_diagonal_(0))
    flat, sums = (
        torch.stack(grams).flatten(1),
        torch.stack([g.sum(dim=0) for g in grams]),
    )  # [B, n*n], [B, n]
    totals = sums.sum(dim=1)  # [B]
    hsic = (
        flat @ flat.T
        + torch.outer(totals, totals) / ((n - 1) * (n - 2))
        - 2 / (n - 2) * sums @ sums.T
    )  # [B, B], times n (n-3)
    scale = hsic.diagonal().clamp(min=0).sqrt()
    return (hsic / torch.outer(scale, scale)).numpy()


def _some_rows(tokens: Tokens, seed: int) -> list[torch.Tensor]:
    """The states [n, H] of at most PAIR_TOK tokens after the first, the same ones at each boundary."""
    at = torch.nonzero(tokens.position > 0).squeeze(1).numpy()
    at = torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(at)[:PAIR_TOK]))
    return [rows[at] for rows in tokens.states.values()]


def ridge(
    x: torch.Tensor, y: torch.Tensor, penalties: tuple[float, ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(weights [P, Q], bias [Q]) for each penalty: they make |y - x @ weights - bias|^2 / n + penalty * |weights|^2 smallest. x [n, P], y [n, Q]."""
    n, mean_x, mean_y = len(x), x.mean(dim=0), y.mean(dim=0)
    x, y = x - mean_x, y - mean_y
    wide = x.shape[1] > n  # then the same weights come from the smaller matrix
    gram, right = (x @ x.T, y) if wide else (x.T @ x, x.T @ y)
    found = []
    for penalty in penalties:
        solved = torch.cholesky_solve(
            right, torch.linalg.cholesky(gram + n * penalty * torch.eye(len(gram), dtype=x.dtype))
        )
        weights = x.T @ solved if wide else solved
        found.append((weights, mean_y - mean_x @ weights))
    return found


def r_squared(y: torch.Tensor, guess: torch.Tensor) -> float:
    """1 - squared error / variance, for each column of y [n, Q] by itself and then averaged, so that no dimension weighs more than another."""
    error, spread = (y - guess).square().sum(dim=0), (y - y.mean(dim=0)).square().sum(dim=0)
    varies = spread > 0
    return float((1 - error[varies] / spread[varies]).mean())


def probes(tokens: Tokens, head: Head, seed: int) -> pd.DataFrame:
    """How much of the last state, and of the target's next token, can be read off each boundary by a linear map. A row per boundary.

    The map goes from the standardised unit rows of the boundary to what the head reads, the last state after the final norm: a ridge regression at
    positions whose next token is supervised, fitted on five eighths of the samples, with the penalty that gives the best r2 on one eighth, and scored
    on the other quarter. r2: of the normed last state (`r_squared`). agreement (low, high: 95 % interval over samples): share of positions where the
    head's first choice from the map's output is the target's own, its first choice from the true last state. constant: the agreement of always
    saying the commonest choice.
    """
    rng = np.random.default_rng(seed)
    rank = torch.from_numpy(rng.permutation(len(tokens.ids)))[
        tokens.sample
    ]  # [S], of the token's sample
    n_score, n_tune = max(len(tokens.ids) // 4, 1), max(len(tokens.ids) // 8, 1)
    usable = tokens.predicts & (tokens.position > 0)
    fit, tune, score = (
        torch.nonzero(usable & part).squeeze(1)
        for part in (
            rank >= n_score + n_tune,
            (rank >= n_score) & (rank < n_score + n_tune),
            rank < n_score,
        )
    )
    if not min(map(len, (fit, tune, score))):
        raise EyasError(
            "no supervised token in some of the drawn samples",
            "supervised tokens in all of them",
            "python -m eyas verify",
        )
    per_boundary = min(max(LOGIT_TOK // len(tokens.states), 256), 1024)
    judged = torch.from_numpy(
        np.sort(rng.permutation(len(score))[:per_boundary])
    )  # of the scored rows
    last = tokens.states[max(tokens.states)]
    goal, check, truth = (head.normed(last[at]) for at in (fit, tune, score))  # [n, H]
    choices = (truth[judged] @ head.lm_head.T).argmax(dim=-1)
    constant = float((choices == choices.bincount().argmax()).float().mean())
    sample = tokens.sample[score][judged].numpy()
    groups = [sample == s for s in np.unique(sample)]
    table = []
    for b, rows in tokens.states.items():
        x, x_tune, x_score = (unit_rows(rows[at]) for at in (fit, tune, score))
        scale = x.std(dim=0).clamp(min=1e-12)
        maps = ridge(x / scale, goal, PENALTIES)
        tuned = [r_squared(check, (x_tune / scale) @ weights + bias) for weights, bias in maps]
        weights, bias = maps[int(np.argmax(tuned))]
        guess = (x_score / scale) @ weights + bias  # [n, H]
        same = ((guess[judged] @ head.lm_head.T).argmax(dim=-1) == choices).numpy()
        interval = ratio_interval([same[g].sum() for g in groups], [g.sum() for g in groups], seed)
        table.append(
            {
                "boundary": b,
                "fit_tok": len(fit),
                "scored_tok": len(score),
                "judged_tok": len(judged),
                "penalty": PENALTIES[int(np.argmax(tuned))],
                "r2": r_squared(truth, guess),
                "agreement": interval.value,
                "low": interval.low,
                "high": interval.high,
                "constant": constant,
            }
        )
    return pd.DataFrame(table).astype(
        {"low": float, "high": float}
    )  # NaN where one sample gives no interval


def next_token_agreement(tokens: Tokens, head: Head, limit: int = 2048) -> tuple[int, int]:
    """(agreeing, supervised): supervised tokens that are the first choice of the head applied to the last state one token earlier.

    Responses that the target wrote greedily agree but for ties of bfloat16; a mask, a norm or a boundary that is off by one does not.
    """
    at = torch.nonzero(tokens.predicts).squeeze(1)[:limit]
    chosen = head.logits(tokens.states[max(tokens.states)][at]).argmax(dim=-1)
    return int((chosen == tokens.input_ids[at + 1]).sum()), len(at)


# ---- texts


def similar_prompts(prompts: dict[str, list[int]], splits: dict[str, str]) -> pd.DataFrame:
    """A row per prompt: id, split, `same`, how many others have the very same tokens; `jaccard` and `nearest`, its largest similarity and to whom;
    `train_jaccard`, its largest similarity to another prompt of split train.

    Similarity is the Jaccard index of the prompts' sets of shingles (SHINGLE_TOK neighbouring tokens), every pair exactly. Shingles that more than half
    of ten or more prompts have are the chat template's and count in none.
    """
    ids = list(prompts)
    counts = Counter(tuple(p) for p in prompts.values())
    sets = [shingles(p, SHINGLE_TOK) for p in prompts.values()]
    have = Counter(s for found in sets for s in found)
    everyone = {s for s, count in have.items() if count > max(len(ids) / 2, 9)}
    similarity = jaccard([found - everyone for found in sets])
    np.fill_diagonal(similarity, -1)
    train = np.array([splits[id] == "train" for id in ids])
    to_train = np.where(train[None, :], similarity, -1)
    return pd.DataFrame(
        {
            "id": ids,
            "split": [splits[id] for id in ids],
            "same": [counts[tuple(prompts[id])] - 1 for id in ids],
            "jaccard": similarity.max(axis=1, initial=0),
            "nearest": [ids[i] for i in similarity.argmax(axis=1)],
            "train_jaccard": to_train.max(axis=1, initial=0),
        }
    )


def shingles(ids: list[int], size: int) -> set[tuple[int, ...]]:
    """All runs of `size` neighbouring tokens; of fewer tokens, the one run of all of them."""
    return {tuple(ids[i : i + size]) for i in range(max(len(ids) - size + 1, 1))} if ids else set()


def jaccard(sets: list[set]) -> np.ndarray:
    """[n, n]: shared elements of two sets / elements of either; 0 for two empty sets."""
    have = Counter(element for one in sets for element in one)
    column = {
        element: i for i, element in enumerate(e for e, count in have.items() if count > 1)
    }  # an element of one set alone is shared by no pair
    shared = torch.zeros(len(sets), len(sets))
    for start in range(0, len(column), 8192):
        block = torch.zeros(len(sets), 8192)
        for row, one in enumerate(sets):
            at = [
                column[e] - start for e in one if e in column and start <= column[e] < start + 8192
            ]
            block[row, at] = 1
        shared += block @ block.T
    shared, sizes = shared.numpy(), np.array([len(one) for one in sets])
    either = (
        sizes[:, None] + sizes[None, :] - np.where(np.eye(len(sets), dtype=bool), sizes, shared)
    )
    shared[np.diag_indices(len(sets))] = sizes
    return shared / np.maximum(either, 1)


def repetition(responses: list[list[int]]) -> pd.DataFrame:
    """A row per response of two tokens or more: `repeated` of its `bigrams` stood in the same response before."""
    return pd.DataFrame(
        [repeated_bigrams(ids) for ids in responses if len(ids) > 1],
        columns=["repeated", "bigrams"],
    )


# ---- vocabulary


def ceiling(responses: list[list[int]], draftable: torch.Tensor, draft_length: int) -> pd.DataFrame:
    """The walk of a drafter that is always right within its vocabulary and never outside: what coverage alone leaves of acceptance.

    A row per response: tok, covered, accepted, verify_steps. Drafts of `draft_length` tokens; a verify step accepts the leading tokens that are
    draftable (bool [V]) and the walk jumps by them and the bonus token, as `eyas.evaluation.offline` does; its first token comes from the prefill.
    """
    rows = []
    for ids in responses:
        covered = draftable[torch.tensor(ids)].numpy()
        misses = np.append(
            np.flatnonzero(~covered[1:]), len(ids) - 1
        )  # where a draft fails, and the end, behind which none counts
        at = np.arange(len(ids) - 1)  # the last token committed
        hits = np.minimum(misses[np.searchsorted(misses, at)] - at, draft_length)
        proposed, accepted = jump(hits, draft_length)
        rows.append((len(ids), int(covered.sum()), int(accepted.sum()), len(proposed)))
    return pd.DataFrame(rows, columns=["tok", "covered", "accepted", "verify_steps"])


def ceilings(
    responses: list[list[int]], counts: torch.Tensor, chosen: int, draft_length: int, seed: int
) -> pd.DataFrame:
    """A row per size D of the draft vocabulary, `chosen` among them: coverage of these responses and the acceptance length that it leaves (`ceiling`).

    The vocabulary of size D is the D tokens most frequent in `counts` (int64 [V]). acceptance_length (low, high: 95 % interval over responses) counts the
    bonus token; formula is 1 + c + ... + c^K for coverage c, what it would be if the tokens outside came independently of each other and responses had no end.
    """
    table = []
    for size in sorted({chosen, len(counts), *(s for s in VOCAB_SIZES if s < len(counts))}):
        draftable = choose_vocab(counts, size).t2d
        walked = ceiling(responses, draftable, draft_length)
        length = ratio_interval(
            walked["accepted"] + walked["verify_steps"], walked["verify_steps"], seed
        )
        covered = walked["covered"].sum() / walked["tok"].sum()
        table.append(
            {
                "draft_vocab_size": size,
                "coverage": covered,
                "acceptance_length": length.value,
                "low": length.low,
                "high": length.high,
                "formula": sum(covered**i for i in range(draft_length + 1)),
            }
        )
    return pd.DataFrame(table).astype(
        {"acceptance_length": float, "low": float, "high": float}
    )  # NaN where one response gives no interval


# ---- two stores


@dataclass(frozen=True)
class Drift:
    """Where two stores of the same prompts part. `table` has a row per boundary that both hold (see `drift`)."""

    samples: int  # that both have
    only_here: int
    only_there: int
    other_ids: (
        int  # of `samples`: with other token ids in the two stores; their states are not compared
    )
    other_mask: int  # of `samples`: with the same ids and another loss mask
    rounding: (
        float  # largest relative error that rounding once to the coarser of the two dtypes can make
    )
    table: pd.DataFrame

    def __str__(self) -> str:
        share = (
            f"{self.other_ids} of {self.samples} common samples have other token ids, {self.other_mask} another loss mask; "
            f"{self.only_here} are only here, {self.only_there} only there"
        )
        if not self.table["tok"].any():
            return f"{share}\nno states were compared"
        differs = self.table[self.table["identical"] < 1]["boundary"]
        parts = self.table[self.table["parts"]]["boundary"]
        first = (
            f"boundary {differs.iloc[0]} is the first that is not bit for bit the same everywhere"
            if len(differs)
            else "all boundaries are bit for bit the same"
        )
        where = (
            f"boundary {parts.iloc[0]} is the first that parts"
            if len(parts)
            else "no boundary parts"
        )
        return f"{share}\n{first}; {where} (median relative error above {self.rounding:.2g}, one rounding of {self.table.attrs['dtype']})"


def drift(here: Store, there: Store, seed: int) -> Drift:
    """Compare two stores on a bounded draw of their common samples. EyasError where they have none, or states of another width.

    The table's columns: tok, compared tokens after the first; identical, share of them that are bit for bit the same; error_p05/p50/p95/p99 and
    cosine_p01/p05/p50 per token (`token_errors`); first_error_p50, of the first tokens alone; parts, whether the median token differs by more than
    one rounding can explain.
    """
    a, b = set(here.samples()), set(there.samples())
    both = [id for id in here.samples() if id in b]
    boundaries = [x for x in here.boundaries if x in there.boundaries]
    width = here.manifest["hidden_size"]
    if not both or not boundaries or width != there.manifest["hidden_size"]:
        raise EyasError(
            f"the two stores have {len(both)} samples and {len(boundaries)} boundaries in common, H is {width} and {there.manifest['hidden_size']}",
            "stores of the same prompts and the same target",
            "-p compare_run NAME, another run",
        )
    dtypes = [getattr(torch, store.manifest["dtype"]) for store in (here, there)]
    coarser = max(dtypes, key=_rounding)
    chosen = np.random.default_rng(seed).permutation(len(both))[:PROMPTS]
    pairs = {both[i]: (here.read(both[i], ()), there.read(both[i], ())) for i in chosen}
    same = {id: torch.equal(x["input_ids"], y["input_ids"]) for id, (x, y) in pairs.items()}
    other_mask = sum(
        same[id] and not torch.equal(x["loss_mask"], y["loss_mask"]) for id, (x, y) in pairs.items()
    )
    limit, read = min(TOK, VALUES // (2 * len(boundaries) * width)), []
    for id in pairs:
        if same[id] and (
            not read or sum(len(pairs[i][0]["input_ids"]) for i in (*read, id)) <= limit
        ):
            read.append(id)
    table = _drift_table(here, there, read, boundaries, _rounding(coarser))
    table.attrs["dtype"] = str(coarser).removeprefix("torch.")
    return Drift(
        len(pairs),
        len(a - b),
        len(b - a),
        sum(not ok for ok in same.values()),
        other_mask,
        _rounding(coarser),
        table,
    )


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _drift_table(
    here: Store, there: Store, ids: list[str], boundaries: list[int], rounding: float
) -> pd.DataFrame:
    parts = {b: [] for b in boundaries}
    for id in ids:
        x, y = (store.read(id, tuple(boundaries))["states"] for store in (here, there))
        for b in boundaries:
            error, cosine = token_errors(x[b], y[b])
            parts[b].append(
                torch.stack(
                    [
                        torch.arange(len(error)),
                        error,
                        cosine,
                        (x[b].float() == y[b].float()).all(dim=-1),
                    ]
                )
            )
    table = []
    for b in boundaries:
        position, error, cosine, identical = (
            torch.cat(parts[b], dim=1) if ids else torch.empty(4, 0)
        )
        later = position > 0
        row = {"boundary": b, "tok": int(later.sum()), "identical": _share(identical[later])}
        row |= _percentiles("error", error[later], (5, 50, 95, 99)) | _percentiles(
            "cosine", cosine[later], (1, 5, 50)
        )
        row |= {"first_error_p50": _percentiles("e", error[~later], (50,))["e_p50"]}
        table.append(row | {"parts": row["error_p50"] > rounding})
    return pd.DataFrame(table)


def token_errors(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(relative error, cosine) of each token, [n] float64 each. x, y [n, H]; the error is |x - y| / |y|."""
    x, y = x.double(), y.double()
    return (x - y).norm(dim=-1) / y.norm(dim=-1).clamp(min=1e-30), torch.cosine_similarity(
        x, y, dim=-1
    )
