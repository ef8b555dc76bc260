"""Compare what our decoding accepts with what the server accepts that serves the drafter.

    python -m eyas evaluate served --profile smoke    # after `evaluate decode`
    python -m eyas evaluate served -p serve_url http://host:port

The first command exports the drafter and starts SGLang with it and, to compare texts and time,
without it. The second one asks a server that you already run with the drafter; it starts nothing.

How SGLang 0.5.23 counts, read in `batch_result_processor._resolve_spec_v2_tokens` and
`tokenizer_manager._calculate_spec_decoding_metrics`:
  spec_verify_ct            + 1 for each verify step of a request that has not ended. The prefill,
                            which gives the first token, is not one.
  spec_num_correct_drafts   + the draft tokens of the step that equal the target's own choice,
                            without the bonus token. The last step is counted whole, whatever
                            `max_new_tokens` cuts away. Draft tokens behind an accepted end-of-text
                            token count too, although they are never seen.
  spec_accept_length        completion_tokens / spec_verify_ct. The completion contains the
                            prefill's token, which belongs to no verify step, and lacks what was cut
                            off. That is not (accepted + steps) / steps, and for short answers not
                            near it. It is not used here.
  avg_spec_accept_length    of /server_info: the same over everything since the server started.
                            Not used either.
Our count (`eyas.evaluation.acceptance`) differs at the end of the text only: draft tokens behind it
are neither accepted nor proposed. Each answer is therefore counted again from what its verify steps
accepted, one after the other (`meta_info.eyas_accepted`, sent by the plugin), and from its tokens.
The sums must equal SGLang's own. The server is asked for `speculative_num_steps` tokens more than
are counted, so that an end of the text inside the last step is seen, as our decoder sees it.

`check` compares three things:
  - acceptance length and every position, paired by prompt;
  - the boundaries that the running model feeds the drafter, with those it was trained on;
  - the text, with that of the same server without a drafter.
In greedy float32 decoding all of them are equal to the last token. In bfloat16 rounding can swap
two tied logits, and sampled texts differ, so there the intervals decide.
Where an acceptance length is exactly 1, or is not ours, `causes` names what is known to do that.
"""

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from eyas.config import Config
from eyas.errors import EyasError
from eyas.evaluation.acceptance import Prompt, judged_file, keep_earlier, position_ratios
from eyas.evaluation.offline import walk
from eyas.evaluation.served_client import COMMAND, Answer, Asker, speed_ratio
from eyas.evaluation.served_counting import agree, compare_prompts
from eyas.evaluation.served_diagnosis import NAMES, asked_settings, cause_table, causes, with_faults
from eyas.files import read_json, read_parquet, write_atomic, write_json
from eyas.intervals import difference_interval, interval_text, ratio_interval
from eyas.models.drafter import Drafter
from eyas.models.export import export_sglang, made_from, unservable
from eyas.models.target import Target
from eyas.progress import Progress
from eyas.server.serve import Server, check_dtype, serving_up
from eyas.store.reader import Store

OF_THE_SERVER = ("served.json", "served.parquet")
DECODE_COMMAND = "python -m eyas evaluate decode"


@dataclass(frozen=True)
class ServedAcceptance:
    """Hold the result of `check`.

    record: served.json.
    prompts: the counts of both sides, one row a prompt; ours are named `ours_*`.
    """

    record: dict
    prompts: pd.DataFrame

    @property
    def passed(self) -> bool:
        """Return whether nothing is off and the float32 text is that of the plain server."""
        if self.record["off"]:
            return False
        identical = self.record["identical"]
        if identical is None or identical["differing"] == 0:
            return True
        return self.record["settings"]["dtype"] != "float32"

    def __str__(self) -> str:
        """Return the result in words: what the command prints."""
        record = self.record
        lines = [
            *_acceptance_lines(record),
            *(_position_line(position) for position in record["by_position"]),
            _boundary_line(record["round_trip"]),
            _identity_line(record["identical"]),
        ]
        if record["speed_ratio"]:
            lines.append(_speed_line(record))
        if record["off"]:
            table = cause_table(record).to_string(index=False, justify="left")
            lines.append(f"what is known to cause that, checked one by one:\n{table}")
        return "\n".join(lines)


