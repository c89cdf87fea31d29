"""Members whose biases differ: a mistake about whose bias it is cannot hide behind equal ones."""

import pytest
import torch
from networks import Mlp
from torch import Tensor, nn

import lpbnn
from lpbnn.rank_one.ensemble import RankOneEnsemble


def built(
    method: str = "lpbnn", net: nn.Module | None = None, **options: object
) -> RankOneEnsemble:
    """Three members with biases of their own."""
    model = lpbnn.build(net or Mlp(), method, members=3, num_data=10, **options).double()
    assert isinstance(model, RankOneEnsemble)
    for layer in model.layers:
        if layer.member_bias is not None:
            nn.init.normal_(layer.member_bias)
    return model


def test_every_draw_of_a_frozen_member_has_its_bias() -> None:
    model = built()
    frozen = lpbnn.freeze(model, samples=2, seed=3)
    for layer, own in zip(frozen.layers, model.layers, strict=True):
        for draw in layer.member_bias.view(2, 3, -1):
            assert torch.equal(draw, own.member_bias)


def test_the_draws_of_a_prediction_are_networks_with_their_own_biases() -> None:
    model, x = built(), torch.randn(4, 5).double()
    with torch.no_grad():
        sampled = model.sample(2)
        rows = model.run(sampled, model.call((x,), {}, 6)).view(6, 4, 3)
        for j in range(6):
            y: Tensor = x
            parts = iter(zip(model.layers, sampled.layers, strict=True))
            for module in model.net:
                if module in model.layers:
                    layer, own = next(parts)
                    weight = layer.layer.weight * torch.outer(own.s[j], own.r[j])
                    y = nn.functional.linear(y, weight, layer.member_bias[j % 3])
                else:
                    y = module(y)
            torch.testing.assert_close(rows[j], y)


@pytest.mark.parametrize("method", ["lpbnn", "batchensemble", "rank1"])
def test_undo_gives_the_mean_of_the_biases(method: str) -> None:
    model = built(method)
    means = [layer.member_bias.mean(0) for layer in model.layers]
    net = lpbnn.undo(model)
    for layer, mean in zip((net[0], net[2], net[4]), means, strict=True):
        torch.testing.assert_close(layer.bias.data, mean)


@pytest.mark.parametrize("method", ["lpbnn", "batchensemble", "rank1"])
def test_weight_decay_is_for_the_shared_weights_alone(method: str) -> None:
    model = built(method)
    decayed = [
        p
        for group in model.parameter_groups(weight_decay=0.1, lr=1.0)
        for p in group["params"]
        if group["weight_decay"]
    ]
    shared = [layer.layer.weight for layer in model.layers]
    assert {id(p) for p in decayed} == {id(p) for p in shared}


@pytest.mark.parametrize("method", ["lpbnn", "batchensemble", "rank1"])
def test_the_loss_of_an_evaluation_shows_every_member_all_examples(method: str) -> None:
    model = built(method, batch_mode="split").eval()
    x, y = torch.randn(7, 5).double(), torch.randint(3, (7,))
    torch.manual_seed(1)
    nll = model.loss(x, y)["nll"]
    torch.manual_seed(1)
    members = model(x)
    each = [nn.functional.cross_entropy(member, y) for member in members]
    torch.testing.assert_close(nll, torch.stack(each).mean())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("members", [1, 3])
def test_a_layer_whose_weight_a_hook_computes_follows_what_it_computes_from(members: int) -> None:
    """Old-style weight norm: the weight is made by a pre-hook at every call."""
    net = nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 3)))
    model = lpbnn.build(net, "batchensemble", members=members, init_std=0.0).eval()
    x = torch.randn(4, 5)
    with torch.no_grad():
        before = model(x) - model.layers[0].member_bias.unsqueeze(1)
        model.layers[0].layer.weight_g.mul_(3)
        after = model(x) - model.layers[0].member_bias.unsqueeze(1)
    torch.testing.assert_close(after, 3 * before)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_weights_of_examples_count_once_in_an_uneven_split(task: str) -> None:
    """Seven examples for three equal members: some examples are shown to two of them."""
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4))
    options = {"batch_mode": "split", "init_std": 0.0, "task": task}
    model = lpbnn.build(net, "batchensemble", members=3, **options).double()
    x, weight = torch.randn(7, 5).double(), torch.rand(7).double()
    y = torch.randint(4, (7,)) if task == "classification" else torch.randn(7, 2).double()
    expected = (model.likelihood.nll(model(x)[0], y) * weight).sum() / weight.sum()
    torch.testing.assert_close(model.loss(x, y, weight)["nll"], expected)
