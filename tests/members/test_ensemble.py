"""A prediction leaves the modules' modes alone, and refresh finds layers that were replaced."""

import pytest
import torch
from networks import ResNet, settle
from torch import nn

import lpbnn
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


@pytest.mark.parametrize("method", ["batchensemble", "lpbnn"])
def test_refresh_finds_layers_that_were_replaced(method: str, x: torch.Tensor) -> None:
    options = {"num_data": 10} if method == "lpbnn" else {}
    model = lpbnn.build(settle(ResNet()), method, members=3, **options).double()
    assert isinstance(model, RankOneEnsemble)
    before = lpbnn.predict(model, x, seed=0).members
    model.net.head = nn.Linear(6, 3).double()
    model.refresh()
    found = lpbnn.predict(model, x, seed=0).members
    assert len(model.layers) == 6
    assert not torch.allclose(found, before)
    model.loss(x, torch.tensor([0, 1, 2, 0, 1]))["loss"].backward()
