"""Count what the server accepted as our decoding counts, prompt by prompt."""

import numpy as np
import pandas as pd

from eyas.config import Config
from eyas.errors import EyasError
from eyas.evaluation.acceptance import Prompt, position_counts
from eyas.evaluation.served_client import Answer
from eyas.prompts.chat_template import repeated_bigrams


def count(answer: Answer, steps: int, max_new_tok: int) -> dict[str, int]:
    """Return our counts of the server's verify steps in the first `max_new_tok` tokens.

    The result has "tok", "verify_steps", "accepted", and the counts of each position; the head of
    eyas.evaluation.served says how they differ from SGLang's.
    `steps`: draft tokens of a verify step. The depth of a tree's step is unknown, so all `steps`
    levels count as proposed.
    Raise EyasError if the verify steps do not make up the text.
    """
    ids = answer.output_ids
    accepted_left = iter(answer.accepted)
    n_tok = 1  # the first token is the prefill's
    drafted = []
    accepted = []
    while n_tok < max_new_tok and ids[n_tok - 1] != answer.end_id:
        n = next(accepted_left, None)
        if n is None or (n_tok + n >= len(ids) and ids[-1] != answer.end_id):
            raise EyasError(
                f"verify steps {answer.accepted} for {len(ids)} tokens",
                "steps that give all of them but the first",
                "look into the server's log",
            )
        step_ids = ids[n_tok : n_tok + n + 1]
        # A text that ends at a draft token hides what the server accepted behind that token.
        ends_at_draft = step_ids[-1] == answer.end_id and len(step_ids) <= n
        accepted.append(len(step_ids) if ends_at_draft else n)
        drafted.append(len(step_ids) if ends_at_draft else steps)
        n_tok += len(step_ids)
    by_position = position_counts(
        np.array(drafted, dtype=np.int64), np.array(accepted, dtype=np.int64), steps
    )
    return {
        "tok": min(n_tok, max_new_tok),
        "verify_steps": len(accepted),
        "accepted": sum(accepted),
    } | by_position


def compare_prompts(
    config: Config,
    prompts: list[Prompt],
    answers: list[Answer],
    ours: pd.DataFrame,
    texts: list[list[int]] | None,
) -> pd.DataFrame:
    """Return one row a prompt with the server's counts, and ours beside them as `ours_*`.

    `same_counts` says whether all of them are equal. `identical` says whether the text equals that
    of the server without a drafter (`texts`), and is None where that was not asked.
    """
    steps = config.speculative_num_steps
    positions = [f"accepted_{i}" for i in range(1, steps + 1)]
    compared = ["tok", "verify_steps", "accepted", *positions]
    rows = []
    for n, (prompt, answer) in enumerate(zip(prompts, answers)):
        our_counts = ours.iloc[n]
        counts = count(answer, steps, config.decode_new_tok)
        repeated, bigrams = repeated_bigrams(answer.output_ids[: counts["tok"]])
        rows.append(
            {
                "id": prompt.id,
                "category": prompt.category,
                "prompt_tok": len(prompt.input_ids),
                "server_prompt_tok": answer.prompt_tok,
                **counts,
                "bigrams": bigrams,
                "repeated_bigrams": repeated,
                **{f"ours_{name}": int(our_counts[name]) for name in compared},
                "same_counts": all(counts[name] == our_counts[name] for name in compared),
                "identical": None if texts is None else answer.output_ids == texts[n],
            }
        )
    return pd.DataFrame(rows)


def agree(comparison: dict) -> bool | None:
    """Return whether server and our decoding agree; None where an interval is missing.

    They agree if each value lies in the other's interval and the interval of the paired
    difference contains 0.
    """
    server = comparison["server"]
    ours = comparison["ours"]
    difference = comparison["difference"]
    if None in (server["low"], ours["low"], difference["low"]):
        return None
    return (
        server["low"] <= ours["value"] <= server["high"]
        and ours["low"] <= server["value"] <= ours["high"]
        and difference["low"] <= 0 <= difference["high"]
    )
