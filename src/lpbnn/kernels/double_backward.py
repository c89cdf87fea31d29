r"""Loss terms that contain a gradient, compiled into one graph with fast convolutions.

``run_in_one_graph`` serves losses such as a gradient penalty, which autograd differentiates twice: once by
the inputs, as part of the loss, and once by the weights. A compiled graph cannot be differentiated twice,
but it can contain the first gradient as a part of its forward pass. In that graph every convolution
$y = W * x$ is replaced by ``convolution``, because torch's own formula for the second derivative is a
convolution with a kernel as large as the image. The gradient by the input is a transposed convolution,

$$g_x = W *^T g_y,$$

so its derivative by the weights is the weight gradient of that transposed convolution, for which the
libraries have kernels. On an H200 this made DUQ's compiled step on a WRN-16-4 2.7 times as fast (8,960 to
24,200 images per second, bench/duq-step-h200.txt in results/records.tar.xz); on a CPU it makes no difference.

All private torch APIs that this needs (``torch._dynamo.comptime``, the operators that make up a graph) are
used in this file only. A torch without them runs the same function outside the compiler.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.fx import Graph

from lpbnn.kernels.convolution import Geometry, as_autocast

P = ParamSpec("P")
R = TypeVar("R")

CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


def run_in_one_graph(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return ``function(...)``, as one compiled graph if a compiler is tracing and can do it.

    Otherwise the function runs eagerly, in a compiled caller as one graph break. It must call ``as_leaf``
    for the inputs and ``gradient_norms`` for the inner gradient.
    """
    # Dynamo compiles a function with a try block as a whole or not at all. It would otherwise compile the
    # part of the network before a graph break, and the inner gradient would stop there.
    try:
        if torch.compiler.is_compiling():
            from torch._dynamo.comptime import comptime  # a failed import is a graph break

            comptime(_allow_inner_gradient)
            result = function(*args, **kwargs)
            comptime(_finish_graph)
            return result
    finally:
        pass
    return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[call-arg]


def as_leaf(x: Tensor) -> Tensor:
    """Return a detached copy of ``x`` that requires a gradient."""
    return x.detach().requires_grad_()


def gradient_norms(output: Tensor, inputs: list[Tensor]) -> Tensor:
    r"""Return $\|\nabla_{x_i} output\|$ of every row i of the inputs together, (B,).

    Args:
        output: a scalar.
        inputs: tensors (B, ...) that require a gradient.

    Example:
        >>> x = torch.randn(4, 2, requires_grad=True)
        >>> gradient_norms((x @ torch.tensor([3.0, 4.0])).sum(), [x])
        tensor([5., 5., 5., 5.])
    """
    gradients = torch.autograd.grad(output, inputs, create_graph=True, allow_unused=True)
    used = [g.reshape(g.shape[0], -1) for g in gradients if g is not None]
    if not used:
        raise ValueError(
            "the gradient penalty needs outputs that depend on the inputs; these do not, or the network "
            "detaches its inputs. Fix: build it with gradient_penalty=0."
        )
    used = [g.float() if g.dtype in (torch.bfloat16, torch.float16) else g for g in used]
    return torch.cat(used, 1).norm(dim=1)


def _allow_inner_gradient(trace: Any) -> None:
    """Make the compiler put these functions into its graph as they are (called while it traces)."""
    torch.compiler.allow_in_graph([as_leaf, gradient_norms])


def _finish_graph(trace: Any) -> None:
    """Replace the convolutions of the traced graph, or refuse the graph (called while it traces)."""
    try:
        graph = trace.graph()
        reason = _refusal(graph)
        if reason is None:
            replace_convolutions(graph)
    except (AttributeError, ImportError) as error:
        reason = f"this torch lacks what a compiled gradient penalty needs: {error}"
    if reason is not None:
        trace.graph_break(reason)


def _refusal(graph: Graph) -> str | None:
    """Return why the inner gradient of this graph would be wrong; None if it is right.

    What an ``autograd.Function`` saved, and what the part of the graph before a cut by DDP's optimizer
    returned, are constants to the inner gradient.
    """
    from torch._dynamo import config
    from torch._ops import HigherOrderOperator

    if any(isinstance(node.target, HigherOrderOperator) for node in graph.nodes):
        return "the network has an autograd.Function or a checkpoint, which is differentiated twice"
    ddp = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if ddp is not None and config.optimize_ddp:
        return "DDP's optimize_ddp cuts the network, and the inner gradient needs all of it"
    return None


def replace_convolutions(graph: Graph) -> None:
    """Replace torch's convolutions by ``convolution`` in a graph that is being traced."""
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
    """Compute ``torch.conv1d``, ``conv2d`` or ``conv3d`` with a fast second derivative.

    The arguments have torch's names, because calls of torch's functions become calls of this one.

    Example:
        >>> x, weight = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3)
        >>> torch.equal(convolution(x, weight, stride=2), torch.conv2d(x, weight, stride=2))
        True
    """
    spatial = weight.dim() - 2
    if isinstance(padding, str) or input.dim() != weight.dim() or weight.is_complex():
        original = CONVOLUTIONS[spatial - 1]
        return original(input, weight, bias, stride, padding, dilation, groups)
    x, weight = as_autocast(input), as_autocast(weight)
    sizes = [_per_dimension(size, spatial) for size in (stride, padding, dilation)]
    geometry = Geometry(*sizes, transposed=False, output_padding=[0] * spatial, groups=groups)
    y: Tensor = _Convolution.apply(x, weight, geometry)  # type: ignore[assignment]
    return y if bias is None else y + as_autocast(bias).view(-1, *[1] * spatial)


def _per_dimension(size: Any, spatial: int) -> list[int]:
    """Return one size per spatial dimension; a single size counts for all of them."""
    sizes = list(size) if isinstance(size, (tuple, list)) else [size]
    return sizes * spatial if len(sizes) == 1 else sizes


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return torch.convolution(x, weight, None, *geometry)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # The dtypes are those of the forward pass: autocast may be on around the loss and off around it.
        with torch.autocast(gradients[0].device.type, enabled=False):
            return *_input_gradients(ctx, *gradients), None


def _input_gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    geometry: Geometry = ctx.geometry
    by_x = by_weight = None
    if ctx.needs_input_grad[0]:
        steps = (geometry.stride, geometry.padding, geometry.dilation)
        rest = [  # rows and columns of x that no step of the stride reached
            size - ((out - 1) * s - 2 * p + d * (k - 1) + 1)
            for size, out, k, s, p, d in zip(
                x.shape[2:], g.shape[2:], weight.shape[2:], *steps, strict=True
            )
        ]
        transposed = geometry._replace(transposed=True, output_padding=rest)
        by_x = torch.convolution(g, weight, None, *transposed)
    if ctx.needs_input_grad[1]:
        wanted = [False, True, False]
        by_weight = torch.ops.aten.convolution_backward(g, x, weight, None, *geometry, wanted)[1]
    return by_x, by_weight
