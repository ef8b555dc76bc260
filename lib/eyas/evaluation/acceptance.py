"""What real decoding accepts, what explains it, and how fast it is: the answer to "is this drafter worth serving?".

    python -m eyas evaluate decode --profile smoke        # about a minute on 2 cores, after `train`
    python -m eyas evaluate compare --profile demo -p compare_run other

Counts (per prompt; every ratio and interval is made from them, last, in `summarise`):
  verify steps    passes of the target over drafts; the prefill is not one
  proposed[i]     verify steps that carried a draft at position i (1 is the first after the last token) which the output could use:
                  a draft behind an accepted end-of-text token is not counted, nothing could follow there
  reached[i]      of those, the steps in which a path of i - 1 drafts was accepted and a draft followed it (a tree may have none there)
  accepted[i]     of those, the steps in which a draft at position i was accepted too
`accepted / proposed` is the unconditional acceptance of a position, `accepted / reached` the conditional one, `accepted / verify steps` the survival.
Acceptance length = (accepted + verify steps) / verify steps: it counts the bonus token, so 1.0 means that nothing was accepted.
Only the output is cut at `max_new_tok`; the last verify step is counted whole, as the server counts it.

What may explain the figure:
  repeats       a looping text is easy to draft. A verify step is *fresh* when the last two tokens before it had not stood side by side in the response: that
                is known before anything is drafted, so it does not choose the steps by what they accept. All steps against the fresh ones, paired by prompt.
  calibration   the drafter's first choice after each accepted node (and after the last committed token): its probability against how often it is accepted.
  misses        verify steps that ended though a draft was there: what the target chose in its place, and whether the drafter could have said it.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from eyas.config import Config
from eyas.errors import EyasError
from eyas.evaluation.decode import (
    EagleDraft,
    PromptLookup,
    Sampler,
    ShuffledDraft,
    Step,
    Trace,
    greedy_decode,
    heldout_samples,
    load_model,
    response_start,
    speculative_decode,
)
from eyas.files import (
    ROOT,
    read_json,
    read_parquet,
    set_aside,
    sha256_file,
    write_atomic,
    write_json,
)
from eyas.intervals import difference_interval, interval_text, ratio_interval
from eyas.models.drafter import Drafter, initial_drafter
from eyas.models.target import Target
from eyas.progress import Progress
from eyas.prompts.chat_template import prompt_ids, repeated_bigrams
from eyas.prompts.prompt_set import humaneval, load_prompts, load_questions

BINS = 10  # of confidence, equally wide
SHOWN_MISSES = 20
OF_A_DECODING = (
    "acceptance.json",
    "acceptance.parquet",
    "baselines.parquet",
    "speed.json",
    "offline.json",
    "served.json",
    "served.parquet",
)  # what stands on one decoding
PLAIN, DRAFTER, LOOKUP, RANDOM, SHUFFLED, SAMPLED = (
    "no drafting",
    "drafter",
    "prompt-lookup n-grams",
    "drafter, random weights",
    "drafter, shuffled states",
    "drafter, sampled",
)


@dataclass(frozen=True)
class Prompt:
    """What is decoded: the token ids up to the assistant's turn."""

    id: str
    category: str
    input_ids: list[int]


def eval_prompts(config: Config, target: Target) -> list[Prompt]:
    """The first `decode_prompts` of the evaluation set. Held-out topics and HumanEval in a seeded order, one's own file in its own.

    EyasError: a file that is not there, or a line that is no conversation with a prompt.
    """
    tokenizer = target.tokenizer()
    if config.eval_set == "heldout":
        samples = heldout_samples(config, target, load_prompts(config.answered_path))
        return [
            Prompt(s.id, s.category, s.input_ids[: response_start(s.loss_mask)].tolist())
            for s in samples
        ]
    if config.eval_set == "humaneval":
        order = np.random.default_rng(config.seed).permutation(164)
        problems = humaneval()
        chosen = [problems[i] for i in order[: config.decode_prompts]]
    else:
        chosen = load_questions(ROOT / config.eval_set)[
            : config.decode_prompts
        ]  # an absolute path stays as it is
    return [Prompt(c.id, c.category, prompt_ids(list(c.messages), tokenizer, c.id)) for c in chosen]


