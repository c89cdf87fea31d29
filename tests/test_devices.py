"""A network is built where it lies: nothing of it stays behind on another device."""

import pytest
import torch
from torch import nn

import lpbnn
from lpbnn.rank_one.factors import GaussianFactors, PointFactors
from lpbnn.rank_one.vae import LatentFactors, LatentPosterior

FACTORS = {"batchensemble": PointFactors, "rank1": GaussianFactors, "lpbnn": LatentFactors}


def network() -> nn.Module:
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 3))
    return nn.Sequential(*layers)


def elsewhere(model: nn.Module, device: str) -> list[str]:
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in named if tensor.device.type != device]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "method", ["batchensemble", "edl", "lpbnn", "mcdropout", "mcp", "meanfield", "mimo", "rank1"]
)
def test_a_network_is_built_where_it_lies(method: str, dtype: torch.dtype) -> None:
    net = network().to("meta", dtype)
    model = lpbnn.build(net, method, num_data=10, class_weights=[1.0, 2.0, 3.0])
    assert not elsewhere(model, "meta")
    own = model.likelihood.class_weights
    weights = [own, getattr(model, "penalty_weights", own)]
    assert all(weight.dtype == torch.float32 for weight in weights)  # 1 / N is small


@pytest.mark.parametrize("method", FACTORS)
def test_a_loss_is_computed_where_the_network_lies(method: str) -> None:
    model = lpbnn.build(network().to("meta"), method, num_data=10, class_weights=[1.0, 2.0, 3.0])
    x = torch.empty(5, 3, 8, 8, device="meta")
    terms = model.loss(x, torch.empty(5, dtype=torch.int64, device="meta"))
    assert all(term.device.type == "meta" for term in terms.values())


@pytest.mark.parametrize("method", FACTORS)
def test_layers_on_several_devices_are_sampled_each_on_its_own(method: str) -> None:
    """Equal widths, so that nothing but the device tells them apart."""
    devices = ["cpu", "meta", "cpu", "meta"]
    many = [FACTORS[method](2, 3, 3).to(device) for device in devices]
    drawn = FACTORS[method].posterior(many).sample()
    assert [(r.device.type, s.device.type) for r, s in drawn] == [(d, d) for d in devices]


@pytest.mark.parametrize("method", FACTORS)
def test_layers_of_several_precisions_are_sampled_apart(method: str) -> None:
    dtypes = [torch.float32, torch.float64, torch.float32]
    many = [FACTORS[method](2, 3, 3).to(dtype) for dtype in dtypes]
    sampled = FACTORS[method].posterior(many).sample()
    assert [(r.dtype, s.dtype) for r, s in sampled] == [(d, d) for d in dtypes]


def test_terms_of_layers_on_several_devices_meet_on_the_first() -> None:
    many = [LatentFactors(2, 3, 3).to(device) for device in ("meta", "cpu")]
    posterior = LatentPosterior(many)
    kl, squared = posterior.kl(), posterior.squared_error(of_samples=True)
    assert kl.device.type == squared.device.type == "meta"
    assert kl.shape == squared.shape == (2,)


class Halves(nn.Module):
    """A network in two places, as a user divides one that is too large."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5, device=first), nn.Linear(5, 5, device=second)


@pytest.mark.parametrize("method", ["lpbnn", "rank1"])
def test_the_penalties_of_a_network_in_two_places_are_summed_in_the_first(method: str) -> None:
    model = lpbnn.build(Halves("meta", "cpu"), method, num_data=10)
    weights = model.kl_weight if method == "rank1" else model.penalty_weights
    assert weights.device.type == "meta"
    terms = model.penalties(model.posterior())
    assert all(term.device.type == "meta" for term in terms.values())


def test_class_weights_lie_where_the_outputs_will_be() -> None:
    model = lpbnn.build(Halves("cpu", "meta"), "mcp", class_weights=[1.0] * 5)
    assert model.likelihood.class_weights.device.type == "meta"


def test_the_loss_is_where_the_outputs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lpbnn.build(network().to("meta"), "lpbnn", num_data=10)
    monkeypatch.setattr(model, "penalties", lambda posterior: {"kl": torch.zeros(())})
    x = torch.empty(5, 3, 8, 8, device="meta")
    terms = model.loss(x, torch.empty(5, dtype=torch.int64, device="meta"))
    assert all(term.device.type == "meta" for term in terms.values())
