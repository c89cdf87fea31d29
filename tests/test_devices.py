"""A network is built where it lies: nothing of it stays behind on another device."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import lpbnn
from lpbnn import methods
from lpbnn.methods.lpbnn import LatentFactors
from lpbnn.methods.rank1 import GaussianFactors
from lpbnn.rank_one.factors import PointFactors

FACTORS = {"batchensemble": PointFactors, "rank1": GaussianFactors, "lpbnn": LatentFactors}


def network() -> nn.Module:
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 3))
    return nn.Sequential(*layers)


def move(module: Any, device: str) -> Any:
    """Give a module tensors without values on a device that need not be there, in a FakeTensorMode."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return module


def elsewhere(model: nn.Module, device: str) -> list[str]:
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in named if tensor.device.type != device]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", [name for name in methods.names() if name != "ensemble"])
def test_a_network_is_built_where_it_lies(method: str, dtype: torch.dtype) -> None:
    net = network().to("meta", dtype)
    model = lpbnn.build(net, method, num_data=10, class_weights=[1.0, 2.0, 3.0])
    assert not elsewhere(model, "meta")
    own = model.likelihood.class_weights
    weights = [own, getattr(model, "inverse_inputs", own)]
    assert all(weight.dtype == torch.float32 for weight in weights)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("method", [name for name in methods.names() if name != "ensemble"])
def test_a_loss_is_computed_where_the_network_lies(method: str, training: bool) -> None:
    net, weights = network().to("meta"), [1.0, 2.0, 3.0]
    model = lpbnn.build(net, method, num_data=10, class_weights=weights, check=False)
    model.train(training)
    x = torch.empty(5, 3, 8, 8, device="meta")
    assert model(x).device.type == "meta"
    terms = model.loss(x, torch.empty(5, dtype=torch.int64, device="meta"))
    assert all(term.device.type == "meta" for term in terms.values())


@pytest.mark.parametrize("method", FACTORS)
def test_layers_on_several_devices_are_sampled_each_on_its_own(method: str) -> None:
    """Equal widths, so that nothing but the device tells them apart."""
    devices = ["cpu", "cuda", "cpu", "cuda"]
    many = [FACTORS[method](2, 3, 3) for _ in devices]
    with FakeTensorMode():
        posterior = FACTORS[method].posterior(list(map(move, many, devices)))
        for pairs in (posterior.sample(), posterior.mean()):
            assert [(r.device.type, s.device.type) for r, s in pairs] == [(d, d) for d in devices]


@pytest.mark.parametrize("method", FACTORS)
def test_layers_of_several_precisions_are_sampled_apart(method: str) -> None:
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float64]
    widths = [3, 3, 4, 5]
    many = [
        FACTORS[method](2, width, 3).to(dtype) for width, dtype in zip(widths, dtypes, strict=True)
    ]
    posterior = FACTORS[method].posterior(many)
    for pairs in (posterior.sample(), posterior.mean()):
        assert [(r.dtype, s.dtype) for r, s in pairs] == [(d, d) for d in dtypes]


def test_terms_of_layers_on_several_devices_meet_on_the_first() -> None:
    many = [LatentFactors(2, 3, 3) for _ in range(2)]
    with FakeTensorMode():
        posterior = LatentFactors.posterior([move(many[0], "cuda"), move(many[1], "cpu")])
        kl, squared = posterior.kl(), posterior.squared_error(of_samples=True)
    assert kl.device.type == squared.device.type == "cuda"
    assert kl.shape == squared.shape == (2,)


class Halves(nn.Module):
    """A network in two places, as a user divides one that is too large."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5, device=first), nn.Linear(5, 5, device=second)


@pytest.mark.parametrize("method", ["lpbnn", "rank1"])
def test_the_penalties_of_a_network_in_two_places_are_summed_in_the_first(method: str) -> None:
    model: Any = lpbnn.build(Halves("cpu", "cpu"), method, num_data=10)
    with FakeTensorMode():
        move(model, "cuda")
        move(model.net.second, "cpu")
        model.refresh()
        terms = model.penalties(model.posterior())
    weights = model.kl_weight if method == "rank1" else model.inverse_inputs
    assert weights.device.type == "cuda"
    assert all(term.device.type == "cuda" for term in terms.values())


def test_the_weights_of_the_penalties_are_on_the_first_layers_device() -> None:
    assert lpbnn.build(Halves("meta", "cpu"), "rank1", num_data=10).kl_weight.is_meta


def test_class_weights_lie_where_the_outputs_will_be() -> None:
    model = lpbnn.build(Halves("cpu", "meta"), "mcp", class_weights=[1.0] * 5)
    assert model.likelihood.class_weights.device.type == "meta"


def test_the_loss_is_where_the_outputs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lpbnn.build(network().to("meta"), "lpbnn", num_data=10)
    monkeypatch.setattr(model, "penalties", lambda posterior: {"kl": torch.zeros(())})
    x = torch.empty(5, 3, 8, 8, device="meta")
    terms = model.loss(x, torch.empty(5, dtype=torch.int64, device="meta"))
    assert all(term.device.type == "meta" for term in terms.values())
