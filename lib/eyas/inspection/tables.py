"""Make the tables and sentences that the notebooks show of texts, states and trainings.

Each function takes what another module has measured and returns a DataFrame or a text. The columns
are named as a reader meets them: pages show the tables as they are.
"""

import pandas as pd
import torch

from eyas.inspection import stats
from eyas.models.vocab import choose_vocab, count_tokens, coverage
from eyas.progress import bytes_text
from eyas.store.reader import Store

SHOWN = 8  # rows of massive activations for first tokens, and as many for later tokens


# ---- what a store holds


def store_text(store: Store) -> str:
    """Return a line about the store: its samples, boundaries, sizes, target and engine."""
    manifest = store.manifest
    engine = manifest["engine"]
    return (
        f"{len(store.samples()):,} samples, boundaries {', '.join(map(str, store.boundaries))}, "
        f"H = {manifest['hidden_size']:,}, {manifest['dtype']}, {bytes_text(store.n_bytes)}, "
        f"target {manifest['target']['name']}, engine {engine['name']} {engine['version']}"
    )


def store_cost_text(store: Store) -> str:
    """Return a line about the bytes that all boundaries of a token take in the store."""
    return (
        f"one store for all: {len(store.boundaries)} boundaries × "
        f"{store.manifest['hidden_size']:,} values, {store.token_bytes:,} bytes a token "
        f"with id and mask, {bytes_text(store.n_bytes)}"
    )


def conversations_by_category(conversations: list) -> pd.DataFrame:
    """Return the number of conversations of each category (rows) and split (columns)."""
    return pd.crosstab(
        [conversation.category for conversation in conversations],
        [conversation.split for conversation in conversations],
        rownames=["category"],
        colnames=["split"],
        margins=True,
        margins_name="all",
    )


# ---- prompts and responses


def duplicates_text(similar: pd.DataFrame) -> str:
    """Return a line that counts duplicate prompts; `similar` is `stats.similar_prompts`.

    A leak is a held-out prompt with a near-duplicate among the training prompts.
    """
    exact = similar["same"] > 0
    near = similar["jaccard"] >= stats.NEAR
    heldout = similar["split"] == "heldout"
    leaks = heldout & (similar["train_jaccard"] >= stats.NEAR)
    return (
        f"{len(similar):,} prompts, every pair compared: {exact.sum()} have an exact duplicate, "
        f"{near.sum()} a near-duplicate; {leaks.sum()} of {heldout.sum()} held-out prompts "
        "have one in training"
    )


def most_similar(similar: pd.DataFrame, count: int = 5) -> pd.DataFrame:
    """Return the prompts that resemble another one most; `similar` is `stats.similar_prompts`."""
    columns = ["id", "nearest", "jaccard", "split", "train_jaccard"]
    return similar.nlargest(count, "jaccard")[columns]


def repetition_text(repeats: pd.DataFrame) -> str:
    """Return a line about responses that repeat themselves; `repeats` is `stats.repetition`."""
    repeated = repeats["repeated"].sum() / repeats["bigrams"].sum()
    looping = (repeats["repeated"] > 0.5 * repeats["bigrams"]).mean()
    return (
        f"{len(repeats):,} responses: {repeated:.1%} of their bigrams stood in the same response "
        f"before; in {looping:.1%} of them more than half did"
    )


# ---- states


def massive_table(massive: pd.DataFrame, tokenizer) -> pd.DataFrame:
    """Return the largest of `stats.massive_activations`, their tokens and boundaries in words."""
    table = massive.groupby("first").head(SHOWN)
    return pd.DataFrame(
        {
            "dimension": table["dimension"],
            "place": table["first"].map({True: "first token", False: "later token"}),
            "text": [repr(tokenizer.decode([token])) for token in table["token"]],
            "tok": table["tok"],
            "at boundaries": [_range_text(boundaries) for boundaries in table["boundaries"]],
            "largest": table["largest"],
            "times_median": table["times_median"],
        }
    )


def massive_text(massive: pd.DataFrame) -> str:
    """Return a line that counts `stats.massive_activations` and names their dimensions."""
    later = (~massive["first"].astype(bool)).sum()
    dimensions = ", ".join(map(str, sorted(set(massive["dimension"])))) or "none"
    return f"{len(massive)} places, {later} of them on later tokens; dimensions {dimensions}"


def _range_text(boundaries: tuple[int, ...]) -> str:
    if len(boundaries) == 1:
        return str(boundaries[0])
    return f"{boundaries[0]} to {boundaries[-1]}, {len(boundaries)} stored"


def drift_table(drift: stats.Drift) -> pd.DataFrame:
    """Return a row for each boundary: how far two stores differ there."""
    columns = "boundary identical error_p50 error_p95 error_p99 first_error_p50 cosine_p50"
    return drift.table[[*columns.split(), "cosine_p01", "parts"]]


# ---- training


def coverage_table(store: Store, counts: torch.Tensor, draft_vocab_size: int) -> pd.DataFrame:
    """Return how many supervised tokens of each split the draft vocabulary holds.

    `counts` [V] counts the supervised tokens of the training samples (`count_tokens`).
    """
    vocab = choose_vocab(counts, draft_vocab_size)
    rows = []
    for split, split_counts in (
        ("train", counts),
        ("heldout", count_tokens(store, store.samples("heldout"))),
    ):
        covered, supervised = coverage(vocab, split_counts)
        rows.append(
            {
                "split": split,
                "covered, tokens": covered,
                "supervised, tokens": supervised,
                "share": covered / supervised if supervised else float("nan"),
            }
        )
    return pd.DataFrame(rows)


def last_evaluation(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each draft step of the last held-out evaluation in metrics.parquet."""
    heldout = metrics[metrics["split"] == "heldout"]
    last = heldout[heldout["step"] == heldout["step"].max()]
    return pd.DataFrame(
        {
            "draft step": last["draft_step"] + 1,
            "loss": last["loss"],
            "accuracy": last["accuracy"],
            "supervised slots": last["slots"],
        }
    )


def last_acceptance_length(metrics: pd.DataFrame) -> float:
    """Return the acceptance length of the last held-out evaluation in metrics.parquet."""
    heldout = metrics[metrics["split"] == "heldout"]
    last = heldout[heldout["step"] == heldout["step"].max()]
    return float(last["acceptance_length"].iloc[0])
