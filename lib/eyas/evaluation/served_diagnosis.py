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

# The server's draft settings, and their names in a profile.
NAMES = {
    "num_steps": "speculative_num_steps",
    "topk": "speculative_eagle_topk",
    "draft_tokens": "speculative_num_draft_tokens",
}
# Older names of weights, and the names by which SGLang's loader reads them.
LEGACY = {
    "midlayer.": LAYER,
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}
MARKS = {True: "ok", False: "LOOK", None: "?"}
MARK_ORDER = {False: 0, None: 1, True: 2}  # what is wrong comes first


def asked_settings(config: Config) -> dict[str, int]:
    """Return the profile's draft settings by their names in `Server.status`."""
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
    """Return a check of everything known to lower acceptance without an error.

    Each row is {"cause", "found", "expected", "ok"}; ok is None where it cannot be seen from here.
    The rows come from the running server and from the checkpoint that it has loaded, which may not
    be the one that was meant.
    """
    decoded = read_json(config.acceptance_dir / "acceptance.json")
    return [
        *_draft_setting_causes(config, drafter, status),
        *_loaded_checkpoint_causes(target, drafter, status),
        *_target_causes(target, status, record),
        *_text_causes(record, decoded, table),
        *_training_causes(config, target),
    ]


def _cause(cause: str, found, expected) -> dict:
    """Return one row; it is ok if both values are equal, unknown if `found` is None."""
    ok = None if found is None else found == expected
    return {"cause": cause, "found": str(found), "expected": str(expected), "ok": ok}


def _draft_setting_causes(config: Config, drafter: Drafter, status: dict) -> list[dict]:
    served = status["drafter"]
    asked = asked_settings(config)
    return [
        _cause(
            "algorithm: EAGLE reads another kind of drafter and accepts nothing",
            served["algorithm"],
            "EAGLE3",
        ),
        _cause(
            "boundaries that feed the drafter",
            served.get("boundaries"),
            list(drafter.config.boundaries),
        ),
        _cause(
            "draft steps, top-k, draft tokens",
            [served[name] for name in asked],
            list(asked.values()),
        ),
    ]


def _loaded_checkpoint_causes(target: Target, drafter: Drafter, status: dict) -> list[dict]:
    """Return the rows about the checkpoint that the server has loaded."""
    path = Path(status["drafter"]["path"])
    try:
        checkpoint, weights = _read_checkpoint(path)
    except (OSError, SafetensorError) as error:
        row = _cause(
            f"the checkpoint {path.name}",
            f"can't be read here: {type(error).__name__}",
            "readable, to look at it",
        )
        return [row | {"ok": None}]
    rows = checkpoint_causes(checkpoint, weights, drafter)
    boundaries = list(drafter.config.boundaries)
    written_for = checkpoint.get(WRITTEN_FOR)  # only Eyas's own export writes it
    engine = None
    written_boundaries = None
    fingerprint = None
    if written_for:
        engine = f"{written_for['engine']} {written_for['version']}"
        written_boundaries = written_for["boundaries"]
        fingerprint = written_for["target_fingerprint"][:12]
    what = "that the export was written for"
    rows += [
        _cause(f"engine and version {what}", engine, f"sglang {status['sglang']}"),
        _cause(f"boundaries {what}", written_boundaries or None, boundaries),
        _cause(f"target {what}", fingerprint or None, target.fingerprint[:12]),
    ]
    return rows


