"""Look at single tokens: choose sample, boundary and position, in JupyterLab and in a saved page.

What is shown is the *logit lens* (nostalgebraist 2020): the target's own final norm and head, fed
with the state of an inner boundary, as if no block came after it. It says what the boundary tells
of the next token to a reader that knows the head alone. A drafter has a layer of its own and can
read more.

The picker is no widget: it is a select and a number field with a short script in their own
attributes. Widgets need a kernel, and a script from the network to show in a saved page. The picker
needs neither. Where scripts do not run (print, an untrusted notebook) the first choice stands there
as text.

Axes: T tokens shown of a sample, B boundaries shown, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np
import torch

from eyas.models.target import Head
from eyas.store.reader import Store

# Shown at most.
SAMPLES = 6
TOK = 96
BOUNDARIES = 8
BEFORE_TOK = 24  # tokens of the prompt that are shown before the first supervised token

_FOLDER = Path(__file__).parent
_ON_INPUT = (_FOLDER / "picker.js").read_text(encoding="utf-8").strip()
_ON_CLICK = (
    "if (event.target.dataset.at) { "
    "this.querySelector('[name=position]').value = event.target.dataset.at; "
    "this.oninput(event); }"
)


@dataclass(frozen=True)
class Lens:
    """Hold the logit lens of one sample."""

    id: str
    start: int  # position of the first token shown
    boundaries: tuple[int, ...]
    input_ids: torch.Tensor  # int64 [T]
    supervised: torch.Tensor  # bool [T]
    norm: torch.Tensor  # [B, T], Euclidean length of the state
    choice: torch.Tensor  # int64 [B, T], the head's first choice
    p: torch.Tensor  # [B, T], the head's probability of the real next token; NaN for the last


def some_boundaries(boundaries: tuple[int, ...], limit: int = BOUNDARIES) -> tuple[int, ...]:
    """Return all of them, or `limit` evenly spread ones with the first and the last."""
    n = min(limit, len(boundaries))
    indices = np.linspace(0, len(boundaries) - 1, n).round().astype(int)
    return tuple(boundaries[i] for i in dict.fromkeys(indices))


def lens(store: Store, id: str, head: Head) -> Lens:
    """Compute the logit lens of a stored sample, from a little before its first response on."""
    boundaries = some_boundaries(store.boundaries)
    sample = store.read(id, boundaries)
    supervised = sample["loss_mask"].nonzero().flatten()
    first = int(supervised[0]) if len(supervised) else 0
    start = max(first - BEFORE_TOK, 0)
    window = slice(start, start + TOK)
    ids = sample["input_ids"][window]
    following = sample["input_ids"][start + 1 : start + TOK + 1]  # [T], or [T - 1] at the end
    norms = []
    choices = []
    probabilities = []
    for b in boundaries:
        rows = sample["states"][b][window]  # [T, H]
        logits = head.logits(rows)  # [T, V]
        known = logits[: len(following)].softmax(-1)
        p = torch.full((len(ids),), torch.nan)
        p[: len(following)] = known.gather(1, following[:, None]).squeeze(1)
        norms.append(torch.linalg.vector_norm(rows.float(), dim=-1))
        choices.append(logits.argmax(-1))
        probabilities.append(p)
    return Lens(
        id=id,
        start=start,
        boundaries=boundaries,
        input_ids=ids,
        supervised=sample["loss_mask"][window],
        norm=torch.stack(norms),
        choice=torch.stack(choices),
        p=torch.stack(probabilities),
    )


@dataclass(frozen=True)
class _Token:
    """Hold what the picker shows of a token. norm, choice, p: texts, one a boundary."""

    position: int
    text: str
    supervised: bool
    norm: list[str]
    choice: list[str]
    p: list[str]
    last_p: float  # of the last boundary, which is chosen at the start

    def style(self, chosen: bool) -> str:
        """Return the CSS: the more probable the next token, the deeper the colour."""
        parts = [f"background: rgba(47, 127, 193, {0.6 * self.last_p:.2f})", "cursor: pointer"]
        if chosen:
            parts.append("outline: 2px solid")
        if self.supervised:
            parts.append("text-decoration: underline")
        return "; ".join(parts)


def picker(lenses: list[Lens], tokenizer) -> str:
    """Return the HTML of the picker.

    It shows the tokens of the samples to choose from, coloured by how probable the next token is
    from the state at the chosen boundary, and the chosen token's numbers at every boundary. At the
    start it shows the first sample, the last boundary and the token before the first response.
    """
    samples = [_tokens(sample, tokenizer) for sample in lenses]
    chosen_index = _before_response(lenses[0])
    following = "nothing that is shown"
    if chosen_index + 1 < len(samples[0]):
        following = _quoted(samples[0][chosen_index + 1].text)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("picker.html.jinja").render(
        on_input=_ON_INPUT,
        on_click=_ON_CLICK,
        sample_ids=[sample.id for sample in lenses],
        boundaries=lenses[0].boundaries,
        samples=samples,
        chosen=samples[0][chosen_index],
        following=following,
        quoted=_quoted,
    )


def _before_response(sample: Lens) -> int:
    """Return the index of the token before the first supervised one; 0 where there is none."""
    if not sample.supervised.any():
        return 0
    return max(int(sample.supervised.nonzero()[0]) - 1, 0)


def _tokens(sample: Lens, tokenizer) -> list[_Token]:
    """Return the tokens of a sample as the picker shows them."""
    tokens = []
    for i, token_id in enumerate(sample.input_ids):
        # A token alone may be half a character, which shows as such. Line breaks are made visible.
        text = tokenizer.decode([int(token_id)]).replace("\n", "⏎\n")
        tokens.append(
            _Token(
                position=sample.start + i,
                text=text,
                supervised=bool(sample.supervised[i]),
                norm=[f"{float(norm):.4g}" for norm in sample.norm[:, i]],
                choice=[_choice_text(tokenizer, choice) for choice in sample.choice[:, i]],
                p=[_percent(p) for p in sample.p[:, i]],
                last_p=float(sample.p[-1, i].nan_to_num()),
            )
        )
    return tokens


def _choice_text(tokenizer, token_id: torch.Tensor) -> str:
    """Return a token quoted, without the bar that separates the boundaries."""
    return _quoted(tokenizer.decode([int(token_id)])).replace("|", "¦")


def _percent(p: torch.Tensor) -> str:
    return "" if torch.isnan(p) else f"{100 * float(p):.1f}"


def _quoted(text: str) -> str:
    plain = text.replace("⏎", "").replace("\n", "\\n").replace('"', '\\"')
    return f'"{plain}"'
