"""What the segmentation table is made of: the data that is there, the paper's variants, two schedules."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lpbnn.experiments._work import Work
from lpbnn.training import AugmentConfig, EvalConfig, OptimConfig, RunConfig, ScheduleConfig

Preset = Literal[
    "street-scenes",
    "camvid-anomaly",
    "camvid-anomaly-fast",
    "streethazards",
    "streethazards-fast",
    "bdd-anomaly",
    "bdd-anomaly-fast",
]
# Epochs. The paper's 25 are 32,000 to 42,000 steps of four pictures; short schedules are about 5,500.
EPOCHS: dict[str, int] = {
    "street-scenes": 10,
    "camvid-anomaly": 350,
    "camvid-anomaly-fast": 60,
    "streethazards": 25,
    "streethazards-fast": 4,
    "bdd-anomaly": 25,
    "bdd-anomaly-fast": 3,
}
# Side of the hole of cutout, which the paper has without telling its size: an eighth of the window.
CUTOUT = {"street-scenes": 0, "camvid-anomaly": 48}
SMALL = "deeplab-resnet18"  # with these options 0.3 M parameters
SMALL_OPTIONS: dict[str, Any] = {"width": 16, "channels": 32}


@dataclass(frozen=True)
class Variant:
    """A row of the table: a method, and what it asks of the network."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Any] = field(default_factory=dict)


DECODER = {"include": "decoder.*"}  # the encoder stays as it is and runs once per picture
VARIANTS = {
    "mcp": Variant("mcp"),
    "mcdropout": Variant("mcdropout", network={"dropout": 0.1}),
    "tradi": Variant("tradi"),
    "ensemble": Variant("ensemble"),
    "mimo": Variant("mimo"),
    "batchensemble": Variant("batchensemble", DECODER),
    "lpbnn": Variant("lpbnn", DECODER),
    "lpbnn+gn": Variant("lpbnn", DECODER, {"norm": "group", "standardise": True}),
}


@dataclass(frozen=True)
class StreetConfig(Work):
    preset: tuple[Preset, ...] = ()
    """One or more; -fast is a short schedule. None given: the full one of every set that data-root
    holds, or the generated street-scenes where no root is given."""
    data_root: str | None = None
    """Folder with streethazards/, bdd100k/ or camvid/, as published."""
    backbone: str | None = None
    """None: deeplab (ResNet-50), the paper's; of street-scenes a small deeplab-resnet18."""
    pretrained: str | None = None
    """File with the encoder's weights (safetensors or torch); it then learns at a tenth of the rate."""
    stride_in: Literal["3x3", "1x1"] = "3x3"
    """1x1 for weights of the original ResNet-50 (v1); torchvision's are v1.5."""
    methods: tuple[str, ...] = ()
    """Only these of mcp, mcdropout, tradi, ensemble, mimo, batchensemble, lpbnn, lpbnn+gn."""
    seeds: int = 1
    """The first so many: one seed of everything, then the next."""
    epochs: int | None = None
    lr: float | None = None
    """None: 0.1, the paper's; of a short schedule 0.05."""
    samples: int = 1
    """Draws of each member in the evaluation."""
    compile: bool | None = None
    """On a GPU, compile the step; None: for full schedules, which are long enough to pay for it."""


def chosen(config: StreetConfig) -> tuple[str, ...]:
    """The rows asked for; a wrong name is told before anything is trained."""
    from lpbnn.data import unknown  # imports torch: not for --help

    for name in config.methods:
        if name not in VARIANTS:
            raise unknown("row of table 2", name, VARIANTS)
    return config.methods or tuple(VARIANTS)


def presets(config: StreetConfig) -> tuple[str, ...]:
    """Those given, or what the data root holds."""
    if config.preset:
        return config.preset
    if config.data_root is None:
        return ("street-scenes",)
    finders = _finders()
    found, problems = [], []
    for name, find in finders.items():
        try:
            find(Path(config.data_root))
            found.append(name)
        except FileNotFoundError as error:
            problems.append(str(error))
    if not found:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise FileNotFoundError(
            f"{config.data_root} holds none of {', '.join(finders)}:{listed}\nWithout --data-root the "
            "generated street-scenes are taken."
        )
    return tuple(found)


def _finders() -> dict[str, Callable[[Path | None], object]]:
    """Return the functions that find the folders of the published data sets."""
    from lpbnn.data import bdd, camvid, streethazards  # imports torch: not for --help

    return {
        "streethazards": streethazards.locate_folder,
        "bdd-anomaly": bdd.locate_folder,
        "camvid-anomaly": camvid.locate_folder,
    }


def settings(config: StreetConfig, row: str, seed: int, preset: str) -> RunConfig:
    """One run of the table."""
    import torch  # slow: not for --help

    name, fast = preset.removesuffix("-fast"), preset.endswith("-fast")
    generated = name == "street-scenes"
    variant = VARIANTS[row]
    backbone = config.backbone or (SMALL if generated else "deeplab")
    network = {**(SMALL_OPTIONS if backbone == SMALL and generated else {}), **variant.network}
    options = dict(variant.options)
    parts: dict[str, float] = {}
    if config.pretrained is not None:
        network |= {"pretrained": config.pretrained, "stride_in": config.stride_in}
        parts = {"encoder.*": 0.1}  # the decoder is new, the encoder is not
        if row == "ensemble":
            options["reinit"] = "decoder"  # members share the weights they start from
    lr = config.lr or (0.05 if fast or generated else 0.1)
    epochs = config.epochs or EPOCHS[preset]
    run = RunConfig(
        method=variant.method,
        method_options=options,
        backbone=backbone,
        backbone_options=network,
        data=name,
        data_root=None if generated else config.data_root,
        seed=seed,
        epochs=epochs,
        batch_size=4,  # for the members of LP-BNN slices of one
        drop_last=True,
        optim=OptimConfig(lr=lr, weight_decay=1e-4, parts=parts),
        schedule=ScheduleConfig("poly", warmup=min(1.0, epochs / 10)),
        augment=AugmentConfig(cutout=CUTOUT.get(name, 64)),
        evaluate=EvalConfig(samples=config.samples),
        validate_every=0,
        # 320 MB and more than a second each, in which a GPU waits.
        checkpoint_every=max(1, epochs // (2 if fast else 5)),
    )
    if not torch.cuda.is_available():
        return run
    compiled = config.compile if config.compile is not None else not (fast or generated)
    return replace(run, precision="bf16", channels_last=True, compile=compiled)


def configs(config: StreetConfig) -> dict[str, RunConfig]:
    """Every run, by the name of its folder; one seed of everything first."""
    from lpbnn import backbones  # imports torch: not for --help

    if config.backbone is not None:
        backbones.load(config.backbone)
    rows, sets = chosen(config), presets(config)
    made = {}
    for seed in range(config.seeds):
        for preset in sets:
            for row in rows:
                run = settings(config, row, seed, preset)
                made[f"{preset}-{run.backbone}-{row}-{seed}"] = run
    return made
