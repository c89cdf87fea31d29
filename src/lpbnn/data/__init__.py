"""Data: `load(name)` returns whole, ready splits; the file name is the registry.

A data set is a file in this folder that declares `SETS: dict[str, Entry]`. Nothing else has to be
edited to add one; a file elsewhere is named with its module, `my_module:name`. Every set is
delivered as `Splits`: tensors that can live whole on a device, or, of a set too large for that,
files that are decoded when their turn comes; images as uint8 (N, C, H, W), anything else as float,
with what is needed to normalise them.

    x' = (x / 255 - mean) / std   for images,      x' = (x - mean) / std   for features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lpbnn import registry
from lpbnn.data._examples import Dataset, Examples

__all__ = [
    "NOT_A_CLASS",
    "Augment",
    "Dataset",
    "Description",
    "Entry",
    "Examples",
    "Splits",
    "Task",
    "download",
    "entries",
    "entry",
    "load",
    "names",
    "normalise",
    "require_files",
]

Task = Literal["classification", "segmentation", "regression"]
NOT_A_CLASS = -1  # the target of an out-of-distribution example: none of the classes is right


class Augment(NamedTuple):
    """The usual augmentation of these images, a default for the training loop.

    pad: random crop after padding by so many pixels; flip: left-right with probability 1/2;
    cutout: side of one square hole, centre uniform, clipped at the border, after normalisation;
    scale: the smallest and the largest factor by which a picture is resized; crop: height and width
    of what is then cut out, (0, 0) for the picture's own; colour: brightness, contrast and
    saturation change by a factor of up to 1 +- this.
    """

    pad: int = 0
    flip: bool = False
    cutout: int = 0
    scale: tuple[float, ...] = (1.0, 1.0)
    crop: tuple[int, ...] = (0, 0)
    colour: float = 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Description:
    """Facts about a data set that need none of its examples: `Splits` has them, a stored run keeps them.

    `mean` and `std` are per channel (images, on the 0..1 scale) or per feature and come from the
    training part alone, or from ImageNet where pretrained encoders are usual; `target_mean` and
    `target_std` are for regression. In segmentation `ignore_index` marks pixels outside every loss and
    metric and `ood_index` the pixels to be detected. `source` is "embedded", "generated" or the path that
    was read. A `fingerprint` tells examples that others may replace under the same name: a run is bound
    to it.
    """

    name: str
    task: Task
    num_classes: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    description: str = ""
    source: str = ""
    classes: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_std: float = 1.0
    ignore_index: int | None = None
    ood_index: int | None = None
    fingerprint: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Splits(Description):
    """Everything a run needs to know about a data set: its description and its examples.

    `ood` holds what the network was not trained on; its targets are -1 (`NOT_A_CLASS`) unless the set
    says otherwise.
    """

    train: Examples
    val: Examples
    test: Examples
    ood: Mapping[str, Examples] = field(default_factory=dict)
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        if (self.num_classes is None) != (self.task == "regression"):
            raise ValueError(
                f"Splits {self.name!r} has task={self.task!r} and num_classes={self.num_classes}; "
                "give num_classes for classification and segmentation, None for regression."
            )
        if self.classes and len(self.classes) != self.num_classes:
            raise ValueError(
                f"Splits {self.name!r} names {len(self.classes)} classes but has "
                f"num_classes={self.num_classes}; give one name per class, or none."
            )
        if not len(self.mean) == len(self.std) == self.shape[0]:
            raise ValueError(
                f"Splits {self.name!r} has inputs of shape {self.shape}, {len(self.mean)} means "
                f"and {len(self.std)} stds; give {self.shape[0]} of each, one per channel."
            )
        if len(self.shape) == 3 and self.train.dtype != torch.uint8:
            raise ValueError(
                f"Splits {self.name!r} has pictures of {self.train.dtype}; pictures are uint8, 0 to 255, and "
                "mean and std do the scaling. Fix, for 0 to 1: (x * 255).round().to(torch.uint8)."
            )
        for part, data in {"val": self.val, "test": self.test, **self.ood}.items():
            if data.shape != self.shape or data.dtype != self.train.dtype:
                raise ValueError(
                    f"Splits {self.name!r}: {part} holds {data.dtype} inputs of shape {data.shape}, "
                    f"train {self.train.dtype} of shape {self.shape}; bring every part to the shape "
                    "and type of train."
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input, without the batch: (C, H, W) or (features,)."""
        return self.train.shape

    @property
    def num_targets(self) -> int:
        """Numbers to predict per example: regression's targets, otherwise 1."""
        return self.train[0][1].numel() if self.task == "regression" else 1

    @property
    def num_train(self) -> int:
        """Training examples."""
        return len(self.train)

    @property
    def sizes(self) -> dict[str, int]:
        """Examples of "train", "val", "test" and of every out-of-distribution set, "ood/<name>"."""
        parts = {"train": self.train, "val": self.val, "test": self.test}
        parts |= {f"ood/{name}": part for name, part in self.ood.items()}
        return {name: len(part) for name, part in parts.items()}

    @cached_property
    def class_counts(self) -> tuple[int, ...]:
        """Number of training labels (in segmentation: pixels) of each class; () for regression.

        >>> min(load("digits").class_counts)
        120
        """
        return () if self.num_classes is None else self.train.class_counts(self.num_classes)

    def normalise(self, inputs: Tensor) -> Tensor:
        """(x/255 - mean) / std for uint8 images, (x - mean) / std for floats: what networks see.

        >>> splits = load("digits")
        >>> x = splits.normalise(splits.train.inputs)
        >>> f"{x.mean():.3f} {x.std(correction=0):.3f} {x.dtype}"
        '0.000 1.000 torch.float32'
        """
        return normalise(inputs, self.mean, self.std, len(self.shape))

    def normalise_targets(self, targets: Tensor) -> Tensor:
        """(y - target_mean) / target_std; changes nothing unless the task is regression.

        >>> splits = load("cubic")
        >>> y = splits.normalise_targets(splits.train.targets)
        >>> f"{y.mean():.3f} {y.std(correction=0):.3f}".replace("-", "")
        '0.000 1.000'
        """
        if self.task != "regression":
            return targets
        return (targets - self.target_mean) / self.target_std

    def to(self, device: torch.device | str) -> Splits:
        """The same splits, every tensor on another device."""
        return replace(
            self,
            train=self.train.to(device),
            val=self.val.to(device),
            test=self.test.to(device),
            ood={name: data.to(device) for name, data in self.ood.items()},
        )


