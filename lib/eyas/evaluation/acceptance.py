"""Measure what real decoding accepts, what explains it, and how fast it is.

    python -m eyas evaluate decode --profile smoke        # about a minute on 2 cores, after `train`
    python -m eyas evaluate compare --profile demo -p compare_run other

Each prompt is counted by itself. Every ratio and interval is made from these counts, last, in
`acceptance_record`:
  verify steps    passes of the target over draft tokens; the prefill is not one
  proposed[i]     verify steps with a draft token at position i (1 is the first after the last
                  token) that the output could use. A draft token behind an accepted end-of-text
                  token is not counted, because nothing can follow that token.
  reached[i]      of those, the steps where i - 1 draft tokens were accepted and another one
                  followed them (a tree may have none there)
  accepted[i]     of those, the steps where the draft token at position i was accepted too
`accepted / proposed` is the unconditional acceptance of a position, `accepted / reached` the
conditional one, `accepted / verify steps` the survival.
Acceptance length = (accepted + verify steps) / verify steps. It counts the bonus token, so 1.0
means that nothing was accepted.
Only the output is cut at `max_new_tok`. The last verify step is counted whole, as the server does.

What may explain the figure:
  repeats       A looping text is easy to draft. A verify step is *fresh* when the last two tokens
                before it had not stood side by side in the response. That is known before anything
                is drafted, so the choice of steps does not depend on what they accept. All steps
                are compared with the fresh ones, paired by prompt.
  calibration   The probability of the drafter's first choice, after each accepted node and after
                the last committed token, against how often that choice is accepted.
  misses        Verify steps that ended although a draft token existed: what the target chose
                instead, and whether the draft vocabulary contains it.
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
    DraftMethod,
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
from eyas.evaluation.warnings import (
    few_steps_warning,
    looping_warning,
    position_warning,
    warnings_of,
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

BINS = 10  # equally wide bins of the probability
SHOWN_MISSES = 20

# Files that stand on one decoding.
OF_A_DECODING = (
    "acceptance.json",
    "acceptance.parquet",
    "baselines.parquet",
    "speed.json",
    "offline.json",
    "served.json",
    "served.parquet",
)

# Names of the decoding methods in tables and files.
PLAIN = "no drafting"
DRAFTER = "drafter"
LOOKUP = "prompt-lookup n-grams"
RANDOM = "drafter, random weights"
SHUFFLED = "drafter, shuffled states"
SAMPLED = "drafter, sampled"

Method = Callable[[list[int], int], Trace]  # prompt ids, most new tokens -> what was decoded


@dataclass(frozen=True)
class Prompt:
    """Hold what is decoded: the token ids up to the assistant's turn."""

    id: str
    category: str
    input_ids: list[int]


