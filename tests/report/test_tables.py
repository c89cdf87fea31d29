"""Mean and spread, the best two, the rows: the arithmetic behind every table."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report.conftest import SESSION, Make

from lpbnn.metric_info import METRICS
from lpbnn.report import PaperTable, Table, comparison
from lpbnn.report.runs import grouped, read_runs
from lpbnn.report.tables import COSTS, Cell, conformal, cost, diversity, marks, recalibration
from lpbnn.training.config import EvalConfig, to_data
from lpbnn.training.files import RunError
from lpbnn.training.rundir import RunDir

TEST = {"accuracy": 0.9, "nll": 0.3, "brier": 0.15, "ece": 0.05}


def column(table: Table, key: str) -> dict[str, Cell]:
    return {row.label: row.cells[key] for row in table.rows}


def test_seeds_become_mean_and_sample_deviation(make: Make) -> None:
    values = [0.9502, 0.9611, 0.9427]
    runs = [
        make("lpbnn", seed, test={**TEST, "accuracy": value}) for seed, value in enumerate(values)
    ]
    table = comparison([*runs, make("mcp")])
    cell = column(table, "accuracy")["LP-BNN"]
    assert cell.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert cell.std == pytest.approx(np.std(values, ddof=1), abs=1e-12)
    assert cell.text(METRICS["accuracy"]) == ("95.13", "±0.93")
    assert [row.n for row in table.rows] == [3, 1]
    assert column(table, "accuracy")["MCP"].std is None


def test_columns_are_the_metrics_in_their_order(make: Make) -> None:
    table = comparison([make()])
    assert [c.key for c in table.columns] == [
        *("accuracy", "nll", "ece", "brier"),
        *("photos/auroc", "photos/aupr", "photos/fpr95"),
        *("ca", "ce"),
    ]
    assert {c.key: c.part for c in table.columns}["photos/auroc"] == "OOD: photos"
    assert {c.key: c.part for c in table.columns}["ca"] == "corrupted: generated, procedural frost"
    assert any("3 corruptions (generated" in note and "1, 3, 5" in note for note in table.notes)


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("accuracy", [0.9, 0.95, 0.93], ["", "best", "second"]),
        ("ece", [0.03, 0.01, 0.02], ["", "best", "second"]),  # lower is better
        (
            "coverage",
            [1.0, 0.94, 0.90, 0.5],
            ["second", "best", "second", ""],
        ),  # nearest to its target
        ("ece", [0.01, 0.01, 0.02, 0.03], ["best", "best", "second", ""]),  # ties share
        ("ece", [0.010001, 0.010004, 0.02], ["best", "best", ""]),  # the same as shown
        ("accuracy", [0.95001, 0.95004, 0.9], ["best", "best", ""]),  # in percent: 95.00
        ("accuracy", [0.9501, 0.9502, 0.9], ["second", "best", ""]),
        ("ece", [0.01, 0.02, 0.02, 0.03], ["best", "second", "second", ""]),
        ("ece", [math.nan, 0.02, 0.01, None], ["", "", "best", ""]),  # two: the other is plain
        ("ece", [math.nan, 0.02, 0.01, 0.03], ["", "second", "best", ""]),
        ("ece", [0.02, 0.02, 0.02], ["", "", ""]),  # nobody is better
        ("ece", [0.02], [""]),
        ("ece", [None, 0.02, math.inf], ["", "", ""]),
        ("nll", [-1.5, -0.5, 0.0], ["best", "second", ""]),  # of a density: may be negative
        ("ece", [], []),
    ],
)
def test_marks(key: str, values: list[Any], expected: list[str]) -> None:
    assert marks(values, METRICS[key]) == expected


@pytest.mark.parametrize(
    ("values", "spreads", "expected"),
    [
        ([0.95, 0.94, 0.90], [0.002, 0.002, 0.002], ["best", "second", ""]),
        ([0.95, 0.94, 0.90], [0.006, 0.005, 0.002], ["best", "best", ""]),  # they overlap
        ([0.95, 0.94, 0.90], [0.05, 0.05, 0.05], ["", "", ""]),  # nobody is better
        ([0.95, 0.94, 0.90], [None, 0.006, 0.006], ["best", "best", ""]),  # median deviation
        ([0.95, 0.94, 0.90], [None, None, None], ["best", "second", ""]),  # no noise is known
        ([0.95, 0.94, 0.936], [0.001, 0.002, 0.002], ["best", "", ""]),  # all that is left
        ([0.95, 0.94], [0.01, 0.01], ["", ""]),
        # No prize for noise.
        ([0.95, 0.94, 0.93, 0.9], [0.002, 0.002, 0.02, 0.002], ["best", "second", "second", ""]),
        ([0.95, None, 0.90], [0.001, 9.0, 0.001], ["best", "", ""]),
    ],
)
def test_best_is_awarded_outside_the_noise_only(
    values: list[Any], spreads: list[Any], expected: list[str]
) -> None:
    assert marks(values, METRICS["accuracy"], spreads) == expected


def test_a_best_mean_within_the_noise_shares_its_mark(make: Make) -> None:
    seeds = {"lpbnn": (0.02, 0.04), "mcp": (0.025, 0.045), "tradi": (0.2, 0.21)}
    runs = [
        make(method, seed, test={**TEST, "ece": value})
        for method, values in seeds.items()
        for seed, value in enumerate(values)
    ]
    table = comparison(runs)
    assert {label: cell.mark for label, cell in column(table, "ece").items()} == {
        **{"LP-BNN": "best", "MCP": "best"},
        "TRADI": "",  # the last
    }


def test_unequal_numbers_of_predictions_are_named(make: Make) -> None:
    (note,) = [n for n in comparison([make("lpbnn"), make("mcp")]).notes if "differ in" in n]
    assert "number of predictions that are averaged (1: MCP; 4: LP-BNN)" in note
    assert not any("differ in" in n for n in comparison([make("lpbnn"), make("mimo")]).notes)


def test_rows_of_different_scores_are_named(make: Make) -> None:
    entropy = to_data(EvalConfig(score="entropy"))
    runs = [make("lpbnn", evaluate=entropy), make("mcp"), make("duq")]
    (note,) = [note for note in comparison(runs).notes if "score" in note]
    assert note == (
        "Out-of-distribution score: the entropy of the mean prediction (LP-BNN); 1 - the largest "
        "probability of the mean prediction (MCP); DUQ has its own (kernel). AUROC, AUPR and FPR95 of "
        "different scores do not compare."
    )


def test_a_score_that_all_rows_share_is_told_once(make: Make) -> None:
    (note,) = [n for n in comparison([make("lpbnn"), make("mcp")]).notes if "score" in n]
    assert note == "Out-of-distribution score: 1 - the largest probability of the mean prediction."


def test_methods_that_all_have_their_own_scores_have_no_other_one(make: Make) -> None:
    (note,) = [n for n in comparison([make("duq")]).notes if "score" in n]
    assert note == "Out-of-distribution score: DUQ has its own (kernel)."


def test_a_seed_that_occurs_twice_is_named(make: Make) -> None:
    runs = [make("lpbnn", 0), make("lpbnn", 1), make("mcp", 0), make("mcp", 0, folder="again")]
    (note,) = [note for note in comparison(runs).notes if "more than once" in note]
    assert note == "Seeds that occur more than once count each time: MCP 0."
    assert not any("more than once" in note for note in comparison(runs[:3]).notes)


def test_runs_without_the_number_do_not_count(make: Make) -> None:
    runs = [
        make("mcp", 0, test={**TEST, "ece": math.nan}),  # the file has null
        make("mcp", 1, test={**TEST, "ece": 0.04}),
        make("mcp", 2, test=None),
    ]
    table = comparison([*runs, make("lpbnn", test={**TEST, "ece": 0.08})])
    assert column(table, "ece")["MCP"].values == (0.04,)
    assert column(table, "ece")["MCP"].mark == "best"
    assert len(column(table, "nll")["MCP"].values) == 2
    assert table.rows[0].n == 3


def test_who_has_not_learned_is_shown_and_never_ranked(make: Make) -> None:
    """A network that is sure of nothing has the least ECE of all."""
    runs = [
        make("mcp", test={**TEST, "accuracy": 0.8, "ece": 0.06}),
        make("duq", test={**TEST, "accuracy": 0.02, "ece": 0.001}),
        make("edl", test={**TEST, "accuracy": 0.39, "ece": 0.002}),
        make("lpbnn", test={**TEST, "accuracy": 0.41, "ece": 0.03}),
    ]
    table = comparison(runs)
    assert {row.label for row in table.rows if row.note == "not learned"} == {"DUQ", "EDL"}
    assert {label: cell.mark for label, cell in column(table, "ece").items()} == {
        **{"MCP": "", "DUQ": ""},
        **{"EDL": "", "LP-BNN": "best"},
    }
    assert any("less than half" in said for said in table.explanations())


def test_a_diverged_row_is_shown_and_never_ranked(make: Make) -> None:
    runs = [
        make("meanfield", diverged=3, test={**TEST, "ece": 0.001}),
        make("lpbnn", 0, test={**TEST, "ece": 0.02}),
        make("lpbnn", 1, diverged=7, test={**TEST, "ece": 0.001}),
        make("mcp", test={**TEST, "ece": 0.03}),
        make("tradi", test={**TEST, "ece": 0.04}),
    ]
    table = comparison(runs)
    notes = {row.label: row.note for row in table.rows}
    assert notes["Mean-field BNN"] == "diverged in epoch 3"
    assert notes["LP-BNN"] == "1 of 2 runs diverged (epoch 7)"
    assert {label: cell.mark for label, cell in column(table, "ece").items()} == {
        **{"Mean-field BNN": "", "LP-BNN": ""},
        **{"MCP": "best", "TRADI": ""},
    }
    assert column(table, "ece")["Mean-field BNN"].mean == 0.001
    assert any("not ranked" in text for text in table.explanations())


def test_only_runs_that_differ_in_the_seed_share_a_row(make: Make) -> None:
    runs = [
        make("lpbnn", 0),
        make("lpbnn", 1),
        make("lpbnn", 0, lr=0.05),
        make("lpbnn", 2, folder="eight", options={"members": 8}),
        make("mcp"),
    ]
    labels = {row.label: row.n for row in comparison(runs).rows}
    assert labels == {
        "LP-BNN (members=4, lr=0.1)": 2,
        "LP-BNN (members=4, lr=0.05)": 1,
        "LP-BNN (members=8, lr=0.1)": 1,
        "MCP": 1,
    }


def test_official_and_generated_corruptions_are_never_averaged(make: Make) -> None:
    official = {"origin": "official", "frost": None, "images": 40, "ca": 0.8, "ce": 0.2}
    official |= {"severities": {"1": TEST}, "sets": {"fog": {"1": TEST}}}
    runs = [
        make("lpbnn", 3, test=None, corruption=None, diverged=2),  # joins the first of its seeds
        make("lpbnn", 0),
        make("lpbnn", 1, corruption=official),
    ]
    table = comparison(runs)
    assert {row.label: row.n for row in table.rows} == {
        "LP-BNN (corruptions=generated, procedural frost)": 2,
        "LP-BNN (corruptions=official)": 1,
    }
    assert len([note for note in table.notes if note.startswith("cA and cE of")]) == 2
    assert "official" in {c.key: c.part for c in table.columns}["ca"]


def test_published_numbers_stand_beside_ours(make: Make) -> None:
    reference = PaperTable(
        "Somebody 2020, Table 1",
        {
            "lpbnn": {"accuracy": 0.9502, "auroc": 0.5, "photos/auroc": 0.9691},
            "MCP": {"ece": 0.0207},
            "duq": {"ece": 0.4},
        },
    )
    table = comparison([make("lpbnn"), make("mcp")], reference)
    assert column(table, "accuracy")["LP-BNN"].reference == 0.9502
    assert column(table, "photos/auroc")["LP-BNN"].reference == 0.9691
    assert column(table, "ece")["MCP"].reference == 0.0207
    assert column(table, "nll")["LP-BNN"].reference is None
    assert table.source == "Somebody 2020, Table 1"
    assert comparison([make("mimo")], reference).source == ""


def test_costs_relative_to_the_plain_network(make: Make) -> None:
    groups = grouped(read_runs([make("lpbnn"), make("mcp", 0), make("mcp", 1)]))
    table = cost(groups)
    assert column(table, "cost/parameters")["LP-BNN"].relative == pytest.approx(4)
    assert column(table, "train/seconds")["MCP"].relative == pytest.approx(1)
    assert not table.marked
    assert COSTS["cost/parameters"].format(4000) == "4.00 k"
    alone = cost(grouped(read_runs([make("lpbnn", 5)])))
    assert column(alone, "train/seconds")["LP-BNN"].relative is None


def test_runs_that_shared_their_device_are_told(make: Make) -> None:
    runs = [make("mcp", seed) for seed in range(3)]
    for run, beside in zip(runs, (1, 3, 4), strict=True):
        RunDir(run).add_session({**SESSION, "beside": beside})
    RunDir(runs[2]).add_session({**SESSION, "beside": 1})  # resumed: what went before counts too
    notes = " ".join(cost(grouped(read_runs(runs))).notes)
    assert "2 runs shared the device with others: alone they are faster." in notes
    assert "shared" not in " ".join(cost(grouped(read_runs(runs[:1]))).notes)


def test_who_has_not_learned_is_the_same_in_every_table(make: Make) -> None:
    """The best accuracy may be that of a single network, which has no row among the members'."""
    runs = [
        make("mcp", test={**TEST, "accuracy": 0.8}),
        make("lpbnn", test={**TEST, "accuracy": 0.3}),
    ]
    (row,) = diversity(grouped(read_runs(runs))).rows
    assert (row.label, row.note) == ("LP-BNN", "not learned")


