"""Predict how fast other draft settings would be on this machine.

`python -m eyas evaluate decode` ends with the answer of this speed model:

    speed-up = tokens of a verify step * seconds of a plain step
               / (seconds of drafting + seconds of a verify step)

The tokens of a verify step are replayed, not modelled. Greedy output is the same with every
setting. So along a text that the target has decoded plainly, with its true states, the drafter
drafts the widest tree of each top-k from every token. The tree of each setting is a part of that
one: the levels up to its steps, and of those the draft tokens of best score (EAGLE-2's own choice).
The replay goes from verify step to verify step as `eyas.evaluation.offline` does. It leaves out:
  - steps near the end of a text that was cut, where the target's choice is unknown;
  - ties of the target that another batch shape swaps.

Seconds are measured for each of:
  - a plain step;
  - a verify step of n tokens, as a chain and as a tree with its own attention mask;
  - the first draft level, with the drafter's run over the new tokens, and after a pass of the
    target, as in decoding;
  - each further draft level.
They are medians of rounds through all of them, so that a busy machine disturbs all alike. In each
round a pass of the target follows one of the same kind, as in decoding, where the CPU's caches
still hold weights. The context is that of one prompt. The other work of a verify step (deciding,
recording) is not measured. Prefill is left out on both sides.

All of this is our own decoder, in plain torch with one request at a time. A server has other costs
(CUDA graphs, batches); its own speed is measured there.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
import torch

from eyas.config import Config
from eyas.evaluation.acceptance import DRAFTER, PLAIN, Acceptance, Method, Prompt, decode_all
from eyas.evaluation.decode import (
    Draft,
    EagleDraft,
    Sampler,
    TargetStream,
    Trace,
    end_ids,
    greedy_decode,
    load_model,
    speculative_decode,
)
from eyas.evaluation.verdict import answer
from eyas.files import write_json
from eyas.intervals import ratio_interval
from eyas.models.drafter import Drafter
from eyas.models.target import Target
from eyas.progress import Progress

TREE_TOK = (3, 4, 6, 8, 12, 16, 24, 32)  # numbers of verified tokens that are looked at for trees
ROUNDS = 4
# Passes of the same kind in a row. The first is not counted: the passes before it have filled the
# CPU's caches with other weights.
IN_A_ROW = 3
BUSY = 0.3  # quartile distance / median from which a measured time is doubted
DTYPES = ("float32", "bfloat16")  # of the target; the drafter is in float32
PROFILE = "the profile's"
BEST = "best"
BEST_TREE = "best tree"


@dataclass(frozen=True, order=True)
class Setting:
    """Hold SGLang's speculative_num_steps, speculative_eagle_topk, speculative_num_draft_tokens."""

    steps: int
    topk: int
    draft_tokens: int

    def __str__(self) -> str:
        return f"steps {self.steps}, top-k {self.topk}, draft tokens {self.draft_tokens}"


def grid(config: Config) -> list[Setting]:
    """Return every setting that is looked at.

    These are the profile's own, chains up to `speed_steps`, and trees up to `speed_steps` and
    `speed_topk` (powers of two).
    """
    settings = {_profile_setting(config)}
    all_steps = range(1, config.speed_steps + 1)
    settings |= {Setting(steps, 1, steps + 1) for steps in all_steps}
    for topk in (2**i for i in range(1, config.speed_topk.bit_length())):
        for steps in all_steps:
            fewest = max(steps + 1, topk)
            most = _widest_tree(steps, topk)
            settings |= {Setting(steps, topk, n) for n in TREE_TOK if fewest < n <= most}
    return sorted(settings, key=lambda s: (s.topk, s.steps, s.draft_tokens))


def _profile_setting(config: Config) -> Setting:
    return Setting(config.speculative_num_steps, config.speculative_eagle_topk, config.verified_tok)


def _widest_tree(steps: int, topk: int) -> int:
    """Return how many tokens a tree with every candidate has, the root included."""
    return topk + (steps - 1) * topk**2 + 1


def _by_topk(settings: list[Setting]) -> dict[int, list[Setting]]:
    groups: dict[int, list[Setting]] = {}
    for setting in sorted(settings, key=lambda setting: setting.topk):
        groups.setdefault(setting.topk, []).append(setting)
    return groups


