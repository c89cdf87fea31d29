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


def train(seconds: float) -> dict[str, Any]:
    return {"diverged": None, "epochs": 5, "of": 5, "seconds": seconds}


def test_three_sentences_on_quality_uncertainty_and_cost(make: Make) -> None:
    runs = [*seeds(make, "lpbnn", 0.95, 0.96), *seeds(make, "mcp", 0.90, 0.91)]
    first, second, third = said(*runs)
    assert (
        first == "LP-BNN has the best accuracy (95.50 ± 0.71 %), followed by MCP (90.50 ± 0.71 %)."
    )
    assert "ECE does not tell the 2 methods apart (0.0200 ± 0.0000 to" in second
    assert "; AUROC on photos does not tell the 2 methods apart" in second
    assert third == (
        "LP-BNN takes ×4 to train and ×4 to predict with 4 predictions (× the time of MCP)."
    )


def test_a_difference_within_the_noise_is_no_victory(make: Make) -> None:
    runs = [*seeds(make, "lpbnn", 0.94, 0.96), *seeds(make, "mcp", 0.93, 0.95)]
    assert said(*runs)[0].startswith("Accuracy does not tell the 2 methods apart (95.00")
    third = seeds(make, "edl", 0.80, 0.81)
    assert said(*runs, *third)[0] == (
        "LP-BNN has the best mean accuracy (95.00 ± 1.41 %), and MCP is within the noise of it; "
        "EDL is last (80.50 ± 0.71 %)."
    )


def test_single_runs_are_called_that(make: Make) -> None:
    runs = [*seeds(make, "lpbnn", 0.95), *seeds(make, "mcp", 0.90)]
    assert said(*runs)[0].endswith("MCP (90.00 %), each in a single run, whose noise is not known.")


def test_one_method_is_described_and_not_called_the_best(make: Make) -> None:
    sentences = said(*seeds(make, "lpbnn", 0.95, **ONLY))
    assert sentences[0] == "The accuracy of LP-BNN is 95.00 %."
    assert not any("best" in sentence for sentence in sentences)


def test_a_diverged_method_is_named_and_neither_ranked_nor_costed(make: Make) -> None:
    runs = [*seeds(make, "mcp", 0.95), *seeds(make, "meanfield", 0.99, diverged=3)]
    quality, _, *cost = said(*runs)
    assert (
        quality
        == "The accuracy of MCP is 95.00 %; Mean-field BNN is not ranked: diverged in epoch 3."
    )
    assert cost == []


def test_different_networks_are_named_and_have_baselines_of_their_own(make: Make) -> None:
    """A wide network is slower than a narrow one, whatever the method is."""

    def test(accuracy: float, ece: float) -> dict[str, float]:
        return {"accuracy": accuracy, "nll": 0.2, "brier": 0.1, "ece": ece}

    numbers = {
        ("mcp", "lenet"): (100.0, test(0.90, 0.04)),
        ("lpbnn", "lenet"): (200.0, test(0.91, 0.01)),
        ("mcp", "small-cnn"): (10.0, test(0.92, 0.03)),
        ("lpbnn", "small-cnn"): (30.0, test(0.95, 0.02)),
    }
    runs = [
        make(method, backbone=net, folder=method + net, cost=None, train=train(s), test=t, ood={})
        for (method, net), (s, t) in numbers.items()
    ]
    groups = grouped(read_runs(runs))
    first, _, last = verdict(groups, tables.compare(groups))
    assert "; the rows are of different networks (lenet and small-cnn)" in first
    assert last == (
        "LP-BNN (backbone=lenet) takes ×2 to train; LP-BNN (backbone=small-cnn) takes ×3 to train "
        "(× the time of the plain network of the same backbone)."
    )
    costs = tables.cost(groups)
    ratios = {row.label: row.cells["train/seconds"].relative for row in costs.rows}
    assert ratios == {
        "MCP (backbone=lenet)": 1.0,
        "LP-BNN (backbone=lenet)": 2.0,
        "MCP (backbone=small-cnn)": 1.0,
        "LP-BNN (backbone=small-cnn)": 3.0,
    }
    assert "×: relative to the plain network of the same backbone." in costs.notes


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
