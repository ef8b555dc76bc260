"""The parity certificate of a store: `parity.json` in its folder, made by eyas.parity, asked for by training and shown by reports.

It holds the identity of the data that it was made for, so that one of another store, or of data since changed, is no certificate.
"""

from pathlib import Path

from eyas.errors import EyasError
from eyas.files import read_json, write_json


def certificate_path(store) -> Path:
    return store.folder / "parity.json"


def write_certificate(store, record: dict) -> Path:
    return write_json(certificate_path(store), {"store": store.identity} | record)


def read_certificate(store) -> dict | None:
    """The certificate, or None when there is none for these very data."""
    path = certificate_path(store)
    record = read_json(path) if path.is_file() else None
    return record if record and record.get("store") == store.identity else None


def need_certificate(store, run_name: str) -> dict:
    """The passing certificate of a store. EyasError: none, one of other data, or one that did not pass."""
    record = read_certificate(store)
    if record is not None and record["passed"]:
        return record
    if record is not None:
        failed = [test["name"] for test in record["tests"] if test["ok"] is False]
        found = f"the parity certificate of run {run_name!r} did not pass: {', '.join(failed)}"
    elif certificate_path(store).is_file():
        found = f"the parity certificate of run {run_name!r} was made for other data than its store holds now"
    else:
        found = f"the store of run {run_name!r} has no parity certificate"
    raise EyasError(found, "states that were compared with independent references, and passed",
                    f"python -m eyas parity -p run_name {run_name}   (with its server up; or train with -p without_parity true)")


def verdict(record: dict) -> str:
    """passed (5 tests, 12 samples)."""
    deciding = [test for test in record["tests"] if test["ok"] is not None]
    failed = [test["name"] for test in deciding if not test["ok"]]
    count = f"{len(deciding)} tests, {len(record['samples'])} samples"
    return f"failed: {', '.join(failed)} ({count})" if failed else f"passed ({count})"
