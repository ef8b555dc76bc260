"""A speed model: how fast would other draft settings be on this machine? `python -m eyas evaluate decode` ends with its answer.

    speed-up = tokens a verify step gives * seconds of a plain step / (seconds of drafting + seconds of a verify step)

Tokens a verify step gives are replayed, not modelled. Greedy output is the same with every setting, so along a text that the target has decoded plainly, with
its true states, the drafter drafts the widest tree of each top-k from every token, and each setting's tree is a part of that: levels up to its
steps, of those the draft tokens of best score (EAGLE-2's own choice). The replay jumps from verify step to verify step as `eyas.evaluation.offline` does. What it
leaves out: steps near the end of a text that was cut, where the target's choice is not known; ties of the target that another batch shape turns around.

Seconds are measured for each of: a plain step, a verify step of n tokens (a chain, and a tree with its own attention mask), the first draft level
(with the drafter's run over the new tokens, and after a pass of the target, as in decoding) and each further one. Medians of rounds through all of
them, so that a busy machine disturbs all; in each round a pass of the target follows its like, as in decoding, where the CPU's caches still hold weights. The context is that of one prompt; a verify step's other work (deciding, recording) is not in it. Prefill is
left out on both sides.

All of it is our own decoder, in plain torch with one request at a time. A server has other costs (CUDA graphs, batches); its own speed is measured there.
"""

import time
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
import torch

from eyas.config import Config
from eyas.evaluation.acceptance import DRAFTER, PLAIN, Acceptance, Prompt, decode_all
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

TREE_TOK = (3, 4, 6, 8, 12, 16, 24, 32)  # tokens verified at once, looked at for trees
ROUNDS, IN_A_ROW = (
    4,
    3,
)  # in a row of the same passes the first is not counted: those before it had the caches for other things
BUSY = 0.3  # distance of the quartiles of a measurement, relative to its median, from which a prediction is doubted
DTYPES = ("float32", "bfloat16")  # of the target; the drafter is in float32


@dataclass(frozen=True, order=True)
class Setting:
    """As SGLang names them: speculative_num_steps, speculative_eagle_topk, speculative_num_draft_tokens."""

    steps: int
    topk: int
    draft_tokens: int

    def __str__(self) -> str:
        return f"steps {self.steps}, top-k {self.topk}, draft tokens {self.draft_tokens}"


def grid(config: Config) -> list[Setting]:
    """Every setting that is looked at: chains and trees up to speed_steps and speed_topk (powers of two), and the profile's own."""
    own = Setting(config.speculative_num_steps, config.speculative_eagle_topk, config.verified_tok)
    settings = {own} | {Setting(steps, 1, steps + 1) for steps in range(1, config.speed_steps + 1)}
    for topk in (2**i for i in range(1, config.speed_topk.bit_length())):
        for steps in range(1, config.speed_steps + 1):
            most = topk + (steps - 1) * topk**2 + 1
            settings |= {
                Setting(steps, topk, n) for n in TREE_TOK if max(steps + 1, topk) < n <= most
            }
    return sorted(settings, key=lambda s: (s.topk, s.steps, s.draft_tokens))


# ---- tokens a verify step gives


@torch.inference_mode()
def replay(
    model, drafter: Drafter, prompt_ids: list[int], tokens: list[int], settings: list[Setting]
) -> dict[Setting, tuple[int, int]]:
    """(verify steps, accepted drafts) of each setting along `tokens`, which the target gave greedily after the prompt."""
    ended = tokens[-1] in end_ids(model)
    with TargetStream(model, drafter.config.boundaries) as stream:
        states = stream.forward([*prompt_ids, *tokens[:-1]], keep=1)[
            1
        ]  # [prompt + tokens - 1, B*H]
    hits = {setting: np.zeros(max(len(tokens) - 1, 0), dtype=np.int64) for setting in settings}
    for topk in sorted({setting.topk for setting in settings}):
        of_topk = [setting for setting in settings if setting.topk == topk]
        levels = max(setting.steps for setting in of_topk)
        method = EagleDraft(
            drafter, levels, topk, 0 if topk == 1 else topk + (levels - 1) * topk**2 + 1
        )  # every candidate
        method.start(prompt_ids, Sampler(0.0, 0))
        for at in range(len(tokens) - 1):  # token `at` is the last one committed
            first = 0 if at == 0 else len(prompt_ids) + at - 1  # of the slots that are new
            draft = method.draft(
                [*prompt_ids[1:], tokens[0]] if at == 0 else [tokens[at]],
                states[first : len(prompt_ids) + at],
            )
            for setting, found in _hits(draft, tokens[at + 1 :], of_topk).items():
                hits[setting][at] = found
    return {setting: _jump(found, setting.steps, ended) for setting, found in hits.items()}