@dataclass(frozen=True)
class Acceptance:
    """`record` is acceptance.json (counts first, then ratios with intervals), `prompts` the table of counts, one row a prompt; `baselines` that of the
    other methods, one row a method and prompt; `traces` what was decoded, by dtype and method."""

    record: dict
    prompts: pd.DataFrame
    baselines: pd.DataFrame
    traces: dict[str, dict[str, list[Trace]]] = field(repr=False)

    def __str__(self) -> str:
        r = self.record
        lines = [
            headline(r),
            *(
                f"  position {p['position']}: accepted {interval_text(p['unconditional'])} of all, {interval_text(p['conditional'])} of those reached "
                f"({p['accepted']} of {p['reached']} of {p['proposed']})"
                for p in r["by_position"]
            ),
            f"speed ratio {interval_text(r['speed_ratio'])} in float32 (plain {r['counts']['greedy_s']:.1f} s, speculative {r['counts']['speculative_s']:.1f} s), "
            f"{interval_text(r['speed_ratio_bfloat16'])} in bfloat16",
            f"repeated bigrams {interval_text(r['repeated_bigrams'])}, target tokens outside the draft vocabulary {interval_text(r['outside_vocab'])}",
            *(
                f"{b['method']}: acceptance length {interval_text(b['acceptance_length'])}, speed ratio {interval_text(b['speed_ratio'])} ({b['prompts']} prompts)"
                for b in r["baselines"]
            ),
        ]
        for dtype, check in r["identical_to_greedy"].items():
            if check["prompts"]:
                lines.append(
                    f"output identical to greedy ({dtype}): {'yes' if not check['differing'] else 'no'} "
                    f"({check['prompts'] - check['differing']} of {check['prompts']} prompts; {check['ties']} ties, {check['not_ties']} not ties)"
                )
        return "\n".join(lines)


def headline(record: dict) -> str:
    """acceptance.json in one sentence, and a warning where repeats explain it."""
    settings, repeats = record["settings"], record["repeats"]
    tree = (
        ""
        if settings["speculative_eagle_topk"] == 1
        else f", top-k {settings['speculative_eagle_topk']}, {settings['speculative_num_draft_tokens']} tokens verified"
    )
    lookup = record.get("prompt_lookup")  # not in records of before
    free = (
        f"\nprompt-lookup n-grams, which cost nothing, over the same texts: {interval_text(lookup['acceptance_length'])}; drafter minus n-grams {interval_text(lookup['difference'])}"
        if lookup
        else ""
    )
    text = (
        f"acceptance length {interval_text(record['acceptance_length'])} (bonus token included), {interval_text(record['accepted_per_step'])} accepted drafts a verify step: "
        f"{record['counts']['prompts']} prompts of {Path(settings['eval_set']).name}, {settings['speculative_num_steps']} draft steps{tree}, "
        + ("greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}")
    )
    return text + free + (f"\nWARNING: {repeats['warning']}" if repeats["warning"] else "")


def measure(config: Config, target: Target, drafter: Drafter, prompts: list[Prompt]) -> Acceptance:
    """Decode each prompt plainly and speculatively, in float32 for the counts and the speed, some again in bfloat16; the first `baseline_prompts` with the baselines too.

    The methods follow each other directly on each prompt, in changing order, after one warm-up, so that a busy machine disturbs all of them.
    Writes acceptance.parquet, baselines.parquet and, last, acceptance.json into the run's acceptance folder.
    EyasError: no prompts; a prompt that does not fit into the context together with its response.
    """
    if not prompts:
        raise EyasError(
            "no prompts to decode",
            "at least one of the evaluation set",
            "python -m eyas prompts show",
        )
    for prompt in prompts:
        room = target.context_tok - config.decode_new_tok - config.verified_tok
        if len(prompt.input_ids) > room:
            raise EyasError(
                f"the prompt of {prompt.id} has {len(prompt.input_ids)} tokens",
                f"at most {room}: context, less new tokens and drafts",
            )
    torch.set_num_threads(config.threads)
    drafter = drafter.to(config.device).eval()
    model = load_model(target, torch.float32, config.device)
    traces = decode_all(
        methods(config, model, drafter) | baselines(config, target, model, drafter),
        prompts,
        config,
        "float32",
    )
    model = load_model(target, torch.bfloat16, config.device)
    again = decode_all(
        methods(config, model, drafter), prompts[: config.check_bf16_prompts], config, "bfloat16"
    )
    pairs = list(zip(traces[PLAIN], traces[DRAFTER]))
    table = pd.DataFrame(
        [_count(config, drafter, prompt, *pair) for prompt, pair in zip(prompts, pairs)]
    )
    few = prompts[: config.baseline_prompts]
    others = pd.DataFrame(
        [
            _baseline_row(name, *row)
            for name in traces
            for row in zip(few, traces[PLAIN], traces[name])
        ]
    )
    record = summarise(config, target, drafter, table)
    record["calibration"] = calibration([judged(trace) for trace in traces[DRAFTER]], config.seed)
    record["misses"] = misses(traces[DRAFTER], drafter, target.tokenizer())
    record["baselines"] = compare_methods(others, config.seed)
    record["prompt_lookup"] = (
        free_baseline(config, table, prompts, traces[PLAIN]) if config.temperature == 0 else None
    )  # drawn texts are others
    # Verifying several tokens costs a CPU nearly as much as one in bfloat16 and about twice as much in float32, so both ratios are shown.
    timed = [
        (_seconds_for(plain, speculative), speculative.seconds)
        for plain, speculative in zip(again[PLAIN], again[DRAFTER])
    ]
    record["speed_ratio_bfloat16"] = ratio_interval(
        [t[0] for t in timed], [t[1] for t in timed], config.seed
    ).as_dict() | {"prompts": len(timed)}
    drawn = config.temperature > 0  # then nothing has to be identical
    record["identical_to_greedy"] = {
        "float32": _compare(prompts, [] if drawn else pairs),
        "bfloat16": _compare(prompts, [] if drawn else list(zip(again[PLAIN], again[DRAFTER]))),
    }
    keep_earlier(config.acceptance_dir, OF_A_DECODING, record)
    write_atomic(config.acceptance_dir / "acceptance.parquet", table.to_parquet)
    write_atomic(config.acceptance_dir / "baselines.parquet", others.to_parquet)
    write_json(config.acceptance_dir / "acceptance.json", record)
    return Acceptance(record, table, others, {"float32": traces, "bfloat16": again})


