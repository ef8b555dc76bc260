"""A hand-made store in one call."""

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
