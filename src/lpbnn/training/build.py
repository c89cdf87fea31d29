"""From a config to data and a model, and back to the model when the data is not at hand."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from lpbnn import backbones, data, methods
from lpbnn.build import build
from lpbnn.data import Splits, Task
from lpbnn.likelihoods import class_weights
from lpbnn.model import UncertainModel
from lpbnn.training.config import RunConfig, validate


@dataclass(frozen=True)
class DataInfo:
    """What of a data set a model depends on: kept in the run folder, so the data may be elsewhere."""

    name: str
    task: Task
    shape: tuple[int, ...]
    """Of one input: (C, H, W) or (features,)."""
    num_classes: int | None
    num_targets: int
    """Numbers to predict per example: regression's targets, otherwise 1."""
    num_train: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_std: float = 1.0
    ignore_index: int | None = None
    ood_index: int | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    """Examples of "train", "val", "test" and of every out-of-distribution set, "ood/<name>"."""
    class_counts: tuple[int, ...] = ()
    """Training labels of each class, in segmentation pixels."""
    description: str = ""
    source: str = ""
    fingerprint: str = ""

    def __post_init__(self) -> None:
        validate(self)

    @classmethod
    def of(cls, splits: Splits) -> "DataInfo":
        """What ``splits`` says of itself.

        >>> info = DataInfo.of(data.load("digits"))
        >>> info.task, info.shape, info.num_classes, info.sizes["ood/photos"]
        ('classification', (1, 8, 8), 10, 800)
        """
        parts = {"train": splits.train, "val": splits.val, "test": splits.test}
        parts |= {f"ood/{name}": part for name, part in splits.ood.items()}
        regression = splits.task == "regression"
        return cls(
            name=splits.name,
            task=splits.task,
            shape=splits.shape,
            num_classes=splits.num_classes,
            num_targets=splits.train[0][1].numel() if regression else 1,
            num_train=len(splits.train),
            mean=splits.mean,
            std=splits.std,
            classes=splits.classes,
            target_mean=splits.target_mean,
            target_std=splits.target_std,
            ignore_index=splits.ignore_index,
            ood_index=splits.ood_index,
            sizes={name: len(part) for name, part in parts.items()},
            class_counts=splits.class_counts,
            description=splits.description,
            source=splits.source,
            fingerprint=splits.fingerprint,
        )

    @property
    def outputs(self) -> int:
        """The width of the network's head: a class each, or a mean and a scale per target."""
        return self.num_classes or 2 * self.num_targets

    def normalise(self, inputs: Tensor) -> Tensor:
        """Raw inputs to what the network was trained on, as ``Splits.normalise`` does."""
        x = inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs
        shape = (-1,) + (1,) * (len(self.shape) - 1)
        mean, std = (torch.tensor(v, dtype=x.dtype).view(shape) for v in (self.mean, self.std))
        return (x - mean.to(x.device)) / std.to(x.device)


def load_data(config: RunConfig) -> Splits:
    """The data set that a config names."""
    return data.load(config.data, config.data_root, **config.data_options)


def resolved(config: RunConfig) -> RunConfig:
    """The config with every option of its method written out: defaults may change, a run does not.

    ``num_data`` stays out unless it was given: it belongs to the data.

    >>> resolved(RunConfig(method="batchensemble")).method_options["members"]
    4
    """
    made = methods.configure(methods.load(config.method), dict(config.method_options))
    options = {option.name: getattr(made, option.name) for option in fields(made)}
    if config.method_options.get("num_data") is None:
        options.pop("num_data", None)
    return replace(config, method_options=options)


def build_model(config: RunConfig, info: DataInfo) -> UncertainModel:
    """The model of a config, freshly initialised from its seed; torch's generators stay as they were.

    >>> config = RunConfig(method="lpbnn", backbone="small-cnn", data="digits")
    >>> model = build_model(config, DataInfo.of(load_data(config)))
    >>> model.members, model.num_data
    (4, 1257)
    """
    options = dict(config.method_options)
    taken = methods.load(config.method).Config.__dataclass_fields__
    if "num_data" in taken:  # the KL's divisor: never left to the user to guess
        options.setdefault("num_data", info.num_train)
    labels: dict[str, Any] = {
        "ignore_index": info.ignore_index,
        "class_weights": _class_weights(config, info),
    }
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)  # networks are made on the CPU
        net = backbones.build(
            config.backbone, info.outputs, info.shape[0], **_backbone_options(config, info)
        )
        return build(
            net,
            config.method,
            task=info.task,
            **{key: value for key, value in labels.items() if value is not None},
            **options,
        )


def _class_weights(config: RunConfig, info: DataInfo) -> list[float] | None:
    if config.class_weights == "none":
        return None
    if info.task == "regression":
        raise ValueError(
            f"class_weights is {config.class_weights!r}, but {info.name!r} is a regression set, without "
            "classes. Fix: class_weights='none'."
        )
    return class_weights(info.class_counts, config.class_weights)


def _backbone_options(config: RunConfig, info: DataInfo) -> dict[str, Any]:
    """The config's options, and the size of the pictures for a network that has to know it."""
    options = dict(config.backbone_options)
    square = len(info.shape) == 3 and info.shape[1] == info.shape[2]
    if square and "image_size" in backbones.load(config.backbone).options():
        options.setdefault("image_size", info.shape[1])
    return options