def judged_file(config: Config) -> dict:
    """Return which drafter is judged, as results say it: its run, which weights, and the hash of their file (None where it is in memory only)."""
    path = config.judged.drafter_dir / config.drafter_file
    return {
        "drafter_run": config.judged.run_name,
        "drafter_weights": config.drafter_weights,
        "drafter_sha256": sha256_file(path) if path.is_file() else None,
    }


def keep_earlier(folder: Path, names: tuple[str, ...], record: dict) -> None:
    """Keep results of another drafter or of other settings apart, before new ones take their place. `names`: JSON with settings first, then what belongs to it."""
    path = folder / names[0]
    if not path.is_file():
        return
    try:
        earlier = read_json(path)
        was, n_was = earlier["settings"], _judged_count(earlier)
    except (ValueError, KeyError, TypeError):
        return  # torn, or not a result
    now = json.loads(json.dumps(record["settings"]))
    apart = [
        f"{name} {was[name]}, now {now[name]}"
        for name in now
        if name in was and was[name] != now[name]
    ]
    if n_was != _judged_count(record):
        apart.append(f"{n_was} judged, now {_judged_count(record)}")
    if apart:
        set_aside(folder, names, f"{names[0]} was of {'; '.join(apart)}")


def _judged_count(record: dict) -> int | None:
    """Return how many prompts or samples a result is over."""
    counts = record.get("counts", {})
    return counts.get("prompts", counts.get("samples"))


Method = Callable[[list[int], int], Trace]  # prompt, most new tokens -> what was decoded


def methods(config: Config, model, drafter: Drafter) -> dict[str, Method]:
    """Plain decoding, and the drafter with the profile's settings."""
    method = EagleDraft(
        drafter,
        config.speculative_num_steps,
        config.speculative_eagle_topk,
        config.speculative_num_draft_tokens,
        config.speculative_use_rejection_sampling,
    )
    return {
        PLAIN: lambda prompt, n_tok: greedy_decode(model, prompt, n_tok),
        DRAFTER: lambda prompt, n_tok: speculative_decode(
            model, method, prompt, n_tok, config.temperature, config.seed
        ),
    }


def baselines(config: Config, target: Target, model, drafter: Drafter) -> dict[str, Method]:
    """What the drafter has to beat, and what it must fall to without its states; and the drafter in sampled decoding, a chain drawn from it."""
    steps, topk, n_tok = (
        config.speculative_num_steps,
        config.speculative_eagle_topk,
        config.speculative_num_draft_tokens,
    )
    untrained = (
        initial_drafter(drafter.config, drafter.vocab, target, config.seed, from_target=False)
        .to(config.device)
        .eval()
    )
    drafts = {
        LOOKUP: PromptLookup(steps),
        RANDOM: EagleDraft(untrained, steps, topk, n_tok),
        SHUFFLED: ShuffledDraft(drafter, steps, topk, n_tok),
    }
    sampled = EagleDraft(drafter, steps, rejection_sampling=True)
    made = {
        name: lambda prompt, n_tok, draft=draft: speculative_decode(
            model, draft, prompt, n_tok, seed=config.seed
        )
        for name, draft in drafts.items()
    }
    return made | {
        SAMPLED: lambda prompt, n_tok: speculative_decode(
            model, sampled, prompt, n_tok, config.temperature or 1.0, config.seed
        )
    }


