"""Turn conversations into token ids and loss masks with the target's chat template.

The loss mask marks the tokens of the answers.
"""

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
    """Hold one encoded conversation of T tokens."""

    id: str
    input_ids: np.ndarray  # int64 [T]
    loss_mask: np.ndarray  # bool [T]; True where the assistant writes token t
    truncated: bool  # cut at max_length, with its mask
    category: str
    split: str
    warnings: tuple[str, ...] = ()  # remarks on an accepted sample
    topic: str = ""


def encode(conversation: Conversation, tokenizer, max_length: int) -> Sample:
    """Encode a conversation with the tokenizer's own chat template.

    - The mask selects every assistant turn: its words and the end-of-turn token. It selects neither
      the header before nor the line break after it.
    - An answer with finish "length" was cut. Its end-of-turn token is the template's and is not in
      the mask. A user turn after the last answer is dropped.
    - Each answer is tokenised by itself after its prompt, as the server does it. Ids of prompt and
      answer are never merged across the border.
    - The place of an answer is found by rendering the messages before it with the generation
      prompt, and then with the answer. A template without a generation prompt needs
      `{% generation %}` markers. The place is never found by a search for the answer's text.
    - An answer with "weight": 0 is context: it is not supervised.
    - Only what the model writes after the generation prompt is supervised. An earlier answer that
      the template rewrites (it leaves thoughts out) is not supervised, and a warning says so.

    Raise EyasError, which names the sample, in these cases: it has no answer; a text contains a
    control token; the template fails, writes the last answer otherwise than the model does, or
    supervises nothing or everything; no supervised token is left after the cut at `max_length`.
    """
    id = conversation.id
    if conversation.unusable:
        raise EyasError(
            f"sample {id} is left out: {conversation.unusable}",
            "turns of plain text",
            "write the text as the model has to write it, without these fields",
        )
    messages = list(conversation.messages)
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
    warnings += ["empty answer" for m in answers if m["content"] == ""]
    _refuse_control_tokens(id, messages, tokenizer)
    text, spans = _answer_spans(id, messages, tokenizer)
    rewritten = spans.count(None)
    spans = [
        None if answer.get("weight", 1) == 0 else span
        for span, answer in zip(spans, answers, strict=True)
    ]
    if rewritten:
        warnings.append(
            f"{rewritten} of {len(answers)} answers not supervised: the chat template rewrites them"
        )
    ids, mask = _ids_and_mask(text, spans, answers, tokenizer)
    _check_round_trip(id, ids, text, tokenizer)
    _check_mask(id, mask)
    truncated = len(ids) > max_length
    if truncated:
        warnings.append(f"cut from {len(ids)} to {max_length} tokens")
        if not any(mask[:max_length]):
            raise EyasError(
                f"sample {id} has {len(ids)} tokens,"
                f" and the first {max_length} hold nothing of an answer",
                "a longer max_length",
                "-p max_length N",
            )
    return Sample(
        id,
        np.array(ids[:max_length], dtype=np.int64),
        np.array(mask[:max_length], dtype=np.bool_),
        truncated,
        conversation.category,
        conversation.split,
        tuple(warnings),
        conversation.topic,
    )


def _ids_and_mask(
    text: str, spans: list[tuple[int, int, int] | None], answers: list[dict], tokenizer
) -> tuple[list[int], list[bool]]:
    """Tokenise a rendered conversation piece by piece; return its ids and its loss mask.

    spans: (start of the words, their end, end of the end-of-turn token) of each supervised answer.
    """
    ids: list[int] = []
    mask: list[bool] = []

    def append(piece: str, supervised: bool) -> None:
        piece_ids = tokenizer.encode(piece, add_special_tokens=False)
        ids.extend(piece_ids)
        mask.extend(supervised for _ in piece_ids)

    position = 0
    for span, answer in zip(spans, answers):
        if span is None:
            continue
        start, words_end, end = span
        append(text[position:start], False)
        append(text[start:words_end], True)
        append(text[words_end:end], answer.get("finish", "stop") == "stop")
        position = end
    append(text[position:], False)
    return ids, mask


def _check_mask(id: str, mask: list[bool]) -> None:
    """Raise EyasError if the mask selects nothing, or everything up to its last selected token."""
    if not any(mask):
        raise EyasError(
            f"sample {id}: its loss mask is zero everywhere",
            "at least one supervised token",
            "answers that end by themselves, or a larger max_new_tok",
        )
    end = len(mask) - mask[::-1].index(True)
    if all(mask[:end]):
        raise _all_supervised(id)


def _all_supervised(id: str) -> EyasError:
    return EyasError(
        f"sample {id}: the chat template gives a loss mask of ones everywhere",
        "a template that marks the assistant's turns only",
    )


