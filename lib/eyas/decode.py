"""Real greedy chain speculative decoding, and what it accepts: the answer to "is this drafter worth serving?".

    python -m eyas decode --profile smoke        # about a minute on 2 cores, after `train`

The order is EAGLE's: the target prefills the prompt and gives the first token; the drafter runs over all committed slots with the
target's true states, then drafts by feeding back its own output; one verify pass of the target over [last token, drafts] accepts the
longest prefix of the drafts that equals its own argmax and adds one token of its own (the *bonus* token); the drafter then runs over
the accepted slots with true states. Both keep KV caches and both caches are rolled back to what was committed.

Counts (per prompt; every ratio and interval is made from them, last, in `summarise`):
  verify steps    passes of the target over drafts; the prefill is not one
  proposed[i]     verify steps that carried a draft at position i (1 is the first after the last token) which the output could use:
                  a draft behind an accepted end-of-text token is not counted, nothing could follow there
  reached[i]      of those, the steps in which every draft before i was accepted
  accepted[i]     of those, the steps in which draft i was accepted too
`accepted / proposed` is the unconditional acceptance of a position, `accepted / reached` the conditional one.
Acceptance length = (accepted + verify steps) / verify steps: it counts the bonus token, so 1.0 means that nothing was accepted.
Only the output is cut at `max_new_tok`; the last verify step is counted whole, as the server counts it.
"""

import math
import time
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch

from eyas.config import Config
from eyas.drafter import DraftCache, Drafter
from eyas.errors import EyasError
from eyas.files import write_atomic, write_json
from eyas.intervals import interval_text, ratio_interval
from eyas.progress import Progress
from eyas.prompts import PromptSet, Sample, encode, repeated_bigrams
from eyas.target import Target


@dataclass
class Trace:
    """One decoded prompt. `top2` are the target's two largest logits where it chose each token: what a tie is judged by."""

    tokens: list[int]
    top2: list[tuple[float, float]]
    seconds: float = 0.0  # prefill included
    drafted: list[int] = field(default_factory=list)  # a verify step: drafts that count (see the module's head)
    accepted: list[int] = field(default_factory=list)  # a verify step: leading drafts equal to the target's argmax


class TargetStream:
    """A Hugging Face causal LM with its KV cache; `forward` also gives the residual streams at the boundaries asked for."""

    def __init__(self, model, boundaries: tuple[int, ...]):
        from transformers import DynamicCache

        self.model, self.boundaries = model, boundaries
        self.cache = DynamicCache(config=model.config)
        self.cache.activate_past_recording()  # lets sliding-window layers be rolled back
        self._states: dict[int, torch.Tensor] = {}
        body = model.get_decoder()
        # What enters block b is boundary b; what enters the final norm is boundary N.
        modules = [*body.layers, body.norm]
        self._hooks = [modules[b].register_forward_pre_hook(self._keep(b), with_kwargs=True) for b in boundaries]

    def _keep(self, boundary: int):
        def hook(_, args, kwargs):
            self._states[boundary] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    def forward(self, token_ids: list[int], keep: int) -> tuple[list[int], list[tuple[float, float]], torch.Tensor | None]:
        """Feed tokens after those in the cache.

        Gives, for the last `keep` of them, the argmax and the two largest logits; and the states of all of them, boundaries
        concatenated in ascending order, [n, B*H] (None without boundaries).
        """
        ids = torch.tensor([token_ids], device=self.model.device)
        logits = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=keep).logits[0]  # [keep, V]
        top2 = [tuple(pair) for pair in logits.topk(2).values.float().tolist()]
        states = torch.cat([self._states[b] for b in self.boundaries], dim=-1) if self.boundaries else None  # [n, B*H]
        return logits.argmax(dim=-1).tolist(), top2, states

    def roll_back(self, n_tok: int) -> None:
        """Forget the last n tokens."""
        self.cache.crop(-n_tok)

    def __enter__(self) -> "TargetStream":
        return self

    def __exit__(self, *_) -> None:
        for hook in self._hooks:
            hook.remove()