def decode_all(
    made: dict[str, Method], prompts: list[Prompt], config: Config, note: str
) -> dict[str, list[Trace]]:
    """What each method decodes: the first two all prompts, the others the first `baseline_prompts`."""
    traces: dict[str, list[Trace]] = {name: [] for name in made}
    if prompts:
        for decode in made.values():
            decode(prompts[0].input_ids, 4)  # warm-up
    with Progress(len(prompts), "prompts") as progress:
        for i, prompt in enumerate(prompts):
            names = list(made)[: None if i < config.baseline_prompts else 2]
            for name in names[i % len(names) :] + names[: i % len(names)]:
                traces[name].append(made[name](prompt.input_ids, config.decode_new_tok))
            progress.update(
                samples=1, tok=sum(len(traces[name][-1].tokens) for name in names), note=note
            )
    return traces


# ---- counts


def _count(
    config: Config, drafter: Drafter, prompt: Prompt, plain: Trace, speculative: Trace
) -> dict:
    """The counts of one prompt; positions count from 1."""
    steps = speculative.steps
    drafted = np.array(
        [max(step.depths, default=0) for step in steps], dtype=np.int64
    )  # [verify steps] deepest draft
    accepted = np.array([len(step.accepted) for step in steps], dtype=np.int64)  # [verify steps]
    tried = accepted + np.array(
        [missed(step) for step in steps], dtype=np.int64
    )  # [verify steps] positions that were decided
    fresh = fresh_steps(speculative)
    after_first = torch.tensor(
        speculative.tokens[1:], dtype=torch.int64
    )  # the first token comes from the prefill and is never drafted
    repeated, bigrams = repeated_bigrams(speculative.tokens)
    row = {
        "id": prompt.id,
        "category": prompt.category,
        "prompt_tok": len(prompt.input_ids),
        "tok": len(speculative.tokens),
        "verify_steps": len(steps),
        "drafted": int(drafted.sum()),
        "draft_tok": sum(len(step.tokens) for step in steps),
        "accepted": int(accepted.sum()),
        "fresh_steps": int(fresh.sum()),
        "fresh_accepted": int(accepted[fresh].sum()),
        "bigrams": bigrams,
        "repeated_bigrams": repeated,
        "draftable_tok": len(after_first),
        "outside_vocab_tok": int((drafter.vocab.to_draft(after_first) < 0).sum()),
        "greedy_s": _seconds_for(plain, speculative),
        "speculative_s": speculative.seconds,
        "draft_s": speculative.draft_s,
        "verify_s": speculative.verify_s,
        "identical": plain.tokens == speculative.tokens,
    }
    return row | position_counts(drafted, accepted, config.speculative_num_steps, tried)


def _seconds_for(plain: Trace, speculative: Trace) -> float:
    """Plain decoding's, for as many tokens: sampled texts, and in bfloat16 some others, end elsewhere."""
    return plain.seconds * len(speculative.tokens) / len(plain.tokens)


def missed(step: Step) -> bool:
    """Whether the step ended though a draft was there: the target chose another token."""
    return step.bonus is not None and (step.accepted[-1] if step.accepted else -1) in step.parents


def fresh_steps(trace: Trace) -> np.ndarray:
    """Which verify steps began where the last two tokens had not stood side by side in the response before, bool [verify steps]."""
    fresh, seen, at = [], set(), 1  # tokens before the step; the first is the prefill's
    pairs = list(zip(trace.tokens, trace.tokens[1:]))  # pair i ends with token i+1
    for step in trace.steps:
        fresh.append(at < 2 or pairs[at - 2] not in seen)
        produced = len(step.accepted) + (step.bonus is not None)
        seen.update(
            pairs[max(at - 2, 0) : at - 2 + produced]
        )  # all but the last, which the next step asks for
        at += produced
    return np.array(fresh, dtype=bool)


def judged(trace: Trace) -> np.ndarray:
    """(probability of the drafter's first choice, was it accepted) where the target has judged one, [n, 2]: after the last token of each step and each accepted draft."""
    rows = []
    for step in trace.steps:
        for node in (-1, *step.accepted):
            if node in step.parents:
                first = step.parents.index(
                    node
                )  # children of a node come in the order of their probability
                rows.append((step.confidence[first], first in step.accepted))
    return np.array(rows, dtype=float).reshape(-1, 2)


def position_counts(
    drafted: np.ndarray, accepted: np.ndarray, draft_length: int, tried: np.ndarray | None = None
) -> dict[str, int]:
    """proposed_i, reached_i and accepted_i of one prompt from its verify steps, [steps] each (see the module's head); `tried`, by default that of a chain."""
    tried = np.minimum(accepted + 1, drafted) if tried is None else tried
    counts = {}
    for i in range(draft_length):
        counts[f"proposed_{i + 1}"] = int((drafted > i).sum())
        counts[f"reached_{i + 1}"] = int((tried > i).sum())
        counts[f"accepted_{i + 1}"] = int((accepted > i).sum())
    return counts