def eval_prompts(config: Config, target: Target) -> list[Prompt]:
    """Return the first `decode_prompts` prompts of the evaluation set.

    Held-out topics and HumanEval come in a seeded order, a user's own file in the file's order.
    Raise EyasError if a file is missing or a line is not a conversation with a prompt.
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
        questions = load_questions(ROOT / config.eval_set)  # an absolute path stays as it is
        chosen = questions[: config.decode_prompts]
    return [Prompt(c.id, c.category, prompt_ids(list(c.messages), tokenizer, c.id)) for c in chosen]


@dataclass(frozen=True)
class Acceptance:
    """Hold the result of `measure`.

    record: acceptance.json; counts first, then ratios with intervals.
    prompts: the table of counts, one row a prompt.
    baselines: the counts of the other methods, one row a method and prompt.
    traces: what was decoded, by dtype and method.
    """

    record: dict
    prompts: pd.DataFrame
    baselines: pd.DataFrame
    traces: dict[str, dict[str, list[Trace]]] = field(repr=False)

    def __str__(self) -> str:
        """Return the result in words: what `eyas evaluate decode` prints."""
        record = self.record
        lines = [headline(record)]
        lines += [_position_line(position) for position in record["by_position"]]
        lines += [
            _speed_line(record),
            f"repeated bigrams {interval_text(record['repeated_bigrams'])}, "
            "target tokens outside the draft vocabulary "
            f"{interval_text(record['outside_vocab'])}",
        ]
        lines += [_method_line(method) for method in record["baselines"]]
        lines += [
            _identity_line(dtype, check)
            for dtype, check in record["identical_to_greedy"].items()
            if check["prompts"]
        ]
        return "\n".join(lines)


def _position_line(position: dict) -> str:
    return (
        f"  draft token {position['position']}: "
        f"accepted {interval_text(position['unconditional'])} of those proposed, "
        f"{interval_text(position['conditional'])} of those reached "
        f"({position['accepted']} accepted, {position['reached']} reached, "
        f"{position['proposed']} proposed)"
    )


def _speed_line(record: dict) -> str:
    counts = record["counts"]
    return (
        f"speed ratio {interval_text(record['speed_ratio'])} in float32 "
        f"(plain {counts['greedy_s']:.1f} s, speculative {counts['speculative_s']:.1f} s), "
        f"{interval_text(record['speed_ratio_bfloat16'])} in bfloat16"
    )


def _method_line(method: dict) -> str:
    return (
        f"{method['method']}: acceptance length {interval_text(method['acceptance_length'])}, "
        f"speed ratio {interval_text(method['speed_ratio'])} ({method['prompts']} prompts)"
    )


def _identity_line(dtype: str, check: dict) -> str:
    identical = "no" if check["differing"] else "yes"
    return (
        f"output identical to greedy ({dtype}): {identical} "
        f"({check['prompts'] - check['differing']} of {check['prompts']} prompts; "
        f"{check['ties']} ties, {check['not_ties']} not ties)"
    )


def headline(record: dict) -> str:
    """Return acceptance.json in one sentence, and a warning where repeats explain it."""
    settings = record["settings"]
    tree = ""
    if settings["speculative_eagle_topk"] != 1:
        tree = (
            f", top-k {settings['speculative_eagle_topk']}, "
            f"{settings['speculative_num_draft_tokens']} tokens verified"
        )
    temperature = settings["temperature"]
    sampling = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    lines = [
        f"acceptance length {interval_text(record['acceptance_length'])} (bonus token included), "
        f"{interval_text(record['accepted_per_step'])} accepted drafts a verify step: "
        f"{record['counts']['prompts']} prompts of {Path(settings['eval_set']).name}, "
        f"{settings['speculative_num_steps']} draft steps{tree}, {sampling}"
    ]
    lookup = record.get("prompt_lookup")  # older records do not have it
    if lookup:
        lines.append(
            "prompt-lookup n-grams, which cost nothing, over the same texts: "
            f"{interval_text(lookup['acceptance_length'])}; "
            f"drafter minus n-grams {interval_text(lookup['difference'])}"
        )
    lines += [f"WARNING: {warning}" for warning in warnings_of(record)]
    return "\n".join(lines)


# ---- measuring


def measure(config: Config, target: Target, drafter: Drafter, prompts: list[Prompt]) -> Acceptance:
    """Decode each prompt with and without the drafter, and count what is accepted.

    float32 gives the counts and the speed. The first `check_bf16_prompts` are decoded again in
    bfloat16, the first `baseline_prompts` with the baselines too.
    Write acceptance.parquet, baselines.parquet and, last, acceptance.json into the run's
    acceptance folder.
    Raise EyasError if there are no prompts, or if a prompt and its response exceed the context.
    """
    _check_prompts(config, target, prompts)
    torch.set_num_threads(config.threads)
    drafter = drafter.to(config.device).eval()
    traces = _decode_float32(config, target, drafter, prompts)
    bfloat16_traces = _decode_bfloat16(config, target, drafter, prompts)

    table = _prompt_table(config, drafter, prompts, traces)
    baseline_table = _baseline_table(prompts[: config.baseline_prompts], traces)
    record = acceptance_record(config, target, drafter, table)
    longest_tok = max(
        len(prompt.input_ids) + len(trace.tokens) for prompt, trace in zip(prompts, traces[DRAFTER])
    )
    positions = drafter.config.max_position_embeddings
    record["beyond_positions"] = position_warning(longest_tok, positions) or None
    first_choices = [judged_first_choices(trace) for trace in traces[DRAFTER]]
    record["calibration"] = calibration(first_choices, config.seed)
    record["misses"] = misses(traces[DRAFTER], drafter, target.tokenizer())
    record["baselines"] = compare_methods(baseline_table, config.seed)
    record["prompt_lookup"] = None
    if config.temperature == 0:  # a sampled text is not the one that prompt-lookup is counted over
        record["prompt_lookup"] = prompt_lookup_baseline(config, table, prompts, traces[PLAIN])
    record["speed_ratio_bfloat16"] = _bfloat16_speed(bfloat16_traces, config.seed)
    record["identical_to_greedy"] = {
        "float32": _identity(config, prompts, traces),
        "bfloat16": _identity(config, prompts, bfloat16_traces),
    }

    keep_earlier(config.acceptance_dir, OF_A_DECODING, record)
    write_atomic(config.acceptance_dir / "acceptance.parquet", table.to_parquet)
    write_atomic(config.acceptance_dir / "baselines.parquet", baseline_table.to_parquet)
    write_json(config.acceptance_dir / "acceptance.json", record)
    return Acceptance(
        record, table, baseline_table, {"float32": traces, "bfloat16": bfloat16_traces}
    )


def _check_prompts(config: Config, target: Target, prompts: list[Prompt]) -> None:
    """Raise EyasError if there are no prompts, or if one exceeds the context with its response."""
    if not prompts:
        raise EyasError(
            "no prompts to decode",
            "at least one of the evaluation set",
            "python -m eyas prompts show",
        )
    room_tok = target.context_tok - config.decode_new_tok - config.verified_tok
    for prompt in prompts:
        if len(prompt.input_ids) > room_tok:
            raise EyasError(
                f"the prompt of {prompt.id} has {len(prompt.input_ids)} tokens",
                f"at most {room_tok}: context, less new tokens and drafts",
            )


def _decode_float32(
    config: Config, target: Target, drafter: Drafter, prompts: list[Prompt]
) -> dict[str, list[Trace]]:
    model = load_model(target, torch.float32, config.device)
    decoders = methods(config, model, drafter) | baselines(config, target, model, drafter)
    return decode_all(decoders, prompts, config, "float32")


def _decode_bfloat16(
    config: Config, target: Target, drafter: Drafter, prompts: list[Prompt]
) -> dict[str, list[Trace]]:
    model = load_model(target, torch.bfloat16, config.device)
    chosen = prompts[: config.check_bf16_prompts]
    return decode_all(methods(config, model, drafter), chosen, config, "bfloat16")


def _prompt_table(
    config: Config, drafter: Drafter, prompts: list[Prompt], traces: dict[str, list[Trace]]
) -> pd.DataFrame:
    """Return acceptance.parquet: one row of counts a prompt."""
    return pd.DataFrame(
        [
            _count(config, drafter, prompt, plain, speculative)
            for prompt, plain, speculative in zip(prompts, traces[PLAIN], traces[DRAFTER])
        ]
    )


def _baseline_table(prompts: list[Prompt], traces: dict[str, list[Trace]]) -> pd.DataFrame:
    """Return baselines.parquet: one row of counts a method and prompt."""
    return pd.DataFrame(
        [
            _baseline_row(method, prompt, plain, trace)
            for method in traces
            for prompt, plain, trace in zip(prompts, traces[PLAIN], traces[method])
        ]
    )


def _bfloat16_speed(traces: dict[str, list[Trace]], seed: int) -> dict:
    """Return the speed ratio in bfloat16, with the number of prompts.

    In bfloat16 a CPU verifies several tokens in nearly the time of one, in float32 in about twice
    that time. Therefore both ratios are shown.
    """
    speculative_s = [trace.seconds for trace in traces[DRAFTER]]
    plain_s = [
        _plain_seconds(plain, speculative)
        for plain, speculative in zip(traces[PLAIN], traces[DRAFTER])
    ]
    ratio = ratio_interval(plain_s, speculative_s, seed)
    return ratio.as_dict() | {"prompts": len(speculative_s)}


def _identity(config: Config, prompts: list[Prompt], traces: dict[str, list[Trace]]) -> dict:
    """Compare speculative with plain output. Sampled output does not have to be identical."""
    pairs = [] if config.temperature > 0 else list(zip(traces[PLAIN], traces[DRAFTER]))
    return _compare(prompts, pairs)


# ---- which drafter, and results of another one


def judged_file(config: Config) -> dict:
    """Return which drafter is judged: its run, which weights, and the hash of their file.

    The hash is None for a drafter that exists in memory only.
    """
    path = config.judged.drafter_dir / config.drafter_file
    return {
        "drafter_run": config.judged.run_name,
        "drafter_weights": config.drafter_weights,
        "drafter_sha256": sha256_file(path) if path.is_file() else None,
    }


def keep_earlier(folder: Path, names: tuple[str, ...], record: dict) -> None:
    """Set results of another drafter or of other settings aside before new ones replace them.

    `names`: first a JSON file with settings, then the files that belong to it.
    """
    path = folder / names[0]
    if not path.is_file():
        return
    try:
        earlier_record = read_json(path)
        earlier = earlier_record["settings"]
        earlier_count = _judged_count(earlier_record)
    except (ValueError, KeyError, TypeError):
        return  # torn, or not a result
    current = json.loads(json.dumps(record["settings"]))
    changes = [
        f"{name} {earlier[name]}, now {current[name]}"
        for name in current
        if name in earlier and earlier[name] != current[name]
    ]
    if earlier_count != _judged_count(record):
        changes.append(f"{earlier_count} judged, now {_judged_count(record)}")
    if changes:
        set_aside(folder, names, f"{names[0]} was of {'; '.join(changes)}")


def _judged_count(record: dict) -> int | None:
    """Return how many prompts or samples a result counts."""
    counts = record.get("counts", {})
    return counts.get("prompts", counts.get("samples"))


# ---- decoding


def methods(config: Config, model, drafter: Drafter) -> dict[str, Method]:
    """Return plain decoding, and decoding with the drafter and the profile's settings."""
    draft = EagleDraft(
        drafter,
        config.speculative_num_steps,
        config.speculative_eagle_topk,
        config.speculative_num_draft_tokens,
        config.speculative_use_rejection_sampling,
    )

    def decode_plain(prompt: list[int], n_tok: int) -> Trace:
        return greedy_decode(model, prompt, n_tok)

    def decode_with_drafter(prompt: list[int], n_tok: int) -> Trace:
        return speculative_decode(model, draft, prompt, n_tok, config.temperature, config.seed)

    return {PLAIN: decode_plain, DRAFTER: decode_with_drafter}


