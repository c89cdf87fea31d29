"""Every method on scikit-learn's digits, LeNet-5, three seeds each, in three minutes on two CPU cores.

Command: ``lpbnn demo`` (or ``make demo``). Nothing is downloaded. Out-of-distribution: patches of
scikit-learn's two photographs. Prints the comparison and writes ``report.html``.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from lpbnn import methods
from lpbnn.experiments._suite_options import SuiteOptions
from lpbnn.training import EvalConfig, OptimConfig, RunConfig, ScheduleConfig


@dataclass(frozen=True)
class Config(SuiteOptions):
    out: Path = Path("runs/demo")
    seeds: int = 3
    methods: tuple[str, ...] = ()
    """Names of lpbnn ls; none given: all."""


OPTIM = OptimConfig(lr=0.05, weight_decay=1e-4, clip=3.0)
# The exponential evidence of EDL explodes at larger steps.
OWN_OPTIM = {"edl": replace(OPTIM, clip=1.0)}


def settings(method: str, seed: int) -> RunConfig:
    """Return the run of a method with its defaults; network, data and schedule are the same for all."""
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


def configs(config: Config) -> dict[str, RunConfig]:
    chosen = config.methods or tuple(methods.names())
    for name in chosen:
        methods.load(name)  # a wrong name is told before anything is trained
    return {
        f"{name}-{seed}": settings(name, seed) for seed in range(config.seeds) for name in chosen
    }


def run(config: Config, console: Console) -> Path:
    from lpbnn.experiments._suite import work  # imports torch: not for --help
    from lpbnn.report import comparison, print_table, tell_report

    if config.source is None:
        chosen = config.methods or tuple(methods.names())
        console.print(f"{len(chosen)} methods x {config.seeds} seeds on digits, into {config.out}")
    runs = work(config, lambda: configs(config), console, config.methods)
    print_table(comparison(runs), console)
    number = len({run.method for run in runs})
    title = f"{number} methods on digits"
    return tell_report(runs, config.report, console, title=title, lead="the whole report:")