def position_ratios(table: pd.DataFrame, config: Config) -> list[dict]:
    """Counts by position over all rows of the table, and both acceptances with their intervals."""
    return [
        {
            "position": i,
            **{
                name: int(table[f"{name}_{i}"].sum())
                for name in ("proposed", "reached", "accepted")
            },
            "unconditional": ratio_interval(
                table[f"accepted_{i}"], table[f"proposed_{i}"], config.seed
            ).as_dict(),
            "conditional": ratio_interval(
                table[f"accepted_{i}"], table[f"reached_{i}"], config.seed
            ).as_dict(),
            "survival": ratio_interval(
                table[f"accepted_{i}"], table["verify_steps"], config.seed
            ).as_dict(),
        }
        for i in range(1, config.speculative_num_steps + 1)
    ]


# ---- what explains the figure


def calibration(by_prompt: list[np.ndarray], seed: int) -> dict:
    """The drafter's probability against acceptance, in BINS bins. by_prompt: what `judged` gives for each prompt.

    `expected_calibration_error` is the mean over judged drafts of |acceptance - mean probability| of their bin (Guo et al. 2017); `overconfidence` the mean
    probability minus the acceptance. Intervals by bootstrap over prompts.
    """
    n, hits, confidence = (np.zeros((len(by_prompt), BINS)) for _ in range(3))
    for prompt, rows in enumerate(by_prompt):
        bins = np.minimum((rows[:, 0] * BINS).astype(int), BINS - 1)
        for total, weights in ((n, None), (hits, rows[:, 1]), (confidence, rows[:, 0])):
            total[prompt] = np.bincount(bins, weights, minlength=BINS)
    gaps = np.abs(hits.sum(0) - confidence.sum(0))
    return {
        "judged": int(n.sum()),
        "bins": [
            {
                "low": b / BINS,
                "high": (b + 1) / BINS,
                "judged": int(n[:, b].sum()),
                "confidence": float(confidence[:, b].sum() / n[:, b].sum())
                if n[:, b].any()
                else None,
                "acceptance": ratio_interval(hits[:, b], n[:, b], seed).as_dict(),
            }
            for b in range(BINS)
        ],
        "expected_calibration_error": float(gaps.sum() / n.sum()) if n.any() else None,
        "overconfidence": ratio_interval((confidence - hits).sum(1), n.sum(1), seed).as_dict(),
    }


def misses(traces: list[Trace], drafter: Drafter, tokenizer) -> dict:
    """The target's choices where the first draft was wrong: how many, how many that the drafter has no token for, and the commonest."""
    wanted: Counter[int] = Counter()
    instead: dict[int, Counter[int]] = {}
    for step in (step for trace in traces for step in trace.steps if missed(step)):
        wanted[step.bonus] += 1
        first = step.parents.index(step.accepted[-1] if step.accepted else -1)
        instead.setdefault(step.bonus, Counter())[step.tokens[first]] += 1
    outside = {token: drafter.vocab.to_draft(torch.tensor([token])).item() < 0 for token in wanted}
    rows = [
        {
            "token": token,
            "text": tokenizer.decode([token]),
            "misses": count,
            "outside_vocab": outside[token],
            "drafted_instead": tokenizer.decode([instead[token].most_common(1)[0][0]]),
        }
        for token, count in sorted(wanted.items(), key=lambda item: (-item[1], item[0]))[
            :SHOWN_MISSES
        ]
    ]
    return {
        "misses": wanted.total(),
        "tokens": len(wanted),
        "outside_vocab": sum(count for token, count in wanted.items() if outside[token]),
        "commonest": rows,
    }


def repeats(table: pd.DataFrame, config: Config) -> dict:
    """All verify steps against the fresh ones (see the module's head); `warning` where a tenth or more of the accepted drafts a step is due to repeats, beyond chance."""
    every = (table["accepted"] + table["verify_steps"], table["verify_steps"])
    fresh = (table["fresh_accepted"] + table["fresh_steps"], table["fresh_steps"])
    difference, length = (
        difference_interval(every, fresh, config.seed),
        ratio_interval(*fresh, config.seed),
    )
    total, warning = ratio_interval(*every, config.seed), None
    if (
        difference.low is not None
        and difference.low > 0
        and difference.value >= 0.1 * (total.value - 1)
    ):
        warning = (
            f"repeats explain part of it: at the {int(table['fresh_steps'].sum())} of {int(table['verify_steps'].sum())} verify steps that begin at no repeated bigram "
            f"the acceptance length is {interval_text(length.as_dict())}, {interval_text(difference.as_dict())} less"
        )
    return {
        "fresh_steps": int(table["fresh_steps"].sum()),
        "fresh_acceptance_length": length.as_dict(),
        "difference": difference.as_dict(),
        "warning": warning,
    }


# ---- baselines