def _acceptance_lines(record: dict) -> list[str]:
    settings = record["settings"]
    n_prompts = record["counts"]["prompts"]
    return [
        f"acceptance length (bonus token included), {n_prompts} prompts: "
        f"the server {interval_text(record['acceptance_length'])} in {settings['dtype']}, "
        f"our decoding {interval_text(record['decoded']['acceptance_length'])} "
        f"in {settings['decoded_dtype']}",
        f"difference, paired by prompt: {interval_text(record['difference'])}: "
        f"{record['verdict']}; "
        f"all counts are equal in {record['same_counts']} of {n_prompts} prompts",
    ]


def _position_line(position: dict) -> str:
    i = position["position"]
    return (
        f"  draft token {i}: accepted in {interval_text(position['server'])} of the verify steps "
        f"(server), {interval_text(position['ours'])} (our decoding), "
        f"difference {interval_text(position['difference'])}"
    )


def _boundary_line(trip: dict) -> str:
    return (
        f"boundaries that feed the drafter: {trip['served']}, "
        f"trained on {trip['trained']}, ids {trip['ids']}"
    )


def _identity_line(identical: dict | None) -> str:
    if identical is None:
        return "output beside the server without a drafter: not compared"
    n_same = identical["prompts"] - identical["differing"]
    return (
        "output identical to the server without a drafter: "
        f"{n_same} of {identical['prompts']} prompts"
    )


def _speed_line(record: dict) -> str:
    settings = record["settings"]
    scheduler = "with" if settings["overlap"] else "without"
    return (
        f"one request at a time, {record['speed_prompts']} prompts: "
        f"{interval_text(record['speed_ratio'])} times the speed of the server without a drafter, "
        f"{settings['dtype']}, prefill left out, "
        f"both {scheduler} SGLang's overlap scheduler"
    )


@dataclass(frozen=True)
class NotServed:
    """Hold the record of a drafter that this SGLang cannot serve.

    record: served.json with the reason and the next command under "not_served", and our own side
    of the comparison. It has no number of a server.
    """

    record: dict

    def __str__(self) -> str:
        refused = self.record["not_served"]
        return f"not served: {refused['reason']}\nnext: {refused['next']}"


def check_or_reason(
    config: Config, target: Target, drafter: Drafter, prompts: list[Prompt]
) -> ServedAcceptance | NotServed:
    """Return `check`, or the reason why SGLang cannot serve a drafter of this shape.

    A page with other results can then continue. Any other EyasError is raised.
    """
    refused = unservable(config.judged, drafter, target)
    if refused is None:
        return check(config, target, drafter, prompts)
    _, table = our_decoding(config, prompts[: config.serve_prompts or None])
    record = _not_served_record(config, target, drafter, refused, table)
    keep_earlier(config.acceptance_dir, OF_THE_SERVER, record)
    (config.acceptance_dir / "served.parquet").unlink(missing_ok=True)
    write_json(config.acceptance_dir / "served.json", record)
    return NotServed(record)


def _not_served_record(
    config: Config, target: Target, drafter: Drafter, refused: EyasError, table: pd.DataFrame
) -> dict:
    """Return served.json of a drafter that cannot be served. table: rows of acceptance.parquet."""
    trained = list(drafter.config.boundaries)
    tokens = table["accepted"] + table["verify_steps"]
    length = ratio_interval(tokens, table["verify_steps"], config.seed)
    by_position = []
    for i in range(1, config.speculative_num_steps + 1):
        ours = ratio_interval(table[f"accepted_{i}"], table["verify_steps"], config.seed)
        by_position.append({"position": i, "ours": ours.as_dict()})
    return {
        "settings": {
            **judged_file(config),
            "eval_set": config.eval_set,
            "target": target.name,
            "target_fingerprint": target.fingerprint,
            "boundaries": trained,
        },
        "not_served": {"reason": refused.found, "next": refused.next_command},
        "counts": {"prompts": len(table)},
        "decoded": {"acceptance_length": length.as_dict()},
        "by_position": by_position,
        "identical": None,
        "round_trip": {"served": None, "trained": trained, "ids": None, "equal": None},
        "causes": [
            {
                "cause": "a shape that SGLang can serve",
                "found": refused.found,
                "expected": refused.expected,
                "ok": False,
            }
        ],
    }


# ---- asking the servers


