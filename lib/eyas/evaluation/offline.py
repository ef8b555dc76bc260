"""The offline estimate: what the drafter would accept on responses in the store, without a target.

    python -m eyas evaluate offline --profile smoke       # seconds, after `train`

Each held-out sample's last response is walked as serving would do it:
- The prefill gives its first token. Then the drafter drafts `draft_length` tokens from the last
  committed slot.
- The draft tokens that equal the stored tokens are hits, up to the first miss. The walk jumps by
  hits + 1 (the bonus token). A stored token outside the draft vocabulary can never be hit.
- One step of the walk stands for one verify step.

What is counted. The response's tokens are P .. E-1: the last run of the loss mask, end-of-turn
token included. With token p the last one committed (P at first), slot p-1 drafts tokens p+1, ...
Those after E-1 are not counted as proposed. The walk ends when token E-1 is committed. The counts
have the names and meanings of `eyas.evaluation.acceptance`: proposed, reached and accepted by
position. Every draft is free-running: the drafter sees its own tokens and outputs, and never the
stored ones.

The mean of the hits over *all* slots (`all_slots`) is quicker to write and overstates: it stands on
the easy slots inside an accepted run as often as on the hard ones where a run starts. It is
reported beside the walk to show by how much.

For sampled decoding the same walk is made in expectation (`sampled_walk`). Where the target draws
from p and the drafter from q, speculative sampling (Leviathan et al. 2023, theorem 3.5) accepts a
draft token with probability sum over tokens of min(p, q). p is recomputed from the stored last
state through the head. q is the drafter's, with the stored tokens fed to it. It assumes that the
stored text, which the target chose greedily, stands for texts that it draws, and that after an
accepted draft token the next state is the stored one, whatever was drawn.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch

from eyas.config import Config
from eyas.errors import EyasError
from eyas.evaluation.acceptance import (
    DRAFTER,
    SAMPLED,
    Acceptance,
    Prompt,
    judged_file,
    keep_earlier,
    position_counts,
    position_ratios,
)
from eyas.evaluation.decode import TargetStream, load_model, response_start
from eyas.files import write_json
from eyas.intervals import difference_interval, interval_text, ratio_interval
from eyas.models.boundaries import Boundaries
from eyas.models.drafter import Drafter
from eyas.models.target import Head, Target
from eyas.store.sample import Sample


def walk(
    drafter: Drafter,
    store,
    ids: list[str],
    draft_length: int,
    max_tok: int | None = None,
) -> pd.DataFrame:
    """Walk the last response of each stored sample and return its counts, one row a sample.

    `all_slots` and `all_hits` are the counts of the estimate that overstates (see the module's
    head). With `max_tok`, only that many tokens of each response count, as decoding may be cut.
    Raise EyasError where a sample has no response, or the store lacks the drafter's boundaries.
    """
    rows = []
    for id in ids:
        sample = store.read(id, drafter.config.boundaries)
        start, end = _response_span(sample, max_tok)
        input_ids = sample.input_ids[:end]
        states = sample.at(drafter.config.boundaries)[:end]
        hits = leading_hits(drafter, input_ids, states, start, draft_length)
        proposed, accepted = jump(hits, draft_length)
        outside = drafter.vocab.to_draft(input_ids[start + 1 :]) < 0
        row = {
            "id": id,
            "category": store.category(id),
            "response_tok": end - start,
            "verify_steps": len(proposed),
            "drafted": int(proposed.sum()),
            "accepted": int(accepted.sum()),
            "draftable_tok": len(outside),
            "outside_vocab_tok": int(outside.sum()),
            "all_slots": len(hits),
            "all_hits": int(hits.sum()),
        }
        row |= position_counts(proposed, accepted, draft_length)
        rows.append(row)
    return pd.DataFrame(rows)


def sampled_walk(
    drafter: Drafter,
    store,
    ids: list[str],
    draft_length: int,
    temperature: float,
    max_tok: int | None = None,
) -> pd.DataFrame:
    """Walk where target and drafter both draw their tokens at `temperature`.

    Return the expected counts, one row a sample (see the module's head).
    """
    head, n_blocks = store.head(), store.boundaries[-1]
    boundaries = Boundaries(drafter.config.boundaries, n_blocks)
    rows = []
    for id in ids:
        sample = store.read(id, boundaries.with_last)
        start, end = _response_span(sample, max_tok)
        chances = overlaps(
            drafter,
            head,
            sample.input_ids[:end],
            sample.at(boundaries.feeding)[:end],
            sample.states[n_blocks][:end],
            start,
            draft_length,
            temperature,
        )
        rows.append({"id": id, "category": store.category(id), **expected_walk(chances)})
    return pd.DataFrame(rows)


def _response_span(sample: Sample, max_tok: int | None) -> tuple[int, int]:
    """Return where a sample's last response starts and ends, or ends after `max_tok` tokens."""
    start = response_start(sample.loss_mask.numpy())
    end = int(sample.loss_mask.nonzero()[-1]) + 1
    return start, end if max_tok is None else min(end, start + max_tok)


@torch.inference_mode()
def unroll(
    drafter: Drafter,
    input_ids: torch.Tensor,  # int64 [E], up to the end of the response
    states: torch.Tensor,  # [E, B*H]
    start: int,  # position of the first token of the response
    draft_length: int,
    judge: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Draft `draft_length` steps from each point of a response, along the stored tokens.

    Point i, of E - 1 - start, is slot start - 1 + i: the response's token i is the last one
    committed. All points are drafted in one batch (`Drafter.first_step`).

    `judge(step, points, logits)` gets points int64 [R] and logits [R, D] of what is drafted as
    token start + 1 + points + step. It returns which of them go on, bool [R]. Those see that stored
    token next.
    """
    states = states.to(drafter.fc.weight.device, drafter.fc.weight.dtype)
    ids = input_ids.to(states.device)
    n = len(ids) - 2  # slot j predicts token j+2
    slots = torch.arange(start - 1, n, device=states.device)  # [R]
    out, steps = drafter.first_step(ids[1 : n + 1], drafter.fuse(states[:n]), slots)
    for step in range(draft_length):
        if step > 0:
            tokens = ids[steps.slots + 1 + step]
            out = drafter.next_step(tokens, drafter.feed_back(out), steps)
        goes_on = judge(step, steps.slots - (start - 1), drafter.logits(out))
        out = out[goes_on]
        steps.keep(goes_on)
        if not len(steps.slots):
            break


def leading_hits(
    drafter: Drafter, input_ids: torch.Tensor, states: torch.Tensor, start: int, draft_length: int
) -> np.ndarray:
    """Return how many draft tokens equal the stored ones before the first that does not.

    The result is [E - 1 - start], for each point of the response as in `unroll`.
    A point goes on while its drafts are the stored tokens, so what it sees next is its own draft.
    """
    vocab_ids, following = (
        drafter.vocab.ids.to(drafter.fc.weight.device),
        input_ids[start + 1 :].to(drafter.fc.weight.device),
    )
    hits = torch.zeros(len(following), dtype=torch.int64, device=following.device)

    def judge(step: int, points: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        at = points + step
        right = (at < len(following)) & (
            vocab_ids[logits.argmax(-1)] == following[at.clamp(max=len(following) - 1)]
        )
        hits[points[right]] += 1
        return right

    unroll(drafter, input_ids, states, start, draft_length, judge)
    return hits.cpu().numpy()


def overlaps(
    drafter: Drafter,
    head: Head,
    input_ids: torch.Tensor,
    states: torch.Tensor,
    last: torch.Tensor,
    start: int,
    draft_length: int,
    temperature: float = 1.0,
) -> np.ndarray:
    """Return the chance that a draft token drawn from q is accepted: sum over tokens of min(p, q).

    The result is [E - 1 - start, draft_length], for each point and step of `unroll`.
    p is the target's distribution at `temperature`, from the stored last states [E, H] through the
    head. q is the drafter's, and zero outside its vocabulary. The chance is NaN where the response
    has no such token.
    """
    device = drafter.fc.weight.device
    n_points, head = len(input_ids) - 1 - start, head.to(device)
    found = np.full((n_points, draft_length), np.nan)
    if n_points:
        p = (head.logits(last[start:-1].to(device)) / temperature).softmax(-1)[
            :, drafter.vocab.ids.to(device)
        ]  # [points, D], of tokens start + 1 ..

    def judge(step: int, points: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        there = points + step < n_points
        q = (logits[there].float() / temperature).softmax(-1)
        found[points[there].cpu().numpy(), step] = (
            torch.minimum(p[points[there] + step], q).sum(-1).cpu().numpy()
        )
        return there

    unroll(drafter, input_ids, states, start, draft_length, judge)
    return found


def expected_walk(chances: np.ndarray) -> dict[str, float]:
    """Return the expected counts of a walk where each draft token is accepted by chance.

    `chances` [points, K] is what `overlaps` returns: the chance of draft token i+1 at that point,
    given that those before it were accepted. v[t] is the chance that a verify step starts at point
    t: h draft tokens accepted from t start the next step at t + h + 1. The counts are
    `verify_steps`, `accepted`, reached_i and accepted_i for i = 1 .. K; and over all points alike,
    which overstates, `all_slots` and `all_hits`.
    """
    n, k = chances.shape
    begins = np.zeros(n + k + 1)  # v
    begins[0] = 1.0
    reached, accepted, all_hits = np.zeros(k), np.zeros(k), 0.0
    for t in range(n):
        reach, left = 1.0, min(k, n - t)
        for i in range(left):
            chance = chances[t, i]
            reached[i] += begins[t] * reach
            begins[t + i + 1] += begins[t] * reach * (1 - chance)
            reach *= chance
            accepted[i] += begins[t] * reach
            all_hits += reach
        begins[t + left + 1] += begins[t] * reach
    by_position = {
        f"{name}_{i + 1}": float(values[i])
        for i in range(k)
        for name, values in (("reached", reached), ("accepted", accepted))
    }
    return {
        "verify_steps": float(begins[:n].sum()),
        "accepted": float(accepted.sum()),
        "all_slots": n,
        "all_hits": all_hits,
    } | by_position


def jump(hits: np.ndarray, draft_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Walk a response and return, of each verify step, draft tokens that count and those accepted.

    `hits[i]`, [response tokens - 1], is for drafts made when the response's token i is the last one
    committed. Nothing is drafted from the last token, since nothing follows.
    """
    proposed, accepted, at = [], [], 0
    while at < len(hits):
        proposed.append(min(draft_length, len(hits) - at))
        accepted.append(int(hits[at]))
        at += accepted[-1] + 1
    return np.array(proposed, dtype=np.int64), np.array(accepted, dtype=np.int64)


def run_walk(config: Config, drafter: Drafter, store) -> dict:
    """Walk all held-out samples of the store and write walk.json.

    It has counts, then ratios with intervals by bootstrap over samples.
    """
    torch.set_num_threads(config.threads)
    drafter = drafter.to(config.device).eval()
    ids = store.samples("heldout")
    if not ids:
        raise EyasError(
            "the store has no held-out sample",
            "at least one",
            "python -m eyas extract -p heldout_samples 48",
        )
    table = walk(drafter, store, ids, config.speculative_num_steps)
    temperature = config.temperature or 1.0
    sampled = sampled_walk(drafter, store, ids, config.speculative_num_steps, temperature)

    def interval(top, bottom) -> dict:
        return ratio_interval(top, bottom, config.seed).as_dict()

    def lengths(table: pd.DataFrame) -> dict:
        return {
            "acceptance_length": interval(
                table["accepted"] + table["verify_steps"], table["verify_steps"]
            ),  # bonus token included
            "accepted_per_step": interval(
                table["accepted"], table["verify_steps"]
            ),  # without the bonus token
            "all_slots_acceptance_length": interval(
                table["all_hits"] + table["all_slots"], table["all_slots"]
            ),  # overstates
        }

    def total(table: pd.DataFrame) -> dict:
        return {
            "samples": len(table),
            **{
                name: table[name].sum().item()
                for name in table.columns
                if name not in ("id", "category")
            },
        }

    record = {
        "settings": {
            **judged_file(config),
            "speculative_num_steps": config.speculative_num_steps,
            "temperature": temperature,
            "seed": config.seed,
            "interval": "95 %, percentile bootstrap over samples",
        },
        "counts": total(table),
        **lengths(table),
        "by_position": position_ratios(table, config),
        "outside_vocab": interval(table["outside_vocab_tok"], table["draftable_tok"]),
        "sampled": {
            "counts": total(sampled),
            **lengths(sampled),
            "by_position": [
                {
                    "position": i,
                    "conditional": interval(sampled[f"accepted_{i}"], sampled[f"reached_{i}"]),
                }
                for i in range(1, config.speculative_num_steps + 1)
            ],
        },
    }
    keep_earlier(config.acceptance_dir, ("walk.json",), record)
    write_json(config.acceptance_dir / "walk.json", record)
    return record


def against_decoding(
    config: Config,
    target: Target,
    drafter: Drafter,
    store,
    prompts: list[Prompt],
    acceptance: Acceptance,
) -> dict:
    """Compare the offline estimate with real decoding, paired by prompt, and write offline.json.

    `prompts` are those that `acceptance` was measured with. As many tokens count as were decoded.

    - "greedy" and "sampled": the decoded prompts whose responses the store holds, walked on those
      responses.
    - "sampled_texts": the sampled estimate over the very texts that were drawn, whose states the
      target computes in one pass.

    Each has the acceptance lengths "offline", "all_slots" and "decoded" (bonus token included), the
    "difference" offline minus decoded, and "all_slots_difference". "greedy" also has the difference
    over prompts whose stored and decoded texts are the same ("same_text_difference"; "same_text"
    counts them). A part is None where nothing can be compared: no such prompt, or, for greedy, a
    tree of draft tokens.

    What may differ: the stored text is the server's, in its dtype, and a tie sends the two texts
    different ways. Sampled texts are other texts altogether.
    """
    stored = set(store.samples("heldout"))
    table = acceptance.prompts.assign(trace=acceptance.traces["float32"][DRAFTER])
    table = table[table["id"].isin(stored)]
    same = []
    for id, trace in zip(table["id"], table["trace"]):
        sample = store.read(id, ())
        start, end = _response_span(sample, len(trace.tokens))
        same.append(sample.input_ids[start:end].tolist() == trace.tokens)
    same = np.array(same, dtype=bool)
    steps, n_tok, temperature = (
        config.speculative_num_steps,
        config.decode_new_tok,
        config.temperature or 1.0,
    )
    drawn = acceptance.baselines[acceptance.baselines["method"] == SAMPLED]
    found_stored = drawn[drawn["id"].isin(stored)]
    record: dict = {
        "prompts": len(table),
        "same_text": int(same.sum()),
        "greedy": None,
        "sampled": None,
        "sampled_texts": None,
    }
    if len(table) and config.temperature == 0 and config.speculative_eagle_topk == 1:
        walked = walk(drafter, store, list(table["id"]), steps, n_tok)
        record["greedy"] = _minus(walked, table, config.seed)
        if same.any():
            record["greedy"]["same_text_difference"] = _minus(
                walked[same], table[same], config.seed
            )["difference"]
    if len(found_stored):
        record["sampled"] = _minus(
            sampled_walk(drafter, store, list(found_stored["id"]), steps, temperature, n_tok),
            found_stored,
            config.seed,
        )
    if len(drawn):
        by_id = {prompt.id: prompt for prompt in prompts}
        walked = walk_texts(
            target,
            drafter,
            [by_id[id].input_ids for id in drawn["id"]],
            [trace.tokens for trace in acceptance.traces["float32"][SAMPLED]],
            steps,
            temperature,
        )
        record["sampled_texts"] = _minus(walked, drawn, config.seed)
    write_json(config.acceptance_dir / "offline.json", record)
    return record


def walk_texts(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    texts: list[list[int]],
    draft_length: int,
    temperature: float,
) -> pd.DataFrame:
    """Return `sampled_walk` over texts that are in no store, a row a text.

    The target runs once over each prompt and text, in float32.
    """
    device = str(drafter.fc.weight.device)
    model, head, rows = load_model(target, torch.float32, device), target.head(), []
    boundaries, n_blocks = drafter.config.boundaries, target.n_blocks
    kept = Boundaries(boundaries, n_blocks).with_last
    for prompt, text in zip(prompts, texts):
        with TargetStream(model, kept) as stream, torch.inference_mode():
            states = dict(
                zip(
                    kept,
                    stream.forward([*prompt, *text], keep=1)[1].split(target.hidden_size, dim=-1),
                )
            )
        ids = torch.tensor([*prompt, *text])
        rows.append(
            expected_walk(
                overlaps(
                    drafter,
                    head,
                    ids,
                    torch.cat([states[b] for b in boundaries], dim=-1),
                    states[n_blocks],
                    len(prompt),
                    draft_length,
                    temperature,
                )
            )
        )
    return pd.DataFrame(rows)


def _minus(offline: pd.DataFrame, decoded: pd.DataFrame, seed: int) -> dict:
    """Return acceptance lengths and differences as `against_decoding` has them.

    Both tables have the same prompts, row for row.
    """

    def length(accepted: pd.Series, steps: pd.Series) -> tuple[np.ndarray, np.ndarray]:
        return accepted.to_numpy() + steps.to_numpy(), steps.to_numpy()

    walked, slots, real = (
        length(offline["accepted"], offline["verify_steps"]),
        length(offline["all_hits"], offline["all_slots"]),
        length(decoded["accepted"], decoded["verify_steps"]),
    )
    return {
        "prompts": len(decoded),
        **{
            name: ratio_interval(*pair, seed).as_dict()
            for name, pair in (("offline", walked), ("all_slots", slots), ("decoded", real))
        },
        "difference": difference_interval(walked, real, seed).as_dict(),
        "all_slots_difference": difference_interval(slots, real, seed).as_dict(),
    }


def agreement(record: dict) -> str:
    """offline.json in words: does the estimate agree with real decoding?"""
    lines = []
    for key, name in (
        ("greedy", "greedy"),
        ("sampled", "sampled, stored texts"),
        ("sampled_texts", "sampled, its own texts"),
    ):
        found = record[key]
        if found is None:
            continue
        d = found["difference"]
        agree = (
            "too few prompts to tell"
            if d["low"] is None
            else "they agree, the interval holds 0"
            if d["low"] <= 0 <= d["high"]
            else "they differ beyond the interval"
        )
        if key == "greedy":
            again = found.get("same_text_difference")
            agree += (
                f" ({record['same_text']} of {record['prompts']} texts are the same in both"
                + (f"; over those the difference is {interval_text(again)})" if again else ")")
            )
        if key == "sampled" and agree.startswith("they differ"):
            agree += ": what is drawn is not the stored, greedy text"
        lines.append(
            f"{name}: offline {interval_text(found['offline'])}, "
            f"decoded {interval_text(found['decoded'])}, difference {interval_text(d)} "
            f"over {found['prompts']} prompts: {agree}; "
            f"over all slots {interval_text(found['all_slots'])}, "
            f"off by {interval_text(found['all_slots_difference'])}"
        )
    return "\n".join(lines) or "no decoded prompt has a response in the store: nothing to compare"


def summary(record: dict) -> str:
    """walk.json in a few lines."""
    sampled = record["sampled"]
    return (
        f"acceptance length {interval_text(record['acceptance_length'])} (bonus token included) "
        f"over {record['counts']['samples']} held-out samples, "
        f"{record['counts']['verify_steps']} steps; "
        f"outside the draft vocabulary {interval_text(record['outside_vocab'])}\n"
        "mean over all slots, which overstates: "
        f"{interval_text(record['all_slots_acceptance_length'])}\n"
        f"sampled at temperature {record['settings']['temperature']:g}: "
        f"{interval_text(sampled['acceptance_length'])} expected; "
        f"over all slots {interval_text(sampled['all_slots_acceptance_length'])}"
    )
