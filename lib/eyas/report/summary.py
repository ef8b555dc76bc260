"""Say in words and numbers what a run's run.json holds.

The index uses it, the comparison of two runs, and `python -m eyas report summary RUN`. A run.json
of an older version lacks fields, and that of a run that still runs or failed has no headline. What
is missing is left out.
"""

import re

from eyas.evaluation.verdict import MEASURES, Measure, answer, comma_interval, verdict
from eyas.progress import duration_text


def when(started: str | None) -> str:
    """2026-11-29T17:20:31+00:00 -> 2026-11-29 17:20 UTC."""
    return started[:16].replace("T", " ") + " UTC" if started else ""


def failed_notebook(run: dict) -> dict | None:
    return next((n for n in run.get("notebooks") or [] if n["state"] == "failed"), None)


def sentence(run: dict) -> str:
    """Return the run in one sentence: its answer, or how it ended and where."""
    failed, headline = failed_notebook(run), run.get("headline")
    if failed:
        problem = failed.get("exception") or {}
        where = f", cell {problem['cell']} of {problem['cells']}" if problem.get("cell") else ""
        return f"Failed in {failed['name']}{where}: {problem.get('kind', 'no word of why')}."
    if run["state"] == "running":
        at = next((n["name"] for n in run.get("notebooks") or [] if n["state"] == "running"), None)
        return f"Still running{f', at {at}' if at else ''}."
    if run["state"] != "ok":
        said = {"died": "Killed", "interrupted": "Interrupted", "failed": "Failed"}.get(
            run["state"], run["state"].capitalize()
        )
        at = next(
            (
                n["name"]
                for n in run.get("notebooks") or []
                if n["state"] in ("interrupted", "running")
            ),
            None,
        )
        return f"{said}{f' in {at}' if at else ''}."
    if headline:
        return verdict(headline)
    if run.get("layer_choice"):
        return re.match(r".+?\.(?=\s|$)|.+", run["layer_choice"]).group()
    return "No acceptance was measured in this run."


def more(run: dict) -> str:
    """Return what the study of layers says beyond `sentence`; "" without one."""
    choice = run.get("layer_choice") or "" if run["state"] == "ok" else ""
    return choice.removeprefix(sentence(run)).strip()


def what_to_do(run: dict) -> str:
    """Return the next step after a bad end, commands in `code`; "" where nothing is wrong."""
    failed = failed_notebook(run)
    if failed:
        return (failed.get("exception") or {}).get("what_to_do", "")
    if run["state"] in ("died", "interrupted", "failed"):
        return (
            f"run `{run.get('command') or 'python -m eyas report'}` again; finished work is kept."
        )
    return (
        "write it again: `python -m eyas report --profile demo`"
        if run["state"] == "unreadable"
        else ""
    )


def numbers(run: dict) -> list[tuple[Measure, dict]]:
    """Return the headline's numbers that were measured, in the order of MEASURES."""
    headline = run.get("headline") or {}
    return [
        (m, headline[m.key])
        for m in MEASURES
        if (headline.get(m.key) or {}).get("value") is not None
    ]


def warning(run: dict) -> str:
    """Return the warning that looping text explains part of the acceptance; "" without one.

    Older runs did not record it.
    """
    return (run.get("headline") or {}).get("repeats_warning") or ""


def same_text(headline: dict) -> list[tuple[str, str]]:
    """Return (dtype, "40 of 40 prompts"): how much of the output equals greedy output."""
    rows = (
        [("float32", f"{headline['identical_prompts']} of {headline['decoded_prompts']} prompts")]
        if headline.get("identical_float32") is not None
        and {"identical_prompts", "decoded_prompts"} <= set(headline)
        else []
    )
    again = headline.get("bfloat16") or {}
    if again.get("prompts"):
        ties = (
            f"; {again['ties']} of the {again['differing']} others at a tie"
            if again["differing"]
            else ""
        )
        rows.append(
            (
                "bfloat16",
                f"{again['prompts'] - again['differing']} of {again['prompts']} prompts{ties}",
            )
        )
    return rows


def target(run: dict) -> str:
    return (run.get("headline") or {}).get("target") or run.get("settings", {}).get("target", "")