@dataclass(frozen=True)
class _Round:
    """Hold what the servers answered.

    status: what the server with the drafter says of itself.
    trip: the boundaries that it feeds the drafter, beside those of training.
    answers: of the server with the drafter, one a prompt.
    texts: token ids of the server without it, one list a prompt; None where none was started.
    speed_ratio: as `speed_ratio` gives it; None where it was not timed.
    """

    status: dict
    trip: dict
    answers: list[Answer]
    texts: list[list[int]] | None
    speed_ratio: dict | None


def check(
    config: Config,
    target: Target,
    drafter: Drafter,
    prompts: list[Prompt],
    folder: Path | None = None,
) -> ServedAcceptance:
    """Serve the drafter and compare what the server accepts with our own decoding.

    Write served.parquet and, last, served.json.
    `folder`: an existing checkpoint; by default the drafter is exported. With
    `serve_timed_prompts` both servers run at once, else one after the other.
    Raise EyasError if our decoding is missing or of other settings, for float32 on a GPU, if the
    server feeds other boundaries, or if its counts cannot be understood.
    """
    check_serve_dtype(config)
    prompts = prompts[: config.serve_prompts or None]
    decoded, ours = our_decoding(config, prompts)
    asked = _ask_servers(config, target, drafter, prompts, folder)
    # Sampled texts differ every time, so only greedy ones are compared.
    texts = asked.texts if config.temperature == 0 else None
    table = compare_prompts(config, prompts, asked.answers, ours, texts)
    record = served_record(config, target, drafter, asked.status, asked.trip, decoded, table)
    record["speed_ratio"] = asked.speed_ratio
    record["speed_prompts"] = 0
    if asked.speed_ratio:
        record["speed_prompts"] = min(config.serve_timed_prompts, len(prompts))
    record["causes"] = causes(config, target, drafter, asked.status, record, table)
    keep_earlier(config.acceptance_dir, OF_THE_SERVER, record)
    write_atomic(config.acceptance_dir / "served.parquet", table.to_parquet)
    write_json(config.acceptance_dir / "served.json", record)
    return ServedAcceptance(record, table)


def _ask_servers(
    config: Config,
    target: Target,
    drafter: Drafter,
    prompts: list[Prompt],
    folder: Path | None,
) -> _Round:
    """Ask the server with the drafter and, unless it is the user's own, the one without it."""
    serving = dataclasses.replace(config, dtype=config.serve_dtype, port=0)
    n_answers = len(prompts) if config.serve_url else 2 * len(prompts)
    texts = None
    ratio = None
    with ExitStack() as servers, Progress(n_answers, "prompts") as progress:

        def done(answer: Answer) -> None:
            progress.update(samples=1, tok=len(answer.output_ids))

        if config.serve_url:
            server = Server(config.serve_url.rstrip("/"))
        else:
            if folder is None:
                folder = export_sglang(
                    drafter, target, config.judged.export_dir, made_from=made_from(config.judged)
                )
            server = servers.enter_context(
                serving_up(serving, folder, config.server_dir / "drafting", tied=True)
            )
        status = server.status()
        trip = round_trip(status, drafter)
        same_settings(status, config)
        drafting = Asker(server, config)
        try:
            drafting.ask(prompts[0], 8)  # warm-up
            answers = drafting.ask_all(prompts, config.concurrency, done)
        except EyasError as error:
            raise with_faults(error, status, drafter) from None
        if not config.serve_url:
            if not config.serve_timed_prompts:
                servers.close()  # one server at a time needs less memory
            plain_server = servers.enter_context(
                serving_up(serving, None, config.server_dir / "plain", tied=True)
            )
            plain = Asker(plain_server, config)
            plain.ask(prompts[0], 8)  # warm-up
            plain_answers = plain.ask_all(prompts, config.concurrency, done)
            texts = [answer.output_ids for answer in plain_answers]
            if config.serve_timed_prompts:
                timed = prompts[: config.serve_timed_prompts]
                ratio = speed_ratio(plain, drafting, timed, config.seed)
    return _Round(status, trip, answers, texts, ratio)


def check_serve_dtype(config: Config) -> None:
    """Raise EyasError if the server that would be started cannot compute in `serve_dtype`.

    A server that the user already runs is taken as it is.
    """
    if not config.serve_url:
        check_dtype(config, config.serve_dtype, "serve_dtype")


