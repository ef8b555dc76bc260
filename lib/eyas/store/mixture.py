"""Give the trainer its samples: from the run's own store, or from several, each with a weight.

    python -m eyas train -p mix more:1.0,code:0.5

- The key of a sample is its id in the run's own store, and NAME/id in the store of another run.
- A store of weight w gives each of its samples floor(w) times an epoch, and a fraction w - floor(w)
  of them once more. The fraction moves on from epoch to epoch, so that after a few of them every
  sample was seen as often as any other.
- What is held out in any store is never trained on. A training sample is dropped, and counted by
  the first reason that holds, if its topic is held out, its id is held out, or its prompt (the ids
  before its first supervised token) is that of a held-out sample. `extract` splits by topic.
- Acceptance is measured on the held-out samples of the run's own store alone.
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
    """Hold how a split of the run's own store is limited.

    asked: samples that the settings ask for. stored: samples of the store. cut: some are left out.
    """

    asked: int
    stored: int
    cut: bool


class Mixture:
    """Read samples from several stores.

    stores: {run name: store}, the run's own first. boundaries: those that all stores have.
    dropped: {reason: number of training samples dropped for it}.
    """

    def __init__(
        self, stores: list[tuple[str, Store, float]], limits: dict[str, int] | None = None
    ):
        """Join stores, each given as (run name, store, weight).

        limits: most samples of a split ("train", "heldout") of the run's own store, chosen as
        extraction would choose them.
        Raise EyasError if a weight is not above 0, if a run is named twice, or if a store holds
        states of another target or on the other side of the final norm.
        """
        own = stores[0][0]
        first = stores[0][1]
        self.manifest = first.manifest
        self.stores = {name: store for name, store, _ in stores}
        self._by_prefix = {"" if name == own else name: store for name, store, _ in stores}
        self._weights = {"" if name == own else name: float(weight) for name, _, weight in stores}
        for name, store, weight in stores:
            _check_fit(own, first, name, store, weight)
        if len(self.stores) < len(stores):
            raise EyasError("mix names a run twice, or the run itself", "each other run once", ASK)
        in_each = [set(store.boundaries) for store in self.stores.values()]
        self.boundaries = tuple(sorted(set.intersection(*in_each)))
        rows = self._extracted_rows()
        reasons = self._reasons(rows)
        self.dropped = {"topic": 0, "id": 0, "prompt": 0}
        for reason in reasons.values():
            self.dropped[reason] += 1
        self.limited: dict[str, Limited] = {}
        for split, limit in (limits or {}).items():
            in_split = first.index["split"] == split
            planned = first.index.loc[in_split, "id"]  # in the order in which extraction chose them
            left_out = set(planned[limit:])
            self.limited[split] = Limited(limit, len(planned), bool(left_out))
            rows = rows[~(rows["own"] & rows["id"].isin(left_out))]
        # Held-out samples of other stores are not used: acceptance is that of the own store.
        usable = (rows["split"] == "train") | rows["own"]
        rows = rows[~rows["key"].isin(reasons.keys()) & usable]
        self._rows = rows.drop(columns="own").reset_index(drop=True)
        self._categories = dict(zip(self._rows["key"], self._rows["category"]))

    def _extracted_rows(self) -> pd.DataFrame:
        """Return the index rows of all extracted samples, with `key` and `own` (of this run)."""
        frames = []
        for prefix, store in self._by_prefix.items():
            done = store.index.loc[store.index["state"] == "extracted", list(COLUMNS)]
            keys = [_key(prefix, id) for id in done["id"]]
            frames.append(done.assign(key=keys, own=not prefix))
        return pd.concat(frames, ignore_index=True)

    @classmethod
    def open(cls, config: Config, store: Store) -> "Mixture":
        """Join the run's own store, with weight 1, and those that `config.mix` names.

        Raise EyasError as above, if a weight is no number, and if a run has no store.
        """
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
        """Return one hash over all that can be learnt from.

        It is the identity of a single store of weight 1, otherwise a hash over all stores, their
        weights and the names of the other runs.
        """
        if list(self._weights.values()) == [1.0]:
            return self._by_prefix[""].identity
        parts = [
            [prefix, store.identity, self._weights[prefix]]
            for prefix, store in self._by_prefix.items()
        ]
        return sha256_json(sorted(parts))

    def samples(self, split: str) -> list[str]:
        """Return the keys of the "train" or "heldout" samples, in the order of mix and index."""
        return list(self.rows(split)["key"])

    def lengths(self, split: str) -> dict[str, int]:
        """Return {key: length in tokens} of a split."""
        rows = self.rows(split)
        return dict(zip(rows["key"], rows["length"].astype(int)))

    def rows(self, split: str) -> pd.DataFrame:
        """Return the samples of a split: the columns `eyas.store.reader.COLUMNS`, and `key`."""
        return self._rows[self._rows["split"] == split]

    def category(self, key: str) -> str:
        """Return the category of a sample."""
        return self._categories[key]

    def read(self, key: str, boundaries: tuple[int, ...] | None = None) -> Sample:
        """Return a sample as `Store.read`, with its key as id.

        boundaries: None for those that all stores have.
        """
        prefix, _, id = key.rpartition("/")
        wanted = self.boundaries if boundaries is None else boundaries
        return dataclasses.replace(self._by_prefix[prefix].read(id, wanted), id=key)

    def texts(self, keys: list[str]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield ids and masks as `Store.texts` does, store by store."""
        ids: dict[str, list[str]] = {prefix: [] for prefix in self._by_prefix}
        for key in keys:
            prefix, _, id = key.rpartition("/")
            ids[prefix].append(id)
        for prefix, store in self._by_prefix.items():
            for id, input_ids, loss_mask in store.texts(ids[prefix]):
                yield _key(prefix, id), input_ids, loss_mask

    def head(self) -> Head:
        """Return the copied norm and head of the run's own store."""
        return self._by_prefix[""].head()

    def epoch_keys(self, keys: Iterable[str], epoch: int, seed: int) -> list[str]:
        """Return the keys of one epoch by the stores' weights, in a seeded order.

        The result depends only on the arguments and the weights. A key of a weight above 1 occurs
        more than once.
        """
        keys = sorted(keys)
        chosen = []
        for prefix, weight in self._weights.items():
            members = [key for key in keys if key.rpartition("/")[0] == prefix]
            chosen += members * int(weight)
            extra = (weight - int(weight)) * len(members)  # an epoch, on average
            start = math.floor(extra * epoch + 0.5)
            end = math.floor(extra * (epoch + 1) + 0.5)
            order = _permutation(len(members), int(sha256_json([seed, prefix])[:15], 16))
            chosen += [members[order[n % len(members)]] for n in range(start, end)]
        return shuffled(chosen, epoch, seed)

    def _reasons(self, rows: pd.DataFrame) -> dict[str, str]:
        """Return {key: reason} of the training samples that are held out somewhere.

        A reason is "topic", "id" or "prompt". `rows` are the extracted samples of all stores.
        """
        is_heldout = rows["split"] == "heldout"
        heldout = rows[is_heldout]
        training = rows[~is_heldout]
        topics = set(heldout["topic"]) - {""}
        ids = set(heldout["id"])
        prompts = {_prompt(*text) for _, *text in self.texts(list(heldout["key"]))}
        reasons = {}
        for row in training.itertuples():
            if row.topic in topics:
                reasons[row.key] = "topic"
            elif row.id in ids:
                reasons[row.key] = "id"
        if prompts:
            for key, *text in self.texts([key for key in training["key"] if key not in reasons]):
                if _prompt(*text) in prompts:
                    reasons[key] = "prompt"
        return reasons


