"""Calibration under shift: ECE against the severity of corruption (the paper's calibration figure).

Command: ``lpbnn experiment calibration --data-root DIR`` trains Deep Ensembles, BatchEnsemble and LP-BNN
as table1 does, prints ECE for each severity and puts the figure into the report; with
``--from runs/published/cifar10-fast`` it takes the runs that are kept there. The paper has no
numbers by severity; its mean over all, cE, stands beside ours.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lpbnn.experiments import table1


@dataclass(frozen=True)
class Config(table1.Config):
    methods: tuple[str, ...] = ("ensemble", "batchensemble", "lpbnn")


def run(config: Config, console: Console) -> Path:
    from lpbnn.experiments._suite import show, work  # imports torch: not for --help
    from lpbnn.report.runs import grouped
    from lpbnn.report.tables import severity

    runs = work(config, lambda: table1.configs(config), console, config.methods, config.backbone)
    return show(
        runs,
        config.report,
        console,
        "Calibration",
        lambda found, paper: severity(grouped(found), ("ece",), paper),
    )
