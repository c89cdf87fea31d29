r"""A convolution with member factors, whose gradients by r and s are read off the weights' own.

y = s * conv(W, r * x), rows member-major. Autograd would sum :math:`\partial L / \partial y \cdot y` over
all pixels for s, and the like for r: two more passes over activations in every layer. But L depends on r_j
and s_j only through W_j = W * (s_j r_j^T), so with D_j, the gradient of the weight over member j's rows,

.. math::
    r_j \frac{\partial L}{\partial r_j} = \sum_{outputs, taps} W \odot D_j, \qquad
    s_j \frac{\partial L}{\partial s_j} = \sum_{inputs, taps} W \odot D_j

and :math:`\partial L / \partial W = \sum_j D_j`: the same arithmetic as one gradient of the weight, J times
its storage for a moment, and sums over weights instead of pixels. Only r * x is kept for the backward pass,
as a plain convolution keeps x.

Where r has a draw for every row, its gradient is the sum over that row's pixels after all, and the gradient
by the input is needed for it in the first layer too.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lpbnn.losses import at_least_float32
from lpbnn.members import per_row

enabled = (
    True  # it can be differentiated once only: False for a gradient penalty in training on a GPU
)


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
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = (t if t.dtype == torch.float64 else t.to(dtype) for t in (x, weight))
    with torch.autocast(kind, enabled=False):
        return _MemberConvolution.apply(x, weight, r, s, how)  # type: ignore[return-value]


class _MemberConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, r: Tensor, s: Tensor, how: Geometry) -> Tensor:
        scaled = x * aligned(r, x)
        y = torch.convolution(scaled, weight, None, *how)
        ctx.save_for_backward(scaled, weight, r, s)
        ctx.how = how
        return y * aligned(s, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scaled, weight, r, s = ctx.saved_tensors
        needs_x, needs_weight, needs_r, needs_s, _ = ctx.needs_input_grad
        how: Geometry = ctx.how
        grad = grads[0] * aligned(s, grads[0])
        grad_x = grad_weight = grad_r = grad_s = None
        by_row = r.shape[0] != s.shape[0]
        if needs_x or (needs_r and by_row):
            inner = _backward(grad, scaled, weight, how, 0)
            if needs_r and by_row:
                pixels = (at_least_float32(inner) * scaled).flatten(2).sum(2)
                pixels = pixels.unflatten(0, (r.shape[0], -1)).sum(1)  # a row may come in windows
                grad_r = pixels.to(r.dtype) / _not_zero(r)
            grad_x = inner * aligned(r, inner)
        if needs_weight or needs_s or (needs_r and not by_row):
            members = s.shape[0]
            parts = zip(grad.chunk(members), scaled.chunk(members), strict=True)
            each = torch.stack([_backward(g, x, weight, how, 1) for g, x in parts])
            grad_weight = each.sum(0)
            on_inputs, on_outputs = _sums(at_least_float32(each) * weight, how)
            if needs_r and not by_row:
                grad_r = on_inputs.to(r.dtype) / _not_zero(r)
            if needs_s:
                grad_s = on_outputs.to(s.dtype) / _not_zero(s)
        return grad_x, grad_weight, grad_r, grad_s, None


def _backward(grad: Tensor, x: Tensor, weight: Tensor, how: Geometry, which: int) -> Tensor:
    """The gradient by the input (0) or by the weight (1) of a convolution."""
    mask = [which == 0, which == 1, False]
    return torch.ops.aten.convolution_backward(grad, x, weight, None, *how, mask)[which]


def _sums(products: Tensor, how: Geometry) -> tuple[Tensor, Tensor]:
    """(J, *weight.shape) summed to (J, inputs) and to (J, outputs)."""
    taps = products.flatten(3).sum(3)
    # An ordinary weight is (outputs, inputs / groups), a transposed one (inputs, outputs / groups).
    first = taps.sum(2)
    second = taps.unflatten(1, (how.groups, -1)).sum(2).flatten(1)
    return (first, second) if how.transposed else (second, first)


def aligned(factor: Tensor, x: Tensor, channels_last: bool = False) -> Tensor:
    """(J or rows, C) to the shape and type that multiply x, whose channels are second, or last (Linear)."""
    rows = per_row(factor, x.shape[0]).to(x.dtype)
    if channels_last:
        return rows.view(rows.shape[0], *(1,) * (x.dim() - 2), rows.shape[1])
    return rows.view(*rows.shape, *(1,) * (x.dim() - 2))


def _not_zero(factor: Tensor) -> Tensor:
    """For a division of what is 0 wherever the factor is: such an entry gets no gradient this way."""
    return torch.where(factor == 0, 1, factor)
