"""The README's numbers are those of the records, and its examples run."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


# Rows of the README's table of results, and their names in docs/results/fair-cifar10.md.
ROWS = {
    "the plain network (MCP)": "MCP",
    "BatchEnsemble, `init_std=0.1`": "BatchEnsemble",
    "MC dropout": "MC dropout",
    "MC dropout, fitted rate": "MC dropout, tau 1.43",
    "EDL": "EDL",
    "mean-field BNN, `prior_std=0.1`": "Mean-field BNN",
    "mean-field BNN, fitted noise": "Mean-field BNN, tau 2.62",
    "Rank-1 BNN, `init_std=0.1`": "Rank-1 BNN",
    "Rank-1 BNN, fitted noise": "Rank-1 BNN, tau 1.46",
    "LP-BNN": "LP-BNN",
    "LP-BNN, fitted noise": "LP-BNN, tau 1.50",
    "LP-BNN of the paper, `init_std=0.1`": "LP-BNN (paper)",
    "LP-BNN of the paper, fitted noise": "LP-BNN (paper), tau 2.97",
    "Deep Ensemble of four MCP, four trainings": "Deep Ensembles",
}


def row(page: str, heading: str, name: str) -> list[str]:
    """Return a row's cells without deviations, from the first table whose header holds ``heading``."""
    lines = (ROOT / page).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and heading in line)
    line = next(line for line in lines[start:] if line.startswith(f"| {name} |"))
    return [cell.split("±")[0].strip() for cell in line.split("|")[2:-1]]


@pytest.mark.parametrize("name", ROWS)
def test_its_results_are_those_of_the_fair_comparison(name: str) -> None:
    runs, accuracy, nll, ece, ece_t, ce, auroc = row("README.md", "AUROC", name)
    page, own = "docs/results/fair-cifar10.md", ROWS[name]
    n, accuracy_there, _, nll_t, ece_there, ece_t_there, _, ce_there, _ = row(
        page, "accuracy % ↑ | NLL ↓", own
    )
    assert [runs.partition(",")[0], accuracy, nll, ece, ece_t, ce] == [
        *[n, accuracy_there, nll_t, ece_there, ece_t_there, ce_there]
    ]
    assert auroc == row(page, "SVHN, 1 - max", own)[2]


def test_its_differences_are_those_of_the_fair_comparison() -> None:
    """LP-BNN minus MCP: points of accuracy, then cE, then cE after a temperature."""
    page = (ROOT / "docs/results/fair-cifar10.md").read_text()
    shown = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    for heading, columns in (("(trained) minus", (0, 4)), ("(fitted) minus", (0, 4, 5))):
        start = page.index(heading)
        line = next(line for line in page[start:].splitlines() if line.startswith("| MCP |"))
        cells = line.replace("*", "").split("|")[2:]
        for column in columns:
            assert cells[column].strip(" +-").replace("±", "± ") in shown


def test_its_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "moons.png"
    runpy.run_path(str(ROOT / "examples" / "two_moons.py"))["main"](str(path), steps=2)
    assert path.stat().st_size > 10_000


def test_its_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize("name", ["own_loop.py", "lightning_module.py"])
def test_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / name))
    assert capsys.readouterr().out
