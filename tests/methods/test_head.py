"""A head that a method removes: ``undo`` puts it back."""

import copy
from typing import Any

import pytest
import torch
from networks import Mlp, ResNet, UsersOwn
from torch import Tensor, nn

import lpbnn


def example(net: nn.Module, size: int) -> tuple[Any, Tensor]:
    y = torch.randint(3, (size,))
    if isinstance(net, UsersOwn):
        return (torch.randn(size, 5), torch.randn(size, 3)), y
    return torch.randn(size, *net.shape), y


@pytest.mark.parametrize("net", [Mlp, ResNet, UsersOwn])
def test_undo_returns_the_network_with_its_head(net: Any) -> None:
    network = net()
    given = copy.deepcopy(network)
    model = lpbnn.build(network, "duq")
    model.loss(*example(network, 5))["loss"].backward()
    torch.optim.SGD(model.parameters(), 0.05).step()
    trained = copy.deepcopy(model.net.state_dict())
    for undone in (lpbnn.undo(copy.deepcopy(model)), lpbnn.undo(model)):
        assert [type(m) for m in undone.modules()] == [type(m) for m in given.modules()]
        torch.testing.assert_close(
            undone.state_dict(), given.state_dict() | trained, rtol=0, atol=0
        )
    assert lpbnn.undo(model) is network
    untrained = lpbnn.undo(lpbnn.build(copy.deepcopy(given), "duq"))
    torch.testing.assert_close(untrained.state_dict(), given.state_dict(), rtol=0, atol=0)


def test_the_removed_head_is_no_part_of_the_network_but_follows_it() -> None:
    net, seen = Mlp(), []
    head = net[4]
    head.register_forward_hook(lambda module, args, output: seen.append(output))
    model = lpbnn.build(net, "duq")
    assert list(model.state_dict())[:3] == ["W", "N", "m"]
    assert not [name for name in model.state_dict() if name.startswith("net.4")]
    assert not {id(p) for p in head.parameters()} & {id(p) for p in model.parameters()}
    x = torch.randn(2, 5, dtype=torch.float64)
    model.double().eval()(x)
    features = nn.Sequential(*list(net)[:4])(x)
    assert torch.equal(seen[0], features)  # the identity in the layer's place
    assert lpbnn.undo(model)[4] is head
    assert (head.weight.dtype, head.training) == (torch.float64, False)
    assert torch.equal(net(x), seen[1])
