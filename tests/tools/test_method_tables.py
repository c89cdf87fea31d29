"""Every method has a page, whose options and measured rows are generated."""

from pathlib import Path

import pytest
from tools import method_tables

from lpbnn import methods

PAGES = Path(__file__).parents[2] / "docs" / "methods"
OWN = [name for name in methods.names() if (PAGES / f"{name}.md").exists()]


def test_every_method_has_a_page() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == {*methods.names(), "index"}


@pytest.mark.parametrize("name", OWN)
def test_a_page_asks_for_its_own_tables(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text("utf-8")
    assert f"<!-- options: {name} -->" in text
    assert f"<!-- measured: {name} -->" in text or "<!-- posthoc -->" in text


@pytest.mark.parametrize("name", OWN)
def test_the_table_has_every_option(name: str) -> None:
    names = [line.split("`")[1] for line in method_tables.options(name).splitlines()[2:]]
    assert names == [option.name for option in methods.options(name)]


def test_a_method_without_a_record_is_refused() -> None:
    with pytest.raises(ValueError, match="no record of 'abnn'"):
        method_tables.measured("abnn")


def test_the_plain_network_is_beside_each_row() -> None:
    rows = [line.split(" | ") for line in method_tables.measured("edl").splitlines()[2:]]
    names = [row[1] for row in rows if len(row) > 2]
    assert names == ["**EDL**", "MCP"] * 3