def test_diversity_has_no_rows_for_single_networks(make: Make) -> None:
    groups = grouped(read_runs([make("lpbnn"), make("mcp")]))
    assert [row.label for row in diversity(groups).rows] == ["LP-BNN"]


def test_several_data_sets_do_not_compare(make: Make, regression: Make) -> None:
    with pytest.raises(ValueError, match=r"digits \(1 runs\), cubic \(1 runs\).*one at a time"):
        comparison([make("mcp"), regression("mcp")])


def test_what_cannot_be_read_is_said(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run was given"):
        comparison([])
    with pytest.raises(RunError, match="does not exist"):
        comparison([tmp_path / "nowhere"])
    unfinished = make("mcp")
    (unfinished / "results.json").unlink()
    with pytest.raises(RunError, match="not finished"):
        comparison([unfinished])
    with pytest.raises(RunError, match="format 2"):
        comparison([make("mcp", 1, format=2)])


def test_regression_has_its_own_columns(regression: Make) -> None:
    table = comparison([regression("lpbnn"), regression("mcp")])
    assert [c.key for c in table.columns][:3] == ["nll", "rmse", "coverage"]


def test_calibrated_runs_are_compared_with_themselves_as_trained(make: Make) -> None:
    found = {"noise_scale": 1.4, "kind": "temperature", "before": {**TEST, "ece": 0.09}}
    runs = [
        make("lpbnn", 0, test=TEST, calibration=found),
        make("lpbnn", 0, folder="plain", test=TEST),
        make("mcp"),
    ]
    groups = grouped(read_runs(runs))
    labels = [group.label for group in groups]
    assert labels[:2] == ["LP-BNN (calibration=noise and temperature)", "LP-BNN (calibration=none)"]
    table = recalibration(groups)
    assert [row.label for row in table.rows] == labels[:1]
    assert table.rows[0].cells["as trained/ece"].mean == 0.09
    assert table.rows[0].cells["calibrated/ece"].mean == 0.05
    assert not recalibration(groups[1:]).rows


def test_runs_with_conformal_scores_have_their_coverage_shown(make: Make) -> None:
    scores = {"score": "lac", "level": 0.9, "coverage": 0.91, "size": 1.5, "examples": 90}
    found = {"noise_scale": None, "scale": None, "kind": "none", "before": TEST}
    run = make("mcp", 0, test=TEST, calibration={**found, "conformal": scores})
    groups = grouped(read_runs([run, make("lpbnn")]))
    table = conformal(groups)
    assert [row.method for row in table.rows] == ["mcp"]
    assert {key: cell.mean for key, cell in table.rows[0].cells.items()} == {
        key: scores[key] for key in ("level", "coverage", "size", "examples")
    }
    assert not recalibration(groups).rows  # nothing was scaled
