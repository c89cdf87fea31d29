"""Table 1: accuracy, calibration, detection of SVHN and corruption on CIFAR-10 and CIFAR-100.

Command: ``lpbnn experiment table1 --data-root DIR``; on one H200 a short-schedule WRN-16-4 run takes
minutes. ``--preset cifar10 --backbone wrn-28-10`` is the paper's setting (250 epochs). Several presets and
backbones may be given; the first seed of all is trained first. ``--from runs/published/cifar10-fast``
shows the published runs.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from lpbnn import methods
from lpbnn.experiments._suite_options import SuiteOptions, paper_table
from lpbnn.training import AugmentConfig, EvalConfig, OptimConfig, RunConfig, ScheduleConfig

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


Preset = Literal["cifar10", "cifar10-fast", "cifar100", "cifar100-fast"]
# Methods that ask for their own learning rate and weight decay (SPEC, section 3).
OPTIM = {"duq": OptimConfig(lr=0.05, weight_decay=5e-4)}
BACKBONE = "wrn-16-4"  # where none is given


@dataclass(frozen=True)
class Config(SuiteOptions):
    preset: tuple[Preset, ...] = ("cifar10-fast",)
    """The paper's 250 epochs, or a short schedule (-fast)."""
    data_root: str = "data"
    """Folder with cifar-10-batches-py (or cifar-100-python) and, for detection, svhn."""
    checksum: Literal["published", "any"] = "published"
    """any: accept re-packed or re-ordered copies of the files; the description of the data says so."""
    backbone: tuple[str, ...] = ()
    """wrn-28-10 is the paper's. None given: wrn-16-4, or with --from all."""
    methods: tuple[str, ...] = ()
    """Names of lpbnn ls; none given: all."""
    seeds: int = 3
    """Number of seeds; the first seed of all is trained first."""
    epochs: int | None = None
    compile: bool = True
    """Compile the training step on a GPU, which takes a minute or more per method and network."""
    corruptions: bool = True
    corruption_images: int | None = None
    """Number of test images to corrupt; None: all."""
    corruption_root: str | None = None
    """Folder of the published CIFAR-10-C or CIFAR-100-C files; with presets of both data sets, of folders
    cifar10 and cifar100. None generates the sets."""
    frost: str | None = None
    """Folder of the published frost images; None: procedural frost."""


def settings(config: Config, method: str, seed: int, preset: Preset, backbone: str) -> RunConfig:
    """Return the settings of one run."""
    import torch  # slow: not for --help

    data, _, fast = preset.partition("-")
    epochs = config.epochs or (30 if fast else 250)
    milestones = sorted({max(1, round(share * epochs)) for share in (0.32, 0.64, 0.8)})
    run = RunConfig(
        method=method,
        backbone=backbone,
        data=data,
        data_root=config.data_root,
        data_options={} if config.checksum == "published" else {"checksum": config.checksum},
        seed=seed,
        epochs=epochs,
        batch_size=128,
        drop_last=True,
        optim=OPTIM.get(method, OptimConfig(lr=0.1, weight_decay=5e-4 if fast else 1e-4)),
        schedule=(
            ScheduleConfig("cosine", warmup=min(2.0, epochs / 4))
            if fast
            else ScheduleConfig("step", milestones=tuple(milestones))
        ),
        augment=AugmentConfig(cutout=16 if data == "cifar10" else 8),
        evaluate=EvalConfig(
            batch_size=1024,
            score="confidence",  # the paper's
            corruptions=config.corruptions,
            corruption_images=config.corruption_images,
            corruption_root=_corruption_root(config, data),
            frost=config.frost,
        ),
        validate_every=0,
        checkpoint_every=10,
    )
    if not torch.cuda.is_available():
        return run
    return replace(run, precision="bf16", compile=config.compile, channels_last=True)


def _corruption_root(config: Config, data: str) -> str | None:
    several = len({preset.partition("-")[0] for preset in config.preset}) > 1
    root = config.corruption_root
    return str(Path(root, data)) if root and several else root


def configs(config: Config) -> dict[str, RunConfig]:
    """Return the settings of every run by the name of its folder, the first seed of all first."""
    from lpbnn import backbones  # imports torch: not for --help

    chosen = config.methods or tuple(methods.names())
    for name in chosen:
        methods.load(name)
    networks = config.backbone or (BACKBONE,)
    for name in networks:
        backbones.load(name)
    return {
        f"{preset}-{backbone}-{name}-{seed}": settings(config, name, seed, preset, backbone)
        for seed in range(config.seeds)
        for preset in config.preset
        for backbone in networks
        for name in chosen
    }


def paper(preset: str) -> "PaperTable":
    """Return the paper's rows."""
    if preset.startswith("cifar100"):
        return paper_table(SOURCE, KEYS_100, CIFAR100)
    return paper_table(SOURCE, KEYS_10, CIFAR10)


def run(config: Config, console: Console) -> Path:
    from lpbnn.experiments._suite import show, work  # imports torch: not for --help
    from lpbnn.report import comparison

    runs = work(config, lambda: configs(config), console, config.methods, config.backbone)
    return show(runs, config.report, console, "Table 1", comparison)
