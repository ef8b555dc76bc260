"""The reports in a real browser, opened from the disk with the network off: looked at wide and
narrow, light and dark, on paper and without scripts, and clicked through.

Needs chromium; where there is none, the test is skipped and says how to get it. Reports: the
committed ones, and small ones made here from real run.json files.
"""

import copy
import re
import shutil
from pathlib import Path

import nbformat
import pytest

from eyas.doctor import BROWSERS
from eyas.files import ROOT, read_json, write_json
from eyas.report import pages, summary
from eyas.report import run as report

WIDTHS, SCHEMES = (1280, 480), ("light", "dark")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# The skip goes when a browser can be locked like a package. One page is made by a kernel.
pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(
        BROWSER is None,
        reason=f"none of {', '.join(BROWSERS)} is here; Debian: apt-get install chromium",
    ),
]

# What a page shows that it must not: wider than the window, figures that did not load or have no
# words, text that can't be told from its background.
WRONG = """() => {
  const wrong = [], root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) wrong.push(`${root.scrollWidth} pixels wide in a window \
of ${root.clientWidth}`);
  for (const image of document.images) {
    if (!image.complete || !image.naturalWidth) wrong.push("an image did not load");
    if (image.alt.length < 20) wrong.push(`alt text: ${image.alt}`);
  }
  for (const svg of document.querySelectorAll("svg")) if (svg.getAttribute("role") !== "img" || \
!svg.ariaLabel) wrong.push("a drawing without words");
  const light = color => { const [r, g, b] = color.match(/[\\d.]+/g).map(Number); return (0.299 * \
r + 0.587 * g + 0.114 * b) / 255; };
  const behind = element => { for (let at = element; at; at = at.parentElement) { const color = \
getComputedStyle(at).backgroundColor; if (!/, 0\\)|transparent/.test(color)) return color; } \
return "rgb(255, 255, 255)"; };
  for (const element of document.querySelectorAll("h1, h2, p, td, th, a, button, pre, summary, \
.highlight span, .error span, .muted, code, small, b, figcaption, input")) {
    if (!element.checkVisibility() || !element.innerText?.trim()) continue;
    const distance = Math.abs(light(getComputedStyle(element).color) - light(behind(element)));
    if (distance < 0.25) wrong.push(`can't be read (${distance.toFixed(2)}): ${element.tagName} \
${element.innerText.slice(0, 40)}`);
  }
  return [...new Set(wrong)];
}"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """reference and layers as committed, a run like reference with other numbers, one that failed,
    one that was killed, one that goes on.
    """
    folder = tmp_path_factory.mktemp("browser")
    reports = folder / "reports"
    for name in ("reference", "layers"):
        shutil.copytree(ROOT / "reports" / name, reports / name)
    reference = read_json(reports / "reference" / "run.json")

    other = copy.deepcopy(reference) | {
        "run_name": "other",
        "profile": "other",
        "started": "2025-01-01T00:00:00+00:00",
        "notebooks": [],
    }
    other["settings"] |= {"run_name": "other", "boundaries": [1, 2, 3]}
    for key in ("acceptance_length", "speed_ratio"):
        other["headline"][key] = {"value": 1.1, "low": 0.7, "high": 1.2, "prompts": 12}
    other["settings"]["threads"] = reference["settings"]["threads"] + 1
    write_json(reports / "other" / "run.json", other)
    for name, changes in (
        ("killed", {"process": {"pid": 2**22 + 1, "created": 0.0}}),
        ("going", {"process": report.this_process()}),
    ):
        run = (
            copy.deepcopy(reference)
            | {
                "run_name": name,
                "state": "running",
                "headline": None,
                "started": "2024-01-01T00:00:00+00:00",
            }
            | changes
        )
        run["notebooks"] = [run["notebooks"][0] | {"state": "running", "page": None}]
        write_json(reports / name / "run.json", run)

    (reports / "other" / "99_made.html").write_text(made_page())

    notebook = nbformat.v4.new_notebook(
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
        }
    )
    parameters = nbformat.v4.new_code_cell(
        'run_name: str = "demo"  # name', metadata={"tags": ["parameters"]}
    )
    notebook.cells = [
        nbformat.v4.new_markdown_cell("# Does it fail?\n\n**Question.** Does it?"),
        parameters,
        nbformat.v4.new_code_cell("raise ValueError('a long word: ' + 200 * 'x')"),
    ]
    (folder / "notebooks").mkdir()
    nbformat.write(notebook, folder / "notebooks" / "01_tiny.ipynb")
    (folder / "tiny.yaml").write_text("run_name: broken\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EYAS_DATA", str(folder / "data"))
        report.run_report(
            str(folder / "tiny.yaml"), {}, folder=folder / "notebooks", reports=reports
        )
    return reports


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=BROWSER, args=["--disable-gpu", "--disable-background-networking"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page without network; at the end no other address than a file's was asked for, and nothing
    was complained about.
    """
    context = browser.new_context(
        offline=True,
        viewport={"width": 1280, "height": 900},
        permissions=["clipboard-read", "clipboard-write"],
    )
    page, asked, said = context.new_page(), [], []
    context.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    yield page
    context.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert said == []