def baselines(config: Config, target: Target, model, drafter: Drafter) -> dict[str, Method]:
    """Return the methods that the drafter is compared with.

    Prompt-lookup n-grams are what it has to beat. Random weights and shuffled states show what
    remains without its knowledge. The last method samples from the drafter, in a chain.
    """
    steps = config.speculative_num_steps
    topk = config.speculative_eagle_topk
    n_draft_tok = config.speculative_num_draft_tokens
    untrained = initial_drafter(
        drafter.config, drafter.vocab, target, config.seed, from_target=False
    )
    untrained = untrained.to(config.device).eval()
    sampled = EagleDraft(drafter, steps, rejection_sampling=True)

    def greedy(draft: DraftMethod) -> Method:
        return lambda prompt, n_tok: speculative_decode(
            model, draft, prompt, n_tok, seed=config.seed
        )

    def decode_sampled(prompt: list[int], n_tok: int) -> Trace:
        temperature = config.temperature or 1.0
        return speculative_decode(model, sampled, prompt, n_tok, temperature, config.seed)

    return {
        LOOKUP: greedy(PromptLookup(steps)),
        RANDOM: greedy(EagleDraft(untrained, steps, topk, n_draft_tok)),
        SHUFFLED: greedy(ShuffledDraft(drafter, steps, topk, n_draft_tok)),
        SAMPLED: decode_sampled,
    }


