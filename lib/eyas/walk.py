"""The offline estimate: what the drafter would accept on responses that are already in the store, without a target.

    python -m eyas walk --profile smoke       # seconds, after `train`

Each held-out sample's last response is walked as serving would: the prefill gives its first token, then the drafter drafts `draft_length`
tokens from the last committed slot, the drafts that equal the stored tokens are hits up to the first miss, and the walk jumps by
hits + 1 (the bonus token). A stored token outside the draft vocabulary can never be hit. One step of the walk stands for one verify step.

What is counted, precisely. The response's tokens are P .. E-1 (the last run of the loss mask, end-of-turn token included). With token p
the last one committed (P at first), slot p-1 drafts tokens p+1, p+2, ...; those behind E-1 are not counted as proposed. The walk ends
when token E-1 is committed. The counts have the names and meanings of `decode`: proposed, reached and accepted by position.
Every draft is free-running, so the drafter sees its own tokens and outputs and never the stored ones.

Averaging the hits over *all* slots instead (`all_slots`) is quicker to write and overstates: it stands on the easy slots inside an
accepted run as often as on the hard ones where a run begins. It is reported beside the walk to show by how much.
"""

import numpy as np
import pandas as pd
import torch

from eyas.config import Config
from eyas.decode import position_counts, position_ratios, response_start
from eyas.drafter import Drafter
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.intervals import interval_text, ratio_interval


def walk(drafter: Drafter, store, ids: list[str], draft_length: int) -> pd.DataFrame:
    """Walk the last response of each stored sample: its counts, one row a sample (see the module's head).

    `all_slots` and `all_hits` are the counts of the estimate that overstates. EyasError where a sample has no response, or the store lacks the drafter's boundaries."""
    rows = []
    for id in ids:
        sample = store.read(id, drafter.config.boundaries)
        input_ids, start = sample["input_ids"], response_start(sample["loss_mask"].numpy())
        end = int(sample["loss_mask"].nonzero()[-1]) + 1
        states = torch.cat([sample["states"][b] for b in drafter.config.boundaries], dim=-1)  # [T, B*H]
        hits = leading_hits(drafter, input_ids[:end], states[:end], start, draft_length)  # of slots start-1 .. end-3
        proposed, accepted = jump(hits, draft_length)
        outside = drafter.vocab.to_draft(input_ids[start + 1 : end]) < 0
        row = {
            "id": id, "category": store.category(id), "response_tok": end - start, "verify_steps": len(proposed),
            "drafted": int(proposed.sum()), "accepted": int(accepted.sum()),
            "draftable_tok": len(outside), "outside_vocab_tok": int(outside.sum()), "all_slots": len(hits), "all_hits": int(hits.sum()),
        }  # fmt: skip
        row |= position_counts(proposed, accepted, draft_length)
        rows.append(row)
    return pd.DataFrame(rows)


