"""The page in a real browser, narrow and wide, light and dark."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from report.conftest import METHODS, Make

from lpbnn.report import PaperTable, write_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking"]
LOOKS = [(width, scheme) for width in (1280, 400) for scheme in ("light", "dark")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the PATH")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=found, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def report(make: Make, regression: Make, tmp_path: Path) -> Path:
    long = "a-method-whose-name-is-far-too-long-for-any-column-of-a-table"
    runs = [make(method, seed) for method in METHODS[:5] for seed in (0, 1)]
    runs += [make("meanfield", 9, lr=5.0, diverged=2), make(long)]
    runs += [regression("lpbnn"), regression("mcp")]
    reference = PaperTable("a paper", {method: {"accuracy": 0.95} for method in METHODS})
    return write_report(runs, tmp_path / "report.html", "A title " * 12, reference)


def test_the_page_in_a_browser(browser: Any, report: Path) -> None:
    for width, scheme in LOOKS:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True
        )
        page = context.new_page()
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message, said=said: said.append(message.text))
        page.on("pageerror", lambda error, said=said: said.append(str(error)))
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.goto(report.as_uri())
        assert said == []
        assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(overflow) <= 0, (width, scheme)
        pictures = page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth > 0)")
        assert pictures
        assert all(pictures)
        drawings = page.evaluate(
            "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect())"
            ".map(r => [r.width, r.height])"
        )
        assert np.min(drawings) > 20
        assert page.evaluate(_CLIPPED) == [], (width, scheme)
        paper, ink = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        assert (_bright(paper) > _bright(ink)) == (scheme == "light")
        context.close()


@pytest.mark.slow
def test_tables_sort_and_navigation_stays(browser: Any, report: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    page.goto(report.as_uri())
    head = page.locator("table.sortable").first.locator("thead tr").last.locator("th").nth(1)

    def column() -> list[float]:
        cells = "[...document.querySelector('table.sortable').tBodies[0].rows].map(r => r.cells[1])"
        return [float(v) for v in page.evaluate(f"{cells}.map(c => c.dataset.v)") if v]

    written = column()
    head.click()
    assert column() == sorted(written, reverse=True)  # accuracy: the best first
    head.press("Enter")
    assert column() == sorted(written)
    head.click()
    assert column() == written
    page.evaluate("window.scrollTo(0, document.body.scrollHeight / 2)")
    assert page.evaluate("document.querySelector('nav').getBoundingClientRect().top") == 0
    page.locator("nav a").nth(4).click()
    below = page.evaluate(
        "document.querySelector(location.hash).getBoundingClientRect().top"
        " - document.querySelector('nav').getBoundingClientRect().bottom"
    )
    assert below >= 0


@pytest.mark.slow
def test_a_figure_is_saved_as_an_svg_that_needs_no_page(
    browser: Any, report: Path, tmp_path: Path
) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    page.goto(report.as_uri())
    button = page.locator("figure:has(svg) button.save").first
    button.hover()
    with page.expect_download() as started:
        button.click()
    name = started.value.suggested_filename
    assert re.fullmatch(r"[\w-]+\.svg", name)
    started.value.save_as(tmp_path / name)
    text = (tmp_path / name).read_text("utf-8")
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(--" not in text
    assert "#1f4fe0" in text  # LP-BNN, as the style sheet has it
    assert re.search(r"<svg[^>]* width=\"440\" height=\"\d+\"", text)


# Text of a drawing that lies outside the window, and is not in a box that scrolls.
_CLIPPED = """[...document.querySelectorAll('svg text')]
    .filter(t => !t.closest('.scroll'))
    .filter(t => { const r = t.getBoundingClientRect();
                   return r.left < -1 || r.right > window.innerWidth + 1; })
    .map(t => t.textContent)"""


def _bright(colour: str) -> int:
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
