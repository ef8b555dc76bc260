"""Write the parity certificate: compare a bounded sample of a store with its references. `python -m eyas parity --profile P`

The checks and the rule for every limit: `eyas.parity.checks`.
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
from eyas.parity.checks import Evidence, after_norm, examine
from eyas.parity.references import CHUNK_TOK, HuggingFace, ask, ask_full
from eyas.progress import Progress
from eyas.prompts.chat_template import Sample, encode
from eyas.prompts.prompt_set import PromptSet
from eyas.server.serve import Server, check_for_capture, server_up
from eyas.store.certificate import FORMAT, write_certificate
from eyas.store.reader import Store

REFERENCE_BYTES = 4 * 2**30  # of all N+1 boundaries in both dtypes
ESCAPES = 0.05  # chance at which a fault's share of the samples is named in `unseen`


def certify(
    config: Config,
    server: Server,
    store: Store,
    target: Target,
    prompts: PromptSet | None = None,
    full: bool = False,
) -> dict:
    """Compare a bounded sample of the store with the references, write `parity.json` and give it back.

    `full` also starts a second server, with prefix cache and chunked prefill, and asks it for the same tokens. EyasError: nothing to check, a
    server that would lose rows or serves something else, no room for the reference. A failed test is no error: see `passed`.
    """
    started_s = time.monotonic()
    boundaries, dtype, tokenizer, head = (
        store.boundaries,
        store.manifest["dtype"],
        target.tokenizer(),
        store.head(),
    )
    check_for_capture(server.status(), boundaries, target)
    ids = chosen_samples(
        store, config.parity_samples, config.seed, (target.n_blocks + 1) * target.hidden_size * 6
    )
    if not ids:
        raise EyasError(
            f"the store of run {config.run_name!r} has no samples",
            "some to check",
            "python -m eyas extract",
        )
    samples = {id: store.read(id) for id in ids}
    with Progress(len(ids)) as progress:
        progress.update(note="asked of the server")
        served = ask(server, samples, boundaries)
        if full:
            beside = replace(config, run_name=f"{config.run_name}-parity", server_url="", port=0)
            with server_up(beside, tied=True, chunk_tok=CHUNK_TOK) as second:
                served = ask_full(second, samples, boundaries, served)
        served_s = time.monotonic()
        reference = HuggingFace(target, config.threads)
        expected, evidence = expected_samples(config, prompts, tokenizer, ids), {}
        for id in ids:
            evidence[id] = Evidence(
                served[id],
                reference(samples[id]["input_ids"], served[id].top_ids),
                expected.get(id),
            )
            progress.update(
                samples=1, tok=len(samples[id]["input_ids"]), note="compared with Hugging Face"
            )
        del reference
    if store.manifest.get("last_state") == "post-norm":
        evidence = {id: after_norm(e) for id, e in evidence.items()}
    referred_s = time.monotonic()
    hashes = {name: store.manifest.get(name) for name in ("tokenizer_hash", "template_hash")}
    tests = examine(samples, evidence, head, dtype, tokenizer, hashes)
    judged_s = time.monotonic()
    table = demonstration(samples, evidence, head, dtype, tokenizer, target.embedding())
    hidden = not any("decoding" in s.states for s in served.values())
    seconds = {
        "server": served_s - started_s,
        "reference": referred_s - served_s,
        "tests": judged_s - referred_s,
        "faults": time.monotonic() - judged_s,
    }
    record = {
        "format": FORMAT,
        "passed": all(test.ok is not False for test in tests),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"eyas": __version__}
        | {name: importlib.metadata.version(name) for name in ("torch", "transformers", "sglang")},
        "target": store.manifest["target"],
        "engine": store.manifest["engine"],
        "dtype": dtype,
        "samples": ids,
        "of_samples": len(store.samples()),
        "tok": sum(len(s["input_ids"]) for s in samples.values()),
        "seconds": {name: round(value, 2) for name, value in seconds.items()}
        | {"all": round(sum(seconds.values()), 2)},
        "share_of_extraction": _share_of_extraction(store, sum(seconds.values())),
        "tests": [asdict(test) for test in tests],
        "faults": table,
        "unseen": unseen(len(ids), len(store.samples()), hidden),
    }
    write_certificate(store, _finite(record))
    return record


def chosen_samples(store: Store, limit: int, seed: int, token_bytes: int) -> list[str]:
    """At most `limit` ids, drawn without replacement from both splits, in the order of the store; two at least, and no more than their reference may take."""
    lengths = store.index.set_index("id")["length"]
    ids = store.samples()
    drawn = np.random.default_rng(seed).permutation(len(ids))[:limit]
    fit = int(
        (np.cumsum([int(lengths[ids[n]]) * token_bytes for n in drawn]) <= REFERENCE_BYTES).sum()
    )
    return [ids[n] for n in sorted(drawn[: max(fit, 2)])]


def expected_samples(
    config: Config, prompts: PromptSet | None, tokenizer, ids: list[str]
) -> dict[str, Sample]:
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
    embedding: torch.Tensor,
) -> list[dict]:
    """The detection table on the two shortest samples: what each test would have said of faulty data."""
    from eyas.parity.faults import clean, detection_table, faults

    two = sorted(samples, key=lambda id: len(samples[id]["input_ids"]))[:2]
    if len(two) < 2:
        return []
    some, of = {id: samples[id] for id in two}, {id: evidence[id] for id in two}
    return detection_table(
        [*clean(some, of, head, dtype), *faults(some, of, head, dtype, tokenizer, embedding)],
        tokenizer,
    )


def unseen(n_samples: int, of_samples: int, in_graph: bool) -> list[str]:
    """Return in sentences what a certificate over n of so many samples cannot see."""
    said = []
    if n_samples < of_samples:
        share = 1 - ESCAPES ** (1 / n_samples)
        said.append(
            f"{n_samples} of {of_samples:,} samples were compared: a fault in {share:.0%} of the samples"
            f" escapes in {ESCAPES:.0%} of certificates, a fault in fewer samples more often"
            " (-p parity_samples N compares more)"
        )
    said.append(
        "within a sample, a fault in up to a tenth of its rows escapes while each row stays nearer to its"
        " own token's reference than half way to a neighbouring token's"
    )
    if in_graph:
        said.append(
            "decoding: the server decodes inside CUDA graphs;"
            " --cuda-graph-backend-decode disabled would show it"
        )
    return said


def _share_of_extraction(store: Store, seconds: float) -> float | None:
    """Of the time that extracting this many samples takes, by the last run's rate; None when that extracted nothing."""
    path = store.folder / "data_config.json"
    last = read_json(path).get("last_run", {}) if path.is_file() else {}
    return (
        seconds / (last["seconds"] / last["extracted"] * len(store.samples()))
        if last.get("extracted")
        else None
    )


def _finite(value):
    """JSON knows no NaN and no infinity: None."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tests_table(record: dict) -> pd.DataFrame:
    words = {True: "passed", False: "FAILED", None: "measured only"}
    return pd.DataFrame(
        [
            {"test": test["name"], "verdict": words[test["ok"]], "detail": test["detail"]}
            for test in record["tests"]
        ]
    )


def summary(record: dict) -> str:
    """A line per test, then the cost."""
    words = {True: "ok  ", False: "FAIL", None: "    "}
    lines = [
        f"{words[test['ok']]}  {test['name']:9} {test['detail']}" for test in record["tests"]
    ] + [f"not seen: {what}" for what in record["unseen"]]
    return "\n".join([*lines, cost(record)])


def cost(record: dict) -> str:
    share = record["share_of_extraction"]
    text = f"{len(record['samples'])} of {record['of_samples']:,} samples, {record['tok']:,} tokens, {record['seconds']['all']:.1f} s"
    return text + (f", {share:.1%} of what extraction takes" if share else "")
