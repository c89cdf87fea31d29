"""The trade-off between accuracy, calibration and detection over a method's settings, on CIFAR.

Command: ``lpbnn experiment tradeoff --data-root DIR`` trains LP-BNN with less and more noise, MCP beside
it, on table1's short schedule; the report's charts put each row's ECE, AUROC and cE against its accuracy.
``--variants log_variance=-1,fast_lr=0.3 variant=paper`` are settings to compare instead. They are measured
on training images that are held out, so that one may choose by them and leave the test set to the one that
was chosen; ``--hold-out 0`` measures on the test set.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from lpbnn.experiments import _cifar
from lpbnn.training import RunConfig
from lpbnn.training.options import with_options


@dataclass(frozen=True)
class Config(_cifar.CifarConfig):
    methods: tuple[str, ...] = ("lpbnn",)
    """What the variants are of."""
    variants: tuple[str, ...] = tuple(f"log_variance={value}" for value in (-4, -2, -1.5, -1, 0))
    """Settings of the method, a row for each; several of one row are joined by commas."""
    beside: tuple[str, ...] = ("mcp",)
    """Methods to compare with, as they come."""
    hold_out: int = 5000
    """So many training images are held out and measured on instead of the test set; 0: the test set."""
    seeds: int = 1
    out: Path = Path("runs/tradeoff")


def configs(config: Config) -> dict[str, RunConfig]:
    """Every run by the name of its folder; what is asked for is checked before any is made."""
    plain = _cifar.configs(replace(config, methods=(*config.beside, *config.methods)))
    found: dict[str, RunConfig] = {}
    for name, run in plain.items():
        stem, _, seed = name.rpartition("-")
        if run.method in config.beside:
            found[name] = run
        if run.method in config.methods:
            found |= {
                f"{stem}-{variant.replace('/', '_')}-{seed}": _varied(run, variant)
                for variant in config.variants
            }
    images = config.hold_out
    return _distinct(
        {name: _held_out(run, images) if images else run for name, run in found.items()}
    )


def _varied(run: RunConfig, variant: str) -> RunConfig:
    """The run with a row's settings."""
    # A comma within a value, as in include=['conv1','layer1'], is followed by no NAME=.
    return with_options(run, tuple(re.split(r", *(?=[\w.]+=|$)", variant)))


def _distinct(runs: Mapping[str, RunConfig]) -> dict[str, RunConfig]:
    """Each run once: a variant may be written in two ways, or be what the method is by default."""
    from lpbnn.training.build import resolved  # imports torch: not for --help

    found: dict[str, RunConfig] = {}
    known: list[RunConfig] = []
    for name, run in runs.items():
        whole = resolved(run)  # the method itself says which options it does not know
        if whole not in known:
            known.append(whole)
            found[name] = run
    return found


def _held_out(run: RunConfig, images: int) -> RunConfig:
    """The run, measured on training images; what lies in a folder of corruptions is of the test set."""
    root = run.evaluate.corruption_root
    own = root and str(Path(root, f"held-out-{images}"))
    return replace(
        run,
        data_options={**run.data_options, "val": images, "measure": "val"},
        evaluate=replace(run.evaluate, corruption_root=own),
    )


def run(config: Config, console: Console) -> Path:
    from lpbnn.experiments._suite import show, work  # imports torch: not for --help
    from lpbnn.report import comparison

    shown = (*config.beside, *config.methods)
    runs = work(config, lambda: configs(config), console, shown, config.backbone)
    return show(runs, config.report, console, "Trade-off", comparison)