@torch.inference_mode()
def leading_hits(drafter: Drafter, input_ids: torch.Tensor, states: torch.Tensor, start: int, draft_length: int) -> np.ndarray:
    """How many drafts equal the stored tokens before the first that does not, for each point of the response, all drafted in one batched pass.

    input_ids [E] and states [E, B*H] end with the response, which begins at `start`. Entry i of the result, [E - 1 - start], is for the drafts
    made by slot start - 1 + i, i.e. with the response's token i as the last one committed. Attention is training's: the drafts of step s at slot j
    see the step-0 keys of slots <= j, as the cache of a server holds them, and the keys of the steps 1 .. s of slot j.
    """
    layer, attention = drafter.layers[0], drafter.layers[0].self_attn
    states = states.to(drafter.fc.weight.device, drafter.fc.weight.dtype)
    ids, vocab_ids = input_ids.to(states.device), drafter.vocab.ids.to(states.device)
    n = len(ids) - 2  # slot j predicts token j+2
    slots = torch.arange(start - 1, n, device=states.device)  # [R] those that draft
    hidden = drafter.fuse(states[:n])  # [n, H]
    x = layer.inputs(layer.input_layernorm(drafter.embed_tokens(ids[1 : n + 1])), hidden)  # [n, 2H]
    keys, values = attention.keys_values(x, torch.arange(n, device=x.device))  # [n, kv heads, head_dim]
    own: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of steps 1 .. s, [R, kv heads, head_dim] each
    out, x = hidden[slots], x[slots]
    hits, rows = torch.zeros_like(slots), torch.arange(len(slots), device=slots.device)  # rows: points whose drafts were all right so far; the others are done
    for step in range(draft_length):
        if step > 0:
            out = drafter.feed_back(out)
            x = layer.inputs(layer.input_layernorm(drafter.embed_tokens(drafts)), out)  # [R, 2H]
            own.append(attention.keys_values(x, slots + step))
        queries = attention.queries(x, slots + step).unflatten(1, (keys.shape[1], -1))  # [R, kv heads, group, head_dim]
        unseen = torch.arange(n, device=x.device) > slots[:, None]  # [R, n]
        scores = torch.einsum("rkgd,nkd->rkgn", queries, keys).masked_fill(unseen[:, None, None], -torch.inf)
        scores = torch.cat([scores, *((queries * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own)], dim=-1)  # [R, kv heads, group, n + step]
        weights = (scores * queries.shape[-1] ** -0.5).softmax(-1)
        attended = torch.einsum("rkgn,nkd->rkgd", weights[..., :n], values)
        for i, (_, v) in enumerate(own):
            attended = attended + weights[..., n + i, None] * v[:, :, None]
        out = layer.finish(attended.flatten(1, 2), out)  # [R, H]
        drafts = vocab_ids[drafter.logits(out).argmax(-1)]  # [R]
        following = slots + 2 + step
        right = (following < len(ids)) & (drafts == ids[following.clamp(max=len(ids) - 1)])
        rows, slots, out, drafts = rows[right], slots[right], out[right], drafts[right]
        own = [(k[right], v[right]) for k, v in own]
        hits[rows] += 1
        if not len(rows):
            break
    return hits.cpu().numpy()


def jump(hits: np.ndarray, draft_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Walk a response: drafts that count and drafts accepted, of each verify step.

    `hits[i]` is for drafts made when the response's token i is the last one committed, [response tokens - 1]; the last token is never
    drafted from, since nothing follows.
    """
    proposed, accepted, at = [], [], 0
    while at < len(hits):
        proposed.append(min(draft_length, len(hits) - at))
        accepted.append(int(hits[at]))
        at += accepted[-1] + 1
    return np.array(proposed, dtype=np.int64), np.array(accepted, dtype=np.int64)


def run_walk(config: Config, drafter: Drafter, store) -> dict:
    """Walk all held-out samples of the store and write walk.json: counts, then ratios with intervals by bootstrap over samples."""
    torch.set_num_threads(config.threads)
    ids = store.samples("heldout")
    if not ids:
        raise EyasError("the store has no held-out sample", "at least one", "python -m eyas extract -p heldout_samples 48")
    table = walk(drafter, store, ids, config.draft_length)

    def interval(top, bottom) -> dict:
        return ratio_interval(top, bottom, config.seed).as_dict()

    record = {
        "settings": {"draft_length": config.draft_length, "seed": config.seed, "interval": "95 %, percentile bootstrap over samples"},
        "counts": {"samples": len(table), **{name: int(table[name].sum()) for name in table.columns if name not in ("id", "category")}},
        "acceptance_length": interval(table["accepted"] + table["verify_steps"], table["verify_steps"]),  # bonus token included
        "accepted_per_step": interval(table["accepted"], table["verify_steps"]),  # without the bonus token
        "all_slots_acceptance_length": interval(table["all_hits"] + table["all_slots"], table["all_slots"]),  # overstates
        "by_position": position_ratios(table, config),
        "outside_vocab": interval(table["outside_vocab_tok"], table["draftable_tok"]),
    }  # fmt: skip
    write_json(config.acceptance_dir / "walk.json", record)
    return record


def summary(record: dict) -> str:
    """walk.json in two lines."""
    return (f"acceptance length {interval_text(record['acceptance_length'])} (bonus token included) over {record['counts']['samples']} held-out samples, "
            f"{record['counts']['verify_steps']} steps; outside the draft vocabulary {interval_text(record['outside_vocab'])}\n"
            f"mean over all slots, which overstates: {interval_text(record['all_slots_acceptance_length'])}")
