"""What the CIFAR experiments share: the paper's settings, a short schedule, and the runs of a table."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lpbnn import methods
from lpbnn.experiments._work import Work
from lpbnn.training import AugmentConfig, EvalConfig, OptimConfig, RunConfig, ScheduleConfig

Preset = Literal["cifar10", "cifar10-fast", "cifar100", "cifar100-fast"]
# Methods that ask for their own learning rate and weight decay (SPEC, section 3).
OPTIM = {"duq": OptimConfig(lr=0.05, weight_decay=5e-4)}
BACKBONE = "wrn-16-4"  # where none is given


@dataclass(frozen=True)
class CifarConfig(Work):
    preset: tuple[Preset, ...] = ("cifar10-fast",)
    """One or more: the paper's 250 epochs, or a short schedule (-fast)."""
    data_root: str = "data"
    """Folder with cifar-10-batches-py (or cifar-100-python) and, for detection, svhn."""
    checksum: Literal["published", "any"] = "published"
    """"any" also takes copies of the files, re-packed or re-ordered; the data's description says so."""
    backbone: tuple[str, ...] = ()
    """One or more; wrn-28-10 is the paper's. None given: wrn-16-4, or with --from all that are there."""
    methods: tuple[str, ...] = ()
    """Only these; none given: all."""
    seeds: int = 3
    """The first so many: one seed of everything, then the next."""
    epochs: int | None = None
    compile: bool = True
    """On a GPU: a minute or more of compiling for each method and network, then faster steps."""
    corruptions: bool = True
    corruption_images: int | None = None
    """Only the first so many test images are corrupted; None: all."""
    corruption_root: str | None = None
    """A folder with the published CIFAR-C files, or one to keep generated ones in; for presets of
    several data sets, one that holds such a folder for each (cifar10, cifar100)."""
    frost: str | None = None
    """Folder of the published frost pictures; None: procedural frost."""


def settings(
    config: CifarConfig, method: str, seed: int, preset: Preset, backbone: str
) -> RunConfig:
    """One run of the table."""
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


def _corruption_root(config: CifarConfig, data: str) -> str | None:
    several = len({preset.partition("-")[0] for preset in config.preset}) > 1
    root = config.corruption_root
    return str(Path(root, data)) if root and several else root


def configs(config: CifarConfig) -> dict[str, RunConfig]:
    """Every run of the tables, by the name of its folder; one seed of everything first."""
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
