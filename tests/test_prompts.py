"""The prompt set, token ids and loss masks by the chat template, and what happens to responses when
server or client fail.
"""

import json
import re
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from eyas import cli
from eyas.capture.extract import _encode_all, make_manifest
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import ROOT, read_json, sha256_file, sha256_json
from eyas.models.target import load_target, with_kwargs
from eyas.prompts import build, chat_template, prompt_set, responses
from eyas.prompts.build import build_prompts
from eyas.prompts.chat_template import encode
from eyas.prompts.prompt_set import (
    Conversation,
    import_file,
    load_prompts,
    load_questions,
    usable,
)
from eyas.prompts.topics import TOPICS
from helpers.templates import CHATML, OPENS, STRIPS, THINKS
from helpers.tiny import CHAT_TEMPLATE

SHIPPED = ROOT / "data_manifests" / "eyas_chat.jsonl"
CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "masks.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == "
    "'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    return load_target("embedded").tokenizer()


@pytest.fixture
def with_template(tokenizer):
    """The same tokenizer under another chat template."""
    own = tokenizer.chat_template

    def change(template):
        tokenizer.chat_template = template
        return tokenizer

    yield change
    tokenizer.chat_template = own


def conversation(messages, id="some-sample") -> Conversation:
    return Conversation(id, "chat", "nothing", "train", tuple(messages))


def turns(*contents) -> list[dict]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]


def supervised(sample, tokenizer) -> list[str]:
    """Text of each run of supervised tokens, an end-of-turn token closing a run."""
    runs, previous = [], -2
    for t in np.flatnonzero(sample.loss_mask):
        if t != previous + 1:
            runs.append([])
        runs[-1].append(int(sample.input_ids[t]))
        previous = t
    return [tokenizer.decode(run) for run in runs]


# ---- the set


def test_the_set_is_large_varied_and_repeats():
    built = build_prompts(0)
    assert built == build_prompts(0) != build_prompts(1)
    assert 1550 <= len(built) <= 1700 and len({c.id for c in built}) == len(built)
    assert len({json.dumps(c.messages) for c in built}) == len(built)
    assert (
        min(Counter(c.category for c in built).values()) >= 100
        and len({c.category for c in built}) >= 12
    )
    assert all(
        c.messages[-1]["role"] == "user" and prompt_set.SAFE_ID.fullmatch(c.id) for c in built
    )
    assert not any(
        set("{}") & set(m["content"]) for c in built for m in c.messages
    )  # an unfilled place


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_heldout_topic_is_never_trained_on(seed):
    built = build_prompts(seed)
    heldout = {c.topic for c in built if c.split == "heldout"}
    training = [c for c in built if c.split == "train"]
    assert len(heldout) == 10 and sum(c.split == "heldout" for c in built) >= 120
    assert len({c.category for c in built if c.split == "heldout"}) == len(
        {c.category for c in built}
    )
    assert not heldout & {c.topic for c in training}
    # an own search, word by word: the beginnings of the topic's words in no training prompt
    words = {
        word
        for c in training
        for m in c.messages
        for word in re.findall(r"\w+", m["content"].lower())
    }
    for topic in TOPICS:
        if topic.name in heldout:
            for stem in topic.stems.split():
                assert not [word for word in words if word.startswith(stem)], (topic.name, stem)


def test_a_leak_is_found():
    built = build_prompts(0)
    name = next(c.topic for c in built if c.split == "heldout")
    leaky = Conversation(
        "leaky", "chat", "tea", "train", tuple(turns(f"What do you think about {name.upper()}?"))
    )
    assert build.heldout_leaks([*built, leaky]) == [(name, "leaky")]


def test_the_shipped_set_is_the_built_one():
    shipped = load_prompts(SHIPPED)
    assert [c.questions() for c in shipped.conversations] == build_prompts(0)
    assert shipped.hash == sha256_file(SHIPPED)


def test_selection_is_stable():
    shipped = load_prompts(SHIPPED)
    assert (
        shipped.select("heldout", 40, 0)
        == shipped.select("heldout", 80, 0)[:40]
        != shipped.select("heldout", 40, 1)
    )
    assert {c.split for c in shipped.select("heldout", 40, 0)} == {"heldout"}
    assert len(shipped.select("train", 10**9, 0)) == sum(
        c.split == "train" for c in shipped.conversations
    )


# ---- reading a file


def line(id="a", **changes) -> str:
    return json.dumps(
        {
            "id": id,
            "category": "chat",
            "topic": "x",
            "split": "train",
            "messages": turns("Hi", "Hello"),
        }
        | changes
    )


@pytest.mark.parametrize(
    "id",
    [
        "a/b",
        "../x",
        ".",
        "..",
        ".hidden",
        "",
        "x" * 300,
        "x" * 201,
        "ü",
        "a b",
        "a\n",
        "a\0b",
        None,
        7,
    ],
)
def test_bad_sample_ids_are_refused_by_name_and_line(tmp_path, id):
    path = tmp_path / "p.jsonl"
    path.write_text(line("fine") + "\n" + line(id) + "\n")
    with pytest.raises(EyasError, match="line 2: bad sample id") as error:
        load_prompts(path)
    assert (repr(id) if id is None or len(str(id)) < 60 else f"({len(id)} characters)") in str(
        error.value
    )


