"""Experiments run whole in a small form, print the paper's numbers beside ours, and resume."""

from pathlib import Path

import pytest
from rich.console import Console

from lpbnn import experiments
from lpbnn.experiments import _cifar, demo, diversity, stability, table1


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=200)


def test_names_and_descriptions() -> None:
    assert {"demo", "stability", "diversity", "calibration", "table1"} <= set(experiments.names())
    for name in experiments.names():
        assert experiments.describe(name).endswith(".")
    with pytest.raises(ValueError, match="stability"):
        experiments.load("stabilty")


def test_stability(tmp_path: Path, console: Console) -> None:
    config = stability.Config(out=tmp_path, epochs=1, rates=(0.2, 0.01), jobs=1)
    stability.run(config, console)
    shown = console.export_text()
    for text in ("BNN (mean-field), accuracy", "LP-BNN, div", "22.48", "63.73"):
        assert text in shown
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("results.json")}
    assert len(stamps) == 4
    stability.run(config, console)  # finished runs are not trained again
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("results.json")}


def test_the_demo_and_diversity_share_their_settings(tmp_path: Path, console: Console) -> None:
    config = demo.Config(
        out=tmp_path / "demo", report=tmp_path / "r.html", seeds=1, methods=("mcp", "lpbnn"), jobs=2
    )
    assert demo.run(config, console) == tmp_path / "r.html"
    assert "LP-BNN" in console.export_text()
    assert diversity.settings(diversity.Config(), "lpbnn", 0) == demo.settings("lpbnn", 0)


def test_diversity_table(console: Console) -> None:
    measured = {"ratio_error": 0.5, "q_statistic": 0.9, "correlation": None}
    results = {
        f"digits-{method}-0": {"diversity": {"test": measured, "corrupted": None}}
        for method in diversity.NAMES
    }
    for part in ("test", "corrupted"):
        console.print(diversity.table(diversity.Config(seeds=1), results, part))
    shown = console.export_text()
    assert "0.5000" in shown
    assert "0.9825" in shown


def test_table1_is_the_papers_setting_by_preset() -> None:
    config = _cifar.CifarConfig("cifar10", backbone="wrn-28-10", methods=("lpbnn", "duq"))
    runs = _cifar.configs(config)
    assert len(runs) == 6
    run = runs["cifar10-wrn-28-10-lpbnn-0"]
    assert (run.epochs, run.batch_size, run.optim.lr, run.optim.weight_decay) == (
        250,
        128,
        0.1,
        1e-4,
    )
    assert run.schedule.milestones == (80, 160, 200)
    assert run.augment.cutout == 16
    assert runs["cifar10-wrn-28-10-duq-0"].optim.lr == 0.05
    with pytest.raises(ValueError, match="unknown method"):
        _cifar.configs(_cifar.CifarConfig(methods=("lpbn",)))
    paper = table1.paper("cifar10").rows["lpbnn"]
    assert paper["accuracy"] == pytest.approx(0.9502)
    assert (paper["auroc"], paper["ece"]) == (0.9691, 0.0094)
    assert "auroc" not in table1.paper("cifar100-fast").rows["lpbnn"]
