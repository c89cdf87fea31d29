"""Experiments show the runs of a folder beside the paper's numbers, and train nothing."""

from pathlib import Path

import pytest
from report.conftest import Make, info
from rich.console import Console

from lpbnn.experiments import _suite, calibration, table1


def test_cifar_experiments_show_runs(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_suite, "run", lambda *_, **__: pytest.fail("nothing is to be trained"))
    console = Console(record=True, width=200)
    for method in ("lpbnn", "mcp"):
        for seed in (0, 1):
            make(method, seed, data=info(name="cifar10"), backbone="wrn-16-4")
    page = tmp_path / "page.html"
    assert table1.run(table1.Config(source=tmp_path, report=page), console) == page
    shown = console.export_text()
    for text in (
        "Table 1: cifar10, wrn-16-4, 15 epochs",
        "paper 96.33",
        "WRN-28-10, 250",
    ):
        assert text in shown
    assert shown.index("MCP") < shown.index("LP-BNN")  # the paper's order
    assert "paper 0.8390" in page.read_text()

    calibration.run(calibration.Config(source=tmp_path, report=page), console)
    shown = console.export_text()
    assert "paper 0.1197" in shown
    assert not any(line.startswith("MCP") for line in shown.splitlines())  # no row of it
    assert "Under corruption" in page.read_text()
    with pytest.raises(ValueError, match=r"has runs of lpbnn, mcp; expected duq. Fix"):
        table1.run(table1.Config(source=tmp_path, methods=("duq",)), console)


def test_only_the_networks_that_are_asked_for(make: Make, tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    for backbone in ("wrn-16-4", "wrn-28-10"):
        make("mcp", folder=backbone, data=info(name="cifar10"), backbone=backbone)
    page = tmp_path / "page.html"
    for chosen in ((), ("wrn-28-10",)):
        table1.run(table1.Config(source=tmp_path, report=page, backbone=chosen), console)
        shown = console.export_text()
        assert "cifar10, wrn-28-10" in shown
        assert ("cifar10, wrn-16-4" in shown) == (not chosen)
    problem = r"has runs of wrn-16-4, wrn-28-10; expected lenet. Fix: .* another backbone"
    with pytest.raises(ValueError, match=problem):
        table1.run(table1.Config(source=tmp_path, backbone=("lenet",)), console)


def test_a_sweep_names_its_rows_by_what_differs(make: Make, tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    cifar = {"data": info(name="cifar10"), "backbone": "wrn-16-4"}
    make("mcp", **cifar)
    for value in (-2.0, 0.0):
        make("lpbnn", folder=f"lv{value}", options={"log_variance": value}, **cifar)
    page = tmp_path / "page.html"
    table1.run(table1.Config(source=tmp_path, report=page), console)
    shown = console.export_text()
    for text in ("Table 1: cifar10", "log_variance=-2", "log_variance=0", "MCP"):
        assert text in shown
    assert "LP-BNN (log_variance=0)" in page.read_text().partition('id="tradeoffs"')[2]