def test_safe_sample_ids_are_kept(tmp_path):
    ids = ["a", "A-1_b.c", "x" * 200, "con", "a..b"]
    (tmp_path / "p.jsonl").write_text("\n".join(map(line, ids)))
    assert [c.id for c in load_prompts(tmp_path / "p.jsonl").conversations] == ids


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds no conversation"),
        ("\n\n", "holds no conversation"),
        (
            line("a") + "\n" + line("b") + "\n" + line("a"),
            "line 3: sample id 'a' is in line 1 already",
        ),
        (line("a") + '\n{"id": "b", ', "line 2 is not JSON"),
        ("[1, 2]", "line 1 is not an object"),
        (line(split="test"), "sample a has split 'test'"),
        (line(messages=[]), "sample a has no messages"),
        (
            line(messages=[{"role": "critic", "content": "x"}]),
            "sample a has a message without role or text",
        ),
        (
            line(messages=[{"role": "user", "content": None}]),
            "sample a has a message without role or text",
        ),
        (line(messages=turns("\ud800")), "sample a has half a surrogate pair"),
        (line(category="\ud800"), "sample a has half a surrogate pair in its category"),
        (
            line(messages=[{"role": "assistant", "content": "x", "finish": "eos"}]),
            "sample a has finish 'eos'",
        ),
    ],
)
def test_bad_files_get_one_clear_line(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(EyasError, match=re.escape(message)):
        load_prompts(path)


QUESTION = {"role": "user", "content": "What is 2 + 2?"}
ANSWER = {"role": "assistant", "content": "4."}


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"tools": [{"type": "function"}]}, "the row has tools"),
        (
            {"messages": [QUESTION, ANSWER | {"reasoning_content": "Two and two."}]},
            "a turn has reasoning_content",
        ),
        (
            {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "a turn has tool_calls",
        ),
        (
            {"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "a turn has tool_calls",
        ),
        (
            {"messages": [QUESTION, {"role": "tool", "content": "4"}, ANSWER]},
            "a turn of 'tool'",
        ),
        ({"messages": [QUESTION, ANSWER | {"weight": 0.5}]}, "a turn has weight 0.5"),
    ],
)
def test_a_row_with_fields_that_are_not_used_is_left_out_with_its_reason(
    tmp_path, tokenizer, capsys, row, reason
):
    """Its chat template would read them, so the text would not be what the model sees."""
    path = tmp_path / "p.jsonl"
    rows = [json.loads(line("a", messages=[QUESTION, ANSWER])) | row, json.loads(line("b"))]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = load_prompts(path).conversations
    with pytest.raises(EyasError, match=f"sample a is left out: {reason}"):
        encode(first, tokenizer, 512)
    assert [c.id for c in usable([first, second])] == ["b"]
    assert reason in capsys.readouterr().err
    questions = tmp_path / "q.jsonl"
    questions.write_text("\n".join(json.dumps({"messages": r["messages"]} | r) for r in rows))
    assert [c.id for c in load_questions(questions)] == ["b"]
    report = import_file(path, tmp_path / "imported.jsonl", 0.0, 0)
    assert f"line 1 has what is not used: {reason}" in report
    assert "1 of 2 rows left out" in report


def test_an_answer_of_weight_0_is_context_and_not_supervised(tokenizer):
    first, second = ANSWER | {"weight": 0}, {"role": "assistant", "content": "6."}
    messages = [QUESTION, first, {"role": "user", "content": "And 3 + 3?"}, second]
    sample = encode(conversation(messages), tokenizer, 512)
    whole = encode(conversation([*messages[:1], ANSWER, *messages[2:]]), tokenizer, 512)
    assert sample.input_ids.tolist() == whole.input_ids.tolist(), "it is still read"
    assert supervised(whole, tokenizer) == ["4.<|im_end|>", "6.<|im_end|>"]
    assert supervised(sample, tokenizer) == ["6.<|im_end|>"] and not sample.warnings
    with pytest.raises(EyasError, match="loss mask is zero everywhere"):
        encode(conversation([QUESTION, first]), tokenizer, 512)


