"""``first_init``: the factors of the first layer start in a way of their own."""

import pytest
import torch
from torch import nn

import lpbnn
from lpbnn.rank_one.ensemble import RankOneEnsemble


def build(method: str, **options: object) -> RankOneEnsemble:
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 25), nn.Linear(25, 3))
    model = lpbnn.build(net, method, num_data=10, **options)
    assert isinstance(model, RankOneEnsemble)
    return model


@pytest.mark.parametrize("method", ["lpbnn", "batchensemble", "rank1"])
def test_signs_in_the_first_layer_and_ones_elsewhere(method: str) -> None:
    model = build(method, init_std=0.0, first_init="signs")
    first, *others = model.posterior().mean()
    for factor in first:
        torch.testing.assert_close(factor.abs(), torch.ones_like(factor), atol=1e-3, rtol=0)
        assert 0.2 < (factor < 0).float().mean() < 0.8
    for pair in others:
        for factor in pair:
            torch.testing.assert_close(factor, torch.ones_like(factor))


def test_by_default_the_first_layer_starts_as_the_others() -> None:
    for r, s in build("batchensemble", init="signs").posterior().mean():
        assert torch.equal(r.abs(), torch.ones_like(r))
        assert torch.equal(s.abs(), torch.ones_like(s))


def test_a_wrong_start_is_named() -> None:
    with pytest.raises(ValueError, match=r"first_init='ones': choose 'normal' or 'signs', or None"):
        build("lpbnn", first_init="ones")
