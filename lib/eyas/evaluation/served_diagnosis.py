"""Name the likely causes of an acceptance length that is 1, or that is not ours."""

from pathlib import Path

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import read_json
from eyas.intervals import interval_text
from eyas.models.drafter import Drafter
from eyas.models.export import LAYER, OPTIONAL_KEYS, WRITTEN_FOR
from eyas.models.target import Target, load_target
from eyas.prompts.chat_template import template_hash

NAMES = {
    "num_steps": "speculative_num_steps",
    "topk": "speculative_eagle_topk",
    "draft_tokens": "speculative_num_draft_tokens",
}  # of the server's draft settings in a profile
LEGACY = {
    "midlayer.": LAYER,
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}  # names that the loader reads as these


def asked_settings(config: Config) -> dict[str, int]:
    """The profile's draft settings, by the names of `Server.status`."""
    return {
        "num_steps": config.speculative_num_steps,
        "topk": config.speculative_eagle_topk,
        "draft_tokens": config.verified_tok,
    }


# ---- the likely causes


def causes(
    config: Config,
    target: Target,
    drafter: Drafter,
    status: dict,
    record: dict,
    table: pd.DataFrame,
) -> list[dict]:
    """What is known to lower acceptance without an error (TRAPS of SGLang and of training), each looked at: {"cause", "found", "expected", "ok"}.

    Read from the running server and from the checkpoint that it has loaded, not from the one that was meant. ok is None where it can't be seen from here.
    """
    served, rows = status["drafter"], []

    def look(cause: str, found, expected, ok: bool | None = None) -> None:
        rows.append(
            {
                "cause": cause,
                "found": str(found),
                "expected": str(expected),
                "ok": found == expected if ok is None and found is not None else ok,
            }
        )

    asked = asked_settings(config)
    look(
        "algorithm: EAGLE reads another kind of drafter and accepts nothing",
        served["algorithm"],
        "EAGLE3",
    )
    look(
        "boundaries that feed the drafter",
        served.get("boundaries"),
        list(drafter.config.boundaries),
    )
    look("draft steps, top-k, draft tokens", [served[name] for name in asked], list(asked.values()))
    path = Path(served["path"])
    try:
        checkpoint, weights = read_json(path / "config.json"), load_file(path / "model.safetensors")
    except (OSError, SafetensorError) as error:
        look(
            f"the checkpoint {path.name}",
            f"can't be read here: {type(error).__name__}",
            "readable, to look at it",
        )
        rows[-1]["ok"] = None
    else:
        rows += checkpoint_causes(checkpoint, weights, drafter)
        told = checkpoint.get(WRITTEN_FOR) or {}  # not in what others wrote
        for what, found, expected in (
            (
                "engine and version",
                told and f"{told['engine']} {told['version']}",
                f"sglang {status['sglang']}",
            ),
            ("boundaries", told and told["boundaries"], list(drafter.config.boundaries)),
            ("target", told and told["target_fingerprint"][:12], target.fingerprint[:12]),
        ):
            look(f"{what} that the export was written for", found or None, expected)
    look("dtype: rounding turns ties around", status["dtype"], record["settings"]["decoded_dtype"])
    model = Path(status["model"])
    known = (model / "config.json").is_file()
    look(
        "target of the server",
        load_target(str(model)).fingerprint[:12] if known else None,
        target.fingerprint[:12],
    )
    ours = read_json(config.acceptance_dir / "acceptance.json")
    repeats, mine = record["repeated_bigrams"], ours["repeated_bigrams"]
    look(
        "looping text is easy to draft: repeated bigrams",
        interval_text(repeats),
        f"{interval_text(mine)} as decoded",
        mine["low"] is None
        or repeats["value"] is None
        or mine["low"] <= repeats["value"] <= mine["high"],
    )
    look(
        "prompt tokens: a template or a first token added by the server",
        int(table["server_prompt_tok"].sum()),
        int(table["prompt_tok"].sum()),
    )
    manifest = config.judged.store_dir / "manifest.json"
    trained = read_json(manifest).get("template_hash") if manifest.is_file() else None
    now = template_hash(target.tokenizer())[:12] if trained else None
    look("chat template of the training data", trained and trained[:12], now)
    file, record_file = (
        config.judged.drafter_dir / config.drafter_file,
        config.acceptance_dir / "acceptance.json",
    )
    if file.is_file():
        older = record_file.stat().st_mtime < file.stat().st_mtime
        look(
            "our decoding is of this drafter",
            "older than the drafter" if older else "after it was trained",
            "after it was trained",
        )
    return rows