def decode_all(
    decoders: dict[str, Method], prompts: list[Prompt], config: Config, note: str
) -> dict[str, list[Trace]]:
    """Decode the prompts with each method and return the traces by method.

    The first two methods decode all prompts, the others the first `baseline_prompts`.
    After one warm-up, the methods follow each other directly on each prompt, in changing order.
    A busy machine therefore disturbs all of them alike.
    """
    traces: dict[str, list[Trace]] = {name: [] for name in decoders}
    if prompts:
        for decode in decoders.values():
            decode(prompts[0].input_ids, 4)  # warm-up
    with Progress(len(prompts), "prompts") as progress:
        for i, prompt in enumerate(prompts):
            names = list(decoders)
            if i >= config.baseline_prompts:
                names = names[:2]
            first = i % len(names)
            for name in names[first:] + names[:first]:
                traces[name].append(decoders[name](prompt.input_ids, config.decode_new_tok))
            decoded_tok = sum(len(traces[name][-1].tokens) for name in names)
            progress.update(samples=1, tok=decoded_tok, note=note)
    return traces


# ---- counts


def _count(
    config: Config, drafter: Drafter, prompt: Prompt, plain: Trace, speculative: Trace
) -> dict:
    """Return the counts of one prompt. Positions count from 1."""
    steps = speculative.steps
    deepest = [max(step.depths, default=0) for step in steps]
    drafted = np.array(deepest, dtype=np.int64)  # [verify steps], positions with a draft token
    accepted = np.array([len(step.accepted) for step in steps], dtype=np.int64)  # [verify steps]
    rejected = np.array([missed(step) for step in steps], dtype=np.int64)  # [verify steps], 0 or 1
    fresh = fresh_steps(speculative)
    # The first token comes from the prefill and is never drafted.
    after_first = torch.tensor(speculative.tokens[1:], dtype=torch.int64)
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
        "greedy_s": _plain_seconds(plain, speculative),
        "speculative_s": speculative.seconds,
        "draft_s": speculative.draft_s,
        "verify_s": speculative.verify_s,
        "identical": plain.tokens == speculative.tokens,
    }
    decided = accepted + rejected  # [verify steps], positions where the target decided
    return row | position_counts(drafted, accepted, config.speculative_num_steps, decided)


def _plain_seconds(plain: Trace, speculative: Trace) -> float:
    """Return the seconds of plain decoding for as many tokens as the speculative output has.

    Sampled texts end elsewhere, and some texts in bfloat16 do too.
    """
    return plain.seconds * len(speculative.tokens) / len(plain.tokens)


def missed(step: Step) -> bool:
    """Return whether the step ended because the target chose another token than the draft's."""
    return step.bonus is not None and _last_accepted(step) in step.parents


def _last_accepted(step: Step) -> int:
    """Return the last accepted node of the draft tree; -1 is the last committed token."""
    return step.accepted[-1] if step.accepted else -1


def fresh_steps(trace: Trace) -> np.ndarray:
    """Return which verify steps are fresh, bool [verify steps].

    A step is fresh if the last two tokens before it had not stood side by side in the response.
    """
    fresh = []
    seen = set()
    n_before = 1  # tokens before the step; the first one comes from the prefill
    pairs = list(zip(trace.tokens, trace.tokens[1:]))  # pair i ends with token i + 1
    for step in trace.steps:
        fresh.append(n_before < 2 or pairs[n_before - 2] not in seen)
        produced = len(step.accepted) + (step.bonus is not None)
        # The last pair is left out here: the next step asks for it.
        seen.update(pairs[max(n_before - 2, 0) : n_before - 2 + produced])
        n_before += produced
    return np.array(fresh, dtype=bool)


def judged_first_choices(trace: Trace) -> np.ndarray:
    """Return (probability of the drafter's first choice, whether it was accepted), [n, 2].

    There is a row for each choice that the target judged: after the last token of each step, and
    after each accepted draft token.
    """
    rows = []
    for step in trace.steps:
        for node in (-1, *step.accepted):
            if node in step.parents:
                # The children of a node come in the order of their probability.
                first = step.parents.index(node)
                rows.append((step.confidence[first], first in step.accepted))
    return np.array(rows, dtype=float).reshape(-1, 2)


def position_counts(
    drafted: np.ndarray,
    accepted: np.ndarray,
    draft_length: int,
    decided: np.ndarray | None = None,
) -> dict[str, int]:
    """Return proposed_i, reached_i and accepted_i of one prompt (see the module's head).

    drafted: [verify steps], how many positions had a draft token.
    accepted: [verify steps], how many draft tokens were accepted.
    decided: [verify steps], at how many positions the target decided; by default that of a chain.
    """
    if decided is None:
        decided = np.minimum(accepted + 1, drafted)
    counts = {}
    for i in range(draft_length):
        counts[f"proposed_{i + 1}"] = int((drafted > i).sum())
        counts[f"reached_{i + 1}"] = int((decided > i).sum())
        counts[f"accepted_{i + 1}"] = int((accepted > i).sum())
    return counts


