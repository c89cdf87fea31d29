"""LP-BNN's noise, learned: weight of the KL, pace of the log variance, and where both are at rest."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpbnn
from lpbnn.rank_one.vae import Autoencoders, LatentFactors


def built(**options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    return lpbnn.build(net, "lpbnn", members=2, num_data=100, **options).double()


def log_variances(model: Any) -> list[Tensor]:
    return [Autoencoders([layer.factors]).log_variance for layer in model.layers]


def test_the_weight_of_the_kl_can_be_given() -> None:
    for weighting in ("balanced", "equation", "authors"):
        given = built(kl_weight=0.25, weighting=weighting).penalties()
        own = built(weighting=weighting).penalties()
        torch.testing.assert_close(given["kl"], built(weighting="authors").penalties()["kl"] / 4)
        torch.testing.assert_close(given["reconstruction"], own["reconstruction"])


def test_the_pace_changes_nothing_but_the_pace() -> None:
    """The same noise at the start; one step of SGD moves it pace^2 as far."""
    moved = {}
    for pace in (1.0, 5.0):
        model = built(pace=pace, log_variance=-2.0, kl_weight=1.0)
        for layer in model.layers:
            with torch.no_grad():
                layer.factors.encoder.weight[32:] = 0.0  # else it moves by them too
        before = [part.detach() for part in log_variances(model)]
        for part in before:
            torch.testing.assert_close(part, torch.full_like(part, -2.0))
        biases = [layer.factors.encoder.bias for layer in model.layers]
        optimizer = torch.optim.SGD(biases, lr=1e-3)
        model.penalties()["kl"].backward()
        optimizer.step()
        pairs = zip(log_variances(model), before, strict=True)
        moved[pace] = torch.cat([(now - then).detach() for now, then in pairs])
    assert moved[1.0].min() > 0  # towards the prior
    torch.testing.assert_close(moved[5.0], 25 * moved[1.0])


def test_noise_and_prior_are_at_rest_where_the_docstring_says() -> None:
    """An error of curvature h_i along z_i, and a KL of weight a: sigma_i^2 = a / (a + h_i)."""
    torch.manual_seed(0)
    factors = LatentFactors(2, 16, 3, latent=4, pace=5.0).double()
    a, steepness = 0.1, 3.0
    optimizer = torch.optim.SGD(factors.encoder.parameters(), lr=0.02, momentum=0.9)
    for _ in range(2000):
        kl, squared = factors.terms([factors])
        optimizer.zero_grad()
        (0.5 * steepness * squared + a * kl).sum().backward()
        optimizer.step()
    curvature = steepness * factors.decoder.weight.square().sum(0) / factors.latent
    expected = (a / (a + curvature)).expand(2, -1)
    variance = Autoencoders([factors]).sigma[0].square()
    torch.testing.assert_close(variance, expected, rtol=1e-3, atol=0)
    assert expected.max() > 1.5 * expected.min()  # directions differ, and so does their noise


def test_the_pace_goes_with_the_weights() -> None:
    """They mean another noise at another pace: it is taken with them, or refused."""
    quick, other = built(pace=5.0), built(pace=3.0)
    other.load_state_dict(quick.state_dict())
    torch.testing.assert_close(log_variances(other), log_variances(quick))
    for model, weights in ((built(), quick), (quick, built())):
        with pytest.raises(RuntimeError, match="pace"):
            model.load_state_dict(weights.state_dict())


def test_a_model_that_was_pickled_before_there_was_a_pace_has_none() -> None:
    model = built()
    for layer in model.layers:
        del layer.factors._buffers["pace"]
    older = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(log_variances(older), log_variances(built()))


def test_layers_of_different_pace_are_computed_as_each_alone() -> None:
    torch.manual_seed(0)
    layers = [LatentFactors(2, 6, 3, pace=pace, log_variance=-2.0) for pace in (1.0, 4.0, 1.0, 2.0)]
    kl, squared = LatentFactors.terms(layers)
    alone = [LatentFactors.terms([layer]) for layer in layers]
    torch.testing.assert_close(kl, torch.cat([one[0] for one in alone]))
    torch.testing.assert_close(squared, torch.cat([one[1] for one in alone]))
