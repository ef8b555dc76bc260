"""What a run's run.json says, in words and numbers: for the index, for two runs side by side, and for people: `python -m eyas summary RUN`.

A run.json of an older version lacks fields, and one of a run that is going on or has failed has no headline. What is missing is left out.
"""

import re
from dataclasses import dataclass

from eyas.progress import duration_text

DECODING = ("target", "eval_set", "prompt_set", "decode_new_tok", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
            "speculative_use_rejection_sampling", "temperature")  # fmt: skip
MACHINE = ("device", "threads", "machine", "torch")


@dataclass(frozen=True)
class Measure:
    """A number of the headline in run.json, there as {"value", "low", "high", "prompts"}: the ends of its 95 % interval are None with too few prompts.

    `needs`: the settings and conditions that have to be the same in two runs for the difference of their numbers to say something about the drafters.
    """

    key: str
    label: str
    note: str
    needs: tuple[str, ...]


MEASURES = (
    Measure("acceptance_length", "Acceptance length", "tokens per verify step, bonus token included", DECODING),
    Measure("prompt_lookup", "Without a drafter", "acceptance length of prompt-lookup n-grams, which cost nothing, over the same texts", DECODING),
    Measure("offline_estimate", "Offline estimate", "acceptance length from stored states", ("target", "prompt_set", "max_length", "speculative_num_steps")),
    Measure("served", "Served", "acceptance length that the server itself reports", DECODING),
    Measure("served_throughput", "Served throughput", "times the tokens per second of the same server without a drafter, at the fewest requests at a time", DECODING + MACHINE),
    Measure("served_speed_ratio", "Served speed ratio", "times the same server without a drafter, one request at a time, prefill left out", DECODING + MACHINE),
    Measure("speed_ratio", "Speed ratio", "times plain greedy decoding by the same code, float32", DECODING + MACHINE),
    Measure("speed_ratio_bfloat16", "Speed ratio in bfloat16", "times plain greedy decoding by the same code, bfloat16", DECODING + MACHINE),
)


def answer(ratio: dict, drawn: str = "prompts") -> str:
    """The answer that a speed ratio and its interval give; `drawn`: what the interval is over."""
    if ratio.get("low") is None:
        return f"Too few {drawn} for an answer"
    return "Serve it" if ratio["low"] > 1 else "Don't serve it" if ratio["high"] < 1 else "No clear gain"


def verdict(headline: dict) -> str:
    """The answer in one sentence, from the speed that is most like serving of those that were measured, and from the identity of the output in float32.

    In this order: throughput of the server with and without the drafter, its speed one request at a time in bfloat16, our own decoder's in bfloat16, in float32.
    """
    said, numbers = _speed(headline)
    if not said:
        return "No speed was measured in this run."
    if headline.get("identical_float32") is False:
        return f"Don't serve it: its output is not the target's own greedy output ({numbers})."
    return f"{said}: {numbers}."


def _speed(headline: dict) -> tuple[str, str]:
    """The answer that the most serving-like speed gives, and that speed in words; ("", "") without one."""
    blocks = {m.key: headline.get(m.key) or {} for m in MEASURES}
    throughput, single, half, full = (blocks[key] if blocks[key].get("value") is not None else None for key in ("served_throughput", "served_speed_ratio", "speed_ratio_bfloat16", "speed_ratio"))
    if throughput:
        first, *more = throughput["at"]
        at = [f"{first['value']:.2f} times the tokens per second of the same server without it, at {_requests(first)}{_comma_interval(first)}",
              *(f"{row['value']:.2f} at {row['parallel']}{_comma_interval(row)}" for row in more)]  # fmt: skip
        return answer_at(throughput["at"]), f"{'; '.join(at)}; served in {throughput['dtype']}, {throughput['prompts']} prompts, {throughput['rounds']} rounds"
    dtype = single and (single.get("dtype") or blocks["served"].get("dtype"))  # of older runs
    if single and dtype == "bfloat16":
        return answer(single), f"{single['value']:.2f} times the speed of the same server without it, one request at a time, prefill left out, served in bfloat16{_comma_interval(single)}{_prompts(single)}"
    if not (half or full):
        return "", ""
    first, dtype = (half, "bfloat16") if half else (full, "float32")
    numbers = f"{first['value']:.2f} times the speed of plain greedy decoding by our own decoder in {dtype}, prefill included{_comma_interval(first)}{_prompts(first)}"
    if half and full:
        said = answer(full)
        numbers += f"; in float32, {said[0].lower()}{said[1:]}: {full['value']:.2f} times{_comma_interval(full)}{_prompts(full)}"
    return answer(first), numbers


