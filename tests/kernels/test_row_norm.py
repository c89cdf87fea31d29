"""Batch norm that sums by rows first is batch norm, in compiled training on a GPU."""

import copy

import pytest
import torch
from networks import ResNet
from torch import Tensor, nn

import lpbnn
from lpbnn.kernels import row_norm
from lpbnn.kernels.row_norm import RowNorm, normalise_by_rows, use_row_norms


@pytest.mark.parametrize("momentum", [0.1, 0.7])
@pytest.mark.parametrize("offset", [0.0, 1e4])  # of a size that a sum of squares would drown in
def test_sums_by_rows_equal_batch_norm(momentum: float, offset: float) -> None:
    own = nn.BatchNorm2d(4, momentum=momentum).double()
    nn.init.uniform_(own.weight)
    nn.init.normal_(own.bias)
    other = copy.deepcopy(own)
    x = (offset + torch.randn(6, 4, 5, 3).double()).requires_grad_()
    z = x.detach().clone().requires_grad_()
    for _ in range(2):
        expected, found = own(x), normalise_by_rows(other, z)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        (found * weights).sum().backward()
    torch.testing.assert_close(z.grad, x.grad, rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(other.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(other.state_dict(), own.state_dict(), rtol=1e-9, atol=1e-9)


def test_sums_by_rows_compile_without_a_break_and_keep_the_precision_of_their_input() -> None:
    norm = nn.BatchNorm2d(4)
    compiled = torch.compile(normalise_by_rows, backend="eager", fullgraph=True)
    x = torch.randn(3, 4, 5, 5)
    torch.testing.assert_close(compiled(norm, x), norm(x))
    assert normalise_by_rows(norm, x.bfloat16()).dtype == torch.bfloat16
    torch._dynamo.reset()


def test_row_norms_keep_tensors_and_name_and_undo_removes_them() -> None:
    net = ResNet()
    keys, shown = list(net.state_dict()), repr(net)
    model = lpbnn.build(net, "lpbnn", members=3, num_data=10)
    use_row_norms(model)
    assert sum(type(module) is RowNorm for module in net.modules()) == 4
    assert "RowNorm" not in repr(model)
    x = torch.randn(6, 3, 8, 8)
    model.train().loss(x, torch.randint(3, (6,)))["loss"].backward()
    assert lpbnn.undo(model) is net
    assert not any(type(module) is RowNorm for module in net.modules())
    assert (list(net.state_dict()), repr(net)) == (keys, shown)


class OnGpu(Tensor):
    """A tensor that says it is on a GPU, as a batch norm asks."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.mark.parametrize(("shape", "by_row"), [((4, 3, 8, 8), True), ((4, 3, 64, 64), False)])
def test_large_rows_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], by_row: bool
) -> None:
    calls: list[Tensor] = []
    monkeypatch.setattr(row_norm, "normalise_by_rows", lambda norm, x: calls.append(x) or x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    use_row_norms(norm := nn.Sequential(nn.BatchNorm2d(3)))
    norm.train()(torch.randn(shape).as_subclass(OnGpu))
    assert bool(calls) is by_row
    norm.eval()(torch.randn(shape).as_subclass(OnGpu))
    assert len(calls) == by_row
