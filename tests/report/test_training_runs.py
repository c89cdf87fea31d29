"""What the engine really writes is what the report reads."""

import re
from pathlib import Path

import pytest

from lpbnn.report import comparison, write_report
from lpbnn.training import EvalConfig, RunConfig
from lpbnn.training.run import run
from lpbnn.training.rundir import RunDir


@pytest.mark.slow
def test_runs_of_the_engine(tmp_path: Path) -> None:
    settings = EvalConfig(corruptions=True, severities=(1, 5), corruption_images=10, examples=2)
    folders = []
    for method in ("mcp", "lpbnn"):
        config = RunConfig(
            method, epochs=2, evaluate=settings, progress=False, device="cpu", validate_every=0
        )
        results = run(config, tmp_path / method)
        folders.append(tmp_path / method)
    table = comparison(folders)
    assert table.rows[1].cells["accuracy"].mean == results["test"]["accuracy"]
    assert table.rows[1].cells["ce"].mean == results["corruption"]["ce"]
    text = write_report(folders, tmp_path / "report.html").read_text("utf-8")
    for part in [
        "comparison",
        "calibration",
        "corruption",
        "detection",
        "members",
        "diversity",
        "cost",
        "risk",
        "training",
    ]:
        assert f'<section id="{part}">' in text
    assert '<section id="posterior">' in text
    assert "generated, procedural frost" in text
    titles = re.findall(r"<title>([^<]*)</title>", text)
    log = [float(row["loss"]) for row in RunDir(folders[0]).log()]
    assert f"MCP: 1: {log[0]:.4g}, 2: {log[1]:.4g}" in titles
    wrong = 100 * (1 - table.rows[0].cells["accuracy"].mean)
    assert any(t.startswith("MCP: errors") and f"{wrong:.2f} % of 100 %" in t for t in titles)
