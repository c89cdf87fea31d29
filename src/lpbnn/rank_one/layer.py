r"""RankOneLayer: the one wrapper around an existing layer; member j computes with W * (s_j r_j^T).

One member alone is the reference: the layer's own operation with the member's weight. For several members,
whose rows share the first dimension, there are three ways to compute y = s * W(r * x) + b, equal to
rounding:

- *scaled activations*: two elementwise products around one call of the layer on all rows;
- *fast convolution*: the same with its own backward pass (``lpbnn.kernels``), for eager training on a GPU;
- *member weights*: the reference for each member in turn. It moves J * |W| numbers instead of two
  activations, which on a CPU costs a convolution 6 % and not 37 %.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lpbnn.convert.checks import SUPPORTED, TRANSPOSED, is_odd, widths
from lpbnn.convert.wrapper import Guarded, Wrapper, mean_of_copies
from lpbnn.kernels.convolution import fast_geometry, member_convolution
from lpbnn.kernels.rows import (
    is_one_product,
    prefers_member_weights,
    run_all_members,
    scale_rows,
    shift_rows,
)
from lpbnn.members.passes import MemberPass, PassSlot, require_member_rows
from lpbnn.members.rows import expand_batch
from lpbnn.rank_one.factors import Factors, LayerFactors, SampledFactors

CONVOLVE = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
CONVOLVE_TRANSPOSED = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}


class RankOneLayer(Wrapper):
    """A layer with members: member j computes with W * (s_j r_j^T) and bias b_j.

    The wrapped layer keeps its weight; its bias moves here, once per member. In a pass of the model the
    layer reads its factors from the slot; called without a model, it samples its own. Rows are member-major
    (see ``lpbnn.members.rows``).

    Args:
        layer: a Linear or (transposed) convolution.
        factors: the parameters of r and s.
        path: the layer's path in the network.

    Example:
        >>> from lpbnn.rank_one.factors import PointFactors
        >>> layer = RankOneLayer(nn.Linear(3, 2), PointFactors(members=4, inputs=3, outputs=2))
        >>> tuple(layer(torch.randn(8, 3)).shape)  # two examples for each of the four members
        (8, 2)
    """

    member_bias: nn.Parameter | None

    def __init__(self, layer: nn.Module, factors: Factors, path: str = "") -> None:
        if widths(layer) != (factors.inputs, factors.outputs):
            raise ValueError(
                f"{path or type(layer).__name__} has {widths(layer)} inputs and outputs, the factors "
                f"are made for {(factors.inputs, factors.outputs)}; build them from widths(layer)."
            )
        if type(layer) not in SUPPORTED and not is_odd(layer):
            raise ValueError(
                f"{path!r} is a {type(layer).__name__} with a forward of its own that is not linear: "
                "members scale what goes into a layer and what comes out of it. Leave it out with "
                f"exclude={path!r}."
            )
        super().__init__(layer, path)
        self.factors = factors
        bias: Tensor | None = layer.bias  # type: ignore[assignment]
        self.register_parameter("member_bias", None)
        if bias is not None:
            copies = bias.detach().repeat(factors.members, 1)
            self.member_bias = nn.Parameter(copies, requires_grad=bias.requires_grad)
            layer._parameters["bias"] = None
        # The model replaces both: its layers share one slot, and are numbered in it.
        self.slot = PassSlot()
        self.index = 0
        self.expands_batch = False  # True if it may receive a batch that is not expanded yet

    @property
    def bias(self) -> Guarded | None:
        """The bias, which code around the layer may ask about, not compute with; the layer has none."""
        if self.member_bias is None:
            return None
        return Guarded(self.member_bias.detach()[0], self._refusal("bias"))

    @property
    def is_standard(self) -> bool:
        """True if the layer is torch's own, so that ``_apply`` knows its operation."""
        layer: Any = self.layer
        return (
            type(layer) in SUPPORTED
            and not parametrize.is_parametrized(layer)
            and not layer._forward_pre_hooks
        )

    def extra_repr(self) -> str:
        return f"members={self.factors.members}"

    def restore(self) -> nn.Module:
        """Return the wrapped layer: the shared weight, and the mean of the members' biases."""
        if self.member_bias is not None:
            self.layer.bias = mean_of_copies(self.member_bias)
        return super().restore()

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state: MemberPass | None = self.slot.get()
        sampled = sample_layers([self]) if state is None else state.sampled
        factors = sampled.layers[0 if state is None else self.index]
        layer, bias, members = self.layer, self.member_bias, sampled.count
        bias = None if bias is None else sampled.select(bias)
        if members == 1:
            return self.run_member(input, factors, bias, *args, **kwargs)
        known = not args and not kwargs and self.is_standard  # _apply knows the operation
        if self.expands_batch and state is not None and input.shape[0] * members == state.rows:
            if known and is_one_product(layer, factors.r, factors.s):
                return run_all_members(layer, input, member_weights(layer, factors), bias)
            input = expand_batch(input, members)
        require_member_rows(input.shape[0], members, state, self.path or "RankOneLayer")
        if known and prefers_member_weights(layer, input, factors.r, factors.s):
            return _use_member_weights(layer, input, factors, bias)
        if known and (how := fast_geometry(layer, input)) is not None:
            y = member_convolution(input, layer.weight, factors.r, factors.s, how)  # type: ignore[arg-type]
            return y if bias is None else shift_rows(y, bias)
        linear = isinstance(layer, nn.Linear)
        y = layer(scale_rows(input, factors.r, linear), *args, **kwargs)
        return scale_rows(y, factors.s, linear, bias)

    def run_member(
        self, x: Tensor, factors: LayerFactors, bias: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return the output of one member for inputs of any shape: the reference."""
        layer = self.layer
        if self.is_standard and not args and not kwargs:
            weight = member_weights(layer, factors)[0]
            return _apply(layer, x, weight, None if bias is None else bias[0])
        # A layer of its own kind, or with arguments: as scaled activations, channels counted from the end.
        channel = -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)  # type: ignore[arg-type]
        shape = (-1, *(1,) * (-1 - channel))
        y = layer(x * factors.r[0].to(x.dtype).view(shape), *args, **kwargs)
        y = y * factors.s[0].to(y.dtype).view(shape)
        return y if bias is None else y + bias[0].to(y.dtype).view(shape)


def sample_layers(layers: list[RankOneLayer], samples: int = 1) -> SampledFactors:
    """Sample the factors of layers that belong to no model's pass."""
    posterior = type(layers[0].factors).posterior([layer.factors for layer in layers])
    return SampledFactors(posterior.sample(samples))


def member_weights(layer: nn.Module, factors: LayerFactors) -> Tensor:
    r"""Return W_j = W * (s_j r_j^T) for every member: (M, \*weight.shape), grouped layers included."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    r, s = factors.r.to(weight.dtype), factors.s.to(weight.dtype)
    groups: int = getattr(layer, "groups", 1)
    rows, columns = (r, s) if isinstance(layer, TRANSPOSED) else (s, r)  # of the weight
    if groups == 1:
        outer = rows.unsqueeze(2) * columns.unsqueeze(1)
    else:  # a group's rows meet that group's columns
        rows, columns = rows.unflatten(1, (groups, -1)), columns.unflatten(1, (groups, -1))
        outer = (rows.unsqueeze(3) * columns.unsqueeze(2)).flatten(1, 2)
    return weight * outer.view(*outer.shape, *(1,) * (weight.dim() - 2))


def _use_member_weights(
    layer: nn.Module, x: Tensor, factors: LayerFactors, bias: Tensor | None
) -> Tensor:
    """Return the rows of all members, each by the layer's operation with its own weight."""
    weights = member_weights(layer, factors)
    members = len(weights)
    if isinstance(layer, nn.Linear):
        rows, wide = x.reshape(members, -1, x.shape[-1]), weights.mT
        y = rows @ wide if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, wide)
        return y.reshape(*x.shape[:-1], -1)
    biases = [None] * members if bias is None else bias.unbind()
    parts = zip(x.chunk(members), weights, biases, strict=True)
    return torch.cat([_apply(layer, part, weight, own) for part, weight, own in parts])


def _apply(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply torch's own layer with another weight and bias."""
    kind = type(layer)
    if kind is nn.Linear:
        return F.linear(x, weight, bias)
    if kind in CONVOLVE_TRANSPOSED:
        output_padding, dilation = layer.output_padding, layer.dilation
        return CONVOLVE_TRANSPOSED[kind](
            x, weight, bias, layer.stride, layer.padding, output_padding, layer.groups, dilation
        )
    padding = layer.padding
    if layer.padding_mode != "zeros":
        x, padding = F.pad(x, _padding_of_both_sides(layer), mode=layer.padding_mode), 0
    return CONVOLVE[kind](x, weight, bias, layer.stride, padding, layer.dilation, layer.groups)


def _padding_of_both_sides(layer: Any) -> list[int]:
    """Return the padding of a convolution as ``F.pad`` takes it: the last dimension first."""
    if layer.padding == "same":
        sizes = zip(reversed(layer.kernel_size), reversed(layer.dilation), strict=True)
        totals = [dilation * (size - 1) for size, dilation in sizes]
        return [side for total in totals for side in (total // 2, total - total // 2)]
    padding = [0] * len(layer.kernel_size) if layer.padding == "valid" else layer.padding
    return [side for size in reversed(padding) for side in (size, size)]
