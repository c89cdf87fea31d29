"""What a call does to a network's modules before it computes: little, and nothing that it need not."""

import pytest
import torch
from networks import ResNet, settle
from torch import nn

import lpbnn
from lpbnn import ensemble
from lpbnn.model import walk
from lpbnn.rank_one.ensemble import RankOneEnsemble


def test_modes_are_set_only_where_something_trains(
    model: lpbnn.UncertainModel, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    train = nn.Module.train

    def counted(module: nn.Module, mode: bool = True) -> nn.Module:
        asked.append(mode)
        return train(module, mode)

    expected = lpbnn.predict(model.eval(), x, seed=0).probs
    monkeypatch.setattr(nn.Module, "train", counted)
    assert torch.equal(lpbnn.predict(model, x, seed=0).probs, expected)
    assert not asked
    model.net.stage2.body[1].training = True  # one batch norm, deep inside
    assert torch.equal(lpbnn.predict(model, x, seed=0).probs, expected)
    assert asked
    assert [module for module in model.modules() if module.training] == [model.net.stage2.body[1]]


@pytest.mark.parametrize("options", [{}, {"samples": 3}, {"chunk": 5}, {"chunk": 2, "samples": 2}])
def test_a_prediction_looks_for_the_layers_once(
    model: lpbnn.UncertainModel,
    x: torch.Tensor,
    options: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walks: list[nn.Module] = []

    def counted(net: nn.Module, *args: object) -> object:
        walks.append(net)
        return walk(net, *args)

    monkeypatch.setattr(ensemble, "walk", counted)
    lpbnn.predict(model, x, **options)
    assert walks == [model.net]
    monkeypatch.setattr(RankOneEnsemble, "_better_in_turn", lambda *call: True)
    lpbnn.predict(model, x, **options)
    assert walks == [model.net] * 2


@pytest.mark.parametrize("method", ["batchensemble", "lpbnn"])
def test_a_layer_that_was_replaced_since_is_noticed(method: str, x: torch.Tensor) -> None:
    options = {"num_data": 10} if method == "lpbnn" else {}
    model = lpbnn.build(settle(ResNet()), method, members=3, **options).double()
    assert isinstance(model, RankOneEnsemble)
    before = lpbnn.predict(model, x, seed=0).members
    model.net.head = nn.Linear(6, 3).double()
    found = lpbnn.predict(model, x, seed=0).members
    assert len(model.layers) == 6
    assert not torch.allclose(found, before)
    model.loss(x, torch.tensor([0, 1, 2, 0, 1]))["loss"].backward()


def test_the_walk_is_that_of_torch(model: lpbnn.UncertainModel) -> None:
    model.net.again, model.net.none = model.net.stage1, None
    assert list(walk(model)) == list(model.modules())
