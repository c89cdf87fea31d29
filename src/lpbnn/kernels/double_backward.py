r"""Convolutions that are differentiated twice: by the input, and then what came of it by the weights.

.. math:: y = W * x, \quad g_x = W *^T g_y, \quad \frac{\partial L}{\partial W}
    = \text{the weight gradient of the transposed convolution } g_y \mapsto g_x

Torch has a formula of its own for the last: a convolution whose kernel is as large as the picture. A GPU
does that with a few of its processors. Written as the transposed convolution that it is, :math:`g_x` has
the same weight gradient as any other one, and kernels made for it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.fx import Graph

from lpbnn.kernels.convolution import Geometry, as_autocast

CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


def rewrite(graph: Graph) -> None:
    """Let the convolutions of a graph that is being traced be ``convolution``."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in CONVOLUTIONS:
            node.target = convolution


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """``torch.conv1d``, ``conv2d`` or ``conv3d``, whose gradient by the input is differentiated quickly.

    Its arguments have torch's names: calls of them become calls of this.

    >>> x, weight = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3)
    >>> torch.equal(convolution(x, weight, stride=2), torch.conv2d(x, weight, stride=2))
    True
    """
    spatial = weight.dim() - 2
    rare = isinstance(padding, str) or input.dim() != weight.dim() or weight.is_complex()
    if rare:  # as torch does it
        plain = CONVOLUTIONS[spatial - 1]
        return plain(input, weight, bias, stride, padding, dilation, groups)
    x, weight = as_autocast(input), as_autocast(weight)
    steps = [_each(size, spatial) for size in (stride, padding, dilation)]
    how = Geometry(*steps, transposed=False, output_padding=[0] * spatial, groups=groups)
    y: Tensor = _Convolution.apply(x, weight, how)  # type: ignore[assignment]
    return y if bias is None else y + as_autocast(bias).view(-1, *[1] * spatial)


def _each(size: Any, spatial: int) -> list[int]:
    """A size for every dimension; one alone is that of all."""
    sizes = list(size) if isinstance(size, (tuple, list)) else [size]
    return sizes * spatial if len(sizes) == 1 else sizes


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return torch.convolution(x, weight, None, *how)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # In the types of the forward pass: what is cast around the loss may not be what was cast there.
        with torch.autocast(gradients[0].device.type, enabled=False):
            return *_by_inputs(ctx, *gradients), None


def _by_inputs(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    how: Geometry = ctx.how
    by_x = by_weight = None
    if ctx.needs_input_grad[0]:
        steps = (how.stride, how.padding, how.dilation)
        left = [  # rows and columns of x that no step of the stride reached
            size - ((out - 1) * s - 2 * p + d * (k - 1) + 1)
            for size, out, k, s, p, d in zip(
                x.shape[2:], g.shape[2:], weight.shape[2:], *steps, strict=True
            )
        ]
        back = how._replace(transposed=True, output_padding=left)
        by_x = torch.convolution(g, weight, None, *back)
    if ctx.needs_input_grad[1]:
        wanted = [False, True, False]
        by_weight = torch.ops.aten.convolution_backward(g, x, weight, None, *how, wanted)[1]
    return by_x, by_weight
