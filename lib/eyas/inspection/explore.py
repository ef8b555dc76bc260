"""A look at single tokens: choose sample, boundary and position, in JupyterLab and in the saved page alike.

What is shown is the *logit lens* (nostalgebraist 2020): the target's own final norm and head, fed with the state of an inner boundary, as if no block came
after it. It says what the boundary tells of the next token to a reader that knows the head alone; a drafter, which has a layer of its own, can read more.

No widget: a select and a number field with a few lines of script in their own attributes. Widgets need a kernel and a script from the network to show in a
saved page; this needs neither, and where scripts are not run (print, an untrusted notebook) the first choice stands there as text.

Axes: T tokens shown of a sample, B boundaries shown, V vocabulary.
"""

from dataclasses import dataclass
from html import escape

import numpy as np
import torch

from eyas.models.target import Head
from eyas.store.reader import Store

SAMPLES, TOK, BOUNDARIES = 6, 96, 8  # shown at most
BEFORE_TOK = 24  # of the prompt, shown before the first supervised token


@dataclass(frozen=True)
class Lens:
    """One sample. start: position of its first token shown; boundaries: those shown. The last token has no next one: its p is NaN."""

    id: str
    start: int
    boundaries: tuple[int, ...]
    input_ids: torch.Tensor  # int64 [T]
    supervised: torch.Tensor  # bool [T]
    norm: torch.Tensor  # [B, T], Euclidean length of the state
    choice: torch.Tensor  # int64 [B, T], the head's first choice
    p: torch.Tensor  # [B, T], probability that the head gives to the real next token


def some_boundaries(boundaries: tuple[int, ...], limit: int = BOUNDARIES) -> tuple[int, ...]:
    """All of them, or `limit` spread evenly, the first and the last among them."""
    at = np.linspace(0, len(boundaries) - 1, min(limit, len(boundaries))).round().astype(int)
    return tuple(boundaries[i] for i in dict.fromkeys(at))


def lens(store: Store, id: str, head: Head) -> Lens:
    boundaries = some_boundaries(store.boundaries)
    sample = store.read(id, boundaries)
    answers = sample["loss_mask"].nonzero().flatten()
    first = int(answers[0]) if len(answers) else 0
    window = slice(max(first - BEFORE_TOK, 0), max(first - BEFORE_TOK, 0) + TOK)
    ids, following = (
        sample["input_ids"][window],
        sample["input_ids"][window.start + 1 : window.stop + 1],
    )
    norms, choices, ps = [], [], []
    for b in boundaries:
        rows = sample["states"][b][window]  # [T, H]
        logits = head.logits(rows)  # [T, V]
        p = torch.full((len(ids),), torch.nan)
        p[: len(following)] = (
            logits[: len(following)].softmax(-1).gather(1, following[:, None]).squeeze(1)
        )
        norms.append(torch.linalg.vector_norm(rows.float(), dim=-1))
        choices.append(logits.argmax(-1))
        ps.append(p)
    return Lens(
        id,
        window.start,
        boundaries,
        ids,
        sample["loss_mask"][window],
        torch.stack(norms),
        torch.stack(choices),
        torch.stack(ps),
    )


# `this` is the element around all of it. A token's numbers stand in its own attributes, a value a boundary with a bar between.
_ON_INPUT = """
const one = s => this.querySelector(s), all = s => [...this.querySelectorAll(s)], b = one('[name=boundary]').selectedIndex, at = one('[name=position]');
const sample = one('[name=sample]').selectedIndex;
all('[data-sample]').forEach((d, n) => d.hidden = n != sample);
const tokens = [...all('[data-sample]')[sample].querySelectorAll('span')], first = +tokens[0].dataset.at;
at.min = first; at.max = first + tokens.length - 1;
const chosen = tokens[Math.max(0, Math.min(at.value - first, tokens.length - 1))];
tokens.forEach(t => { t.style.background = 'rgba(47, 127, 193, ' + 0.6 * (t.dataset.p.split('|')[b] || 0) / 100 + ')'; t.style.outline = t == chosen ? '2px solid' : ''; });
if (event.target != at) at.value = chosen.dataset.at;
const quoted = t => JSON.stringify(t.textContent.replaceAll('⏎', '')), next = tokens[tokens.indexOf(chosen) + 1];
one('output').textContent = 'Token ' + chosen.dataset.at + ', ' + quoted(chosen) + ', is followed by ' + (next ? quoted(next) : 'nothing that is shown');
all('tbody tr').forEach((row, n) => ['norm', 'choice', 'p'].forEach((name, k) => row.cells[k + 1].textContent = chosen.dataset[name].split('|')[n]));
"""
_ON_CLICK = "if (event.target.dataset.at) { this.querySelector('[name=position]').value = event.target.dataset.at; this.oninput(event); }"