def answer_at(ratios: list[dict]) -> str:
    """The answer of throughputs at several numbers of requests at a time: the common one, or where the drafter is worth serving and what it is elsewhere."""
    said = [answer(ratio, "rounds") for ratio in ratios]
    if len({*said}) == 1:
        return said[0]
    parts = [f"{word} at {_requests(*(ratio for ratio, mine in zip(ratios, said) if mine == word))}" for word in dict.fromkeys(said)]
    return ", ".join([parts[0], *(part[0].lower() + part[1:] for part in parts[1:])])


def _requests(*ratios: dict) -> str:
    """1 and 4 requests at a time."""
    numbers = [str(ratio["parallel"]) for ratio in ratios]
    return f"{' and '.join(filter(None, (', '.join(numbers[:-1]), numbers[-1])))} request{'s' if numbers != ['1'] else ''} at a time"


def _prompts(block: dict) -> str:
    return f", {block['prompts']} prompts" if "prompts" in block else ""


def interval(block: dict) -> str:
    """95 % interval 1.81 to 2.05; '' without one."""
    return "" if block.get("low") is None else f"95 % interval {block['low']:.2f} to {block['high']:.2f}"


def _comma_interval(block: dict) -> str:
    return f", {interval(block)}" if interval(block) else ""


def when(started: str | None) -> str:
    """2026-11-29T17:20:31+00:00 -> 2026-11-29 17:20 UTC."""
    return started[:16].replace("T", " ") + " UTC" if started else ""


def failed_notebook(run: dict) -> dict | None:
    return next((n for n in run.get("notebooks") or [] if n["state"] == "failed"), None)


def sentence(run: dict) -> str:
    """The run in one sentence: its answer, or how it ended and where."""
    failed, headline = failed_notebook(run), run.get("headline")
    if failed:
        problem = failed.get("exception") or {}
        where = f", cell {problem['cell']} of {problem['cells']}" if problem.get("cell") else ""
        return f"Failed in {failed['name']}{where}: {problem.get('kind', 'no word of why')}."
    if run["state"] == "running":
        at = next((n["name"] for n in run.get("notebooks") or [] if n["state"] == "running"), None)
        return f"Still running{f', at {at}' if at else ''}."
    if run["state"] != "ok":
        said = {"died": "Killed", "interrupted": "Interrupted", "failed": "Failed"}.get(run["state"], run["state"].capitalize())
        at = next((n["name"] for n in run.get("notebooks") or [] if n["state"] in ("interrupted", "running")), None)
        return f"{said}{f' in {at}' if at else ''}."
    if headline:
        return verdict(headline)
    if run.get("layer_choice"):
        return re.match(r".+?\.(?=\s|$)|.+", run["layer_choice"]).group()
    return "No acceptance was measured in this run."


def more(run: dict) -> str:
    """What the study of layers says beyond `sentence`; ''."""
    choice = run.get("layer_choice") or "" if run["state"] == "ok" else ""
    return choice.removeprefix(sentence(run)).strip()


def what_to_do(run: dict) -> str:
    """The next step after a bad end, with its commands in `code`; '' where nothing is wrong."""
    failed = failed_notebook(run)
    if failed:
        return (failed.get("exception") or {}).get("what_to_do", "")
    if run["state"] in ("died", "interrupted", "failed"):
        return f"run `{run.get('command') or 'python -m eyas report'}` again; finished work is kept."
    return "write it again: `python -m eyas report --profile demo`" if run["state"] == "unreadable" else ""