def position_ratios(table: pd.DataFrame, config: Config) -> list[dict]:
    """Return the counts of each position over all rows, and its ratios with their intervals."""

    def ratio(i: int, denominator: str) -> dict:
        return ratio_interval(table[f"accepted_{i}"], table[denominator], config.seed).as_dict()

    return [
        {
            "position": i,
            "proposed": int(table[f"proposed_{i}"].sum()),
            "reached": int(table[f"reached_{i}"].sum()),
            "accepted": int(table[f"accepted_{i}"].sum()),
            "unconditional": ratio(i, f"proposed_{i}"),
            "conditional": ratio(i, f"reached_{i}"),
            "survival": ratio(i, "verify_steps"),
        }
        for i in range(1, config.speculative_num_steps + 1)
    ]


# ---- what explains the figure


def calibration(choices_by_prompt: list[np.ndarray], seed: int) -> dict:
    """Compare the drafter's probability with its acceptance, in BINS bins.

    choices_by_prompt: `judged_first_choices` of each prompt, [n, 2].
    `expected_calibration_error` is the mean over judged draft tokens of |acceptance - mean
    probability| of their bin (Guo et al. 2017). `overconfidence` is the mean probability minus the
    acceptance. The intervals are bootstrapped over prompts.
    """
    shape = (len(choices_by_prompt), BINS)
    judged = np.zeros(shape)
    accepted = np.zeros(shape)
    probability = np.zeros(shape)
    for prompt, choices in enumerate(choices_by_prompt):
        bins = np.minimum((choices[:, 0] * BINS).astype(int), BINS - 1)  # [n]
        judged[prompt] = np.bincount(bins, minlength=BINS)
        accepted[prompt] = np.bincount(bins, choices[:, 1], minlength=BINS)
        probability[prompt] = np.bincount(bins, choices[:, 0], minlength=BINS)
    gaps = np.abs(accepted.sum(0) - probability.sum(0))  # [BINS]
    overconfidence = ratio_interval((probability - accepted).sum(1), judged.sum(1), seed)
    error = float(gaps.sum() / judged.sum()) if judged.any() else None
    return {
        "judged": int(judged.sum()),
        "bins": [
            _calibration_bin(b, judged[:, b], accepted[:, b], probability[:, b], seed)
            for b in range(BINS)
        ],
        "expected_calibration_error": error,
        "overconfidence": overconfidence.as_dict(),
    }


def _calibration_bin(
    index: int, judged: np.ndarray, accepted: np.ndarray, probability: np.ndarray, seed: int
) -> dict:
    """Return one bin; the arrays are sums of each prompt, [prompts]."""
    mean = float(probability.sum() / judged.sum()) if judged.any() else None
    return {
        "low": index / BINS,
        "high": (index + 1) / BINS,
        "judged": int(judged.sum()),
        "confidence": mean,
        "acceptance": ratio_interval(accepted, judged, seed).as_dict(),
    }


def misses(traces: list[Trace], drafter: Drafter, tokenizer) -> dict:
    """Return the target's choices where the first draft token was wrong.

    The counts say how many there are and how many the draft vocabulary does not contain.
    The commonest choices follow.
    """
    chosen: Counter[int] = Counter()
    drafted: dict[int, Counter[int]] = {}  # by the target's choice, what the drafter proposed
    for trace in traces:
        for step in filter(missed, trace.steps):
            chosen[step.bonus] += 1
            first = step.parents.index(_last_accepted(step))
            drafted.setdefault(step.bonus, Counter())[step.tokens[first]] += 1
    outside = {token: drafter.vocab.to_draft(torch.tensor([token])).item() < 0 for token in chosen}
    commonest = sorted(chosen.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_MISSES]
    return {
        "misses": chosen.total(),
        "tokens": len(chosen),
        "outside_vocab": sum(count for token, count in chosen.items() if outside[token]),
        "commonest": [
            {
                "token": token,
                "text": tokenizer.decode([token]),
                "misses": count,
                "outside_vocab": outside[token],
                "drafted_instead": tokenizer.decode([drafted[token].most_common(1)[0][0]]),
            }
            for token, count in commonest
        ],
    }


def repeats(table: pd.DataFrame, config: Config) -> dict:
    """Compare all verify steps with the fresh ones (see the module's head).

    `warning` is set where the text loops, where the fresh steps are too few to judge by, and where
    a tenth or more of the accepted draft tokens of a step is due to repeats and the interval of
    the difference excludes 0.
    """
    all_steps = (table["accepted"] + table["verify_steps"], table["verify_steps"])
    fresh_only = (table["fresh_accepted"] + table["fresh_steps"], table["fresh_steps"])
    difference = difference_interval(all_steps, fresh_only, config.seed)
    fresh_length = ratio_interval(*fresh_only, config.seed)
    length = ratio_interval(*all_steps, config.seed)
    n_fresh = int(table["fresh_steps"].sum())
    n_steps = int(table["verify_steps"].sum())
    counts = (int(table["repeated_bigrams"].sum()), int(table["bigrams"].sum()), n_fresh, n_steps)
    warning = looping_warning(*counts, interval_text(fresh_length.as_dict()))
    warning = warning or few_steps_warning(n_fresh, n_steps)
    certain = difference.low is not None and difference.low > 0
    if not warning and certain and difference.value >= 0.1 * (length.value - 1):
        warning = (
            f"repeats explain part of it: at the {n_fresh} of {n_steps} "
            "verify steps that begin at no repeated bigram the acceptance length is "
            f"{interval_text(fresh_length.as_dict())}, "
            f"{interval_text(difference.as_dict())} less"
        )
    return {
        "fresh_steps": n_fresh,
        "fresh_acceptance_length": fresh_length.as_dict(),
        "difference": difference.as_dict(),
        "warning": warning or None,
    }


