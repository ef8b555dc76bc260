"""Count what the server accepted as our decoding counts, prompt by prompt."""

import numpy as np
import pandas as pd

from eyas.config import Config
from eyas.errors import EyasError
from eyas.evaluation.acceptance import Prompt, position_counts
from eyas.evaluation.served_client import Answer
from eyas.prompts.chat_template import repeated_bigrams


def count(answer: Answer, steps: int, max_new_tok: int) -> dict[str, int]:
    """Our counts of the server's steps (see the module's head) in the first `max_new_tok` tokens: "tok", "verify_steps", "accepted", and those of each position.

    `steps`: drafts of a verify step. Of a tree, how deep it went is not known: all `steps` levels count as proposed.
    EyasError: the steps do not make up the text.
    """
    at, drafted, accepted = 1, [], []  # the first token is the prefill's
    ids, left = answer.output_ids, iter(answer.accepted)
    while at < max_new_tok and ids[at - 1] != answer.end_id:
        n = next(left, None)
        if n is None or (at + n >= len(ids) and ids[-1] != answer.end_id):
            raise EyasError(
                f"verify steps {answer.accepted} for {len(ids)} tokens",
                "steps that give all of them but the first",
                "look into the server's log",
            )
        inside = ids[at : at + n + 1]
        ended = (
            inside[-1] == answer.end_id and len(inside) <= n
        )  # at a draft: what the server accepted behind it is not seen by anybody
        accepted.append(len(inside) if ended else n)
        drafted.append(len(inside) if ended else steps)
        at += len(inside)
    counts = position_counts(
        np.array(drafted, dtype=np.int64), np.array(accepted, dtype=np.int64), steps
    )
    return {
        "tok": min(at, max_new_tok),
        "verify_steps": len(accepted),
        "accepted": sum(accepted),
    } | counts


def compare_prompts(
    config: Config,
    prompts: list[Prompt],
    answers: list[Answer],
    ours: pd.DataFrame,
    texts: list[list[int]] | None,
) -> pd.DataFrame:
    """A row a prompt: the server's counts, `ours_*` beside them, whether all agree (`same_counts`), and whether its text is that of the server without a drafter."""
    rows = []
    names = [
        "verify_steps",
        "accepted",
        *(f"accepted_{i}" for i in range(1, config.speculative_num_steps + 1)),
    ]
    for n, (prompt, answer, (_, mine)) in enumerate(zip(prompts, answers, ours.iterrows())):
        counts = count(answer, config.speculative_num_steps, config.decode_new_tok)
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
                **{f"ours_{name}": int(mine[name]) for name in ["tok", *names]},
                "same_counts": all(counts[name] == mine[name] for name in ["tok", *names]),
                "identical": None if texts is None else answer.output_ids == texts[n],
            }
        )
    return pd.DataFrame(rows)


def agree(found: dict) -> bool | None:
    """Whether `server` and `ours` lie in each other's interval and that of their paired difference holds 0; None where there is none."""
    server, ours, difference = found["server"], found["ours"], found["difference"]
    if None in (server["low"], ours["low"], difference["low"]):
        return None
    return (
        server["low"] <= ours["value"] <= server["high"]
        and ours["low"] <= server["value"] <= ours["high"]
        and difference["low"] <= 0 <= difference["high"]
    )
