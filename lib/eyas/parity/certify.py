"""Write the parity certificate of a store. `python -m eyas parity --profile P`

- It compares a bounded sample of the store with its references (`eyas.parity.references`).
- The tests and the rule for every limit are in `eyas.parity.checks`.
- The detection table shows what the tests say of faulty data (`eyas.parity.faults`).
"""

import datetime
import importlib.metadata
import math
import time
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import torch

from eyas import __version__
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import read_json
from eyas.models.target import Head, Target
from eyas.parity.checks import Evidence, Served, after_norm, examine
from eyas.parity.references import CHUNK_TOK, HuggingFace, ask, ask_full
from eyas.progress import Progress
from eyas.prompts.chat_template import Sample, encode
from eyas.prompts.prompt_set import PromptSet
from eyas.server.serve import Server, check_for_capture, server_up
from eyas.store.certificate import FORMAT, write_certificate
from eyas.store.reader import Store

REFERENCE_BYTES = 4 * 2**30  # most memory for all N+1 boundaries in both dtypes
ESCAPES = 0.05  # `unseen` names the fraction of faulty samples that escapes with this probability


def certify(
    config: Config,
    server: Server,
    store: Store,
    target: Target,
    prompts: PromptSet | None = None,
    full: bool = False,
) -> dict:
    """Compare a bounded sample of the store with the references; write and return `parity.json`.

    `full` also starts a second server, with prefix cache and chunked prefill, and asks it for the
    same tokens. A failed test is no error: see `passed` of the result.

    Raise EyasError if the store has no samples, if the server would lose rows or serves another
    model, or if the reference does not fit into memory.
    """
    started_s = time.monotonic()
    dtype = store.manifest["dtype"]
    tokenizer = target.tokenizer()
    head = store.head()
    check_for_capture(server.status(), store.boundaries, target)
    ids = _ids_to_check(config, store, target)
    samples = {id: store.read(id) for id in ids}
    with Progress(len(ids)) as progress:
        progress.update(note="asked of the server")
        served = _ask_servers(config, server, samples, store.boundaries, full)
        served_s = time.monotonic()
        evidence = _collect_evidence(config, target, prompts, samples, served, progress)
    if store.manifest.get("last_state") == "post-norm":
        evidence = {id: after_norm(e) for id, e in evidence.items()}
    referred_s = time.monotonic()
    hashes = {name: store.manifest.get(name) for name in ("tokenizer_hash", "template_hash")}
    tests = examine(samples, evidence, head, dtype, tokenizer, hashes)
    judged_s = time.monotonic()
    table = demonstration(samples, evidence, head, dtype, tokenizer, target.embedding())
    seconds = {
        "server": served_s - started_s,
        "reference": referred_s - served_s,
        "tests": judged_s - referred_s,
        "faults": time.monotonic() - judged_s,
    }
    in_graph = not any("decoding" in answer.states for answer in served.values())
    n_stored = len(store.samples())
    record = {
        "format": FORMAT,
        "passed": all(test.ok is not False for test in tests),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "target": store.manifest["target"],
        "engine": store.manifest["engine"],
        "dtype": dtype,
        "samples": ids,
        "of_samples": n_stored,
        "tok": sum(len(sample["input_ids"]) for sample in samples.values()),
        "seconds": _rounded_seconds(seconds),
        "share_of_extraction": _share_of_extraction(store, sum(seconds.values())),
        "tests": [asdict(test) for test in tests],
        "faults": table,
        "unseen": unseen(len(ids), n_stored, in_graph),
    }
    write_certificate(store, _finite(record))
    return record


def _ids_to_check(config: Config, store: Store, target: Target) -> list[str]:
    """Return the ids of the samples to compare. Raise EyasError if the store has none."""
    # float32 and bfloat16: 4 + 2 bytes a value
    token_bytes = (target.n_blocks + 1) * target.hidden_size * 6
    ids = chosen_samples(store, config.parity_samples, config.seed, token_bytes)
    if not ids:
        raise EyasError(
            f"the store of run {config.run_name!r} has no samples",
            "some to check",
            "python -m eyas extract",
        )
    return ids


def _ask_servers(
    config: Config,
    server: Server,
    samples: dict[str, dict],
    boundaries: tuple[int, ...],
    full: bool,
) -> dict[str, Served]:
    """Return what the server computes for the samples, and with `full` a second server too."""
    served = ask(server, samples, boundaries)
    if not full:
        return served
    second_config = replace(config, run_name=f"{config.run_name}-parity", server_url="", port=0)
    with server_up(second_config, tied=True, chunk_tok=CHUNK_TOK) as second:
        return ask_full(second, samples, boundaries, served)


def _collect_evidence(
    config: Config,
    target: Target,
    prompts: PromptSet | None,
    samples: dict[str, dict],
    served: dict[str, Served],
    progress: Progress,
) -> dict[str, Evidence]:
    """Return each sample's evidence: the server's answer, the reference and the encoded prompt.

    The reference's weights are freed at the end of this function.
    """
    reference = HuggingFace(target, config.threads)
    expected = expected_samples(config, prompts, target.tokenizer(), list(samples))
    evidence = {}
    for id, sample in samples.items():
        compared = reference(sample["input_ids"], served[id].top_ids)
        evidence[id] = Evidence(served[id], compared, expected.get(id))
        progress.update(samples=1, tok=len(sample["input_ids"]), note="compared with Hugging Face")
    return evidence