def test_no_file_and_no_utf8(tmp_path):
    with pytest.raises(EyasError, match="no prompt set .* next: python -m eyas prompts build"):
        load_prompts(tmp_path / "none.jsonl")
    (tmp_path / "p.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(EyasError, match="is not UTF-8"):
        load_prompts(tmp_path / "p.jsonl")


def test_several_files_by_a_pattern(tmp_path):
    """In the order of their names; an id stands in one of them."""
    (tmp_path / "p_b.jsonl").write_text(line("b") + "\n")
    (tmp_path / "p_a.jsonl").write_text(line("a") + "\n" + line("c"))
    both = load_prompts(tmp_path / "p*.jsonl")
    assert [c.id for c in both.conversations] == ["a", "c", "b"]
    alone = load_prompts(tmp_path / "p_b.jsonl").hash
    (tmp_path / "p_b.jsonl").write_text(line("d") + "\n")
    assert (
        load_prompts(tmp_path / "p*.jsonl").hash != both.hash
        and load_prompts(tmp_path / "p_b.jsonl").hash != alone
    )
    (tmp_path / "p_b.jsonl").write_text(line("d") + "\n" + line("c"))
    with pytest.raises(
        EyasError, match="p_b.jsonl, line 2: sample id 'c' is in p_a.jsonl, line 2 already"
    ):
        load_prompts(tmp_path / "p*.jsonl")
    with pytest.raises(EyasError, match="no prompt set"):
        load_prompts(tmp_path / "q*.jsonl")


def test_a_unicode_line_separator_in_a_text_is_no_line_end(tmp_path):
    written = [conversation(turns("Hi", "a\u2028b\x85c"))]
    assert (
        load_prompts(prompt_set.write_prompts(tmp_path / "p.jsonl", written)).conversations
        == written
    )


def test_more_conversations_are_others_on_the_same_topics():
    """What is added to the set: no id and no wording of it, held-out topics the same, so they stay
    held out.
    """
    built, more = build_prompts(0), build_prompts(0, more=4)
    topics = {c.topic: c.split for c in built}
    assert (
        len(more) == 4 * len(topics)
        and build_prompts(0, more=4) == more
        and {c.topic: c.split for c in more} == topics
    )
    assert not {c.id for c in built} & {c.id for c in more}
    asked = [
        [tuple(m["content"].lower() for m in c.messages if m["role"] == "user") for c in each]
        for each in (built, more)
    ]
    assert not set(asked[0]) & set(asked[1]) and len(set(asked[1])) == len(more)


def test_build_does_not_overwrite_responses(tmp_path):
    path = tmp_path / "p.jsonl"
    assert "1600 conversations, 160 of held-out topics" in build.build_file(path, 0)
    build.build_file(path, 0)
    path.write_text(line())
    with pytest.raises(EyasError, match="holds responses already"):
        build.build_file(path, 0)


def test_conversations_of_others_become_a_prompt_set(tmp_path, capsys):
    """ShareGPT's and OpenAI's rows, as a list and as lines: the same conversations; what doesn't
    fit is named; the same questions are on one side.
    """
    rows = [
        {
            "id": f"c{i}",
            "conversations": [
                {"from": "human", "value": f"What is {i // 2} + 1?"},
                {"from": "gpt", "value": str(i)},
            ],
        }
        for i in range(200)
    ]
    rows[3] = {
        "id": "c3",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is 1 + 1?"}]},
            {"role": "assistant", "content": "3"},
        ],
    }
    wrong = [
        {"id": "c9"},
        {"conversations": [{"from": "gpt", "value": "Hi"}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"id": "c0", "messages": turns("Hi", "Hello")},
        "text",
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows + wrong, indent=1))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + wrong))
    texts = []
    for source in ("a.json", "b.jsonl"):
        assert (
            cli.main(
                [
                    "prompts",
                    "import",
                    str(tmp_path / source),
                    "--path",
                    str(tmp_path / f"{source}.out"),
                    "--heldout-share",
                    "0.1",
                ]
            )
            == 0
        )
        texts.append(capsys.readouterr().out.splitlines())
    for number, what in (
        (201, "neither conversations nor messages"),
        (202, "does not begin with a question"),
        (203, "a turn of 'tool'"),
        (205, "neither conversations nor messages"),
    ):
        assert [line for line in texts[0] if f"row {number} " in line and what in line] and [
            line for line in texts[1] if f"line {number} " in line and what in line
        ]
    assert len(texts[0]) == len(texts[1]) == 5 and texts[0][-1].endswith("4 of 205 rows left out")
    made = [
        load_prompts(tmp_path / f"{source}.out").conversations for source in ("a.json", "b.jsonl")
    ]
    assert [(c.id, c.split, c.messages) for c in made[0]] == [
        (c.id, c.split, c.messages) for c in made[1]
    ] and len(made[0]) == 201
    assert [c.id for c in made[0]] == [*(f"c{i}" for i in range(200)), "row-204"]
    assert list(made[0][0].messages) == turns("What is 0 + 1?", "0") and list(
        made[0][3].messages
    ) == [{"role": "system", "content": "Be brief."}, *turns("What is 1 + 1?", "3")]
    heldout, train = (
        {
            m["content"]
            for c in made[0]
            if c.split == split
            for m in c.messages
            if m["role"] == "user"
        }
        for split in ("heldout", "train")
    )
    assert len(heldout) == 10 and not heldout & train  # of 101 different questions
    with pytest.raises(EyasError, match="exists already"):
        prompt_set.import_file(tmp_path / "a.json", tmp_path / "a.json.out", 0.1, 0)


# ---- token ids and masks


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_mask_cases(case, tokenizer):
    asked = conversation(case["messages"], case["id"])
    if case.get("error"):
        with pytest.raises(EyasError, match=f"sample {case['id']}"):
            encode(asked, tokenizer, 512)
        return
    sample = encode(asked, tokenizer, 512)
    assert (
        sample.input_ids.dtype == np.int64
        and sample.loss_mask.dtype == np.bool_
        and sample.input_ids.shape == sample.loss_mask.shape
    )
    if case["supervised"] == "truncated":
        whole = encode(asked, tokenizer, 100_000)
        assert (
            sample.truncated
            and len(sample.input_ids) == 512
            and sample.warnings == (f"cut from {len(whole.input_ids)} to 512 tokens",)
        )
        assert not whole.truncated and supervised(whole, tokenizer) == [
            case["messages"][-1]["content"] + "<|im_end|>"
        ]
        assert np.array_equal(sample.input_ids, whole.input_ids[:512]) and np.array_equal(
            sample.loss_mask, whole.loss_mask[:512]
        )
    else:
        assert supervised(sample, tokenizer) == case["supervised"] and not sample.truncated