def made_page() -> str:
    """What is hard to show: a table of 30 columns, a line of 300 characters in text, in code and in
    an error, a figure twice as high as a sheet, coloured code.
    """
    table = (
        "<table>"
        + "".join(
            "<tr>" + "".join(f"<td>{row * column * 1234567}</td>" for column in range(30)) + "</tr>"
            for row in range(3)
        )
        + "</table>"
    )
    drawing = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="1000" height="2400"><rect '
        'width="1000" height="2400" fill="#789"/></svg>'
    )
    display = nbformat.v4.new_output
    cells = [
        nbformat.v4.new_markdown_cell(
            "# Can it be read?\n\n**Question.** " + 300 * "w" + "\n\n## The answer"
        ),
        nbformat.v4.new_code_cell(
            "x = " + repr(300 * "c") + "  # and more",
            outputs=[display("stream", text="It can. " + 300 * "s")],
        ),
        nbformat.v4.new_code_cell(
            "# Figure: a bar that is much higher than a sheet of paper\nplot()",
            outputs=[display("display_data", {"image/svg+xml": drawing})],
        ),
        nbformat.v4.new_code_cell(
            "table",
            outputs=[
                display("execute_result", {"text/html": table, "text/plain": ""}, execution_count=1)
            ],
        ),
        nbformat.v4.new_code_cell(
            "1 / 0",
            outputs=[
                display(
                    "error",
                    ename="E",
                    evalue="e",
                    traceback=["\x1b[31mred \x1b[94mblue \x1b[33myellow\x1b[0m " + 300 * "e"],
                )
            ],
        ),
    ]
    return pages.notebook_page(
        nbformat.v4.new_notebook(cells=cells),
        "Can it be read?",
        "99_made, ok, " + 3 * "many words ",
        "",
    )


def wrong(page, where: str = "") -> list[str]:
    """What is wrong with what is shown, at both widths and in both schemes."""
    found = []
    for width in WIDTHS:
        for scheme in SCHEMES:
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            found += [f"{where} at {width}, {scheme}: {what}" for what in page.evaluate(WRONG)]
            dark = (
                page.evaluate("getComputedStyle(document.body).backgroundColor")
                != "rgb(255, 255, 255)"
            )
            found += [f"{where}: {scheme} is not"] * (dark != (scheme == "dark"))
    return found


def test_every_page_at_both_widths_light_and_dark(page, reports):
    """All of it opened up: every folded code and every run's details."""
    found = []
    for path in [reports / "index.html", *sorted(reports.glob("*/*.html"))]:
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        found += wrong(page, str(path.relative_to(reports)))
        page.set_viewport_size({"width": 480, "height": 900})
        top = page.locator("h1").first.bounding_box()
        if top["y"] > 400 and "broken" not in str(path):  # there the banner comes first
            found.append(f"{path.name}: the title is at {top['y']}")
    assert found == []


def test_headlines_open_the_pages(page, reports):
    """The answer, in a sentence with its interval, is on the first screen of the index and of the
    page that has it, and both say the same.
    """
    page.goto((reports / "index.html").as_uri())
    run = read_json(reports / "reference" / "run.json")
    sentence = summary.sentence(run)
    shown = page.locator(".answer", has_text=sentence[:20]).first
    assert shown.inner_text() == sentence and shown.bounding_box()["y"] < 900
    page.goto((reports / "reference" / "05_acceptance.html").as_uri())
    headline = page.locator(".headline")
    assert headline.bounding_box()["y"] < 300 and headline.locator("img").bounding_box()["y"] < 900
    assert (
        f"{run['headline']['acceptance_length']['value']:.2f}"[:3] in headline.inner_text()
        and " [" in headline.inner_text()
    )
    for name, path in (
        ("summary", reports / "reference" / "summary.html"),
        ("failed", reports / "broken" / "01_tiny.html"),
    ):
        page.goto(path.as_uri())
        assert page.locator(".answer, .banner").first.bounding_box()["y"] < 300, name


