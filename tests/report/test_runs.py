"""Runs are read from their folders, and those of one row are told from others."""

import json
from pathlib import Path

import numpy as np
import pytest
from report.conftest import SESSION, Make, info

from lpbnn.experiments import published
from lpbnn.report import comparison, write_report
from lpbnn.report.runs import Run, chosen, grouped
from lpbnn.report.tables import severity
from lpbnn.training.files import RunError
from lpbnn.training.rundir import CONFIG, MANIFEST, RunDir


def rewritten(run: Path, name: str, content: object) -> Path:
    """As another program writes a run folder: without digests."""
    (run / MANIFEST).unlink(missing_ok=True)
    (run / name).write_text(json.dumps(content))
    return run


def test_a_run_that_was_measured_again_says_by_which_command(make: Make, tmp_path: Path) -> None:
    """The numbers of a run do not follow from its training alone."""
    run = make("lpbnn")
    again = {**SESSION, "command": ["lpbnn", "eval", "RUN", "--samples", "4"], "dirty": False}
    RunDir(run).write_results({**RunDir(run).results(), "measured_again": again})
    page = write_report([run, make("mcp")], tmp_path / "report.html").read_text()
    assert "Measured again since:</p><pre>lpbnn eval RUN --samples 4</pre>" in page


def test_figures_have_the_log_and_the_risk_curve(make: Make) -> None:
    random = np.random.default_rng(0)
    probs, labels = random.dirichlet(np.ones(10), 50), random.integers(0, 10, 50)
    run = make("mcp", with_arrays={"test/probs": probs, "test/labels": labels})
    RunDir(run).write_log(
        [{"epoch": 1, "loss": 2.0, "nll": 2.0}, {"epoch": 2, "loss": 1.0, "nll": 1.0}]
    )
    found = Run.read(run).arrays
    assert found["log/nll"].tolist() == [2.0, 1.0]
    assert found["risk/risk"][-1] == pytest.approx((probs.argmax(1) != labels).mean())


def test_a_number_is_the_same_number_however_it_is_written(make: Make) -> None:
    """-2 and -2.0 were two settings with one name, and one took the other's numbers in the table."""
    whole = make("lpbnn", 0, options={"log_variance": -2}, test={"accuracy": 0.9})
    point = make("lpbnn", 1, options={"log_variance": -2.0}, test={"accuracy": 0.8})
    (group,) = grouped([Run.read(whole), Run.read(point)])
    assert [run.seed for run in group.runs] == [0, 1]


def test_rows_that_look_alike_keep_their_own_numbers(make: Make) -> None:
    runs = [
        make("lpbnn", options={"log_variance": value}, folder=f"r{i}", test={"accuracy": share})
        for i, (value, share) in enumerate([(-2.0000001, 0.9), (-2.0000002, 0.8)])
    ]
    table = comparison(runs)
    assert [row.cells["accuracy"].values for row in table.rows] == [(0.9,), (0.8,)]
    assert len({row.label for row in table.rows}) == 2


def test_an_option_that_was_removed_is_shown_as_a_fact(make: Make) -> None:
    run = make("lpbnn", corrupted=False)
    config = RunDir(run).read_json(CONFIG)
    config["method_options"]["train_decoder"] = True
    results = {**RunDir(run).results(), "config_digest": None}
    old = Run.read(
        rewritten(rewritten(run, CONFIG, config), "results.json", without_digest(results))
    )
    assert chosen(old.settings, "lpbnn") == ["method_options.train_decoder"]
    new = Run.read(make("lpbnn", folder="new", corrupted=False))
    labels = {group.label for group in grouped([old, new])}
    assert labels == {"LP-BNN (train_decoder=yes)", "LP-BNN (train_decoder=default)"}


def without_digest(results: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in results.items() if key != "config_digest"}


def test_an_option_younger_than_the_run_had_its_default(make: Make) -> None:
    run = make("lpbnn", corrupted=False)
    config = RunDir(run).read_json(CONFIG)
    younger = config["method_options"].pop("fast_lr")
    results = without_digest(RunDir(run).results())
    old = Run.read(rewritten(rewritten(run, CONFIG, config), "results.json", results))
    assert old.settings["method_options.fast_lr"] == younger


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": 7}, "results of format 7"),
        ({"test": 3}, r"results.json does not fit .* test"),
        ({"evaluate": {"score": None}}, "does not fit .* evaluate.score: .*'entropy' or 'conf"),
    ],
)
def test_results_of_another_form_are_told(
    make: Make, changed: dict[str, object], message: str
) -> None:
    run = make()
    rewritten(run, "results.json", {**RunDir(run).results(), **changed})
    with pytest.raises(RunError, match=message):
        Run.read(run)


def test_the_papers_cE_stands_beside_the_mean_over_severities_only(make: Make) -> None:
    groups = grouped([Run.read(make("lpbnn", data=info(name="cifar10")))])
    table = severity(groups, ("ece",), published("cifar10", "wrn-28-10"))
    found = {key: cell.reference for key, cell in table.rows[0].cells.items()}
    assert found == {"1/ece": None, "3/ece": None, "5/ece": None, "ce": 0.1197}
