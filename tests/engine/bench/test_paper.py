"""The formulas on paper agree with what torch counts, and with the parameters that are there."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lpbnn
from lpbnn.engine.bench.paper import (
    Layer,
    added_parameters,
    code_operations,
    layers_of,
    predict_operations,
    scaled_numbers,
    trace,
    train_operations,
)
from lpbnn.engine.bench.workload import Workload

CPU = torch.device("cpu")
STREET = Workload(
    "deeplab-resnet18",
    (32, 48),
    batch=4,
    test_batch=2,
    classes=5,
    include="decoder.*",
    options={"width": 8, "channels": 16},
)
WORKLOADS = {
    "small-cnn": Workload("small-cnn", (8, 8), batch=8, test_batch=3),
    "lenet": Workload("lenet", (32, 32), batch=4, test_batch=2),
    "deeplab": STREET,
}


def train_count(workload: Workload, method: str, members: int) -> int:
    model = workload.model(method, members)
    x, y = workload.examples(workload.batch, CPU)
    with FlopCounterMode(display=False) as counter:
        model.loss(x, y)["loss"].backward()
    return counter.get_total_flops()


def predict_count(workload: Workload, method: str, members: int, samples: int = 1) -> int:
    model = workload.model(method, members)
    x, _ = workload.examples(workload.test_batch, CPU)
    with FlopCounterMode(display=False) as counter:
        lpbnn.predict(model, x, samples=samples)
    return counter.get_total_flops()


def picture_gradient(layers: list[Layer], workload: Workload) -> int:
    """What a converted first layer may cost more: its input, r * x, has a gradient."""
    return layers[0].operations * workload.batch if layers[0].converted else 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_plain(name: str) -> None:
    workload = WORKLOADS[name]
    layers = layers_of(workload)
    assert train_count(workload, "mcp", 1) == train_operations(layers, workload.batch)
    assert predict_count(workload, "mcp", 1) == predict_operations(layers, workload.test_batch, 1)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("members", [1, 4])
def test_training_of_members(name: str, members: int) -> None:
    workload = WORKLOADS[name]
    layers = layers_of(workload)
    expected = train_operations(layers, workload.batch, members)
    more = picture_gradient(layers, workload)
    assert train_count(workload, "batchensemble", members) - expected in (0, more)
    codes = code_operations(layers, members, 32, training=True)
    assert train_count(workload, "lpbnn", members) - expected - codes in (0, more)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("samples", [1, 3])
def test_prediction(name: str, samples: int) -> None:
    workload, members = WORKLOADS[name], 4
    layers = layers_of(workload)
    found = predict_count(workload, "lpbnn", members, samples)
    codes = code_operations(layers, members, 32, samples)
    if name == "deeplab" and samples > 1:  # what the members share runs once per pass, one per draw
        rest = predict_operations(layers, workload.test_batch, 0)
        shared = samples * predict_operations(layers, workload.test_batch, members) + codes
        assert shared - (samples - 1) * rest <= found <= shared
        return
    assert found == predict_operations(layers, workload.test_batch, members * samples) + codes


def test_more_members_than_examples() -> None:
    layers = layers_of(STREET)
    assert train_count(STREET, "batchensemble", 8) == train_operations(layers, 4, 8)


def test_groups_and_transposed_convolutions() -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2),
        nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(6 * 64, 3),
    )
    layers = trace(net, (4, 8, 8))
    x = torch.randn(2, 4, 8, 8)
    with FlopCounterMode(display=False) as counter:
        net(x)
    assert counter.get_total_flops() == predict_operations(layers, 2, 1)
    assert [layer.x for layer in layers] == [4 * 64, 8 * 16, 6 * 64]
    assert scaled_numbers(layers, 2) == 2 * sum(layer.x + layer.y for layer in layers)


@pytest.mark.parametrize("name", WORKLOADS)
def test_parameters(name: str) -> None:
    workload = WORKLOADS[name]
    plain = sum(p.numel() for p in workload.model("mcp", 1).parameters())
    model = workload.model("lpbnn", 4)
    ours = sum(p.numel() for p in model.parameters())
    assert ours - plain == added_parameters(layers_of(workload), 4, 32)
