"""The target's chat template: token ids of a conversation, and the loss mask that marks the answers."""

import functools
import json
import re
import unicodedata
from dataclasses import dataclass

import jinja2
import numpy as np

from eyas.errors import EyasError
from eyas.files import sha256_json
from eyas.prompts.prompt_set import Conversation


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
        raise EyasError(
            f"sample {id} has no answer",
            "at least one assistant turn",
            "python -m eyas prompts generate",
        )
    if len(messages) < len(conversation.messages):
        warnings.append("open user turn cut off")
    answers = [m for m in messages if m["role"] == "assistant"]
    warnings += ["empty answer"] * sum(m["content"] == "" for m in answers)
    _refuse_control_tokens(id, messages, tokenizer)
    text, spans = _answer_spans(id, messages, tokenizer)
    if left_out := spans.count(None):
        warnings.append(
            f"{left_out} of {len(answers)} answers not supervised: the chat template rewrites them"
        )
    ids, mask, at = [], [], 0
    for (start, words_end, end), answer in (
        (span, answer) for span, answer in zip(spans, answers) if span
    ):
        supervise_end = answer.get("finish", "stop") == "stop"
        for piece, supervised in (
            (text[at:start], False),
            (text[start:words_end], True),
            (text[words_end:end], supervise_end),
        ):
            piece_ids = tokenizer.encode(piece, add_special_tokens=False)
            ids += piece_ids
            mask += [supervised] * len(piece_ids)
        at = end
    rest = tokenizer.encode(text[at:], add_special_tokens=False)
    ids += rest
    mask += [False] * len(rest)
    _check_round_trip(id, ids, text, tokenizer)
    if not any(mask):
        raise EyasError(
            f"sample {id}: its loss mask is zero everywhere",
            "at least one supervised token",
            "answers that end by themselves, or a larger max_new_tok",
        )
    if all(mask[: len(mask) - mask[::-1].index(True)]):
        raise EyasError(
            f"sample {id}: the chat template gives a loss mask of ones everywhere",
            "a template that marks the assistant's turns only",
        )
    truncated = len(ids) > max_length
    if truncated:
        warnings.append(f"cut from {len(ids)} to {max_length} tokens")
        if not any(mask[:max_length]):
            raise EyasError(
                f"sample {id} has {len(ids)} tokens, and the first {max_length} hold nothing of an answer",
                "a longer max_length",
                "-p max_length N",
            )
    ids, mask = (
        np.array(ids[:max_length], dtype=np.int64),
        np.array(mask[:max_length], dtype=np.bool_),
    )
    return Sample(
        id,
        ids,
        mask,
        truncated,
        conversation.category,
        conversation.split,
        tuple(warnings),
        conversation.topic,
    )


def prompt_ids(messages: list[dict], tokenizer, id: str) -> list[int]:
    """Token ids that the server gets so that it writes the next assistant turn; `messages` end with a user turn. EyasError as in `encode`."""
    _refuse_control_tokens(id, messages, tokenizer)
    return tokenizer.encode(
        _render(id, messages, tokenizer, add_generation_prompt=True), add_special_tokens=False
    )


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
    return sha256_json(
        {name: part for name, part in state.items() if name not in ("truncation", "padding")}
    )  # those are set by calls


def _template(tokenizer) -> str:
    if not isinstance(tokenizer.chat_template, str):
        raise EyasError(
            "the target's tokenizer has no chat template",
            "a chat model with one",
            "a chat_template.jinja in the target's folder",
        )
    return tokenizer.chat_template


def _render(id: str, messages: list[dict], tokenizer, add_generation_prompt: bool = False) -> str:
    _template(tokenizer)
    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    try:
        return tokenizer.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except jinja2.TemplateError as error:
        raise EyasError(
            f"sample {id}: the chat template refuses it: {error}", "turns that the template knows"
        ) from None


def _by_markers(tokenizer) -> bool:
    """Whether only `{% generation %}` markers say where an answer lies: a generation prompt says it as the server does, and some templates mark their headers too."""
    question = [{"role": "user", "content": "a"}]
    return re.search(r"\{%-?\s*generation\s*-?%\}", _template(tokenizer)) is not None and _render(
        "(probe)", question, tokenizer, add_generation_prompt=True
    ) == _render("(probe)", question, tokenizer)


def _answer_spans(
    id: str, messages: list[dict], tokenizer
) -> tuple[str, list[tuple[int, int, int] | None]]:
    """The conversation's text and, for each assistant turn, where its words start, where they end, and where its end-of-turn token ends; None where it is not the model's."""
    if _by_markers(tokenizer):
        return _marked_spans(id, messages, tokenizer)
    turns = [
        _turn(id, messages[: i + 1], tokenizer)
        for i, m in enumerate(messages)
        if m["role"] == "assistant"
    ]
    if turns[-1].fault:
        raise turns[-1].fault
    text = turns[-1].text
    spans = [
        None
        if turn.fault or not text.startswith(turn.text[: len(turn.text) - len(turn.rest)])
        else (
            len(turn.prompt),
            len(turn.prompt) + len(turn.words),
            len(turn.prompt) + len(turn.words) + len(turn.end),
        )
        for turn in turns
    ]
    if spans[-1][0] == 0 and not text[spans[-1][2] :].strip():
        raise EyasError(
            f"sample {id}: the chat template gives a loss mask of ones everywhere",
            "a template that marks the assistant's turns only",
        )
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
    prompt, text, answer = (
        _render(id, messages[:-1], tokenizer, add_generation_prompt=True),
        _render(id, messages, tokenizer),
        messages[-1],
    )
    appended = text.startswith(prompt)
    ends = list(_control_tokens(tokenizer).finditer(text, len(prompt) if appended else 0))
    if not ends or not (appended or not text[ends[-1].end() :].strip()):
        raise EyasError(
            f"sample {id}: the chat template closes the assistant's turn without a control token",
            "an end-of-turn token, such as <|im_end|>",
        )
    end, rest = ends[-1].group(), text[ends[-1].end() :]
    written = text[len(prompt) : ends[-1].start()] if appended else None
    opened, closed = prompt.rstrip().endswith("<think>"), prompt.rstrip().endswith("</think>")
    own = (
        answer["content"].removeprefix(prompt[prompt.rfind("<think>") :])
        if opened
        else answer["content"]
    )  # some keep the opening that the prompt has already
    thinks = own.lstrip().startswith("<think>")
    if appended and written.strip() == own.strip() and not (thinks and (opened or closed)):
        return _Turn(prompt, written, end, rest)
    if (thinks and not opened and not closed) or (
        opened and not thinks and ("</think>" in own or answer.get("finish") == "length")
    ):
        return _Turn(prompt, own, end, rest)
    return _Turn(
        prompt,
        own,
        end,
        rest,
        _otherwise(f"sample {id}: ", own, written, thinks and closed, len(messages), tokenizer),
    )