def test_ids_by_hand(tokenizer):
    # SmolLM2: 1 <|im_start|>, 2 <|im_end|>, 198 the line break; the header's ids come from the
    # tokenizer, the mask from counting by hand
    sample = encode(
        conversation(
            [{"role": "system", "content": "Be brief."}, *turns("Name a colour.", "Blue.")]
        ),
        tokenizer,
        512,
    )
    expected = [
        1,
        *tokenizer.encode("system\nBe brief."),
        2,
        198,
        1,
        *tokenizer.encode("user\nName a colour."),
        2,
        198,
        1,
        *tokenizer.encode("assistant"),
        198,
        *tokenizer.encode("Blue."),
        2,
        198,
    ]
    assert sample.input_ids.tolist() == expected
    assert sample.loss_mask.tolist() == [False] * (len(expected) - 4) + [
        True,
        True,
        True,
        False,
    ]  # "Blue", ".", the end of the turn


def test_warnings(tokenizer):
    by_id = {case["id"]: conversation(case["messages"]) for case in CASES}
    assert encode(by_id["empty-answer"], tokenizer, 512).warnings == ("empty answer",)
    assert encode(by_id["ends-with-user"], tokenizer, 512).warnings == ("open user turn cut off",)
    assert (
        encode(by_id["ends-with-user"], tokenizer, 512).input_ids.tolist()
        == encode(conversation(turns("Hi", "Hello!")), tokenizer, 512).input_ids.tolist()
    )


def test_the_end_of_a_cut_answer_is_not_supervised(tokenizer):
    whole = conversation(turns("Hi", "Hello!", "And?", "Well then"))
    cut = conversation(
        [m | ({"finish": "length"} if m["content"] == "Hello!" else {}) for m in whole.messages]
    )
    a, b = encode(whole, tokenizer, 512), encode(cut, tokenizer, 512)
    assert np.array_equal(a.input_ids, b.input_ids)
    assert supervised(b, tokenizer) == ["Hello!", "Well then<|im_end|>"]
    assert [int(a.input_ids[t]) for t in np.flatnonzero(a.loss_mask != b.loss_mask)] == [2]


def test_prompt_and_answer_are_never_merged(tokenizer):
    """The server sees the prompt alone, so its last token must stay what it is; the whole text at
    once gives another one here.
    """
    messages = turns("Two lines.", "  first")
    prompt = chat_template.prompt_ids(messages[:1], tokenizer, "x")
    sample = encode(conversation(messages), tokenizer, 512)
    assert (
        sample.input_ids[: len(prompt)].tolist() == prompt
        and sample.loss_mask[len(prompt)]
        and not sample.loss_mask[: len(prompt)].any()
    )
    assert (
        tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False))
        != sample.input_ids.tolist()
    )


@pytest.mark.parametrize(
    "template, kwargs, contents, finish",
    [
        (THINKS, "", ("Hi", "<think>\nHm.\n</think>\n\nHello!"), "stop"),
        (
            THINKS,
            "",
            ("Hi", "<think>\nHm.\n\n</think>\nHello!"),
            "stop",
        ),  # other line breaks than the template's
        (
            THINKS,
            "",
            ("Hi", "<think>\nHm"),
            "length",
        ),  # cut within the thoughts: the template puts an empty pair before them
        (
            THINKS,
            "",
            ("Hi", "<think>\nHm.\n</think>\n\nHello!", "And?", "<think>\nWell.\n</think>\n\nSo."),
            "stop",
        ),
        (
            THINKS,
            "",
            ("Hi", "Hello!", "And?", "<think>\nWell.\n</think>\n\nSo."),
            "stop",
        ),  # the first answer stands there as it is, and is none of a thinking model
        (THINKS, '{"enable_thinking": false}', ("Hi", "Hello!"), "stop"),
        (THINKS, '{"enable_thinking": false}', ("Hi", "Hello!", "And?", "So"), "length"),
        (OPENS, "", ("Hi", "Hm.</think>Hello!"), "stop"),
        (OPENS, "", ("Hi", "Hm"), "length"),
        (OPENS, "", ("Hi", "Hm.</think>Hello!", "And?", "Well.</think>So."), "stop"),
        (OPENS, '{"thinking": false}', ("Hi", "Hello!"), "stop"),
        (STRIPS, "", ("Hi", "Hm.</think>Hello!"), "stop"),
        (STRIPS, "", ("Hi", "Hm"), "length"),
    ],
)
def test_what_a_thinking_model_wrote_and_nothing_else_is_supervised(
    template, kwargs, contents, finish, with_template
):
    """The right ids are those of the prompt as the server gets it, then the answer's own, then the
    end of the turn.
    """
    tokenizer, messages = with_template(template), turns(*contents)
    prompt = tokenizer.encode(
        tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True, **json.loads(kwargs or "{}")
        )
    )
    answer = tokenizer.encode(messages[-1]["content"])
    if kwargs:
        with_template(with_kwargs(template, kwargs))
    assert (
        chat_template.prompt_ids(messages[:-1], tokenizer, "x") == prompt
        and chat_template.end_of_turn(tokenizer) == 2
    )
    sample = encode(
        conversation([*messages[:-1], messages[-1] | {"finish": finish}]), tokenizer, 512
    )
    n = len(prompt) + len(answer) + 1
    assert (
        sample.input_ids[:n].tolist() == [*prompt, *answer, 2]
        and tokenizer.decode(sample.input_ids[n:]).strip() == ""
    )
    assert np.flatnonzero(sample.loss_mask).tolist() == list(
        range(len(prompt), n - (finish == "length"))
    )
    assert sample.warnings == (
        ("1 of 2 answers not supervised: the chat template rewrites them",)
        if len(messages) == 4
        else ()
    )


