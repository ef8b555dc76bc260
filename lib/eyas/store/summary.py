"""Write and read the summary of a store: `data_config.json` in its folder."""

from pathlib import Path

from eyas import __version__
from eyas.files import is_sealed, read_json, seal, write_json
from eyas.store.reader import Store


def write_data_config(store: Store, last_run: dict) -> None:
    """Write the summary of a store.

    `last_run` says how it was made, with samples_per_s and tok_per_s.
    """
    write_json(
        store.folder / "data_config.json",
        seal(counted(store) | {"eyas": __version__, "last_run": last_run}),
    )


def counted(store: Store) -> dict:
    """Count what data_config.json says of a store, from its index and its files."""
    done = store.index[store.index["state"] == "extracted"]
    return {
        "total_samples": len(done),
        "total_tokens": int(done["length"].sum()),
        "loss_tokens": int(done["loss_tok"].sum()),
        "bytes": store.n_bytes,
        "errors": int((store.index["state"] == "failed").sum()),
        "boundaries": list(store.boundaries),
        "dtype": store.manifest["dtype"],
        "hidden_size": store.manifest["hidden_size"],
    }


def last_run(store: Path) -> dict:
    """Return what data_config.json says of the last run that wrote to a store.

    Return an empty dict if the file is missing, torn or altered.
    """
    try:
        config = read_json(store / "data_config.json")
    except (ValueError, OSError):
        return {}
    if is_sealed(config) and isinstance(config.get("last_run"), dict):
        return config["last_run"]
    return {}
