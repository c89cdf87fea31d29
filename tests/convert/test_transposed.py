"""Linear layers with a transposed weight (``Conv1D`` of GPT-2): members equal networks built separately."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpbnn


class Conv1D(nn.Module):
    """As transformers has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.size()[:-1], self.nf)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Conv1D(6, 4), Conv1D(4, 6)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.second(torch.tanh(self.first(x)))).mean(1))


def test_members_equal_separately_built_networks() -> None:
    plain, x = Block().double(), torch.randn(5, 7, 4, dtype=torch.float64)
    model = lpbnn.build(copy.deepcopy(plain), "lpbnn", members=3, num_data=10).double()
    assert [layer.path for layer in model.layers] == ["first", "second", "head"]
    with torch.no_grad():
        for layer in model.layers:
            layer.member_bias.normal_()
        sampled = model.sample()
        rows = model.run_rows(sampled, model.call((x,), {})).view(3, 5, 3)
        for j in range(3):
            net = copy.deepcopy(plain)
            layers = (net.first, net.second, net.head)
            for layer, factors, own in zip(layers, sampled.layers, model.layers, strict=True):
                r, s = factors.r[j], factors.s[j]
                transposed = isinstance(layer, Conv1D)
                layer.weight.mul_(torch.outer(r, s) if transposed else torch.outer(s, r))
                layer.bias.copy_(own.member_bias[j])
            torch.testing.assert_close(rows[j], net(x))


class WithoutBias:
    """A namespace: the layer is known by its name."""

    class Conv1D(Conv1D):
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__(nf, nx)
            self.bias = None

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight


def test_a_layer_without_bias_is_converted_and_restored_without_one() -> None:
    net, x = nn.Sequential(WithoutBias.Conv1D(6, 4), nn.Tanh(), nn.Linear(6, 3)), torch.randn(5, 4)
    expected, first = net(x), net[0]
    model = lpbnn.build(net, "batchensemble", members=3, init_std=0.0)
    assert [layer.path for layer in model.layers] == ["0", "2"]
    torch.testing.assert_close(model(x), expected.expand(3, -1, -1))
    assert lpbnn.undo(model)[0] is first
    assert first.bias is None
    assert torch.equal(net(x), expected)


def test_undo_gives_the_layers_back_bit_for_bit_with_their_hooks_and_frozen_weights() -> None:
    net, calls = Block(), []
    net.first.weight.requires_grad_(False)
    net.first.register_forward_hook(lambda *_: calls.append("after"))
    net.first.register_forward_pre_hook(lambda *_: calls.append("before"))
    before, first = copy.deepcopy(net.state_dict()), net.first
    model = lpbnn.build(net, "batchensemble", members=2)
    assert not model.layers[0].layer.weight.requires_grad
    calls.clear()
    model(torch.randn(2, 7, 4))
    assert sorted(set(calls)) == ["after", "before"]
    assert lpbnn.undo(model).first is first
    after = net.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not first.weight.requires_grad
    assert first.weight.is_contiguous()
    calls.clear()
    net(torch.randn(2, 7, 4))
    assert calls == ["before", "after"]


@pytest.mark.parametrize("include", [nn.Linear, Conv1D, ["first", "second"]])
def test_filters_choose_it_as_a_linear_layer_by_its_own_type_and_by_path(include: Any) -> None:
    model = lpbnn.build(Block(), "batchensemble", include=include)
    assert [layer.path for layer in model.layers][:2] == ["first", "second"]


def test_a_trunk_of_such_layers_runs_once_if_only_the_head_is_converted() -> None:
    model, rows = lpbnn.build(Block(), "batchensemble", members=4, include="head"), []
    model.net.first.register_forward_hook(lambda *call: rows.append(len(call[-1])))
    lpbnn.check(model, torch.randn(5, 7, 4))
    rows.clear()
    model(torch.randn(5, 7, 4))
    assert rows == [5]


@pytest.mark.parametrize("method", ["meanfield", "mcdropout"])
def test_other_methods_convert_it_too(method: str) -> None:
    net, x = Block(), torch.randn(5, 7, 4)
    expected = net(x)
    model = lpbnn.build(net, method, members=2, num_data=10)
    p = lpbnn.predict(model, x, seed=0)
    assert p.epistemic.max() > 0
    assert torch.equal(lpbnn.undo(model)(x), expected)


class WithActivation(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


WithActivation.__name__ = "Conv1D"


def test_a_forward_of_its_own_is_refused_by_name() -> None:
    net = nn.Sequential(WithActivation(3, 4), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"'0' is a Conv1D with a forward .* exclude='0'"):
        lpbnn.build(net, "batchensemble")


def test_mean_network_and_freeze_keep_the_layer() -> None:
    model, x = lpbnn.build(Block(), "lpbnn", members=2, num_data=10), torch.randn(5, 7, 4)
    mean = lpbnn.mean_network(model)
    assert isinstance(mean.first, Conv1D)
    frozen = lpbnn.freeze(model, seed=0)
    torch.testing.assert_close(
        lpbnn.predict(frozen, x).probs, lpbnn.predict(model, x, seed=0).probs
    )


def test_a_layer_that_is_left_as_it_is_runs_once_for_all_members() -> None:
    net = nn.Sequential(Conv1D(8, 4), nn.ReLU(), nn.Linear(8, 3))
    model: Any = lpbnn.build(net, "batchensemble", members=3, include="2")
    rows: list[int] = []
    net[0].register_forward_hook(lambda module, args, output: rows.append(len(output)))
    x = torch.randn(5, 4)
    lpbnn.check(model, x)
    rows.clear()
    assert model(x).shape == (3, 5, 3)
    assert rows == [5]