def test_answers_that_are_not_rewritten_stay_supervised(with_template):
    """Without thinking Kimi's template appends only, so every answer counts; one that shortens
    earlier answers leaves the last.
    """
    dialogue = conversation(turns("Hi", "Hello!", "And?", "So."))
    sample = encode(dialogue, with_template(with_kwargs(OPENS, '{"thinking": false}')), 512)
    assert (
        supervised(sample, with_template(OPENS)) == ["Hello!<|im_end|>", "So.<|im_end|>"]
        and not sample.warnings
    )
    tokenizer = with_template(
        CHATML.replace("m.content +", "(m.content if loop.last or m.role == 'user' else '...') +")
    )
    sample = encode(dialogue, tokenizer, 512)
    assert supervised(sample, tokenizer) == [
        "So.<|im_end|>"
    ] and "...<|im_end|>" in tokenizer.decode(sample.input_ids)


def test_an_opening_that_the_prompt_has_already_is_not_written_twice(with_template):
    tokenizer = with_template(OPENS)
    both = [
        encode(conversation(turns("Hi", answer)), tokenizer, 512)
        for answer in ("Hm.</think>Hello!", "<think>Hm.</think>Hello!")
    ]
    assert np.array_equal(both[0].input_ids, both[1].input_ids) and np.array_equal(
        both[0].loss_mask, both[1].loss_mask
    )


@pytest.mark.parametrize(
    "template, kwargs, answer, finish, message",
    [
        (
            THINKS,
            "",
            "Hello!",
            "stop",
            (
                "sample some-sample: message 2 begins 'Hello!', and the chat template makes "
                "it '<think>.*next: -p chat_template_kwargs '{\"enable_thinking\": false}'"
            ),
        ),
        (THINKS, "", "Hel", "length", 'makes it \'<think>.*{"enable_thinking": false}'),
        (
            THINKS,
            "",
            "Hm.\n</think>\n\nHello!",
            "stop",
            'makes it \'<think>.*{"enable_thinking": false}',
        ),
        (
            THINKS,
            '{"enable_thinking": false}',
            "<think>\nHm",
            "length",
            'message 2 has thoughts, and the chat template closes them.*{"enable_thinking": true}',
        ),
        (
            THINKS,
            '{"enable_thinking": false}',
            "<think>\nHm.\n</think>\n\nHello!",
            "stop",
            "message 2 has thoughts",
        ),
        (OPENS, "", "Hello!", "stop", "makes it '</think>Hello!'.*{\"thinking\": false}"),
        (STRIPS, "", "Hello!", "stop", "writes it otherwise than after its generation prompt"),
    ],
)
def test_what_a_thinking_model_did_not_write_is_refused(
    template, kwargs, answer, finish, message, with_template
):
    tokenizer = with_template(with_kwargs(template, kwargs) if kwargs else template)
    asked = conversation(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": answer, "finish": finish},
        ]
    )
    with pytest.raises(EyasError, match=message) as error:
        encode(asked, tokenizer, 512)
    samples, reasons = _encode_all(
        [asked], tokenizer, 512
    )  # the list of what extraction left out says what to set
    assert (
        not samples
        and reasons["some-sample"].endswith(error.value.next_command)
        and error.value.next_command
    )


def test_a_generation_prompt_goes_before_markers(with_template):
    """Some templates mark the header of a turn as well, which the model does not write."""
    marked = CHATML.replace("{{ '<|im_start|>'", "{% generation %}{{ '<|im_start|>'").replace(
        "'<|im_end|>\n' }}", "'<|im_end|>\n' }}{% endgeneration %}"
    )
    assert supervised(
        encode(conversation(turns("Hi", "Hello!")), with_template(marked), 512),
        with_template(marked),
    ) == ["Hello!<|im_end|>"]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"note": "a \"b\" %} 'c'\n\u00fc", "n": [1, None, {"x": 2.5}]},
    ],
)
def test_template_variables_are_those_of_apply_chat_template(kwargs, with_template, embedded):
    template, messages = (
        THINKS + "{{ note }}{{ n }}",
        turns("Hi", "<think>\nHm.\n</think>\n\nHello!", "And?"),
    )
    expected = [
        with_template(template).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=flag, **kwargs
        )
        for flag in (False, True)
    ]
    tokenizer = with_template(with_kwargs(template, json.dumps(kwargs)))
    assert [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=flag)
        for flag in (False, True)
    ] == expected
    spelled = json.dumps(dict(reversed(kwargs.items())), indent=2)
    assert with_kwargs(template, spelled) == tokenizer.chat_template
    own, changed = (
        embedded.tokenizer(),
        load_target("embedded", chat_template_kwargs=json.dumps(kwargs)).tokenizer(),
    )
    assert own.chat_template == CHAT_TEMPLATE and changed.chat_template == with_kwargs(
        CHAT_TEMPLATE, spelled
    )
    assert (
        chat_template.template_hash(changed)
        != chat_template.template_hash(own)
        == sha256_json(CHAT_TEMPLATE)
    )


def test_a_store_says_its_template_variables_and_those_before_it_say_none(embedded):
    status = {
        "sglang": "1",
        "device": "cpu",
        "dtype": "bfloat16",
        "capture": {"version": "1"},
        "radix_cache": False,
        "chunked_prefill": False,
        "overlap": False,
        "prefill_graph": False,
        "flags": {},
    }
    shipped, kwargs = load_prompts(SHIPPED), '{"enable_thinking": false}'
    target = load_target("embedded", chat_template_kwargs=kwargs)
    before = make_manifest(Config(), status, embedded, shipped, embedded.tokenizer())
    changed = make_manifest(
        Config(chat_template_kwargs=kwargs), status, target, shipped, target.tokenizer()
    )
    assert "chat_template_kwargs" not in before and before["template_hash"] == sha256_json(
        CHAT_TEMPLATE
    )
    assert (
        changed
        == before
        | {
            "chat_template_kwargs": {"enable_thinking": False},
            "template_hash": sha256_json(target.tokenizer().chat_template),
        }
        and changed["template_hash"] != before["template_hash"]
    )


