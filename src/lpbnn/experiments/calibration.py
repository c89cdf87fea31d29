"""Calibration under shift: ECE against the severity of corruption (the paper's calibration figure).

Command: ``lpbnn experiment calibration --data-root DIR`` trains Deep Ensembles, BatchEnsemble and LP-BNN
as table1 does, prints ECE for each severity and puts the figure into the report.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lpbnn.experiments._cifar import CifarConfig, configs
from lpbnn.experiments._suite import run_all


@dataclass(frozen=True)
class Config(CifarConfig):
    methods: tuple[str, ...] = ("ensemble", "batchensemble", "lpbnn")


def run(config: Config, console: Console) -> Path:
    from lpbnn.report import write_report  # slow: not for --help
    from lpbnn.report.runs import by_setting, read_runs

    runs = read_runs(run_all(configs(config), config.out, console, config.jobs, config.ledger))
    for setting, part in by_setting(runs).items():
        console.print(setting, style="bold")
        console.print(table([dict(run.results) for run in part]))
    title = f"Calibration: {', '.join(config.preset)}"
    written = write_report(runs, config.report, title=title)
    console.print(f"the figure is in {written}")
    return written


def table(results: list[dict[str, Any]]) -> Table:
    """Mean ECE over seeds and the 15 corruptions, by method and severity."""
    results = [
        result for result in results if result["corruption"]
    ]  # one that is not finite has none
    severities = sorted(
        {level for result in results for level in result["corruption"]["severities"]}
    )
    shown = Table(title="ECE against severity (15 bins, mean over corruptions)")
    shown.add_column("method", no_wrap=True)
    for level in severities:
        shown.add_column(level, justify="right")
    for method in dict.fromkeys(result["method"] for result in results):
        runs = [
            result["corruption"]["severities"] for result in results if result["method"] == method
        ]
        means = [sum(run[level]["ece"] for run in runs) / len(runs) for level in severities]
        shown.add_row(method, *(f"{mean:.4f}" for mean in means))
    return shown