def our_decoding(config: Config, prompts: list[Prompt]) -> tuple[dict, pd.DataFrame]:
    """Return acceptance.json, and the rows of acceptance.parquet for these prompts, in their order.

    Raise EyasError if the run has not decoded, or decoded with other settings or other prompts.
    """
    if not prompts:
        raise EyasError(
            "no prompts to compare",
            "at least one of the evaluation set",
            "python -m eyas prompts show",
        )
    path = config.acceptance_dir / "acceptance.json"
    if not path.is_file():
        raise EyasError(
            f"run {config.run_name!r} has not decoded: there is nothing to compare the server with",
            "acceptance of our decoding",
            DECODE_COMMAND,
        )
    record = read_json(path)
    table = read_parquet(path.with_suffix(".parquet")).set_index("id")
    _check_decoding_settings(config, record["settings"])
    _check_decoded_prompts(config, prompts, table)
    return record, table.loc[[prompt.id for prompt in prompts]].reset_index()


def _check_decoding_settings(config: Config, decoded: dict) -> None:
    """Raise EyasError if our decoding used other settings than the profile has."""
    asked = {
        "drafter_run": config.judged.run_name,
        "eval_set": config.eval_set,
        "speculative_num_steps": config.speculative_num_steps,
        "speculative_eagle_topk": config.speculative_eagle_topk,
        "speculative_num_draft_tokens": config.verified_tok,
        "speculative_use_rejection_sampling": config.speculative_use_rejection_sampling,
        "temperature": config.temperature,
        "max_new_tok": config.decode_new_tok,
    }
    differences = [
        f"{name} {decoded.get(name)!r}, not {value!r}"
        for name, value in asked.items()
        if decoded.get(name) != value
    ]
    if differences:
        raise EyasError(
            f"run {config.run_name!r} decoded with other settings: {'; '.join(differences)}",
            "the same settings on both sides",
            DECODE_COMMAND,
        )


def _check_decoded_prompts(config: Config, prompts: list[Prompt], table: pd.DataFrame) -> None:
    """Raise EyasError if a prompt is missing among the decoded ones. table: by prompt id."""
    prompt_tok = table["prompt_tok"].to_dict()
    missing = [
        prompt.id for prompt in prompts if prompt_tok.get(prompt.id) != len(prompt.input_ids)
    ]
    if missing:
        raise EyasError(
            f"run {config.run_name!r} decoded other prompts: "
            f"{len(missing)} of {len(prompts)} are not among them, {missing[0]} first",
            "the same prompts, to be paired",
            DECODE_COMMAND,
        )


def round_trip(status: dict, drafter: Drafter) -> dict:
    """Return the boundaries that the running model feeds the drafter, and those of its training.

    Raise EyasError if the server has no drafter, or feeds it other boundaries.
    """
    served = status["drafter"]
    trained = list(drafter.config.boundaries)
    if served is None:
        raise EyasError(
            f"the server at {status['url']} runs without a drafter",
            "--speculative-algorithm EAGLE3 with the exported drafter",
            COMMAND,
        )
    boundaries = served.get("boundaries")
    ids = served.get("ids")
    if boundaries is None:
        return {"served": None, "trained": trained, "ids": ids, "equal": None}
    if list(boundaries) != trained:
        raise EyasError(
            f"the server feeds the drafter boundaries {list(boundaries)} (layer ids {ids})",
            f"{trained}, those it was trained on. It would be given states that it has never seen, "
            "without an error, and one wrong layer costs about 0.1 of acceptance length",
            "python -m eyas drafter export writes the ids that this SGLang needs",
        )
    return {"served": list(boundaries), "trained": trained, "ids": ids, "equal": True}


def same_settings(status: dict, config: Config) -> None:
    """Raise EyasError if the user's own server drafts with other settings than the profile's.

    Its counts could not be read then.
    """
    served = status["drafter"]
    asked = asked_settings(config)
    different = [name for name in asked if served[name] not in (None, asked[name])]
    if different:
        found = [f"{NAMES[name]} {served[name]}" for name in different]
        expected = [f"{NAMES[name]} {asked[name]}" for name in different]
        options = [f"-p {setting}" for setting in found]
        raise EyasError(
            f"the server drafts with {', '.join(found)}",
            ", ".join(expected),
            f"python -m eyas evaluate decode, then this again, both with {' '.join(options)}",
        )


