"""The same number from both sides: what our decoding accepts, and what the server that serves the drafter says that it accepts.

    python -m eyas evaluate served --profile smoke        # after `evaluate decode`; exports the drafter, starts SGLang with it and, to compare texts and time, without it
    python -m eyas evaluate served -p serve_url http://host:port     # a server of your own that serves the drafter already; nothing is started

How SGLang 0.5.23 counts, read in `batch_result_processor._resolve_spec_v2_tokens` and `tokenizer_manager._calculate_spec_decoding_metrics`:
  spec_verify_ct            + 1 for each verify pass over a request that has not ended; the prefill, which gives the first token, is none
  spec_num_correct_drafts   + the drafts of the step that equal the target's own choice, without the bonus token; the last step is counted whole, whatever
                            `max_new_tokens` cuts away, and drafts behind an accepted end-of-text token count too, though nothing of them is ever seen
  spec_accept_length        completion_tokens / spec_verify_ct: the completion has the prefill's token in it, which is no verify step's, and lacks what was
                            cut off. That is not (accepted + steps) / steps, and for short answers not near it: it is not used here
  avg_spec_accept_length    of /server_info: the same over everything since the server started. Not used either
Ours (`eyas.evaluation.acceptance`) is the same but for the end of the text: drafts behind it are neither accepted nor proposed. So each answer is counted again from what
its steps accepted, one after the other (`meta_info.eyas_accepted`, by the plugin; the sums have to be SGLang's own), and from its tokens. The server is asked for
`speculative_num_steps` tokens more than are counted, so that an end of the text inside the last step shows, as our decoder sees it.

`check` compares acceptance length and every position, paired by prompt; the boundaries that the running model feeds the drafter against those it was trained on;
and the text against that of the same server without a drafter. Greedily and in float32 all of it is equal to the last token; in bfloat16 rounding turns
ties around, and drawn texts are others, so there the intervals have to say it.
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
from eyas.evaluation.served_client import COMMAND, Answer, Asker, speed
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


@dataclass(frozen=True)
class Served:
    """`record` is served.json, `prompts` the counts of both sides, one row a prompt (ours as `ours_*`)."""

    record: dict
    prompts: pd.DataFrame

    @property
    def passed(self) -> bool:
        """Nothing is off, and in float32 the text is that of the server without a drafter."""
        same = self.record["identical"]
        return not self.record["off"] and (
            same is None or same["differing"] == 0 or self.record["settings"]["dtype"] != "float32"
        )

    def __str__(self) -> str:
        r = self.record
        same = r["identical"]
        lines = [
            f"acceptance length (bonus token included), {r['counts']['prompts']} prompts: the server says {interval_text(r['acceptance_length'])} in {r['settings']['dtype']}, "
            f"our decoding {interval_text(r['decoded']['acceptance_length'])} in {r['settings']['decoded_dtype']}",
            f"difference, paired by prompt: {interval_text(r['difference'])}: {r['verdict']}; in {r['same_counts']} of {r['counts']['prompts']} prompts every position counts the same",
            *(
                f"  position {p['position']}: at least so many accepted in {interval_text(p['server'])} of the server's verify steps, {interval_text(p['ours'])} of ours, "
                f"difference {interval_text(p['difference'])}"
                for p in r["by_position"]
            ),
            f"boundaries that feed the drafter: {r['round_trip']['served']}, trained on {r['round_trip']['trained']}, ids {r['round_trip']['ids']}",
            "output beside the server without a drafter: not compared"
            if same is None
            else f"output identical to the server without a drafter: {same['prompts'] - same['differing']} of {same['prompts']} prompts",
        ]
        if r["speed_ratio"]:
            lines.append(
                f"one request at a time, {r['speed_prompts']} prompts: {interval_text(r['speed_ratio'])} times the speed of the server without a drafter, {r['settings']['dtype']}, "
                f"prefill left out, both {'with' if r['settings']['overlap'] else 'without'} SGLang's overlap scheduler"
            )
        if r["off"]:
            lines.append(
                "what is known to cause that, checked one by one:\n"
                + cause_table(r).to_string(index=False, justify="left")
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class NotServed:
    """A drafter that this SGLang cannot serve. `record` is served.json: the reason and the next command under "not_served", our own side of the comparison, and nothing of a server."""

    record: dict

    def __str__(self) -> str:
        return f"not served: {self.record['not_served']['reason']}\nnext: {self.record['not_served']['next']}"


def check_or_reason(
    config: Config, target: Target, drafter: Drafter, prompts: list[Prompt]
) -> Served | NotServed:
    """`check`, or, where SGLang cannot serve a drafter of that shape, why: a page of other results goes on. Any other EyasError stops it."""
    refused = unservable(config.judged, drafter, target)
    if refused is None:
        return check(config, target, drafter, prompts)
    prompts = prompts[: config.serve_prompts or None]
    _, table = our_decoding(config, prompts)
    steps = range(1, config.speculative_num_steps + 1)
    record = {
        "settings": {
            **judged_file(config),
            "eval_set": config.eval_set,
            "target": target.name,
            "target_fingerprint": target.fingerprint,
            "boundaries": list(drafter.config.boundaries),
        },
        "not_served": {"reason": refused.found, "next": refused.next_command},
        "counts": {"prompts": len(table)},
        "decoded": {
            "acceptance_length": ratio_interval(
                table["accepted"] + table["verify_steps"], table["verify_steps"], config.seed
            ).as_dict()
        },
        "by_position": [
            {
                "position": i,
                "ours": ratio_interval(
                    table[f"accepted_{i}"], table["verify_steps"], config.seed
                ).as_dict(),
            }
            for i in steps
        ],
        "identical": None,
        "round_trip": {
            "served": None,
            "trained": list(drafter.config.boundaries),
            "ids": None,
            "equal": None,
        },
        "causes": [
            {
                "cause": "a shape that SGLang can serve",
                "found": refused.found,
                "expected": refused.expected,
                "ok": False,
            }
        ],
    }
    keep_earlier(config.acceptance_dir, OF_THE_SERVER, record)
    (config.acceptance_dir / "served.parquet").unlink(missing_ok=True)
    write_json(config.acceptance_dir / "served.json", record)
    return NotServed(record)


def check(
    config: Config,
    target: Target,
    drafter: Drafter,
    prompts: list[Prompt],
    folder: Path | None = None,
) -> Served:
    """Serve the drafter and compare what the server accepts with `eyas evaluate decode` on the same prompts. Writes served.parquet and, last, served.json.

    `folder`: a checkpoint that lies there already, by default the drafter is exported. With `serve_timed_prompts` both servers are up at once, else one after the other.
    EyasError: our side is not there, or is of other settings; float32 on a GPU; the server feeds other boundaries; it counts in a way that is not understood.
    """
    check_serve_dtype(config)
    prompts = prompts[: config.serve_prompts or None]
    decoded, ours = our_decoding(config, prompts)
    serving = dataclasses.replace(config, dtype=config.serve_dtype, port=0)
    n, rate, texts = len(prompts), None, None
    with ExitStack() as up, Progress(n if config.serve_url else 2 * n, "prompts") as progress:

        def done(answer: Answer) -> None:
            progress.update(samples=1, tok=len(answer.output_ids))

        if config.serve_url:
            server = Server(config.serve_url.rstrip("/"))
        else:
            folder = folder or export_sglang(
                drafter, target, config.judged.export_dir, made_from=made_from(config.judged)
            )
            server = up.enter_context(
                serving_up(serving, folder, config.server_dir / "drafting", tied=True)
            )
        status = server.status()
        trip = round_trip(status, drafter)
        same_settings(status, config)
        drafting = Asker(server, config)
        try:
            drafting.one(prompts[0], 8)  # warm-up
            answers = drafting.all(prompts, config.concurrency, done)
        except EyasError as error:
            raise with_faults(error, status, drafter) from None
        if not config.serve_url:
            if not config.serve_timed_prompts:
                up.close()
            plain = Asker(
                up.enter_context(serving_up(serving, None, config.server_dir / "plain", tied=True)),
                config,
            )
            plain.one(prompts[0], 8)
            texts = [answer.output_ids for answer in plain.all(prompts, config.concurrency, done)]
            if config.serve_timed_prompts:
                rate = speed(plain, drafting, prompts[: config.serve_timed_prompts], config.seed)
    table = compare_prompts(
        config, prompts, answers, ours, texts if config.temperature == 0 else None
    )  # drawn texts are others every time
    record = summarise(config, target, drafter, status, trip, decoded, table)
    record["speed_ratio"], record["speed_prompts"] = (
        rate,
        min(config.serve_timed_prompts, n) if rate else 0,
    )
    record["causes"] = causes(config, target, drafter, status, record, table)
    keep_earlier(config.acceptance_dir, OF_THE_SERVER, record)
    write_atomic(config.acceptance_dir / "served.parquet", table.to_parquet)
    write_json(config.acceptance_dir / "served.json", record)
    return Served(record, table)


def check_serve_dtype(config: Config) -> None:
    """EyasError where the server that would be started could not compute in `serve_dtype`. One's own is served as it is."""
    if not config.serve_url:
        check_dtype(config, config.serve_dtype, "serve_dtype")