def end_ids(model) -> set[int]:
    """The token ids that end a response, as the model's own generation settings say."""
    for config in (model.generation_config, model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return {eos} if isinstance(eos, int) else set(eos)
    return set()


@torch.inference_mode()
def greedy_decode(model, prompt_ids: list[int], max_new_tok: int) -> Trace:
    """Plain greedy decoding, one token a pass, through the same `TargetStream`: what speculative decoding is measured against."""
    ends = end_ids(model)
    start = time.perf_counter()
    with TargetStream(model, ()) as target:
        (token,), top2, _ = target.forward(prompt_ids, keep=1)
        trace = Trace([token], top2)
        while len(trace.tokens) < max_new_tok and token not in ends:
            (token,), top2, _ = target.forward([token], keep=1)
            trace.tokens.append(token)
            trace.top2 += top2
    trace.seconds = time.perf_counter() - start
    return trace


@torch.inference_mode()
def speculative_decode(model, drafter: Drafter, prompt_ids: list[int], max_new_tok: int, draft_length: int) -> Trace:
    """Chain speculative decoding with `draft_length` drafts before each verify pass; gives what `greedy_decode` gives, and the counts."""
    ends = end_ids(model)
    start = time.perf_counter()
    with TargetStream(model, drafter.config.boundaries) as target:
        cache = DraftCache()
        (token,), top2, states = target.forward(prompt_ids, keep=1)
        trace = Trace([token], top2)
        fresh = [*prompt_ids[1:], token]  # token j+1 of every committed slot j that the drafter has not seen with its true state
        while len(trace.tokens) < max_new_tok and trace.tokens[-1] not in ends:
            drafts = _draft(drafter, cache, fresh, states, draft_length)
            choices, top2, states = target.forward([trace.tokens[-1], *drafts], keep=draft_length + 1)
            accepted = next((i for i, draft in enumerate(drafts) if draft != choices[i]), draft_length)
            drafted = draft_length
            run = choices[: accepted + 1]  # the accepted drafts, which equal the target's choices, and the bonus token
            end = next((i for i, choice in enumerate(run) if choice in ends), accepted)  # index of the last token that is kept
            if end < accepted:  # the text ends inside the accepted run: no bonus token, and what was drafted behind the end is not counted
                accepted = drafted = end + 1
            trace.drafted.append(drafted)
            trace.accepted.append(accepted)
            trace.tokens += run[: end + 1]
            trace.top2 += top2[: end + 1]
            fresh, states = run, states[: len(run)]  # states of the last token and of the accepted drafts
            target.roll_back(draft_length + 1 - len(run))
    trace.tokens, trace.top2 = trace.tokens[:max_new_tok], trace.top2[:max_new_tok]
    trace.seconds = time.perf_counter() - start
    return trace


def _draft(drafter: Drafter, cache: DraftCache, tokens: list[int], states: torch.Tensor, n_drafts: int) -> list[int]:
    """Run the drafter over new committed slots (token j+1, state j), then draft by feeding back its own output; the cache keeps only the former."""
    device, dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
    out = drafter.extend(torch.tensor(tokens, device=device), drafter.fuse(states.to(device, dtype)), cache)[-1:]  # [1, H]
    committed = cache.length
    drafts = [_draft_token(drafter, out)]
    while len(drafts) < n_drafts:
        out = drafter.extend(torch.tensor(drafts[-1:], device=device), drafter.feed_back(out), cache)  # [1, H]
        drafts.append(_draft_token(drafter, out))
    cache.truncate(committed)
    return drafts


def _draft_token(drafter: Drafter, out: torch.Tensor) -> int:
    """The target id of the most likely draft token."""
    return int(drafter.vocab.ids[int(drafter.logits(out)[0].argmax())])


def response_start(loss_mask: np.ndarray) -> int:
    """Index of the first token of the last assistant turn: the prompt is everything before it, the turn's header included.

    EyasError where the mask is all zero or starts at token 0 (no prompt).
    """
    last = np.flatnonzero(loss_mask)
    if len(last) == 0:
        raise EyasError("a sample without a supervised token", "a loss mask that selects the assistant's tokens")
    before = np.flatnonzero(~loss_mask[: last[-1]])
    if len(before) == 0:
        raise EyasError("a sample that begins with the response", "a prompt before the assistant's turn")
    return int(before[-1]) + 1


def heldout_samples(config: Config, target: Target, prompts: PromptSet) -> list[Sample]:
    """The first `decode_prompts` held-out conversations in the seeded order, encoded: the beginning of what `extract` takes."""
    tokenizer = target.tokenizer()
    return [encode(conversation, tokenizer, config.max_length) for conversation in prompts.select("heldout", config.decode_prompts, config.seed)]


def load_model(target: Target, dtype: torch.dtype, device: str):
    """The target as a Hugging Face causal LM, ready to decode."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # one second; a bar in every report
    return AutoModelForCausalLM.from_pretrained(target.folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()


@dataclass(frozen=True)
class Acceptance:
    """`record` is acceptance.json (counts first, then ratios with intervals), `prompts` the table of counts, one row a prompt."""

    record: dict
    prompts: pd.DataFrame

    def __str__(self) -> str:
        r = self.record
        lines = [
            f"acceptance length {interval_text(r['acceptance_length'])} (bonus token included), {interval_text(r['accepted_per_step'])} accepted drafts a verify step",
            *(f"  position {p['position']}: accepted {interval_text(p['unconditional'])} of all, {interval_text(p['conditional'])} of those reached "
              f"({p['accepted']} of {p['reached']} of {p['proposed']})" for p in r["by_position"]),
            f"speed ratio {interval_text(r['speed_ratio'])} in float32 (plain {r['counts']['greedy_s']:.1f} s, speculative {r['counts']['speculative_s']:.1f} s), "
            f"{interval_text(r['speed_ratio_bfloat16'])} in bfloat16",
            f"repeated bigrams {interval_text(r['repeated_bigrams'])}, target tokens outside the draft vocabulary {interval_text(r['outside_vocab'])}",
        ]
        for dtype, check in r["identical_to_greedy"].items():
            lines.append(f"output identical to greedy ({dtype}): {'yes' if not check['differing'] else 'no'} "
                         f"({check['prompts'] - check['differing']} of {check['prompts']} prompts; {check['ties']} ties, {check['not_ties']} not ties)")
        return "\n".join(lines)


def measure(config: Config, target: Target, drafter: Drafter, samples: list[Sample]) -> Acceptance:
    """Decode each sample's last assistant turn plainly and speculatively, in float32 for the counts and the speed, some again in bfloat16.

    `samples` are encoded conversations; the prompt of each is what comes before its last assistant turn. Plain and
    speculative decoding of a prompt follow each other directly, in alternating order, after one warm-up, so that a busy machine disturbs both.
    Writes acceptance.parquet and, last, acceptance.json into the run's acceptance folder.
    EyasError: no samples; a prompt that does not fit into the context together with its response.
    """
    if not samples:
        raise EyasError("no held-out prompts to decode", "at least one conversation of the held-out topics", "python -m eyas prompts show")
    prompts = [sample.input_ids[: response_start(sample.loss_mask)].tolist() for sample in samples]
    for sample, prompt in zip(samples, prompts):
        room = target.context_tok - config.decode_new_tok - config.draft_length
        if len(prompt) > room:
            raise EyasError(f"the prompt of {sample.id} has {len(prompt)} tokens", f"at most {room}: context, less new tokens and drafts")
    torch.set_num_threads(config.threads)
    traces = _decode_all(config, target, drafter, prompts, torch.float32)
    rows = [_count(config, drafter, sample, prompt, *pair) for sample, prompt, pair in zip(samples, prompts, traces)]
    n_again = min(config.check_bf16_prompts, len(prompts))
    again = _decode_all(config, target, drafter, prompts[:n_again], torch.bfloat16) if n_again else []
    record = summarise(config, target, drafter, pd.DataFrame(rows))
    # Verifying several tokens costs a CPU nearly as much as one in bfloat16 and about twice as much in float32, so both ratios are shown.
    timed = [(plain.seconds, speculative.seconds) for plain, speculative in again if len(plain.tokens) == len(speculative.tokens)]
    record["speed_ratio_bfloat16"] = ratio_interval([t[0] for t in timed], [t[1] for t in timed], config.seed).as_dict()
    record["identical_to_greedy"] = {"float32": _compare(samples, traces), "bfloat16": _compare(samples, again)}
    acceptance = Acceptance(record, pd.DataFrame(rows))
    write_atomic(config.acceptance_dir / "acceptance.parquet", acceptance.prompts.to_parquet)
    write_json(config.acceptance_dir / "acceptance.json", acceptance.record)
    return acceptance


def _decode_all(config: Config, target: Target, drafter: Drafter, prompts: list[list[int]], dtype: torch.dtype) -> list[tuple[Trace, Trace]]:
    """(plain, speculative) of every prompt."""
    model = load_model(target, dtype, config.device)
    drafter = drafter.to(config.device).eval()

    def plain(prompt, n_tok):
        return greedy_decode(model, prompt, n_tok)

    def speculative(prompt, n_tok):
        return speculative_decode(model, drafter, prompt, n_tok, config.draft_length)

    for decode in (plain, speculative):
        decode(prompts[0], 4)
    pairs = []
    with Progress(len(prompts), "prompts") as progress:
        for i, prompt in enumerate(prompts):
            traces = {decode: decode(prompt, config.decode_new_tok) for decode in ((plain, speculative) if i % 2 == 0 else (speculative, plain))}
            pairs.append((traces[plain], traces[speculative]))
            progress.update(samples=1, tok=len(traces[plain].tokens) + len(traces[speculative].tokens), note=str(dtype).removeprefix("torch."))
    return pairs


def _count(config: Config, drafter: Drafter, sample: Sample, prompt: list[int], plain: Trace, speculative: Trace) -> dict:
    """The counts of one prompt; positions count from 1."""
    drafted, accepted = np.array(speculative.drafted, dtype=np.int64), np.array(speculative.accepted, dtype=np.int64)  # [verify steps]
    after_first = torch.tensor(speculative.tokens[1:], dtype=torch.int64)  # the first token comes from the prefill and is never drafted
    repeated, bigrams = repeated_bigrams(speculative.tokens)  # a looping text is easy to draft, so this stands beside every acceptance
    row = {
        "id": sample.id, "category": sample.category, "prompt_tok": len(prompt), "tok": len(speculative.tokens),
        "verify_steps": len(drafted), "drafted": int(drafted.sum()), "accepted": int(accepted.sum()),
        "bigrams": bigrams, "repeated_bigrams": repeated,
        "draftable_tok": len(after_first), "outside_vocab_tok": int((drafter.vocab.to_draft(after_first) < 0).sum()),
        "greedy_s": plain.seconds, "speculative_s": speculative.seconds, "identical": plain.tokens == speculative.tokens,
    }  # fmt: skip
    return row | position_counts(drafted, accepted, config.draft_length)


def position_counts(drafted: np.ndarray, accepted: np.ndarray, draft_length: int) -> dict[str, int]:
    """proposed_i, reached_i and accepted_i of one prompt from its verify steps, [steps] each (see the module's head)."""
    counts = {}
    for i in range(draft_length):
        counts[f"proposed_{i + 1}"] = int((drafted > i).sum())
        counts[f"reached_{i + 1}"] = int(((drafted > i) & (accepted >= i)).sum())
        counts[f"accepted_{i + 1}"] = int((accepted > i).sum())
    return counts


def position_ratios(table: pd.DataFrame, config: Config) -> list[dict]:
    """Counts by position over all rows of the table, and both acceptances with their intervals."""
    return [
        {
            "position": i,
            **{name: int(table[f"{name}_{i}"].sum()) for name in ("proposed", "reached", "accepted")},
            "unconditional": ratio_interval(table[f"accepted_{i}"], table[f"proposed_{i}"], config.seed).as_dict(),
            "conditional": ratio_interval(table[f"accepted_{i}"], table[f"reached_{i}"], config.seed).as_dict(),
        }
        for i in range(1, config.draft_length + 1)
    ]


def bf16_steps(top: float, second: float) -> float:
    """The distance of two logits in steps of bfloat16 (8 significant bits) at the larger one's magnitude."""
    largest = max(abs(top), abs(second))
    return 0.0 if largest == 0 else (top - second) / 2.0 ** (math.floor(math.log2(largest)) - 7)


def _compare(samples: list[Sample], pairs: list[tuple[Trace, Trace]]) -> dict:
    """Where speculative and plain output part, and whether that was a tie.

    Rounding moves each logit by up to half a bfloat16 step, so it can turn a pair around that is at most one step apart; a first difference
    is called a tie when the two largest logits were that close in both decodings. A larger gap is reported as what it is.
    """
    differences = []
    for sample, (plain, speculative) in zip(samples, pairs):
        if plain.tokens == speculative.tokens:
            continue
        at = next(i for i, (a, b) in enumerate(zip(plain.tokens, speculative.tokens)) if a != b)
        gaps = [bf16_steps(*trace.top2[at]) for trace in (plain, speculative)]
        differences.append({"id": sample.id, "at_tok": at, "greedy_gap_bf16_steps": gaps[0], "speculative_gap_bf16_steps": gaps[1], "tie": max(gaps) <= 1})
    ties = sum(d["tie"] for d in differences)
    return {"prompts": len(pairs), "differing": len(differences), "ties": ties, "not_ties": len(differences) - ties, "differences": differences}


def summarise(config: Config, target: Target, drafter: Drafter, prompts: pd.DataFrame) -> dict:
    """What the float32 decodings say: settings, counts, then every ratio with its interval over prompts."""

    def interval(top, bottom) -> dict:
        return ratio_interval(top, bottom, config.seed).as_dict()

    def length(table: pd.DataFrame) -> dict:
        return interval(table["accepted"] + table["verify_steps"], table["verify_steps"])

    counted = [name for name in prompts.columns if name not in ("id", "category")]
    return {
        "settings": {
            "target": target.name, "target_fingerprint": target.fingerprint, "boundaries": list(drafter.config.boundaries),
            "draft_vocab_size": drafter.config.draft_vocab_size, "draft_length": config.draft_length, "max_new_tok": config.decode_new_tok,
            "dtype": "float32", "device": config.device, "threads": config.threads, "seed": config.seed,
            "interval": "95 %, percentile bootstrap over prompts",
        },
        "counts": {"prompts": len(prompts), **{name: prompts[name].sum().item() for name in counted}},
        "acceptance_length": length(prompts),  # bonus token included
        "accepted_per_step": interval(prompts["accepted"], prompts["verify_steps"]),  # without the bonus token
        "by_position": position_ratios(prompts, config),
        "by_category": [
            {"category": category, "prompts": len(table), "verify_steps": int(table["verify_steps"].sum()), "accepted": int(table["accepted"].sum()),
             "acceptance_length": length(table), "repeated_bigrams": interval(table["repeated_bigrams"], table["bigrams"])}
            for category, table in prompts.groupby("category", sort=True)
        ],
        "speed_ratio": interval(prompts["greedy_s"], prompts["speculative_s"]),  # plain seconds / speculative seconds, float32
        "repeated_bigrams": interval(prompts["repeated_bigrams"], prompts["bigrams"]),
        "outside_vocab": interval(prompts["outside_vocab_tok"], prompts["draftable_tok"]),
    }  # fmt: skip
