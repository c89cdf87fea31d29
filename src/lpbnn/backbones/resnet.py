"""Residual networks (He et al., 2015) of depth 18, 34 and 50.

The default stem is the one for pictures around 32x32: one 3x3 convolution and no pooling;
``stem="imagenet"`` is the published 7x7 with stride 2 and max pooling. Parameter names are
torchvision's, except that the last layer is ``head``, so published encoders load with
``strict=False`` and nothing but the head missing.

``stride_in`` is the convolution of a bottleneck that has the stride: "3x3", the default, as in torchvision
and its weights (v1.5), or "1x1", the first convolution, as in the paper and the original weights (v1). No
tensor of a file shows which it was trained with, so it must be set to fit the weights.

Stages may be *dilated*: instead of a stride the kernels of the following layers are dilated, so the map
stays as fine as it was, and every other position of it is what the stride would have left.
"""

from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from lpbnn.backbones import Backbone, Entry
from lpbnn.backbones._parts import conv, global_average, initialise
from lpbnn.backbones._parts import dropout as dropout_slot

Stem = Literal["cifar", "imagenet"]
StrideIn = Literal["3x3", "1x1"]
Dilations = tuple[int, int]  # of the map that comes into a block, and of the one that goes out


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if inputs == outputs and stride == 1:
        return None
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; the dropout slot is between them.

    >>> import torch
    >>> BasicBlock(64, 128, stride=2)(torch.zeros(1, 64, 8, 8)).shape
    torch.Size([1, 128, 4, 4])
    """

    expansion = 1

    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int = 1,
        dropout: float = 0.0,
        stride_in: StrideIn = "3x3",
        dilations: Dilations = (1, 1),
    ) -> None:
        super().__init__()
        self.conv1 = conv(inputs, width, 3, stride, dilations[0])
        self.bn1 = nn.BatchNorm2d(width)
        self.dropout = dropout_slot(dropout)
        self.conv2 = conv(width, width, 3, dilation=dilations[1])
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, H, W) -> (batch, width, H / stride, W / stride)."""
        y = self.dropout(F.relu(self.bn1(self.conv1(x))))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with four times the width at the end; the dropout slot is before the last.

    >>> import torch
    >>> Bottleneck(64, 32, stride=2)(torch.zeros(1, 64, 8, 8)).shape
    torch.Size([1, 128, 4, 4])
    """

    expansion = 4

    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int = 1,
        dropout: float = 0.0,
        stride_in: StrideIn = "3x3",
        dilations: Dilations = (1, 1),
    ) -> None:
        super().__init__()
        first, second = (stride, 1) if stride_in == "1x1" else (1, stride)
        self.conv1 = conv(inputs, width, 1, first)
        self.bn1 = nn.BatchNorm2d(width)
        # The 3x3 sees the map before the (left out) stride, or after it.
        self.conv2 = conv(width, width, 3, second, dilations[stride_in == "1x1"])
        self.bn2 = nn.BatchNorm2d(width)
        self.dropout = dropout_slot(dropout)
        self.conv3 = conv(width, 4 * width, 1)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = _downsample(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, H, W) -> (batch, 4 width, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.dropout(F.relu(self.bn2(self.conv2(y))))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


Block = type[BasicBlock] | type[Bottleneck]
Blocks = tuple[int, int, int, int]
DEPTHS: dict[int, tuple[Block, Blocks]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
}


class Trunk(nn.Module):
    """Stem and four stages under torchvision's names: a classifier without its head.

    ``dilated`` is the number of last stages that are dilated, ``width`` the channels of the stem.

    >>> import torch
    >>> trunk = Trunk(stem="imagenet", depth=18, width=8, dilated=1)
    >>> [tuple(y.shape[1:]) for y in trunk.maps(torch.zeros(1, 3, 64, 64))]
    [(8, 16, 16), (16, 8, 8), (32, 4, 4), (64, 4, 4)]
    """

    def __init__(
        self,
        in_channels: int = 3,
        stem: Stem = "cifar",
        dropout: float = 0.0,
        stride_in: StrideIn = "3x3",
        *,
        depth: int,
        width: int = 64,
        dilated: int = 0,
    ) -> None:
        super().__init__()
        block, blocks = DEPTHS[depth]
        if stem not in ("cifar", "imagenet"):
            raise ValueError(f"resnet: stem is {stem!r}; expected 'cifar' or 'imagenet'")
        if stride_in not in ("3x3", "1x1"):
            raise ValueError(f"resnet: stride_in is {stride_in!r}; expected '3x3' or '1x1'")
        imagenet = stem == "imagenet"
        self.conv1 = conv(in_channels, width, 7, 2) if imagenet else conv(in_channels, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if imagenet else nn.Identity()
        stages, inputs, dilation = [], width, 1
        for number, count in enumerate(blocks):
            stride, before, channels = min(2, number + 1), dilation, width * 2**number
            if number >= len(blocks) - dilated:
                stride, dilation = 1, stride * dilation
            layers = [block(inputs, channels, stride, dropout, stride_in, (before, dilation))]
            inputs = block.expansion * channels
            for _ in range(count - 1):
                layers.append(block(inputs, channels, 1, dropout, stride_in, (dilation, dilation)))
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.out_channels = tuple(block.expansion * width * 2**number for number in range(4))

    def maps(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the outputs of the four stages: (batch, out_channels[i], H_i, W_i)."""
        one = self.layer1(self.maxpool(F.relu(self.bn1(self.conv1(x)))))
        two = self.layer2(one)
        three = self.layer3(two)
        return one, two, three, self.layer4(three)


class ResNet(Trunk, Backbone):
    """Four stages of residual blocks under either stem.

    Args:
        num_outputs: classes, or outputs of a regression.
        in_channels: of the pictures.
        stem: "cifar" for pictures of 32x32, "imagenet" for large ones.
        dropout: rate inside every block.
        stride_in: the convolution of a bottleneck that has the stride: "3x3" as in torchvision.
        depth: 18, 34 or 50; part of the name.

    >>> import torch
    >>> net = ResNet(10, depth=18)
    >>> net.features(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 512])
    """

    def __init__(
        self,
        num_outputs: int,
        in_channels: int = 3,
        stem: Stem = "cifar",
        dropout: float = 0.0,
        stride_in: StrideIn = "3x3",
        *,
        depth: int,
    ) -> None:
        super().__init__(in_channels, stem, dropout, stride_in, depth=depth)
        self.head = nn.Linear(self.out_channels[-1], num_outputs)
        initialise(self)

    def features(self, x: Tensor) -> Tensor:
        """The channel means below the head."""
        return global_average(self.maps(x)[-1])


NETS = {
    name: Entry(
        f"ResNet-{depth}, 32x32 stem by default, {size} M parameters", partial(ResNet, depth=depth)
    )
    for name, depth, size in (
        ("resnet18", 18, 11.2),
        ("resnet34", 34, 21.3),
        ("resnet50", 50, 23.5),
    )
}