def test_a_cut_before_the_answer_is_refused(tokenizer):
    with pytest.raises(
        EyasError, match="sample some-sample has .* the first 8 hold nothing of an answer"
    ):
        encode(conversation(turns("A rather long question, is it not?", "Yes.")), tokenizer, 8)


@pytest.mark.parametrize("token", ["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("place", [0, 1])
def test_control_tokens_in_a_text_are_refused(tokenizer, token, place):
    contents = ["Question", "Answer"]
    contents[place] += f" with {token} inside"
    with pytest.raises(
        EyasError,
        match=re.escape(
            f"sample some-sample: message {place + 1} contains the control token {token!r}"
        ),
    ):
        encode(conversation(turns(*contents)), tokenizer, 512)


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in CASES
        if isinstance(c["supervised"], list) and c["messages"][-1]["role"] == "assistant"
    ],
    ids=lambda c: c["id"],
)
def test_generation_markers_give_the_same_mask(case, with_template):
    asked = conversation(case["messages"])
    by_markers, by_prefixes = (
        encode(asked, with_template(template), 512) for template in (MARKED, CHATML)
    )
    assert np.array_equal(by_markers.input_ids, by_prefixes.input_ids) and np.array_equal(
        by_markers.loss_mask, by_prefixes.loss_mask
    )


@pytest.mark.parametrize(
    "template, message",
    [
        # markers that are never reached; markers around all; around the user's turns too; answers
        # rewritten; no end of turn; no text at all
        (MARKED.replace("== 'assistant'", "== 'nobody'"), "a loss mask of zeros everywhere"),
        (
            "{% generation %}" + CHATML[: CHATML.index("{% if")] + "{% endgeneration %}",
            "a loss mask of ones everywhere",
        ),
        (
            MARKED.replace("== 'assistant'", "!= 'system'"),
            "marks 4 turns as the assistant's; expected its 2 answers",
        ),
        (
            CHATML.replace("m.content +", "(m.content if m.role == 'user' else '...') +"),
            "message 4 begins 'So.', and the chat template makes it '...'",
        ),
        (
            MARKED.replace("{{ m.content }}{% endgen", "{{ '...' }}{% endgen"),
            "message 4 begins 'So.', and the chat template makes it '...'",
        ),
        (CHATML.replace("<|im_end|>", ""), "without a control token"),
        (
            (
                "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% "
                "endfor %}"
            ),
            "without a control token",
        ),
        ("{{ raise_exception('never') }}", "the chat template refuses it: never"),
        (None, "has no chat template"),
    ],
)
def test_bad_templates_are_refused(with_template, template, message):
    with pytest.raises(EyasError, match=re.escape(message)):
        encode(conversation(turns("Hi", "Hello!", "And?", "So.")), with_template(template), 512)


def test_masks_of_zeros_and_ones_without_markers(with_template):
    bare = with_template(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + '<|im_end|>' "
        "}}{% endif %}{% endfor %}"
    )
    with pytest.raises(EyasError, match="a loss mask of ones everywhere"):
        encode(conversation(turns("Hi", "Hello!")), bare, 512)
    cut_empty = conversation(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "finish": "length"},
        ]
    )
    with pytest.raises(EyasError, match="sample some-sample: its loss mask is zero everywhere"):
        encode(cut_empty, with_template(CHATML), 512)


def test_hashes_tell_templates_and_tokenizers_apart(tokenizer, with_template):
    own = chat_template.template_hash(tokenizer)
    vocabulary = chat_template.tokenizer_hash(tokenizer)
    tokenizer(["a", "a longer text"], padding=True)  # leaves a padding state behind
    assert chat_template.tokenizer_hash(tokenizer) == vocabulary
    assert chat_template.template_hash(with_template(CHATML)) != own


# ---- the shipped responses


def test_shipped_responses_agree_with_their_manifest(tokenizer):
    shipped = load_prompts(SHIPPED).conversations
    manifest = read_json(SHIPPED.with_suffix(".json"))
    answers = [m for c in shipped for m in c.messages if m["role"] == "assistant"]
    assert manifest["sha256"] == sha256_file(SHIPPED)
    assert manifest["conversations"] == {"total": len(shipped), **Counter(c.split for c in shipped)}
    assert (
        manifest["responses"]["total"]
        == len(answers)
        == sum(m["role"] == "user" for c in shipped for m in c.messages)
    )
    assert manifest["responses"]["finish"] == Counter(m["finish"] for m in answers)
    assert manifest["template_hash"] == chat_template.template_hash(tokenizer) and manifest[
        "tokenizer_hash"
    ] == chat_template.tokenizer_hash(tokenizer)
    for c in shipped[::20]:
        sample = encode(c, tokenizer, 2048)
        assert supervised(sample, tokenizer) == [
            m["content"] + "<|im_end|>" * (m["finish"] == "stop")
            for m in c.messages
            if m["role"] == "assistant"
        ]


