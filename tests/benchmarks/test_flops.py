"""The formulas of docs/results/cost.md agree with what torch counts, and with the parameters."""

from dataclasses import replace

import pytest
from torch import nn

from benchmarks.__main__ import main
from benchmarks.flops import parameters, predict_operations, train_operations
from lpbnn import backbones
from lpbnn.bench import Setup

LATENT = 32
STREET = Setup(
    "deeplab-resnet18",
    (3, 32, 48),
    classes=5,
    batch=4,
    test_batch=2,
    options=("include=decoder.*", "backbone.width=8", "backbone.channels=16"),
)
SETUPS = {
    "small-cnn": Setup("small-cnn", (3, 8, 8), batch=8, test_batch=3),
    "lenet": Setup("lenet", (3, 32, 32), batch=4, test_batch=2),
    "deeplab": STREET,
}


def converted(setup: Setup) -> list[nn.Conv2d | nn.Linear]:
    options = setup.config().backbone_options
    net = backbones.build(setup.backbone, setup.classes, **options)
    part = net.get_submodule("decoder") if setup.backbone.startswith("deeplab") else net
    return [m for m in part.modules() if isinstance(m, nn.Conv2d | nn.Linear)]


def inputs(layer: nn.Conv2d | nn.Linear) -> int:
    """m of a layer: the numbers that r scales."""
    return layer.in_channels if isinstance(layer, nn.Conv2d) else layer.in_features


def outputs(layer: nn.Conv2d | nn.Linear) -> int:
    return layer.out_channels if isinstance(layer, nn.Conv2d) else layer.out_features


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("members", [1, 4])
def test_training_costs_one_network_and_16_J_k_m(name: str, members: int) -> None:
    setup = SETUPS[name]
    codes = 16 * members * LATENT * sum(map(inputs, converted(setup)))
    plain = train_operations(setup, "mcp")
    ours = train_operations(setup, "batchensemble", members)
    assert train_operations(setup, "lpbnn", members) - ours == codes
    # A converted first layer may have a gradient by its input, r * x, which a plain one has not.
    without = train_operations(setup, "mcp") - 3 * predict_operations(
        replace(setup, test_batch=setup.batch), "mcp"
    )
    assert ours - plain in (0, -without)


@pytest.mark.parametrize("name", ["small-cnn", "lenet"])
@pytest.mark.parametrize("samples", [1, 3])
def test_prediction_costs_all_networks(name: str, samples: int) -> None:
    setup, members = SETUPS[name], 4
    codes = 2 * members * LATENT * (2 + samples) * sum(map(inputs, converted(setup)))
    plain = predict_operations(setup, "mcp")
    ours = predict_operations(setup, "lpbnn", members, samples)
    assert ours == members * samples * plain + codes


def test_layers_before_the_converted_part_run_once() -> None:
    plain = predict_operations(STREET, "mcp")
    decoder = predict_operations(STREET, "batchensemble", 2) - plain
    assert 0 < decoder < plain
    assert predict_operations(STREET, "batchensemble", 4) == plain + 3 * decoder


def test_more_members_than_examples_train_on_one_each() -> None:
    eight = train_operations(STREET, "batchensemble", 8)
    decoder = train_operations(STREET, "batchensemble", 12) - eight
    assert eight - train_operations(STREET, "batchensemble", 4) == decoder > 0


@pytest.mark.parametrize("name", SETUPS)
def test_added_parameters(name: str) -> None:
    members, setup = 4, SETUPS[name]
    added = 0
    for layer in converted(setup):
        m, p = inputs(layer), outputs(layer)
        biases = 0 if layer.bias is None else (members - 1) * p
        added += members * p + biases + 2 * LATENT * (m + 1) + m * (LATENT + 1)
    assert parameters(setup, "lpbnn", members) - parameters(setup, "mcp") == added


@pytest.mark.slow
def test_the_table_of_deeplab(capsys: pytest.CaptureFixture[str]) -> None:
    main(["flops", "--backbones", "deeplab", "--members", "4"])
    assert "2.594" in capsys.readouterr().out  # 1 + 3 times the decoder's share
