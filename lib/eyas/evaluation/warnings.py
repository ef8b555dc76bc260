"""Reasons to doubt an acceptance length, as sentences that stand beside it wherever it is shown.

- The text loops: a looping text is easy to draft.
- Too few verify steps begin at something new to judge by.
- No draft token was ever accepted: a part of the drafter is missing, not merely weak.
- Texts are longer than the drafter's positions.

Each works with any number of prompts: none needs an interval.
"""

LOOPING = 0.5  # share of repeated bigrams from which a text counts as looping
FEWEST_FRESH = 20  # fresh verify steps below which nothing can be said of them
SMALLEST_FRESH_SHARE = 0.2  # of all verify steps
NEVER_ACCEPTED = (
    "no draft token was accepted at all, the acceptance length is exactly 1.0: a weak drafter"
    " accepts a few, so a part is missing or wrong (docs/symptoms.md, Acceptance is exactly 1.0)"
)


def warnings_of(record: dict) -> list[str]:
    """Return the reasons to doubt the figure of acceptance.json, as sentences."""
    counts = record.get("counts") or {}
    never = never_accepted_warning(counts.get("drafted", 0), counts.get("accepted", 0))
    repeated = (record.get("repeats") or {}).get("warning")  # older records do not have it
    beyond = record.get("beyond_positions")  # nor this
    return [warning for warning in (never, beyond, repeated) if warning]


def looping_warning(repeated: int, bigrams: int, fresh_steps: int, steps: int, length: str) -> str:
    """Return a warning where the decoded text repeats itself, or an empty string.

    repeated, bigrams: bigrams of the output that occurred earlier, and all. fresh_steps, steps:
    verify steps that begin at no repeated bigram, and all. length: the acceptance length at the
    fresh ones with its interval, in words.
    """
    share = repeated / bigrams if bigrams else 0.0
    few = fresh_steps < FEWEST_FRESH or fresh_steps < SMALLEST_FRESH_SHARE * steps
    if share < LOOPING:
        return ""
    text = (
        f"the text loops: {share:.0%} of its bigrams occurred earlier, and a looping text is easy"
        f" to draft; at the {fresh_steps} of {steps} verify steps that begin at no repeated bigram"
        f" the acceptance length is {length}"
    )
    return f"{text}; these steps are too few to judge by" if few else text


def few_steps_warning(fresh_steps: int, steps: int) -> str:
    """Return a warning where too few verify steps begin at something new, or an empty string."""
    if fresh_steps >= FEWEST_FRESH:
        return ""
    return (
        f"only {fresh_steps} of {steps} verify steps begin at no repeated bigram, too few to judge"
        " by (-p decode_prompts N decodes more prompts)"
    )


def never_accepted_warning(proposed: int, accepted: int) -> str:
    """Return a warning where drafts were proposed and none was accepted, or an empty string."""
    return NEVER_ACCEPTED if proposed and not accepted else ""


def position_warning(longest_tok: int, max_position_embeddings: int) -> str:
    """Return a warning where a text is longer than the drafter's positions, or an empty string."""
    if longest_tok <= max_position_embeddings:
        return ""
    return (
        f"the longest text has {longest_tok:,} tokens, and the drafter's positions end at"
        f" {max_position_embeddings:,} (max_position_embeddings): what lies beyond was not trained"
    )
