"""Read the throughput that benchmarks/serving.py measured with and without the drafter."""

import pandas as pd

from eyas.config import Config
from eyas.files import read_json, sha256_file
from eyas.intervals import interval_text

THROUGHPUT = "throughput.json"  # of the acceptance folder, by benchmarks/serving.py


def throughput_of(config: Config) -> dict:
    """What a throughput stands on, as throughput.json says it: the file of the drafter and the settings that decide the answers and their speed."""
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
    """throughput.json of the acceptance folder, where it is there and of the judged drafter and its draft settings; and in words what it is, or why it is not shown."""
    path, command = (
        config.acceptance_dir / THROUGHPUT,
        ".venv/bin/python benchmarks/serving.py --profile PROFILE",
    )
    if not path.is_file():
        return (
            None,
            f"throughput of the server at 1, 4 and 16 requests at a time: not measured; next: {command}, on a quiet machine",
        )
    record, now = read_json(path), throughput_of(config)
    apart = [name for name, value in now.items() if record["settings"].get(name) != value]
    if apart:
        return (
            None,
            f"{THROUGHPUT} is of another drafter or of other settings ({', '.join(apart)}): not shown; next: {command}, on a quiet machine",
        )
    s = record["settings"]
    return record, (
        f"{record['prompts']} prompts, {s['max_new_tok']} tokens each at most, {record['ratios'][0]['rounds']} rounds in turns, {s['dtype']}, {s['device']}, prompts already in the prefix cache, "
        f"both servers {'with' if record['overlap'] else 'without'} SGLang's overlap scheduler; intervals over rounds"
    )


def throughput_table(record: dict | None) -> pd.DataFrame:
    """A row for each number of requests at a time; none without a record."""
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
