"""Everything that decides a run, typed: the command line shows it, the run folder keeps it.

Two runs with equal configs on the same machine end with equal weights. Options of the method, the
backbone and the data set are theirs to check, when they are built; here they are kept as given.
"""

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lpbnn.training.codec import from_data, settle, to_data

if TYPE_CHECKING:  # lpbnn.data imports torch, and --help needs this file
    from lpbnn.data import Augment

Severity: TypeAlias = Literal[1, 2, 3, 4, 5]
Precision: TypeAlias = Literal["32", "bf16", "fp16"]

# What may differ between the seeds of one row: where and how fast a run went, not what it is.
INCIDENTAL = {
    "seed",
    *("data_root", "data_options.checksum"),
    *("device", "devices", "nodes", "strategy", "compile", "memory_budget", "graph"),
    *("progress", "tensorboard", "checkpoint_every", "validate_every"),
    *("evaluate.batch_size", "evaluate.chunk", "evaluate.examples"),
    *("evaluate.corruption_root", "evaluate.frost"),  # the results say which they were
    "method_options.num_data",
}
# Settings that may differ when a run is resumed: where and how fast it runs, what is shown and measured.
FREE = (
    "data_root",
    "device",
    "devices",
    "nodes",
    "strategy",
    "compile",
    "memory_budget",
    "graph",
    "checkpoint_every",
    "progress",
    "tensorboard",
    "evaluate",
)


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer; weight decay is for the slow weights, the method says which those are."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    """sgd's momentum, and adamw's first beta."""
    nesterov: bool = True
    weight_decay: float = 1e-4
    clip: float | None = None
    """Largest norm of the gradient; None does not clip."""
    parts: dict[str, float] = field(default_factory=dict)
    """Factors of the rate for parts of the network, by path: "encoder.*" 0.1 for a pretrained one."""

    def __post_init__(self) -> None:
        settle(self)
        for part, rate in self.parts.items():
            _require(rate > 0, f"optim.parts[{part!r}] is {rate}", "a factor above 0")
        _require(self.lr > 0, f"optim.lr is {self.lr}", "a number above 0")
        _require(0 <= self.momentum < 1, f"optim.momentum is {self.momentum}", "0 <= momentum < 1")
        decay = self.weight_decay
        _require(decay >= 0, f"optim.weight_decay is {decay}", "a number of at least 0")
        clip = self.clip
        _require(clip is None or clip > 0, f"optim.clip is {clip}", "a number above 0, or None")
        if self.name == "sgd" and self.nesterov:
            _require(
                self.momentum > 0, "optim.nesterov is on with momentum 0", "a momentum above 0"
            )


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate along training, as a factor of ``optim.lr``."""

    name: Literal["constant", "step", "cosine", "poly"] = "cosine"
    warmup: float = 0.0
    """Epochs over which the rate first grows, linearly, to its full value."""
    milestones: tuple[int, ...] = ()
    """step: the rate is multiplied by gamma at the start of each of these epochs, from 0."""
    gamma: float = 0.1
    power: float = 0.9
    """poly: (1 - progress) ** power."""

    def __post_init__(self) -> None:
        settle(self)
        _require(self.warmup >= 0, f"schedule.warmup is {self.warmup}", "epochs, at least 0")
        _require(self.gamma > 0, f"schedule.gamma is {self.gamma}", "a number above 0")
        _require(self.power > 0, f"schedule.power is {self.power}", "a number above 0")
        rising = list(self.milestones) == sorted({m for m in self.milestones if m > 0})
        given = f"schedule.milestones is {self.milestones}"
        _require(rising, given, "epochs above 0, in rising order, such as 80 160 200")
        if self.name == "step":
            _require(bool(self.milestones), given, "for 'step' at least one epoch, such as 80")


@dataclass(frozen=True)
class AugmentConfig:
    """What training does to the images; None is what the data set asks for, 0 or False is off."""

    pad: int | None = None
    flip: bool | None = None
    cutout: int | None = None
    padding: Literal["zero", "reflect"] = "zero"
    scale: tuple[float, ...] | None = None
    """Smallest and largest factor by which a picture is resized; 1 1 is off."""
    crop: tuple[int, ...] | None = None
    """segmentation: height and width of the window that is cut out; 0 0 is the picture's own."""
    colour: float | None = None
    """Brightness, contrast and saturation change by a factor of up to 1 +- this."""

    def __post_init__(self) -> None:
        settle(self)
        for name in ("pad", "cutout"):
            value = getattr(self, name)
            _require(value is None or value >= 0, f"augment.{name} is {value}", "pixels, 0 or more")
        scale, crop, colour = self.scale, self.crop, self.colour
        factors = scale is None or (len(scale) == 2 and 0 < scale[0] <= scale[1])
        _require(factors, f"augment.scale is {scale}", "two factors, such as 0.5 2")
        window = crop is None or (len(crop) == 2 and min(crop) >= 0)
        _require(window, f"augment.crop is {crop}", "height and width, such as 360 480")
        strength = colour is None or 0 <= colour < 1
        _require(strength, f"augment.colour is {colour}", "0 <= colour < 1")

    def over(self, hints: "Augment") -> "Augment":
        """These settings, and the data set's hints where they are None.

        >>> from lpbnn.data import Augment
        >>> AugmentConfig(cutout=0).over(Augment(pad=4, flip=True, cutout=16))
        Augment(pad=4, flip=True, cutout=0, scale=(1.0, 1.0), crop=(0, 0), colour=0.0)
        """
        chosen = {name: getattr(self, name) for name in hints._fields}
        return hints._replace(**{name: v for name, v in chosen.items() if v is not None})


