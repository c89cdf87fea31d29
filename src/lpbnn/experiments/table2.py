"""Table 2: semantic segmentation of street scenes, and detection of objects never seen.

Command: ``lpbnn experiment table2`` trains all eight rows on generated scenes with a small DeepLabv3+, in
six minutes on two CPU cores. With ``--data-root DIR`` it takes what DIR holds of StreetHazards,
BDD-Anomaly and CamVid-Anomaly, with the paper's ResNet-50, batch of 4, polynomial schedule and 25 epochs;
``--preset camvid-anomaly-fast --pretrained resnet50.safetensors`` is 60 epochs of CamVid (5,460 steps),
meant for a minute or two a run on one H200. ``--ledger kept/camvid-anomaly`` keeps each run's numbers
the moment it ends, ``--from kept/camvid-anomaly`` shows what is kept. The report has the pictures.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from lpbnn.experiments._streets import VARIANTS, StreetConfig, chosen, configs

if TYPE_CHECKING:
    from lpbnn.report import PaperTable
    from lpbnn.report.runs import Run

# mIoU in %, then detection of anomalous pixels per image, averaged; DeepLabv3+ ResNet-50, 25 epochs.
KEYS = ("miou", "auroc", "aupr", "fpr95", "ece")
PAPER = {
    "streethazards": {
        "mcp": (53.90, 0.8660, 0.0691, 0.3574, 0.0652),
        "tradi": (52.46, 0.8739, 0.0693, 0.3826, 0.0633),
        "ensemble": (55.59, 0.8794, 0.0832, 0.3029, 0.0533),
        "mimo": (55.44, 0.8738, 0.0690, 0.3266, 0.0557),
        "batchensemble": (56.16, 0.8817, 0.0759, 0.3285, 0.0609),
        "lpbnn": (54.50, 0.8833, 0.0718, 0.3261, 0.0520),
        "lpbnn+gn": (56.12, 0.8908, 0.0742, 0.2999, 0.0593),
    },
    "bdd-anomaly": {
        "mcp": (47.63, 0.8515, 0.0450, 0.2878, 0.1768),
        "tradi": (44.26, 0.8480, 0.0454, 0.3687, 0.1661),
        "ensemble": (51.07, 0.8480, 0.0524, 0.2855, 0.1419),
        "mimo": (47.20, 0.8438, 0.0432, 0.3524, 0.1633),
        "batchensemble": (48.09, 0.8427, 0.0449, 0.3017, 0.1690),
        "lpbnn": (49.01, 0.8532, 0.0452, 0.2947, 0.1716),
        "lpbnn+gn": (47.15, 0.8553, 0.0577, 0.2866, 0.1623),
    },
}
SOURCE = (
    "Franchi et al. 2020, Table 2: DeepLabv3+ with a ResNet-50, batch 4, 25 epochs, J = 4, by the softmax "
    "score; AUROC, AUPR and FPR95 for each image with anomalous pixels, then averaged (the protocol of "
    "anomaly-seg, which counts void pixels as in-distribution)"
)
TITLES = {"streethazards": "StreetHazards", "bdd-anomaly": "BDD-Anomaly"}


@dataclass(frozen=True)
class Config(StreetConfig):
    out: Path = Path("runs/table2")


def paper(data: str) -> "PaperTable":
    """The paper's rows, in the keys of our metrics; detection is per image."""
    from lpbnn.report import PaperTable

    return PaperTable(
        source=SOURCE,
        rows={
            _label(row): {
                key if key in ("miou", "ece") else f"pixels/{key}": value / 100
                if key == "miou"
                else value
                for key, value in zip(KEYS, values, strict=True)
            }
            for row, values in PAPER[data].items()
        },
    )


def run(config: Config, console: Console) -> Path:
    from lpbnn.experiments._suite import show, work  # imports torch: not for --help
    from lpbnn.report import comparison

    rows = chosen(config)
    methods = {VARIANTS[row].method for row in rows}
    runs = work(config, lambda: configs(config), console, methods, [config.backbone])
    found = [one for one in runs if not config.methods or _row(one) in rows]
    order = list(VARIANTS)
    found.sort(key=lambda one: order.index(row) if (row := _row(one)) in order else len(order))
    written = show(found, config.report, console, "Table 2", comparison)
    if not any(one.data.name in PAPER for one in found):
        console.print(_published())
    return written


def _row(run: "Run") -> str:
    """The name of the row a run belongs to."""
    from lpbnn.report.runs import variant

    return run.method + variant(run.settings).lower()


def _label(row: str) -> str:
    """The method, or, of a variant, what its row is called."""
    from lpbnn.report.runs import title

    method, plus, what = row.partition("+")
    return f"{title(method)}+{what.upper()}" if plus else method


def _published() -> Table:
    """The paper's own table, for readers whose data it does not have."""
    from lpbnn.metrics.info import METRICS
    from lpbnn.report.runs import title

    table = Table(
        title="The paper's numbers, on other data: directions, not values, compare with ours",
        caption=SOURCE,
        box=box.SIMPLE_HEAD,  # with one of its own around every cell, it needs more than 80 columns
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("data")
    table.add_column("method", no_wrap=True)
    for key in KEYS:
        info = METRICS[key]
        table.add_column(
            f"{info.title} {info.unit} {info.arrow}".replace("  ", " "), justify="right"
        )
    for data, rows in PAPER.items():
        for number, (row, values) in enumerate(rows.items()):
            name = _label(row) if "+" in row else title(row)
            numbers = (
                METRICS[key].format(value / 100 if key == "miou" else value)
                for key, value in zip(KEYS, values, strict=True)
            )
            last = number == len(rows) - 1
            table.add_row(TITLES[data] if number == 0 else "", name, *numbers, end_section=last)
    return table
