"""The posterior of r^ is an exact low-rank Gaussian, and training moves it."""

import pytest
import torch
from networks import Mlp
from torch import nn

import lpbnn
from lpbnn.methods.lpbnn import LatentFactors, LatentPosterior


@pytest.fixture
def model() -> lpbnn.UncertainModel:
    model = lpbnn.build(Mlp(), "lpbnn", members=3, num_data=10, latent=4, log_variance=-1.0)
    with torch.no_grad():
        for layer in model.layers:
            layer.factors.encoder.weight[4:] += 0.3 * torch.randn_like(
                layer.factors.encoder.weight[4:]
            )
    return model.double()


def test_the_variance_of_z_starts_near_the_given_one_and_differs_by_member() -> None:
    factors = LatentFactors(members=4, inputs=64, outputs=2, log_variance=-3.0)
    found = LatentPosterior([factors]).log_variance
    torch.testing.assert_close(found, torch.full_like(found, -3.0), atol=0.2, rtol=0)
    assert (found.std(1) > 0).all()


def test_mean_and_covariance_against_100000_draws(model: lpbnn.UncertainModel) -> None:
    draws = 100_000
    for layer in model.layers:
        expected = lpbnn.posterior(model)[layer.path]
        with torch.no_grad():
            r = LatentPosterior([layer.factors]).sample(draws)[0][0].view(draws, 3, -1)
        noise = expected.std / draws**0.5
        assert ((r.mean(0) - expected.mean).abs() < 6 * noise).all()
        for j in range(3):
            scale = expected.std[j].outer(expected.std[j])
            error = (torch.cov(r[:, j].T) - expected.covariance[j]) / scale
            assert error.abs().max() < 6 * (2 / draws) ** 0.5
            drawn = torch.corrcoef(r[:, j].T)
            torch.testing.assert_close(drawn, expected.correlation[j], atol=0.03, rtol=0)


def test_covariance_is_low_rank_and_correlation_is_one_on_the_diagonal(
    model: lpbnn.UncertainModel,
) -> None:
    layer = lpbnn.posterior(model)["2"]
    assert layer.factor.shape == (3, 7, 4)
    assert torch.linalg.matrix_rank(layer.covariance).tolist() == [4, 4, 4]
    ones = torch.ones(3, 7, dtype=torch.float64)
    torch.testing.assert_close(layer.correlation.diagonal(dim1=1, dim2=2), ones)
    torch.testing.assert_close(layer.std.square(), layer.covariance.diagonal(dim1=1, dim2=2))


def test_as_a_torch_distribution(model: lpbnn.UncertainModel) -> None:
    layer = lpbnn.posterior(model)["0"]
    q = layer.distribution(jitter=1e-9)
    torch.testing.assert_close(q.mean, layer.mean)
    torch.testing.assert_close(q.covariance_matrix, layer.covariance, atol=1e-8, rtol=0)
    assert q.log_prob(q.sample()).isfinite().all()


def test_the_torch_distribution_is_in_float64_with_little_on_the_diagonal() -> None:
    model = lpbnn.build(Mlp(), "lpbnn", num_data=10)
    layer = lpbnn.posterior(model)["0"]
    q = layer.distribution()
    assert q.mean.dtype == torch.float64
    wide = layer.factor.double()
    added = q.covariance_matrix - wide @ wide.mT
    torch.testing.assert_close(
        added, 1e-6 * torch.eye(5).double().expand_as(added), rtol=0, atol=1e-9
    )


def test_layers_of_one_width_keep_their_own_posteriors() -> None:
    """They are computed together."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model = lpbnn.build(net, "lpbnn", members=2, num_data=10, latent=3)
    found = lpbnn.posterior(model)
    for layer in model.layers:
        alone = LatentPosterior([layer.factors])
        torch.testing.assert_close(found[layer.path].mean, alone.mean()[0][0])
        torch.testing.assert_close(found[layer.path].factor, alone.covariance_factors()[0])


def test_only_what_has_a_latent_posterior() -> None:
    model = lpbnn.build(Mlp(), "lpbnn", num_data=10, include="2")
    assert list(lpbnn.posterior(model)) == ["2"]
    with pytest.raises(ValueError, match="no layer with a latent posterior"):
        lpbnn.posterior(nn.Linear(3, 3))


def test_it_can_be_read_at_any_time_and_leaves_no_graph(model: lpbnn.UncertainModel) -> None:
    assert not lpbnn.posterior(model)["0"].mean.requires_grad


def test_the_noise_of_new_factors_is_that_of_the_method() -> None:
    alone = LatentFactors(4, 5, 3)
    model = lpbnn.build(Mlp(), "lpbnn", num_data=10)
    factors = model.layers[0].factors
    assert torch.equal(alone.encoder.bias, factors.encoder.bias)
    assert alone.latent == factors.latent
    assert [p.requires_grad for p in alone.parameters()] == [
        p.requires_grad for p in factors.parameters()
    ]
