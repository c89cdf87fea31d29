"""Every method on scikit-learn's digits, LeNet-5, three seeds each, in three minutes on two CPU cores.

Command: ``lpbnn demo`` (or ``make demo``). Nothing is downloaded. Out-of-distribution: patches of
scikit-learn's two photographs. Prints the comparison and writes ``report.html``.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from lpbnn import methods
from lpbnn.engine import EvalConfig, OptimConfig, RunConfig, ScheduleConfig
from lpbnn.experiments._suite import run_all


@dataclass(frozen=True)
class Config:
    out: Path = Path("runs/demo")
    """Folder of the runs; finished ones are not trained again."""
    report: Path = Path("report.html")
    seeds: int = 3
    methods: tuple[str, ...] = ()
    """Only these; none given: all."""
    jobs: int | None = None
    """Runs side by side; None: one per core."""


OPTIM = OptimConfig(lr=0.05, weight_decay=1e-4, clip=3.0)
# The exponential evidence of EDL explodes at larger steps.
OWN_OPTIM = {"edl": replace(OPTIM, clip=1.0)}


def settings(method: str, seed: int) -> RunConfig:
    """The same network, data, optimizer and schedule for every method, but for the exception above."""
    return RunConfig(
        method=method,
        backbone="lenet",
        data="digits",
        seed=seed,
        epochs=12,
        batch_size=64,
        optim=OWN_OPTIM.get(method, OPTIM),
        schedule=ScheduleConfig("cosine", warmup=1),
        evaluate=EvalConfig(
            samples=4, corruptions=True, severities=(1, 3, 5), corruption_images=100
        ),
        validate_every=0,
        checkpoint_every=12,
        device="cpu",
    )


def run(config: Config, console: Console) -> Path:
    from lpbnn.report import comparison, print_table, write_report  # slow: not for --help

    chosen = config.methods or tuple(methods.names())
    for name in chosen:
        methods.load(name)  # a wrong name is told before anything is trained
    configs = {
        f"{name}-{seed}": settings(name, seed) for seed in range(config.seeds) for name in chosen
    }
    console.print(f"{len(chosen)} methods x {config.seeds} seeds on digits, into {config.out}")
    folders = run_all(configs, config.out, console, config.jobs)
    print_table(comparison(folders), console)
    written = write_report(folders, config.report, title=f"{len(chosen)} methods on digits")
    console.print(f"the whole report: {written}")
    return written
