"""Compute numbers about a store for people: states, texts, vocabulary, difference to another store.

States come from a bounded draw of whole samples (`draw`, `read_tokens`), so a page takes the same
time for a store of any size.

Massive activations (single values thousands of times the others', most of them on the first token)
decide no number. Whatever looks at states leaves each sample's first token out or apart. It is per
token, or made of *unit rows*, in which every token has length 1 and so weighs the same.
What does not need `Tokens` or `Store` takes plain tensors or lists, so that tests can use closed
forms.

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

TOK = 16384  # most tokens that are read
VALUES = 2**27  # most values that are read: tokens x boundaries x H
# Tokens of the maps. Their Gram matrices are PAIR_TOK x PAIR_TOK for each boundary.
PAIR_TOK = 768
SPECTRUM_TOK = 4096  # tokens of the effective rank
# Positions of the next-token probes: all boundaries together, within 256 to 1,024 for each.
LOGIT_TOK = 4096
PROMPTS = 1536  # prompts compared with each other, pair by pair

# |x| above this is rare, and bfloat16 is too coarse there to separate neighbours (steps of 0.5
# and more).
LARGE = 100.0
# Times the median |x| of a boundary. From about 1,000 times on, Sun et al. 2024 speak of massive
# activations.
OUTSTANDING = 100.0
# Of the ridge probes, in units of a standardised input's variance.
PENALTIES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
SHINGLE_TOK = 5  # neighbouring tokens of a shingle
NEAR = 0.8  # Jaccard similarity from which two prompts are near-duplicates
SHARED_BLOCK = 8192  # elements that `jaccard` compares at a time, to bound its memory
VOCAB_SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


# ---- what is looked at


@dataclass(frozen=True)
class Tokens:
    """Hold whole samples of a store side by side."""

    ids: list[str]
    sample: torch.Tensor  # int64 [S], the number of the token's sample in `ids`
    position: torch.Tensor  # int64 [S]
    input_ids: torch.Tensor  # int64 [S]
    # bool [S], whether the next token is supervised: a drafter has to foresee its choice.
    predicts: torch.Tensor
    states: dict[int, torch.Tensor]  # by boundary, [S, H] in the stored dtype


def draw(store: Store, seed: int, tok: int = TOK) -> list[str]:
    """Return ids of samples drawn at random, at least eight.

    As many are drawn as fit into `tok` tokens and VALUES values.
    Raise EyasError if the store has fewer than three.
    """
    lengths = store.index.set_index("id")["length"]
    ids = store.samples()
    if len(ids) < 3:
        raise EyasError(
            f"the store holds {len(ids)} samples",
            "three at least: probes are fitted, tuned and scored on different ones",
            "python -m eyas extract",
        )
    token_values = len(store.boundaries) * store.manifest["hidden_size"]
    limit_tok = min(tok, VALUES // token_values)
    order = [ids[i] for i in np.random.default_rng(seed).permutation(len(ids))]
    total_tok = np.cumsum([lengths[id] for id in order])
    n_fitting = int((total_tok <= limit_tok).sum())
    return order[: max(n_fitting, 8)]  # fewer than eight would say little


def some(store: Store, limit: int, seed: int) -> list[str]:
    """Return at most `limit` ids of extracted samples, drawn without repeats, in index order."""
    ids = store.samples()
    chosen = np.random.default_rng(seed).choice(len(ids), size=min(limit, len(ids)), replace=False)
    return [ids[i] for i in sorted(chosen)]


def read_tokens(store: Store, ids: list[str]) -> Tokens:
    """Read whole samples with their states at all stored boundaries."""
    samples = [store.read(id) for id in ids]
    lengths = torch.tensor([len(s["input_ids"]) for s in samples])
    following = [torch.cat([s["loss_mask"][1:], torch.tensor([False])]) for s in samples]
    states = {}
    for b in store.boundaries:
        states[b] = torch.cat([s["states"][b] for s in samples])
    return Tokens(
        ids=ids,
        sample=torch.arange(len(ids)).repeat_interleave(lengths),
        position=torch.cat([torch.arange(n) for n in lengths]),
        input_ids=torch.cat([s["input_ids"] for s in samples]),
        predicts=torch.cat(following),
        states=states,
    )


def runs(mask) -> list[tuple[int, int]]:
    """Return (start, end) of each run of true values. mask: bool [T].

    In a loss mask, these are the responses with their end-of-turn tokens.
    """
    padded = np.concatenate([[0], np.asarray(mask, dtype=np.int8), [0]])
    edges = np.flatnonzero(np.diff(padded))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def texts(store: Store, ids: list[str]) -> tuple[dict[str, list[int]], list[list[int]]]:
    """Return the prompt of each sample and all responses, as token ids.

    A prompt is what is not supervised, up to the last response. No states are read.
    """
    prompts = {}
    responses = []
    for id in ids:
        sample = store.read(id, ())
        tokens = sample["input_ids"].tolist()
        prompt = []
        prompt_start = 0
        for start, end in runs(sample["loss_mask"]):
            prompt += tokens[prompt_start:start]
            responses.append(tokens[start:end])
            prompt_start = end
        prompts[id] = prompt
    return prompts, responses


# ---- samples


def counts_by_split(store: Store) -> pd.DataFrame:
    """Return one row a split and state.

    The columns are samples, tokens, supervised tokens, samples cut at max_length, median and
    longest length, and GiB in the shards.
    """
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
    """Return the first of these samples that has several responses; else the first."""
    return next((id for id in ids if len(runs(store.read(id, ())["loss_mask"])) > 1), ids[0])


def marked_text(sample: dict, tokenizer, end_of_turn: int) -> str:
    """Return a stored sample's text as HTML, turn by turn, supervised tokens in <mark>.

    sample: has input_ids [T] and loss_mask [T].
    end_of_turn: the token that closes the assistant's turn. A template that closes no other turn
    has question and answer in one.
    """
    ids = sample["input_ids"].tolist()
    mask = sample["loss_mask"].tolist()
    ends = [i + 1 for i, token in enumerate(ids) if token == end_of_turn]
    parts = []
    for start, end in zip([0, *ends], [*ends, len(ids)]):
        text = _marked_turn(ids[start:end], mask[start:end], tokenizer).strip()
        if text:
            supervised = sum(mask[start:end])
            parts.append(
                f'<div class="muted">turn {len(parts) + 1}: {end - start} tokens, '
                f"{supervised} of them supervised</div>"
                f'<pre style="white-space: pre-wrap">{text}</pre>'
            )
    return "\n".join(parts)


def _marked_turn(ids: list[int], mask: list[bool], tokenizer) -> str:
    """Return one turn as HTML. Runs are decoded whole: one token may be half a character."""
    text = ""
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or mask[i] != mask[start]:
            piece = escape(tokenizer.decode(ids[start:i], skip_special_tokens=False))
            text += f"<mark>{piece}</mark>" if mask[start] else piece
            start = i
    return text


# ---- states, boundary by boundary


def unit_rows(states: torch.Tensor) -> torch.Tensor:
    """Return [n, H] float32 in which every row has Euclidean length 1 (or 0). states: [n, H]."""
    return torch.nn.functional.normalize(states.float(), dim=-1)


def effective_rank(rows: torch.Tensor) -> float:
    """Return how many directions the rows [n, H] fill.

    It is exp of the entropy of p, where p are the squared singular values divided by their sum.
    Roy and Vetterli 2007 take the singular values themselves; squared, p is each direction's share
    of the variance.
    """
    rows = rows.double()
    tall = rows.shape[0] > rows.shape[1]
    gram = rows.T @ rows if tall else rows @ rows.T  # the smaller one has the same eigenvalues
    squared = torch.linalg.eigvalsh(gram).clamp(min=0)
    if squared.sum() == 0:
        return 0.0
    p = squared / squared.sum()
    return float(torch.exp(-torch.xlogy(p, p).sum()))


def boundary_stats(tokens: Tokens) -> pd.DataFrame:
    """Return one row a stored boundary, ascending.

    tok: tokens looked at, first ones included.
    Of the tokens after the first: norm_p01/p05/p25/p50/p75/p95/p99, the Euclidean norm per token;
    largest, max |x|; effective_rank of the centred unit rows.
    first_norm_p50 and first_largest: the same of the first tokens alone.
    median: median |x|.
    Shares of all values: large, |x| > LARGE; saturated, |x| at the largest number of the stored
    dtype; bad, NaN or Inf, which count as 0 elsewhere.
    zero_rows: share of tokens whose state is zero everywhere.
    """
    later = tokens.position > 0  # [S]
    table = []
    for boundary, stored in tokens.states.items():
        rows = stored.float()  # [S, H]
        finite = torch.isfinite(rows)  # [S, H]
        rows = rows.where(finite, 0)
        size = rows.abs()  # [S, H]
        whole = finite.all(dim=-1)  # [S]
        # float64, because saturated values overflow float32.
        norm = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)  # [S]
        top = size.amax(dim=-1)  # [S]
        units = unit_rows(rows[later & whole][:SPECTRUM_TOK])
        table.append(
            {
                "boundary": boundary,
                "tok": len(rows),
                **_percentiles("norm", norm[later], (1, 5, 25, 50, 75, 95, 99)),
                **_percentiles("first_norm", norm[~later], (50,)),
                "largest": float(top[later].max()),
                "first_largest": float(top[~later].max()),
                "median": float(size.median()),
                "effective_rank": effective_rank(units - units.mean(dim=0)),
                "large": _share(size > LARGE),
                "saturated": _share(size >= torch.finfo(stored.dtype).max),
                "bad": _share(~finite),
                "zero_rows": _share(top == 0),
            }
        )
    return pd.DataFrame(table)


def _share(flags: torch.Tensor) -> float:
    """Return the share of true values."""
    return int(flags.count_nonzero()) / max(flags.numel(), 1)


def _percentiles(name: str, values, points: tuple[int, ...]) -> dict[str, float]:
    """Return name_p05 and so on; NaN where there is no value."""
    if len(values) == 0:
        return {f"{name}_p{point:02d}": np.nan for point in points}
    percentiles = np.percentile(values, points)
    return {f"{name}_p{point:02d}": float(v) for point, v in zip(points, percentiles)}


def massive_activations(tokens: Tokens) -> pd.DataFrame:
    """Return where single values stand out.

    They do if |x| > LARGE and |x| > OUTSTANDING times the boundary's median |x|. A row for each
    dimension, kind of place (`first`: a sample's first token, or a later one) and token id:
    tok: how many tokens of that kind have such a value, at the boundary where most do.
    boundaries: ascending tuple of those where any does.
    largest: the largest value, with its sign.
    times_median: the largest |x| in units of its boundary's median.
    The largest come first. There is no row where nothing stands out.
    """
    values = pd.concat([_outstanding_values(tokens, b) for b in tokens.states])
    rows = []
    for (dimension, first, token), group in values.groupby(["dimension", "first", "token"]):
        per_boundary = group.groupby("boundary").size()
        rows.append(
            {
                "dimension": dimension,
                "first": first,
                "token": token,
                "tok": int(per_boundary.max()),
                "boundaries": tuple(per_boundary.index),
                "largest": group["value"].iloc[group["size"].argmax()],
                "times_median": group["times_median"].max(),
            }
        )
    columns = ["dimension", "first", "token", "tok", "boundaries", "largest", "times_median"]
    table = pd.DataFrame(rows, columns=columns)
    return table.sort_values("largest", key=np.abs, ascending=False, ignore_index=True)


def _outstanding_values(tokens: Tokens, boundary: int) -> pd.DataFrame:
    """Return one row a value that stands out at this boundary."""
    stored = tokens.states[boundary]
    size = stored.float().abs()  # [S, H]
    median = float(size.median())
    outstanding = size > max(LARGE, OUTSTANDING * median)
    row, dimension = torch.nonzero(outstanding, as_tuple=True)
    value = stored[row, dimension].float()
    return pd.DataFrame(
        {
            "boundary": boundary,
            "dimension": dimension,
            "first": tokens.position[row] == 0,
            "token": tokens.input_ids[row],
            "value": value,
            "size": value.abs(),
            "times_median": value.abs() / max(median, 1e-30),
        }
    )


# ---- boundaries against each other


def cosine_map(tokens: Tokens, seed: int) -> np.ndarray:
    """Return the median cosine between a token's states at two boundaries, [B, B].

    First tokens are left out.
    """
    units = [unit_rows(rows) for rows in _some_rows(tokens, seed)]
    cosines = np.eye(len(units))
    for i, rows in enumerate(units):
        for j in range(i):
            cosine = (rows * units[j]).sum(dim=-1).median()
            cosines[i, j] = cosine
            cosines[j, i] = cosine
    return cosines


def cka_map(tokens: Tokens, seed: int) -> np.ndarray:
    """Return `cka` of the unit rows of each two boundaries, [B, B]. First tokens are left out."""
    return cka([unit_rows(rows) for rows in _some_rows(tokens, seed)])


def cka(sets: list[torch.Tensor]) -> np.ndarray:
    """Return the linear centred kernel alignment of each two sets of rows, [B, B].

    sets: B tensors [n, H_i] about the same n tokens, at least 4. The diagonal is 1.
    The value is 1 where one set is the other, rotated, scaled and moved. It is around 0 where they
    are unrelated, for any n and H, because the estimator is the unbiased one (Song et al. 2012).
    With the usual one (Kornblith et al. 2019) unrelated sets seem alike when H is not far below n.
    The value may be a little below 0.
    Raise EyasError if there are fewer than 4 rows.
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
    flat = torch.stack(grams).flatten(1)  # [B, n*n]
    sums = torch.stack([gram.sum(dim=0) for gram in grams])  # [B, n]
    totals = sums.sum(dim=1)  # [B]
    hsic = (
        flat @ flat.T
        + torch.outer(totals, totals) / ((n - 1) * (n - 2))
        - 2 / (n - 2) * sums @ sums.T
    )  # [B, B], times n (n-3)
    scale = hsic.diagonal().clamp(min=0).sqrt()
    return (hsic / torch.outer(scale, scale)).numpy()


def _some_rows(tokens: Tokens, seed: int) -> list[torch.Tensor]:
    """Return the states [n, H] of at most PAIR_TOK tokens after the first, by boundary.

    The tokens are the same at each boundary.
    """
    later = torch.nonzero(tokens.position > 0).squeeze(1).numpy()
    drawn = np.random.default_rng(seed).permutation(later)[:PAIR_TOK]
    chosen = torch.from_numpy(np.sort(drawn))
    return [rows[chosen] for rows in tokens.states.values()]


def ridge(
    x: torch.Tensor, y: torch.Tensor, penalties: tuple[float, ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (weights [P, Q], bias [Q]) of a ridge regression for each penalty.

    They make |y - x @ weights - bias|^2 / n + penalty * |weights|^2 smallest.
    x: [n, P]. y: [n, Q].
    """
    n = len(x)
    mean_x = x.mean(dim=0)
    mean_y = y.mean(dim=0)
    x = x - mean_x
    y = y - mean_y
    wide = x.shape[1] > n  # then the same weights come from the smaller matrix
    gram = x @ x.T if wide else x.T @ x
    right = y if wide else x.T @ y
    solutions = []
    for penalty in penalties:
        regularised = gram + n * penalty * torch.eye(len(gram), dtype=x.dtype)
        solved = torch.cholesky_solve(right, torch.linalg.cholesky(regularised))
        weights = x.T @ solved if wide else solved
        solutions.append((weights, mean_y - mean_x @ weights))
    return solutions


def r_squared(y: torch.Tensor, guess: torch.Tensor) -> float:
    """Return 1 - squared error / variance, averaged over the columns.

    Each column of y [n, Q] counts by itself, so no dimension weighs more than another.
    Columns without variance are left out.
    """
    error = (y - guess).square().sum(dim=0)  # [Q]
    spread = (y - y.mean(dim=0)).square().sum(dim=0)  # [Q]
    varies = spread > 0
    return float((1 - error[varies] / spread[varies]).mean())


@dataclass(frozen=True)
class _Parts:
    """Hold the packed positions that a probe is fitted, tuned and scored on, int64 [n] each."""

    fit: torch.Tensor
    tune: torch.Tensor
    score: torch.Tensor


def probes(tokens: Tokens, head: Head, seed: int) -> pd.DataFrame:
    """Return how much a linear map reads off each boundary, one row a boundary.

    The map goes from the standardised unit rows of the boundary to what the head reads: the last
    state after the final norm. It is a ridge regression at positions whose next token is
    supervised. Five eighths of the samples fit it, one eighth chooses the penalty of best r2, and
    the other quarter scores it.
    r2: of the normed last state (`r_squared`).
    agreement (low, high: 95 % interval over samples): share of positions where the head's first
    choice from the map's output is the target's own, its first choice from the true last state.
    constant: the agreement of always giving the commonest choice.
    Raise EyasError if a part has no supervised token.
    """
    rng = np.random.default_rng(seed)
    parts = _split_positions(tokens, rng)
    n_judged = min(max(LOGIT_TOK // len(tokens.states), 256), 1024)
    drawn = np.sort(rng.permutation(len(parts.score))[:n_judged])
    judged = torch.from_numpy(drawn)  # rows of the scored positions
    last = tokens.states[max(tokens.states)]
    goal = head.normed(last[parts.fit])  # [n, H]
    check = head.normed(last[parts.tune])  # [n, H]
    truth = head.normed(last[parts.score])  # [n, H]
    choices = (truth[judged] @ head.lm_head.T).argmax(dim=-1)  # [judged]
    constant = float((choices == choices.bincount().argmax()).float().mean())
    sample = tokens.sample[parts.score][judged].numpy()
    groups = [sample == s for s in np.unique(sample)]
    table = []
    for boundary, rows in tokens.states.items():
        fit_rows = unit_rows(rows[parts.fit])
        scale = fit_rows.std(dim=0).clamp(min=1e-12)  # [H]
        maps = ridge(fit_rows / scale, goal, PENALTIES)
        tune_rows = unit_rows(rows[parts.tune]) / scale
        tuned = [r_squared(check, tune_rows @ weights + bias) for weights, bias in maps]
        best = int(np.argmax(tuned))
        weights, bias = maps[best]
        guess = (unit_rows(rows[parts.score]) / scale) @ weights + bias  # [n, H]
        guessed = (guess[judged] @ head.lm_head.T).argmax(dim=-1)
        same = (guessed == choices).numpy()
        agreeing = [same[group].sum() for group in groups]
        agreement = ratio_interval(agreeing, [group.sum() for group in groups], seed)
        table.append(
            {
                "boundary": boundary,
                "fit_tok": len(parts.fit),
                "scored_tok": len(parts.score),
                "judged_tok": len(judged),
                "penalty": PENALTIES[best],
                "r2": r_squared(truth, guess),
                "agreement": agreement.value,
                "low": agreement.low,
                "high": agreement.high,
                "constant": constant,
            }
        )
    # NaN where a single sample gives no interval.
    return pd.DataFrame(table).astype({"low": float, "high": float})


def _split_positions(tokens: Tokens, rng: np.random.Generator) -> _Parts:
    """Split the positions that predict a supervised token, by sample."""
    n = len(tokens.ids)
    n_score = max(n // 4, 1)
    n_tune = max(n // 8, 1)
    rank = torch.from_numpy(rng.permutation(n))[tokens.sample]  # [S], of the token's sample
    usable = tokens.predicts & (tokens.position > 0)  # [S]
    to_score = rank < n_score
    to_fit = rank >= n_score + n_tune
    parts = _Parts(
        fit=torch.nonzero(usable & to_fit).squeeze(1),
        tune=torch.nonzero(usable & ~to_fit & ~to_score).squeeze(1),
        score=torch.nonzero(usable & to_score).squeeze(1),
    )
    if not min(len(parts.fit), len(parts.tune), len(parts.score)):
        raise EyasError(
            "no supervised token in some of the drawn samples",
            "supervised tokens in all of them",
            "python -m eyas verify",
        )
    return parts


def next_token_agreement(tokens: Tokens, head: Head, limit: int = 2048) -> tuple[int, int]:
    """Return (agreeing, supervised) tokens.

    A supervised token agrees if it is the first choice of the head applied to the last state one
    token earlier. Responses that the target wrote greedily agree but for ties of bfloat16. A mask,
    a norm or a boundary that is off by one does not.
    """
    before = torch.nonzero(tokens.predicts).squeeze(1)[:limit]
    last_states = tokens.states[max(tokens.states)][before]
    chosen = head.logits(last_states).argmax(dim=-1)
    return int((chosen == tokens.input_ids[before + 1]).sum()), len(before)


# ---- texts


def similar_prompts(prompts: dict[str, list[int]], splits: dict[str, str]) -> pd.DataFrame:
    """Return one row a prompt: how alike others are.

    id, split; same: how many others have exactly the same tokens; jaccard and nearest: its largest
    similarity and to which prompt; train_jaccard: its largest similarity to another prompt of the
    split train.
    Similarity is the Jaccard index of the prompts' sets of shingles (SHINGLE_TOK neighbouring
    tokens); every pair is computed exactly. Shingles that more than half of ten or more prompts
    have belong to the chat template and do not count.
    """
    ids = list(prompts)
    counts = Counter(tuple(p) for p in prompts.values())
    sets = [shingles(p, SHINGLE_TOK) for p in prompts.values()]
    owners = Counter(shingle for prompt_set in sets for shingle in prompt_set)
    common = {shingle for shingle, n in owners.items() if n > max(len(ids) / 2, 9)}
    similarity = jaccard([prompt_set - common for prompt_set in sets])
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
    """Return all runs of `size` neighbouring tokens; of fewer tokens, the one run of all."""
    if not ids:
        return set()
    n_runs = max(len(ids) - size + 1, 1)
    return {tuple(ids[i : i + size]) for i in range(n_runs)}


def jaccard(sets: list[set]) -> np.ndarray:
    """Return shared elements of two sets / elements of either, [n, n]; 0 for two empty sets."""
    owners = Counter(element for elements in sets for element in elements)
    # No pair shares an element that one set alone has.
    in_several = (element for element, n in owners.items() if n > 1)
    column = {element: i for i, element in enumerate(in_several)}
    shared = torch.zeros(len(sets), len(sets))
    for start in range(0, len(column), SHARED_BLOCK):
        block = torch.zeros(len(sets), SHARED_BLOCK)
        for row, elements in enumerate(sets):
            offsets = [column[element] - start for element in elements if element in column]
            block[row, [offset for offset in offsets if 0 <= offset < SHARED_BLOCK]] = 1
        shared += block @ block.T
    shared = shared.numpy()
    sizes = np.array([len(elements) for elements in sets])
    shared[np.diag_indices(len(sets))] = sizes
    either = sizes[:, None] + sizes[None, :] - shared
    return shared / np.maximum(either, 1)


def repetition(responses: list[list[int]]) -> pd.DataFrame:
    """Return one row a response of two tokens or more.

    `repeated` of its `bigrams` occurred earlier in the same response.
    """
    return pd.DataFrame(
        [repeated_bigrams(ids) for ids in responses if len(ids) > 1],
        columns=["repeated", "bigrams"],
    )


# ---- vocabulary


def ceiling(responses: list[list[int]], draftable: torch.Tensor, draft_length: int) -> pd.DataFrame:
    """Return the acceptance that coverage alone allows: one row a response.

    It is the walk of a drafter that is always right within its vocabulary and never outside.
    The columns are tok, covered, accepted and verify_steps. A verify step has `draft_length` draft
    tokens and accepts the leading ones that are draftable (bool [V]). The walk goes on behind them
    and the bonus token, as `eyas.evaluation.offline` does. Its first token comes from the prefill.
    """
    rows = []
    for ids in responses:
        covered = draftable[torch.tensor(ids)].numpy()
        # Where a draft token fails; and the end, behind which none counts.
        misses = np.append(np.flatnonzero(~covered[1:]), len(ids) - 1)
        committed = np.arange(len(ids) - 1)  # index of the last committed token
        next_miss = misses[np.searchsorted(misses, committed)]
        hits = np.minimum(next_miss - committed, draft_length)
        proposed, accepted = jump(hits, draft_length)
        rows.append((len(ids), int(covered.sum()), int(accepted.sum()), len(proposed)))
    return pd.DataFrame(rows, columns=["tok", "covered", "accepted", "verify_steps"])


def ceilings(
    responses: list[list[int]], counts: torch.Tensor, chosen: int, draft_length: int, seed: int
) -> pd.DataFrame:
    """Return one row a size D of the draft vocabulary, `chosen` among them.

    coverage: of these responses; acceptance_length: what it allows (`ceiling`), bonus token
    included, with low and high, the 95 % interval over responses.
    formula: 1 + c + ... + c^K for coverage c. The acceptance length would be that if the tokens
    outside came independently of each other and responses had no end.
    The vocabulary of size D is the D tokens most frequent in `counts` (int64 [V]).
    """
    table = []
    sizes = {size for size in VOCAB_SIZES if size < len(counts)}
    for size in sorted(sizes | {chosen, len(counts)}):
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
    # NaN where a single response gives no interval.
    return pd.DataFrame(table).astype({"acceptance_length": float, "low": float, "high": float})


# ---- two stores


@dataclass(frozen=True)
class Drift:
    """Hold where two stores of the same prompts differ. `table`: see `drift`."""

    samples: int  # in both stores
    only_here: int
    only_there: int
    other_ids: int  # of `samples`: with other token ids; their states are not compared
    other_mask: int  # of `samples`: with the same ids and another loss mask
    # The largest relative error of rounding once to the coarser of the two dtypes.
    rounding: float
    table: pd.DataFrame

    def __str__(self) -> str:
        """Return the difference in words."""
        samples = (
            f"{self.other_ids} of {self.samples} common samples have other token ids, "
            f"{self.other_mask} another loss mask; "
            f"{self.only_here} are only here, {self.only_there} only there"
        )
        if not self.table["tok"].any():
            return f"{samples}\nno states were compared"
        different = self.table[self.table["identical"] < 1]["boundary"]
        parting = self.table[self.table["parts"]]["boundary"]
        identity = "all boundaries are bit for bit the same"
        if len(different):
            identity = (
                f"boundary {different.iloc[0]} is the first "
                "that is not bit for bit the same everywhere"
            )
        parting_text = "no boundary parts"
        if len(parting):
            parting_text = f"boundary {parting.iloc[0]} is the first that parts"
        return (
            f"{samples}\n{identity}; {parting_text} "
            f"(median relative error above {self.rounding:.2g}, "
            f"one rounding of {self.table.attrs['dtype']})"
        )


def drift(here: Store, there: Store, seed: int) -> Drift:
    """Compare two stores on a bounded draw of their common samples.

    The table has a row a boundary that both hold. tok: compared tokens after the first; identical:
    share of them that are bit for bit the same; error_p05/p50/p95/p99 and cosine_p01/p05/p50 per
    token (`token_errors`); first_error_p50: of the first tokens alone; parts: whether the median
    token differs by more than one rounding can explain.
    Raise EyasError if they have no sample or boundary in common, or states of another width.
    """
    samples_here = set(here.samples())
    samples_there = set(there.samples())
    common = [id for id in here.samples() if id in samples_there]
    boundaries = [b for b in here.boundaries if b in there.boundaries]
    width = here.manifest["hidden_size"]
    other_width = there.manifest["hidden_size"]
    if not common or not boundaries or width != other_width:
        raise EyasError(
            f"the two stores have {len(common)} samples and {len(boundaries)} boundaries in common,"
            f" H is {width} and {other_width}",
            "stores of the same prompts and the same target",
            "-p compare_run NAME, another run",
        )
    dtypes = [getattr(torch, store.manifest["dtype"]) for store in (here, there)]
    coarser = max(dtypes, key=_rounding)
    chosen = np.random.default_rng(seed).permutation(len(common))[:PROMPTS]
    pairs = {common[i]: (here.read(common[i], ()), there.read(common[i], ())) for i in chosen}
    same_ids = {
        id: torch.equal(first["input_ids"], second["input_ids"])
        for id, (first, second) in pairs.items()
    }
    other_mask = sum(
        same_ids[id] and not torch.equal(first["loss_mask"], second["loss_mask"])
        for id, (first, second) in pairs.items()
    )
    lengths = {id: len(first["input_ids"]) for id, (first, _) in pairs.items() if same_ids[id]}
    limit_tok = min(TOK, VALUES // (2 * len(boundaries) * width))
    compared = _fitting(lengths, limit_tok)
    table = _drift_table(here, there, compared, boundaries, _rounding(coarser))
    table.attrs["dtype"] = str(coarser).removeprefix("torch.")
    return Drift(
        samples=len(pairs),
        only_here=len(samples_here - samples_there),
        only_there=len(samples_there - samples_here),
        other_ids=sum(not same for same in same_ids.values()),
        other_mask=other_mask,
        rounding=_rounding(coarser),
        table=table,
    )


def _fitting(lengths: dict[str, int], limit_tok: int) -> list[str]:
    """Return the samples that fit into `limit_tok` tokens, in order, at least the first."""
    chosen = []
    total_tok = 0
    for id, length in lengths.items():
        if not chosen or total_tok + length <= limit_tok:
            chosen.append(id)
            total_tok += length
    return chosen


def _rounding(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding once to this dtype."""
    return torch.finfo(dtype).eps / 2


def _drift_table(
    here: Store, there: Store, ids: list[str], boundaries: list[int], rounding: float
) -> pd.DataFrame:
    parts = {b: [torch.empty(4, 0)] for b in boundaries}  # [4, T] a sample
    for id in ids:
        first = here.read(id, tuple(boundaries))["states"]
        second = there.read(id, tuple(boundaries))["states"]
        for b in boundaries:
            parts[b].append(_token_comparison(first[b], second[b]))
    table = []
    for b in boundaries:
        position, error, cosine, identical = torch.cat(parts[b], dim=1)  # [S] each
        later = position > 0
        row = {
            "boundary": b,
            "tok": int(later.sum()),
            "identical": _share(identical[later]),
            **_percentiles("error", error[later], (5, 50, 95, 99)),
            **_percentiles("cosine", cosine[later], (1, 5, 50)),
            **_percentiles("first_error", error[~later], (50,)),
        }
        table.append(row | {"parts": row["error_p50"] > rounding})
    return pd.DataFrame(table)


def _token_comparison(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return position, relative error, cosine and identity of each token, [4, T]."""
    error, cosine = token_errors(first, second)
    identical = (first.float() == second.float()).all(dim=-1)
    return torch.stack([torch.arange(len(error)), error, cosine, identical])


def token_errors(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (relative error, cosine) of each token, [n] float64 each.

    x, y: [n, H]. The error is |x - y| / |y|.
    """
    x = x.double()
    y = y.double()
    error = (x - y).norm(dim=-1) / y.norm(dim=-1).clamp(min=1e-30)
    return error, torch.cosine_similarity(x, y, dim=-1)
