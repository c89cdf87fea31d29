"""What a network is measured on: the size of its pictures and batches, in full and small for a CPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lpbnn import backbones, methods
from lpbnn.build import build
from lpbnn.data import Task
from lpbnn.engine.bench import peers
from lpbnn.model import UncertainModel

NUM_DATA = 50_000  # N of the KL: a number like any other here
REFERENCE = "mcp"  # the plain network


@dataclass(frozen=True)
class Workload:
    """A network and the batches it is given; ``include`` is the part that a method converts."""

    network: str
    image: tuple[int, int] = (32, 32)  # height, width
    batch: int = 128
    test_batch: int = 128
    classes: int = 10
    include: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the network

    @property
    def task(self) -> Task:
        return "segmentation" if backbones.load(self.network).dense else "classification"

    def examples(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random pictures (count, 3, H, W) and labels, of one per picture or per pixel."""
        x = torch.randn(count, 3, *self.image, device=device)
        shape = (count, *self.image) if self.task == "segmentation" else (count,)
        return x, torch.randint(0, self.classes, shape, device=device)

    def model(
        self, method: str, members: int, options: Mapping[str, Any] | None = None
    ) -> UncertainModel:
        """The network by a method, with those of the ``options`` that it takes.

        >>> Workload("small-cnn", (8, 8)).model("lpbnn", 4, {"latent": 16, "std": 0.1}).members
        4
        """
        net = backbones.build(self.network, self.classes, **self.options)
        if method in peers.NAMES:
            return peers.build(method, net, members, self.task, NUM_DATA)
        members = members if has_members(method) else 1
        wanted = {"members": members, "num_data": NUM_DATA, "include": self.include}
        known = methods.load(method).Config.__dataclass_fields__
        taken = {k: v for k, v in {**wanted, **(options or {})}.items() if k in known}
        # These networks treat rows independently: a comparison would only be part of what is measured.
        return build(net, method, task=self.task, check=False, **taken)


def has_members(method: str) -> bool:
    """Whether a method has more than one network.

    >>> has_members("lpbnn"), has_members("edl")
    (True, False)
    """
    if method in peers.NAMES:
        return True
    option = methods.load(method).Config.__dataclass_fields__.get("members")
    return option is not None and option.default != 1


_STREET = Workload("deeplab", (720, 1280), batch=4, test_batch=1, classes=13, include="decoder.*")
_SMALL_DECODER = {"width": 16, "channels": 64}
_SMALL_STREET = replace(
    _STREET, network="deeplab-resnet18", image=(96, 160), options=_SMALL_DECODER
)
SMALL = {  # what stands in for a network where that would take minutes per step
    "wrn-28-10": Workload("wrn-28-1", batch=32, test_batch=32),
    "wrn-16-4": Workload("wrn-16-2", batch=32, test_batch=32),
    "resnet18": Workload("resnet18", (16, 16), batch=32, test_batch=32),
    "deeplab": _SMALL_STREET,
}


def workload(name: str, small: bool = False) -> Workload:
    """The workload of a network of ``lpbnn.backbones``, or of its small stand-in.

    >>> workload("deeplab").image, workload("deeplab", small=True).image
    ((720, 1280), (96, 160))
    >>> workload("wrn-28-10", small=True).network
    'wrn-28-1'
    """
    dense = backbones.load(name).dense  # an unknown name is told here
    if small and name in SMALL:
        return SMALL[name]
    base = _STREET if dense else Workload(name)
    if small:
        base = replace(base, batch=min(base.batch, 32), test_batch=min(base.test_batch, 32))
        base = replace(base, image=_SMALL_STREET.image if dense else base.image)
    return replace(base, network=name)
