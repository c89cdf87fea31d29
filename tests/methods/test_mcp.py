"""MCP: one network, its loss and its prediction."""

import pytest
import torch
from networks import Mlp, small
from torch import nn

import lpbnn
from lpbnn.methods.mcp import MCP


def test_the_model_is_the_network() -> None:
    net, x = Mlp(), torch.randn(4, 5)
    model = lpbnn.build(net, "mcp")
    assert type(model) is MCP
    assert torch.equal(model(x), net(x).unsqueeze(0))
    assert torch.equal(lpbnn.predict(model, x).probs, net(x).softmax(1))


def test_the_loss_is_the_cross_entropy() -> None:
    net, x, y = Mlp(), torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    terms = lpbnn.build(net, "mcp").loss(x, y)
    assert list(terms) == ["loss", "nll"]
    torch.testing.assert_close(terms["loss"], nn.functional.cross_entropy(net(x), y))


def test_examples_may_have_weights() -> None:
    net, x, y = Mlp(), torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    weight = torch.tensor([1.0, 0.0, 2.0, 0.5])
    each = nn.functional.cross_entropy(net(x), y, reduction="none")
    expected = (each * weight).sum() / weight.sum()
    torch.testing.assert_close(lpbnn.build(net, "mcp").loss(x, y, weight)["nll"], expected)


@pytest.mark.parametrize("task", ["classification", "regression", "multilabel"])
def test_the_loss_compiles_into_one_graph(task: str) -> None:
    model = lpbnn.build(small(2), "mcp", task=task)
    y = torch.tensor([0, 1, 1, 0]) if task == "classification" else torch.rand(4, 1)
    if task == "multilabel":
        y = y.expand(4, 2)
    torch.compiler.reset()
    step = torch.compile(lpbnn.LossStep(model), backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(4, 5), torch.rand(4)
    terms = step(x, y, weight)
    terms["loss"].backward()
    torch.testing.assert_close(terms["loss"], model.loss(x, y, weight)["loss"])


def test_more_members_are_refused() -> None:
    with pytest.raises(
        ValueError, match="members=3: expected 1, this method is one network; use 'ensemble'"
    ):
        lpbnn.build(Mlp(), "mcp", members=3)