def _read_checkpoint(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    return read_json(path / "config.json"), load_file(path / "model.safetensors")


def _target_causes(target: Target, status: dict, record: dict) -> list[dict]:
    model = Path(status["model"])
    fingerprint = None
    if (model / "config.json").is_file():
        fingerprint = load_target(str(model)).fingerprint[:12]
    return [
        _cause(
            "dtype: rounding turns ties around",
            status["dtype"],
            record["settings"]["decoded_dtype"],
        ),
        _cause("target of the server", fingerprint, target.fingerprint[:12]),
    ]


def _text_causes(record: dict, decoded: dict, table: pd.DataFrame) -> list[dict]:
    """Return the rows about the texts, as the server and as our decoder have them."""
    served = record["repeated_bigrams"]
    ours = decoded["repeated_bigrams"]
    repeats = _cause(
        "looping text is easy to draft: repeated bigrams",
        interval_text(served),
        f"{interval_text(ours)} as decoded",
    )
    repeats["ok"] = (
        ours["low"] is None
        or served["value"] is None
        or ours["low"] <= served["value"] <= ours["high"]
    )
    prompt_tokens = _cause(
        "prompt tokens: a template or a first token added by the server",
        int(table["server_prompt_tok"].sum()),
        int(table["prompt_tok"].sum()),
    )
    return [repeats, prompt_tokens]


def _training_causes(config: Config, target: Target) -> list[dict]:
    """Return the rows about what the drafter was trained on, and when it was decoded."""
    manifest = config.judged.store_dir / "manifest.json"
    trained = read_json(manifest).get("template_hash") if manifest.is_file() else None
    current = template_hash(target.tokenizer())[:12] if trained else None
    rows = [_cause("chat template of the training data", trained and trained[:12], current)]
    drafter_file = config.judged.drafter_dir / config.drafter_file
    if drafter_file.is_file():
        decoded_at = (config.acceptance_dir / "acceptance.json").stat().st_mtime
        older = decoded_at < drafter_file.stat().st_mtime
        rows.append(
            _cause(
                "our decoding is of this drafter",
                "older than the drafter" if older else "after it was trained",
                "after it was trained",
            )
        )
    return rows


def with_faults(error: EyasError, status: dict, drafter: Drafter) -> EyasError:
    """Return an error of the drafting server together with the faults of its checkpoint.

    Ids beyond the vocabulary (an absolute d2t) end SGLang instead of lowering acceptance.
    An error is returned as it is where the checkpoint has no fault or cannot be read.
    """
    try:
        checkpoint, weights = _read_checkpoint(Path(status["drafter"]["path"]))
        rows = checkpoint_causes(checkpoint, weights, drafter)
    except (OSError, SafetensorError):
        return error
    faults = [
        f"{row['cause']}: {row['found']}, expected {row['expected']}"
        for row in rows
        if not row["ok"]
    ]
    if not faults:
        return error
    return EyasError(
        f"{error.found}; the checkpoint that it loaded: {'; '.join(faults)}",
        "a checkpoint as it was trained",
        "python -m eyas drafter export",
    )


# ---- what a checkpoint shows


def checkpoint_causes(
    checkpoint: dict, weights: dict[str, torch.Tensor], drafter: Drafter
) -> list[dict]:
    """Return the rows of `causes` that compare a checkpoint with the drafter that training saved.

    checkpoint: its config.json. weights: its tensors by name.
    """
    named = {loaded_as(name): tensor for name, tensor in weights.items()}
    return [
        *_weight_causes(named, drafter),
        _cause(
            "final norm of the drafter, before its head",
            _norm_difference(named, drafter),
            "0 apart",
        ),
        _cause("d2t: target id = draft id + d2t", _d2t_kind(named, drafter), "offsets"),
        *_norm_option_causes(checkpoint, drafter),
    ]


def _weight_causes(named: dict[str, torch.Tensor], drafter: Drafter) -> list[dict]:
    trained = drafter.state_dict()
    known = {*trained, "d2t", *OPTIONAL_KEYS}  # our names are SGLang's
    dropped = sorted(set(named) - known)
    missing = sorted(known - {*named, *OPTIONAL_KEYS})
    common = [name for name in named if name in trained and name != "embed_tokens.weight"]
    changed = sorted(name for name in common if not _same_weights(named[name], trained[name]))
    return [
        _cause("weights that the loader drops, silently", shorten(dropped), "none"),
        _cause("weights left at random values, silently", shorten(missing), "none"),
        _cause("weights other than the trained ones (an old export?)", shorten(changed), "none"),
    ]


def _same_weights(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.float().cpu(), second.float().cpu())


def _norm_difference(named: dict[str, torch.Tensor], drafter: Drafter) -> str:
    """Return how far the final norm's weights are from the trained ones, at most."""
    norm = named.get("norm.weight")
    trained = drafter.state_dict()["norm.weight"]
    if norm is None:
        return "missing"
    if norm.shape != trained.shape:
        return "other shape"
    return f"{float((norm.float() - trained.cpu()).abs().max()):g} apart"


def _d2t_kind(named: dict[str, torch.Tensor], drafter: Drafter) -> str:
    """Return what the checkpoint's map from draft ids to target ids holds."""
    d2t = named.get("d2t")
    offsets = drafter.vocab.d2t.cpu()
    target_ids = drafter.vocab.ids.cpu()
    if d2t is None:
        return "missing"
    if torch.equal(d2t.cpu().to(offsets.dtype), offsets):
        return "offsets"
    if torch.equal(d2t.cpu().to(target_ids.dtype), target_ids):
        return "absolute target ids"
    return "other offsets"


def _norm_option_causes(checkpoint: dict, drafter: Drafter) -> list[dict]:
    eagle = checkpoint.get("eagle_config") or {}
    config = drafter.config
    fc_norm = checkpoint.get("fc_norm") or checkpoint.get("use_aux_norm")
    return [
        _cause(
            "norm_output, as it was trained",
            bool(checkpoint.get("norm_output")),
            config.norm_output,
        ),
        _cause("fc_norm, as it was trained", bool(fc_norm), config.fc_norm),
        _cause(
            "norm_before_fc, as it was trained",
            bool(eagle.get("norm_before_fc")),
            config.norm_before_fc,
        ),
    ]


def loaded_as(name: str) -> str:
    """Return the name by which SGLang's EAGLE-3 loader knows a weight."""
    for legacy, current in LEGACY.items():
        name = name.replace(legacy, current)
    return name.removeprefix("model.")


def shorten(names: list[str], shown: int = 4) -> str:
    """Return the first names with the number of the others, or "none"."""
    if not names:
        return "none"
    text = ", ".join(names[:shown])
    hidden = len(names) - shown
    return f"{text} and {hidden} more" if hidden > 0 else text


# ---- as tables to read


def cause_table(record: dict) -> pd.DataFrame:
    """Return the causes of served.json; what is wrong comes first."""
    rows = sorted(record["causes"], key=lambda row: MARK_ORDER[row["ok"]])
    return pd.DataFrame(
        [
            {
                "": MARKS[row["ok"]],
                "cause": row["cause"],
                "found": row["found"],
                "expected": row["expected"],
            }
            for row in rows
        ]
    )
