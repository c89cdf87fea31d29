"""LeNet-5 (LeCun et al., 1998), with ReLU and max pooling as it is used today.

For 32x32 pictures it is the textbook network: 5x5 convolutions to 6 and 16 channels, each followed
by 2x2 pooling, then 400 -> 120 -> 84 -> classes. Other sizes need no option:

- smaller ones are brought to 32: enlarged by the whole factor that fits (8x8 by 4), the rest padded
  with zeros (28x28 by 2 on every side, which is what LeCun did to MNIST);
- larger ones are averaged to the 5x5 grid that the first linear layer reads.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from lpbnn.backbones import Backbone, Entry
from lpbnn.backbones._parts import dropout as dropout_slot

_SIDE = 32  # the input LeNet-5 was drawn for
_GRID = 5  # and the grid it leaves after two poolings


class LeNet(Backbone):
    """LeNet-5 for pictures of any size.

    Args:
        dropout: rate after each hidden linear layer.

    >>> import torch
    >>> net = LeNet(10, in_channels=1)
    >>> [net(torch.zeros(2, 1, side, side)).shape[1] for side in (8, 28, 32, 64)]
    [10, 10, 10, 10]
    """

    def __init__(self, num_outputs: int, in_channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * _GRID**2, 120)
        self.drop1 = dropout_slot(dropout)
        self.fc2 = nn.Linear(120, 84)
        self.drop2 = dropout_slot(dropout)
        self.head = nn.Linear(84, num_outputs)
        for layer in (self.conv1, self.conv2, self.fc1, self.fc2):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)

    def features(self, x: Tensor) -> Tensor:
        """The 84 activations below the head."""
        x = F.max_pool2d(F.relu(self.conv1(_at_least(x, _SIDE))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        if x.shape[-2:] != (_GRID, _GRID):
            x = F.adaptive_avg_pool2d(x, _GRID)
        x = self.drop1(F.relu(self.fc1(x.flatten(1))))
        return self.drop2(F.relu(self.fc2(x)))


def _at_least(x: Tensor, side: int) -> Tensor:
    """Enlarge by a whole factor, then pad evenly, until neither side is below ``side``."""
    height, width = x.shape[-2:]
    factor = side // max(height, width, 1)
    if factor > 1:
        x = x.repeat_interleave(factor, dim=-2).repeat_interleave(factor, dim=-1)
        height, width = height * factor, width * factor
    rows, columns = max(side - height, 0), max(side - width, 0)
    if rows or columns:
        x = F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    return x


NETS = {
    "lenet": Entry(
        "LeNet-5, two convolutions and three linear layers, 62,006 parameters",
        LeNet,
    )
}