# ---- counts, then ratios

COUNTED = ("tok", "verify_steps", "accepted", "ours_verify_steps", "ours_accepted")


def served_record(
    config: Config,
    target: Target,
    drafter: Drafter,
    status: dict,
    trip: dict,
    decoded: dict,
    table: pd.DataFrame,
) -> dict:
    """Return served.json: counts, then ratios with intervals over prompts.

    `off` is True if the acceptance length is exactly 1, or is not ours.
    """
    length = _length_of_both(table, config.seed)
    by_position = [
        _position_of_both(table, i, config.seed) for i in range(1, config.speculative_num_steps + 1)
    ]
    different = [f"position {p['position']}" for p in by_position if agree(p) is False]
    accepts_nothing = length["server"]["value"] == 1.0
    repeated = ratio_interval(table["repeated_bigrams"], table["bigrams"], config.seed)
    identical = None
    if table["identical"].notna().all():  # None is not False
        n_differing = int(table["identical"].eq(False).sum())
        identical = {"prompts": len(table), "differing": n_differing}
    headline = {name: length["server"][name] for name in ("value", "low", "high")}
    return {
        "settings": _settings(config, target, drafter, status, decoded),
        "counts": {
            "prompts": len(table),
            **{name: int(table[name].sum()) for name in COUNTED},
        },
        "acceptance_length": length["server"],
        "decoded": {"acceptance_length": length["ours"]},
        "difference": length["difference"],
        "by_position": by_position,
        "same_counts": int(table["same_counts"].sum()),
        "verdict": _agreement(length, different),
        "off": bool(accepts_nothing or agree(length) is False or different),
        "identical": identical,
        "repeated_bigrams": repeated.as_dict(),
        "round_trip": trip,
        "drafter": {name: value for name, value in status["drafter"].items() if name != "path"},
        "headline": headline | {"prompts": len(table)},
    }


def _settings(
    config: Config, target: Target, drafter: Drafter, status: dict, decoded: dict
) -> dict:
    return {
        **judged_file(config),
        "eval_set": config.eval_set,
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "boundaries": list(drafter.config.boundaries),
        "speculative_num_steps": config.speculative_num_steps,
        "speculative_eagle_topk": config.speculative_eagle_topk,
        "speculative_num_draft_tokens": config.verified_tok,
        "max_new_tok": config.decode_new_tok,
        "dtype": status["dtype"],
        "decoded_dtype": decoded["settings"]["dtype"],
        "sglang": status["sglang"],
        "device": status["device"],
        "overlap": status["overlap"],
        "parallel": config.concurrency,
        "seed": config.seed,
        "interval": "95 %, percentile bootstrap over prompts",
    }


def _length_of_both(table: pd.DataFrame, seed: int) -> dict[str, dict]:
    """Return the acceptance length of server and our decoding, bonus token included."""
    server_tok = table["accepted"] + table["verify_steps"]
    our_tok = table["ours_accepted"] + table["ours_verify_steps"]
    return _both_sides(table, server_tok, our_tok, seed)


def _position_of_both(table: pd.DataFrame, i: int, seed: int) -> dict:
    """Return the share of verify steps that accept draft token i, of both sides."""
    server = table[f"accepted_{i}"]
    ours = table[f"ours_accepted_{i}"]
    return {
        "position": i,
        "accepted": int(server.sum()),
        "ours_accepted": int(ours.sum()),
    } | _both_sides(table, server, ours, seed)


def _both_sides(
    table: pd.DataFrame, server: pd.Series, ours: pd.Series, seed: int
) -> dict[str, dict]:
    """Return counts a verify step of both sides and their difference, paired by prompt.

    server, ours: the numerators, one number a prompt.
    """
    server_ratio = server, table["verify_steps"]
    our_ratio = ours, table["ours_verify_steps"]
    return {
        "server": ratio_interval(*server_ratio, seed).as_dict(),
        "ours": ratio_interval(*our_ratio, seed).as_dict(),
        "difference": difference_interval(server_ratio, our_ratio, seed).as_dict(),
    }


