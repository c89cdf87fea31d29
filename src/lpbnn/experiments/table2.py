"""Table 2: semantic segmentation of street scenes, and detection of objects never seen.

Command: ``lpbnn experiment table2`` trains all eight rows on generated scenes with a small DeepLabv3+, in
six minutes on two CPU cores. With ``--data-root DIR`` it uses the data sets in DIR (StreetHazards,
BDD-Anomaly, CamVid-Anomaly) with the paper's ResNet-50, batch of 4, polynomial schedule and 25 epochs.
``--preset camvid-anomaly-fast --pretrained resnet50.safetensors`` is 60 epochs of CamVid (5,460 steps).
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from lpbnn import registry
from lpbnn.experiments._suite_options import SuiteOptions, paper_table
from lpbnn.training import AugmentConfig, EvalConfig, OptimConfig, RunConfig, ScheduleConfig

if TYPE_CHECKING:
    from lpbnn.report import PaperTable
    from lpbnn.report.runs import Run

# mIoU in %, then detection of anomalous pixels per image, averaged; DeepLabv3+ ResNet-50, 25 epochs.
KEYS = ("miou", "pixels/auroc", "pixels/aupr", "pixels/fpr95", "ece")
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
    """A row of the table: a method, its options and those of the network."""

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
class Config(SuiteOptions):
    out: Path = Path("runs/table2")
    preset: tuple[Preset, ...] = ()
    """-fast: a short schedule. None given: the full schedule on every data set in data-root, or the
    generated street-scenes without a root."""
    data_root: str | None = None
    """Folder with streethazards/, bdd100k/ or camvid/, as published."""
    backbone: str | None = None
    """None: deeplab (ResNet-50), the paper's; for street-scenes a small deeplab-resnet18."""
    pretrained: str | None = None
    """File with weights of the encoder (safetensors or torch), which is then trained at a tenth of lr."""
    stride_in: Literal["3x3", "1x1"] = "3x3"
    """1x1: for weights of the original ResNet-50 (v1); torchvision's are v1.5."""
    methods: tuple[str, ...] = ()
    """Rows: mcp, mcdropout, tradi, ensemble, mimo, batchensemble, lpbnn, lpbnn+gn; none given: all."""
    seeds: int = 1
    """Number of seeds; the first seed of all is trained first."""
    epochs: int | None = None
    lr: float | None = None
    """None: 0.1, the paper's; with a short schedule 0.05."""
    samples: int = 1
    """Draws of each member in the evaluation."""
    compile: bool | None = None
    """Compile the training step on a GPU; None: with full schedules only."""


def chosen(config: Config) -> tuple[str, ...]:
    """Return the rows to train, or raise for an unknown name."""
    for name in config.methods:
        if name not in VARIANTS:
            raise registry.unknown("row of table 2", name, VARIANTS)
    return config.methods or tuple(VARIANTS)


def presets(config: Config) -> tuple[str, ...]:
    """Return the presets that were given, or those of the data sets in the root."""
    if config.preset:
        return config.preset
    if config.data_root is None:
        return ("street-scenes",)
    from lpbnn import data  # imports torch: not for --help

    found, problems = [], []
    for name in ("streethazards", "bdd-anomaly", "camvid-anomaly"):
        try:
            data.require_files(name, config.data_root)
            found.append(name)
        except FileNotFoundError as error:
            problems.append(f"\n  {error}")
    if not found:
        raise FileNotFoundError(
            f"{config.data_root} holds no data set of table 2:{''.join(problems)}\nWithout --data-root the "
            "generated street-scenes are used."
        )
    return tuple(found)


def settings(config: Config, row: str, seed: int, preset: str) -> RunConfig:
    """Return the settings of one run."""
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


def configs(config: Config) -> dict[str, RunConfig]:
    """Return the settings of every run by the name of its folder, the first seed of all first."""
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


def paper(data: str) -> "PaperTable":
    """Return the paper's rows; detection is per image."""
    return paper_table(SOURCE, KEYS, {_label(row): values for row, values in PAPER[data].items()})


def run(config: Config, console: Console) -> Path:
    from lpbnn.experiments._suite import show, work  # imports torch: not for --help
    from lpbnn.report import comparison

    rows = chosen(config)
    methods = {VARIANTS[row].method for row in rows}
    runs = work(config, lambda: configs(config), console, methods, [config.backbone])
    found = [one for one in runs if not config.methods or _row(one) in rows]
    order = list(VARIANTS)
    found.sort(key=lambda one: order.index(row) if (row := _row(one)) in order else len(order))
    return show(found, config.report, console, "Table 2", comparison)


def _row(run: "Run") -> str:
    """Return the name of the row of a run."""
    from lpbnn.report.runs import variant

    return run.method + variant(run.settings).lower()


def _label(row: str) -> str:
    """Return the title of a row."""
    from lpbnn.report.runs import title

    method, plus, what = row.partition("+")
    return f"{title(method)}+{what.upper()}" if plus else method