def boundaries(run: dict) -> str:
    """Return the boundaries that feed the drafter; before it is judged, those of the settings."""
    settings = run.get("settings", {})
    if settings.get("boundaries") == []:
        settings = {"boundaries": ["2", "N//2", "N-3"]}  # the target's own; N is not in the record
    found = (run.get("headline") or {}).get("boundaries") or settings.get("boundaries") or []
    return ", ".join(map(str, found))


def code_state(run: dict) -> str:
    """Return commit and state of the code, such as "14eb601d7a8b, clean"."""
    git = run.get("git") or {}
    if git.get("commit"):
        state = "with uncommitted changes" if git.get("dirty") else "clean"
        return f"{git['commit'][:12]}, {state}"
    return "not a git checkout" if git else ""


def machine(run: dict) -> str:
    found = run.get("machine") or {}
    parts = (
        f"{found['cores']} cores" if "cores" in found else "",
        found.get("gpu") or "no GPU",
        f"{found['memory_gib']} GiB" if "memory_gib" in found else "",
    )
    return ", ".join(filter(None, parts)) if found else ""


def decoding(run: dict) -> str:
    """Return in words what was decoded and how; "" where no acceptance was measured."""
    s = run.get("settings") or {}
    names = (
        "eval_set",
        "decode_prompts",
        "decode_new_tok",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "temperature",
    )
    if not run.get("headline") or not set(names) <= set(s):
        return ""
    shape = (
        f"a chain of {s['speculative_num_steps']} drafts"
        if s["speculative_eagle_topk"] == 1
        else f"a tree of {s['speculative_num_steps']} levels, top-k {s['speculative_eagle_topk']}"
    )
    how = "greedy" if s["temperature"] == 0 else f"temperature {s['temperature']:g}"
    prompts = "held-out prompts" if s["eval_set"] == "heldout" else f"prompts of {s['eval_set']}"
    count = run["headline"].get("decoded_prompts", s["decode_prompts"])
    return f"{count} {prompts}, {s['decode_new_tok']} tokens each at most, {shape}, {how}"


def served(headline: dict) -> str:
    """Return what the server's acceptance says beside ours, or why nothing was served.

    "" where it was not measured.
    """
    if headline.get("not_served"):
        return f"not served: {headline['not_served']}"
    found = headline.get("served") or {}
    if not found.get("verdict"):
        return ""
    return f"in {found['dtype']}, beside our decoding on the same prompts: {found['verdict']}"


