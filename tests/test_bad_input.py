"""Bad input gets an error that says what was given, what was expected, and the fix."""

import pytest
import torch
from networks import Mlp, ResNet, small
from torch import nn

import lpbnn
from lpbnn.methods import names

BUILD = {
    "unknown method": (
        {"method": "lpbn"},
        ValueError,
        "unknown method 'lpbn'. Did you mean 'lpbnn'",
    ),
    "unknown option": ({"num_dat": 5}, TypeError, "no option 'num_dat'. Did you mean 'num_data'"),
    "no data count": ({}, ValueError, r"needs num_data.*num_data=len\(train\)"),
    "no data": (
        {"num_data": 0},
        ValueError,
        "num_data=0: expected the number of training examples",
    ),
    "negative data": ({"num_data": -3}, ValueError, "num_data=-3"),
    "half data": ({"num_data": 1.5}, ValueError, "num_data=1.5"),
    "no members": ({"num_data": 9, "members": 0}, ValueError, "members=0: expected an integer"),
    "half members": ({"num_data": 9, "members": 2.5}, ValueError, "members=2.5"),
    "weighting": ({"num_data": 9, "weighting": "paper"}, ValueError, "weighting='paper'.*balanced"),
    "batch mode": ({"num_data": 9, "batch_mode": "both"}, ValueError, "'repeat' or 'split'"),
    "init": ({"num_data": 9, "init": "zeros"}, ValueError, "'normal' or 'signs'"),
    "latent": ({"num_data": 9, "latent": 0}, ValueError, "latent=0"),
    "init_std": ({"num_data": 9, "init_std": -1.0}, ValueError, "init_std=-1.0"),
    "variant": ({"num_data": 9, "variant": "code"}, ValueError, "'default' or 'paper'"),
    "anneal of rank1": (
        {"method": "rank1", "num_data": 9, "anneal": 10.0},
        ValueError,
        "anneal=10.0: expected a share between 0 and 1",
    ),
    "anneal below 0": (
        {"method": "rank1", "num_data": 9, "anneal": -1.0},
        ValueError,
        "anneal=-1.0",
    ),
    "task": ({"num_data": 9, "task": "detection"}, ValueError, "task='detection'.*classification"),
}


@pytest.mark.parametrize("case", BUILD)
def test_build(case: str) -> None:
    options, error, message = BUILD[case]
    net = Mlp()
    with pytest.raises(error, match=message):
        lpbnn.build(net, **{"method": "lpbnn", **options})
    assert all(isinstance(net[i], nn.Linear) for i in (0, 2, 4))  # nothing half converted


def test_build_wants_a_module_that_is_not_built() -> None:
    with pytest.raises(TypeError, match="wraps an nn.Module; got function"):
        lpbnn.build(lambda x: x, "mcp")
    with pytest.raises(TypeError, match="is a MCP already"):
        lpbnn.build(lpbnn.build(Mlp(), "mcp"), "mcp")


CALLS = {
    "not a tensor": ([[1.0] * 5], TypeError, "expected a tensor of inputs, got list"),
    "no batch": (torch.tensor(1.0), ValueError, "without dimensions"),
    "empty": (
        torch.zeros(0, 3, 8, 8),
        ValueError,
        r"batch is empty: inputs of shape \(0, 3, 8, 8\)",
    ),
    "bytes": (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), TypeError, r"got torch.uint8.*/ 255"),
    "integers": (torch.zeros(2, 3, 8, 8, dtype=torch.int64), TypeError, "got torch.int64"),
}


@pytest.mark.parametrize("method", ["lpbnn", "batchensemble", "mcp"])
@pytest.mark.parametrize("case", CALLS)
def test_inputs(case: str, method: str) -> None:
    x, error, message = CALLS[case]
    model = lpbnn.build(ResNet(), method, num_data=10)
    for call in (model, lambda x: lpbnn.predict(model, x)):
        with pytest.raises(error, match=message):
            call((x,) if isinstance(x, list) and call is not model else x)


TARGETS = {
    "length": (torch.zeros(3, dtype=torch.int64), r"4.*got .*shape \(3,\)"),
    "soft labels of two classes": (torch.zeros(4, 2), r"probabilities of shape \(4, 3\); got"),
    "integer one-hot": (torch.zeros(4, 3, dtype=torch.int64), "needs integer labels"),
    "float": (torch.zeros(4), "got torch.float32"),
}


@pytest.mark.parametrize("case", TARGETS)
@pytest.mark.parametrize("method", ["mcp", "batchensemble"])
def test_targets(case: str, method: str) -> None:
    y, message = TARGETS[case]
    model = lpbnn.build(Mlp(), method)
    with pytest.raises(ValueError, match=message):
        model.loss(torch.randn(4, 5), y)