@dataclass(frozen=True)
class EvalConfig:
    """What is measured after training."""

    samples: int = 1
    """Draws of each member; deterministic methods ignore it."""
    batch_size: int = 256
    """Examples at once; of large pictures (street scenes) fewer are taken."""
    chunk: int | None = None
    """At most so many rows (member, example) in the network at once: bounds the memory."""
    ood: bool = True
    corruptions: bool = False
    """The 15 corruptions; image classification only."""
    severities: tuple[Severity, ...] = (1, 2, 3, 4, 5)
    corruption_root: str | None = None
    """A folder of published CIFAR-C files, or one in which generated sets are kept; None: neither."""
    corruption_images: int | None = None
    """Only the first so many test images are corrupted; None: all."""
    frost: str | None = None
    """The folder of the published frost pictures; None makes procedural frost."""
    examples: int = 4
    """Images of each kind whose members' answers are kept for the report."""

    def __post_init__(self) -> None:
        settle(self)
        for name in ("samples", "batch_size", "chunk", "corruption_images"):
            value = getattr(self, name)
            given = f"evaluate.{name} is {value}"
            _require(value is None or value >= 1, given, "an integer of at least 1")
        _require(self.examples >= 0, f"evaluate.examples is {self.examples}", "0 or more")
        levels = self.severities
        once = len(set(levels)) == len(levels) > 0
        _require(once, f"evaluate.severities is {levels}", "one or more of 1 2 3 4 5, each once")


@dataclass(frozen=True)
class RunConfig:
    """One run: what is trained, on what, how, and what is measured.

    >>> config = RunConfig(method="lpbnn", method_options={"members": 8}, epochs=3)
    >>> RunConfig.from_json(config.to_json()) == config
    True
    >>> RunConfig.from_data({"optim": {"learning_rate": 0.1}})
    Traceback (most recent call last):
    ValueError: optim has no field 'learning_rate'. It has: name, lr, momentum, nesterov, ...
    """

    method: str = "lpbnn"
    """One of those that ``lpbnn ls`` lists."""
    method_options: dict[str, Any] = field(default_factory=dict)
    """The method's own options (its ``Config``); ``num_data`` is filled in."""
    backbone: str = "small-cnn"
    """The network; ``mlp`` for vectors (diabetes, cubic)."""
    backbone_options: dict[str, Any] = field(default_factory=dict)
    data: str = "digits"
    """The data set; digits, diabetes and cubic need no files, folder has pictures of your own,
    MODULE:NAME is a file of your own."""
    data_root: str | None = None
    """The folder that holds the files of data sets that have some."""
    data_options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    epochs: int = 15
    batch_size: int = 128
    """Examples per optimizer step, over all processes together."""
    drop_last: bool = False
    """Leave out the last batch of an epoch where it is not full."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    class_weights: Literal["none", "median", "log"] = "none"
    """In the training loss, from the training labels: by median frequency, or 1 / log(1.02 + share)."""
    evaluate: EvalConfig = field(default_factory=EvalConfig)
    precision: Precision = "32"
    compile: bool = False
    """Compile the training step with torch.compile."""
    memory_budget: float = 1.0
    """Share of the activations that a compiled step keeps for its backward pass; the rest is recomputed."""
    graph: bool = True
    """On one GPU, record the training step as a CUDA graph and replay it."""
    channels_last: bool = False
    """Keep images with the channels last in memory: faster convolutions on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    devices: int = 1
    """Processes on each node, one device each; under torchrun its own count is taken."""
    nodes: int = 1
    strategy: Literal["auto", "ddp", "ddp_find_unused_parameters_true"] = "auto"
    """Fabric's strategy for several processes; auto is ddp."""
    validate_every: int = 1
    """Epochs between looks at the validation part; 0 never looks."""
    checkpoint_every: int = 1
    """Epochs between checkpoints; the last epoch always leaves one."""
    progress: bool = True
    tensorboard: bool = False

    def __post_init__(self) -> None:
        settle(self)
        for name in ("epochs", "batch_size", "devices", "nodes", "checkpoint_every"):
            value = getattr(self, name)
            _require(value >= 1, f"{name} is {value}", "an integer of at least 1")
        for name in ("seed", "validate_every"):
            value = getattr(self, name)
            _require(value >= 0, f"{name} is {value}", "an integer of at least 0")
        budget = self.memory_budget
        given = f"memory_budget is {budget}"
        _require(0 <= budget <= 1, given, "a share of the activations, from 0 to 1")
        fix = "a compiled step. Fix: add --compile (compile=True)"
        _require(budget == 1 or self.compile, f"{given} without compile", fix)
        warmup = self.schedule.warmup
        given = f"schedule.warmup is {warmup} of {self.epochs} epochs"
        _require(warmup == 0 or warmup < self.epochs, given, "fewer than there are")

    def to_data(self) -> dict[str, Any]:
        """As plain dictionaries and lists."""
        return to_data(self)

    @classmethod
    def from_data(cls, data: Any) -> "RunConfig":
        """From plain dictionaries; an unknown key is answered with the nearest name."""
        return from_data(cls, data)

    def to_json(self) -> str:
        """As indented JSON."""
        return json.dumps(self.to_data(), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "RunConfig":
        """What ``to_json`` wrote."""
        return cls.from_data(json.loads(text))


def _require(ok: bool, given: str, expected: str) -> None:
    if not ok:
        raise ValueError(f"{given}; expected {expected}.")
