"""Diversity of the members: Deep Ensembles, BatchEnsemble and LP-BNN (supplementary A.5).

Command: ``lpbnn experiment diversity`` uses the demo's settings on digits, about a minute on two CPU cores;
``--data cifar10-fast --data-root DIR`` (or cifar10, the paper's 250 epochs) takes the settings of table1.
Means over the pairs of members; on corrupted images all sets are pooled.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from lpbnn.engine import RunConfig
from lpbnn.experiments import _cifar, demo
from lpbnn.experiments._suite import run_all
from lpbnn.metrics import METRICS

NAMES = {"ensemble": "Deep Ensembles", "batchensemble": "BatchEnsemble", "lpbnn": "LP-BNN"}
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


@dataclass(frozen=True)
class Config:
    data: Literal["digits", "cifar10", "cifar10-fast"] = "digits"
    data_root: str = "data"
    backbone: str = "wrn-16-4"
    """On CIFAR; wrn-28-10 is the paper's."""
    out: Path = Path("runs/diversity")
    seeds: int = 3
    jobs: int | None = None
    """Runs side by side; None: one per core, or one on a GPU."""
    ledger: Path | None = None
    """Keep every finished run's numbers here, one JSON each; what it holds is not trained again."""


def settings(config: Config, method: str, seed: int) -> RunConfig:
    if config.data == "digits":
        return demo.settings(method, seed)
    cifar = _cifar.CifarConfig(data_root=config.data_root)
    return _cifar.settings(cifar, method, seed, config.data, config.backbone)


def run(config: Config, console: Console) -> None:
    from lpbnn.report.entries import content  # slow: not for --help

    configs = {
        f"{config.data}-{method}-{seed}": settings(config, method, seed)
        for seed in range(config.seeds)
        for method in NAMES
    }
    found = run_all(configs, config.out, console, config.jobs, config.ledger)
    results = dict(zip(configs, (content(path)["results"] for path in found), strict=True))
    for part in PAPER:
        console.print(table(config, results, part))


def table(config: Config, results: dict[str, dict[str, Any]], part: str) -> Table:
    """Ours, the mean over seeds, beside the paper's (CIFAR-10 and CIFAR-10-C, WRN-28-10)."""
    shown = Table(title=f"Diversity on the {part} part of {config.data}, {config.seeds} seeds")
    shown.add_column("method", no_wrap=True)
    for key in KEYS:
        shown.add_column(f"{METRICS[key].title} {METRICS[key].arrow}", justify="right")
        shown.add_column("paper", justify="right", style="dim")
    for method, name in NAMES.items():
        measured = [
            results[f"{config.data}-{method}-{seed}"]["diversity"][part]
            for seed in range(config.seeds)
        ]
        cells: list[str] = []
        for key, paper in zip(KEYS, PAPER[part][method], strict=True):
            values = [row[key] for row in measured if row and row[key] is not None]
            cells += [f"{sum(values) / len(values):.4f}" if values else "-", f"{paper:.4f}"]
        shown.add_row(name, *cells)
    return shown