def _baseline_row(name: str, prompt: Prompt, plain: Trace, trace: Trace) -> dict:
    accepted = sum(len(step.accepted) for step in trace.steps)
    # without drafting every token after the prefill's is a pass of its own
    return {
        "method": name,
        "id": prompt.id,
        "category": prompt.category,
        "tok": len(trace.tokens),
        "verify_steps": len(trace.steps) or len(trace.tokens) - 1,
        "draft_tok": sum(len(step.tokens) for step in trace.steps),
        "accepted": accepted,
        "seconds": trace.seconds,
        "plain_s": plain.seconds * len(trace.tokens) / len(plain.tokens),
        "identical": plain.tokens == trace.tokens,
    }


def looked_up(prompt_ids: list[int], tokens: list[int], steps: int) -> tuple[int, int]:
    """(verify steps, accepted drafts) of prompt-lookup n-grams that would have written this text, which is the target's own, greedy: no model is needed to know what it accepts.

    A step whose drafts are all right up to where a text was cut is left out: what comes next is not known.
    """
    method, fresh, at, n_steps, accepted = (
        PromptLookup(steps),
        [*prompt_ids[1:], tokens[0]],
        1,
        0,
        0,
    )
    method.start(prompt_ids, Sampler(0.0, 0))
    while at < len(tokens):
        drafts, text = method.draft(fresh, None).tokens, tokens[at:]
        hits = next(
            (i for i, pair in enumerate(zip(drafts, text)) if pair[0] != pair[1]),
            min(len(drafts), len(text)),
        )
        if hits == len(text) < len(drafts):
            break
        fresh, at, n_steps, accepted = text[: hits + 1], at + hits + 1, n_steps + 1, accepted + hits
    return n_steps, accepted


def free_baseline(
    config: Config, table: pd.DataFrame, prompts: list[Prompt], plain: list[Trace]
) -> dict:
    """Acceptance length of prompt-lookup over the texts of plain decoding, all prompts; and the drafter's minus it, paired by prompt. table: rows of acceptance.parquet."""
    n_steps, accepted = (
        np.array(column)
        for column in zip(
            *(
                looked_up(prompt.input_ids, trace.tokens, config.speculative_num_steps)
                for prompt, trace in zip(prompts, plain)
            )
        )
    )
    ours = table["accepted"] + table["verify_steps"], table["verify_steps"]
    return {
        "prompts": len(prompts),
        "verify_steps": int(n_steps.sum()),
        "accepted": int(accepted.sum()),
        "acceptance_length": ratio_interval(accepted + n_steps, n_steps, config.seed).as_dict(),
        "difference": difference_interval(
            ours, (accepted + n_steps, n_steps), config.seed
        ).as_dict(),
    }


def compare_methods(table: pd.DataFrame, seed: int) -> list[dict]:
    """Counts of each method, acceptance length and speed ratio with intervals, all on the same prompts. table: rows of baselines.parquet."""
    rows = []
    for method, found in table.groupby("method", sort=False):
        rows.append(
            {
                "method": method,
                "prompts": len(found),
                **{
                    name: int(found[name].sum())
                    for name in ("tok", "verify_steps", "draft_tok", "accepted", "identical")
                },
                "acceptance_length": ratio_interval(
                    found["accepted"] + found["verify_steps"], found["verify_steps"], seed
                ).as_dict(),
                "speed_ratio": ratio_interval(found["plain_s"], found["seconds"], seed).as_dict(),
            }
        )
    return rows


# ---- is the output the target's own?


def bf16_steps(top: float, second: float) -> float:
    """The distance of two logits in steps of bfloat16 (8 significant bits) at the larger one's magnitude."""
    largest = max(abs(top), abs(second))
    return 0.0 if largest == 0 else (top - second) / 2.0 ** (math.floor(math.log2(largest)) - 7)


def _compare(prompts: list[Prompt], pairs: list[tuple[Trace, Trace]]) -> dict:
    """Where speculative and plain output part, and whether that was a tie.

    Rounding moves each logit by up to half a bfloat16 step, so it can turn a pair around that is at most one step apart; a first difference
    is called a tie when the two largest logits were that close in both decodings. A larger gap is reported as what it is.
    """
    differences = []
    for prompt, (plain, speculative) in zip(prompts, pairs):
        if plain.tokens == speculative.tokens:
            continue
        at = next(i for i, (a, b) in enumerate(zip(plain.tokens, speculative.tokens)) if a != b)
        gaps = [bf16_steps(*trace.top2[at]) for trace in (plain, speculative)]
        differences.append(
            {
                "id": prompt.id,
                "at_tok": at,
                "greedy_gap_bf16_steps": gaps[0],
                "speculative_gap_bf16_steps": gaps[1],
                "tie": max(gaps) <= 1,
            }
        )
    ties = sum(d["tie"] for d in differences)
    return {
        "prompts": len(pairs),
        "differing": len(differences),
        "ties": ties,
        "not_ties": len(differences) - ties,
        "differences": differences,
    }


