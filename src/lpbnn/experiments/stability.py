"""Training stability: mean-field BNN against LP-BNN over five learning rates (supplementary A.4).

Command: ``lpbnn experiment stability`` trains LeNet-5 on digits in about a minute on two CPU cores;
``--data cifar10 --data-root DIR`` is the paper's setting (80 epochs, batch 128, weight decay 1e-4).
"Epoch div" is the epoch in which the training loss stopped being finite, counted from 1.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lpbnn.engine import EvalConfig, OptimConfig, RunConfig, ScheduleConfig
from lpbnn.experiments._suite import run_all

if TYPE_CHECKING:
    from lpbnn.report import PaperTable

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
class Config:
    data: str = "digits"
    data_root: str | None = None
    out: Path = Path("runs/stability")
    epochs: int | None = None
    """None: 80, as in the paper, and 20 on digits."""
    seed: int = 0
    rates: tuple[float, ...] = RATES
    jobs: int | None = None
    """Runs side by side; None: one per core, or one on a GPU."""
    ledger: Path | None = None
    """Keep every finished run's numbers here, one JSON each; what it holds is not trained again."""


def paper() -> "PaperTable":
    """The paper's accuracies as shares, by the label that a run of that rate has in a table."""
    from lpbnn.report import PaperTable
    from lpbnn.report.runs import title

    diverged = "; ".join(
        f"{NAMES[method]} diverged in epoch {epoch} at rate {rate:g}"
        for method, numbers in PAPER.items()
        for rate, (_, epoch) in numbers.items()
        if epoch is not None
    )
    return PaperTable(
        source=f"Franchi et al. 2020, supplementary A.4: LeNet-5, 80 epochs, one seed; {diverged}",
        rows={
            f"{title(method)} (lr={rate:g})": {"accuracy": accuracy / 100}
            for method, numbers in PAPER.items()
            for rate, (accuracy, _) in numbers.items()
        },
    )


def settings(config: Config, method: str, rate: float) -> RunConfig:
    epochs = config.epochs or (20 if config.data == "digits" else 80)
    return RunConfig(
        method=method,
        backbone="lenet",
        data=config.data,
        data_root=config.data_root,
        seed=config.seed,
        epochs=epochs,
        batch_size=128,
        optim=OptimConfig(lr=rate, weight_decay=1e-4),
        schedule=ScheduleConfig("constant"),
        evaluate=EvalConfig(ood=False, examples=0),
        validate_every=0,
        checkpoint_every=epochs,
    )


def run(config: Config, console: Console) -> None:
    from lpbnn.report.entries import content  # slow: not for --help

    configs = {
        f"{config.data}-{method}-lr{rate:g}-seed{config.seed}": settings(config, method, rate)
        for rate in config.rates
        for method in NAMES
    }
    found = run_all(configs, config.out, console, config.jobs, config.ledger)
    results = dict(zip(configs, (content(path)["results"] for path in found), strict=True))
    console.print(table(config, results))


def table(config: Config, results: dict[str, dict[str, Any]]) -> Table:
    """Accuracy and epoch of divergence, ours beside the paper's."""
    epochs = settings(config, "lpbnn", RATES[0]).epochs
    shown = Table(
        title=f"Stability, LeNet-5 on {config.data}, {epochs} epochs (the paper: CIFAR-10, 80 epochs)",
        caption="accuracy in %; div: epoch in which the loss stopped being finite, or - if it never did",
    )
    shown.add_column("learning rate", no_wrap=True)
    for rate in config.rates:
        shown.add_column(f"{rate:g}", justify="right")
    for method, name in NAMES.items():
        ours = [
            results[f"{config.data}-{method}-lr{rate:g}-seed{config.seed}"] for rate in config.rates
        ]
        paper = [PAPER[method].get(rate) for rate in config.rates]
        shown.add_row(f"{name}, accuracy", *(_accuracy(result) for result in ours))
        shown.add_row(
            "  the paper's", *("" if p is None else f"{p[0]:.2f}" for p in paper), style="dim"
        )
        shown.add_row(f"{name}, div", *(_epoch(result["train"]["diverged"]) for result in ours))
        shown.add_row(
            "  the paper's", *("" if p is None else _epoch(p[1]) for p in paper), style="dim"
        )
    return shown


def _accuracy(result: dict[str, Any]) -> str:
    test = result["test"]
    return "not finite" if test is None else f"{100 * test['accuracy']:.2f}"


def _epoch(epoch: int | None) -> str:
    return "-" if epoch is None else str(epoch)