def our_decoding(config: Config, prompts: list[Prompt]) -> tuple[dict, pd.DataFrame]:
    """acceptance.json and the rows of acceptance.parquet for these prompts, in their order. EyasError: not decoded, with other settings, or other prompts."""
    again = "python -m eyas evaluate decode"
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
            again,
        )
    record, table = read_json(path), read_parquet(path.with_suffix(".parquet")).set_index("id")
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
    apart = [
        f"{name} {record['settings'].get(name)!r}, not {value!r}"
        for name, value in asked.items()
        if record["settings"].get(name) != value
    ]
    if apart:
        raise EyasError(
            f"run {config.run_name!r} decoded with other settings: {'; '.join(apart)}",
            "the same on both sides",
            again,
        )
    missing = [
        p.id
        for p in prompts
        if p.id not in table.index or table.loc[p.id, "prompt_tok"] != len(p.input_ids)
    ]
    if missing:
        raise EyasError(
            f"run {config.run_name!r} decoded other prompts: {len(missing)} of {len(prompts)} are not among them, {missing[0]} first",
            "the same prompts, to be paired",
            again,
        )
    return record, table.loc[[p.id for p in prompts]].reset_index()


def round_trip(status: dict, drafter: Drafter) -> dict:
    """The boundaries that the running model feeds the drafter, and those it was trained on. EyasError: no drafter there, or other boundaries, and what that means."""
    served, trained = status["drafter"], list(drafter.config.boundaries)
    if served is None:
        raise EyasError(
            f"the server at {status['url']} runs without a drafter",
            "--speculative-algorithm EAGLE3 with the exported drafter",
            COMMAND,
        )
    found = served.get("boundaries")
    if found is not None and list(found) != trained:
        raise EyasError(
            f"the server feeds the drafter boundaries {list(found)} (layer ids {served.get('ids')})",
            f"{trained}, those it was trained on: it would be given states that it has never seen, without an error, and one wrong layer costs about 0.1 of acceptance length",
            "python -m eyas drafter export writes the ids that this SGLang needs",
        )
    return {
        "served": found and list(found),
        "trained": trained,
        "ids": served.get("ids"),
        "equal": None if found is None else True,
    }


