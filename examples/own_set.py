"""A data set and a network of one's own for the command, in one file outside the package.

cd examples
python -m lpbnn train --data own_set:stripes --backbone own_set:two-layers --method mcp -o runs/stripes
python -m lpbnn train --data own_set:stripes --data.noise 30 --backbone own_set:two-layers
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lpbnn import backbones, data

CLASSES = ("across", "down")


def draw(count: int, noise: float, generator: torch.Generator) -> data.Dataset:
    """Noisy stripes of 16x16, grey, half of them across and half down."""
    targets = torch.arange(count) % 2
    waves = torch.arange(16) // 2 % 2 * 200.0
    pictures = torch.stack([waves.expand(16, 16).mT, waves.expand(16, 16)])[targets].unsqueeze(1)
    grains = noise * torch.randn(pictures.shape, generator=generator)
    return data.Dataset((pictures + grains).clamp(0, 255).to(torch.uint8), targets)


def load(root: Path | None = None, noise: float = 60.0) -> data.Splits:
    """``root`` is --data-root, which drawn pictures do not need; ``noise`` is --data.noise."""
    generator = torch.Generator().manual_seed(0)
    train, val, test = (draw(count, noise, generator) for count in (400, 50, 100))
    grey = torch.randint(256, (100, 1, 16, 16), generator=generator, dtype=torch.uint8)
    unit = train.inputs.double() / 255
    return data.Splits(
        name="stripes",
        task="classification",
        train=train,
        val=val,
        test=test,
        ood={"noise": data.Dataset(grey, torch.full((100,), data.NOT_A_CLASS))},
        num_classes=2,
        classes=CLASSES,
        mean=(unit.mean().item(),),
        std=(unit.std().item(),),
        description="noisy stripes, 16x16 grey, across or down",
        source="generated",
    )


class TwoLayers(backbones.Backbone):
    """Two convolutions: ``forward`` is ``head(features(x))``."""

    def __init__(self, num_classes: int, in_channels: int = 3, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2)
        self.head = nn.Linear(width, num_classes)

    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x)))).mean((2, 3))


SETS = {"stripes": data.Entry(load, "noisy stripes, across or down")}
NETS = {"two-layers": backbones.Entry("two convolutions and a linear layer", TwoLayers)}