def _agreement(length: dict, different: list[str]) -> str:
    """Return in words whether both sides agree. different: positions where they do not."""
    if length["server"]["value"] == 1.0:
        return "the server accepts nothing"
    agreed = agree(length)
    if agreed is None:
        return "too few prompts to tell"
    if not agreed:
        return "they differ beyond the interval"
    positions = f", but not at {', '.join(different)}" if different else ", at every position too"
    return f"they agree, each inside the other's interval{positions}"


# ---- as tables to read


def round_trip_table(record: dict) -> pd.DataFrame:
    """Return what the running server feeds the drafter, beside what it was trained on."""
    trip = record["round_trip"]
    served = record.get("drafter")
    if served is None:
        return pd.DataFrame(
            [{"": "boundaries", "served": "not served", "trained": str(trip["trained"])}]
        )
    rows = [
        {"": "boundaries", "served": str(trip["served"]), "trained": str(trip["trained"])},
        {"": "layer ids", "served": str(trip["ids"]), "trained": ""},
    ]
    rows += [
        {"": cause["cause"].split(",")[0], "served": cause["found"], "trained": cause["expected"]}
        for cause in record["causes"]
        if cause["cause"].endswith("as it was trained")
    ]
    rows.append({"": "algorithm", "served": served["algorithm"], "trained": "EAGLE3"})
    return pd.DataFrame(rows)


def walked_prompts(
    config: Config, drafter: Drafter, store: Store, prompts: list[Prompt]
) -> dict | None:
    """Return the offline estimate over the prompts that the server answers, for as many tokens.

    The keys are those of walk.json. Return None where the store has none of these prompts, and for
    trees and sampled texts, which the estimate does not cover.
    """
    stored = set(store.samples("heldout"))
    ids = [prompt.id for prompt in prompts[: config.serve_prompts or None] if prompt.id in stored]
    if not ids or config.temperature or config.speculative_eagle_topk > 1:
        return None
    table = walk(drafter, store, ids, config.speculative_num_steps, config.decode_new_tok)
    tokens = table["accepted"] + table["verify_steps"]
    length = ratio_interval(tokens, table["verify_steps"], config.seed)
    return {
        "counts": {"prompts": len(table)},
        "acceptance_length": length.as_dict(),
        "by_position": position_ratios(table, config),
    }


def sides(walked: dict, served: dict, same_prompts: dict | None = None) -> list[dict]:
    """Return offline estimate, our decoding and, where it was served, the server.

    Each is {"name", "acceptance_length", "survival" by position}.
    walked: walk.json, over the store's samples. served: served.json.
    same_prompts: `walked_prompts`, over the prompts of `served`; it replaces `walked`.
    The names say how many samples or prompts the numbers are over.
    """
    n_prompts = served["counts"]["prompts"]
    offline = same_prompts or walked
    offline_side = {
        "name": f"offline estimate, {_offline_scope(walked, same_prompts, n_prompts)}",
        "acceptance_length": offline["acceptance_length"],
        "survival": [position["survival"] for position in offline["by_position"]],
    }
    our_side = {
        "name": f"our decoding, {n_prompts} prompts",
        "acceptance_length": served["decoded"]["acceptance_length"],
        "survival": [position["ours"] for position in served["by_position"]],
    }
    if "not_served" in served:
        return [offline_side, our_side]
    server_side = {
        "name": f"the server, {n_prompts} prompts",
        "acceptance_length": served["acceptance_length"],
        "survival": [position["server"] for position in served["by_position"]],
    }
    return [offline_side, our_side, server_side]


def _offline_scope(walked: dict, same_prompts: dict | None, n_prompts: int) -> str:
    if same_prompts is None:
        return f"{walked['counts']['samples']} samples"
    n_walked = same_prompts["counts"]["prompts"]
    if n_walked < n_prompts:
        return f"{n_walked} of these prompts"
    return f"{n_walked} prompts"


def side_table(columns: list[dict]) -> pd.DataFrame:
    """Return `sides` as a table with a column each, numbers with their intervals.

    The rows are the acceptance length and, for each position, the share of verify steps that
    accept at least so many draft tokens.
    """
    n_positions = len(columns[0]["survival"])
    rows = [
        {"": "acceptance length"}
        | {side["name"]: interval_text(side["acceptance_length"]) for side in columns}
    ]
    for i in range(n_positions):
        cells = {side["name"]: interval_text(side["survival"][i]) for side in columns}
        rows.append({"": f"at least {i + 1} accepted"} | cells)
    return pd.DataFrame(rows)