# ---- baselines


def _baseline_row(method: str, prompt: Prompt, plain: Trace, trace: Trace) -> dict:
    """Return the counts of one method and prompt."""
    # Without drafting, every token after the prefill's takes a pass of its own.
    verify_steps = len(trace.steps) or len(trace.tokens) - 1
    return {
        "method": method,
        "id": prompt.id,
        "category": prompt.category,
        "tok": len(trace.tokens),
        "verify_steps": verify_steps,
        "draft_tok": sum(len(step.tokens) for step in trace.steps),
        "accepted": sum(len(step.accepted) for step in trace.steps),
        "seconds": trace.seconds,
        "plain_s": _plain_seconds(plain, trace),
        "identical": plain.tokens == trace.tokens,
    }


def prompt_lookup_counts(prompt_ids: list[int], tokens: list[int], steps: int) -> tuple[int, int]:
    """Return (verify steps, accepted draft tokens) of prompt-lookup n-grams over a greedy text.

    The text is the target's own, so no model is needed to know what it accepts.
    A step whose draft tokens are all right up to where the text was cut is left out, because the
    token that follows is unknown.
    """
    lookup = PromptLookup(steps)
    lookup.start(prompt_ids, Sampler(0.0, 0))
    fresh = [*prompt_ids[1:], tokens[0]]  # tokens that the method has not seen yet
    position = 1
    n_steps = 0
    n_accepted = 0
    while position < len(tokens):
        drafts = lookup.draft(fresh, None).tokens
        rest = tokens[position:]
        hits = _common_prefix(drafts, rest)
        if hits == len(rest) < len(drafts):
            break
        fresh = rest[: hits + 1]
        position += hits + 1
        n_steps += 1
        n_accepted += hits
    return n_steps, n_accepted


def _common_prefix(first: list[int], second: list[int]) -> int:
    """Return how many leading tokens are equal."""
    for i, (a, b) in enumerate(zip(first, second)):
        if a != b:
            return i
    return min(len(first), len(second))


def prompt_lookup_baseline(
    config: Config, table: pd.DataFrame, prompts: list[Prompt], plain: list[Trace]
) -> dict:
    """Return the acceptance length of prompt-lookup n-grams over the plainly decoded texts.

    `difference` is the drafter's acceptance length minus it, paired by prompt.
    table: the rows of acceptance.parquet.
    """
    counts = [
        prompt_lookup_counts(prompt.input_ids, trace.tokens, config.speculative_num_steps)
        for prompt, trace in zip(prompts, plain)
    ]
    n_steps, accepted = np.array(counts).T  # [prompts] each
    drafter_length = table["accepted"] + table["verify_steps"], table["verify_steps"]
    lookup_length = accepted + n_steps, n_steps
    return {
        "prompts": len(prompts),
        "verify_steps": int(n_steps.sum()),
        "accepted": int(accepted.sum()),
        "acceptance_length": ratio_interval(*lookup_length, config.seed).as_dict(),
        "difference": difference_interval(drafter_length, lookup_length, config.seed).as_dict(),
    }


def compare_methods(table: pd.DataFrame, seed: int) -> list[dict]:
    """Return each method's counts, acceptance length and speed ratio on the same prompts.

    table: the rows of baselines.parquet.
    """
    counted = ("tok", "verify_steps", "draft_tok", "accepted", "identical")
    rows = []
    for method, group in table.groupby("method", sort=False):
        length = ratio_interval(
            group["accepted"] + group["verify_steps"], group["verify_steps"], seed
        )
        speed = ratio_interval(group["plain_s"], group["seconds"], seed)
        rows.append(
            {
                "method": method,
                "prompts": len(group),
                **{name: int(group[name].sum()) for name in counted},
                "acceptance_length": length.as_dict(),
                "speed_ratio": speed.as_dict(),
            }
        )
    return rows


# ---- is the output the target's own?


def bf16_steps(top: float, second: float) -> float:
    """Return the distance of two logits in bfloat16 steps at the larger one's magnitude.

    bfloat16 has 8 significant bits.
    """
    largest = max(abs(top), abs(second))
    if largest == 0:
        return 0.0
    return (top - second) / 2.0 ** (math.floor(math.log2(largest)) - 7)


