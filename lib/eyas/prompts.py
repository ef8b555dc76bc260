"""Conversations: made from topics and phrasings, read from JSONL, answered by the target itself, encoded with its chat template.

    python -m eyas prompts build                        # writes data_manifests/eyas_chat.jsonl, user turns only
    python -m eyas prompts show                         # a few of each category
    python -m eyas prompts generate --profile demo      # asks the server for the target's own responses

A line of the file: {"id", "category", "topic", "split", "messages": [{"role", "content"}, ...]}. The split is by topic: a held-out topic
is in no training conversation, not even as a word.
"""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import EyasError
from eyas.files import sha256_file, sha256_json, write_text

SAFE_ID = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}")  # safe as a file name on every system
EXTRA_PER_TOPIC = 3  # conversations of each topic beyond one of each category
SYSTEM_SHARE = 0.08  # conversations that bring their own system prompt
HELDOUT_SHARE = 0.1  # of the topics


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


# ---- the prompt set: topics x phrasings


def build_prompts(seed: int = 0) -> list[Conversation]:
    """Our own prompt set: user turns only, the same list for the same seed, no two conversations alike.

    Each topic gets one conversation of each category and EXTRA_PER_TOPIC more. HELDOUT_SHARE of the topics are held out; they are
    drawn from those topics whose words stand in no other topic's texts and in no phrasing, so a held-out topic is never trained on.
    """
    from eyas.prompt_topics import DIALOGUES, PHRASINGS, TOPICS

    rng = random.Random(seed)
    heldout = _heldout_topics(rng)
    phrasings = {**{category: [(p,) for p in asked] for category, asked in PHRASINGS.items()}, "dialogue": list(DIALOGUES)}
    categories = list(phrasings)
    decks = {category: [] for category in categories}  # every phrasing is used before one is used again
    conversations, seen = [], set()
    for number, topic in enumerate(TOPICS):
        extra = [categories[(number * EXTRA_PER_TOPIC + i) % len(categories)] for i in range(EXTRA_PER_TOPIC)]
        counts = Counter()
        for category in categories + extra:
            while True:
                if not decks[category]:
                    decks[category] = rng.sample(phrasings[category], k=len(phrasings[category]))
                phrasing = decks[category].pop()
                messages = _fill(phrasing, topic, rng)
                key = sha256_json([m["content"].lower() for m in messages if m["role"] == "user"])
                if key not in seen:
                    break
            seen.add(key)
            counts[category] += 1
            slug = re.sub(r"[^a-z0-9]+", "-", topic.name.lower())
            conversations.append(Conversation(f"{category}-{slug}-{counts[category]}", category, topic.name, "heldout" if topic.name in heldout else "train", messages))
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
    """The conversations of a JSONL file. EyasError names the line: no file, nothing in it, bad JSON, a bad or doubled id, a bad field."""
    path = Path(path)
    build = "python -m eyas prompts build"
    if not path.is_file():
        raise EyasError(f"no prompt set {path}", "a JSONL file of conversations", build)
    conversations, lines = [], {}  # id -> line number
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise EyasError(f"{where} is not JSON ({error.msg} at column {error.colno})", "one JSON object a line", build) from None
        conversation = _conversation(row, where)
        if conversation.id in lines:
            raise EyasError(f"{where}: sample id {conversation.id!r} stands in line {lines[conversation.id]} already", "each id once", "give one of them another id")
        lines[conversation.id] = number
        conversations.append(conversation)
    if not conversations:
        raise EyasError(f"{path} holds no conversation", "at least one", build)
    return PromptSet(path, conversations, sha256_file(path))


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
        if message.get("finish", "stop") not in ("stop", "length"):
            raise EyasError(f"{where}: sample {id} has finish {message['finish']!r}", "'stop' or 'length'")
    return Conversation(id, str(row.get("category", "")), str(row.get("topic", "")), row["split"], tuple(messages))


def build_file(path: Path, seed: int) -> str:
    """Write our own prompt set to `path`; returns one line about it. EyasError rather than overwrite responses."""
    path = Path(path)
    if path.is_file() and any(m["role"] == "assistant" for c in load_prompts(path).conversations for m in c.messages):
        raise EyasError(f"{path} holds responses already", "a path where nothing is lost", "python -m eyas prompts generate --profile demo   (makes them afresh)")
    conversations = build_prompts(seed)
    write_prompts(path, conversations)
    heldout = sum(c.split == "heldout" for c in conversations)
    return f"{path}: {len(conversations)} conversations, {heldout} of held-out topics, {len({c.category for c in conversations})} categories"


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
