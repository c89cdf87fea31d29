"""The multilayer perceptron, for vectors (regression) and for small pictures."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from lpbnn.backbones import Backbone, Entry
from lpbnn.backbones._parts import dropout as dropout_slot


class MLP(Backbone):
    """Linear layers with ReLU between them; everything after the batch axis is flattened.

    Args:
        num_outputs: the number of classes, or of regression outputs (2: a mean and a variance).
        in_channels: the length of the input vectors, or the channels of the pictures.
        hidden: widths of the hidden layers.
        dropout: rate after each hidden layer.
        image_size: side of square pictures; None: vectors. lpbnn train fills it in.

    >>> import torch
    >>> MLP(2, in_channels=10)(torch.zeros(4, 10)).shape
    torch.Size([4, 2])
    >>> MLP(10, in_channels=1, image_size=8, hidden=(32,))(torch.zeros(4, 1, 8, 8)).shape
    torch.Size([4, 10])
    """

    def __init__(
        self,
        num_outputs: int,
        in_channels: int = 3,
        hidden: Sequence[int] = (64, 64),
        dropout: float = 0.0,
        image_size: int | None = None,
    ) -> None:
        super().__init__()
        if not hidden or min(hidden) < 1:
            raise ValueError(f"mlp: hidden is {hidden!r}; expected one or more widths, each >= 1")
        self.in_features = in_channels * (image_size or 1) ** 2
        widths = [self.in_features, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.drops = nn.ModuleList(dropout_slot(dropout) for _ in hidden)
        self.head = nn.Linear(widths[-1], num_outputs)
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def features(self, x: Tensor) -> Tensor:
        """The last hidden layer's activations."""
        given = tuple(x.shape)
        x = x.flatten(1)
        if x.shape[1] != self.in_features:
            raise ValueError(
                f"mlp: an input of shape {given} has {x.shape[1]} numbers per example; this "
                f"network takes {self.in_features}. For vectors build it with "
                "in_channels=<their length>, for pictures with in_channels=<channels>, "
                "image_size=<side>"
            )
        for layer, drop in zip(self.layers, self.drops, strict=True):
            x = drop(F.relu(layer(x)))
        return x


NETS = {"mlp": Entry("perceptron with two hidden layers of 64, for vectors or small pictures", MLP)}
