"""Stores in one call, hand-made or random, and their bytes."""

import math
from pathlib import Path

import torch

from eyas.store.reader import Planned, Rows, Store
from eyas.store.writer import StoreWriter


def write_store(
    folder, manifest: dict, head, samples: list[Rows], shard_bytes: int = 2**20
) -> Store:
    writer = StoreWriter(folder, manifest, head, shard_bytes)
    writer.plan([Planned(r.id, r.split, r.category, len(r.input_ids), r.topic) for r in samples])
    for rows in samples:
        writer.add(rows)
    return writer.close()


def write_random_store(
    folder: Path,
    target,
    boundaries=(2, 3, 6),
    n_samples: int = 12,
    bad: str = "",
    empty: str = "",
    seed: int = 0,
    prefix: str = "s",
    topics: dict[str, str] | None = None,
    dtype: str = "bfloat16",
) -> Path:
    manifest = {
        "target": {
            "name": target.name,
            "fingerprint": target.fingerprint,
            "rms_norm_eps": target.rms_norm_eps,
        },
        "boundaries": list(boundaries),
        "dtype": dtype,
        "hidden_size": target.hidden_size,
        "prompts": {"hash": None},
    }
    samples, g = [], torch.Generator().manual_seed(seed)
    for i in range(n_samples):
        length = int(torch.randint(12, 30, (1,), generator=g))
        mask = torch.arange(length) >= length // 2
        states = {
            b: torch.randn(length, target.hidden_size, generator=g).bfloat16() for b in boundaries
        }
        if f"{prefix}{i}" == bad:
            states[boundaries[0]][length // 2, 0] = math.nan
        id = f"{prefix}{i}"
        ids = torch.randint(0, 60, (length,), generator=g)
        samples.append(
            Rows(
                id,
                "heldout" if i % 6 == 5 else "train",
                "chat",
                ids,
                mask & (id != empty),
                states,
                topic=(topics or {}).get(id, ""),
            )
        )
    return write_store(folder, manifest, target.head(), samples).folder


def bytes_of(config) -> dict[str, bytes]:
    return {
        str(p.relative_to(config.store_dir)): p.read_bytes()
        for p in sorted(config.store_dir.rglob("*"))
        if p.is_file() and p.name not in ("data_config.json", "verification.json")
    }
