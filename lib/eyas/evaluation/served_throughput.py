"""Read the throughput that benchmarks/serving.py measured with and without the drafter."""

import pandas as pd

from eyas.config import Config
from eyas.files import read_json, sha256_file
from eyas.intervals import interval_text

THROUGHPUT = "throughput.json"  # in the acceptance folder, written by benchmarks/serving.py
COMMAND = ".venv/bin/python benchmarks/serving.py --profile PROFILE"


def throughput_of(config: Config) -> dict:
    """Return what a throughput depends on: the drafter's file and the settings of decoding."""
    path = config.judged.drafter_dir / config.drafter_file
    return {
        "drafter_run": config.judged.run_name,
        "drafter_sha256": sha256_file(path) if path.is_file() else None,
        "speculative_num_steps": config.speculative_num_steps,
        "speculative_eagle_topk": config.speculative_eagle_topk,
        "speculative_num_draft_tokens": config.verified_tok,
        "temperature": config.temperature,
        "device": config.device,
    }


def read_throughput(config: Config) -> tuple[dict | None, str]:
    """Return throughput.json of the acceptance folder, and in words how it was measured.

    The record is None where the file is missing or is of another drafter or of other settings.
    The words then say why, and give the command that measures it.
    """
    path = config.acceptance_dir / THROUGHPUT
    advice = f"next: {COMMAND}, on a quiet machine"
    if not path.is_file():
        reason = "throughput of the server at 1, 4 and 16 requests at a time: not measured"
        return None, f"{reason}; {advice}"
    record = read_json(path)
    settings = record["settings"]
    current = throughput_of(config)
    different = [name for name, value in current.items() if settings.get(name) != value]
    if different:
        names = ", ".join(different)
        reason = f"{THROUGHPUT} is of another drafter or of other settings ({names}): not shown"
        return None, f"{reason}; {advice}"
    scheduler = "with" if record["overlap"] else "without"
    return record, (
        f"{record['prompts']} prompts, at most {settings['max_new_tok']} tokens each, "
        f"{record['ratios'][0]['rounds']} rounds in turns, {settings['dtype']}, "
        f"{settings['device']}, prompts already in the prefix cache, "
        f"both servers {scheduler} SGLang's overlap scheduler; intervals over rounds"
    )


def throughput_table(record: dict | None) -> pd.DataFrame:
    """Return a row for each number of requests at a time; no row without a record."""
    rows = record["ratios"] if record else []
    return pd.DataFrame(
        [
            {
                "requests at a time": row["parallel"],
                "times the tokens per second of the server without a drafter": interval_text(
                    row["ratio"]
                ),
                "acceptance length": row["acceptance_length"],
                "rounds": row["rounds"],
                "tokens": row["plain_tok"] + row["drafting_tok"],
            }
            for row in rows
        ]
    )