def _compare(prompts: list[Prompt], pairs: list[tuple[Trace, Trace]]) -> dict:
    """Return where speculative and plain output first differ, and whether that was a tie.

    Rounding moves each logit by up to half a bfloat16 step. It can therefore swap two logits that
    are at most one step apart. A first difference is called a tie when the two largest logits were
    that close in both decodings. A larger gap is reported as it is.
    """
    differences = []
    for prompt, (plain, speculative) in zip(prompts, pairs):
        if plain.tokens == speculative.tokens:
            continue
        both = enumerate(zip(plain.tokens, speculative.tokens))
        first = next(i for i, (a, b) in both if a != b)
        plain_gap = bf16_steps(*plain.top2[first])
        speculative_gap = bf16_steps(*speculative.top2[first])
        differences.append(
            {
                "id": prompt.id,
                "at_tok": first,
                "greedy_gap_bf16_steps": plain_gap,
                "speculative_gap_bf16_steps": speculative_gap,
                "tie": max(plain_gap, speculative_gap) <= 1,
            }
        )
    ties = sum(difference["tie"] for difference in differences)
    return {
        "prompts": len(pairs),
        "differing": len(differences),
        "ties": ties,
        "not_ties": len(differences) - ties,
        "differences": differences,
    }


# ---- ratios, last


def acceptance_record(
    config: Config, target: Target, drafter: Drafter, table: pd.DataFrame
) -> dict:
    """Return what the float32 decodings say: settings, counts, then each ratio with its interval.

    table: the rows of acceptance.parquet. The intervals are over prompts.
    """

    def ratio(numerator: str, denominator: str) -> dict:
        return ratio_interval(table[numerator], table[denominator], config.seed).as_dict()

    counted = [name for name in table.columns if name not in ("id", "category")]
    return {
        "settings": _settings(config, target, drafter),
        "counts": {
            "prompts": len(table),
            **{name: table[name].sum().item() for name in counted},
        },
        "acceptance_length": _acceptance_length(table, config.seed),
        "accepted_per_step": ratio("accepted", "verify_steps"),  # without the bonus token
        "by_position": position_ratios(table, config),
        "by_category": [
            _category_record(category, rows, config.seed)
            for category, rows in table.groupby("category", sort=True)
        ],
        "speed_ratio": ratio("greedy_s", "speculative_s"),  # plain / speculative seconds, float32
        "repeats": repeats(table, config),
        "repeated_bigrams": ratio("repeated_bigrams", "bigrams"),
        "outside_vocab": ratio("outside_vocab_tok", "draftable_tok"),
    }


def _settings(config: Config, target: Target, drafter: Drafter) -> dict:
    return {
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
    }


def _acceptance_length(table: pd.DataFrame, seed: int) -> dict:
    """Return tokens per verify step with its interval, bonus token included."""
    tokens = table["accepted"] + table["verify_steps"]
    return ratio_interval(tokens, table["verify_steps"], seed).as_dict()


def _category_record(category: str, table: pd.DataFrame, seed: int) -> dict:
    repeated = ratio_interval(table["repeated_bigrams"], table["bigrams"], seed)
    return {
        "category": category,
        "prompts": len(table),
        "verify_steps": int(table["verify_steps"].sum()),
        "accepted": int(table["accepted"].sum()),
        "acceptance_length": _acceptance_length(table, seed),
        "repeated_bigrams": repeated.as_dict(),
    }


# ---- as tables to read


def method_table(record: dict) -> pd.DataFrame:
    """Return the methods of acceptance.json, counts first."""
    return pd.DataFrame(
        [
            {
                "method": method["method"],
                "prompts": method["prompts"],
                "tokens": method["tok"],
                "verify steps": method["verify_steps"],
                "drafted": method["draft_tok"],
                "accepted": method["accepted"],
                "acceptance length": method["acceptance_length"]["value"],
                "speed": method["speed_ratio"]["value"],
                "same text": method["identical"],
            }
            for method in record["baselines"]
        ]
    )


def position_table(record: dict) -> pd.DataFrame:
    """Return the positions of acceptance.json, counts first."""
    return pd.DataFrame(
        [
            {
                "position": position["position"],
                "proposed": position["proposed"],
                "reached": position["reached"],
                "accepted": position["accepted"],
                "of all": position["unconditional"]["value"],
                "of those reached": position["conditional"]["value"],
                "survival": position["survival"]["value"],
            }
            for position in record["by_position"]
        ]
    )


def miss_table(record: dict, shown: int = 12) -> pd.DataFrame:
    """Return the commonest misses of acceptance.json. Texts are quoted so that blanks show."""
    return pd.DataFrame(
        [
            {
                "the target's choice": repr(miss["text"]),
                "misses": miss["misses"],
                "outside the vocabulary": "yes" if miss["outside_vocab"] else "",
                "drafted most often instead": repr(miss["drafted_instead"]),
            }
            for miss in record["misses"]["commonest"][:shown]
        ]
    )


def explanation(record: dict) -> str:
    """Return repeats, calibration and misses of acceptance.json in words."""
    return "\n".join([*_repeats_lines(record), _calibration_line(record), _misses_line(record)])


def _repeats_lines(record: dict) -> list[str]:
    fresh = record["repeats"]
    warning = fresh["warning"]
    return [
        f"repeats: {interval_text(record['repeated_bigrams'])} of the bigrams of the output; "
        f"acceptance length at the {fresh['fresh_steps']:,} fresh steps "
        f"of {record['counts']['verify_steps']:,}: "
        f"{interval_text(fresh['fresh_acceptance_length'])}; "
        f"all steps minus fresh ones: {interval_text(fresh['difference'])}",
        f"WARNING: {warning}" if warning else "no sign that repeats explain the figure",
    ]


