"""Say whether a drafter is worth serving, from the numbers of a run's headline."""

from dataclasses import dataclass

# Settings and conditions that must be equal before two runs' numbers may be subtracted.
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

SERVE = "Serve it"
DO_NOT_SERVE = "Don't serve it"
NO_CLEAR_GAIN = "No clear gain"
NUMBER_WORDS = {1: "one", 2: "two", 4: "four", 8: "eight", 16: "sixteen"}


@dataclass(frozen=True)
class Measure:
    """Describe one number of run.json's headline: {"value", "low", "high", "prompts"}.

    `low` and `high` are the ends of the 95 % interval; both are None with too few prompts.
    `needs` names the settings and conditions that must be equal in two runs. Only then does the
    difference of their numbers say something about the drafters.
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
        "times the tokens per second of the same server without a drafter, "
        "at the fewest requests at a time",
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


def answer(ratio: dict, unit: str = "prompts") -> str:
    """Return the answer that a speed ratio and its interval give.

    `unit` names what the interval is taken over: prompts or rounds.
    """
    if ratio.get("low") is None:
        return f"Too few {unit} for an answer"
    if ratio["low"] > 1:
        return SERVE
    if ratio["high"] < 1:
        return DO_NOT_SERVE
    return NO_CLEAR_GAIN


def verdict(headline: dict) -> str:
    """Return whether the drafter is worth serving, in words.

    The measured speed that is most like serving decides, in this order:
    1. throughput of the server with and without the drafter,
    2. speed of the server for one request at a time, in bfloat16,
    3. speed of our own decoder in bfloat16, then in float32.
    A drafter whose float32 output is not the target's own is refused at any speed.
    """
    decision, numbers = _deciding_speed(headline)
    if not decision:
        return "No speed was measured in this run."
    if headline.get("identical_float32") is False:
        return f"{DO_NOT_SERVE}: its output is not the target's own greedy output ({numbers})."
    if _measured(headline, "served_throughput"):
        return f"{decision} {numbers}."
    return f"{decision}: {numbers}."


def throughput_answer(ratios: list[dict]) -> str:
    """Return the answer of throughput ratios: one sentence for each group with the same answer.

    A ratio has "value", "low", "high" and "parallel", the number of requests at a time.
    """
    groups: dict[str, list[dict]] = {}
    for ratio in ratios:
        groups.setdefault(answer(ratio, "rounds"), []).append(ratio)
    (first, first_ratios), *others = groups.items()
    sentences = [_opening_sentence(first, first_ratios)]
    sentences += [_following_sentence(decision, group) for decision, group in others]
    return " ".join(sentences)


def interval(block: dict) -> str:
    """Return "95 % interval 1.81 to 2.05", or "" for a number without one."""
    if block.get("low") is None:
        return ""
    return f"95 % interval {block['low']:.2f} to {block['high']:.2f}"


def comma_interval(block: dict) -> str:
    """Return `interval` with a comma before it, or ""."""
    text = interval(block)
    return f", {text}" if text else ""


# ---- the speed that decides


def _deciding_speed(headline: dict) -> tuple[str, str]:
    """Return the answer of the measured speed that is most like serving, and its numbers in words.

    Both are "" where no speed was measured.
    """
    throughput = _measured(headline, "served_throughput")
    if throughput:
        return throughput_answer(throughput["at"]), _throughput_numbers(throughput)
    single = _measured(headline, "served_speed_ratio")
    if single and _served_dtype(headline) == "bfloat16":
        return answer(single), _single_request_numbers(single)
    return _own_decoder_speed(headline)


def _measured(headline: dict, key: str) -> dict | None:
    """Return the block of one measure, or None where it was not measured."""
    block = headline.get(key) or {}
    return block if block.get("value") is not None else None


def _served_dtype(headline: dict) -> str | None:
    """Return the number format of the served speed. Older runs name it beside the acceptance."""
    dtype = headline["served_speed_ratio"].get("dtype")
    return dtype or (headline.get("served") or {}).get("dtype")


def _throughput_numbers(throughput: dict) -> str:
    first, *others = throughput["at"]
    plural = "" if first["parallel"] == 1 else "s"
    numbers = [
        f"{first['value']:.2f} at {first['parallel']} request{plural} at a time"
        f"{comma_interval(first)}"
    ]
    numbers += [f"{row['value']:.2f} at {row['parallel']}{comma_interval(row)}" for row in others]
    return (
        "Tokens per second divided by those of the same server without the drafter: "
        f"{'; '.join(numbers)}; served in {throughput['dtype']}, "
        f"{throughput['prompts']} prompts, {throughput['rounds']} rounds"
    )


def _single_request_numbers(single: dict) -> str:
    return (
        f"{single['value']:.2f} times the speed of the same server without it, "
        "one request at a time, prefill left out, served in bfloat16"
        f"{comma_interval(single)}{_prompts(single)}"
    )


def _own_decoder_speed(headline: dict) -> tuple[str, str]:
    half = _measured(headline, "speed_ratio_bfloat16")
    full = _measured(headline, "speed_ratio")
    if half is None and full is None:
        return "", ""
    deciding = half or full
    dtype = "bfloat16" if half else "float32"
    numbers = (
        f"{deciding['value']:.2f} times the speed of plain greedy decoding by our own decoder "
        f"in {dtype}, prefill included{comma_interval(deciding)}{_prompts(deciding)}"
    )
    if half and full:
        numbers += (
            f"; in float32, {_uncapitalized(answer(full))}: "
            f"{full['value']:.2f} times{comma_interval(full)}{_prompts(full)}"
        )
    return answer(deciding), numbers


# ---- sentences about throughput


def _opening_sentence(decision: str, ratios: list[dict]) -> str:
    """Return the first sentence of the answer, for the numbers of requests that share it."""
    if decision == SERVE:
        return f"With this drafter SGLang is {_times_faster(ratios)}."
    requests = _requests(ratios)
    if decision == DO_NOT_SERVE:
        return f"With this drafter SGLang is slower for {requests}: {_times(ratios)} as fast."
    if decision == NO_CLEAR_GAIN:
        return f"With this drafter there is no clear gain for {requests}."
    return f"{decision} for {requests}."


def _following_sentence(decision: str, ratios: list[dict]) -> str:
    """Return a later sentence of the answer. The first one said what is counted."""
    counts = _joined([_number_word(ratio["parallel"]) for ratio in ratios])
    if decision == SERVE:
        return f"At {counts} it is {_times(ratios)} faster."
    if decision == DO_NOT_SERVE:
        return f"At {counts} it is slower: {_times(ratios)} as fast."
    if decision == NO_CLEAR_GAIN:
        return f"At {counts} there is no clear gain."
    return f"{decision} at {counts}."


def _times_faster(ratios: list[dict]) -> str:
    """Return "1.5× faster for one request at a time and 1.3× for four"."""
    first, *others = ratios
    phrases = [f"{_times([first])} faster for {_requests([first])}"]
    phrases += [f"{_times([row])} for {_number_word(row['parallel'])}" for row in others]
    return _joined(phrases)


def _times(ratios: list[dict]) -> str:
    """Return "1.5× and 1.3×"; two decimals where one would read 1.0."""
    texts = []
    for ratio in ratios:
        text = f"{ratio['value']:.1f}"
        texts.append((f"{ratio['value']:.2f}" if text == "1.0" else text) + "×")
    return _joined(texts)


def _requests(ratios: list[dict]) -> str:
    """Return "one request at a time", or "four and sixteen requests at a time"."""
    counts = [ratio["parallel"] for ratio in ratios]
    noun = "request" if counts == [1] else "requests"
    return f"{_joined([_number_word(count) for count in counts])} {noun} at a time"


def _number_word(count: int) -> str:
    return NUMBER_WORDS.get(count, str(count))


def _joined(words: list[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


def _uncapitalized(text: str) -> str:
    return text[0].lower() + text[1:]


def _prompts(block: dict) -> str:
    return f", {block['prompts']} prompts" if "prompts" in block else ""
