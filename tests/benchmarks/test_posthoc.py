"""Ways from a trained network: every way is measured without and with a temperature."""

from pathlib import Path

import pytest

import lpbnn
from benchmarks import posthoc


def test_a_way_is_measured_twice_and_shown_with_its_spread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(posthoc, "SEEDS", 2)
    monkeypatch.setattr(posthoc, "EPOCHS", 1)
    given = []

    def ways(net: lpbnn.UncertainModel, pair: posthoc.Pair) -> dict[str, object]:
        given.append(net)
        return {"as it is": lambda: lpbnn.build(net, "mcp").eval()}

    monkeypatch.setattr(posthoc, "ways", ways)
    path = tmp_path / "posthoc.csv"
    posthoc.run(path)
    posthoc.run(path)  # nothing is left to measure
    rows = posthoc.read(path)
    assert [(row["seed"], row["temperature"]) for row in rows] == [
        ("0", "no"),
        ("0", "yes"),
        ("1", "no"),
        ("1", "yes"),
    ]
    assert len(given) == 2
    assert rows[0]["accuracy"] == rows[1]["accuracy"]
    assert float(rows[1]["nll"]) < float(rows[0]["nll"])
    shown = posthoc.show(path).splitlines()
    assert [line.split(" | ")[:2] for line in shown[2:]] == [
        ["| as it is", "no"],
        ["| as it is", "yes"],
    ]
    assert "±" in shown[2]


def test_the_page_shows_the_records() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "howto" / "calibration.md").read_text()
    assert posthoc.show(root / "results" / "posthoc.csv") in page