def numbers(run: dict) -> list[tuple[Measure, dict]]:
    """The headline's numbers that were measured, in the order of MEASURES."""
    headline = run.get("headline") or {}
    return [(m, headline[m.key]) for m in MEASURES if (headline.get(m.key) or {}).get("value") is not None]


def warning(run: dict) -> str:
    """What acceptance says of looping text where that explains part of the figure; ''. Older runs did not record it."""
    return (run.get("headline") or {}).get("repeats_warning") or ""


def same_text(headline: dict) -> list[tuple[str, str]]:
    """How much of the output is the greedy one, by dtype: (dtype, "40 of 40 prompts")."""
    rows = [("float32", f"{headline['identical_prompts']} of {headline['decoded_prompts']} prompts")] if headline.get("identical_float32") is not None and {"identical_prompts", "decoded_prompts"} <= set(headline) else []
    again = headline.get("bfloat16") or {}
    if again.get("prompts"):
        ties = f"; {again['ties']} of the {again['differing']} others at a tie" if again["differing"] else ""
        rows.append(("bfloat16", f"{again['prompts'] - again['differing']} of {again['prompts']} prompts{ties}"))
    return rows


def target(run: dict) -> str:
    return (run.get("headline") or {}).get("target") or run.get("settings", {}).get("target", "")


def boundaries(run: dict) -> str:
    """Return the boundaries that feed the run's drafter; before it is judged, what its settings say."""
    settings = run.get("settings", {})
    if settings.get("boundaries") == []:
        settings = {"boundaries": ["2", "N//2", "N-3"]}  # the target's own; N is not in the record
    found = (run.get("headline") or {}).get("boundaries") or settings.get("boundaries") or []
    return ", ".join(map(str, found))


def code_state(run: dict) -> str:
    """14eb601d7a8b, clean."""
    git = run.get("git") or {}
    return f"{git['commit'][:12]}, {'with uncommitted changes' if git.get('dirty') else 'clean'}" if git.get("commit") else "not a git checkout" if git else ""


def machine(run: dict) -> str:
    found = run.get("machine") or {}
    parts = (f"{found['cores']} cores" if "cores" in found else "", found.get("gpu") or "no GPU", f"{found['memory_gib']} GiB" if "memory_gib" in found else "")
    return ", ".join(filter(None, parts)) if found else ""


def decoding(run: dict) -> str:
    """What was decoded and how, in words; '' where no acceptance was measured."""
    s = run.get("settings") or {}
    names = ("eval_set", "decode_prompts", "decode_new_tok", "speculative_num_steps", "speculative_eagle_topk", "temperature")
    if not run.get("headline") or not set(names) <= set(s):
        return ""
    shape = f"a chain of {s['speculative_num_steps']} drafts" if s["speculative_eagle_topk"] == 1 else f"a tree of {s['speculative_num_steps']} levels, top-k {s['speculative_eagle_topk']}"
    how = "greedy" if s["temperature"] == 0 else f"temperature {s['temperature']:g}"
    prompts = "held-out prompts" if s["eval_set"] == "heldout" else f"prompts of {s['eval_set']}"
    count = run["headline"].get("decoded_prompts", s["decode_prompts"])
    return f"{count} {prompts}, {s['decode_new_tok']} tokens each at most, {shape}, {how}"


def served(headline: dict) -> str:
    """What the server's acceptance says beside ours, or why there is none; '' where it was not measured."""
    if headline.get("not_served"):
        return f"not served: {headline['not_served']}"
    found = headline.get("served") or {}
    return f"in {found['dtype']}, beside our decoding on the same prompts: {found['verdict']}" if found.get("verdict") else ""


