"""Everything that decides a run, typed: the command line shows it, the run folder keeps it.

Two runs with equal configs on the same machine end with equal weights. Options of the method, the
backbone and the data set are theirs to check, when they are built; here they are kept as given.

The dataclasses call ``validate(self)`` when they are made, so a config built in Python and one read from
a file obey the same rules and compare equal: a list becomes a tuple, 1 becomes 1.0.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, get_type_hints

from annotated_types import Ge, Gt, Interval
from tyro.conf import Suppress  # options have types of their own in the command

from lpbnn.registry import did_you_mean
from lpbnn.source import as_tuples

if TYPE_CHECKING:  # lpbnn ls needs this file, and neither torch nor pydantic
    from pydantic import TypeAdapter, ValidationError

    from lpbnn.data import Augment

T = TypeVar("T")
PositiveInt: TypeAlias = Annotated[int, Gt(0)]
PositiveFloat: TypeAlias = Annotated[float, Gt(0)]
NonNegativeInt: TypeAlias = Annotated[int, Ge(0)]
NonNegativeFloat: TypeAlias = Annotated[float, Ge(0)]
Severity: TypeAlias = Literal[1, 2, 3, 4, 5]
Precision: TypeAlias = Literal["32", "bf16", "fp16"]
OODScore: TypeAlias = Literal["entropy", "confidence"]

# Where and how fast a run goes, and what is shown of it.
_CIRCUMSTANCES = {
    *("data_root", "device", "devices", "compile", "memory_budget", "graph"),
    *("checkpoint_every", "progress", "tensorboard"),
}
# Settings, by path, in which two runs may differ that count as the same for a purpose.
MAY_DIFFER: dict[str, set[str]] = {
    # a stopped run, and the run that goes on with it
    "resume": {*_CIRCUMSTANCES, "evaluate"},
    # the runs of one row of a table, and the members of an ensemble
    "seeds": {
        *_CIRCUMSTANCES,
        *("seed", "validate_every", "data_options.checksum", "method_options.num_data"),
        *("evaluate.batch_size", "evaluate.chunk", "evaluate.examples"),
        *("evaluate.corruption_root", "evaluate.frost"),  # the results say which they were
    },
    # the same data (``DataInfo``) in another place; computed numbers have another last bit elsewhere
    "data": {"source", "description", "class_counts", "mean", "std", "target_mean", "target_std"},
}


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer; weight decay is for the slow weights, the method says which those are."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: PositiveFloat = 0.1
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    """sgd's momentum, and adamw's first beta."""
    nesterov: bool = True
    weight_decay: NonNegativeFloat = 1e-4
    clip: PositiveFloat | None = None
    """Largest norm of the gradient; None does not clip."""
    parts: dict[str, PositiveFloat] = field(default_factory=dict)
    """Factors of the rate for parts of the network, by path: "encoder.*" 0.1 for a pretrained one."""

    def __post_init__(self) -> None:
        validate(self, "optim")
        if self.name == "sgd" and self.nesterov:
            _require(
                self.momentum > 0, "optim.nesterov is on with momentum 0", "a momentum above 0"
            )


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate along training, as a factor of optim.lr."""

    name: Literal["constant", "step", "cosine", "poly"] = "cosine"
    warmup: NonNegativeFloat = 0.0
    """Epochs over which the rate first grows, linearly, to its full value."""
    milestones: tuple[int, ...] = ()
    """step: the rate is multiplied by gamma at the start of each of these epochs, from 0."""
    gamma: PositiveFloat = 0.1
    power: PositiveFloat = 0.9
    """poly: (1 - progress) ** power."""

    def __post_init__(self) -> None:
        validate(self, "schedule")
        rising = list(self.milestones) == sorted({m for m in self.milestones if m > 0})
        given = f"schedule.milestones is {self.milestones}"
        _require(rising, given, "epochs above 0, in rising order, such as 80 160 200")
        if self.name == "step":
            _require(bool(self.milestones), given, "for 'step' at least one epoch, such as 80")