def prompt_ids(messages: list[dict], tokenizer, id: str) -> list[int]:
    """Return the token ids of a prompt, after which the server writes the next assistant turn.

    `messages` end with a user turn. Raise EyasError as in `encode`.
    """
    _refuse_control_tokens(id, messages, tokenizer)
    text = _render(id, messages, tokenizer, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def end_of_turn(tokenizer) -> int:
    """Return the id of the token that ends an assistant turn in the chat template."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    if _by_markers(tokenizer):
        text, [(_, start, end)] = _marked_spans("(probe)", messages, tokenizer)
        return tokenizer.convert_tokens_to_ids(text[start:end])
    return tokenizer.convert_tokens_to_ids(_turn("(probe)", messages, tokenizer).end)


def thinking_switch(tokenizer) -> str:
    """Return the variable that switches the chat template's thinking; empty if there is none."""
    variable = re.search(r"\b(enable_thinking|thinking)\b", _template(tokenizer))
    return variable.group() if variable else ""


def template_hash(tokenizer) -> str:
    """Return the sha256 over the chat template."""
    return sha256_json(_template(tokenizer))


def tokenizer_hash(tokenizer) -> str:
    """Return the sha256 over what turns text into ids, whatever folder the tokenizer came from."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # not of the tokenizers library: only its vocabulary can be read
        return sha256_json(sorted(tokenizer.get_vocab().items()))
    state = json.loads(backend.to_str())
    # Calls set truncation and padding; they are no part of the tokenizer.
    kept = {name: part for name, part in state.items() if name not in ("truncation", "padding")}
    return sha256_json(kept)


def _template(tokenizer) -> str:
    """Return the chat template. Raise EyasError if the tokenizer has none."""
    if not isinstance(tokenizer.chat_template, str):
        raise EyasError(
            "the target's tokenizer has no chat template",
            "a chat model with one",
            "a chat_template.jinja in the target's folder",
        )
    return tokenizer.chat_template


def _render(id: str, messages: list[dict], tokenizer, add_generation_prompt: bool = False) -> str:
    """Return the text of the messages. Raise EyasError if the template refuses them."""
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
    """Return whether `{% generation %}` markers are the only way to find the answers.

    A generation prompt finds them as the server does, so it has precedence: some templates mark
    their headers too.
    """
    if re.search(r"\{%-?\s*generation\s*-?%\}", _template(tokenizer)) is None:
        return False
    question = [{"role": "user", "content": "a"}]
    opened = _render("(probe)", question, tokenizer, add_generation_prompt=True)
    return opened == _render("(probe)", question, tokenizer)


def _answer_spans(
    id: str, messages: list[dict], tokenizer
) -> tuple[str, list[tuple[int, int, int] | None]]:
    """Return the conversation's text, and a span for each assistant turn.

    A span is (start of the words, their end, end of the end-of-turn token), as positions in the
    text. It is None where the text is not what the model writes.
    """
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
    spans = [turn.span_in(text) for turn in turns]
    if spans[-1][0] == 0 and not text[spans[-1][2] :].strip():
        raise _all_supervised(id)
    return text, spans


@dataclass(frozen=True)
class _Turn:
    """Hold the text of a conversation up to one answer, in four parts."""

    prompt: str  # what the server receives
    words: str  # what the model writes after it
    end: str  # the end-of-turn token
    rest: str  # what the template adds
    fault: EyasError | None = None  # why the words are not what the model writes

    @property
    def text(self) -> str:
        """Return the four parts as one text."""
        return self.prompt + self.words + self.end + self.rest

    def span_in(self, text: str) -> tuple[int, int, int] | None:
        """Return the answer's span in the whole conversation's text.

        Return None if the turn has a fault, or if the template rewrites it when more follows.
        """
        through_end = self.prompt + self.words + self.end
        if self.fault or not text.startswith(through_end):
            return None
        start = len(self.prompt)
        return start, start + len(self.words), len(through_end)


def _turn(id: str, messages: list[dict], tokenizer) -> _Turn:
    """Return the last message, an answer, as the model writes it after its generation prompt.

    A template may write an answer otherwise: it puts an empty <think></think> before an answer
    without thoughts and before one that was cut within its thoughts, or it leaves the thoughts out.
    Then the words are the message's own, if they continue the prompt with thoughts as the model
    does. Anything else is a fault.
    """
    if not any(m["role"] == "user" for m in messages[:-1]):
        raise EyasError(f"sample {id}: an answer comes before any question", "a user turn first")
    answer = messages[-1]
    prompt = _render(id, messages[:-1], tokenizer, add_generation_prompt=True)
    text = _render(id, messages, tokenizer)
    appended = text.startswith(prompt)
    ends = list(_control_tokens(tokenizer).finditer(text, len(prompt) if appended else 0))
    if not ends or not (appended or not text[ends[-1].end() :].strip()):
        raise EyasError(
            f"sample {id}: the chat template closes the assistant's turn without a control token",
            "an end-of-turn token, such as <|im_end|>",
        )
    end = ends[-1].group()
    rest = text[ends[-1].end() :]
    written = text[len(prompt) : ends[-1].start()] if appended else None
    prompt_opens = prompt.rstrip().endswith("<think>")
    prompt_closes = prompt.rstrip().endswith("</think>")
    words = answer["content"]
    if prompt_opens:  # some answers repeat the opening that the prompt already has
        words = words.removeprefix(prompt[prompt.rfind("<think>") :])
    thinks = words.lstrip().startswith("<think>")

    opens_twice = thinks and (prompt_opens or prompt_closes)
    if appended and written.strip() == words.strip() and not opens_twice:
        return _Turn(prompt, written, end, rest)

    starts_thinking = thinks and not prompt_opens and not prompt_closes
    was_cut = answer.get("finish") == "length"
    continues_thinking = prompt_opens and not thinks and ("</think>" in words or was_cut)
    if starts_thinking or continues_thinking:
        return _Turn(prompt, words, end, rest)

    fault = _otherwise(
        f"sample {id}: ", words, written, thinks and prompt_closes, len(messages), tokenizer
    )
    return _Turn(prompt, words, end, rest, fault)


def _otherwise(
    sample: str, words: str, written: str | None, closed: bool, number: int, tokenizer
) -> EyasError:
    """Return the error for an answer that the model would not write under this template.

    closed: the template closes the thoughts before the answer. The error names what to set.
    """
    switch = thinking_switch(tokenizer)
    setting = "python -m eyas prompts generate"
    if switch:
        setting = f"-p chat_template_kwargs '{json.dumps({switch: closed})}'"
    if closed:
        return EyasError(
            f"{sample}message {number} has thoughts,"
            " and the chat template closes them before the answer",
            "answers without thoughts, or a template that lets the model think",
            setting,
        )
    template = "writes it otherwise than after its generation prompt"
    if written is not None:
        template = f"makes it {written[:60]!r}"
    return EyasError(
        f"{sample}message {number} begins {words[:40]!r}, and the chat template {template},"
        " which is not what the model wrote",
        "answers as the model writes them, with its thoughts where it thinks,"
        " or thinking switched off",
        setting,
    )


def _marked_spans(
    id: str, messages: list[dict], tokenizer
) -> tuple[str, list[tuple[int, int, int] | None]]:
    """Return text and spans as `_answer_spans` does, from the template's markers.

    A turn has no span if its marked words are not those of the message.
    """
    answers = [m for m in messages if m["role"] == "assistant"]
    text, marked = _render_markers(id, messages, tokenizer)
    if not marked:
        raise EyasError(
            f"sample {id}: the chat template gives a loss mask of zeros everywhere",
            "a template that marks the assistant's turns",
        )
    if marked[0][0] == 0 and len(text[marked[-1][1] :].strip()) == 0:
        raise _all_supervised(id)
    if len(marked) != len(answers):
        raise EyasError(
            f"sample {id}: the chat template marks {len(marked)} turns as the assistant's",
            f"its {len(answers)} answers",
        )
    spans = []
    for (start, stop), answer in zip(marked, answers):
        ends = list(_control_tokens(tokenizer).finditer(text, start, stop))
        # A template may end its mark before the end-of-turn token, which the model writes too.
        end = ends[-1] if ends else _control_tokens(tokenizer).match(text, stop)
        if end is None:
            raise EyasError(
                f"sample {id}: the chat template closes the assistant's turn"
                " without a control token",
                "an end-of-turn token, such as <|im_end|>",
            )
        words = text[start : end.start()]
        unchanged = words.strip() == answer["content"].strip()
        if not unchanged and answer is answers[-1]:
            raise _otherwise(
                f"sample {id}: ", answer["content"], words, False, len(messages), tokenizer
            )
        spans.append((start, end.start(), end.end()) if unchanged else None)
    return text, spans


def _render_markers(id: str, messages: list[dict], tokenizer) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of the messages, and the spans that the template marks as the assistant's."""
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
    """Return a pattern that matches any control token; the longest token wins."""
    texts = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    texts |= set(tokenizer.all_special_tokens)
    longest_first = sorted(texts, key=lambda t: (-len(t), t))
    return re.compile("|".join(re.escape(t) for t in longest_first))


def _refuse_control_tokens(id: str, messages: list[dict], tokenizer) -> None:
    """Raise EyasError if a text contains a control token, which would open or close a turn."""
    for number, message in enumerate(messages, start=1):
        token = _control_tokens(tokenizer).search(message["content"])
        if token:
            raise EyasError(
                f"sample {id}: message {number} contains the control token {token.group()!r}",
                "plain text",
                "take it out of the prompt set",
            )


def _check_round_trip(id: str, ids: list[int], text: str, tokenizer) -> None:
    """Raise EyasError unless the ids decode to the text again."""
    back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if unicodedata.normalize("NFC", back) != unicodedata.normalize("NFC", text):
        raise EyasError(
            f"sample {id}: its token ids do not give its text again",
            "a tokenizer that can be applied turn by turn",
        )


def repeated_bigrams(ids: list[int]) -> tuple[int, int]:
    """Return how many pairs of neighbouring tokens occurred before, and how many pairs there are.

    In a text that loops, nearly all pairs occurred before.
    """
    pairs = list(zip(ids, ids[1:]))
    return len(pairs) - len(set(pairs)), len(pairs)
