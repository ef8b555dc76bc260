"""Is the drafter worth serving? The answer in one sentence, from the numbers of a run's headline."""

from dataclasses import dataclass

DECODING = (
    "target",
    "eval_set",
    "prompt_set",
    "decode_new_tok",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_use_rejection_sampling",
    "temperature",
)
MACHINE = ("device", "threads", "machine", "torch")


@dataclass(frozen=True)
class Measure:
    """A number of the headline in run.json, there as {"value", "low", "high", "prompts"}: the ends of its 95 % interval are None with too few prompts.

    `needs`: the settings and conditions that have to be the same in two runs for the difference of their numbers to say something about the drafters.
    """

    key: str
    label: str
    note: str
    needs: tuple[str, ...]


MEASURES = (
    Measure(
        "acceptance_length",
        "Acceptance length",
        "tokens per verify step, bonus token included",
        DECODING,
    ),
    Measure(
        "prompt_lookup",
        "Without a drafter",
        "acceptance length of prompt-lookup n-grams, which cost nothing, over the same texts",
        DECODING,
    ),
    Measure(
        "offline_estimate",
        "Offline estimate",
        "acceptance length from stored states",
        ("target", "prompt_set", "max_length", "speculative_num_steps"),
    ),
    Measure("served", "Served", "acceptance length that the server itself reports", DECODING),
    Measure(
        "served_throughput",
        "Served throughput",
        "times the tokens per second of the same server without a drafter, at the fewest requests at a time",
        DECODING + MACHINE,
    ),
    Measure(
        "served_speed_ratio",
        "Served speed ratio",
        "times the same server without a drafter, one request at a time, prefill left out",
        DECODING + MACHINE,
    ),
    Measure(
        "speed_ratio",
        "Speed ratio",
        "times plain greedy decoding by the same code, float32",
        DECODING + MACHINE,
    ),
    Measure(
        "speed_ratio_bfloat16",
        "Speed ratio in bfloat16",
        "times plain greedy decoding by the same code, bfloat16",
        DECODING + MACHINE,
    ),
)


def answer(ratio: dict, drawn: str = "prompts") -> str:
    """The answer that a speed ratio and its interval give; `drawn`: what the interval is over."""
    if ratio.get("low") is None:
        return f"Too few {drawn} for an answer"
    return (
        "Serve it"
        if ratio["low"] > 1
        else "Don't serve it"
        if ratio["high"] < 1
        else "No clear gain"
    )


def verdict(headline: dict) -> str:
    """The answer in one sentence, from the speed that is most like serving of those that were measured, and from the identity of the output in float32.

    In this order: throughput of the server with and without the drafter, its speed one request at a time in bfloat16, our own decoder's in bfloat16, in float32.
    """
    said, numbers = _speed(headline)
    if not said:
        return "No speed was measured in this run."
    if headline.get("identical_float32") is False:
        return f"Don't serve it: its output is not the target's own greedy output ({numbers})."
    return f"{said}: {numbers}."


def _speed(headline: dict) -> tuple[str, str]:
    """The answer that the most serving-like speed gives, and that speed in words; ("", "") without one."""
    blocks = {m.key: headline.get(m.key) or {} for m in MEASURES}
    throughput, single, half, full = (
        blocks[key] if blocks[key].get("value") is not None else None
        for key in (
            "served_throughput",
            "served_speed_ratio",
            "speed_ratio_bfloat16",
            "speed_ratio",
        )
    )
    if throughput:
        first, *more = throughput["at"]
        at = [
            f"{first['value']:.2f} times the tokens per second of the same server without it, at {_requests(first)}{comma_interval(first)}",
            *(f"{row['value']:.2f} at {row['parallel']}{comma_interval(row)}" for row in more),
        ]
        return (
            answer_at(throughput["at"]),
            f"{'; '.join(at)}; served in {throughput['dtype']}, {throughput['prompts']} prompts, {throughput['rounds']} rounds",
        )
    dtype = single and (single.get("dtype") or blocks["served"].get("dtype"))  # of older runs
    if single and dtype == "bfloat16":
        return (
            answer(single),
            f"{single['value']:.2f} times the speed of the same server without it, one request at a time, prefill left out, served in bfloat16{comma_interval(single)}{_prompts(single)}",
        )
    if not (half or full):
        return "", ""
    first, dtype = (half, "bfloat16") if half else (full, "float32")
    numbers = f"{first['value']:.2f} times the speed of plain greedy decoding by our own decoder in {dtype}, prefill included{comma_interval(first)}{_prompts(first)}"
    if half and full:
        said = answer(full)
        numbers += f"; in float32, {said[0].lower()}{said[1:]}: {full['value']:.2f} times{comma_interval(full)}{_prompts(full)}"
    return answer(first), numbers


def answer_at(ratios: list[dict]) -> str:
    """The answer of throughputs at several numbers of requests at a time: the common one, or where the drafter is worth serving and what it is elsewhere."""
    said = [answer(ratio, "rounds") for ratio in ratios]
    if len({*said}) == 1:
        return said[0]
    parts = [
        f"{word} at {_requests(*(ratio for ratio, mine in zip(ratios, said) if mine == word))}"
        for word in dict.fromkeys(said)
    ]
    return ", ".join([parts[0], *(part[0].lower() + part[1:] for part in parts[1:])])


def _requests(*ratios: dict) -> str:
    """1 and 4 requests at a time."""
    numbers = [str(ratio["parallel"]) for ratio in ratios]
    return f"{' and '.join(filter(None, (', '.join(numbers[:-1]), numbers[-1])))} request{'s' if numbers != ['1'] else ''} at a time"


def _prompts(block: dict) -> str:
    return f", {block['prompts']} prompts" if "prompts" in block else ""


def interval(block: dict) -> str:
    """95 % interval 1.81 to 2.05; '' without one."""
    return (
        ""
        if block.get("low") is None
        else f"95 % interval {block['low']:.2f} to {block['high']:.2f}"
    )


def comma_interval(block: dict) -> str:
    return f", {interval(block)}" if interval(block) else ""