def _check_fit(own: str, first: Store, name: str, store: Store, weight: float) -> None:
    """Raise EyasError if a store or its weight does not fit the run's own store `first`."""
    if not (math.isfinite(weight) and weight > 0):
        raise EyasError(f"mix gives run {name!r} the weight {weight:g}", "a number above 0", ASK)
    for what, of_store in (("target", _target_hash), ("side of the final norm", _last_state)):
        if of_store(first) != of_store(store):
            raise EyasError(
                f"the store of run {name!r} is of another {what}"
                f" than that of run {own!r}: {of_store(store)}",
                of_store(first),
                f"-p mix without {name!r}",
            )


def _target_hash(store: Store) -> str:
    return store.manifest["target"]["fingerprint"][:12]


def _last_state(store: Store) -> str:
    return store.manifest.get("last_state", "pre-norm")


def _key(prefix: str, id: str) -> str:
    """Return the key of a sample; the run's own store has an empty prefix."""
    return f"{prefix}/{id}" if prefix else id


def shuffled(keys: Iterable[str], epoch: int, seed: int) -> list[str]:
    """Return the keys in the order of an epoch, whatever order they are given in."""
    keys = sorted(keys)
    return [keys[n] for n in _permutation(len(keys), seed * 1_000_003 + epoch)]


def _permutation(n: int, seed: int) -> list[int]:
    """Return a seeded permutation of 0 .. n-1."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def _prompt(input_ids: torch.Tensor, loss_mask: torch.Tensor) -> bytes:
    """Return the bytes of the ids before the first supervised token.

    If these are one or none, as in a text without a question, return all ids: such texts begin
    alike.
    """
    first = int(loss_mask.int().argmax())
    n_prompt = first if first > 1 else len(input_ids)
    return input_ids[:n_prompt].numpy().tobytes()
