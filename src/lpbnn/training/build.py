"""From a config to its data and its model; the model alone needs ``DataInfo`` only."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from lpbnn import backbones, data, methods
from lpbnn.build import build
from lpbnn.data import Description, Splits
from lpbnn.likelihoods import Categorical, class_weights
from lpbnn.model import UncertainModel
from lpbnn.training.config import RunConfig, validate


@dataclass(frozen=True, kw_only=True)
class DataInfo(Description):
    """What a model depends on of its data: kept in the run folder, so the data may be elsewhere.

    Args:
        shape: of one input: (C, H, W) or (features,).
        num_targets: numbers to predict per example: regression's targets, otherwise 1.
        num_train: training examples.
        sizes: examples of "train", "val", "test" and of every out-of-distribution set, "ood/<name>".
        class_counts: training labels of each class, in segmentation pixels.
    """

    shape: tuple[int, ...]
    num_targets: int
    num_train: int
    sizes: dict[str, int] = field(default_factory=dict)
    class_counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        validate(self)
        for name in ("classes", "class_counts"):
            found = len(getattr(self, name))
            if found and found != (self.num_classes or 0):
                raise ValueError(
                    f"DataInfo.{name} has {found} entries; num_classes is {self.num_classes}."
                )

    @classmethod
    def of(cls, splits: Splits) -> "DataInfo":
        """Return what ``splits`` says of itself.

        >>> info = DataInfo.of(data.load("digits"))
        >>> info.task, info.shape, info.num_classes, info.sizes["ood/photos"]
        ('classification', (1, 8, 8), 10, 800)
        """
        return cls(**{field.name: getattr(splits, field.name) for field in fields(cls)})

    @property
    def outputs(self) -> int:
        """The width of the network's head: a class each, or a mean and a scale per target."""
        return self.num_classes or 2 * self.num_targets

    def normalise(self, inputs: Tensor) -> Tensor:
        """Return raw inputs as the network was trained on them."""
        return data.normalise(inputs, self.mean, self.std, len(self.shape))


def load_data(config: RunConfig) -> Splits:
    """Return the data set that a config names."""
    return data.load(config.data, config.data_root, **config.data_options)


def resolved(config: RunConfig) -> RunConfig:
    """Return the config with every option of its method written out: defaults may change, a run does not.

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
    """Return the model of a config, initialised from its seed; torch's generators stay as they were.

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
        net = backbones.build_for(
            info.shape, config.backbone, info.outputs, config.backbone_options
        )
        model = build(
            net,
            config.method,
            task=info.task,
            **{key: value for key, value in labels.items() if value is not None},
            **options,
        )
    use_score(model, config)
    return model


def use_score(model: UncertainModel, config: RunConfig) -> None:
    """Let a classifier tell unknown images by the config's score; pixels always have the confidence."""
    likelihood = model.likelihood
    if isinstance(likelihood, Categorical) and likelihood.task == "classification":
        likelihood.score = config.evaluate.score


def require_size(config: RunConfig, info: DataInfo, stored: int) -> None:
    """Refuse a model far larger than its stored weights, before any memory is taken for it.

    Args:
        config: of a run folder, whose options may be of any size.
        info: of its data.
        stored: numbers in the run's weights.
    """
    with torch.device("meta"):
        net = backbones.build_for(
            info.shape, config.backbone, info.outputs, config.backbone_options
        )
    needed = sum(parameter.numel() for parameter in net.parameters())
    members = config.method_options.get("members")
    needed = max(needed, members if isinstance(members, int) else 0)
    if needed > 2 * stored + 1000:
        raise ValueError(
            f"it describes a model of at least {needed:,} numbers, and the weights have {stored:,}. Fix: "
            "restore the folder from a copy."
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
