"""Wide residual networks (Zagoruyko and Komodakis, 2016) for pictures around 32x32.

``wrn-D-K`` has depth D = 6 n + 4 (three groups of n blocks) and widths 16 K, 32 K, 64 K. Blocks are
pre-activation, x + conv(drop(relu(bn(conv(relu(bn(x))))))), with the dropout slot between the two
convolutions; where the shape changes, the shortcut is a 1x1 convolution of the activated input.
``small-cnn`` is the smallest of the family, wrn-10-1: enough for 8x8 digits on a CPU.
"""

import re
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from lpbnn.backbones import Backbone, Entry
from lpbnn.backbones._parts import conv, global_average, initialise
from lpbnn.backbones._parts import dropout as dropout_slot


class Block(nn.Module):
    """The pre-activation block B(3, 3).

    >>> import torch
    >>> Block(16, 32, stride=2)(torch.zeros(1, 16, 8, 8)).shape
    torch.Size([1, 32, 4, 4])
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv(inputs, outputs, 3, stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = dropout_slot(dropout)
        self.conv2 = conv(outputs, outputs, 3)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, H, W) -> (batch, outputs, H / stride, W / stride)."""
        activated = F.relu(self.bn1(x))
        y = F.relu(self.bn2(self.conv1(activated)))
        y = self.conv2(self.dropout(y))
        return y + (x if self.shortcut is None else self.shortcut(activated))


class WideResNet(Backbone):
    """A Wide ResNet of any valid depth and width factor.

    Args:
        num_outputs: classes, or outputs of a regression.
        in_channels: of the pictures.
        dropout: rate inside every block.
        depth: 6 n + 4; part of the name, as the width is.
        width: factor of the channels 16, 32 and 64.

    >>> net = WideResNet(10, depth=28, width=10)
    >>> sum(p.numel() for p in net.parameters())
    36479194
    """

    def __init__(
        self,
        num_outputs: int,
        in_channels: int = 3,
        dropout: float = 0.0,
        *,
        depth: int = 28,
        width: int = 10,
    ) -> None:
        super().__init__()
        _check(depth, width)
        blocks = (depth - 4) // 6
        self.conv1 = conv(in_channels, 16, 3)
        groups, inputs = [], 16
        for outputs, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            first = Block(inputs, outputs, stride, dropout)
            rest = [Block(outputs, outputs, dropout=dropout) for _ in range(blocks - 1)]
            groups.append(nn.Sequential(first, *rest))
            inputs = outputs
        self.group1, self.group2, self.group3 = groups
        self.bn = nn.BatchNorm2d(inputs)
        self.head = nn.Linear(inputs, num_outputs)
        initialise(self)

    def features(self, x: Tensor) -> Tensor:
        """The 64 K channel means below the head."""
        x = self.group3(self.group2(self.group1(self.conv1(x))))
        return global_average(F.relu(self.bn(x)))


def parse(name: str) -> Entry | None:
    """The entry of ``wrn-D-K``; None for a name of another family.

    >>> parse("wrn-16-2").description
    'Wide ResNet of depth 16 and width factor 2, pre-activation, 32x32 stem'
    >>> parse("wrn-20-4")
    Traceback (most recent call last):
    ...
    ValueError: wrn-20-4: depth is 20; expected 6 n + 4 (10, 16, 22, 28, ...). Try wrn-22-4
    """
    found = re.fullmatch(r"wrn-(\d+)-(\d+)", name)
    if found is None:
        return None
    depth, width = int(found[1]), int(found[2])
    _check(depth, width)
    description = (
        f"Wide ResNet of depth {depth} and width factor {width}, pre-activation, 32x32 stem"
    )
    return Entry(description, partial(WideResNet, depth=depth, width=width))


def _check(depth: int, width: int) -> None:
    if depth < 10 or depth % 6 != 4:
        nearest = max(10, 6 * round((depth - 4) / 6) + 4)
        raise ValueError(
            f"wrn-{depth}-{width}: depth is {depth}; expected 6 n + 4 (10, 16, 22, 28, ...). "
            f"Try wrn-{nearest}-{max(width, 1)}"
        )
    if width < 1:
        raise ValueError(f"wrn-{depth}-{width}: width factor is {width}; expected at least 1")


NETS = {
    name: Entry(description, partial(WideResNet, depth=depth, width=width))
    for name, depth, width, description in (
        ("small-cnn", 10, 1, "residual ConvNet for 8x8 digits, 77,562 parameters"),
        ("wrn-16-4", 16, 4, "Wide ResNet for quick CIFAR runs, 2.7 M parameters"),
        ("wrn-28-10", 28, 10, "Wide ResNet of the paper's CIFAR tables, 36.5 M parameters"),
    )
}
