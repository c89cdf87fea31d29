"""Table 1: accuracy, calibration, detection of SVHN and corruption on CIFAR-10 and CIFAR-100.

Command: ``lpbnn experiment table1 --data-root DIR``; on one H200 a short-schedule WRN-16-4 run takes
minutes. ``--preset cifar10 --backbone wrn-28-10`` is the paper's setting (250 epochs); several presets and
backbones may be given, and one seed of everything is made first. ``--ledger kept/cifar10-fast`` keeps
each run's numbers the moment it ends, ``--from kept/cifar10-fast`` shows what is kept, and
``--from results/records.tar.xz/cifar10-fast`` the published runs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lpbnn.experiments._cifar import CifarConfig, configs

if TYPE_CHECKING:
    from lpbnn.report import PaperTable

KEYS_10 = ("accuracy", "auroc", "aupr", "fpr95", "ece", "ca", "ce")
KEYS_100 = ("accuracy", "ece", "ca", "ce")
# WRN-28-10, 250 epochs, cutout where the paper used it, three seeds.
CIFAR10 = {
    "mcp": (96.33, 0.9600, 0.9767, 0.115, 0.0207, 32.98, 0.6167),
    "mcdropout": (96.50, 0.9273, 0.9603, 0.242, 0.0117, 32.35, 0.6403),
    "duq": (87.48, 0.7083, 0.8114, 0.698, 0.3983, 64.89, 0.2542),
    "edl": (85.73, 0.9002, 0.9198, 0.247, 0.0904, 59.54, 0.3412),
    "mimo": (94.96, 0.9387, 0.9648, 0.175, 0.0300, 69.99, 0.1846),
    "ensemble": (96.74, 0.9803, 0.9896, 0.071, 0.0093, 68.75, 0.1414),
    "batchensemble": (96.48, 0.9540, 0.9731, 0.132, 0.0167, 71.67, 0.1928),
    "lpbnn": (95.02, 0.9691, 0.9836, 0.103, 0.0094, 69.51, 0.1197),
}
CIFAR100 = {
    "mcp": (80.19, 0.1228, 19.33, 0.7844),
    "mcdropout": (77.92, 0.0672, 27.66, 0.5909),
    "mimo": (78.69, 0.1018, 47.35, 0.2832),
    "ensemble": (83.01, 0.0673, 47.35, 0.2023),
    "batchensemble": (81.27, 0.0912, 47.44, 0.2909),
    "lpbnn": (79.3, 0.0702, 48.40, 0.2224),
}
SOURCE = (
    "Franchi et al. 2020, Table 1 (diversity: supplementary A.5): WRN-28-10, 250 epochs, three seeds, "
    "cutout; out-of-distribution is the SVHN test set, by the softmax score (which class is positive is "
    "not said; AUPR above AUROC fits SVHN, as here); ECE of 15 bins; cA and cE are means over the official "
    "CIFAR-C sets, and cA of MCP and MC dropout is far below what others publish (76 %)"
)
PERCENT = {"accuracy", "ca"}


@dataclass(frozen=True)
class Config(CifarConfig):
    pass


def paper(preset: str) -> "PaperTable":
    """The paper's rows as shares, in the keys of our metrics."""
    from lpbnn.report import PaperTable

    keys, rows = (KEYS_100, CIFAR100) if preset.startswith("cifar100") else (KEYS_10, CIFAR10)
    return PaperTable(
        source=SOURCE,
        rows={
            method: {
                key: value / 100 if key in PERCENT else value
                for key, value in zip(keys, values, strict=True)
            }
            for method, values in rows.items()
        },
    )


def run(config: Config, console: Console) -> Path:
    from lpbnn.experiments._suite import show, work  # imports torch: not for --help
    from lpbnn.report import comparison

    runs = work(config, lambda: configs(config), console, config.methods, config.backbone)
    return show(runs, config.report, console, "Table 1", comparison)
