"""What the trainer reads samples from: the run's own store, or several, each with a weight. `-p mix more:1.0,code:0.5`

The key of a sample is its id in the run's own store, NAME/id in that of another run. A store of weight w has each of its samples floor(w) times in a
pass, and a share w - floor(w) of them once more; the share moves on from pass to pass, so that after a few of them every sample was seen as often as any other.

What is held out is never trained on, whichever store it is held out in. A training sample is dropped, and counted by the first reason that holds, when
its topic is a held-out one, its id is a held-out one, or its prompt (the ids before its first supervised token) is that of a held-out sample. In a store
made by extract the split is by topic already. Acceptance is measured on the held-out samples of the run's own store alone.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pandas as pd
import torch

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import sha256_json
from eyas.models.target import Head
from eyas.store.reader import COLUMNS, Store, is_begun
from eyas.store.sample import Sample

ASK = "python -m eyas data, for the runs that there are; then -p mix NAME:WEIGHT,NAME:WEIGHT"


class Limited(NamedTuple):
    """How many samples of a split the settings ask for, how many the run's own store was made with, and whether some are left out."""

    asked: int
    stored: int
    cut: bool


class Mixture:
    """Open for reading. `stores`: run name -> Store, the run's own first. `boundaries`: those that all have. `dropped`: reason -> training samples."""

    def __init__(
        self, stores: list[tuple[str, Store, float]], limits: dict[str, int] | None = None
    ):
        """(run name, store, weight) each; `limits`: most samples of a split ("train", "heldout") of the run's own store, as extraction would choose them. EyasError: a weight that is not above 0, a run named twice, states of another target or on another side of the final norm."""
        own, first, _ = stores[0]
        self.stores, self.manifest = {name: store for name, store, _ in stores}, first.manifest
        self._by_prefix = {"" if name == own else name: store for name, store, _ in stores}
        self._weights = {"" if name == own else name: float(weight) for name, _, weight in stores}
        for name, store, weight in stores:
            if not (math.isfinite(weight) and weight > 0):
                raise EyasError(
                    f"mix gives run {name!r} the weight {weight:g}", "a number above 0", ASK
                )
            for what, ours, theirs in (
                (
                    "target",
                    first.manifest["target"]["fingerprint"][:12],
                    store.manifest["target"]["fingerprint"][:12],
                ),
                (
                    "side of the final norm",
                    *(s.manifest.get("last_state", "pre-norm") for s in (first, store)),
                ),
            ):
                if ours != theirs:
                    raise EyasError(
                        f"the store of run {name!r} is of another {what} than that of run {own!r}: {theirs}",
                        ours,
                        f"-p mix without {name!r}",
                    )
        if len(self.stores) < len(stores):
            raise EyasError("mix names a run twice, or the run itself", "each other run once", ASK)
        self.boundaries = tuple(
            sorted(set.intersection(*(set(store.boundaries) for store in self.stores.values())))
        )
        frames = []
        for prefix, store in self._by_prefix.items():
            done = store.index.loc[store.index["state"] == "extracted", list(COLUMNS)]
            frames.append(
                done.assign(
                    key=[f"{prefix}/{id}" if prefix else id for id in done["id"]], own=not prefix
                )
            )
        rows = pd.concat(frames, ignore_index=True)
        reasons = self._reasons(rows)
        self.dropped = {
            reason: sum(found == reason for found in reasons.values())
            for reason in ("topic", "id", "prompt")
        }
        self.limited: dict[str, Limited] = {}
        for split, limit in (limits or {}).items():
            planned = first.index.loc[
                first.index["split"] == split, "id"
            ]  # in the order in which extraction chose them
            left_out = set(planned[limit:])
            self.limited[split] = Limited(limit, len(planned), bool(left_out))
            rows = rows[~(rows["own"] & rows["id"].isin(left_out))]
        self._rows = (
            rows[~rows["key"].isin(reasons.keys()) & ((rows["split"] == "train") | rows["own"])]
            .drop(columns="own")
            .reset_index(drop=True)
        )
        self._categories = dict(zip(self._rows["key"], self._rows["category"]))

    @classmethod
    def open(cls, config: Config, store: Store) -> "Mixture":
        """The run's own store with weight 1, and those that `config.mix` names. EyasError as above and: a weight that is no number, a run without a store."""
        stores = [(config.run_name, store, 1.0)]
        for part in filter(None, (part.strip() for part in config.mix.split(","))):
            name, colon, weight = (piece.strip() for piece in part.partition(":"))
            try:
                weight = float(weight) if colon else 1.0
            except ValueError:
                raise EyasError(
                    f"mix gives run {name!r} the weight {weight!r}", "a number above 0", ASK
                ) from None
            if not name or name in (".", "..") or set(name) & set("/\\\0"):
                raise EyasError(
                    f"mix = {config.mix!r} names a run {name!r}", "the name of a run", ASK
                )
            if not is_begun(config.store_dir_of(name)):
                raise EyasError(
                    f"mix names run {name!r}, which has no store",
                    "runs that were extracted",
                    f"python -m eyas extract -p run_name {name}",
                )
            stores.append((name, Store.open(config.store_dir_of(name)), weight))
        return cls(stores, {"train": config.train_samples, "heldout": config.heldout_samples})

    @property
    def identity(self) -> str:
        """One hash for what there is to learn from: that of the store where it is a single one of weight 1; else of all stores, weights and names of others."""
        if list(self._weights.values()) == [1.0]:
            return self._by_prefix[""].identity
        return sha256_json(
            sorted(
                [prefix, store.identity, self._weights[prefix]]
                for prefix, store in self._by_prefix.items()
            )
        )

    def samples(self, split: str) -> list[str]:
        """Keys of the "train" or "heldout" samples, in the order of mix and index."""
        return list(self.rows(split)["key"])

    def lengths(self, split: str) -> dict[str, int]:
        """key -> tokens."""
        rows = self.rows(split)
        return dict(zip(rows["key"], rows["length"].astype(int)))

    def rows(self, split: str) -> pd.DataFrame:
        """The extracted samples: columns of the index (`eyas.store.reader.COLUMNS`), and `key`."""
        return self._rows[self._rows["split"] == split]

    def category(self, key: str) -> str:
        return self._categories[key]

    def read(self, key: str, boundaries: tuple[int, ...] | None = None) -> Sample:
        """Return a sample as `Store.read`, with its key as id.

        boundaries: None for those that all stores have.
        """
        prefix, _, id = key.rpartition("/")
        wanted = self.boundaries if boundaries is None else boundaries
        return dataclasses.replace(self._by_prefix[prefix].read(id, wanted), id=key)

    def texts(self, keys: list[str]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """As `Store.texts`, store by store."""
        ids: dict[str, list[str]] = {prefix: [] for prefix in self._by_prefix}
        for key in keys:
            prefix, _, id = key.rpartition("/")
            ids[prefix].append(id)
        for prefix, store in self._by_prefix.items():
            for id, input_ids, loss_mask in store.texts(ids[prefix]):
                yield f"{prefix}/{id}" if prefix else id, input_ids, loss_mask

    def head(self) -> Head:
        return self._by_prefix[""].head()

    def epoch_keys(self, keys: Iterable[str], epoch: int, seed: int) -> list[str]:
        """One pass over these keys by their weights, in a seeded order: a function of the arguments and weights alone. A key of a weight above 1 is there more than once."""
        keys, seen = sorted(keys), []
        for prefix, weight in self._weights.items():
            members = [key for key in keys if key.rpartition("/")[0] == prefix]
            seen += members * int(weight)
            extra = (weight - int(weight)) * len(members)  # a pass, on average
            start, end = (math.floor(extra * n + 0.5) for n in (epoch, epoch + 1))
            ring = torch.randperm(
                len(members),
                generator=torch.Generator().manual_seed(int(sha256_json([seed, prefix])[:15], 16)),
            ).tolist()
            seen += [members[ring[n % len(members)]] for n in range(start, end)]
        return shuffled(seen, epoch, seed)

    def _reasons(self, rows: pd.DataFrame) -> dict[str, str]:
        """key -> topic, id or prompt, of the training samples that something held out in any of the stores forbids."""
        out = rows["split"] == "heldout"
        topics, ids = set(rows.loc[out, "topic"]) - {""}, set(rows.loc[out, "id"])
        prompts = {_prompt(*text) for _, *text in self.texts(list(rows.loc[out, "key"]))}
        training = rows[~out]
        reasons = {
            row.key: "topic" if row.topic in topics else "id"
            for row in training.itertuples()
            if row.topic in topics or row.id in ids
        }
        if prompts:
            for key, *text in self.texts([key for key in training["key"] if key not in reasons]):
                if _prompt(*text) in prompts:
                    reasons[key] = "prompt"
        return reasons


def shuffled(keys: Iterable[str], epoch: int, seed: int) -> list[str]:
    """The keys in the order of that epoch, whatever order they come in."""
    keys = sorted(keys)
    return [
        keys[n]
        for n in torch.randperm(
            len(keys), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        ).tolist()
    ]


def _prompt(input_ids: torch.Tensor, loss_mask: torch.Tensor) -> bytes:
    """The ids before the first supervised token. All of them where these are one or none, as in a text that nobody asked for: each of its kind begins alike."""
    at = int(loss_mask.int().argmax())
    return input_ids[: at if at > 1 else len(input_ids)].numpy().tobytes()
