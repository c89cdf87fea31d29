r"""A convolution with member factors that is quick without a compiler.

y = s * conv(W, r * x), rows member-major, and with g the gradient by y and h = conv^T(W, s * g):

$$
\frac{\partial L}{\partial s_j} = \sum_{rows\,of\,j, pixels} g \odot conv(W, r x), \qquad
\frac{\partial L}{\partial r_j} = \sum_{rows\,of\,j, pixels} h \odot x
$$

Autograd does the same in twice as many calls, which limits training on a GPU where the host starts each of
them, and keeps r * x too. Here x is kept, which the layer before mostly keeps as well.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lpbnn.kernels.rows import as_vectors
from lpbnn.members.rows import gather

_convolution_backward = getattr(torch.ops.aten, "convolution_backward", None)
_peek_transform = getattr(
    getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: "unknown"
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
    """Return the geometry of a convolution; None if the layer does more than ``torch.convolution``."""
    given: Any = layer
    transposed = isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    convolution = transposed or isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if not convolution or given.padding_mode != "zeros" or isinstance(given.padding, str):
        return None
    return Geometry(
        list(given.stride),
        list(given.padding),
        list(given.dilation),
        transposed,
        list(given.output_padding),
        given.groups,
    )


def fast_geometry(layer: nn.Module, x: Tensor) -> Geometry | None:
    """Return the geometry if ``member_convolution`` is the fastest way to train this layer, else None."""
    # Compilers sum over pixels faster (docs/results/cost.md); torch.func cannot look into our backward pass.
    if torch.compiler.is_compiling() or not x.is_cuda or not torch.is_grad_enabled():
        return None
    if not layer.training or _convolution_backward is None or _peek_transform() is not None:
        return None
    return geometry(layer)


def member_convolution(x: Tensor, weight: Tensor, r: Tensor, s: Tensor, how: Geometry) -> Tensor:
    """Return s * conv(weight, r * x) without bias; r is (J, m) or (rows, m), s is (J, p)."""
    x, weight = as_autocast(x), as_autocast(weight)
    with torch.autocast(x.device.type, enabled=False):
        return _MemberConvolution.apply(x, weight, r, s, how)  # type: ignore[return-value]


def as_autocast(x: Tensor) -> Tensor:
    """Cast an input of a convolution as autocast would."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _forward(x: Tensor, weight: Tensor, r: Tensor, s: Tensor, how: Geometry) -> Tensor:
    """Return the same with ordinary operations, which autograd can differentiate any number of times."""
    rows = gather(x, r.shape[0])
    y = torch.convolution((rows * as_vectors(r, rows)).flatten(0, 1), weight, None, *how)
    inner = gather(y, s.shape[0])
    return (inner * as_vectors(s, inner)).flatten(0, 1)


class _MemberConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, r: Tensor, s: Tensor, how: Geometry) -> Tensor:
        rows = gather(x, r.shape[0])
        y = torch.convolution((rows * as_vectors(r, rows)).flatten(0, 1), weight, None, *how)
        inner = gather(y, s.shape[0])
        ctx.save_for_backward(x, weight, r, s, y)
        ctx.how = how
        out = torch.empty_like(y)  # no view, which could not be changed in place (by a ReLU, say)
        torch.mul(inner, as_vectors(s, inner), out=gather(out, s.shape[0]))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, r, s, y = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():  # create_graph: the gradient will be differentiated, too
            return (*_differentiable(x, weight, r, s, ctx.how, grads[0], wanted), None)
        rows, inner = gather(x, r.shape[0]), gather(y, s.shape[0])
        by_r, by_s = as_vectors(r, rows), as_vectors(s, inner)
        grad = grads[0].view(inner.shape)
        grad_x = grad_weight = grad_r = None
        grad_s = _sums(grad, inner, s.dtype) if wanted[3] else None
        if any(wanted[:3]):
            grad = (grad * by_s).flatten(0, 1)
            # The gradient of the input needs only the input's shape.
            scaled = (rows * by_r).flatten(0, 1) if wanted[1] else x
            mask = [wanted[0] or wanted[2], wanted[1], False]
            assert _convolution_backward is not None
            h, grad_weight, _ = _convolution_backward(grad, scaled, weight, None, *ctx.how, mask)
            if mask[0]:
                h = h.view(rows.shape)
                grad_r = _sums(h, rows, r.dtype) if wanted[2] else None
                grad_x = (h * by_r).flatten(0, 1) if wanted[0] else None
        return grad_x, grad_weight, grad_r, grad_s, None


def _differentiable(
    x: Tensor, weight: Tensor, r: Tensor, s: Tensor, how: Geometry, grad: Tensor, wanted: Any
) -> list[Tensor | None]:
    """Return the gradients as a graph of ordinary operations, for a second differentiation."""
    inputs = [x, weight, r, s]
    y = _forward(x, weight, r, s, how)
    chosen = [tensor for tensor, want in zip(inputs, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(y, chosen, grad, create_graph=True))
    return [next(found) if want else None for want in wanted]


def _sums(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a factor (J, C): a product of two maps, summed over its rows' pixels."""
    if one.dtype == torch.float16:  # whose largest number a product may exceed
        one = one.float()
    return (one * other).sum((1, *range(3, one.dim())), dtype=dtype)
