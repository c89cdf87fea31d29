"""What the engine really writes is what the report reads."""

from pathlib import Path

from lpbnn.report import comparison, write_report
from lpbnn.training import EvalConfig, RunConfig
from lpbnn.training.run import run


def test_runs_of_the_engine(tmp_path: Path) -> None:
    settings = EvalConfig(corruptions=True, severities=(1, 5), corruption_images=10, examples=2)
    folders = []
    for method in ("mcp", "lpbnn"):
        config = RunConfig(
            method, epochs=1, evaluate=settings, progress=False, device="cpu", validate_every=0
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
    ]:
        assert f'<section id="{part}">' in text
    assert '<section id="posterior">' in text
    assert "generated, procedural frost" in text
