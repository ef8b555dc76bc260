"""Build the embedded prompt set from topics and phrasings. `python -m eyas prompts build`"""

import random
import re
from collections import Counter
from pathlib import Path

from eyas.errors import EyasError
from eyas.files import sha256_json
from eyas.prompts.prompt_set import Conversation, load_prompts, write_prompts

EXTRA_PER_TOPIC = 3  # conversations of each topic beyond one of each category
SYSTEM_SHARE = 0.08  # fraction of the conversations that have a system prompt
HELDOUT_SHARE = 0.1  # fraction of the topics


def build_prompts(seed: int = 0, more: int = 0) -> list[Conversation]:
    """Build our own prompt set: user turns only, no two conversations alike.

    - The same seed gives the same list.
    - Each topic gets one conversation of each category, and EXTRA_PER_TOPIC more.
    - With `more`, each topic gets that many other conversations instead. None of them is in the set
      itself, so they can be added to it.
    - HELDOUT_SHARE of the topics are held out. They are drawn from the topics whose words are in no
      other topic's texts and in no phrasing, so a held-out topic is never trained on.
    """
    from eyas.prompts.topics import DIALOGUES, PHRASINGS, TOPICS

    rng = random.Random(seed)
    heldout = _heldout_topics(rng)
    phrasings = {
        **{category: [(p,) for p in asked] for category, asked in PHRASINGS.items()},
        "dialogue": list(DIALOGUES),
    }
    categories = list(phrasings)
    # Every phrasing of a category is used before one is used again.
    decks = {category: [] for category in categories}
    conversations = []
    seen = set()
    counts = Counter()

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
            split = "heldout" if topic.name in heldout else "train"
            conversations.append(Conversation(id, category, topic.name, split, messages))

    def in_turn(number: int, n: int) -> list[str]:
        """Return n categories for topic `number`, so that all topics together use all alike."""
        return [categories[(number * n + i) % len(categories)] for i in range(n)]

    for number, topic in enumerate(TOPICS):
        add(topic, categories + in_turn(number, EXTRA_PER_TOPIC))
    if more:  # the set itself is built first, so that the others differ from it
        conversations.clear()
        for number, topic in enumerate(TOPICS):
            add(topic, in_turn(number, more))
    rng.shuffle(conversations)
    leaks = heldout_leaks(conversations)
    if leaks:
        raise EyasError(
            f"held-out topic {leaks[0][0]!r} is in the training conversation {leaks[0][1]}",
            "none",
            "correct the topics in lib/eyas/prompts/topics.py",
        )
    return conversations


def heldout_leaks(conversations: list[Conversation]) -> list[tuple[str, str]]:
    """Return (held-out topic, id of a training conversation with a word of it) of every such pair.

    The result must be empty.
    """
    from eyas.prompts.topics import TOPICS

    heldout = {c.topic for c in conversations if c.split == "heldout"}
    patterns = {topic.name: _stem_pattern(topic) for topic in TOPICS if topic.name in heldout}
    texts = {
        c.id: " ".join(m["content"] for m in c.messages if m["role"] != "assistant")
        for c in conversations
        if c.split == "train"
    }
    return [
        (name, id)
        for id, text in texts.items()
        for name, pattern in patterns.items()
        if pattern.search(text)
    ]


def _heldout_topics(rng: random.Random) -> set[str]:
    """Draw the held-out topics from those whose words are in no phrasing and no other topic."""
    from eyas.prompts import topics as data

    phrasings = [phrasing for of_category in data.PHRASINGS.values() for phrasing in of_category]
    turns = [turn for dialogue in data.DIALOGUES for turn in dialogue]
    asked = " ".join([*phrasings, *turns, *data.OPENINGS, *data.LENGTHS, *data.SYSTEMS])
    texts = {
        t.name: " ".join([t.name, t.items, t.measure, t.activity, *t.pair, *t.facts])
        for t in data.TOPICS
    }
    alone = []
    for topic in data.TOPICS:
        others = [text for name, text in texts.items() if name != topic.name]
        pattern = _stem_pattern(topic)
        if not any(pattern.search(text) for text in [asked, *others]):
            alone.append(topic.name)
    return set(rng.sample(alone, k=round(HELDOUT_SHARE * len(data.TOPICS))))


def _stem_pattern(topic) -> re.Pattern:
    """Return a pattern that finds the words of a topic.

    A name of several words ("ice cream") is one expression; the stems list it word by word.
    """
    words = sorted(set(topic.stems.split()) | {topic.name.lower()}, key=len, reverse=True)
    return re.compile(r"\b(" + "|".join(map(re.escape, words)) + ")", re.IGNORECASE)


def _fill(phrasing: tuple[str, ...], topic, rng: random.Random) -> tuple:
    """Return the messages of a phrasing, filled with a topic and random details.

    The order of the draws decides the texts: a change of it changes the whole prompt set.
    """
    from eyas.prompts import topics as data

    f1, f2, f3 = rng.sample(topic.facts, k=3)
    p, q = rng.sample(data.PEOPLE, k=2)
    a, b = rng.sample(topic.pair, k=2)
    values = dict(
        name=topic.name,
        items=topic.items,
        measure=topic.measure,
        activity=topic.activity,
        a=a,
        b=b,
        f1=f1,
        f2=f2,
        f3=f3,
        p=p,
        q=q,
        city=rng.choice(data.CITIES),
        day=rng.choice(data.DAYS),
        month=rng.choice(data.MONTHS),
        year=rng.randint(1950, 2020),
        n=rng.randint(12, 48),
        m=rng.randint(60, 240),
        k=rng.randint(3, 6),
        o=rng.choice(data.OPENINGS),
        l=rng.choice(data.LENGTHS),
    )
    messages = [{"role": "user", "content": turn.format_map(values)} for turn in phrasing]
    if rng.random() < SYSTEM_SHARE:
        messages.insert(0, {"role": "system", "content": rng.choice(data.SYSTEMS)})
    return tuple(messages)


def build_file(path: Path, seed: int, more: int = 0) -> str:
    """Write our own prompt set to `path` and return one line about it.

    Raise EyasError if the file holds responses or other conversations.
    """
    path = Path(path)
    conversations = build_prompts(seed, more)
    earlier = load_prompts(path).conversations if path.is_file() else conversations
    if earlier != conversations:
        if any(c.questions() != c for c in earlier):
            raise EyasError(
                f"{path} holds responses already",
                "a path where nothing is lost",
                "python -m eyas prompts generate --profile demo   (makes them afresh)",
            )
        raise EyasError(
            f"{path} holds other conversations already",
            "a path where nothing is lost",
            "another --path",
        )
    write_prompts(path, conversations)
    n_heldout = sum(c.split == "heldout" for c in conversations)
    n_categories = len({c.category for c in conversations})
    return (
        f"{path.name}: {len(conversations)} conversations, {n_heldout} of held-out topics,"
        f" {n_categories} categories"
    )
