"""DeepLabv3+'s decoder: ASPP on the encoder's coarse map, then its fine map beside what that found."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lpbnn.backbones._parts import conv, initialise
from lpbnn.backbones._parts import dropout as dropout_slot
from lpbnn.precision import at_least_float32

Norm = Literal["batch", "group"]

GROUP = 8  # channels in a group of group norm: 32 groups of 256
_SKIP = 48  # channels of the encoder's fine map that the decoder sees


class StandardisedConv2d(nn.Conv2d):
    """A convolution that computes with its weight standardised: mean 0, variance 1 per output.

    >>> layer = StandardisedConv2d(3, 4, 3)
    >>> layer.standardised().var((1, 2, 3), correction=0).detach()
    tensor([1.0000, 1.0000, 1.0000, 1.0000])
    """

    def standardised(self) -> Tensor:
        """The weight that it computes with."""
        weight = at_least_float32(self.weight)
        variance, mean = torch.var_mean(weight, (1, 2, 3), correction=0, keepdim=True)
        return ((weight - mean) * torch.rsqrt(variance + 1e-10)).to(self.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        weight, dilation = self.standardised(), self.dilation
        return F.conv2d(input, weight, self.bias, self.stride, self.padding, dilation, self.groups)


@dataclass(frozen=True)
class Style:
    """Style of the decoder's convolutions."""

    norm: Norm = "batch"
    standardise: bool = False
    separable: bool = False

    def __post_init__(self) -> None:
        if self.norm not in ("batch", "group"):
            raise ValueError(f"deeplab: norm is {self.norm!r}; expected 'batch' or 'group'")
        for name in ("standardise", "separable"):
            value: Any = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"deeplab: {name} is {value!r}; expected True or False")

    def unit(self, inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> nn.Sequential:
        """Convolution, norm, ReLU; a separable one filters every channel first, then mixes them.

        >>> unit = Style(norm="group", separable=True).unit(16, 32, 3, dilation=6)
        >>> [type(layer).__name__ for layer in unit]
        ['Conv2d', 'Conv2d', 'GroupNorm', 'ReLU']
        """
        unit = nn.Sequential()
        if self.separable and kernel > 1:
            depthwise = conv(inputs, inputs, kernel, dilation=dilation, groups=inputs)
            nn.init.normal_(depthwise.weight, std=1 / kernel)  # keeps the variance
            unit.add_module("depthwise", depthwise)
            kernel = dilation = 1
        kind = StandardisedConv2d if self.standardise else nn.Conv2d
        padding = kernel // 2 * dilation
        mix = kind(inputs, outputs, kernel, padding=padding, dilation=dilation, bias=False)
        initialise(mix)
        group = self.norm == "group"
        norm = nn.GroupNorm(outputs // GROUP, outputs) if group else nn.BatchNorm2d(outputs)
        for name, layer in (("conv", mix), ("norm", norm), ("relu", nn.ReLU())):
            unit.add_module(name, layer)
        return unit


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: five views of one map at different scales, joined.

    >>> aspp = ASPP(16, 8, (6, 12, 18), Style())
    >>> aspp(torch.zeros(2, 16, 5, 4)).shape
    torch.Size([2, 8, 5, 4])
    """

    # Five layers read one map of 2,048 channels. They expand the batch to members themselves, so that the
    # map is not copied for each member (lpbnn.members.partial).
    expand_in_layers = True

    def __init__(self, inputs: int, outputs: int, rates: tuple[int, ...], style: Style) -> None:
        super().__init__()
        views = [style.unit(inputs, outputs)]
        views += [style.unit(inputs, outputs, 3, rate) for rate in rates]
        self.views = nn.ModuleList(views)
        self.pooled = nn.Conv2d(inputs, outputs, 1)
        nn.init.kaiming_normal_(self.pooled.weight, nonlinearity="relu")
        nn.init.zeros_(self.pooled.bias)  # type: ignore[arg-type]
        self.project = style.unit((len(views) + 1) * outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, H, W) -> (batch, outputs, H, W)."""
        views = [view(x) for view in self.views]
        pooled = F.relu(self.pooled(x.mean((2, 3), keepdim=True)))
        return self.project(torch.cat([*views, pooled.expand_as(views[0])], 1))


class Refine(nn.Module):
    """The part on the grid of the fine map: the skip, two convolutions and the last layer.

    >>> refine = Refine(8, 16, 5)
    >>> refine(torch.zeros(2, 8, 12, 9), torch.zeros(2, 16, 3, 3)).shape
    torch.Size([2, 5, 12, 9])
    """

    # Members may run one after another here (lpbnn.members.partial): the map of one member is large enough
    # to fill a GPU, and the maps of all members would be most of the memory.
    loop_members = True

    def __init__(
        self,
        fine_channels: int,
        channels: int,
        num_outputs: int,
        dropout: float = 0.0,
        style: Style | None = None,
    ) -> None:
        super().__init__()
        style = style or Style()
        self.skip = style.unit(fine_channels, _SKIP)
        self.fuse1 = style.unit(channels + _SKIP, channels, 3)
        self.fuse2 = style.unit(channels, channels, 3)
        self.drop2 = dropout_slot(dropout)
        self.head = nn.Conv2d(channels, num_outputs, 1)
        nn.init.zeros_(self.head.bias)  # type: ignore[arg-type]

    def forward(self, fine: Tensor, context: Tensor) -> Tensor:
        """(batch, fine_channels, h, w) and ASPP's map of any size -> (batch, num_outputs, h, w)."""
        # Enlarged here, not by the decoder: one member's large map at a time.
        x = torch.cat([resize(context, fine.shape[-2:]), self.skip(fine)], 1)
        x = self.fuse1(x)  # no map has a name for longer than it is needed
        return self.head(self.drop2(self.fuse2(x)))


class Decoder(nn.Module):
    """From the encoder's two maps to logits on the grid of the finer one.

    >>> decoder = Decoder(8, 64, 5, rates=(6, 12, 18), channels=16)
    >>> decoder(torch.zeros(2, 8, 12, 9), torch.zeros(2, 64, 3, 3)).shape
    torch.Size([2, 5, 12, 9])
    """

    # The batch is expanded to members in front of these two parts (members.partial). They are separate
    # because ASPP has many weights and small maps: a single member would leave a GPU half empty there.
    expand_at = ("aspp", "refine")

    def __init__(
        self,
        fine_channels: int,
        deep_channels: int,
        num_outputs: int,
        *,
        rates: tuple[int, ...],
        channels: int = 256,
        dropout: float = 0.0,
        style: Style | None = None,
    ) -> None:
        super().__init__()
        style = style or Style()
        self.aspp = ASPP(deep_channels, channels, rates, style)
        self.drop1 = dropout_slot(dropout)
        self.refine = Refine(fine_channels, channels, num_outputs, dropout, style)

    def forward(self, fine: Tensor, deep: Tensor) -> Tensor:
        """(batch, fine_channels, h, w) and the deep map -> (batch, num_outputs, h, w)."""
        return self.refine(fine, self.drop1(self.aspp(deep)))


def resize(x: Tensor, size: tuple[int, ...]) -> Tensor:
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)
