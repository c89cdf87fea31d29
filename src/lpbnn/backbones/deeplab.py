r"""DeepLabv3+ (Chen et al., 2018) for pictures of any size: a residual encoder, ASPP and a decoder.

Two parts, ``encoder`` and ``decoder``; the second holds everything that is trained from scratch (ASPP,
the skip of 48 channels, two 3x3 convolutions, the last layer). So the paper's variants are options:

- LP-BNN: ``lpbnn.build(net, "lpbnn", include="decoder.*", task="segmentation", ...)``. The batch expands
  to members where the decoder begins: the encoder runs once per picture, ASPP for all members together, and
  the part with large maps (``decoder.refine``) member by member if that is cheaper (``lpbnn.members``);
- LP-BNN+GN: the same with ``norm="group", standardise=True`` for the network, which puts group norm in
  the place of the decoder's batch norm and standardises the weights of its convolutions
  (Qiao et al., 2019), $\hat W = (W - \bar W) / \sigma_W$ over the inputs of every output channel.
  The members' factors scale $\hat W$.

Wherever no norm follows a convolution, its weight has a scale to learn and is never standardised: the last
layer, the depthwise half of a separable one, and the one behind ASPP's image pooling. That one has no norm
because it sees a single position: a batch of one picture, or a member's slice, has no variance.

The encoder's names are torchvision's: ``pretrained`` is a file with published weights (see ``pretrained``
in this folder), and ``net.loaded`` then says what matched. ``stride_in`` must be that of the weights:
"3x3", the default, for torchvision's, "1x1" for those of the original ResNet-50 (v1). Where
``output_stride`` leaves out strides, kernels are dilated (see ``resnet``).
"""

from functools import partial

from torch import Tensor, nn

from lpbnn.backbones import Entry
from lpbnn.backbones._decoder import GROUP, Decoder, Norm, Style, resize
from lpbnn.backbones._parts import initialise
from lpbnn.backbones.pretrained import Loaded, load_weights
from lpbnn.backbones.resnet import StrideIn, Trunk

_DILATED = {8: 2, 16: 1}  # output stride: how many of the encoder's stages are dilated
_RATES = (6, 12, 18)  # of ASPP at output stride 16; twice as large where the map is twice as fine


class Encoder(Trunk):
    """A residual network without its head: gives the map of the first stage and that of the last.

    >>> import torch
    >>> maps = Encoder(depth=18, width=8)(torch.zeros(1, 3, 64, 96))
    >>> [tuple(y.shape[1:]) for y in maps]
    [(8, 16, 24), (64, 4, 6)]
    """

    def __init__(
        self,
        in_channels: int = 3,
        output_stride: int = 16,
        stride_in: StrideIn = "3x3",
        *,
        depth: int = 50,
        width: int = 64,
    ) -> None:
        if output_stride not in _DILATED:
            raise ValueError(f"deeplab: output_stride is {output_stride!r}; expected 8 or 16")
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ValueError(f"deeplab: width is {width!r}; expected an integer >= 1")
        shape = {"depth": depth, "width": width, "dilated": _DILATED[output_stride]}
        super().__init__(in_channels, "imagenet", stride_in=stride_in, **shape)
        initialise(self)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, in_channels, H, W) -> maps of H / 4 and of H / output_stride, rounded up."""
        fine, _, _, deep = self.maps(x)
        return fine, deep


class DeepLab(nn.Module):
    """DeepLabv3+; the outputs have the height and width of the input.

    Args:
        num_outputs: classes.
        output_stride: 16, or 8 for a finer map under the decoder (more compute and memory).
        stride_in: the convolution of a bottleneck that has the stride: "3x3", the default, as in
            torchvision and its weights (v1.5), "1x1" as in the original (v1). It must fit ``pretrained``.
        separable: depthwise separable convolutions in the decoder, for the 3x3 ones.
        norm: of the decoder, "batch" or "group".
        standardise: the weights of the decoder's convolutions.
        dropout: rate after ASPP and before the last layer.
        channels: of the decoder, a multiple of 8.
        width: of the encoder's stem; published weights have 64.
        pretrained: a file with the encoder's weights.

    >>> import torch
    >>> net = DeepLab(11, depth=18, width=8, channels=16)
    >>> net(torch.zeros(2, 3, 45, 33)).shape
    torch.Size([2, 11, 45, 33])
    """

    loaded: Loaded | None = None  # what became of the file of weights

    def __init__(
        self,
        num_outputs: int,
        in_channels: int = 3,
        output_stride: int = 16,
        stride_in: StrideIn = "3x3",
        separable: bool = False,
        norm: Norm = "batch",
        standardise: bool = False,
        dropout: float = 0.0,
        channels: int = 256,
        width: int = 64,
        pretrained: str | None = None,
        *,
        depth: int = 50,
    ) -> None:
        super().__init__()
        if not isinstance(channels, int) or channels < GROUP or channels % GROUP:
            raise ValueError(f"deeplab: channels is {channels!r}; expected a multiple of {GROUP}")
        self.output_stride = output_stride
        self.encoder = Encoder(in_channels, output_stride, stride_in, depth=depth, width=width)
        self.decoder = Decoder(
            self.encoder.out_channels[0],
            self.encoder.out_channels[-1],
            num_outputs,
            rates=tuple(rate * 16 // output_stride for rate in _RATES),
            channels=channels,
            dropout=dropout,
            style=Style(norm, standardise, separable),
        )
        if pretrained is not None:
            self.loaded = load_weights(self.encoder, pretrained)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of every pixel: (batch, in_channels, H, W) -> (batch, num_outputs, H, W)."""
        size = x.shape[-2:]
        if x.dim() != 4 or min(size) < self.output_stride:
            finer = (
                ", or build the network with output_stride=8" if min(size) in range(8, 16) else ""
            )
            raise ValueError(
                f"deeplab: an input of shape {tuple(x.shape)}; expected (batch, channels, height, width) "
                f"with height and width of at least {self.output_stride}, the output stride. Fix: "
                f"{'enlarge the pictures' if x.dim() == 4 else 'give a batch'}{finer}."
            )
        return resize(self.decoder(*self.encoder(x)), size)


NETS = {
    "deeplab": Entry(
        "DeepLabv3+ with a ResNet-50 encoder, the paper's segmentation network, 40.3 M parameters",
        partial(DeepLab, depth=50),
        dense=True,
    ),
    "deeplab-resnet18": Entry(
        "DeepLabv3+ with a ResNet-18 encoder, 16.6 M parameters",
        partial(DeepLab, depth=18),
        dense=True,
    ),
    "deeplab-resnet34": Entry(
        "DeepLabv3+ with a ResNet-34 encoder, 26.7 M parameters",
        partial(DeepLab, depth=34),
        dense=True,
    ),
}


def parse(name: str) -> Entry | None:
    """``deeplab-resnet50`` is ``deeplab``; None for other names.

    >>> parse("deeplab-resnet50") is NETS["deeplab"]
    True
    """
    return NETS["deeplab"] if name == "deeplab-resnet50" else None