def names(page) -> list[str]:
    """Runs in the table as they stand there, those that are shown."""
    return page.locator(".runs tbody tr:visible b a").all_inner_texts()


@pytest.mark.parametrize("width", WIDTHS)
def test_sort_and_filter(page, reports, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.goto((reports / "index.html").as_uri())
    every = names(page)
    assert (
        every[0] == "broken"
        and every[-3:] == ["other", *every[-2:]]
        and set(every) == {"broken", "reference", "layers", "other", "killed", "going"}
    )
    head = page.get_by_role("button", name="Acceptance", exact=True)
    head.click()
    assert names(page)[:2] == ["reference", "other"] and set(names(page)) == set(every), (
        "largest first, those without at the end"
    )
    head.click()
    assert names(page)[:2] == ["other", "reference"] and page.locator(
        "th[aria-sort=ascending]"
    ).inner_text().startswith("Acceptance")
    page.get_by_role("button", name="Run", exact=True).click()
    assert names(page) == sorted(every)
    page.get_by_role("button", name="Started", exact=True).click()
    assert names(page) == every

    box = page.get_by_role("searchbox")
    for words, found in (
        ("failed", ["broken"]),
        ("SMOLLM2 other", ["other"]),
        ("died", ["killed"]),
        ("running", ["going"]),
        ("no such word", []),
        ("", every),
    ):
        box.fill(words)
        assert names(page) == found, words
        assert page.locator("#count").inner_text() == (
            f"{len(found)} of {len(every)} runs" if words else ""
        )


def differs(text: str, x: dict, y: dict) -> tuple[float, float]:
    """The text says y - x with the interval of a difference of independent numbers; gives that
    interval.
    """
    d = y["value"] - x["value"]
    low = d - ((y["value"] - y["low"]) ** 2 + (x["high"] - x["value"]) ** 2) ** 0.5
    high = d + ((y["high"] - y["value"]) ** 2 + (x["value"] - x["low"]) ** 2) ** 0.5
    assert [float(n) for n in re.findall(r"[-+][\d.]+", text)] == pytest.approx(
        [d, low, high], abs=0.0051
    )
    return low, high


@pytest.mark.parametrize("width", WIDTHS)
def test_compare_two_runs(page, reports, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.goto((reports / "index.html").as_uri())
    view = page.locator("#compare")
    assert not view.is_visible()
    tick = {
        name: page.get_by_label(f"compare run {name}") for name in ("reference", "other", "layers")
    }
    tick["reference"].check()
    assert not view.is_visible()
    tick["other"].check()
    assert view.is_visible() and page.url.endswith("#compare=reference,other")
    run = read_json(reports / "reference" / "run.json")
    a = run["headline"]["acceptance_length"]
    row = view.locator("tr", has_text="Acceptance length").first.locator("td").all_inner_texts()
    assert (
        row[1].startswith(f"{a['value']:.2f} ({a['low']:.2f} to {a['high']:.2f})")
        and row[2] == "1.10 (0.70 to 1.20), 12 prompts"
    )
    other = {"value": 1.1, "low": 0.7, "high": 1.2}
    low, high = differs(row[3], a, other)
    assert ("not told apart" in row[3]) == (low <= 0 <= high)
    speed = view.locator("tr", has_text="Speed ratio").first.locator("td").all_inner_texts()
    assert speed[3] == "no difference of the drafters: other threads", (
        "which is another condition, not another drafter"
    )
    settings = view.locator("#compared-settings td:first-child").all_inner_texts()
    assert [text.split("\n")[0] for text in settings] == [
        "boundaries",
        "threads",
    ] and "feed the drafter" in settings[0]
    assert (
        "Profile" in view.locator("#compared-facts").inner_text()
        and "Versions" not in view.locator("#compared-facts").inner_text()
    )
    assert (
        view.locator("#paired code").inner_text()
        == "python -m eyas evaluate compare --profile other -p run_name other -p compare_run reference"
    )
    assert wrong(page, "compare") == []

    tick["layers"].check()  # a third one takes the place of the first
    assert (
        not tick["reference"].is_checked()
        and page.url.endswith("#compare=other,layers")
        and "not measured" in view.inner_text()
    )
    page.get_by_role("button", name="close").click()
    assert not view.is_visible() and not tick["layers"].is_checked()

    page.goto("about:blank")
    page.goto(
        (reports / "index.html").as_uri() + "#compare=other,reference"
    )  # as somebody was sent it
    differs(
        view.locator("tr", has_text="Acceptance length").first.locator("td").last.inner_text(),
        other,
        a,
    )
    page.goto((reports / "index.html").as_uri() + "#compare=layers,reference")
    assert (
        view.is_visible()
        and page.locator("#compared").inner_text() == "layers and reference"
        and tick["layers"].is_checked()
    )
    page.goto((reports / "index.html").as_uri() + "#compare=layers,nobody")
    assert not view.is_visible()


@pytest.mark.parametrize("width", WIDTHS)
def test_details_and_the_way_through_the_pages(page, reports, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.goto((reports / "index.html").as_uri())
    banner = page.locator(".banner").first
    assert (
        banner.is_visible()
        and "01_tiny failed" in banner.inner_text()
        and "What to do" in banner.inner_text()
    ), "the newest run has failed"
    details = page.locator("#run-reference")
    assert not details.locator(".tiles").is_visible()
    page.locator(".runs b a", has_text="reference").click()
    assert (
        details.locator(".tiles").is_visible()
        and details.locator(".command code").inner_text()
        == "python -m eyas report --profile reference"
    )
    details.get_by_role("button", name="copy").click()
    page.wait_for_function(
        "async () => await navigator.clipboard.readText() === 'python -m eyas report "
        "--profile reference'"
    )
    for name, words in (("killed", "was killed"), ("going", "Still running")):
        page.locator(f"#run-{name} summary").click()
        assert words in page.locator(f"#run-{name}").inner_text()

    details.get_by_role("link", name="04_training").click()
    assert page.locator("h1").inner_text() == "Does the drafter learn what the target will say?"
    code = page.locator("details.code pre").first
    assert not code.is_visible()
    page.get_by_role("button", name="show or fold all code").click()
    assert code.is_visible()
    page.locator("a[rel=next]").click()
    assert page.url.endswith("05_acceptance.html") and page.locator("a[rel=next]").count() == 0
    page.locator("a[rel=prev]").click()
    assert page.url.endswith("04_training.html")
    page.get_by_role("link", name="All reports").click()
    assert page.url.endswith("reports/index.html")
    page.locator(".runs tbody tr", has_text="broken").get_by_role(
        "link", name="01", exact=True
    ).click()
    assert (
        page.locator(".banner").is_visible()
        and "ValueError" in page.locator(".banner").inner_text()
    )
    page.go_back()
    page.locator('.links a[href="reference/summary.html"]').click()
    assert "Eyas run reference" in page.locator("h1").inner_text()


def test_on_paper(page, reports):
    """Light in a dark browser too, no buttons, no code, links to be seen, no figure higher than a
    page.
    """
    page.emulate_media(media="print", color_scheme="dark")
    for path in (
        reports / "index.html",
        reports / "reference" / "05_acceptance.html",
        reports / "layers" / "06_layer_choice.html",
        reports / "other" / "99_made.html",
    ):
        page.goto(path.as_uri())
        assert (
            page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        )
        assert page.locator("button:visible, details.code:visible, input:visible").count() == 0
        assert page.locator("nav a, .links a").first.is_visible()
        for image in page.locator("img").all():
            assert (
                image.bounding_box()["height"] <= 22 / 2.54 * 96 + 1
                and image.evaluate("i => getComputedStyle(i.closest('figure')).breakInside")
                == "avoid"
            )
    assert len(page.pdf(format="A4")) > 10_000


def test_without_scripts(browser, reports):
    """A plain table, newest first, whose details open; nothing is offered that would not work."""
    context = browser.new_context(offline=True, java_script_enabled=False)
    page = context.new_page()
    page.goto((reports / "index.html").as_uri())
    assert names(page)[0] == "broken" and len(names(page)) == 6
    assert page.locator("button:visible, input:visible").count() == 0
    page.locator("#run-reference summary").click()
    assert page.locator("#run-reference .tiles").is_visible()
    page.goto(Path(reports / "reference" / "05_acceptance.html").as_uri())
    assert (
        page.locator("button:visible").count() == 0 and page.locator(".headline img").is_visible()
    )
    context.close()
