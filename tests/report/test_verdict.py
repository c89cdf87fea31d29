"""The sentences that open the page say what the tables say, and call noise noise."""

from pathlib import Path
from typing import Any

from report.conftest import Make, info

from lpbnn.report import tables
from lpbnn.report.runs import grouped, read_runs
from lpbnn.report.verdict import verdict

ONLY = {"ood": {}, "corrupted": False}


def said(*folders: Path) -> list[str]:
    groups = grouped(read_runs(folders))
    return verdict(groups, tables.compare(groups))


def seeds(make: Make, method: str, *accuracies: float, **more: Any) -> list[Path]:
    return [
        make(method, i, test={"accuracy": a, "nll": 0.2, "brier": 0.1, "ece": 0.02}, **more)
        for i, a in enumerate(accuracies)
    ]


def test_three_sentences_on_quality_uncertainty_and_cost(make: Make) -> None:
    runs = [*seeds(make, "lpbnn", 0.95, 0.96), *seeds(make, "mcp", 0.90, 0.91)]
    first, second, third = said(*runs)
    assert (
        first == "LP-BNN has the best accuracy (95.50 ± 0.71 %), followed by MCP (90.50 ± 0.71 %)."
    )
    assert "the same ECE within the noise over seeds (0.0200 ± 0.0000 to" in second
    assert "; the 2 methods have the same AUROC on photos" in second
    assert third == "LP-BNN takes ×4 to train and ×4 to predict (× the time of MCP)."


def test_a_difference_within_the_noise_is_no_victory(make: Make) -> None:
    runs = [*seeds(make, "lpbnn", 0.94, 0.96), *seeds(make, "mcp", 0.93, 0.95)]
    assert said(*runs)[0].startswith("The 2 methods have the same accuracy within the noise")
    third = seeds(make, "edl", 0.80, 0.81)
    assert said(*runs, *third)[0] == (
        "LP-BNN has the best accuracy (95.00 ± 1.41 %), and MCP is within the noise of it; "
        "the last has 80.50 ± 0.71 %."
    )


def test_single_runs_are_called_that(make: Make) -> None:
    runs = [*seeds(make, "lpbnn", 0.95), *seeds(make, "mcp", 0.90)]
    assert said(*runs)[0].endswith("MCP (90.00 %), each in a single run, whose noise is not known.")


def test_one_method_is_described_and_not_called_the_best(make: Make) -> None:
    sentences = said(*seeds(make, "lpbnn", 0.95, **ONLY))
    assert sentences[0] == "The accuracy of LP-BNN is 95.00 %."
    assert not any("best" in sentence for sentence in sentences)


def test_a_diverged_method_is_not_ranked(make: Make) -> None:
    runs = [*seeds(make, "lpbnn", 0.95), *seeds(make, "meanfield", 0.99, diverged=3)]
    assert said(*runs)[0] == "The accuracy of LP-BNN is 95.00 %."


def test_regression_is_judged_by_error_and_likelihood(regression: Make) -> None:
    test = {"nll": 2.0, "rmse": 0.5, "coverage": 0.94}
    sentences = said(regression("lpbnn", test=test), regression("mcp"))
    assert sentences[0].startswith("LP-BNN has the best RMSE (0.5000)")
    assert sentences[1].startswith("LP-BNN has the best NLL (2.0000)")


def test_nothing_measured_is_nothing_said(make: Make) -> None:
    gone = make("meanfield", diverged=1, test=None, ood=None, corruption=None, cost=None)
    assert [s for s in said(gone) if "accuracy" in s or "best" in s] == []
    streets = info("segmentation", "streets", num_classes=10)
    assert said(make("mcp", data=streets, test={"miou": 0.5}))[0] == "The mIoU of MCP is 50.00 %."
