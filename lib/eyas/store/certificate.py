"""Write and check the parity certificate of a store: `parity.json` in its folder.

- `eyas.parity.certify` makes it, training requires it, and reports show it.
- It holds the identity of the data and the hash of the copied head. So a certificate of another
  store, or of data or a head that changed since, is not valid.
"""

from pathlib import Path

from eyas.errors import EyasError
from eyas.files import read_json, write_json

FORMAT = "eyas-parity-2"  # 1 judged the copied head by limits that the copy itself gave


def certificate_path(store) -> Path:
    """Return the path of a store's certificate."""
    return store.folder / "parity.json"


def write_certificate(store, record: dict) -> Path:
    """Write a certificate for the present data and the present head of a store."""
    made_for = {"store": store.identity, "head": store.head_hash}
    return write_json(certificate_path(store), made_for | record)


def read_certificate(store) -> dict | None:
    """Return the certificate, or None if there is none for these data and this copied head."""
    record = _any_certificate(store)
    if record is None or record.get("format") != FORMAT:
        return None
    made_for = record.get("store"), record.get("head")
    return record if made_for == (store.identity, store.head_hash) else None


def _any_certificate(store) -> dict | None:
    path = certificate_path(store)
    return read_json(path) if path.is_file() else None


def need_certificate(store, run_name: str) -> dict:
    """Return the certificate of a store.

    Raise EyasError if there is none, if it was made for other data, or if it did not pass.
    """
    record = read_certificate(store)
    if record is not None and record["passed"]:
        return record
    old = _any_certificate(store)
    whose = f"the parity certificate of run {run_name!r}"
    if record is not None:
        failed = [test["name"] for test in record["tests"] if test["ok"] is False]
        found = f"{whose} did not pass: {', '.join(failed)}"
    elif old is None:
        found = f"the store of run {run_name!r} has no parity certificate"
    elif old.get("store") != store.identity:
        found = f"{whose} was made for other data than its store holds now"
    elif old.get("format") != FORMAT:
        found = f"{whose} is from an older Eyas, whose check could pass a wrong copied head"
    else:
        found = f"{whose} was made for another head.safetensors than its store holds now"
    raise EyasError(
        found,
        "states that were compared with independent references, and passed",
        f"python -m eyas parity -p run_name {run_name}"
        "   (with its server up; or train with -p without_parity true)",
    )


def verdict(record: dict) -> str:
    """Return the result in words, for example "passed (5 tests, 12 samples)"."""
    deciding = [test for test in record["tests"] if test["ok"] is not None]
    failed = [test["name"] for test in deciding if not test["ok"]]
    count = f"{len(deciding)} tests, {len(record['samples'])} samples"
    return f"failed: {', '.join(failed)} ({count})" if failed else f"passed ({count})"