def picker(lenses: list[Lens], tokenizer) -> str:
    """HTML: the samples to choose from with their tokens, the deeper a token's colour, the more probable the next one from its state at the chosen boundary; and the
    chosen token's numbers at every boundary. The first sample, the last boundary and the token before the first answer stand there at the start."""
    boundaries, shown = lenses[0].boundaries, lenses[0]
    chosen = max(int(shown.supervised.nonzero()[0]) - 1, 0) if shown.supervised.any() else 0
    texts = [_texts(one, tokenizer) for one in lenses]
    following = (
        _quoted(texts[0][chosen + 1]) if chosen + 1 < len(texts[0]) else "nothing that is shown"
    )
    rows = "".join(
        f"<tr><td>{b}</td><td>{norm}</td><td>{choice}</td><td>{p}</td></tr>"
        for b, norm, choice, p in zip(boundaries, *(_numbers(shown, chosen, tokenizer).values()))
    )
    samples = "".join(
        f'<div data-sample="{n}" style="white-space: pre-wrap; line-height: 1.9; margin: .5rem 0"{" hidden" if n else ""}>'
        + "".join(
            _token(one, i, text, tokenizer, len(boundaries) - 1, n == 0 and i == chosen)
            for i, text in enumerate(texts[n])
        )
        + "</div>"
        for n, one in enumerate(lenses)
    )
    return f"""<div class="eyas-picker" oninput="{escape(_ON_INPUT.strip())}" onclick="{escape(_ON_CLICK)}">
<p><label>Sample <select name="sample">{"".join(f"<option>{escape(one.id)}</option>" for one in lenses)}</select></label>
<label>Boundary <select name="boundary">{"".join(f"<option{' selected' if b == boundaries[-1] else ''}>{b}</option>" for b in boundaries)}</select></label>
<label>Position <input name="position" type="number" value="{shown.start + chosen}" min="{shown.start}" max="{shown.start + len(texts[0]) - 1}" style="width: 5rem"></label></p>
{samples}
<p><output aria-live="polite">Token {shown.start + chosen}, {escape(_quoted(texts[0][chosen]))}, is followed by {escape(following)}</output></p>
<table><thead><tr><th>boundary</th><th>norm</th><th>first choice of the head</th><th>real next token, %</th></tr></thead><tbody>{rows}</tbody></table></div>"""


def _token(one: Lens, i: int, text: str, tokenizer, b: int, chosen: bool) -> str:
    data = " ".join(
        f'data-{name}="{"|".join(values)}"' for name, values in _numbers(one, i, tokenizer).items()
    )
    p = float(one.p[b, i].nan_to_num())
    style = (
        f"background: rgba(47, 127, 193, {0.6 * p:.2f}); cursor: pointer"
        + ("; outline: 2px solid" if chosen else "")
        + ("; text-decoration: underline" if one.supervised[i] else "")
    )
    return f'<span data-at="{one.start + i}" {data} style="{style}">{escape(text)}</span>'


def _numbers(one: Lens, i: int, tokenizer) -> dict[str, list[str]]:
    """norm, choice and p of a token as text, at each boundary."""
    choices = [
        escape(_quoted(tokenizer.decode([int(token)])).replace("|", "¦"))
        for token in one.choice[:, i]
    ]
    return {
        "norm": [f"{float(v):.4g}" for v in one.norm[:, i]],
        "choice": choices,
        "p": ["" if torch.isnan(v) else f"{100 * float(v):.1f}" for v in one.p[:, i]],
    }


def _texts(one: Lens, tokenizer) -> list[str]:
    """A token alone may be half a character, which shows as such; line breaks are made visible."""
    return [tokenizer.decode([int(token)]).replace("\n", "⏎\n") for token in one.input_ids]


def _quoted(text: str) -> str:
    return '"' + text.replace("⏎", "").replace("\n", "\\n").replace('"', '\\"') + '"'
