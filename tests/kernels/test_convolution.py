"""The convolution with member factors: the gradients of its definition, from what is kept anyway."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lpbnn.kernels.convolution import fast_geometry, geometry, member_convolution
from lpbnn.rank_one import layer as rank_one_layer
from lpbnn.rank_one.factors import PointFactors
from lpbnn.rank_one.layer import RankOneLayer

ON_GPU: Any = SimpleNamespace(is_cuda=True)  # what the choice asks of an input
CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(4, 6, 3, padding=1, bias=False),
    "strided, grouped, dilated": lambda: nn.Conv2d(4, 6, 3, 2, groups=2, dilation=2, bias=False),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False),
    "one dimension": lambda: nn.Conv1d(4, 6, 3, bias=False),
    "three dimensions": lambda: nn.Conv3d(4, 6, 2, groups=2, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2, bias=False),
    "transposed, output padding": lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, bias=False),
}


def inputs(layer: Any, by_row: bool, rows: int = 6, members: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    spatial = (5,) * (layer.weight.dim() - 2)
    x = torch.randn(rows, layer.in_channels, *spatial, dtype=torch.float64)
    r = 1 + 0.3 * torch.randn(rows if by_row else members, layer.in_channels, dtype=x.dtype)
    s = 1 + 0.3 * torch.randn(members, layer.out_channels, dtype=x.dtype)
    return tuple(t.requires_grad_() for t in (x, layer.weight.detach(), r, s))


def by_definition(layer: Any, x: Tensor, weight: Tensor, r: Tensor, s: Tensor) -> Tensor:
    def rows(factor: Tensor, like: Tensor) -> Tensor:
        each = factor.repeat_interleave(len(like) // len(factor), 0)
        return each.view(*each.shape, *(1,) * (like.dim() - 2))

    y = torch.func.functional_call(layer, {"weight": weight}, (x * rows(r, x),))
    return y * rows(s, y)


@pytest.mark.parametrize("by_row", [False, True], ids=["r by member", "r by row"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_values_and_gradients_are_those_of_the_definition(kind: str, by_row: bool) -> None:
    layer = CONVOLUTIONS[kind]().double()
    given = inputs(layer, by_row)
    how = geometry(layer)
    assert how is not None
    y, expected = member_convolution(*given, how), by_definition(layer, *given)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-13)
    cotangent = torch.randn_like(y)
    ours = torch.autograd.grad(y, given, cotangent)
    theirs = torch.autograd.grad(expected, given, cotangent)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("wanted", range(4))
def test_only_what_is_asked_for_is_computed(wanted: int) -> None:
    """One gradient at a time: the others may belong to frozen tensors."""
    layer = CONVOLUTIONS["plain"]().double()
    given = [t.detach() for t in inputs(layer, by_row=False)]
    given[wanted].requires_grad_()
    how = geometry(layer)
    assert how is not None
    loss = member_convolution(*given, how).square().sum()
    (ours,) = torch.autograd.grad(loss, given[wanted])
    (theirs,) = torch.autograd.grad(by_definition(layer, *given).square().sum(), given[wanted])
    torch.testing.assert_close(ours, theirs)


def test_the_input_and_one_map_are_kept() -> None:
    """The input as it is, which a ReLU before it keeps too, and what s multiplies; r * x is not."""
    layer = CONVOLUTIONS["plain"]().double()
    given = inputs(layer, by_row=False)
    how = geometry(layer)
    assert how is not None
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = member_convolution(*given, how)
    large = [tensor for tensor in kept if tensor.numel() >= given[0].numel()]
    assert sorted(tensor.shape[-3] for tensor in large) == [4, 6]  # channels of the input, of y
    assert any(tensor.data_ptr() == given[0].data_ptr() for tensor in large)
    y.relu_()  # in place, as networks without batch norm have it
    y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_factors_of_zero_have_gradients(dtype: torch.dtype) -> None:
    layer = CONVOLUTIONS["plain"]().to(dtype)
    x, weight, r, s = (t.detach().to(dtype) for t in inputs(layer, by_row=False))
    how = geometry(layer)
    assert how is not None
    zero = torch.zeros_like(r).requires_grad_()
    s[0] = 0
    grads = torch.autograd.grad(
        member_convolution(x, weight, zero, s.requires_grad_(), how).sum(), (zero, s)
    )
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][1] != 0).all()


def test_a_row_may_come_in_windows() -> None:
    """Swin's windows or a video's frames: the first dimension is a multiple of the rows of r."""
    layer = CONVOLUTIONS["plain"]().double()
    x, weight, r, s = inputs(layer, by_row=True)
    how = geometry(layer)
    assert how is not None
    windows = torch.cat([x, x + 1, x - 1]).detach()
    ours = torch.autograd.grad(
        member_convolution(windows, weight, r, s, how).square().sum(), (r, s)
    )
    theirs = torch.autograd.grad(by_definition(layer, windows, weight, r, s).square().sum(), (r, s))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("by_row", [False, True], ids=["r by member", "r by row"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_second_derivatives_are_those_of_the_definition(kind: str, by_row: bool) -> None:
    layer = CONVOLUTIONS[kind]().double()
    given = inputs(layer, by_row)
    how = geometry(layer)
    assert how is not None
    found = []
    for y in (member_convolution(*given, how), by_definition(layer, *given)):
        gradients = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        found.append([*gradients, *torch.autograd.grad(penalty, given)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_second_derivatives_agree_with_differences() -> None:
    layer = CONVOLUTIONS["plain"]().double()
    given = inputs(layer, by_row=False, rows=2)
    how = geometry(layer)
    assert how is not None
    assert torch.autograd.gradgradcheck(
        lambda *tensors: member_convolution(*tensors, how), given, fast_mode=True
    )


@pytest.mark.parametrize("wanted", range(4))
def test_a_second_derivative_by_one_tensor_alone(wanted: int) -> None:
    layer = CONVOLUTIONS["plain"]().double()
    given = [t.detach() for t in inputs(layer, by_row=False)]
    given[wanted].requires_grad_()
    how = geometry(layer)
    assert how is not None
    found = []
    for y in (member_convolution(*given, how), by_definition(layer, *given)):
        (gradient,) = torch.autograd.grad(y.pow(3).sum(), given[wanted], create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), given[wanted])[0])
    torch.testing.assert_close(*found)


def test_inside_torch_func_the_layer_uses_ordinary_operations() -> None:
    layer = RankOneLayer(nn.Conv2d(4, 6, 3), PointFactors(2, 4, 6))
    found = []

    def run(x: Tensor) -> Tensor:
        found.append(fast_geometry(layer.layer, ON_GPU))
        return layer(x).sum()

    torch.func.grad(run)(torch.ones(2, 4, 5, 5))
    run(torch.ones(2, 4, 5, 5))
    assert found[0] is None
    assert found[1] is not None


def test_padding_that_torch_convolution_does_not_do_is_left_to_the_layer() -> None:
    assert geometry(nn.Linear(3, 2)) is None
    assert geometry(nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular")) is None
    assert geometry(nn.Conv2d(3, 2, 3, padding="same")) is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("padding", [{"padding": 1}, {"padding": "same"}])
def test_a_layer_is_the_same_with_it_and_without(
    monkeypatch: pytest.MonkeyPatch, bias: bool, padding: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, bias=bias, **padding)
    layer = RankOneLayer(conv, PointFactors(2, 4, 6)).double()
    monkeypatch.setattr(rank_one_layer, "prefers_member_weights", lambda *call: False)
    x = torch.randn(6, 4, 5, 5, dtype=torch.float64)
    found = []
    for fast in (True, False):
        how = geometry if fast else lambda inner: None
        choose = lambda layer, x, how=how: how(layer)  # noqa: E731
        monkeypatch.setattr(rank_one_layer, "fast_geometry", choose)
        y = layer(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_it_is_used_in_training_on_a_gpu_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = RankOneLayer(nn.Conv2d(4, 6, 3), PointFactors(2, 4, 6))
    assert fast_geometry(layer.layer, ON_GPU) is not None
    assert (
        fast_geometry(layer.layer, torch.ones(2, 4, 5, 5)) is None
    )  # members' own weights cost less
    with torch.no_grad():
        assert fast_geometry(layer.layer, ON_GPU) is None
    assert fast_geometry(layer.layer.eval(), ON_GPU) is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert fast_geometry(layer.layer.train(), ON_GPU) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_under_autocast_it_computes_as_the_layer_would(dtype: torch.dtype) -> None:
    layer = CONVOLUTIONS["plain"]().to(dtype)
    given = [t.detach().to(dtype).requires_grad_() for t in inputs(layer, by_row=False)]
    how = geometry(layer)
    assert how is not None
    with torch.autocast("cpu", torch.bfloat16):
        y = member_convolution(*given, how)
        expected = by_definition(layer, *given)
    assert y.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)  # as autocast does it
    torch.testing.assert_close(y.float(), expected.float(), rtol=0.03, atol=0.05)
    grads = torch.autograd.grad(y.float().square().sum(), given)
    assert [grad.dtype for grad in grads] == [dtype] * 4
