"""One table as Markdown, LaTeX, CSV and DataFrame: the same numbers in each."""

import csv
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from report.conftest import Make

from lpbnn.cli import main
from lpbnn.report import PaperTable, comparison, frame
from lpbnn.report.formats import latex, markdown, to_csv

TEST = {"nll": 0.3, "brier": 0.15, "ece": 0.05}


def two_rows(make: Make) -> list[Path]:
    """LP-BNN of two seeds, accuracy .94 and .96; MCP of one, .90."""
    seeds = [make("lpbnn", i, test={**TEST, "accuracy": a}) for i, a in enumerate((0.94, 0.96))]
    return [*seeds, make("mcp", test={**TEST, "accuracy": 0.9})]


def test_csv_has_means_and_deviations_as_they_were_measured(make: Make) -> None:
    text = to_csv(comparison(two_rows(make)))
    assert "\r" not in text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["label"], row["method"], row["runs"]) for row in rows] == [
        ("LP-BNN", "lpbnn", "2"),
        ("MCP", "mcp", "1"),
    ]
    assert float(rows[0]["accuracy"]) == pytest.approx(0.95)
    assert float(rows[0]["accuracy_std"]) == pytest.approx(0.02 / 2**0.5)
    assert rows[1]["accuracy_std"] == ""
    assert "photos/auroc" in rows[0]


def test_latex_marks_the_best_and_escapes_names(make: Make) -> None:
    runs = [*two_rows(make), make("my_100%", test={**TEST, "accuracy": 0.5})]
    text = latex(comparison(runs, PaperTable("A paper", {"lpbnn": {"accuracy": 0.9502}})))
    assert r"LP-BNN & \textbf{95.00} $\pm$1.41 (paper 95.02)" in text
    assert r"MCP & \underline{90.00}" in text
    assert r"my\_100\% & 50.00" in text
    assert r"Accuracy \% $\uparrow$" in text
    assert r"\multicolumn{3}{c}{OOD: photos}" in text
    assert r"\cmidrule(lr){6-8}" in text
    body = text.partition(r"\midrule")[2].partition(r"\bottomrule")[0].strip().splitlines()
    assert {line.count(" & ") for line in body} == {9}
    assert text.count("{") == text.count("}")


def test_markdown_has_a_cell_for_each_column(make: Make) -> None:
    text = markdown(comparison([*two_rows(make), make("a|b")]))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace(r"\|", "").count("|") for line in lines} == {12}
    assert "**95.00** ±1.41" in text


def test_compare_prints_the_format_that_is_asked_for(
    make: Make, regression: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(path) for path in two_rows(make)]
    for name, start in (("csv", "label,method,runs"), ("latex", "% Comp"), ("markdown", "**Comp")):
        main(["compare", *runs, "--format", name])
        assert capsys.readouterr().out.startswith(start)
    both = ["compare", *runs, str(regression("mcp"))]
    main([*both, "--format", "markdown"])
    assert capsys.readouterr().out.count("**Comparison on") == 2
    with pytest.raises(SystemExit):
        main([*both, "--format", "csv"])
    assert "several data sets" in capsys.readouterr().err


def test_a_data_frame_has_a_row_for_each_method_or_run(
    make: Make, regression: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    runs = [*two_rows(make), regression("mcp")]
    rows = frame(runs)
    assert [(r["data"], r["label"], r["runs"]) for r in rows] == [
        *(("digits", "LP-BNN", 2), ("digits", "MCP", 1)),
        ("cubic", "MCP", 1),
    ]
    assert rows[0]["accuracy"] == pytest.approx(0.95)
    assert {"train/seconds", "test/disagreement", "rmse"} <= set(rows[0]) | set(rows[2])
    each = frame(runs, per_run=True)
    assert [(r["label"], r.get("seed")) for r in each[:3]] == [
        *(("LP-BNN", 0), ("LP-BNN", 1)),
        ("MCP", 0),
    ]
    assert [r["accuracy"] for r in each[:3]] == [0.94, 0.96, 0.9]
    assert not any(name.endswith("_std") or name == "runs" for r in each for name in r)


def test_without_pandas_the_error_names_the_fix(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        frame([make("mcp")])
