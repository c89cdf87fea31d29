"""Networks in plain torch. They know nothing of the methods that will wrap them.

The file is the registry: every module of this folder declares ``NETS``, a dictionary from the names
it serves to an `Entry`, and, where it serves a whole family of names (``wrn-28-10``), a function
``parse(name) -> Entry | None``. Adding a network is adding one file; nothing here changes. A file outside
the package is named with its module: ``my_module:name`` is ``NETS["name"]`` there.

Every classifier is a `Backbone`: ``forward(x) == head(features(x))``, where ``head`` is the last
`torch.nn.Linear` and ``features`` is flat, (batch, head.in_features). Methods that need the
features (DUQ) or replace the head (MIMO) rely on these two names and on nothing else.

A network for segmentation is ``dense``: its outputs are (batch, classes, H, W), of the input's size. It has
an ``encoder`` and a ``decoder``, so that ``include="decoder.*"`` is all that a method need be told.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lpbnn import registry

__all__ = ["Backbone", "Entry", "build", "build_for", "entries", "load", "names"]


class Backbone(nn.Module):
    """A network whose last step is one linear layer: ``forward(x) == head(features(x))``.

    >>> import torch
    >>> net = build("small-cnn", 10, in_channels=1)
    >>> x = torch.zeros(2, 1, 8, 8)
    >>> net.features(x).shape, net.head
    (torch.Size([2, 64]), Linear(in_features=64, out_features=10, bias=True))
    """

    head: nn.Linear

    def features(self, x: Tensor) -> Tensor:
        """The input of ``head``: (batch, head.in_features)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Logits, or regression outputs: (batch, head.out_features)."""
        return self.head(self.features(x))


@dataclass(frozen=True)
class Entry:
    """One network on offer: what it is, and ``build(num_classes, in_channels, **options)``.

    >>> load("lenet").description
    'LeNet-5, two convolutions and three linear layers, 62,006 parameters'
    """

    description: str
    build: Callable[..., nn.Module]
    dense: bool = False  # outputs for every pixel: segmentation

    def options(self) -> dict[str, Any]:
        """The options and their defaults; what is keyword-only belongs to the name.

        >>> load("wrn-16-4").options()
        {'dropout': 0.0}
        """
        parameters = list(inspect.signature(self.build).parameters.values())[2:]
        return {p.name: p.default for p in parameters if p.kind is not p.KEYWORD_ONLY}


def entries() -> dict[str, Entry]:
    """Return every listed network by name; families list a few members and take any other.

    >>> print(entries()["wrn-28-10"].description)
    Wide ResNet of the paper's CIFAR tables, 36.5 M parameters
    """
    return registry.entries(__name__, "NETS")


def names() -> tuple[str, ...]:
    """The names that `load` and `build` take, and of ``wrn-D-K`` the most used.

    >>> names()[:6]
    ('deeplab', 'deeplab-resnet18', 'deeplab-resnet34', 'lenet', 'mlp', 'resnet18')
    """
    return tuple(entries())


def load(name: str) -> Entry:
    """The entry behind a name; an unknown name is answered with the nearest one and the list.

    >>> load("wrn-40-2").description
    'Wide ResNet of depth 40 and width factor 2, pre-activation, 32x32 stem'
    >>> load("resnet-18")
    Traceback (most recent call last):
    ...
    ValueError: unknown backbone 'resnet-18'. Did you mean 'resnet18'? Known: deeplab, ...
    """
    if (found := registry.entry(__name__, "NETS", name, Entry)) is not None:
        return found
    for module in registry.modules(__name__):
        parse = getattr(sys.modules[f"{__name__}.{module}"], "parse", None)
        if parse is not None and (entry := parse(name)) is not None:
            return entry
    raise registry.unknown("backbone", name, [*entries(), "wrn-D-K"])


def build(name: str, num_classes: int, in_channels: int = 3, **options: Any) -> nn.Module:
    """A freshly initialised network; its random numbers come from torch's global generator.

    ``num_classes`` is the width of the head: for regression, the number of outputs.
    ``in_channels`` is the channels of the pictures, or, for ``mlp`` on vectors, their length.

    >>> net = build("resnet18", 10)
    >>> sum(p.numel() for p in net.parameters())
    11173962
    >>> build("lenet", 10, drop=0.1)
    Traceback (most recent call last):
    ...
    ValueError: backbone 'lenet' was given option 'drop'; its options are dropout=0.0.
    """
    entry = load(name)
    for label, value in (("num_classes", num_classes), ("in_channels", in_channels)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"backbone {name!r}: {label} is {value!r}; expected an integer >= 1")
    accepted = entry.options()
    for option in options:
        if option not in accepted:
            takes = ", ".join(f"{key}={default!r}" for key, default in accepted.items())
            raise ValueError(
                f"backbone {name!r} was given option {option!r}; its options are {takes}."
            )
    return entry.build(num_classes, in_channels, **options)


def build_for(
    shape: Sequence[int], name: str, num_classes: int, options: Mapping[str, Any]
) -> nn.Module:
    """Build a network for examples of a shape; one that has to know the side of square pictures is told.

    >>> import torch
    >>> build_for((1, 8, 8), "mlp", 10, {})(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    options = dict(options)
    if len(shape) == 3 and shape[1] == shape[2] and "image_size" in load(name).options():
        options.setdefault("image_size", shape[1])
    return build(name, num_classes, shape[0], **options)
