r"""A convolution with member factors that is quick without a compiler.

y = s * conv(W, r * x), rows member-major, and with g the gradient by y and h = conv^T(W, s * g):

.. math::
    \frac{\partial L}{\partial s_j} = \sum_{rows\,of\,j, pixels} g \odot conv(W, r x), \qquad
    \frac{\partial L}{\partial r_j} = \sum_{rows\,of\,j, pixels} h \odot x

Autograd does the same in twice as many calls, which is what counts where the host starts each of them, and
keeps r * x too. Here x is kept, which whatever made it mostly keeps as well, and multiplied again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lpbnn.members.rows import gather, vectors

# It can be differentiated once only: False for a gradient penalty in training on a GPU.
enabled = True


class Geometry(NamedTuple):
    """How a convolution lies on its input, as ``torch.convolution`` takes it."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


def geometry(layer: nn.Module) -> Geometry | None:
    """The geometry of a convolution; None where the layer does more than ``torch.convolution``."""
    given: Any = layer
    transposed = isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    convolution = transposed or isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if (
        not enabled
        or not convolution
        or given.padding_mode != "zeros"
        or isinstance(given.padding, str)
    ):
        return None
    return Geometry(
        list(given.stride),
        list(given.padding),
        list(given.dilation),
        transposed,
        list(given.output_padding),
        given.groups,
    )


def member_convolution(x: Tensor, weight: Tensor, r: Tensor, s: Tensor, how: Geometry) -> Tensor:
    """s * conv(weight, r * x) without bias; r (J, m) or (rows, m), s (J, p)."""
    x, weight = as_autocast(x), as_autocast(weight)
    with torch.autocast(x.device.type, enabled=False):
        return _MemberConvolution.apply(x, weight, r, s, how)  # type: ignore[return-value]


def as_autocast(x: Tensor) -> Tensor:
    """What autocast makes of an input of a convolution, for one that casts for itself."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


class _MemberConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, r: Tensor, s: Tensor, how: Geometry) -> Tensor:
        rows = gather(x, r.shape[0])
        by_r = vectors(r, rows)
        y = torch.convolution((rows * by_r).flatten(0, 1), weight, None, *how)
        inner = gather(y, s.shape[0])
        by_s = vectors(s, inner)
        ctx.save_for_backward(rows, weight, by_r, by_s, inner)
        ctx.how, ctx.dtypes = how, (r.dtype, s.dtype)
        out = torch.empty_like(y)  # no view, which could not be changed in place (by a ReLU, say)
        torch.mul(inner, by_s, out=gather(out, s.shape[0]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, r, s, y = ctx.saved_tensors
        needs_x, needs_weight, needs_r, needs_s, _ = ctx.needs_input_grad
        grad = grads[0].view(y.shape)
        grad_x = grad_weight = grad_r = None
        grad_s = _sums(grad, y, ctx.dtypes[1]) if needs_s else None
        if needs_x or needs_r or needs_weight:
            grad = (grad * s).flatten(0, 1)
            # The gradient of the input needs no more of it than the shape.
            scaled = (x * r if needs_weight else x).flatten(0, 1)
            wanted = [needs_x or needs_r, needs_weight, False]
            inner, grad_weight, _ = torch.ops.aten.convolution_backward(
                grad, scaled, weight, None, *ctx.how, wanted
            )
            if needs_x or needs_r:
                inner = inner.view(x.shape)
                grad_r = _sums(inner, x, ctx.dtypes[0]) if needs_r else None
                grad_x = (inner * r).flatten(0, 1) if needs_x else None
        return grad_x, grad_weight, grad_r, grad_s, None


def _sums(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a factor (J, C): a product of two maps, summed over its rows' pixels."""
    if one.dtype == torch.float16:  # whose largest number a product may exceed
        one = one.float()
    return (one * other).sum((1, *range(3, one.dim())), dtype=dtype)