def _hits(draft: Draft, following: list[int], settings: list[Setting]) -> dict[Setting, int]:
    """Accepted drafts if each setting's part of the candidates is verified and `following` is what the target says."""
    scores, depths = (
        np.ones(len(draft.tokens), dtype=np.float32),
        np.ones(len(draft.tokens), dtype=np.int64),
    )
    for node, (parent, confidence) in enumerate(zip(draft.parents, draft.confidence)):
        scores[node] = np.float32(confidence) * (scores[parent] if parent >= 0 else np.float32(1))
        depths[node] = 1 + (depths[parent] if parent >= 0 else 0)
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens))
    }
    path, at = [], -1
    for token in following:
        if (at, token) not in children:
            break
        at = children[at, token]
        path.append(at)
    found = {}
    for setting in settings:
        inside = scores[
            : np.searchsorted(depths, setting.steps, side="right")
        ]  # candidates stand level by level
        ahead = [
            int((inside > scores[node]).sum() + (inside[:node] == scores[node]).sum())
            for node in path[: setting.steps]
        ]
        found[setting] = next(
            (i for i, rank in enumerate(ahead) if rank >= setting.draft_tokens - 1), len(ahead)
        )
    return found


def _jump(hits: np.ndarray, steps: int, ended: bool) -> tuple[int, int]:
    """Verify steps and accepted drafts of a walk over `hits`, the last steps of a text that was cut left out."""
    known = len(hits) if ended else len(hits) - steps + 1
    verify_steps = accepted = at = 0
    while at < known:
        verify_steps += 1
        accepted += int(hits[at])
        at += int(hits[at]) + 1
    return verify_steps, accepted


# ---- seconds


@torch.inference_mode()
def costs(model, drafter: Drafter, prompt_ids: list[int], settings: list[Setting]) -> dict:
    """Measured seconds: {"plain_step_s", "verify_step_s": {"chain" | "tree": {n: s}}, "first_level_s": {topk: s}, "level_s": {topk: s}, "spread", "rounds", "context_tok"}.

    `spread` is the largest distance between the quartiles of one of the measurements, relative to its median.
    """
    token, topks = prompt_ids[-1], sorted({setting.topk for setting in settings})
    levels = {
        topk: max(setting.steps for setting in settings if setting.topk == topk) for topk in topks
    }
    plain, verifying = TargetStream(model, ()), TargetStream(model, drafter.config.boundaries)
    plain.forward(prompt_ids, keep=1)
    _, states = verifying.forward(prompt_ids, keep=1)

    def plain_step():
        logits, _ = plain.forward([token], keep=1)
        logits.argmax(dim=-1).tolist()
        logits.topk(2).values.tolist()

    def verify_step(parents: list[int]):
        n = len(parents) + 1
        logits, _ = verifying.forward([token] * n, keep=n, parents=parents)
        logits.argmax(dim=-1).tolist()
        logits[:1].topk(2).values.tolist()
        verifying.roll_back(n, [0])

    def drafting(topk: int, steps: int) -> EagleDraft:
        method = EagleDraft(drafter, steps, topk)
        method.start(prompt_ids, Sampler(0.0, 0))
        method.draft([*prompt_ids[1:], token], states)
        return method

    def nothing():
        pass

    def forget_plain():
        plain.roll_back(1, [])

    def target_first():  # a draft follows a pass of the target, which has the drafter's weights out of the CPU's caches: the first level takes four times as long as without
        plain_step()
        forget_plain()

    jobs = {"plain": (nothing, plain_step, forget_plain)}  # before, what is measured, after
    for setting in settings:
        shape = "chain" if setting.topk == 1 else "tree"
        parents = [
            i - 1 if shape == "chain" else i // 2 - 1 for i in range(setting.draft_tokens - 1)
        ]
        jobs[shape, setting.draft_tokens] = (
            nothing,
            lambda parents=parents: verify_step(parents),
            lambda: verifying.roll_back(1, []),
        )
    for topk in topks:
        for steps in {1, levels[topk]}:
            method = drafting(topk, steps)
            jobs["draft", topk, steps] = (
                target_first,
                lambda method=method: method.draft([token, token], states[:2]),
                lambda method=method: method.cache.truncate(len(prompt_ids)),
            )
    seconds = {name: [] for name in jobs}
    with plain, verifying, Progress(ROUNDS, "rounds") as progress:
        for _ in range(ROUNDS):
            for name, (before, job, after) in jobs.items():
                for again in range(IN_A_ROW):
                    before()
                    start = time.perf_counter()
                    job()
                    elapsed_s = time.perf_counter() - start
                    after()
                    if again:
                        seconds[name].append(elapsed_s)
            progress.update(samples=1, note=str(model.dtype).removeprefix("torch."))
    quartiles = {name: np.quantile(found, [0.25, 0.5, 0.75]) for name, found in seconds.items()}
    median = {name: float(q[1]) for name, q in quartiles.items()}
    return {
        "plain_step_s": median["plain"],
        "verify_step_s": {
            shape: {str(name[1]): s for name, s in median.items() if name[0] == shape}
            for shape in ("chain", "tree")
        },
        "first_level_s": {str(topk): median["draft", topk, 1] for topk in topks},
        "level_s": {
            str(topk): max(median["draft", topk, levels[topk]] - median["draft", topk, 1], 0.0)
            / max(levels[topk] - 1, 1)
            for topk in topks
        },
        "spread": max(float((q[2] - q[0]) / q[1]) for q in quartiles.values()),
        "rounds": ROUNDS,
        "context_tok": len(prompt_ids),
    }


