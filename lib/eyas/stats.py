"""Numbers about a store's states, from a bounded sample of it: nothing here reads the whole store.

Everything is per token: a mean over the states would be decided by the first token, whose norm is tens of times the others'
(massive activations), so that token is also kept apart.
"""

from html import escape

import numpy as np
import pandas as pd
import torch

from eyas.store import Store

LARGE = 100.0  # |x| above this is rare, and too coarse in bfloat16 to tell neighbours apart (steps of 0.5 and more)


def some(store: Store, limit: int, seed: int, split: str | None = None) -> list[str]:
    """At most `limit` ids of extracted samples, drawn without replacement, in index order."""
    ids = store.samples(split)
    chosen = np.random.default_rng(seed).choice(len(ids), size=min(limit, len(ids)), replace=False)
    return [ids[i] for i in sorted(chosen)]


def state_stats(store: Store, ids: list[str]) -> pd.DataFrame:
    """A row per stored boundary, ascending.

    samples, tok; norm_p05/p50/p95: Euclidean norm per token, first tokens left out; first_norm_p50: of the first tokens alone;
    cosine_p05/p50/p95: per token, with the next stored boundary (NaN for the last one), first tokens left out;
    large: share of values with |x| > LARGE; largest: max |x|; bad: number of NaN and Inf, which must be 0.
    """
    norms = {b: [] for b in store.boundaries}
    firsts, cosines = {b: [] for b in store.boundaries}, {b: [] for b in store.boundaries}
    large, largest, bad, values = ({b: 0 for b in store.boundaries} for _ in range(4))
    for id in ids:
        states = {b: rows.float() for b, rows in store.read(id)["states"].items()}  # [T, H]
        for b, following in zip(store.boundaries, (*store.boundaries[1:], None)):
            rows = states[b]
            norm = rows.norm(dim=-1)  # [T]
            firsts[b].append(norm[:1])
            norms[b].append(norm[1:])
            if following is not None:
                cosines[b].append(torch.cosine_similarity(rows[1:], states[following][1:], dim=-1))  # [T-1]
            finite = torch.isfinite(rows)
            size = rows[finite].abs()
            bad[b] += int((~finite).sum())
            large[b] += int((size > LARGE).sum())
            largest[b] = max(largest[b], float(size.max()) if len(size) else 0.0)
            values[b] += rows.numel()
    table = []
    for b in store.boundaries:
        row = {"boundary": b, "samples": len(ids), "tok": values[b] // store.manifest["hidden_size"]}
        row |= _percentiles("norm", norms[b]) | {"first_norm_p50": _percentiles("", firsts[b])["_p50"]} | _percentiles("cosine", cosines[b])
        table.append(row | {"large": large[b] / max(values[b], 1), "largest": largest[b], "bad": bad[b]})
    return pd.DataFrame(table)


def _percentiles(name: str, parts: list[torch.Tensor]) -> dict[str, float]:
    whole = torch.cat(parts).numpy() if parts else np.array([])
    points = np.nanpercentile(whole, (5, 50, 95)) if len(whole) else (np.nan,) * 3
    return {f"{name}_p{p:02d}": float(v) for p, v in zip((5, 50, 95), points)}


def next_token_agreement(store: Store, ids: list[str]) -> tuple[int, int]:
    """(agreeing, supervised): supervised tokens that are the first choice of the head applied to the last state one token earlier.

    Responses that the target wrote greedily agree but for ties of bfloat16; a mask, a norm or a boundary that is off by one does not.
    """
    head, last = store.head(), store.boundaries[-1]
    agreeing = supervised = 0
    for id in ids:
        sample = store.read(id, (last,))
        at = torch.nonzero(sample["loss_mask"][1:]).squeeze(1)  # [n]: token at+1 is supervised, state `at` predicts it
        chosen = head.logits(sample["states"][last][at]).argmax(dim=-1)  # [n]
        agreeing += int((chosen == sample["input_ids"][at + 1]).sum())
        supervised += len(at)
    return agreeing, supervised


def counts_by_split(index: pd.DataFrame) -> pd.DataFrame:
    """A row per split and state of a store's index: samples, tokens, supervised tokens, samples cut at max_length, median and longest length."""
    groups = index.groupby(["split", "state"], sort=True)
    return groups.agg(samples=("id", "size"), tok=("length", "sum"), supervised_tok=("loss_tok", "sum"), cut=("truncated", "sum"),
                      median_length_tok=("length", "median"), longest_tok=("length", "max")).reset_index()


def marked_text(sample: dict, tokenizer) -> str:
    """A stored sample's text as HTML, the supervised tokens (loss mask) in <mark>. `sample` has input_ids [T] and loss_mask [T]."""
    ids, mask = sample["input_ids"].tolist(), sample["loss_mask"].tolist()
    parts, start = [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:  # runs are decoded whole: one token alone may be half a character
            text = escape(tokenizer.decode(ids[start:end], skip_special_tokens=False))
            parts.append(f"<mark>{text}</mark>" if mask[start] else text)
            start = end
    return '<pre style="white-space: pre-wrap">' + "".join(parts) + "</pre>"