def _calibration_line(record: dict) -> str:
    fit = record["calibration"]
    error = fit["expected_calibration_error"]
    error_text = "n/a" if error is None else f"{error:.3f}"
    return (
        f"calibration: {fit['judged']:,} first choices judged, "
        f"expected calibration error {error_text}, "
        f"probability minus acceptance {interval_text(fit['overconfidence'])}"
    )


def _misses_line(record: dict) -> str:
    missing = record["misses"]
    return (
        f"misses: {missing['misses']:,} verify steps ended by {missing['tokens']:,} different "
        f"tokens. {missing['outside_vocab']:,} of these steps ended by a token outside the draft "
        f"vocabulary; {interval_text(record['outside_vocab'])} of all output tokens are outside it"
    )


# ---- two drafters

SAME_SETTINGS = (
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
)  # two runs must share these to be compared


def compare_runs(config: Config) -> dict:
    """Return this run's acceptance minus that of `compare_run`, paired by prompt.

    The result has "runs", "prompts", "values", and the differences "acceptance_length",
    "by_position" and "speed_ratio", each with its interval.
    Raise EyasError if no run is named, if one of them has not decoded, or if prompts or settings
    differ; the message names the difference.
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
    record, table = _read_acceptance(config)
    other_record, other_table = _read_acceptance(other)
    runs = f"runs {config.run_name!r} and {other.run_name!r}"
    _check_same_settings(runs, record, other_record, _decode_command(other.run_name))
    _check_same_prompts(runs, table, other_table, _decode_command(other.run_name))

    def difference(numerator: str, denominator: str) -> dict:
        first = table[numerator], table[denominator]
        second = other_table[numerator], other_table[denominator]
        return difference_interval(first, second, config.seed).as_dict()

    return {
        "runs": [_drafter_name(config, record), _drafter_name(other, other_record)],
        "prompts": len(table),
        "values": [record["acceptance_length"], other_record["acceptance_length"]],
        "acceptance_length": difference("accepted", "verify_steps"),  # the bonus tokens cancel out
        "by_position": [
            {"position": i, "conditional": difference(f"accepted_{i}", f"reached_{i}")}
            for i in range(1, record["settings"]["speculative_num_steps"] + 1)
        ],
        "speed_ratio": difference("greedy_s", "speculative_s"),
    }


def _read_acceptance(config: Config) -> tuple[dict, pd.DataFrame]:
    """Return acceptance.json and acceptance.parquet of a run, the table by prompt."""
    folder = config.acceptance_dir
    if not (folder / "acceptance.json").is_file():
        raise EyasError(
            f"run {config.run_name!r} has no acceptance",
            "both runs decoded",
            _decode_command(config.run_name),
        )
    table = read_parquet(folder / "acceptance.parquet").set_index("id").sort_index()
    return read_json(folder / "acceptance.json"), table


def _check_same_settings(runs: str, first: dict, second: dict, command: str) -> None:
    """Raise EyasError if two records were decoded with different settings."""
    differences = [
        f"{name} {first['settings'][name]!r} and {second['settings'][name]!r}"
        for name in SAME_SETTINGS
        if first["settings"][name] != second["settings"][name]
    ]
    if differences:
        raise EyasError(
            f"{runs} decoded with other settings: {'; '.join(differences)}",
            "the same settings in both",
            command,
        )


def _check_same_prompts(runs: str, first: pd.DataFrame, second: pd.DataFrame, command: str) -> None:
    """Raise EyasError if two tables are of different prompts, which cannot be paired."""
    same_names = list(first.index) == list(second.index)
    if same_names and list(first["prompt_tok"]) == list(second["prompt_tok"]):
        return
    n_common = len(set(first.index) & set(second.index))
    raise EyasError(
        f"{runs} decoded other prompts "
        f"({len(first)} and {len(second)}, {n_common} of the same name)",
        "the same prompts, to be paired",
        command,
    )


def _drafter_name(config: Config, record: dict) -> str:
    """Return the judged drafter's run, and the judging run where that is another one."""
    drafter_run = record["settings"]["drafter_run"]
    if drafter_run == config.run_name:
        return drafter_run
    return f"{drafter_run} (judged by {config.run_name})"


def _decode_command(run_name: str) -> str:
    # compare_run is emptied because a run is not compared with itself.
    return f"python -m eyas evaluate decode -p run_name {run_name} -p compare_run ''"


def comparison_text(comparison: dict) -> str:
    """Return the result of `compare_runs` in words."""
    first, second = comparison["runs"]
    first_length, second_length = comparison["values"]
    difference = comparison["acceptance_length"]
    lines = [
        f"acceptance length (bonus token included): {first} {interval_text(first_length)}, "
        f"{second} {interval_text(second_length)}; {comparison['prompts']} prompts, both decoded",
        f"difference, paired by prompt: {interval_text(difference)}: "
        f"{_difference_answer(difference, first, second)}",
    ]
    lines += [
        f"  draft token {position['position']}, of those reached: "
        f"{interval_text(position['conditional'])}"
        for position in comparison["by_position"]
    ]
    lines.append(f"speed ratio: {interval_text(comparison['speed_ratio'])}")
    return "\n".join(lines)


def _difference_answer(difference: dict, first: str, second: str) -> str:
    """Return which run accepts more, or that the interval does not exclude 0."""
    if difference["low"] is None or difference["low"] <= 0 <= difference["high"]:
        return "not told apart"
    return f"{first if difference['value'] > 0 else second} accepts more"