def step_seconds(setting: Setting, cost: dict) -> float:
    """Seconds of drafting and verifying once, from what `costs` measured."""
    verify = cost["verify_step_s"]["chain" if setting.topk == 1 else "tree"][
        str(setting.draft_tokens)
    ]
    return (
        cost["first_level_s"][str(setting.topk)]
        + (setting.steps - 1) * cost["level_s"][str(setting.topk)]
        + verify
    )


def predict(counts: dict[Setting, list[tuple[int, int]]], cost: dict, seed: int) -> pd.DataFrame:
    """A row a setting: steps, topk, draft_tokens, verify_steps, accepted, acceptance_length (bonus token included), step_s and the predicted speed-up, low and high.

    counts: (verify steps, accepted) of each prompt. The interval is that of the prompts; the seconds count as exact.
    """
    rows = []
    for setting, found in counts.items():
        steps, accepted = np.array(found).T
        step_s = step_seconds(setting, cost)
        ratio = ratio_interval((steps + accepted) * cost["plain_step_s"], steps * step_s, seed)
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
    """Speed of speculative against plain decoding without the prefill, for as many tokens; with its interval over prompts."""
    given = [
        sum(len(step.accepted) + (step.bonus is not None) for step in trace.steps)
        for trace in speculative
    ]  # the last step whole
    wanted = [
        (trace.seconds - trace.prefill_s) / max(len(trace.tokens) - 1, 1) * n
        for trace, n in zip(plain, given)
    ]
    return ratio_interval(
        wanted, [trace.draft_s + trace.verify_s for trace in speculative], seed
    ).as_dict()


