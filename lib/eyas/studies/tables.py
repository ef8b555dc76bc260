"""Make the tables of notebook 06 from a finished study of layers."""

import pandas as pd

from eyas.studies.boundaries import Study, label


def forward_table(study: Study) -> pd.DataFrame:
    """Return a row for each candidate of the greedy forward selection."""
    columns = ["round", "boundaries", "value", "guide", "asked", "chosen"]
    table = study.forward[columns]
    table = table.assign(boundaries=[label(choice) for choice in table["boundaries"]])
    return table.set_axis(
        [
            "round",
            "boundaries",
            "acceptance length, one seed",
            "probe, R²",
            "put forward by the probe",
            "chosen",
        ],
        axis="columns",
    )


def trainings_text(study: Study) -> str:
    """Return how many trainings there are, how long they took and how many failed."""
    failed = study.runs["state"] != "ok"
    return (
        f"{len(study.runs)} trainings, {study.runs['minutes'].sum():.1f} minutes in all "
        f"(one after the other), {failed.sum()} failed"
    )


def failed_trainings(study: Study) -> pd.DataFrame:
    """Return a row for each training that failed, with its problem and its executed notebook."""
    failed = study.runs[study.runs["state"] != "ok"]
    return failed[["name", "seed", "state", "problem", "notebook"]]


def training_minutes(study: Study) -> pd.DataFrame:
    """Return a row for each training: its state, and how many minutes it took."""
    return study.runs[["name", "seed", "state", "minutes", "training"]]


def pairs_text(study: Study, boundaries: list[int]) -> str:
    """Return how many pairs and single boundaries of the stored ones were trained."""
    sizes = study.table["boundaries"]
    pairs = len(boundaries) * (len(boundaries) - 1) // 2
    return (
        f"{(sizes == 2).sum()} of {pairs} pairs and {(sizes == 1).sum()} of "
        f"{len(boundaries)} single boundaries were trained"
    )