def normalise(
    inputs: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor, dims: int
) -> Tensor:
    """Return (x/255 - mean) / std for uint8 images and (x - mean) / std for floats.

    Args:
        inputs: one input or a batch.
        mean: a number for each channel or feature.
        std: the same.
        dims: dimensions of one input: 3 for images, 1 for features.

    >>> normalise(torch.tensor([[255], [0]], dtype=torch.uint8), [0.5], [0.25], dims=1).tolist()
    [[2.0], [-2.0]]
    """
    x = inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs
    per_channel = (-1,) + (1,) * (dims - 1)
    shift, scale = (
        torch.as_tensor(values, dtype=x.dtype, device=x.device).view(per_channel)
        for values in (mean, std)
    )
    return (x - shift) / scale


class Entry(NamedTuple):
    """One line of a data file's `SETS`: how to load the set, and what it is in one line.

    `load` is called as `load(root, **options)`; sets that need no files ignore `root`. `require_files`, of
    sets that have some, is called as `require_files(root)`: it reads none of them, and raises a
    `FileNotFoundError` where one is missing.
    """

    load: Callable[..., Splits]
    description: str
    require_files: Callable[[Path | None], object] | None = None


def entries() -> Mapping[str, Entry]:
    """Return every data set by name.

    >>> print(entries()["digits"].description)
    scikit-learn's 8x8 grey digits, 10 classes; out-of-distribution: patches of two photos
    """
    return dict(sorted(registry.entries(__name__, "SETS").items()))


def names() -> tuple[str, ...]:
    """The names `load` takes.

    >>> {"cubic", "diabetes", "digits"} <= set(names())
    True
    """
    return tuple(entries())


def load(name: str, root: str | Path | None = None, **options: object) -> Splits:
    """The data set called `name`; `root` is the folder of its files, where it has any.

    `my_module:name` is an entry of `SETS` in a module outside the package.

    >>> splits = load("digits")
    >>> splits.task, splits.num_classes, splits.shape, len(splits.train), splits.source
    ('classification', 10, (1, 8, 8), 1257, 'embedded')
    """
    loader = entry(name).load
    known = list(inspect.signature(loader).parameters)[1:]
    for option in options:
        if option not in known:
            takes = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ValueError(f"data set {name!r} was given option {option!r}; {takes}.")
    return loader(None if root is None else Path(root), **options)


def require_files(name: str, root: str | Path | None = None) -> None:
    """Raise a `FileNotFoundError` if files of a data set are missing; reads and downloads nothing.

    >>> require_files("cifar10", "/nowhere")
    Traceback (most recent call last):
    ...
    FileNotFoundError: /nowhere/cifar-10-batches-py is missing: /nowhere does not exist. Give ...
    """
    require = entry(name).require_files
    if require is not None:
        require(None if root is None else Path(root))


def download(name: str, root: str | Path | None = None) -> Splits:
    """Fetch the published files of a data set into `root`, check them, and load the set.

    >>> download("digits")
    Traceback (most recent call last):
    ...
    ValueError: data set 'digits' has no download; expected one of cifar10, cifar100. ...
    """
    if "download" not in inspect.signature(entry(name).load).parameters:
        known = [
            n for n, e in entries().items() if "download" in inspect.signature(e.load).parameters
        ]
        needs = entry(name).require_files is not None
        fix = (
            "put its files where lpbnn ls and the docstring of its loader say"
            if needs
            else "none is needed"
        )
        raise ValueError(
            f"data set {name!r} has no download; expected one of {', '.join(known)}. Fix: {fix}."
        )
    return load(name, root, download=True)


def entry(name: str) -> Entry:
    """The entry of a data set; an unknown name is answered with the nearest one."""
    if (found := registry.entry(__name__, "SETS", name, Entry)) is not None:
        return found
    raise registry.unknown("data set", name, entries())
