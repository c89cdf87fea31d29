"""Pictures of small networks, then every method on scikit-learn's digits, in three minutes on two CPU cores.

Command: ``lpbnn demo`` (or ``make demo``). Nothing is downloaded. The pictures are in ``report.html`` after
half a minute. Then come LeNet-5 on digits, three seeds of every method with its default options and four
predictions for an answer, where patches of scikit-learn's two photographs are out-of-distribution, and the
cost of four members on a residual network. Prints the comparison, three sentences and the page's link.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from lpbnn import methods
from lpbnn.experiments._suite_options import SuiteOptions
from lpbnn.training import EvalConfig, OptimConfig, RunConfig, ScheduleConfig

if TYPE_CHECKING:
    from lpbnn.report.page import Picture


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
        evaluate=EvalConfig(  # one draw of four members: as many predictions as an ensemble has
            samples=1, corruptions=True, severities=(1, 3, 5), corruption_images=100
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


def pictures(jobs: int | None = None) -> list["Picture"]:
    """Make the pictures that open the page, side by side in processes of one thread each."""
    from lpbnn.experiments import _demo_pictures as made
    from lpbnn.experiments._suite import in_processes

    street, moons, regression = in_processes(
        [made.street_scene, made.two_moons, made.regression], jobs
    )
    return [moons, regression, street]


def measured_cost() -> tuple["Picture", str]:
    """Return the picture of what members cost on a larger network, and the verdict's sentence."""
    from lpbnn.experiments._demo_pictures import cost

    return cost()


def run(config: Config, console: Console) -> Path:
    from lpbnn.experiments._suite import work  # imports torch: not for --help
    from lpbnn.report import print_table, write_report
    from lpbnn.report.runs import grouped
    from lpbnn.report.tables import compare
    from lpbnn.report.verdict import verdict

    def tell(lead: str, page: Path) -> None:
        link = escape(page.resolve().as_uri())
        console.print(f"{lead}: {link}", soft_wrap=True, highlight=False)

    train, opening, cost = config.source is None, [], ""
    if train:
        chosen = config.methods or tuple(methods.names())
        opening = pictures(config.jobs)
        title = "Uncertainty in pictures"
        tell("the pictures", write_report([], config.report, title, pictures=opening))
        console.print(f"{len(chosen)} methods x {config.seeds} seeds on digits, into {config.out}")
    runs = work(config, lambda: configs(config), console, config.methods)
    if train:
        price, cost = measured_cost()
        opening.append(price)
    groups = grouped(runs)
    table = compare(groups)
    print_table(table, console)
    for sentence in verdict(groups, table, cost):
        console.print(sentence, highlight=False)
    title = f"{len({run.method for run in runs})} methods on digits"
    written = write_report(runs, config.report, title, pictures=opening, cost=cost)
    tell("the whole report", written)
    return written