@dataclass(frozen=True)
class AugmentConfig:
    """What training does to the images; None is what the data set asks for, 0 or False is off."""

    pad: NonNegativeInt | None = None
    flip: bool | None = None
    cutout: NonNegativeInt | None = None
    padding: Literal["zero", "reflect"] = "zero"
    scale: tuple[float, ...] | None = None
    """Smallest and largest factor by which a picture is resized; 1 1 is off."""
    crop: tuple[int, ...] | None = None
    """segmentation: height and width of the window that is cut out; 0 0 is the picture's own."""
    colour: Annotated[float, Interval(ge=0, lt=1)] | None = None
    """Brightness, contrast and saturation change by a factor of up to 1 +- this."""

    def __post_init__(self) -> None:
        validate(self, "augment")
        scale, crop = self.scale, self.crop
        factors = scale is None or (len(scale) == 2 and 0 < scale[0] <= scale[1])
        _require(factors, f"augment.scale is {scale}", "two factors, such as 0.5 2")
        window = crop is None or (len(crop) == 2 and min(crop) >= 0)
        _require(window, f"augment.crop is {crop}", "height and width, such as 360 480")

    def over(self, hints: "Augment") -> "Augment":
        """Return these settings, and the data set's hints if they are None.

        >>> from lpbnn.data import Augment
        >>> AugmentConfig(cutout=0).over(Augment(pad=4, flip=True, cutout=16))
        Augment(pad=4, flip=True, cutout=0, scale=(1.0, 1.0), crop=(0, 0), colour=0.0)
        """
        chosen = {name: getattr(self, name) for name in hints._fields}
        found = hints._replace(**{name: v for name, v in chosen.items() if v is not None})
        dataclasses.replace(self, **found._asdict())  # hints obey the same rules
        return found


@dataclass(frozen=True)
class EvalConfig:
    """What is measured after training."""

    samples: PositiveInt = 1
    """Draws of each member; deterministic methods ignore it."""
    batch_size: PositiveInt = 256
    """Examples at once; of large pictures (street scenes) fewer are taken."""
    chunk: PositiveInt | None = None
    """At most so many rows (member, example) in the network at once: bounds the memory."""
    ood: bool = True
    corruptions: bool = False
    """The 15 corruptions; image classification only."""
    severities: tuple[Severity, ...] = (1, 2, 3, 4, 5)
    corruption_root: str | None = None
    """The folder of the published CIFAR-10-C or CIFAR-100-C files; None generates the sets."""
    corruption_images: PositiveInt | None = None
    """Only the first so many test images are corrupted; None: all."""
    frost: str | None = None
    """The folder of the published frost pictures; None makes procedural frost."""
    examples: NonNegativeInt = 4
    """Images of each kind whose members' answers are kept for the report."""
    score: OODScore = "entropy"
    """The score of unknown images: the entropy of the mean prediction; or confidence, 1 - its maximum.
    Methods with a score of their own (edl, duq) keep it; of pixels it is always confidence."""

    def __post_init__(self) -> None:
        validate(self, "evaluate")
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
    """One of those that lpbnn ls lists."""
    method_options: Suppress[dict[str, Any]] = field(default_factory=dict)
    """The method's own options (its ``Config``); ``num_data`` is filled in."""
    backbone: str = "small-cnn"
    """The network; mlp for vectors (diabetes, cubic)."""
    backbone_options: Suppress[dict[str, Any]] = field(default_factory=dict)
    data: str = "digits"
    """The data set; digits, diabetes and cubic need no files, folder has pictures of your own,
    MODULE:NAME is a file of your own."""
    data_root: str | None = None
    """The folder that holds the files of data sets that have some."""
    data_options: Suppress[dict[str, Any]] = field(default_factory=dict)
    seed: NonNegativeInt = 0
    epochs: PositiveInt = 15
    batch_size: PositiveInt = 128
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
    memory_budget: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """Share of the activations that a compiled step keeps for its backward pass; the rest is recomputed."""
    graph: bool = True
    """On one GPU, record the training step as a CUDA graph and replay it."""
    channels_last: bool = False
    """Keep images with the channels last in memory: faster convolutions on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    devices: PositiveInt = 1
    """Processes, one device each; under torchrun its own count is taken, over all machines."""
    validate_every: NonNegativeInt = 1
    """Epochs between looks at the validation part; 0 never looks."""
    checkpoint_every: PositiveInt = 1
    """Epochs between checkpoints; the last epoch always leaves one."""
    progress: bool = True
    tensorboard: bool = False

    def __post_init__(self) -> None:
        validate(self)
        for name in ("method_options", "backbone_options", "data_options"):
            object.__setattr__(self, name, _plain(getattr(self, name), name))
        budget = self.memory_budget
        given = f"memory_budget is {budget}"
        fix = "a compiled step. Fix: add --compile (compile=True)"
        _require(budget == 1 or self.compile, f"{given} without compile", fix)
        warmup = self.schedule.warmup
        given = f"schedule.warmup is {warmup} of {self.epochs} epochs"
        _require(warmup == 0 or warmup < self.epochs, given, "fewer than there are")

    def to_data(self) -> dict[str, Any]:
        """Return plain dictionaries and lists."""
        return to_data(self)

    @classmethod
    def from_data(cls, data: Any) -> "RunConfig":
        """Read plain dictionaries; an unknown key is answered with the nearest name."""
        return from_data(cls, data)

    def to_json(self) -> str:
        """Return indented JSON."""
        return json.dumps(self.to_data(), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "RunConfig":
        """Read what ``to_json`` wrote."""
        return cls.from_data(json.loads(text))


def validate(instance: Any, section: str = "") -> None:
    """Check and normalise every field of a frozen dataclass; for its ``__post_init__``.

    Args:
        section: where the dataclass stands in the config, for messages.

    >>> OptimConfig(name="adam")
    Traceback (most recent call last):
    ValueError: optim.name is 'adam'; expected 'sgd' or 'adamw'. Did you mean 'adamw'?
    """
    from pydantic import ValidationError

    for name, adapter in _adapters(type(instance)).items():
        where = f"{section}.{name}" if section else name
        value = as_tuples(getattr(instance, name))
        try:
            value = adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(_explain(error, where, value)) from None
        object.__setattr__(instance, name, value)


@cache
def _adapters(cls: type) -> "dict[str, TypeAdapter[Any]]":
    """Return what pydantic checks each field with; a field that is a dataclass checks itself."""
    from pydantic import ConfigDict, TypeAdapter

    rules = ConfigDict(strict=True, allow_inf_nan=False)
    hints = get_type_hints(cls, include_extras=True)
    return {
        field.name: TypeAdapter(hints[field.name], config=rules)
        for field in dataclasses.fields(cls)
        if not dataclasses.is_dataclass(hints[field.name])
    }


def _explain(error: "ValidationError", where: str, given: Any) -> str:
    problems = error.errors()
    for part in problems[0]["loc"]:  # the place of an item, or which type of a union was tried
        try:
            given, where = given[part], f"{where}[{part!r}]"
        except (TypeError, KeyError, IndexError):
            break
    texts = dict.fromkeys(p["msg"].removeprefix("Input should be ") for p in problems)
    expected = " or ".join(re.sub("^(greater|less)", r"a number \1", text) for text in texts)
    guess = did_you_mean(given, re.findall("'(.*?)'", expected))
    return f"{where} is {given!r}; expected {expected}.{guess}"


def from_data(cls: type[T], data: Any, where: str = "") -> T:
    """Return the dataclass ``cls`` from what ``to_data`` made of it; missing keys take their defaults."""
    name = where or cls.__name__
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} is {data!r}; expected a mapping of its fields.")
    hints = get_type_hints(cls)
    fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            guess = did_you_mean(key, fields)
            raise ValueError(f"{name} has no field {key!r}.{guess} It has: {', '.join(fields)}.")
    parts = {key for key in data if dataclasses.is_dataclass(hints[key])}
    return cls(**{k: from_data(hints[k], v, k) if k in parts else v for k, v in data.items()})


def to_data(value: Any) -> Any:
    """Return dataclasses as dictionaries and tuples as lists: what ``json.dumps`` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_data(item) for key, item in value.items()}
    return [to_data(item) for item in value] if isinstance(value, tuple | list) else value


