"""The picker: its numbers are the head's own, what stands there without a script is the first
choice, and a browser shows the others.
"""

import html
import re
import shutil
import subprocess

import pytest
import torch
from bs4 import BeautifulSoup

from eyas.doctor import BROWSERS
from eyas.inspection.explore import TOK, lens, picker, some_boundaries
from eyas.models.target import load_target
from eyas.store.reader import Store
from helpers.stores import write_random_store
from helpers.tiny import make_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(
        str(make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny", n_blocks=6))
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory, target):
    return Store.open(write_random_store(tmp_path_factory.mktemp("store") / "store", target))


def test_the_numbers_are_the_heads(store):
    id, head = store.samples()[0], store.head()
    one, sample = lens(store, id, head), store.read(store.samples()[0])
    T = len(sample["input_ids"])
    assert (
        T <= TOK
        and one.start == 0
        and one.boundaries == store.boundaries
        and one.p.shape == (len(store.boundaries), T)
    )
    for n, b in enumerate(store.boundaries):
        logp = head.logits(sample["states"][b]).log_softmax(-1)
        assert torch.equal(one.choice[n], logp.argmax(-1))
        wanted = torch.tensor([logp[j, sample["input_ids"][j + 1]].exp() for j in range(T - 1)])
        torch.testing.assert_close(one.p[n, :-1], wanted)
        assert torch.isnan(one.p[n, -1])
        torch.testing.assert_close(one.norm[n], sample["states"][b].float().norm(dim=-1))


def test_few_of_many_boundaries():
    assert some_boundaries(tuple(range(31)), 4) == (0, 10, 20, 30) and some_boundaries(
        (2, 15, 30), 8
    ) == (2, 15, 30)


def test_without_a_script_the_first_choice_stands_there(store, target):
    lenses, tokenizer = (
        [lens(store, id, store.head()) for id in store.samples()[:3]],
        target.tokenizer(),
    )
    text = picker(lenses, tokenizer)
    assert "<script" not in text and not re.search(r"https?://|src=|href=", text)
    page = BeautifulSoup(text, "html.parser")
    samples = page.select("[data-sample]")
    assert [d.has_attr("hidden") for d in samples] == [False, True, True]
    first, one = samples[0], lenses[0]
    assert [s["data-at"] for s in first.select("span")] == [
        str(i) for i in range(len(one.input_ids))
    ]
    (chosen,) = [s for s in page.select("span") if "outline" in s["style"]]
    at = int(chosen["data-at"])
    assert (
        one.supervised[at + 1]
        and not one.supervised[: at + 1].any()
        and page.select_one("[name=position]")["value"] == str(at)
    )
    rows = [[cell.get_text() for cell in row.select("td")] for row in page.select("tbody tr")]
    assert [row[0] for row in rows] == [str(b) for b in store.boundaries]
    assert (
        [row[3] for row in rows]
        == chosen["data-p"].split("|")
        == [f"{100 * float(p):.1f}" for p in one.p[:, at]]
    )
    assert [row[2] for row in rows] == chosen["data-choice"].split("|")
    assert html.unescape(page.select_one("output").get_text()).startswith(f"Token {at}, ")


CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)


# Goes when a browser can be locked like a package.
@pytest.mark.skipif(
    CHROMIUM is None,
    reason=f"none of {', '.join(BROWSERS)} is here; Debian: apt-get install chromium",
)
def test_a_browser_shows_what_is_chosen(store, target, tmp_path):
    lenses = [lens(store, id, store.head()) for id in store.samples()[:3]]
    choose = """<script>const all = document.querySelector('.eyas-picker'), change = (name, set) \
=> { set(all.querySelector('[name=' + name + ']'));
        all.querySelector('[name=' + name + ']').dispatchEvent(new Event('input', {bubbles: \
true})); };
        change('sample', e => e.selectedIndex = 1); change('boundary', e => e.selectedIndex = 0); \
all.querySelectorAll('[data-sample]')[1].querySelectorAll('span')[5].click();</script>"""
    (tmp_path / "page.html").write_text(
        f"<!doctype html><meta charset=utf-8>{picker(lenses, target.tokenizer())}{choose}"
    )
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        f"file://{tmp_path}/page.html",
    ]
    page = BeautifulSoup(
        subprocess.run(command, capture_output=True, text=True, timeout=120).stdout, "html.parser"
    )
    assert [d.has_attr("hidden") for d in page.select("[data-sample]")] == [True, False, True]
    one = lenses[1]
    assert [row.select("td")[3].get_text() for row in page.select("tbody tr")] == [
        f"{100 * float(p):.1f}" for p in one.p[:, 5]
    ]
    assert [row.select("td")[1].get_text() for row in page.select("tbody tr")] == [
        f"{float(v):.4g}" for v in one.norm[:, 5]
    ]
    spans = page.select("[data-sample]")[1].select("span")
    assert ["2px" in s["style"] for s in spans] == [n == 5 for n in range(len(spans))]
    shade = float(re.search(r"rgba\(47, 127, 193, ([\d.]+)\)", spans[3]["style"]).group(1))
    assert shade == pytest.approx(0.6 * float(one.p[0, 3]), abs=0.01)
    assert page.select_one("output").get_text().startswith("Token 5, ")
