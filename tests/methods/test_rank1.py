"""Rank-1 BNN: its options reach the prior and the annealing, and its defaults are the docstring's."""

import math

import pytest
import torch
from torch import nn

import lpbnn
from lpbnn.methods import rank1
from lpbnn.rank_one.factors import initial


def kl(**options: float) -> float:
    model = lpbnn.build(nn.Linear(3, 2), "rank1", num_data=1, **options)
    return model.loss(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))["kl"].item()


def test_the_prior_is_the_one_that_was_asked_for() -> None:
    """With mean 1 and the prior's own deviation, nothing is left of the divergence."""
    assert kl(init_std=0.0, std=0.3, prior_std=0.3) == pytest.approx(0.0, abs=1e-5)
    ratio = 0.3 / 0.6
    each = 0.5 * (ratio**2 - 1 - 2 * math.log(ratio))
    assert kl(init_std=0.0, std=0.3, prior_std=0.6) == pytest.approx(5 * each, rel=1e-4)


@pytest.mark.parametrize("std", [0.05, 0.5, 3.0])
def test_factors_are_drawn_with_the_deviation_that_was_asked_for(std: float) -> None:
    model = lpbnn.build(nn.Linear(30, 20), "rank1", num_data=1, init_std=0.0, std=std)
    assert isinstance(model, rank1.Rank1BNN)
    (drawn,) = model.sample(200).layers
    for factor in (drawn.r, drawn.s):
        assert factor.std().item() == pytest.approx(std, rel=0.03)
        assert factor.mean().item() == pytest.approx(1, abs=0.03 * std)


def test_the_divergence_is_divided_by_the_number_of_examples() -> None:
    whole = kl(init_std=0.0, std=0.3)
    model = lpbnn.build(nn.Linear(3, 2), "rank1", num_data=50, init_std=0.0, std=0.3)
    found = model.loss(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))["kl"].item()
    assert whole > 1
    assert found == pytest.approx(whole / 50)


def test_the_defaults_are_those_of_the_paper() -> None:
    config = rank1.Config(num_data=1)
    assert (config.std, config.prior_std, config.anneal) == (0.1, 0.1, pytest.approx(2 / 3))


def test_random_signs_differ_from_member_to_member() -> None:
    signs = initial(4, 64, 0.5, "signs")
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert len({tuple(row) for row in signs.tolist()}) == 4
