"""Convolutions with a fast second derivative: the numbers are torch's own."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from networks import ResNet
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule

import lpbnn
from lpbnn.kernels.double_backward import CONVOLUTIONS, convolution

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"padding": 1},
    "a stride that leaves a row over": {"stride": 2, "padding": 1},
    "a stride that leaves two": {"stride": (3, 2)},
    "dilated": {"dilation": 2, "padding": (2, 0)},
    "all at once": {"stride": [2, 3], "padding": [1, 2], "dilation": [2, 1]},
    "groups": {"groups": 2, "padding": 1, "stride": 2},
    "as torch pads": {"padding": "same"},
}


def second(
    apply: Any, x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any
) -> list[Tensor]:
    """Return the output, its gradient by x, and the gradients of a penalty on both."""
    x = x.detach().requires_grad_()
    y = apply(x, weight, bias, **options)
    (by_x,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    penalty = by_x.square().sum().sqrt() + y.cos().sum()
    wanted = [t for t in (x, weight, bias) if t is not None]
    return [y, by_x, *torch.autograd.grad(penalty, wanted)]


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_both_gradients_equal_those_of_torch(options: dict[str, Any], with_bias: bool) -> None:
    groups = options.get("groups", 1)
    x = torch.randn(3, 4, 11, 10).double()
    weight = torch.randn(6, 4 // groups, 3, 3).double().requires_grad_()
    bias = torch.randn(6).double().requires_grad_() if with_bias else None
    expected = second(torch.conv2d, x, weight, bias, **options)
    found = second(convolution, x, weight, bias, **options)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_images_of_any_dimension(spatial: int) -> None:
    x = torch.randn(2, 3, *[9, 8, 7][:spatial]).double()
    weight = torch.randn(4, 3, *[3] * spatial).double().requires_grad_()
    plain = CONVOLUTIONS[spatial - 1]
    expected = second(plain, x, weight, None, stride=2, padding=1)
    torch.testing.assert_close(second(convolution, x, weight, None, stride=2, padding=1), expected)
    torch.testing.assert_close(convolution(x[0], weight), plain(x[0], weight))  # no batch


def test_arguments_may_be_given_by_name() -> None:
    x, weight = torch.randn(2, 2, 5, 5), torch.randn(2, 2, 3, 3)
    named = {"bias": torch.randn(2), "stride": 2, "padding": 1, "dilation": 1, "groups": 1}
    found = convolution(input=x, weight=weight, **named)
    torch.testing.assert_close(found, torch.conv2d(input=x, weight=weight, **named))


def test_third_derivatives_are_right() -> None:
    x, weight = torch.randn(2, 2, 5, 5).double(), torch.randn(2, 2, 3, 3).double()
    inputs = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradgradcheck(lambda x, w: convolution(x, w, stride=2), inputs)


def test_autocast_applies_as_to_torchs_convolutions() -> None:
    """Half precision where torch has it, except for float64; gradients have the weights' dtype."""
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = convolution(x, weight)
        assert y.dtype == torch.conv2d(x, weight).dtype == torch.bfloat16
        assert convolution(x.double(), weight.double()).dtype == torch.float64
    (gradient,) = torch.autograd.grad(y.float().sum(), weight)
    assert gradient.dtype == torch.float32
    exact = torch.autograd.grad(torch.conv2d(x, weight).sum(), weight)[0]
    torch.testing.assert_close(gradient, exact, rtol=0.02, atol=0.1)


def test_a_part_without_autocast_has_gradients_without_autocast() -> None:
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3, requires_grad=True)
    exact = second(torch.conv2d, x, weight, None)

    def uncast(*args: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return convolution(*args)

    with torch.autocast("cpu", torch.bfloat16):  # around the inner gradient too
        found = second(uncast, x, weight, None)
    torch.testing.assert_close(found, exact)


def test_complex_convolutions_equal_those_of_torch() -> None:
    x = torch.randn(2, 2, 5, 5, dtype=torch.complex64)
    weight = torch.randn(2, 2, 3, 3, dtype=torch.complex64)
    torch.testing.assert_close(convolution(x, weight), torch.conv2d(x, weight))


def test_a_compiled_step_of_duq_has_no_kernel_as_large_as_the_image() -> None:
    """Torch's own formula for the second derivative would have one."""
    model = lpbnn.build(ResNet(), "duq", sigma=0.5).double().train()
    widths: Counter[int] = Counter()

    def note_widths(graph: GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.convolution.default:
                widths[node.args[1].meta["val"].shape[-1]] += 1
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    step = torch.compile(
        copy.deepcopy(model).loss,
        backend=aot_autograd(fw_compiler=note_widths, bw_compiler=note_widths),
        fullgraph=True,
    )
    step(torch.randn(4, 3, 16, 16).double(), torch.randint(3, (4,)))["loss"].backward()
    assert widths
    assert max(widths) <= 3
