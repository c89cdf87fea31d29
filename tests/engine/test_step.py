"""A recorded step is made anew where the model does something else in Python, and only there."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from lpbnn import methods
from lpbnn.data import Splits
from lpbnn.engine import RunConfig
from lpbnn.engine.build import DataInfo, build_model
from lpbnn.engine.launch import launch
from lpbnn.engine.step import Step, TrainStep
from lpbnn.model import UncertainModel

Make = Callable[..., RunConfig]
EPOCHS = 4


class Forgetful:
    """Stands in for a recording, which needs a GPU, and counts how often it is made anew."""

    times = 0

    def forget(self) -> None:
        self.times += 1

    def on_its_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()


def forgotten(model: UncertainModel, config: RunConfig) -> list[int]:
    """Epochs before which a recording was given up; before the first there is none."""
    step = Step(model, config, launch(config), config.batch_size)
    step.recording = recording = Forgetful()  # type: ignore[assignment]
    found = []
    for epoch in range(EPOCHS):
        before = recording.times
        model.before_epoch(epoch, EPOCHS)
        with step.begin():
            pass
        found += [epoch] if epoch and recording.times > before else []
    return found


@pytest.mark.parametrize("method", methods.names())
def test_annealing_is_in_buffers_and_needs_no_new_recording(
    make: Make, splits: Splits, method: str
) -> None:
    options = {"anneal": 0.5} if method in ("lpbnn", "rank1", "meanfield") else {}
    config = make(method, method_options=options)
    assert forgotten(build_model(config, DataInfo.of(splits)), config) == []


@pytest.mark.parametrize("method", ["batchensemble", "lpbnn", "rank1"])
def test_the_epochs_that_repeat_the_batch_are_recorded_anew(
    make: Make, splits: Splits, method: str
) -> None:
    config = make(method, method_options={"repeat_last": 0.5})
    assert forgotten(build_model(config, DataInfo.of(splits)), config) == [2]


def test_what_a_model_does_not_tell_is_recorded_in_every_epoch(make: Make, splits: Splits) -> None:
    class Own(UncertainModel):
        def before_epoch(self, epoch: int, epochs: int) -> None:
            self.weight = epoch / epochs

    config = make("mcp")
    model = Own(build_model(config, DataInfo.of(splits)).net)
    assert forgotten(model, config) == [1, 2, 3]


@pytest.mark.parametrize("method", ["batchensemble", "lpbnn", "meanfield", "edl"])
def test_what_a_subclass_sets_is_not_in_the_phase_that_it_inherits(
    make: Make, splits: Splits, method: str
) -> None:
    config = make(method)
    model = build_model(config, DataInfo.of(splits))

    def before_epoch(self: UncertainModel, epoch: int, epochs: int) -> None:
        self.temperature = epoch / epochs  # type: ignore[assignment]

    model.__class__ = type("Own", (type(model),), {"before_epoch": before_epoch})
    assert forgotten(model, config) == [1, 2, 3]
    told = {"phase": lambda self: self.temperature >= 0.5}
    model.__class__ = type("Told", (type(model),), told)
    assert forgotten(model, config) == [2]


def test_a_compiled_step_notices_a_layer_that_was_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options: compile(f, backend="eager"))
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model = methods.build(net, "rank1", members=2, num_data=10)
    step = TrainStep(model.train(), compiled_for=6)
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    before = step(x, y)
    net[0] = nn.Linear(4, 8)  # whose KL is no part of the loss
    after = step(x, y)
    torch._dynamo.reset()
    torch.testing.assert_close(after["kl"], model.loss(x, y)["kl"])
    assert after["kl"] < before["kl"]
