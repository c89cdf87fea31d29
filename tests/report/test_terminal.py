"""The table in a terminal: fits its width, loses no column, needs no colour."""

import io
import subprocess
import sys

import pytest
from report.conftest import METHODS, Make
from rich.console import Console

from lpbnn.report import PaperTable, comparison, print_table
from lpbnn.report.runs import grouped, read_runs
from lpbnn.report.tables import cost


def printed(table, width: int, legend: bool = False, **options: object) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    print_table(table, console, legend)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 250])
def test_no_line_is_too_wide_and_no_column_is_lost(make: Make, width: int) -> None:
    runs = [make(method, seed) for method in METHODS[:4] for seed in (0, 1)]
    text = printed(comparison(runs), width, legend=True)
    assert "OOD is the positive class" not in printed(comparison(runs), width)
    tables = text.partition("Accuracy ↑:")[0]
    assert max(map(len, tables.splitlines())) <= width
    for title in ("Accuracy", "NLL ↓", "AUROC ↑", "FPR95 ↓", "cA", "cE ↓"):
        assert tables.count(title) == 1, title
    assert "…" not in tables
    assert "OOD is the positive class" in text
    assert "generated" in text


@pytest.mark.parametrize("width", range(60, 100))
def test_no_column_of_the_costs_is_cut(make: Make, width: int) -> None:
    runs = [make("meanfield", seed, diverged=2) for seed in (0, 1)]
    text = printed(cost(grouped(read_runs([*runs, make("mcp")]))), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_eighty_columns_hold_the_metrics_of_a_test_set_and_one_other(make: Make) -> None:
    runs = [make(method, corrupted=False) for method in METHODS]
    tables = printed(comparison(runs), 80).partition("● best")[0]
    assert tables.count("─\n") <= 1


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_columns_of_a_set_stay_together(make: Make, width: int) -> None:
    runs = [make(method, seed) for method in METHODS for seed in (0, 1)]
    pages = printed(comparison(runs), width).split(" method ")
    heads = [page.splitlines()[0] for page in pages[1:]]
    assert sum("FPR95" in head and "AUROC" in head for head in heads) == 1


def test_a_long_name_is_wrapped_and_cuts_no_column(make: Make) -> None:
    """A row's name holds the settings in which it differs, and there may be many."""
    runs = [
        make(
            "lpbnn",
            seed,
            folder=f"run-{seed}",
            options={
                "latent": seed + 1,
                "kl_weight": 0.5,
                "log_variance": -2.5 - seed,
                "init_std": 0.25 + seed,
                "fast_lr": 0.125 * (seed + 1),
            },
        )
        for seed in (0, 1)
    ]
    text = printed(comparison(runs), 80).partition("Accuracy ↑:")[0]
    assert "log_variance=-3.5" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_marks_and_seeds_can_be_read_without_colour(make: Make) -> None:
    test = {"accuracy": 0.9, "nll": 0.3, "brier": 0.15}
    runs = [
        make("mcp", 0, test={**test, "ece": 0.01}),
        make("mcp", 1, test={**test, "ece": 0.03}),
        make("duq", test={**test, "ece": 0.06}),
        make("tradi", test={**test, "ece": 0.05}, diverged=4),
        make("edl", test={**test, "ece": 0.12}),
    ]
    text = printed(comparison(runs), 200, no_color=True, force_terminal=False)
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert "n=2" in lines["MCP"]
    assert "0.0200 ±0.0141●" in lines["MCP"]
    assert "0.0600        ○" in lines["DUQ"]  # the means stand below each other
    assert "diverged in epoch 4" in text
    assert "● best, ○ second best" in text
    assert "\x1b" not in text


def test_published_numbers_and_names_that_look_like_markup(make: Make) -> None:
    run = make("[bold red]x", folder="markup")
    reference = PaperTable("[link]A paper[/link]", {"[bold red]x": {"ece": 0.0094}})
    text = printed(comparison([run], reference), 200)
    assert "[bold red]x" in text
    assert "paper 0.0094" in text
    assert "[link]A paper[/link]" in text


def test_a_run_without_numbers_is_a_row(make: Make) -> None:
    run = make("mcp", diverged=1, test=None, ood={}, corruption=None)
    text = printed(comparison([run]), 80)
    assert "MCP" in text
    assert "diverged in epoch 1" in text


def test_a_table_needs_no_library_that_draws(make: Make) -> None:
    code = """
import sys
from lpbnn import report
from lpbnn.cli import main
main(["compare", sys.argv[1]])
assert not {"matplotlib", "jinja2", "scipy", "torchmetrics"} & set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code, str(make("mcp"))], capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
