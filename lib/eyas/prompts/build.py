"""Build the embedded prompt set from topics and phrasings. `python -m eyas prompts build`"""

import random
import re
from collections import Counter
from pathlib import Path

from eyas.errors import EyasError
from eyas.files import sha256_json
from eyas.prompts.prompt_set import Conversation, load_prompts, write_prompts

EXTRA_PER_TOPIC = 3  # conversations of each topic beyond one of each category
SYSTEM_SHARE = 0.08  # conversations that bring their own system prompt
HELDOUT_SHARE = 0.1  # of the topics


def build_prompts(seed: int = 0, more: int = 0) -> list[Conversation]:
    """Our own prompt set: user turns only, the same list for the same seed, no two conversations alike.

    Each topic gets one conversation of each category and EXTRA_PER_TOPIC more. With `more`, that many others for each topic instead,
    none of them in the set itself: what is added to it where more text is wanted. HELDOUT_SHARE of the topics are held out; they are
    drawn from those topics whose words stand in no other topic's texts and in no phrasing, so a held-out topic is never trained on.
    """
    from eyas.prompts.topics import DIALOGUES, PHRASINGS, TOPICS

    rng = random.Random(seed)
    heldout = _heldout_topics(rng)
    phrasings = {
        **{category: [(p,) for p in asked] for category, asked in PHRASINGS.items()},
        "dialogue": list(DIALOGUES),
    }
    categories = list(phrasings)
    decks = {
        category: [] for category in categories
    }  # every phrasing is used before one is used again
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
            conversations.append(
                Conversation(
                    id,
                    category,
                    topic.name,
                    "heldout" if topic.name in heldout else "train",
                    messages,
                )
            )

    for number, topic in enumerate(TOPICS):
        add(
            topic,
            categories
            + [
                categories[(number * EXTRA_PER_TOPIC + i) % len(categories)]
                for i in range(EXTRA_PER_TOPIC)
            ],
        )
    if more:
        conversations.clear()
        for number, topic in enumerate(TOPICS):
            add(topic, [categories[(number * more + i) % len(categories)] for i in range(more)])
    rng.shuffle(conversations)
    leaks = heldout_leaks(conversations)
    if leaks:
        raise EyasError(
            f"held-out topic {leaks[0][0]!r} stands in the training conversation {leaks[0][1]}",
            "none",
            "mend the topics in lib/eyas/prompts/topics.py",
        )
    return conversations


def heldout_leaks(conversations: list[Conversation]) -> list[tuple[str, str]]:
    """(held-out topic, id of a training conversation with a word of it), for every such pair; empty is right."""
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
    from eyas.prompts import topics as data

    asked = " ".join(
        [
            *(p for ps in data.PHRASINGS.values() for p in ps),
            *(turn for d in data.DIALOGUES for turn in d),
            *data.OPENINGS,
            *data.LENGTHS,
            *data.SYSTEMS,
        ]
    )
    texts = {
        t.name: " ".join([t.name, t.items, t.measure, t.activity, *t.pair, *t.facts])
        for t in data.TOPICS
    }
    alone = [
        t.name
        for t in data.TOPICS
        if not any(
            _stem_pattern(t).search(text)
            for text in [asked, *(text for name, text in texts.items() if name != t.name)]
        )
    ]
    return set(rng.sample(alone, k=round(HELDOUT_SHARE * len(data.TOPICS))))


def _stem_pattern(topic) -> re.Pattern:
    # a name of several words ("ice cream") is one expression; it is listed in the stems word by word
    words = sorted(set(topic.stems.split()) | {topic.name.lower()}, key=len, reverse=True)
    return re.compile(r"\b(" + "|".join(map(re.escape, words)) + ")", re.IGNORECASE)


def _fill(phrasing: tuple[str, ...], topic, rng: random.Random) -> tuple:
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
    """Write our own prompt set to `path`; returns one line about it. EyasError rather than overwrite responses."""
    path = Path(path)
    conversations = build_prompts(seed, more)
    if path.is_file() and (there := load_prompts(path).conversations) != conversations:
        if any(m["role"] == "assistant" for c in there for m in c.messages):
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
    heldout = sum(c.split == "heldout" for c in conversations)
    return f"{path.name}: {len(conversations)} conversations, {heldout} of held-out topics, {len({c.category for c in conversations})} categories"