# ---- ratios, last


def summarise(config: Config, target: Target, drafter: Drafter, prompts: pd.DataFrame) -> dict:
    """What the float32 decodings say: settings, counts, then every ratio with its interval over prompts."""

    def interval(top, bottom) -> dict:
        return ratio_interval(top, bottom, config.seed).as_dict()

    def length(table: pd.DataFrame) -> dict:
        return interval(table["accepted"] + table["verify_steps"], table["verify_steps"])

    counted = [name for name in prompts.columns if name not in ("id", "category")]
    return {
        "settings": {
            **judged_file(config),
            "eval_set": config.eval_set,
            "target": target.name,
            "target_fingerprint": target.fingerprint,
            "boundaries": list(drafter.config.boundaries),
            "draft_vocab_size": drafter.config.draft_vocab_size,
            "speculative_num_steps": config.speculative_num_steps,
            "speculative_eagle_topk": config.speculative_eagle_topk,
            "speculative_num_draft_tokens": config.verified_tok,
            "speculative_use_rejection_sampling": config.speculative_use_rejection_sampling,
            "temperature": config.temperature,
            "max_new_tok": config.decode_new_tok,
            "dtype": "float32",
            "device": config.device,
            "threads": config.threads,
            "seed": config.seed,
            "interval": "95 %, percentile bootstrap over prompts",
        },
        "counts": {
            "prompts": len(prompts),
            **{name: prompts[name].sum().item() for name in counted},
        },
        "acceptance_length": length(prompts),  # bonus token included
        "accepted_per_step": interval(
            prompts["accepted"], prompts["verify_steps"]
        ),  # without the bonus token
        "by_position": position_ratios(prompts, config),
        "by_category": [
            {
                "category": category,
                "prompts": len(table),
                "verify_steps": int(table["verify_steps"].sum()),
                "accepted": int(table["accepted"].sum()),
                "acceptance_length": length(table),
                "repeated_bigrams": interval(table["repeated_bigrams"], table["bigrams"]),
            }
            for category, table in prompts.groupby("category", sort=True)
        ],
        "speed_ratio": interval(
            prompts["greedy_s"], prompts["speculative_s"]
        ),  # plain seconds / speculative seconds, float32
        "repeats": repeats(prompts, config),
        "repeated_bigrams": interval(prompts["repeated_bigrams"], prompts["bigrams"]),
        "outside_vocab": interval(prompts["outside_vocab_tok"], prompts["draftable_tok"]),
    }


# ---- as tables to read


def method_table(record: dict) -> pd.DataFrame:
    """The methods of acceptance.json, counts first."""
    return pd.DataFrame(
        [
            {
                "method": b["method"],
                "prompts": b["prompts"],
                "tokens": b["tok"],
                "verify steps": b["verify_steps"],
                "drafted": b["draft_tok"],
                "accepted": b["accepted"],
                "acceptance length": b["acceptance_length"]["value"],
                "speed": b["speed_ratio"]["value"],
                "same text": b["identical"],
            }
            for b in record["baselines"]
        ]
    )


def position_table(record: dict) -> pd.DataFrame:
    """The positions of acceptance.json, counts first."""
    names = {"of all": "unconditional", "of those reached": "conditional", "survival": "survival"}
    counts = ("position", "proposed", "reached", "accepted")
    return pd.DataFrame(
        [
            {name: p[name] for name in counts}
            | {title: p[name]["value"] for title, name in names.items()}
            for p in record["by_position"]
        ]
    )


def miss_table(record: dict, shown: int = 12) -> pd.DataFrame:
    """The commonest misses of acceptance.json, texts quoted so that blanks show."""
    return pd.DataFrame(
        [
            {
                "the target's choice": repr(m["text"]),
                "misses": m["misses"],
                "outside the vocabulary": "yes" if m["outside_vocab"] else "",
                "drafted most often instead": repr(m["drafted_instead"]),
            }
            for m in record["misses"]["commonest"][:shown]
        ]
    )