def with_faults(error: EyasError, status: dict, drafter: Drafter) -> EyasError:
    """What went wrong while the server drafted, with the faults of its checkpoint: ids beyond the vocabulary (d2t absolute) end SGLang instead of accepting nothing."""
    path = Path(status["drafter"]["path"])
    try:
        rows = checkpoint_causes(
            read_json(path / "config.json"), load_file(path / "model.safetensors"), drafter
        )
    except (OSError, SafetensorError):
        return error
    wrong = "; ".join(
        f"{row['cause']}: {row['found']}, expected {row['expected']}"
        for row in rows
        if not row["ok"]
    )
    return (
        EyasError(
            f"{error.found}; the checkpoint that it loaded: {wrong}",
            "a checkpoint as it was trained",
            "python -m eyas drafter export",
        )
        if wrong
        else error
    )


def checkpoint_causes(
    checkpoint: dict, weights: dict[str, torch.Tensor], drafter: Drafter
) -> list[dict]:
    """The part of `causes` that a checkpoint's config.json and weights show, against the drafter that training saved."""
    rows, config = [], drafter.config

    def look(cause: str, found, expected) -> None:
        rows.append(
            {
                "cause": cause,
                "found": str(found),
                "expected": str(expected),
                "ok": found == expected,
            }
        )

    eagle = checkpoint.get("eagle_config") or {}
    named = {loaded_as(name): tensor for name, tensor in weights.items()}
    own = drafter.state_dict()
    known = {*own, "d2t", *OPTIONAL_KEYS}  # our names are SGLang's
    look("weights that the loader drops, silently", shorten(sorted(set(named) - known)), "none")
    look(
        "weights left at random values, silently",
        shorten(sorted(known - {*named, *OPTIONAL_KEYS})),
        "none",
    )
    both = [name for name in named if name in own and name != "embed_tokens.weight"]
    other = [
        name
        for name in both
        if named[name].shape != own[name].shape
        or not torch.equal(named[name].float().cpu(), own[name].float().cpu())
    ]
    look("weights other than the trained ones (an old export?)", shorten(sorted(other)), "none")
    norm = named.get("norm.weight")
    apart = (
        "missing"
        if norm is None
        else "other shape"
        if norm.shape != own["norm.weight"].shape
        else f"{float((norm.float() - own['norm.weight'].cpu()).abs().max()):g} apart"
    )
    look("final norm of the drafter, before its head", apart, "0 apart")
    d2t, ids = named.get("d2t"), drafter.vocab.ids.cpu()
    offsets = drafter.vocab.d2t.cpu()
    found = (
        "missing"
        if d2t is None
        else "offsets"
        if torch.equal(d2t.cpu().to(offsets.dtype), offsets)
        else "absolute target ids"
        if torch.equal(d2t.cpu().to(ids.dtype), ids)
        else "other offsets"
    )
    look("d2t: target id = draft id + d2t", found, "offsets")
    for name, at, expected in (
        ("norm_output", checkpoint, config.norm_output),
        ("fc_norm", checkpoint, config.fc_norm),
        ("norm_before_fc", eagle, config.norm_before_fc),
    ):
        look(
            f"{name}, as it was trained",
            bool(at.get(name) or (name == "fc_norm" and checkpoint.get("use_aux_norm"))),
            expected,
        )
    return rows


def loaded_as(name: str) -> str:
    """The name by which SGLang's EAGLE-3 loader knows a weight."""
    for legacy, new in LEGACY.items():
        name = name.replace(legacy, new)
    return name.removeprefix("model.")


def shorten(names: list[str], shown: int = 4) -> str:
    return (
        "none"
        if not names
        else ", ".join(names[:shown])
        + (f" and {len(names) - shown} more" if len(names) > shown else "")
    )


# ---- as tables to read


def cause_table(record: dict) -> pd.DataFrame:
    """The causes of served.json, those that were found first."""
    order = sorted(record["causes"], key=lambda row: {False: 0, None: 1, True: 2}[row["ok"]])
    return pd.DataFrame(
        [
            {
                "": {True: "ok", False: "LOOK", None: "?"}[row["ok"]],
                **{name: row[name] for name in ("cause", "found", "expected")},
            }
            for row in order
        ]
    )