def same_settings(status: dict, config: Config) -> None:
    """EyasError: the server, one's own, drafts with other settings than the profile's, whose counts could not be read."""
    asked = asked_settings(config)
    apart = {
        NAMES[name]: name for name in asked if status["drafter"][name] not in (None, asked[name])
    }
    if apart:
        raise EyasError(
            "the server drafts with "
            + ", ".join(f"{ours} {status['drafter'][name]}" for ours, name in apart.items()),
            ", ".join(f"{ours} {asked[name]}" for ours, name in apart.items()),
            "python -m eyas evaluate decode, then this again, both with "
            + " ".join(f"-p {ours} {status['drafter'][name]}" for ours, name in apart.items()),
        )


def summarise(
    config: Config,
    target: Target,
    drafter: Drafter,
    status: dict,
    trip: dict,
    decoded: dict,
    table: pd.DataFrame,
) -> dict:
    """Counts, then ratios with intervals over prompts. `off`: the acceptance length is exactly 1, or not ours."""
    steps = range(1, config.speculative_num_steps + 1)

    def pair(top: str, bonus: bool) -> dict[str, dict]:
        sides = [
            (
                table[f"{side}{top}"] + bonus * table[f"{side}verify_steps"],
                table[f"{side}verify_steps"],
            )
            for side in ("", "ours_")
        ]
        return {
            "server": ratio_interval(*sides[0], config.seed).as_dict(),
            "ours": ratio_interval(*sides[1], config.seed).as_dict(),
            "difference": difference_interval(*sides, config.seed).as_dict(),
        }

    length = pair("accepted", True)
    by_position = [
        {
            "position": i,
            "accepted": int(table[f"accepted_{i}"].sum()),
            "ours_accepted": int(table[f"ours_accepted_{i}"].sum()),
        }
        | pair(f"accepted_{i}", False)
        for i in steps
    ]
    apart = [f"position {p['position']}" for p in by_position if agree(p) is False]
    nothing = length["server"]["value"] == 1.0
    agreed = agree(length)
    verdict = (
        "the server accepts nothing"
        if nothing
        else "too few prompts to tell"
        if agreed is None
        else "they differ beyond the interval"
        if not agreed
        else (
            "they agree, each inside the other's interval"
            + (f", but not at {', '.join(apart)}" if apart else ", at every position too")
        )
    )
    compared = table["identical"].notna().all()
    return {
        "settings": {
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
        },
        "counts": {
            "prompts": len(table),
            **{
                name: int(table[name].sum())
                for name in (
                    "tok",
                    "verify_steps",
                    "accepted",
                    "ours_verify_steps",
                    "ours_accepted",
                )
            },
        },
        "acceptance_length": length["server"],
        "decoded": {"acceptance_length": length["ours"]},
        "difference": length["difference"],
        "by_position": by_position,
        "same_counts": int(table["same_counts"].sum()),
        "verdict": verdict,
        "off": bool(nothing or agreed is False or apart),
        "identical": {"prompts": len(table), "differing": int(table["identical"].eq(False).sum())}
        if compared
        else None,  # None is not False
        "repeated_bigrams": ratio_interval(
            table["repeated_bigrams"], table["bigrams"], config.seed
        ).as_dict(),
        "round_trip": trip,
        "drafter": {name: value for name, value in status["drafter"].items() if name != "path"},
        "headline": {name: length["server"][name] for name in ("value", "low", "high")}
        | {"prompts": len(table)},
    }