def changes(one: Any, two: Any, purpose: str) -> list[str]:
    """Return what two dataclasses disagree in and may not, as ``path: one -> two``.

    Args:
        purpose: a key of ``MAY_DIFFER``.

    >>> changes(RunConfig(seed=1, epochs=3), RunConfig(device="cpu"), "seeds")
    ['epochs: 3 -> 15']
    """

    def allowed(change: str) -> bool:
        path = change.partition(":")[0]
        return bool({path, path.partition(".")[0]} & MAY_DIFFER[purpose])

    return [c for c in differences(to_data(one), to_data(two)) if not allowed(c)]


def differences(one: Any, two: Any, where: str = "") -> list[str]:
    """Return what two results of ``to_data`` disagree in, as ``path: one -> two``.

    >>> differences({"optim": {"lr": 0.1, "name": "sgd"}}, {"optim": {"lr": 0.05, "name": "sgd"}})
    ['optim.lr: 0.1 -> 0.05']
    """
    if isinstance(one, dict) and isinstance(two, dict):
        found = []
        for key in {**one, **two}:
            path = f"{where}.{key}" if where else str(key)
            found += differences(one.get(key), two.get(key), path)
        return found
    return [] if one == two else [f"{where}: {one!r} -> {two!r}"]


def _plain(value: Any, where: str) -> Any:
    """Return an option whose type is its method's business: anything that JSON can hold."""
    if isinstance(value, tuple | list):
        return tuple(_plain(item, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    finite = not isinstance(value, float) or math.isfinite(value)
    if value is None or (isinstance(value, bool | int | float | str) and finite):
        return value
    raise ValueError(
        f"{where} is {value!r}, which a run folder cannot keep; expected a finite number, a string, "
        "true or false, None, or a list of these. Fix: name layers by their paths."
    )


def _require(ok: bool, given: str, expected: str) -> None:
    if not ok:
        raise ValueError(f"{given}; expected {expected}.")