def _otherwise(
    sample: str, own: str, written: str | None, closed: bool, number: int, tokenizer
) -> EyasError:
    """The answer is not what the model writes under this template: what to set."""
    switch = thinking_switch(tokenizer)
    setting = (
        f"-p chat_template_kwargs '{json.dumps({switch: closed})}'"
        if switch
        else "python -m eyas prompts generate"
    )
    if closed:
        return EyasError(
            f"{sample}message {number} has thoughts, and the chat template closes them before the answer",
            "answers without thoughts, or a template that lets the model think",
            setting,
        )
    found = f"{sample}message {number} begins {own[:40]!r}, and the chat template " + (
        f"makes it {written[:60]!r}"
        if written is not None
        else "writes it otherwise than after its generation prompt"
    )
    return EyasError(
        f"{found}, which is not what the model wrote",
        "answers as the model writes them, with its thoughts where it thinks, or thinking switched off",
        setting,
    )


def _marked_spans(
    id: str, messages: list[dict], tokenizer
) -> tuple[str, list[tuple[int, int, int] | None]]:
    """As `_answer_spans`, from the template's markers. A turn whose marked words are not the message's is none of the model's."""
    answers = [m for m in messages if m["role"] == "assistant"]
    text, marked = _render_markers(id, messages, tokenizer)
    if not marked:
        raise EyasError(
            f"sample {id}: the chat template gives a loss mask of zeros everywhere",
            "a template that marks the assistant's turns",
        )
    if marked[0][0] == 0 and len(text[marked[-1][1] :].strip()) == 0:
        raise EyasError(
            f"sample {id}: the chat template gives a loss mask of ones everywhere",
            "a template that marks the assistant's turns only",
        )
    if len(marked) != len(answers):
        raise EyasError(
            f"sample {id}: the chat template marks {len(marked)} turns as the assistant's",
            f"its {len(answers)} answers",
        )
    spans = []
    for (start, stop), answer in zip(marked, answers):
        ends = list(_control_tokens(tokenizer).finditer(text, start, stop))
        # markers may stand before the end-of-turn token; the model has to produce it all the same
        end = ends[-1] if ends else _control_tokens(tokenizer).match(text, stop)
        if end is None:
            raise EyasError(
                f"sample {id}: the chat template closes the assistant's turn without a control token",
                "an end-of-turn token, such as <|im_end|>",
            )
        own = text[start : end.start()].strip() == answer["content"].strip()
        if not own and answer is answers[-1]:
            raise _otherwise(
                f"sample {id}: ",
                answer["content"],
                text[start : end.start()],
                False,
                len(messages),
                tokenizer,
            )
        spans.append((start, end.start(), end.end()) if own else None)
    return text, spans


def _render_markers(id: str, messages: list[dict], tokenizer) -> tuple[str, list[tuple[int, int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    try:
        texts, marked = render_jinja_template(
            [plain],
            chat_template=_template(tokenizer),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except jinja2.TemplateError as error:
        raise EyasError(
            f"sample {id}: the chat template refuses it: {error}", "turns that the template knows"
        ) from None
    return texts[0], [tuple(span) for span in marked[0]]


@functools.lru_cache(maxsize=8)
def _control_tokens(tokenizer) -> re.Pattern:
    texts = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special} | set(
        tokenizer.all_special_tokens
    )
    return re.compile("|".join(re.escape(t) for t in sorted(texts, key=lambda t: (-len(t), t))))


def _refuse_control_tokens(id: str, messages: list[dict], tokenizer) -> None:
    for number, message in enumerate(messages, start=1):
        found = _control_tokens(tokenizer).search(message["content"])
        if found:  # it would open or close a turn that is none
            raise EyasError(
                f"sample {id}: message {number} contains the control token {found.group()!r}",
                "plain text",
                "take it out of the prompt set",
            )


def _check_round_trip(id: str, ids: list[int], text: str, tokenizer) -> None:
    back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if unicodedata.normalize("NFC", back) != unicodedata.normalize("NFC", text):
        raise EyasError(
            f"sample {id}: its token ids do not give its text again",
            "a tokenizer that can be applied turn by turn",
        )


def repeated_bigrams(ids: list[int]) -> tuple[int, int]:
    """(pairs of neighbouring tokens that stood in the sequence before, all pairs): a loop shows as a share near one."""
    pairs = list(zip(ids, ids[1:]))
    return len(pairs) - len(set(pairs)), len(pairs)
