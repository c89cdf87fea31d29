"""Gradients: of blocks that are computed again, of frozen weights, at the rate of fast ones."""

import copy
from typing import Any

import pytest
import torch
from networks import small
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lpbnn
from lpbnn.likelihoods import Categorical


@pytest.mark.parametrize(
    ("method", "reentrant", "options"),
    [
        ("lpbnn", False, {}),
        ("rank1", False, {}),
        ("batchensemble", False, {}),
        ("batchensemble", True, {}),
        ("meanfield", False, {"std": 0.3}),
        ("meanfield", True, {"std": 0.3}),
        ("meanfield", False, {"std": 0.3, "flipout": True}),
        ("meanfield", True, {"std": 0.3, "flipout": True}),
    ],
)
def test_checkpointed_blocks_compute_the_same_network_again(
    method: str, reentrant: bool, options: dict[str, Any]
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.checkpointed = False

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.a(x))
            if self.checkpointed:
                x = checkpoint(lambda x: torch.tanh(self.b(x)), x, use_reentrant=reentrant)
            else:
                x = torch.tanh(self.b(x))
            return self.head(x)

    model = lpbnn.build(Net(), method, num_data=10, **options).double()
    x, y = torch.randn(8, 5).double(), torch.randint(3, (8,))
    gradients = []
    for checkpointed in (False, True):
        model.net.checkpointed = checkpointed
        model.zero_grad()
        torch.manual_seed(0)
        model.loss(x, y)["loss"].backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(gradients[0], gradients[1])
    copy.deepcopy(model)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in the check
@pytest.mark.parametrize("method", ["lpbnn", "rank1"])
def test_reentrant_checkpoints_are_refused_where_layers_share_the_graph_of_their_factors(
    method: str,
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    model = lpbnn.build(Net(), method, num_data=10)
    x, y = torch.randn(8, 5, requires_grad=True), torch.randint(5, (8,))
    terms = model.loss(x, y)
    with pytest.raises(RuntimeError, match=r"Fix: checkpoint\(..., use_reentrant=False\)"):
        terms["loss"].backward()
    assert lpbnn.predict(model, x).probs.isfinite().all()


def test_frozen_weights_stay_frozen() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).requires_grad_(False)
    net = nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3))
    model = lpbnn.build(net, "batchensemble")
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("factors" in name or name.startswith("net.2.") for name in learning), learning
    lpbnn.undo(model)
    assert not any(p.requires_grad for p in net[0].parameters())


def test_the_rate_of_fast_weights_cannot_be_lost() -> None:
    model = lpbnn.build(small(), "batchensemble")
    with pytest.raises(ValueError, match="0.5 times the rate.*lr="):
        model.parameter_groups(weight_decay=1e-4)
    slow, fast = model.parameter_groups(weight_decay=1e-4, lr=0.2)
    assert (slow["lr"], slow["weight_decay"]) == (0.2, 1e-4)
    assert (fast["lr"], fast["weight_decay"]) == (0.1, 0.0)
    assert len(slow["params"]) + len(fast["params"]) == len(list(model.parameters()))


def test_two_losses_of_checkpointed_blocks_before_one_backward() -> None:
    """A block that is computed again uses the sample of the pass that is differentiated."""

    class Checkpointed(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.a, self.head, self.again = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 5), again

        def block(self, x: Tensor) -> Tensor:
            return self.a(x).relu()

        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)
            return self.head(h.mean((2, 3)))

    batches = [(torch.randn(n, 3, 6, 6).double(), torch.randint(5, (n,))) for n in (8, 12)]
    gradients = []
    for again in (True, False):
        torch.manual_seed(0)
        model = lpbnn.build(Checkpointed(again), "lpbnn", num_data=9).double()
        torch.manual_seed(1)
        sum(model.loss(x, y)["loss"] for x, y in batches).backward()  # type: ignore[union-attr]
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("head", ["first", "second"])
def test_a_checkpointed_block_is_computed_again_for_the_gradient_of_any_head(head: str) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))
            self.checkpointed = False

        def block(self, x: Tensor) -> Tensor:
            return torch.tanh(self.a(x))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            again = self.checkpointed
            h = checkpoint(self.block, x, use_reentrant=False) if again else self.block(x)
            return {"first": self.first(h), "second": self.second(h)}

    likelihood = {"first": Categorical(), "second": Categorical()}
    model = lpbnn.build(TwoHeads(), "lpbnn", likelihood=likelihood, num_data=9).double()
    x, gradients = torch.randn(8, 4).double(), []
    model(x)  # the comparison of the first call is over
    for checkpointed in (False, True):
        model.net.checkpointed = checkpointed
        model.zero_grad()
        torch.manual_seed(0)
        model(x)[head].square().sum().backward()
        gradients.append(model.layers[0].layer.weight.grad.clone())
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", ["meanfield", "lpbnn"])
def test_a_call_of_the_network_alone_does_not_use_the_sample_of_an_earlier_pass(
    method: str, reentrant: bool
) -> None:
    """Its checkpoint samples again from the generator's state, which torch keeps for it."""
    net = nn.Sequential(nn.Linear(4, 3))
    options = {"std": 0.3} if method == "meanfield" else {}
    model = lpbnn.build(net, method, num_data=10, **options).double()
    x, y = torch.randn(8, 4).double().requires_grad_(), torch.randint(3, (8,))
    gradients = []
    for checkpointed in (False, True):
        model.loss(x, y)["loss"].backward()
        model.zero_grad()
        torch.manual_seed(1)
        rows = checkpoint(net, x, use_reentrant=reentrant) if checkpointed else net(x)
        rows.square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