# ---- tokens of a verify step


@torch.inference_mode()
def replay(
    model, drafter: Drafter, prompt_ids: list[int], tokens: list[int], settings: list[Setting]
) -> dict[Setting, tuple[int, int]]:
    """Return (verify steps, accepted draft tokens) of each setting along a text.

    tokens: what the target gave greedily after the prompt.
    """
    ended = tokens[-1] in end_ids(model)
    with TargetStream(model, drafter.config.boundaries) as stream:
        _, states = stream.forward(
            [*prompt_ids, *tokens[:-1]], keep=1
        )  # [prompt + tokens - 1, B*H]
    n_points = max(len(tokens) - 1, 0)
    hits = {setting: np.zeros(n_points, dtype=np.int64) for setting in settings}
    for topk, same_topk in _by_topk(settings).items():
        levels = max(setting.steps for setting in same_topk)
        n_candidates = 0 if topk == 1 else _widest_tree(levels, topk)  # 0: a chain, in full
        method = EagleDraft(drafter, levels, topk, n_candidates)
        method.start(prompt_ids, Sampler(0.0, 0))
        for last in range(len(tokens) - 1):  # index of the last committed token
            new_tokens = [tokens[last]]
            first_slot = len(prompt_ids) + last - 1
            if last == 0:
                new_tokens = [*prompt_ids[1:], tokens[0]]
                first_slot = 0
            draft = method.draft(new_tokens, states[first_slot : len(prompt_ids) + last])
            for setting, n_hits in _hits(draft, tokens[last + 1 :], same_topk).items():
                hits[setting][last] = n_hits
    return {setting: _jump(counts, setting.steps, ended) for setting, counts in hits.items()}


def _hits(draft: Draft, following: list[int], settings: list[Setting]) -> dict[Setting, int]:
    """Return how many draft tokens are accepted if each setting's part of them is verified.

    draft: every candidate. following: the tokens that the target chooses.
    """
    n = len(draft.tokens)
    scores = np.ones(n, dtype=np.float32)
    depths = np.ones(n, dtype=np.int64)
    for node, (parent, confidence) in enumerate(zip(draft.parents, draft.confidence)):
        if parent < 0:
            scores[node] = np.float32(confidence)
        else:
            scores[node] = np.float32(confidence) * scores[parent]
            depths[node] = 1 + depths[parent]
    path = _followed_path(draft, following)
    return {setting: _verified_on_path(path, scores, depths, setting) for setting in settings}


def _followed_path(draft: Draft, following: list[int]) -> list[int]:
    """Return the nodes from the root on whose tokens the target chooses."""
    edges = zip(draft.parents, draft.tokens)
    children = {edge: node for node, edge in enumerate(edges)}
    path = []
    node = -1
    for token in following:
        if (node, token) not in children:
            break
        node = children[node, token]
        path.append(node)
    return path


def _verified_on_path(
    path: list[int], scores: np.ndarray, depths: np.ndarray, setting: Setting
) -> int:
    """Return how many nodes of the path are among the setting's candidates of best score.

    scores, depths: [n], of every candidate. Candidates stand level by level.
    """
    n_within = np.searchsorted(depths, setting.steps, side="right")
    within = scores[:n_within]
    for i, node in enumerate(path[: setting.steps]):
        n_better = (within > scores[node]).sum()
        n_equal_before = (within[:node] == scores[node]).sum()
        if n_better + n_equal_before >= setting.draft_tokens - 1:
            return i
    return min(len(path), setting.steps)


def _jump(hits: np.ndarray, steps: int, ended: bool) -> tuple[int, int]:
    """Return verify steps and accepted draft tokens of a walk over `hits`, [tokens - 1].

    The last steps of a text that was cut are left out.
    """
    known = len(hits) if ended else len(hits) - steps + 1
    verify_steps = 0
    accepted = 0
    position = 0
    while position < known:
        n_hits = int(hits[position])
        verify_steps += 1
        accepted += n_hits
        position += n_hits + 1
    return verify_steps, accepted


# ---- seconds