@pytest.mark.parametrize("method", ["mcp", "batchensemble"])
def test_labels_that_are_no_tensor_and_batches_the_wrong_way_round(method: str) -> None:
    model, x, y = lpbnn.build(Mlp(), method), torch.randn(4, 5), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(TypeError, match="targets are a tensor; got list. Fix: torch.as_tensor"):
        model.loss(x, y.tolist())
    with pytest.raises(
        ValueError, match=r"inputs of shape \(4,\) and .*swapped. Fix: loss\(inputs"
    ):
        model.loss(y, x)


@pytest.mark.parametrize("method", ["mcp", "batchensemble"])
def test_one_output_is_no_class_in_the_loss_as_in_the_prediction(method: str) -> None:
    model, x = lpbnn.build(small(classes=1), method), torch.randn(4, 5)
    message = "yes-or-no question has two classes: give the last layer two outputs"
    with pytest.raises(ValueError, match=message):
        lpbnn.predict(model, x)
    for y in (torch.zeros(4), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(ValueError, match=message):
            model.loss(x, y)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 1.0]])
@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_a_label_that_is_no_class_is_refused(task: str, weights: list[float] | None) -> None:
    net = Mlp() if task == "classification" else nn.Sequential(nn.Conv2d(3, 3, 1))
    shape = (5,) if task == "classification" else (3, 2, 2)
    model = lpbnn.build(net, "mcp", task=task, class_weights=weights)
    y = torch.zeros((2, *shape[1:]), dtype=torch.int64)
    y[-1] = 255
    message = r"labels are 0 to 2, .*3 outputs, or ignore_index=-100; got \[255\].*ignore_index="
    with pytest.raises(IndexError, match=message):
        model.loss(torch.randn(2, *shape), y)


@pytest.mark.parametrize("method", names())
@pytest.mark.parametrize("training", [True, False])
def test_weights_of_examples_are_one_number_for_each(method: str, training: bool) -> None:
    model = lpbnn.build(small(), method, num_data=10).train(training)
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    for weight in ([1.0] * 6, 1.0, torch.ones(6, 1), torch.ones(5), torch.ones(())):
        with pytest.raises(ValueError, match=r"weights of examples are a tensor of shape \(6,\)"):
            model.loss(x, y, weight)


def test_classes_come_second() -> None:
    """Tokens with classes last, as (batch, time, classes)."""
    model = lpbnn.build(nn.Sequential(nn.Linear(5, 3)), "mcp")
    with pytest.raises(ValueError, match=r"Classes come second.*movedim\(-1, 1\)"):
        model.loss(torch.randn(2, 4, 5), torch.zeros(2, 4, dtype=torch.int64))


def test_targets_of_a_regression_are_not_reordered() -> None:
    model = lpbnn.build(small(classes=4), "mcp", task="regression")
    with pytest.raises(ValueError, match=r"got targets of shape \(2, 6\); expected \(6, 2\)"):
        model.loss(torch.randn(6, 5), torch.randn(2, 6))
    one = lpbnn.build(small(classes=2), "mcp", task="regression")
    for y in (torch.randn(6), torch.randn(6, 1)):
        assert one.loss(torch.randn(6, 5), y)["loss"].isfinite()


def test_regression_needs_two_outputs_per_target() -> None:
    model = lpbnn.build(Mlp(), "mcp", task="regression")
    with pytest.raises(ValueError, match="two outputs per target.*got 3"):
        model.loss(torch.randn(4, 5), torch.randn(4, 1))


PREDICT = {
    "samples": ({"samples": 0}, "samples=0: expected an integer of at least 1"),
    "chunk": ({"chunk": -1}, "chunk=-1"),
    "two seeds": ({"seed": 0, "generator": torch.Generator()}, "seed or generator, not both"),
}


@pytest.mark.parametrize("case", PREDICT)
def test_predict(case: str) -> None:
    options, message = PREDICT[case]
    with pytest.raises(ValueError, match=message):
        lpbnn.predict(lpbnn.build(Mlp(), "mcp"), torch.randn(2, 5), **options)


def test_predict_and_freeze_want_a_built_model() -> None:
    with pytest.raises(TypeError, match=r"got Mlp. A plain network becomes one with lpbnn.build"):
        lpbnn.predict(Mlp(), torch.randn(2, 5))
    with pytest.raises(TypeError, match="expected a model built with 'lpbnn'"):
        lpbnn.freeze(lpbnn.build(Mlp(), "mcp"))


def test_an_output_that_cannot_be_read() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(x), x

    model = lpbnn.build(Pair(), "batchensemble")
    with pytest.raises(TypeError, match="returned tuple; expected a tensor.*readout="):
        model(torch.randn(2, 5))