def explanation(record: dict) -> str:
    """Repeats, calibration and misses of acceptance.json in words."""
    found, fit, missing = record["repeats"], record["calibration"], record["misses"]
    error = (
        "n/a"
        if fit["expected_calibration_error"] is None
        else f"{fit['expected_calibration_error']:.3f}"
    )
    return "\n".join(
        [
            f"repeats: {interval_text(record['repeated_bigrams'])} of the bigrams of the output; acceptance length at the {found['fresh_steps']:,} fresh steps "
            f"of {record['counts']['verify_steps']:,}: {interval_text(found['fresh_acceptance_length'])}; all steps minus fresh ones: {interval_text(found['difference'])}",
            f"WARNING: {found['warning']}"
            if found["warning"]
            else "repeats do not explain the figure",
            f"calibration: {fit['judged']:,} first choices judged, expected calibration error {error}, probability minus acceptance {interval_text(fit['overconfidence'])}",
            f"misses: {missing['misses']:,} verify steps ended by {missing['tokens']:,} different tokens, {missing['outside_vocab']:,} of them by one outside the draft vocabulary, "
            f"which {interval_text(record['outside_vocab'])} of all output tokens are",
        ]
    )


# ---- two drafters


def compare_runs(config: Config) -> dict:
    """This run's acceptance minus that of `compare_run`, paired by prompt: {"runs", "prompts", "acceptance_length", "by_position", "speed_ratio"}, differences with intervals.

    EyasError: no run to compare with; one of them has not decoded; other prompts or other settings, which it names.
    """
    if not config.compare_run:
        raise EyasError(
            "no run to compare with",
            "the name of another run that has decoded the same prompts",
            "python -m eyas evaluate compare -p compare_run NAME",
        )
    other = dataclasses.replace(
        config, run_name=config.compare_run, compare_run="", member="", drafter_run=""
    )
    found = []
    for run in (config, other):
        if not (run.acceptance_dir / "acceptance.json").is_file():
            raise EyasError(
                f"run {run.run_name!r} has no acceptance",
                "both runs decoded",
                _decode_command(run.run_name),
            )
        found.append(
            (
                read_json(run.acceptance_dir / "acceptance.json"),
                read_parquet(run.acceptance_dir / "acceptance.parquet")
                .set_index("id")
                .sort_index(),
            )
        )
    (record, table), (other_record, other_table) = found
    names = (
        "target_fingerprint",
        "eval_set",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_use_rejection_sampling",
        "temperature",
        "max_new_tok",
        "dtype",
        "device",
    )
    apart = [
        f"{name} {record['settings'][name]!r} and {other_record['settings'][name]!r}"
        for name in names
        if record["settings"][name] != other_record["settings"][name]
    ]
    again = _decode_command(other.run_name)
    if apart:
        raise EyasError(
            f"runs {config.run_name!r} and {other.run_name!r} decoded with other settings: {'; '.join(apart)}",
            "the same",
            again,
        )
    if list(table.index) != list(other_table.index) or list(table["prompt_tok"]) != list(
        other_table["prompt_tok"]
    ):
        both = len(set(table.index) & set(other_table.index))
        raise EyasError(
            f"runs {config.run_name!r} and {other.run_name!r} decoded other prompts ({len(table)} and {len(other_table)}, {both} of the same name)",
            "the same prompts, to be paired",
            again,
        )

    def difference(top: str, bottom: str) -> dict:
        return difference_interval(
            (table[top], table[bottom]), (other_table[top], other_table[bottom]), config.seed
        ).as_dict()

    return {
        "runs": [_whose(config, record), _whose(other, other_record)],
        "prompts": len(table),
        "values": [record["acceptance_length"], other_record["acceptance_length"]],
        "acceptance_length": difference("accepted", "verify_steps"),  # the bonus tokens cancel out
        "by_position": [
            {"position": i, "conditional": difference(f"accepted_{i}", f"reached_{i}")}
            for i in range(1, record["settings"]["speculative_num_steps"] + 1)
        ],
        "speed_ratio": difference("greedy_s", "speculative_s"),
    }


def _whose(config: Config, record: dict) -> str:
    """The drafter that was judged, by its run; and by whom, where that is another one."""
    drafter_run = record["settings"]["drafter_run"]
    return (
        drafter_run
        if drafter_run == config.run_name
        else f"{drafter_run} (judged by {config.run_name})"
    )


def _decode_command(run_name: str) -> str:
    return f"python -m eyas evaluate decode -p run_name {run_name} -p compare_run ''"  # a run is not compared with itself


def comparison_text(found: dict) -> str:
    """`compare_runs` in words."""
    d, (first, second) = found["acceptance_length"], found["runs"]
    clear = (
        "not told apart"
        if d["low"] is None or d["low"] <= 0 <= d["high"]
        else f"{first if d['value'] > 0 else second} accepts more"
    )
    return "\n".join(
        [
            f"acceptance length (bonus token included): {first} {interval_text(found['values'][0])}, {second} {interval_text(found['values'][1])}; {found['prompts']} prompts, both decoded",
            f"difference, paired by prompt: {interval_text(d)}: {clear}",
            *(
                f"  position {p['position']}, of those reached: {interval_text(p['conditional'])}"
                for p in found["by_position"]
            ),
            f"speed ratio: {interval_text(found['speed_ratio'])}",
        ]
    )
