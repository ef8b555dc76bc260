"""Counts of a study that nobody ran."""

import pandas as pd


def made_counts(*rows) -> pd.DataFrame:
    """(name, seed, accepted of each sample, verify steps of each sample)"""
    frames = []
    for name, seed, accepted, steps in rows:
        ids = [f"s{i:02d}" for i in range(len(accepted))]
        frames.append(
            pd.DataFrame(
                {
                    "name": name,
                    "seed": seed,
                    "id": ids,
                    "accepted": accepted,
                    "verify_steps": steps,
                    "reached_1": steps,
                    "accepted_1": accepted,
                }
            ).sample(frac=1, random_state=seed)
        )
    return pd.concat(frames, ignore_index=True)


class FakeStore:
    manifest = {"hidden_size": 64, "dtype": "bfloat16"}
