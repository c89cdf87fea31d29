"""A recorded step is made anew where the model does something else in Python, and only there.

A compiled one with a memory budget keeps less, and has the same gradients.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lpbnn import methods
from lpbnn.data import Splits
from lpbnn.engine import RunConfig
from lpbnn.engine.build import DataInfo, build_model
from lpbnn.engine.launch import launch
from lpbnn.engine.step import Step, TrainStep
from lpbnn.model import Model

Make = Callable[..., RunConfig]
EPOCHS = 4


class Forgetful:
    """Stands in for a recording, which needs a GPU, and counts how often it is made anew."""

    times = 0

    def forget(self) -> None:
        self.times += 1

    def on_its_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()


def forgotten(model: Model, config: RunConfig) -> list[int]:
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
    class Own(Model):
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

    def before_epoch(self: Model, epoch: int, epochs: int) -> None:
        self.temperature = epoch / epochs  # type: ignore[assignment]

    model.__class__ = type("Own", (type(model),), {"before_epoch": before_epoch})
    assert forgotten(model, config) == [1, 2, 3]
    told = {"phase": lambda self: self.temperature >= 0.5}
    model.__class__ = type("Told", (type(model),), told)
    assert forgotten(model, config) == [2]


def parted(method: str, budget: float, size: int = 8) -> tuple[int, dict[str, Tensor]]:
    """Bytes that a compiled step keeps for its backward pass, beside the weights; and its gradients."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 8, 3)
    net = nn.Sequential(convolution, nn.GELU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(288, 5))
    options = {} if method == "mcdropout" else {"members": 2, "num_data": 100, "include": "0"}
    model = methods.build(net, method, **options).train()
    step = TrainStep(model, size, budget)
    x, y = torch.randn(size, 3, 8, 8), torch.randint(0, 5, (size,))
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x, y)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(1)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step(x, y)["loss"]
    loss.backward()
    return sum(kept.values()), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("method", ["lpbnn", "mcdropout"])
def test_a_memory_budget_keeps_less_and_the_gradients(method: str) -> None:
    """Those of the noise that was drawn in the forward pass; and no step takes another's code."""
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch({"cpp.simdlen": 1, "cpp.threads": 1}):  # plain loops are compiled sooner
        found = {budget: parted(method, budget) for budget in (1.0, 0.3, 0.0)}
    torch._dynamo.reset()
    all_of_it, some, least = (kept for kept, _ in found.values())
    assert all_of_it > some > least
    for _, gradients in found.values():
        torch.testing.assert_close(gradients, found[1.0][1], rtol=1e-4, atol=1e-5)
