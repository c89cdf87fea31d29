"""Hooks of mkdocs: pages from files at the root, links into the repository, tables from records, formulas.

``make docs`` builds the site. A page asks for generated text with a line ``<!-- NAME: ARGUMENTS -->``, whose
names are those of ``TEXTS``.
"""

import re
from collections.abc import Callable
from html import unescape
from os.path import relpath
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from latex2mathml.converter import convert
from tools import method_tables, reference_tables

ROOT = Path(__file__).parents[1]
# Files of the repository that are pages of the site.
PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
LINK = re.compile(
    r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)"
)
# How tests/test_docs.py runs a page, which readers need not see.
UNSEEN = re.compile(
    r"^<!-- (?:(?:slow|warns|run|needs: .*?) -->|python\n.*?^-->)\n", re.MULTILINE | re.DOTALL
)
REQUEST = re.compile(r"^<!-- (?P<name>\w+)(?:: (?P<arguments>.*?))? -->$", re.MULTILINE)
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)

TEXTS: dict[str, Callable[..., str]] = {
    "options": method_tables.options,
    "measured": method_tables.measured,
    "posthoc": method_tables.posthoc,
    "settings": reference_tables.settings,
    "conventions": reference_tables.conventions,
}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie at the root of the repository."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=moved(text, page)))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    """Write what a page asks for, and show links to files that are not on the site as their names."""
    source = page.file.src_uri
    return outside(fill(text), source)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Write formulas as MathML, which browsers render themselves."""
    return FORMULA.sub(_mathml, html)


def fill(text: str) -> str:
    """Replace every request of a page by its text, and remove what is for its test.

    Example:
        >>> TEXTS["twice"] = lambda word: word * 2
        >>> fill("<!-- twice: ab -->")
        'abab'
        >>> fill("<!-- needs: peft -->\\n<!-- python\\nx = 1\\n-->\\nText.")
        'Text.'
        >>> del TEXTS["twice"]
    """
    return REQUEST.sub(
        lambda found: TEXTS[found["name"]](*(found["arguments"] or "").split()),
        UNSEEN.sub("", text),
    )


def moved(text: str, page: str) -> str:
    """Return the text of a file at the root with its links as seen from a page.

    Example:
        >>> moved(
        ...     "[a](docs/howto/own-loop.md#b), [c](SECURITY.md), [d](results/README.md)",
        ...     "project/changelog.md",
        ... )
        '[a](../howto/own-loop.md#b), [c](security.md), [d](../../results/README.md)'
    """

    def link(found: re.Match[str]) -> str:
        target = "docs/" + PAGES[found["target"]] if found["target"] in PAGES else found["target"]
        path = relpath(target, PurePosixPath("docs", page).parent)
        return f"[{found['text']}]({path}{found['anchor'] or ''})"

    return _outside_of_code(text, link)


def outside(text: str, page: str) -> str:
    """Return a page whose links to files of the repository that are not on the site are plain text.

    Example:
        >>> outside(
        ...     "[the records](../../results/README.md) and [more](../../SECURITY.md)",
        ...     "project/lab-notes.md",
        ... )
        'the records (`results/README.md`) and [more](security.md)'
    """
    here = PurePosixPath(page).parent

    def link(found: re.Match[str]) -> str:
        path = normpath(str("docs" / here / found["target"]))
        if path in PAGES:
            return f"[{found['text']}]({relpath(PAGES[path], here)}{found['anchor'] or ''})"
        if path.startswith("docs/") or not (ROOT / path).exists():
            return found[0]  # mkdocs checks it
        text = found["text"]
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return _outside_of_code(text, link)


def _outside_of_code(text: str, link: Callable[[re.Match[str]], str]) -> str:
    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found["tag"] == "div" else "inline"
    return convert(unescape(found["tex"]).strip(), display=display)