def test_repeated_bigrams():
    assert chat_template.repeated_bigrams([1, 2, 3]) == (0, 2)
    assert chat_template.repeated_bigrams([1, 2, 1, 2, 1]) == (2, 4)  # 12 21 12 21
    assert chat_template.repeated_bigrams([7]) == chat_template.repeated_bigrams([]) == (0, 0)


# ---- generating, when things fail. The fake speaks SGLang's /server_info and /generate; the real
# server is in test_server_*.py


class FakeServer:
    """Answers every prompt with `words`; `fail(request number) -> HTTP status` may refuse; counts
    requests.
    """

    def __init__(self, model, words, fail=lambda number: 200, finish=None):
        self.requests, self.lock = [], threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.answer(
                    200,
                    {
                        "model_path": str(model),
                        "version": "0.0.fake",
                        "device": "cpu",
                        "dtype": "float32",
                        "internal_states": [],
                    },
                )

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.requests.append(request)
                    number = len(outer.requests)
                status = fail(number)
                if status == 0:
                    self.close_connection = True  # hangs up without an answer
                elif status == 200:
                    self.answer(
                        200,
                        {
                            "output_ids": words,
                            "meta_info": {
                                "finish_reason": finish or {"type": "stop", "matched": 2}
                            },
                        },
                    )
                else:
                    self.answer(status, {"error": {"message": "the input is too long"}})

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def generating(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(responses, "ATTEMPTS", 2)
    folder = tmp_path / "model"
    folder.mkdir()
    target = SimpleNamespace(
        name="fake",
        folder=folder,
        fingerprint="f" * 64,
        config_hash="c" * 64,
        tokenizer=lambda: tokenizer,
    )
    asked = [
        conversation(turns("Hi", "an old answer", "And?")[:: 1 if i % 2 else 3], f"s{i}")
        for i in range(6)
    ]
    servers = []

    def start(**options):
        servers.append(FakeServer(folder, [*tokenizer.encode("Well, hello."), 2], **options))
        return servers[-1]

    yield SimpleNamespace(
        start=start,
        target=target,
        asked=asked,
        out=tmp_path / "out" / "p.jsonl",
        partials=lambda: list((tmp_path / "data" / "responses").glob("*.jsonl")),
    )
    for server in servers:
        server.close()


def run(generating, server, max_new_tok=16):
    return responses.generate_responses(
        server.url, generating.target, generating.asked, max_new_tok, 2, generating.out
    )


def test_refused_conversations_are_named_and_only_those_are_asked_again(generating):
    server = generating.start(fail=lambda number: 400 if number == 3 else 200)
    with pytest.raises(
        EyasError, match=r"1 of 6 conversations got no answer: s\d: HTTP 400, .*too long"
    ):
        run(generating, server)
    assert not generating.out.exists() and len(generating.partials()) == 1
    [partial] = generating.partials()
    with open(partial, "ab") as file:
        file.write(b'{"id": "s0", "mess')  # torn by a kill
    again = generating.start()
    manifest = run(generating, again)
    assert (
        1 <= len(again.requests) <= 2 and not generating.partials()
    )  # the one conversation, of one or two turns
    answered = load_prompts(generating.out).conversations
    assert [c.id for c in answered] == [c.id for c in generating.asked]
    assert [m["content"] for m in answered[1].messages] == [
        "Hi",
        "Well, hello.",
        "And?",
        "Well, hello.",
    ]
    assert manifest == read_json(generating.out.with_suffix(".json")) and manifest[
        "sha256"
    ] == sha256_file(generating.out)
    assert manifest["responses"] | {} == {
        "total": 9,
        "tok": 45,
        "mean_tok": 5.0,
        "finish": {"stop": 9},
        "empty": 0,
        "same_ids": 9,
        "repeated_bigrams": {"repeated": 0, "total": 36, "share": 0.0},
    }


def test_dialogues_are_asked_turn_by_turn_with_the_answers_before(generating, tokenizer):
    server = generating.start()
    run(generating, server)
    assert (
        sorted(tokenizer.decode(r["input_ids"]).count("Well, hello.") for r in server.requests)
        == [0] * 6 + [1] * 3
    )
    assert all(
        r["input_ids"][-1] == 198
        and r["sampling_params"]
        == {"temperature": 0.0, "max_new_tokens": 16, "stop_token_ids": [2]}
        for r in server.requests
    )


def test_a_server_that_goes_away_ends_it_and_keeps_what_is_there(generating):
    server = generating.start(fail=lambda number: 200 if number <= 3 else 0)
    with pytest.raises(EyasError, match="no answer from http.*the same command again: it resumes"):
        run(generating, server)
    [partial] = generating.partials()
    done = len(partial.read_text().splitlines())
    assert 1 <= done <= 3 and not generating.out.exists()
    again = generating.start()
    assert run(generating, again)["conversations"]["total"] == 6


def test_another_setting_does_not_go_on_from_the_old_one(generating):
    with pytest.raises(EyasError):
        run(generating, generating.start(fail=lambda number: 400 if number == 3 else 200))
    again = generating.start()
    run(generating, again, max_new_tok=17)
    assert len(again.requests) == 9


def test_cut_answers_say_so(generating, tokenizer):
    manifest = run(generating, generating.start(finish={"type": "length", "length": 16}))
    assert manifest["responses"]["finish"] == {"length": 9}
    sample = encode(load_prompts(generating.out).conversations[0], tokenizer, 512)
    assert supervised(sample, tokenizer) == ["Well, hello."]


@pytest.mark.parametrize(
    "finish",
    [{"type": "abort", "message": "out of memory"}, {"type": "stop", "matched": "NaN happened"}],
)
def test_an_aborted_answer_is_not_kept(generating, finish):
    with pytest.raises(EyasError, match="6 of 6 conversations got no answer: s.: it ended with"):
        run(generating, generating.start(finish=finish))


def test_answers_made_with_other_template_variables_are_not_taken(
    generating, tokenizer, with_template
):
    """What the target wrote with its thinking off does not follow the prompt with thinking on.

    The manifest beside the answers says how they were made.
    """
    kwargs = '{"enable_thinking": false}'
    generating.target.chat_template_kwargs = kwargs
    with_template(with_kwargs(THINKS, kwargs))
    server = generating.start()
    manifest = run(generating, server)
    assert manifest["chat_template_kwargs"] == json.loads(kwargs) and all(
        tokenizer.decode(r["input_ids"]).endswith("assistant\n<think>\n\n</think>\n\n")
        for r in server.requests
    )
    made = load_prompts(generating.out)
    assert supervised(encode(made.conversations[1], tokenizer, 512), tokenizer) == [
        "Well, hello.<|im_end|>"
    ]
    responses.check_responses(made, generating.target, tokenizer)
    with_template(THINKS)
    with pytest.raises(EyasError, match=re.escape(f"next: -p chat_template_kwargs '{kwargs}'")):
        responses.check_responses(made, generating.target, tokenizer)
    responses.check_responses(
        made, SimpleNamespace(name="another", fingerprint="0" * 64), tokenizer
    )  # its answers are not this target's own
    generating.out.with_suffix(".json").write_text("[1]")
    responses.check_responses(made, generating.target, tokenizer)


def test_no_server_and_another_model(generating, tmp_path):
    server = generating.start()
    generating.target.folder = tmp_path / "other"
    with pytest.raises(EyasError, match="serves model; expected the target fake"):
        run(generating, server)
    with pytest.raises(EyasError, match="no answer from"):
        responses.generate_responses(
            "http://127.0.0.1:9", generating.target, generating.asked, 16, 2, generating.out
        )


def test_kill_9_of_the_client(generating, tokenizer, tmp_path):
    """The real command's function in a process of its own, killed while it waits for its fourth
    answer; then the same call.
    """
    hold = threading.Event()
    server = generating.start(fail=lambda number: 200 if number <= 3 or hold.wait(30) else 200)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    code = (
        "import sys, types; from eyas.prompts import prompt_set, responses; from "
        "transformers import AutoTokenizer; from pathlib import Path; "
        "url, tok, folder, asked, out = sys.argv[1:]; t = AutoTokenizer.from_pretrained(tok); "
        "target = types.SimpleNamespace(name='fake', folder=Path(folder), fingerprint='f' "
        "* 64, config_hash='c' * 64, tokenizer=lambda: t); "
        "responses.generate_responses(url, target, "
        "prompt_set.load_prompts(asked).conversations, 16, 1, out)"
    )
    asked = prompt_set.write_prompts(tmp_path / "asked.jsonl", generating.asked)
    client = subprocess.Popen(
        [
            sys.executable,
            "-c",
            code,
            server.url,
            str(tmp_path / "tokenizer"),
            str(generating.target.folder),
            str(asked),
            str(generating.out),
        ]
    )
    try:
        while len(server.requests) < 4:
            assert client.poll() is None
            hold.wait(0.05)
    finally:
        client.kill()
        client.wait()
    hold.set()
    assert not generating.out.exists()
    again = generating.start()
    manifest = run(generating, again)
    assert manifest["responses"]["total"] == 9 and len(again.requests) < 9
    assert len(load_prompts(generating.out).conversations) == 6


def test_responses_of_another_target_are_kept_where_new_ones_take_their_place(generating, capsys):
    """One's own answers too, and fields that are not ours; questions alone, and responses of the
    same settings, are simply answered again.
    """
    server = generating.start()
    run(generating, server)
    first = generating.out.read_bytes()
    run(generating, server)
    assert not list(generating.out.parent.glob("earlier-*"))
    generating.target.fingerprint, generating.target.name = "e" * 64, "other"
    run(generating, server)
    kept = generating.out.parent / "earlier-1"
    assert (kept / "p.jsonl").read_bytes() == first and read_json(kept / "p.json")["target"][
        "name"
    ] == "fake"
    assert (
        "made by fake with other settings; kept in earlier-1: p.jsonl, p.json"
        in capsys.readouterr().out
    )
    generating.out.with_suffix(".json").unlink()
    own = json.dumps(generating.asked[0].questions().to_dict() | {"source": "log 7"}) + "\n"
    generating.out.write_text(own)
    run(generating, server)
    assert (generating.out.parent / "earlier-2" / "p.jsonl").read_text() == own
    prompt_set.write_prompts(generating.out, [c.questions() for c in generating.asked])
    generating.out.with_suffix(".json").unlink()
    run(generating, server)
    assert not (generating.out.parent / "earlier-3").exists()


def test_build_does_not_overwrite_other_questions(tmp_path, capsys):
    from eyas.cli import main

    path = tmp_path / "p.jsonl"
    assert main(["prompts", "build", "--path", str(path)]) == 0
    before = path.read_bytes()
    assert main(["prompts", "build", "--path", str(path)]) == 0 and path.read_bytes() == before
    assert (
        main(["prompts", "build", "--path", str(path), "--seed", "1"]) == 2
        and "holds other conversations already" in capsys.readouterr().err
    )
    assert path.read_bytes() == before