def _versions() -> dict[str, str]:
    packages = ("torch", "transformers", "sglang")
    return {"eyas": __version__} | {name: importlib.metadata.version(name) for name in packages}


def _rounded_seconds(seconds: dict[str, float]) -> dict[str, float]:
    rounded = {name: round(value, 2) for name, value in seconds.items()}
    return rounded | {"all": round(sum(seconds.values()), 2)}


def chosen_samples(store: Store, limit: int, seed: int, token_bytes: int) -> list[str]:
    """Return at most `limit` sample ids, drawn from both splits, in the order of the store.

    The draw is without replacement. Samples are added while their references fit into
    REFERENCE_BYTES, at `token_bytes` a token, but at least two are returned.
    """
    lengths = store.index.set_index("id")["length"]
    ids = store.samples()
    drawn = np.random.default_rng(seed).permutation(len(ids))[:limit]
    sample_bytes = [int(lengths[ids[n]]) * token_bytes for n in drawn]
    n_fit = int((np.cumsum(sample_bytes) <= REFERENCE_BYTES).sum())
    return [ids[n] for n in sorted(drawn[: max(n_fit, 2)])]


def expected_samples(
    config: Config, prompts: PromptSet | None, tokenizer, ids: list[str]
) -> dict[str, Sample]:
    """Encode the conversations of these samples again; empty without a prompt set.

    Raise EyasError if a sample is not in the prompt set.
    """
    if prompts is None:
        return {}
    conversations = {c.id: c for c in prompts.conversations}
    missing = [id for id in ids if id not in conversations]
    if missing:
        raise EyasError(
            f"sample {missing[0]} is not in {prompts.path.name}",
            "the prompt set of the store",
            "python -m eyas verify",
        )
    return {id: encode(conversations[id], tokenizer, config.max_length) for id in ids}


def demonstration(
    samples: dict[str, dict],
    evidence: dict[str, Evidence],
    head: Head,
    dtype: str,
    tokenizer,
    embedding: torch.Tensor,  # [V, H]
) -> list[dict]:
    """Return the detection table of the two shortest samples: which test catches which fault."""
    from eyas.parity.faults import clean, detection_table, faults

    shortest = sorted(samples, key=lambda id: len(samples[id]["input_ids"]))[:2]
    if len(shortest) < 2:
        return []
    two_samples = {id: samples[id] for id in shortest}
    two_evidence = {id: evidence[id] for id in shortest}
    good = clean(two_samples, two_evidence, head, dtype)
    faulty = faults(two_samples, two_evidence, head, dtype, tokenizer, embedding)
    return detection_table([*good, *faulty], tokenizer)


def unseen(n_samples: int, of_samples: int, in_graph: bool) -> list[str]:
    """Return in sentences what a certificate over `n_samples` of `of_samples` cannot see."""
    sentences = []
    if n_samples < of_samples:
        share = 1 - ESCAPES ** (1 / n_samples)
        sentences.append(
            f"{n_samples} of {of_samples:,} samples were compared:"
            f" a fault in {share:.0%} of the samples"
            f" escapes in {ESCAPES:.0%} of certificates, a fault in fewer samples more often"
            " (-p parity_samples N compares more)"
        )
    sentences.append(
        "within a sample, a fault in up to a tenth of its rows escapes while each row stays"
        " nearer to its own token's reference than half way to a neighbouring token's"
    )
    if in_graph:
        sentences.append(
            "decoding: the server decodes inside CUDA graphs;"
            " --cuda-graph-backend-decode disabled would show it"
        )
    return sentences


def _share_of_extraction(store: Store, seconds: float) -> float | None:
    """Return `seconds` / the time that extracting the whole store takes at the last run's rate.

    Return None if the last run extracted nothing.
    """
    path = store.folder / "data_config.json"
    last = read_json(path).get("last_run", {}) if path.is_file() else {}
    if not last.get("extracted"):
        return None
    return seconds / (last["seconds"] / last["extracted"] * len(store.samples()))


def _finite(value):
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tests_table(record: dict) -> pd.DataFrame:
    """Return one row a test of the certificate: its name, verdict and detail."""
    words = {True: "passed", False: "FAILED", None: "measured only"}
    rows = [
        {"test": test["name"], "verdict": words[test["ok"]], "detail": test["detail"]}
        for test in record["tests"]
    ]
    return pd.DataFrame(rows)


def summary(record: dict) -> str:
    """Return the certificate as text: a line for each test, what it cannot see, and its cost."""
    words = {True: "ok  ", False: "FAIL", None: "    "}
    tests = [f"{words[test['ok']]}  {test['name']:9} {test['detail']}" for test in record["tests"]]
    not_seen = [f"not seen: {sentence}" for sentence in record["unseen"]]
    return "\n".join([*tests, *not_seen, cost(record)])


def cost(record: dict) -> str:
    """Return in words how much was compared, and how long it took."""
    text = (
        f"{len(record['samples'])} of {record['of_samples']:,} samples,"
        f" {record['tok']:,} tokens, {record['seconds']['all']:.1f} s"
    )
    share = record["share_of_extraction"]
    return text + (f", {share:.1%} of what extraction takes" if share else "")
