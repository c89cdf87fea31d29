"""Diversity of the members: Deep Ensembles, BatchEnsemble and LP-BNN (supplementary A.5).

Command: ``lpbnn experiment diversity`` uses the demo's settings on digits and takes about a minute on two CPU
cores; ``--preset cifar10-fast --data-root DIR`` (or cifar10, the paper's 250 epochs) uses the settings of
table1, ``--from runs/published/cifar10-fast`` the published runs. The numbers are means over the
pairs of members; corrupted sets are pooled. The report shows the members' predictions for single images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from lpbnn.experiments import demo, stability, table1
from lpbnn.experiments._suite_options import SuiteOptions, paper_table
from lpbnn.training import RunConfig

if TYPE_CHECKING:
    from lpbnn.report import PaperTable
    from lpbnn.report.runs import Run

METHODS = ("ensemble", "batchensemble", "lpbnn")
KEYS = ("ratio_error", "q_statistic", "correlation")
PAPER = {
    "test": {
        "ensemble": (0.9825, 0.9877, 0.6583),
        "batchensemble": (0.5915, 0.9946, 0.7634),
        "lpbnn": (0.8390, 0.9842, 0.6601),
    },
    "corrupted": {
        "ensemble": (0.4193, 0.9690, 0.7568),
        "batchensemble": (0.2722, 0.9874, 0.8352),
        "lpbnn": (0.4476, 0.9595, 0.7332),
    },
}
MEANING = (
    "Ratio-error counts the images on which exactly one of two members errs, relative to those on which "
    "both do: higher is more diverse. Q-statistic and correlation are 1 if the members err on the same "
    "images: lower is more diverse. Compare methods of similar accuracy only: members that guess are "
    "diverse and useless."
)


@dataclass(frozen=True)
class Config(SuiteOptions):
    preset: Literal["digits", "cifar10", "cifar10-fast"] = "digits"
    data_root: str = "data"
    backbone: str | None = None
    """On CIFAR; wrn-28-10 is the paper's. None: wrn-16-4, or with --from all."""
    methods: tuple[str, ...] = METHODS
    out: Path = Path("runs/diversity")
    seeds: int = 3


def paper() -> "PaperTable":
    """Return the paper's numbers, in the keys of our table."""
    source = (
        "Franchi et al. 2020, supplementary A.5: CIFAR-10 and CIFAR-10-C, WRN-28-10, 250 epochs"
    )
    keys = [f"{part}/{key}" for part in PAPER for key in KEYS]
    rows = {method: [v for part in PAPER.values() for v in part[method]] for method in METHODS}
    return paper_table(source, keys, rows)


def at_chance(runs: Sequence["Run"]) -> list[str]:
    """Return a warning for every method whose accuracy is at most 1.5 times that of guessing."""
    found = []
    for method in dict.fromkeys(run.method for run in runs):
        own = [run for run in runs if run.method == method and run.at("test")]
        accuracy = fmean(run.at("test", "accuracy") for run in own) if own else 0.0
        if accuracy <= stability.chance(runs[0]):
            found.append(
                f"{method}: {accuracy:.1%} accuracy is chance; its diversity means nothing."
            )
    return found


def settings(config: Config, method: str, seed: int) -> RunConfig:
    if config.preset == "digits":
        return demo.settings(method, seed)
    cifar = table1.Config(data_root=config.data_root)
    return table1.settings(cifar, method, seed, config.preset, config.backbone or table1.BACKBONE)


def configs(config: Config) -> dict[str, RunConfig]:
    net = "" if config.preset == "digits" else f"{config.backbone or table1.BACKBONE}-"
    return {
        f"{config.preset}-{net}{method}-{seed}": settings(config, method, seed)
        for seed in range(config.seeds)
        for method in config.methods
    }


def run(config: Config, console: Console) -> Path:
    from lpbnn.experiments._suite import show, work  # imports torch: not for --help
    from lpbnn.report.runs import grouped
    from lpbnn.report.tables import diversity

    runs = work(config, lambda: configs(config), console, config.methods, [config.backbone])
    return show(
        runs,
        config.report,
        console,
        "Diversity of the members",
        lambda found, paper: diversity(grouped(found), paper),
        paper(),
        lambda found: [MEANING, *at_chance(found)],
    )