@dataclass(frozen=True)
class _Job:
    """Hold something that is timed, and what runs untimed before and after it."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


@torch.inference_mode()
def costs(model, drafter: Drafter, prompt_ids: list[int], settings: list[Setting]) -> dict:
    """Return measured seconds.

    {"plain_step_s", "verify_step_s": {"chain" | "tree": {n: s}}, "first_level_s": {topk: s},
    "level_s": {topk: s}, "spread", "rounds", "context_tok"}. `spread` is the largest distance
    between the quartiles of one of the measurements, relative to its median.
    """
    levels: dict[int, int] = {}
    for setting in settings:
        levels[setting.topk] = max(setting.steps, levels.get(setting.topk, 0))
    plain = TargetStream(model, ())
    verifying = TargetStream(model, drafter.config.boundaries)
    plain.forward(prompt_ids, keep=1)
    _, states = verifying.forward(prompt_ids, keep=1)
    jobs = {
        "plain": _plain_job(plain, prompt_ids[-1]),
        **_verify_jobs(verifying, prompt_ids[-1], settings),
        **_draft_jobs(drafter, plain, prompt_ids, states, levels),
    }
    with plain, verifying:
        seconds = _time_jobs(jobs, str(model.dtype).removeprefix("torch."))
    quartiles = {name: np.quantile(times, [0.25, 0.5, 0.75]) for name, times in seconds.items()}
    median = {name: float(middle) for name, (_, middle, _) in quartiles.items()}
    return {
        "plain_step_s": median["plain"],
        "verify_step_s": {shape: _medians_of_shape(median, shape) for shape in ("chain", "tree")},
        "first_level_s": {str(topk): median["draft", topk, 1] for topk in levels},
        "level_s": {str(topk): _level_seconds(median, topk, n) for topk, n in levels.items()},
        "spread": max(float((high - low) / middle) for low, middle, high in quartiles.values()),
        "rounds": ROUNDS,
        "context_tok": len(prompt_ids),
    }


def _plain_step(plain: TargetStream, token: int) -> None:
    logits, _ = plain.forward([token], keep=1)
    logits.argmax(dim=-1).tolist()
    logits.topk(2).values.tolist()


def _plain_job(plain: TargetStream, token: int) -> _Job:
    return _Job(lambda: _plain_step(plain, token), after=lambda: plain.roll_back(1, []))


def _verify_jobs(verifying: TargetStream, token: int, settings: list[Setting]) -> dict[tuple, _Job]:
    """Return a job for each shape and number of verified tokens."""

    def verify_step(parents: list[int]) -> None:
        n = len(parents) + 1
        logits, _ = verifying.forward([token] * n, keep=n, parents=parents)
        logits.argmax(dim=-1).tolist()
        logits[:1].topk(2).values.tolist()
        verifying.roll_back(n, [0])

    jobs = {}
    for setting in settings:
        nodes = range(setting.draft_tokens - 1)
        shape = "chain" if setting.topk == 1 else "tree"
        parents = [i - 1 for i in nodes] if shape == "chain" else [i // 2 - 1 for i in nodes]
        jobs[shape, setting.draft_tokens] = _Job(
            lambda parents=parents: verify_step(parents),
            after=lambda: verifying.roll_back(1, []),
        )
    return jobs


def _draft_jobs(
    drafter: Drafter,
    plain: TargetStream,
    prompt_ids: list[int],
    states: torch.Tensor,
    levels: dict[int, int],
) -> dict[tuple, _Job]:
    """Return for each top-k the jobs of drafting one level and all levels.

    states: [prompt, B*H]. levels: the most draft steps of each top-k.
    """
    token = prompt_ids[-1]

    def target_first() -> None:
        # In decoding a draft follows a pass of the target, which pushes the drafter's weights out
        # of the CPU's caches. The first level then takes four times as long as without that pass.
        _plain_step(plain, token)
        plain.roll_back(1, [])

    jobs = {}
    for topk, most_steps in levels.items():
        for steps in {1, most_steps}:
            method = EagleDraft(drafter, steps, topk)
            method.start(prompt_ids, Sampler(0.0, 0))
            method.draft([*prompt_ids[1:], token], states)
            jobs["draft", topk, steps] = _Job(
                lambda method=method: method.draft([token, token], states[:2]),
                before=target_first,
                after=lambda method=method: method.cache.truncate(len(prompt_ids)),
            )
    return jobs


def _time_jobs(jobs: dict, note: str) -> dict[str | tuple, list[float]]:
    """Return the seconds of each job, in rounds through all of them."""
    seconds = {name: [] for name in jobs}
    with Progress(ROUNDS, "rounds") as progress:
        for _ in range(ROUNDS):
            for name, job in jobs.items():
                for i in range(IN_A_ROW):
                    job.before()
                    start = time.perf_counter()
                    job.run()
                    elapsed_s = time.perf_counter() - start
                    job.after()
                    if i > 0:
                        seconds[name].append(elapsed_s)
            progress.update(samples=1, note=note)
    return seconds


def _medians_of_shape(median: dict, shape: str) -> dict[str, float]:
    """Return the median seconds of a verify step by its number of tokens."""
    return {str(name[1]): seconds for name, seconds in median.items() if name[0] == shape}


def _level_seconds(median: dict, topk: int, levels: int) -> float:
    """Return the seconds of one further draft level."""
    further_s = median["draft", topk, levels] - median["draft", topk, 1]
    return max(further_s, 0.0) / max(levels - 1, 1)


def step_seconds(setting: Setting, cost: dict) -> float:
    """Return the seconds of drafting and verifying once, from what `costs` measured."""
    shape = "chain" if setting.topk == 1 else "tree"
    topk = str(setting.topk)
    return (
        cost["first_level_s"][topk]
        + (setting.steps - 1) * cost["level_s"][topk]
        + cost["verify_step_s"][shape][str(setting.draft_tokens)]
    )


def predict(counts: dict[Setting, list[tuple[int, int]]], cost: dict, seed: int) -> pd.DataFrame:
    """Return one row a setting with its predicted speed-up.

    The columns are steps, topk, draft_tokens, verify_steps, accepted, acceptance_length (bonus
    token included), step_s, predicted, low and high.
    counts: (verify steps, accepted) of each prompt. The interval is over prompts; the seconds count
    as exact.
    """
    rows = []
    for setting, prompt_counts in counts.items():
        steps, accepted = np.array(prompt_counts).T  # [prompts] each
        step_s = step_seconds(setting, cost)
        plain_s = (steps + accepted) * cost["plain_step_s"]
        ratio = ratio_interval(plain_s, steps * step_s, seed)
        rows.append(
            asdict(setting)
            | {
                "verify_steps": int(steps.sum()),
                "accepted": int(accepted.sum()),
                "acceptance_length": float(1 + accepted.sum() / max(steps.sum(), 1)),
                "step_s": step_s,
                "predicted": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
            }
        )
    return pd.DataFrame(rows)


# ---- predicted against measured


def decoding_ratio(plain: list[Trace], speculative: list[Trace], seed: int) -> dict:
    """Return the speed of speculative divided by plain decoding, without the prefill.

    Both are for as many tokens. The interval is over prompts.
    """
    plain_s = []
    for plain_trace, trace in zip(plain, speculative):
        # The last verify step counts whole, although the output may be cut inside it.
        n_tok = sum(len(step.accepted) + (step.bonus is not None) for step in trace.steps)
        decoding_s = plain_trace.seconds - plain_trace.prefill_s
        plain_s.append(decoding_s / max(len(plain_trace.tokens) - 1, 1) * n_tok)
    speculative_s = [trace.draft_s + trace.verify_s for trace in speculative]
    return ratio_interval(plain_s, speculative_s, seed).as_dict()


def model_speed(
    config: Config, target: Target, drafter: Drafter, prompts: list[Prompt], acceptance: Acceptance
) -> dict:
    """Predict every setting of the grid in float32 and bfloat16, and compare with decoding.

    The first `baseline_prompts` prompts are used. `measure` has decoded the profile's own setting.
    The best setting and the best tree are decoded here, in bfloat16, beside plain decoding.
    Write speed.json into the run's acceptance folder: "settings", and for each of "dtypes" the
    "costs", the whole "grid", the "best" by prediction, and what was "measured".
    """
    torch.set_num_threads(config.threads)
    drafter = drafter.to(config.device).eval()
    settings = grid(config)
    chosen = prompts[: config.baseline_prompts]
    by_length = sorted(chosen, key=lambda prompt: len(prompt.input_ids))
    typical = by_length[len(chosen) // 2]
    record: dict = {
        "settings": {
            "prompts": len(chosen),
            "max_new_tok": config.decode_new_tok,
            "grid": len(settings),
            "device": config.device,
            "threads": config.threads,
            "seed": config.seed,
            "interval": "95 %, percentile bootstrap over prompts",
            "decoder": "eyas.evaluation.decode, one request; not the server",
        },
        "dtypes": {},
    }
    counts: dict[Setting, list[tuple[int, int]]] = {}
    for dtype in DTYPES:
        model = load_model(target, getattr(torch, dtype), config.device)
        traces = acceptance.traces[dtype]
        if dtype == "float32":  # greedy output is replayed once; bfloat16 uses the same counts
            counts = _replay_prompts(model, drafter, chosen, traces[PLAIN], settings)
        cost = costs(model, drafter, typical.input_ids, settings)
        table = predict(counts, cost, config.seed)
        best, names = _named_settings(table, _profile_setting(config))
        decoded = {}
        if config.temperature == 0 and traces[DRAFTER]:
            n = len(chosen)
            decoded[_profile_setting(config)] = traces[PLAIN][:n], traces[DRAFTER][:n]
        if dtype == "bfloat16":
            missing = [setting for setting in names if setting not in decoded]
            decoded |= _decode_settings(model, drafter, missing, chosen, config)
        record["dtypes"][dtype] = {
            "costs": cost,
            "best": _row_of(table, best),
            "measured": [
                _compare_prediction(table, setting, names[setting], plain, speculative, config.seed)
                for setting, (plain, speculative) in decoded.items()
            ],
            "grid": table.to_dict("records"),
        }
    write_json(config.acceptance_dir / "speed.json", record)
    return record


def _replay_prompts(
    model, drafter: Drafter, prompts: list[Prompt], plain: list[Trace], settings: list[Setting]
) -> dict[Setting, list[tuple[int, int]]]:
    """Return (verify steps, accepted draft tokens) of each setting and prompt."""
    counts: dict[Setting, list[tuple[int, int]]] = {setting: [] for setting in settings}
    with Progress(len(prompts), "texts replayed") as progress:
        for prompt, trace in zip(prompts, plain):
            replayed = replay(model, drafter, prompt.input_ids, trace.tokens, settings)
            for setting, setting_counts in replayed.items():
                counts[setting].append(setting_counts)
            progress.update(samples=1)
    return counts


def _named_settings(table: pd.DataFrame, profile: Setting) -> tuple[Setting, dict[Setting, str]]:
    """Return the best setting by prediction, and the settings that are compared with their names.

    One setting may have several names, joined by " and ".
    """
    rows = table.sort_values("predicted", ascending=False).to_dict("records")
    ranked = [_setting(row) for row in rows]
    best_tree = next((setting for setting in ranked if setting.topk > 1), None)
    names: dict[Setting, list[str]] = {}
    for name, setting in ((PROFILE, profile), (BEST, ranked[0]), (BEST_TREE, best_tree)):
        if setting:
            names.setdefault(setting, []).append(name)
    return ranked[0], {setting: " and ".join(words) for setting, words in names.items()}


def _decode_settings(
    model, drafter: Drafter, settings: list[Setting], prompts: list[Prompt], config: Config
) -> dict[Setting, tuple[list[Trace], list[Trace]]]:
    """Return plain and speculative traces of each setting."""

    def speculative(setting: Setting) -> Method:
        method = EagleDraft(drafter, setting.steps, setting.topk, setting.draft_tokens)
        return lambda prompt, n_tok: speculative_decode(model, method, prompt, n_tok)

    decoders: dict[str | Setting, Method] = {
        PLAIN: lambda prompt, n_tok: greedy_decode(model, prompt, n_tok)
    }
    decoders |= {setting: speculative(setting) for setting in settings}
    traces = decode_all(decoders, prompts, config, "bfloat16, best settings")
    return {setting: (traces[PLAIN], traces[setting]) for setting in settings}


def _setting(row: dict) -> Setting:
    return Setting(row["steps"], row["topk"], row["draft_tokens"])


def _row_of(table: pd.DataFrame, setting: Setting) -> dict:
    return next(row for row in table.to_dict("records") if _setting(row) == setting)


def _compare_prediction(
    table: pd.DataFrame,
    setting: Setting,
    name: str,
    plain: list[Trace],
    speculative: list[Trace],
    seed: int,
) -> dict:
    """Return a setting predicted and measured.

    It has counts, acceptance lengths (bonus token included), and speed-ups without the prefill and
    with it.
    """
    row = _row_of(table, setting)
    steps = [step for trace in speculative for step in trace.steps]
    accepted = sum(len(step.accepted) for step in steps)
    plain_s = [
        plain_trace.seconds * len(trace.tokens) / len(plain_trace.tokens)
        for plain_trace, trace in zip(plain, speculative)
    ]
    speculative_s = [trace.seconds for trace in speculative]
    return asdict(setting) | {
        "what": name,
        "prompts": len(speculative),
        "verify_steps": len(steps),
        "accepted": accepted,
        "acceptance_length": 1 + accepted / max(len(steps), 1),
        "predicted_acceptance_length": row["acceptance_length"],
        "predicted": row["predicted"],
        "measured": decoding_ratio(plain, speculative, seed),
        "with_prefill": ratio_interval(plain_s, speculative_s, seed).as_dict(),
    }


# ---- to read


def speed_text(record: dict) -> str:
    """Return speed.json in words: serve it or not, with which setting, how fast and how sure.

    The last dtype gives the answer: bfloat16, in which targets are served.
    """
    lines = []
    last_answer = ""
    for dtype, part in record["dtypes"].items():
        best = _measured_as(part, BEST)
        if best is not None:
            last_answer = answer(best["measured"])
        lines.append(f"{dtype}: {_dtype_text(part)}")
        spread = part["costs"]["spread"]
        if spread > BUSY:
            lines.append(
                f"  its seconds scattered by {spread:.0%} between rounds: a busy machine, "
                "so measure again before a prediction is used"
            )
    dtype = list(record["dtypes"])[-1]
    first = (
        f"{last_answer} in {dtype}, says the speed model of this machine "
        f"({record['settings']['prompts']} prompts, our own decoder, prefill left out)"
    )
    return "\n".join([first, *lines])


def _measured_as(part: dict, name: str) -> dict | None:
    """Return the measured row that has this name, None where there is none."""
    rows = (row for row in part["measured"] if name in row["what"].split(" and "))
    return next(rows, None)


def _dtype_text(part: dict) -> str:
    best = _measured_as(part, BEST)
    profile = _measured_as(part, PROFILE)
    text = (
        f"with {_setting(part['best'])}, the best of {len(part['grid'])} settings "
        f"by prediction ({part['best']['predicted']:.2f})"
    )
    if best is not None:
        text = f"{answer(best['measured'])}: {_times(best['measured'])}, {text}"
    if profile is not None and profile is not best:
        text += (
            f"; the profile's own setting {_times(profile['measured'])} "
            f"(predicted {profile['predicted']:.2f})"
        )
    return text


def _times(ratio: dict) -> str:
    interval = "" if ratio["low"] is None else f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    return f"{ratio['value']:.2f} times plain decoding{interval}"


def cost_table(record: dict) -> pd.DataFrame:
    """Return the milliseconds of each part of a step from speed.json, one column a dtype."""
    columns = {}
    for dtype, part in record["dtypes"].items():
        cost = part["costs"]
        column = {"plain step": cost["plain_step_s"]}
        for topk, seconds in cost["first_level_s"].items():
            column[f"first draft level, top-k {topk}"] = seconds
        for topk, seconds in cost["level_s"].items():
            column[f"each further one, top-k {topk}"] = seconds
        for shape in ("chain", "tree"):
            for n, seconds in cost["verify_step_s"][shape].items():
                column[f"verify step, {shape} of {n} tokens"] = seconds
        columns[dtype] = column
    return 1000 * pd.DataFrame(columns)
