"""Training stability: mean-field BNN against LP-BNN over five learning rates (supplementary A.4).

Command: ``lpbnn experiment stability`` trains LeNet-5 on digits in two minutes on two CPU cores;
``--data cifar10 --data-root DIR`` is the paper's setting (80 epochs, batch 128, weight decay 1e-4).
"Epoch div" is the epoch in which the training loss stopped being finite, counted from 1. A learning rate
counts as stable only if no seed diverged and the accuracy is above chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console

from lpbnn.experiments._suite_options import SuiteOptions, paper_table
from lpbnn.training import EvalConfig, OptimConfig, RunConfig, ScheduleConfig

if TYPE_CHECKING:
    from lpbnn.report import PaperTable
    from lpbnn.report.runs import Run

RATES = (0.2, 0.1, 0.05, 0.01, 0.005)
NAMES = {"meanfield": "BNN (mean-field)", "lpbnn": "LP-BNN"}
# Accuracy in % and epoch of divergence, at the five rates.
PAPER: dict[str, dict[float, tuple[float, int | None]]] = {
    method: dict(zip(RATES, zip(accuracies, epochs, strict=True), strict=True))
    for method, accuracies, epochs in (
        ("meanfield", (22.48, 44.60, 49.83, 48.70, 56.69), (3, 25, 65, None, None)),
        ("lpbnn", (20.02, 55.04, 59.68, 63.73, 64.41), (3, None, None, None, None)),
    )
}


@dataclass(frozen=True)
class Config(SuiteOptions):
    data: str = "digits"
    data_root: str | None = None
    out: Path = Path("runs/stability")
    epochs: int | None = None
    """None: 80, as in the paper, and 20 on digits."""
    seeds: int = 3
    """Number of seeds; at large learning rates some diverge and others do not."""
    rates: tuple[float, ...] = RATES


def paper() -> "PaperTable":
    """Return the paper's accuracies, by the label of a run with that learning rate."""
    from lpbnn.report.runs import title

    numbers = [(method, rate, *PAPER[method][rate]) for method in PAPER for rate in RATES]
    diverged = "; ".join(
        f"{NAMES[method]} diverged in epoch {epoch} at rate {rate:g}"
        for method, rate, _, epoch in numbers
        if epoch is not None
    )
    source = f"Franchi et al. 2020, supplementary A.4: LeNet-5, CIFAR-10, 80 epochs; {diverged}"
    rows = {f"{title(method)} (lr={rate:g})": [accuracy] for method, rate, accuracy, _ in numbers}
    return paper_table(source, ["accuracy"], rows)


def settings(config: Config, method: str, rate: float, seed: int) -> RunConfig:
    epochs = config.epochs or (20 if config.data == "digits" else 80)
    return RunConfig(
        method=method,
        backbone="lenet",
        data=config.data,
        data_root=config.data_root,
        seed=seed,
        epochs=epochs,
        batch_size=128,
        optim=OptimConfig(lr=rate, weight_decay=1e-4),
        schedule=ScheduleConfig("constant"),
        evaluate=EvalConfig(ood=False, examples=0),
        validate_every=0,
        checkpoint_every=epochs,
    )


def configs(config: Config) -> dict[str, RunConfig]:
    return {
        f"{config.data}-{method}-lr{rate:g}-seed{seed}": settings(config, method, rate, seed)
        for seed in range(config.seeds)
        for rate in config.rates
        for method in NAMES
    }


def run(config: Config, console: Console) -> Path:
    from lpbnn.experiments._suite import show, work  # imports torch: not for --help
    from lpbnn.report import comparison

    runs = work(config, lambda: configs(config), console, NAMES)
    title = "Training stability"
    return show(runs, config.report, console, title, comparison, paper(), verdicts)


def verdicts(runs: Sequence["Run"]) -> list[str]:
    """Return a sentence per method: the learning rates at which it trains, diverges or stays at chance.

    A network that predicts at chance never diverges, and has learned nothing either.
    """
    found = []
    for method, name in NAMES.items():
        rates: dict[str, list[str]] = {"trains": [], "diverges": [], "stays at chance": []}
        own = [run for run in runs if run.method == method]
        for rate in sorted({float(run.settings["optim.lr"]) for run in own}):
            seeds = [run for run in own if run.settings["optim.lr"] == rate]
            if any(run.diverged is not None for run in seeds):
                outcome = "diverges"
            else:
                accuracy = fmean(run.at("test", "accuracy") for run in seeds)
                outcome = "trains" if accuracy > chance(seeds[0]) else "stays at chance"
            rates[outcome].append(f"{rate:g}")
        said = [f"{what} at {', '.join(at)}" for what, at in rates.items() if at]
        if said:
            found.append(f"{name} {'; it '.join(said)}.")
    return found


def chance(run: "Run") -> float:
    """Return the accuracy up to which a network has learned nothing: 1.5 times that of guessing."""
    return 1.5 / (run.data.num_classes or 1)