def model_speed(
    config: Config, target: Target, drafter: Drafter, prompts: list[Prompt], acceptance: Acceptance
) -> dict:
    """Predict every setting of the grid for the first `baseline_prompts` prompts in float32 and bfloat16, and hold it against decoding.

    The profile's own setting was decoded by `measure`; the best one and the best tree are decoded here, in bfloat16, beside plain decoding. Writes speed.json into
    the run's acceptance folder: "settings", and for each of "dtypes" what things cost, the whole "grid", "best" by prediction, and what was "measured".
    """
    torch.set_num_threads(config.threads)
    drafter, settings, chosen = (
        drafter.to(config.device).eval(),
        grid(config),
        prompts[: config.baseline_prompts],
    )
    own = Setting(config.speculative_num_steps, config.speculative_eagle_topk, config.verified_tok)
    typical = sorted(chosen, key=lambda p: len(p.input_ids))[len(chosen) // 2]
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
    counts: dict[Setting, list[tuple[int, int]]] = {setting: [] for setting in settings}
    for dtype in DTYPES:
        model = load_model(target, getattr(torch, dtype), config.device)
        if dtype == "float32":
            with Progress(len(chosen), "texts replayed") as progress:
                for prompt, plain in zip(chosen, acceptance.traces[dtype][PLAIN]):
                    for setting, found in replay(
                        model, drafter, prompt.input_ids, plain.tokens, settings
                    ).items():
                        counts[setting].append(found)
                    progress.update(samples=1)
        cost = costs(model, drafter, typical.input_ids, settings)
        table = predict(counts, cost, config.seed)
        ranked = [
            _setting(row)
            for row in table.sort_values("predicted", ascending=False).to_dict("records")
        ]
        best, tree = ranked[0], next((setting for setting in ranked if setting.topk > 1), None)
        names = {
            setting: " and ".join(
                name
                for name, it in (("the profile's", own), ("best", best), ("best tree", tree))
                if it == setting
            )
            for setting in (own, best, tree)
            if setting
        }
        decoded = {}
        if config.temperature == 0 and acceptance.traces[dtype][DRAFTER]:
            decoded[own] = tuple(
                acceptance.traces[dtype][name][: len(chosen)] for name in (PLAIN, DRAFTER)
            )
        if dtype == "bfloat16":
            made = {PLAIN: lambda prompt, n_tok, model=model: greedy_decode(model, prompt, n_tok)}
            for setting in (setting for setting in names if setting not in decoded):
                method = EagleDraft(drafter, setting.steps, setting.topk, setting.draft_tokens)
                made[setting] = lambda prompt, n_tok, model=model, method=method: (
                    speculative_decode(model, method, prompt, n_tok)
                )
            traces = decode_all(made, chosen, config, "bfloat16, best settings")
            decoded |= {setting: (traces[PLAIN], traces[setting]) for setting in list(made)[1:]}
        measured = [
            _against(table, setting, names[setting], *pair, config.seed)
            for setting, pair in decoded.items()
        ]
        record["dtypes"][dtype] = {
            "costs": cost,
            "best": next(row for row in table.to_dict("records") if _setting(row) == best),
            "measured": measured,
            "grid": table.to_dict("records"),
        }
    write_json(config.acceptance_dir / "speed.json", record)
    return record


def _setting(row: dict) -> Setting:
    return Setting(row["steps"], row["topk"], row["draft_tokens"])


def _against(
    table: pd.DataFrame,
    setting: Setting,
    what: str,
    plain: list[Trace],
    speculative: list[Trace],
    seed: int,
) -> dict:
    """A setting predicted and measured: counts, acceptance lengths (bonus token included), speed-ups without the prefill and with it."""
    row = next(row for row in table.to_dict("records") if _setting(row) == setting)
    steps, accepted = (
        sum(len(trace.steps) for trace in speculative),
        sum(len(step.accepted) for trace in speculative for step in trace.steps),
    )
    return asdict(setting) | {
        "what": what,
        "prompts": len(speculative),
        "verify_steps": steps,
        "accepted": accepted,
        "acceptance_length": 1 + accepted / max(steps, 1),
        "predicted_acceptance_length": row["acceptance_length"],
        "predicted": row["predicted"],
        "measured": decoding_ratio(plain, speculative, seed),
        "with_prefill": ratio_interval(
            [t.seconds * len(s.tokens) / len(t.tokens) for t, s in zip(plain, speculative)],
            [s.seconds for s in speculative],
            seed,
        ).as_dict(),
    }


def verdict(record: dict) -> str:
    """speed.json in plain words: serve it or not, with which setting, how fast and how sure. The answer is bfloat16's, in which targets are served."""
    lines, answers = [], []
    for dtype, found in record["dtypes"].items():
        best = next(
            (row for row in found["measured"] if "best" in row["what"].split(" and ")), None
        )
        own = next(
            (row for row in found["measured"] if row["what"].startswith("the profile's")), None
        )
        name = f"with {_setting(found['best'])}, the best of {len(found['grid'])} settings by prediction ({found['best']['predicted']:.2f})"
        if best is None:
            said = name
        else:
            answers.append(answer(best["measured"]))
            said = f"{answers[-1]}: {_times(best['measured'])}, {name}"
        lines.append(
            f"{dtype}: {said}"
            + (
                ""
                if own is best or own is None
                else f"; the profile's own setting {_times(own['measured'])} (predicted {own['predicted']:.2f})"
            )
        )
        if found["costs"]["spread"] > BUSY:
            lines.append(
                f"  its seconds scattered by {found['costs']['spread']:.0%} between rounds: a busy machine, so measure again before a prediction is used"
            )
    return "\n".join(
        [
            f"{answers[-1]} in {list(record['dtypes'])[-1]}, says the speed model of this machine ({record['settings']['prompts']} prompts, our own decoder, prefill left out)",
            *lines,
        ]
    )


def _times(ratio: dict) -> str:
    return f"{ratio['value']:.2f} times plain decoding" + (
        "" if ratio["low"] is None else f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    )


def cost_table(record: dict) -> pd.DataFrame:
    """Milliseconds of each part of a step, a column a dtype; from speed.json."""
    columns = {}
    for dtype, found in record["dtypes"].items():
        cost = found["costs"]
        column = columns[dtype] = {"plain step": cost["plain_step_s"]}
        column |= {f"first draft level, top-k {k}": s for k, s in cost["first_level_s"].items()} | {
            f"each further one, top-k {k}": s for k, s in cost["level_s"].items()
        }
        column |= {
            f"verify step, {shape} of {n} tokens": s
            for shape in ("chain", "tree")
            for n, s in cost["verify_step_s"][shape].items()
        }
    return 1000 * pd.DataFrame(columns)
