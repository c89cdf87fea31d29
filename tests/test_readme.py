"""The README's numbers are those of the records, and its examples run."""

import runpy
from pathlib import Path
from statistics import fmean

import pytest

from lpbnn.report.ledger import read_ledger

ROOT = Path(__file__).parents[1]


# Columns of the README's table of results, between the name and the parameters.
NUMBERS = ("test/accuracy", "test/nll", "test/ece", "ood/svhn/auroc", "corruption/ce")
ROWS = {
    "the plain network": "mcp",
    "**LP-BNN**, four members": "lpbnn",
    "BatchEnsemble, four members": "batchensemble",
    "a Deep Ensemble of four": "ensemble",
}


@pytest.mark.parametrize("name", ROWS)
def test_its_results_are_those_of_the_ledger(name: str) -> None:
    line = next(
        t for t in (ROOT / "README.md").read_text().splitlines() if t.startswith(f"| {name}")
    )
    _, _, n, accuracy, *numbers, parameters, _ = (cell.strip() for cell in line.split("|"))
    kept = read_ledger(ROOT / "results" / "records.tar.xz" / "cifar10-fast")
    runs = [run for run in kept if (run.method, run.at("backbone")) == (ROWS[name], "wrn-28-10")]
    assert int(n) == len(runs)
    found = [fmean(run.at(*key.split("/")) for run in runs) for key in NUMBERS]
    assert float(accuracy) == round(100 * found[0], 2)
    for text, value in zip(numbers, found[1:], strict=True):
        assert text == f"{value:.{len(text) - 2}f}"
    assert parameters == f"{fmean(run.at('cost', 'parameters') for run in runs) / 1e6:.3g} M"


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize("name", ["own_loop.py", "lightning_module.py"])
def test_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / name))
    assert capsys.readouterr().out