def facts(run: dict) -> list[tuple[str, str]]:
    """Return (name, text) of what else is known of the run."""
    headline, versions = run.get("headline") or {}, run.get("versions") or {}
    outside = ""
    if headline.get("outside_vocab") is not None:
        share = headline["outside_vocab"]
        outside = f"; {share:.1%} of the tokens are outside the draft vocabulary"
    text = ""
    if headline.get("repeated_bigrams") is not None:
        text = (
            f"{headline['repeated_bigrams']:.1%} of the decoded bigrams repeat an earlier one "
            f"(a looping text is easy to draft){outside}"
        )
    again, ratio, bfloat16 = headline.get("bfloat16"), headline.get("speed_ratio_bfloat16"), ""
    if again and again.get("prompts"):
        bfloat16 = (
            f"{again['differing']} of {again['prompts']} outputs differ from greedy"
            + (f", {again['ties']} of them at a tie" if again["differing"] else "")
            + (
                f"; speed ratio {ratio['value']:.2f}{comma_interval(ratio)}"
                if ratio and ratio["value"] is not None
                else ""
            )
        )
    duration = duration_text(run["duration_s"]) if run.get("duration_s") is not None else ""
    earlier = (
        ", without the notebooks of earlier runs"
        if any(n.get("earlier") for n in run.get("notebooks") or [])
        else ""
    )
    found = [
        ("Profile", run.get("profile")),
        (
            "Target",
            f"{target(run)}, drafter fed from boundaries {boundaries(run)}"
            if headline
            else target(run),
        ),
        ("Data", headline.get("data")),
        ("Parity", headline.get("parity")),
        ("Decoding", decoding(run)),
        ("Text", text),
        ("Warning", warning(run)),
        ("Served", served(headline)),
        ("In bfloat16", bfloat16),
        ("Duration", duration and duration + earlier),
        ("Code", code_state(run)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Machine", machine(run)),
    ]
    return [(name, str(value)) for name, value in found if value]


def table(run: dict) -> list[tuple[str, str, str, str]]:
    """Return the main numbers: (name, value, 95 % interval, number of prompts)."""
    rows = [
        (
            f"{m.label}: {m.note}",
            f"{b['value']:.2f}",
            f"{b['low']:.2f} to {b['high']:.2f}" if b.get("low") is not None else "too few prompts",
            str(b.get("prompts", "")),
        )
        for m, b in numbers(run)
    ]
    return rows + [
        (f"Output identical to greedy, {dtype}", text, "", "")
        for dtype, text in same_text(run.get("headline") or {})
    ]


def lead(run: dict) -> str:
    """Return the acceptance length with its interval, in words; "" without one."""
    block = next((b for m, b in numbers(run) if m.key == "acceptance_length"), None)
    if not block:
        return ""
    return (
        f"Acceptance length {block['value']:.2f} tokens per verify step, bonus token included"
        f"{comma_interval(block)}, {block.get('prompts', '?')} prompts."
    )


def served_lead(run: dict) -> str:
    """Return what SGLang itself measured, speed and acceptance, or why it served nothing; ""."""
    if (run.get("headline") or {}).get("not_served"):
        return f"Not served: {run['headline']['not_served']}."
    found = {m.key: b for m, b in numbers(run)}
    length, ratio = found.get("served"), found.get("served_speed_ratio")
    said = []
    if length:
        said.append(
            f"acceptance length {length['value']:.2f}{comma_interval(length)}, "
            f"{length.get('prompts', '?')} prompts"
        )
    if ratio:
        text = answer(ratio)
        said.append(
            f"{text[0].lower()}{text[1:]}: {ratio['value']:.2f} times the same server without a "
            f"drafter{comma_interval(ratio)}, {ratio.get('prompts', '?')} prompts"
        )
    if not said:
        return ""
    dtype = f" in {length['dtype']}" if length and "dtype" in length else ""
    return f"Served by SGLang{dtype}: {'; '.join(said)}."


def notebook_states(run: dict) -> str:
    """Return the states of the notebooks: "01_server_setup ok, 02_extraction ok (earlier run)"."""
    return ", ".join(
        f"{n['name']} {n['state']}{' (earlier run)' if n.get('earlier') else ''}"
        for n in run.get("notebooks") or []
    )


def markdown(run: dict) -> str:
    """Return the run on one screen, as Markdown for an issue or a chat.

    It holds the answer, numbers with intervals, what went wrong, the command, versions and commit.
    """

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    lines = [
        f"### Eyas run {run['run_name']}, {when(run.get('started'))}",
        "",
        f"**{sentence(run)}**",
        "",
    ]
    if what_to_do(run):
        problem = (failed_notebook(run) or {}).get("exception") or {}
        if problem.get("ename"):
            lines += ["```", f"{problem['ename']}: {problem['evalue']}", "```", ""]
        elif run.get("problem"):
            lines += [run["problem"], ""]
        lines += [f"What to do: {what_to_do(run)}", ""]
    if more(run):
        lines += [more(run), ""]
    if lead(run):
        lines += [lead(run), ""]
    if served_lead(run):
        lines += [served_lead(run), ""]
    if warning(run):
        lines += [f"**WARNING:** {warning(run)}", ""]
    if table(run):
        lines += [
            "| | value | 95 % interval | prompts |",
            "|---|---|---|---|",
            *("| " + " | ".join(map(cell, row)) + " |" for row in table(run)),
            "",
        ]
    lines += [
        f"- {name}: {text}" for name, text in facts(run) if name not in ("Warning", "In bfloat16")
    ]
    lines += [f"- Notebooks: {notebook_states(run)}"] if notebook_states(run) else []
    return "\n".join([*lines, "", "```", run.get("command", ""), "```", ""])