def facts(run: dict) -> list[tuple[str, str]]:
    """What else is known of the run, (name, text), the unknown left out."""
    headline, versions = run.get("headline") or {}, run.get("versions") or {}
    text = ""
    if headline.get("repeated_bigrams") is not None:
        text = (f"{headline['repeated_bigrams']:.1%} of the decoded bigrams repeat an earlier one (a looping text is easy to draft)"
                + (f"; {headline['outside_vocab']:.1%} of the tokens are outside the draft vocabulary" if headline.get("outside_vocab") is not None else ""))
    again, ratio, bfloat16 = headline.get("bfloat16"), headline.get("speed_ratio_bfloat16"), ""
    if again and again.get("prompts"):
        bfloat16 = (f"{again['differing']} of {again['prompts']} outputs differ from greedy" + (f", {again['ties']} of them at a tie" if again["differing"] else "")
                    + (f"; speed ratio {ratio['value']:.2f}{_comma_interval(ratio)}" if ratio and ratio["value"] is not None else ""))
    duration = duration_text(run["duration_s"]) if run.get("duration_s") is not None else ""
    earlier = ", without the notebooks of earlier runs" if any(n.get("earlier") for n in run.get("notebooks") or []) else ""
    found = [("Profile", run.get("profile")), ("Target", f"{target(run)}, drafter fed from boundaries {boundaries(run)}" if headline else target(run)),
             ("Data", headline.get("data")), ("Parity", headline.get("parity")), ("Decoding", decoding(run)), ("Text", text), ("Warning", warning(run)),
             ("Served", served(headline)), ("In bfloat16", bfloat16), ("Duration", duration and duration + earlier), ("Code", code_state(run)),
             ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())), ("Machine", machine(run))]  # fmt: skip
    return [(name, str(value)) for name, value in found if value]


def table(run: dict) -> list[tuple[str, str, str, str]]:
    """The main numbers: (name, value, 95 % interval, of how many prompts)."""
    rows = [(f"{m.label}: {m.note}", f"{b['value']:.2f}", f"{b['low']:.2f} to {b['high']:.2f}" if b.get("low") is not None else "too few prompts", str(b.get("prompts", "")))
            for m, b in numbers(run)]  # fmt: skip
    return rows + [(f"Output identical to greedy, {dtype}", text, "", "") for dtype, text in same_text(run.get("headline") or {})]


def lead(run: dict) -> str:
    """The acceptance length with its interval, in words; '' without one."""
    block = next((b for m, b in numbers(run) if m.key == "acceptance_length"), None)
    return f"Acceptance length {block['value']:.2f} tokens per verify step, bonus token included{_comma_interval(block)}, {block.get('prompts', '?')} prompts." if block else ""


def served_lead(run: dict) -> str:
    """The answer of the server itself, where its speed or its acceptance was measured, or why it served nothing; ''."""
    if (run.get("headline") or {}).get("not_served"):
        return f"Not served: {run['headline']['not_served']}."
    found = {m.key: b for m, b in numbers(run)}
    length, ratio = found.get("served"), found.get("served_speed_ratio")
    said = [f"acceptance length {length['value']:.2f}{_comma_interval(length)}, {length.get('prompts', '?')} prompts"] if length else []
    said += [f"{answer(ratio)[0].lower()}{answer(ratio)[1:]}: {ratio['value']:.2f} times the same server without a drafter{_comma_interval(ratio)}, {ratio.get('prompts', '?')} prompts"] if ratio else []
    return f"Served by SGLang{' in ' + length['dtype'] if length and 'dtype' in length else ''}: {'; '.join(said)}." if said else ""


def notebook_states(run: dict) -> str:
    """01_server_setup ok, 02_extraction ok (earlier run), ..."""
    return ", ".join(f"{n['name']} {n['state']}{' (earlier run)' if n.get('earlier') else ''}" for n in run.get("notebooks") or [])


def markdown(run: dict) -> str:
    """The run on one screen, fit for an issue or a chat: answer, numbers with intervals, what went wrong, the command, versions, commit."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    lines = [f"### Eyas run {run['run_name']}, {when(run.get('started'))}", "", f"**{sentence(run)}**", ""]
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
        lines += ["| | value | 95 % interval | prompts |", "|---|---|---|---|", *("| " + " | ".join(map(cell, row)) + " |" for row in table(run)), ""]
    lines += [f"- {name}: {text}" for name, text in facts(run) if name not in ("Warning", "In bfloat16")]
    lines += [f"- Notebooks: {notebook_states(run)}"] if notebook_states(run) else []
    return "\n".join([*lines, "", "```", run.get("command", ""), "```", ""])