def round_trip_table(record: dict) -> pd.DataFrame:
    """What the running server feeds the drafter, beside what it was trained on."""
    trip, served = record["round_trip"], record.get("drafter")
    if served is None:
        return pd.DataFrame(
            [{"": "boundaries", "served": "not served", "trained": str(trip["trained"])}]
        )
    return pd.DataFrame(
        [
            {"": "boundaries", "served": str(trip["served"]), "trained": str(trip["trained"])},
            {"": "layer ids", "served": str(trip["ids"]), "trained": ""},
            *(
                {"": row["cause"].split(",")[0], "served": row["found"], "trained": row["expected"]}
                for row in record["causes"]
                if row["cause"].endswith("as it was trained")
            ),
            {"": "algorithm", "served": served["algorithm"], "trained": "EAGLE3"},
        ]
    )


def walked_prompts(
    config: Config, drafter: Drafter, store: Store, prompts: list[Prompt]
) -> dict | None:
    """The offline estimate over the prompts that the server answers and for as many tokens, in walk.json's names; None where the store has none of them, or for what it does not
    estimate so (trees, drawn texts)."""
    stored = set(store.samples("heldout"))
    ids = [prompt.id for prompt in prompts[: config.serve_prompts or None] if prompt.id in stored]
    if not ids or config.temperature or config.speculative_eagle_topk > 1:
        return None
    table = walk(drafter, store, ids, config.speculative_num_steps, config.decode_new_tok)
    return {
        "counts": {"prompts": len(table)},
        "acceptance_length": ratio_interval(
            table["accepted"] + table["verify_steps"], table["verify_steps"], config.seed
        ).as_dict(),
        "by_position": position_ratios(table, config),
    }


def sides(walked: dict, served: dict, same: dict | None = None) -> list[dict]:
    """Offline estimate, our decoding and, where it was served, the server: {"name", "acceptance_length", "survival" by position}.

    The estimate is `same` (`walked_prompts`), on the prompts of the other two (served.json); without it `walked` (walk.json), on the store's samples. Names say of how many.
    """
    n = served["counts"]["prompts"]
    offline = same or walked
    of = (
        f"{walked['counts']['samples']} samples"
        if same is None
        else f"{same['counts']['prompts']} {'of these ' if same['counts']['prompts'] < n else ''}prompts"
    )
    found = [
        {
            "name": f"offline estimate, {of}",
            "acceptance_length": offline["acceptance_length"],
            "survival": [p["survival"] for p in offline["by_position"]],
        },
        {
            "name": f"our decoding, {n} prompts",
            "acceptance_length": served["decoded"]["acceptance_length"],
            "survival": [p["ours"] for p in served["by_position"]],
        },
    ]
    if "not_served" in served:
        return found
    return [
        *found,
        {
            "name": f"the server, {n} prompts",
            "acceptance_length": served["acceptance_length"],
            "survival": [p["server"] for p in served["by_position"]],
        },
    ]


def side_table(found: list[dict]) -> pd.DataFrame:
    """`sides` to read: a column each, acceptance length and the share of verify steps that accept at least so many drafts, with intervals."""
    names = [
        "acceptance length",
        *(f"at least {i} accepted" for i in range(1, len(found[0]["survival"]) + 1)),
    ]
    return pd.DataFrame(
        [
            {"": name}
            | {
                side["name"]: interval_text([side["acceptance_length"], *side["survival"]][i])
                for side in found
            }
            for i, name in enumerate(names)
        ]
    )
