"""Calibration under shift: ECE against the severity of corruption (the paper's calibration figure).

Command: ``lpbnn experiment calibration --data-root DIR`` trains Deep Ensembles, BatchEnsemble and LP-BNN
as table1 does, prints ECE for each severity and puts the figure into the report; with
``--from results/cifar10-fast`` it takes the runs that are kept there. The paper has no numbers by
severity; its mean over all, cE, stands beside ours.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lpbnn.experiments._cifar import CifarConfig, chosen, configs
from lpbnn.experiments._published import published
from lpbnn.experiments._suite import work


@dataclass(frozen=True)
class Config(CifarConfig):
    methods: tuple[str, ...] = ("ensemble", "batchensemble", "lpbnn")


def run(config: Config, console: Console) -> Path:
    from lpbnn.report import print_table, write_report  # slow: not for --help
    from lpbnn.report.contents import severity
    from lpbnn.report.runs import by_setting, grouped

    runs = chosen(config, work(config, lambda: configs(config), console))
    for setting, part in by_setting(runs).items():
        reference = published(part[0].data.name, part[0].settings["backbone"])
        console.print(setting, style="bold")
        print_table(severity(grouped(part), ("ece",), reference), console)
    written = write_report(runs, config.report, title="Calibration under corruption")
    console.print(f"the figure is in {written}")
    return written
