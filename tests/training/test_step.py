"""A recorded step is kept over the epochs, and a compiled one checks the network first."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpbnn
from lpbnn import methods
from lpbnn.data import Splits
from lpbnn.kernels.row_norm import RowNorm
from lpbnn.members.ensemble import MemberEnsemble
from lpbnn.model import UncertainModel
from lpbnn.training import RunConfig
from lpbnn.training.build import DataInfo, build_model
from lpbnn.training.config import OptimConfig, ScheduleConfig
from lpbnn.training.distributed import launch
from lpbnn.training.loop import fit
from lpbnn.training.step import Step, TrainStep, factor, fast_convolutions, make_optimizer

Make = Callable[..., RunConfig]
EPOCHS = 4


class Forgetful:
    """A recording, which needs a GPU, that only counts how often it is made anew."""

    times = 0

    def __init__(self) -> None:
        self.replayed: list[int] = []

    def forget(self) -> None:
        self.times += 1

    def __call__(self, x: Tensor, y: Tensor) -> None:
        self.replayed.append(len(y))

    def on_its_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()


def forgotten(model: UncertainModel, config: RunConfig) -> list[int]:
    """Return the epochs before which a recording was given up."""
    step = Step(model, config, launch(config), config.batch_size)
    step.recording = recording = Forgetful()  # type: ignore[assignment]
    found = []
    for epoch in range(EPOCHS):
        before = recording.times
        model.before_epoch(epoch, EPOCHS)
        with step.begin():
            pass
        found += [epoch] if recording.times > before else []
    return found


@pytest.mark.parametrize("method", methods.names())
def test_a_recorded_step_is_kept_over_the_epochs(make: Make, splits: Splits, method: str) -> None:
    options = {"anneal": 0.5} if method in ("rank1", "meanfield") else {}
    config = make(method, method_options=options)
    assert forgotten(build_model(config, DataInfo.of(splits)), config) == []


@pytest.mark.parametrize("method", methods.names())
def test_what_before_epoch_changes_in_the_loss_is_in_buffers(
    make: Make, splits: Splits, method: str
) -> None:
    """A recorded step sees nothing else change."""
    model = build_model(make(method), DataInfo.of(splits)).train()
    later = copy.deepcopy(model)
    later.before_epoch(EPOCHS - 1, EPOCHS)
    for own, changed in zip(model.buffers(), later.buffers(), strict=True):
        own.copy_(changed)
    x, y = splits.normalise(splits.train[:8][0]), splits.train[:8][1]
    losses = []
    for one in (model, later):
        torch.manual_seed(0)
        losses.append(one.loss(x, y)["loss"])
    assert torch.equal(*losses)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_optimizer_has_the_settings_of_the_config(
    make: Make, splits: Splits, nesterov: bool
) -> None:
    optim = OptimConfig(momentum=0.7, nesterov=nesterov, weight_decay=0.03)
    config = make(optim=optim)
    model = build_model(config, DataInfo.of(splits))
    (group,) = make_optimizer(model, config, torch.device("cpu")).param_groups
    assert (group["momentum"], group["nesterov"]) == (0.7, nesterov)
    assert group["weight_decay"] == 0.03
    config = make(optim=replace(optim, name="adamw", nesterov=False))
    (group,) = make_optimizer(model, config, torch.device("cpu")).param_groups
    assert group["betas"] == (0.7, 0.999)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_steps_are_those_of_a_plain_loop(make: Make, splits: Splits, clip: float | None) -> None:
    """Each step takes the gradient of its own batch, at its own share of the rate."""
    optim = OptimConfig(lr=0.2, momentum=0.7, nesterov=True, weight_decay=0.03, clip=clip)
    config = make(optim=optim)
    model = build_model(config, DataInfo.of(splits)).train()
    plain = copy.deepcopy(model.net)
    options = {"momentum": 0.7, "nesterov": True, "weight_decay": 0.03}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, **options)
    step = Step(model, config, launch(config), config.batch_size)
    inputs, labels = splits.train[:96]
    batches = list(zip(splits.normalise(inputs).split(32), labels.split(32), strict=True))
    losses = []
    with step.begin():
        for (x, y), scale in zip(batches, (1.0, 0.5, 0.1), strict=True):
            step(x, y, scale)
            optimizer.param_groups[0]["lr"] = 0.2 * scale
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(plain(x), y)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(plain.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
    torch.testing.assert_close(dict(model.net.state_dict()), dict(plain.state_dict()))
    assert step.means()["nll"] == pytest.approx(sum(losses) / 3, rel=1e-5)


def test_the_rate_falls_as_a_power_of_what_is_left() -> None:
    schedule = ScheduleConfig("poly", power=2.0)
    found = [factor(schedule, step, steps_per_epoch=5, epochs=2) for step in range(10)]
    assert found == pytest.approx([(1 - step / 10) ** 2 for step in range(10)])


class TwoViews(nn.Module):
    """Two views of a batch as rows of one call: a member's rows are not together."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = self.layer(torch.cat([x, -x])).relu()
        return self.head(torch.cat(both.chunk(2), 1))


def test_a_compiled_step_is_checked_before_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, options: f)
    model = lpbnn.build(TwoViews(), "batchensemble", members=2)
    step = TrainStep(model.train(), compiled_for=6)
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    with pytest.warns(UserWarning, match="one after another"):
        step(x, y)
    assert isinstance(model, MemberEnsemble)
    assert model.execution == "loop"


def test_batch_norms_are_as_they_were_after_a_compiled_training(
    make: Make, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[type[nn.Module]] = set()
    monkeypatch.setattr(torch, "compile", lambda f, options: f)
    config = make("lpbnn", backbone="wrn-10-1", backbone_options={}, compile=True, epochs=1)
    model = build_model(config, DataInfo.of(splits))
    loss = model.loss

    def spy(*batch: Any) -> Any:
        seen.update(map(type, model.modules()))
        return loss(*batch)

    model.loss = spy  # type: ignore[method-assign]
    fit(model, splits, config)
    assert RowNorm in seen
    assert {type(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {nn.BatchNorm2d}


def test_a_part_at_a_lower_rate_keeps_the_ratio_of_fast_and_slow(
    make: Make, splits: Splits
) -> None:
    """``optim.parts`` multiplies the rates of the groups; it does not replace them."""
    optim = OptimConfig(lr=0.1, parts={"layers.*": 0.5})
    config = make("batchensemble", method_options={"fast_lr": 0.2}, optim=optim)
    model = build_model(config, DataInfo.of(splits))
    optimizer = make_optimizer(model, config, torch.device("cpu"))
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    first, *others = model.layers
    assert first.path.startswith("layers")
    assert rates[id(first.layer.weight)] == pytest.approx(0.05)
    assert rates[id(first.factors.r)] == pytest.approx(0.01)
    assert rates[id(first.member_bias)] == pytest.approx(0.01)
    for layer in others:
        assert rates[id(layer.layer.weight)] == pytest.approx(0.1)
        assert rates[id(layer.factors.r)] == pytest.approx(0.02)


def test_full_batches_are_replayed_and_smaller_ones_are_not(make: Make, splits: Splits) -> None:
    config = make()
    model = build_model(config, DataInfo.of(splits)).train()
    step = Step(model, config, launch(config), 32)
    step.recording = recording = Forgetful()  # type: ignore[assignment]
    inputs, labels = splits.normalise(splits.train[:32][0]), splits.train[:32][1]
    before = copy.deepcopy(model.state_dict())
    step(inputs, labels, 1.0)
    assert recording.replayed == [32]
    torch.testing.assert_close(model.state_dict(), before)
    step(inputs[:20], labels[:20], 1.0)
    assert recording.replayed == [32]
    assert not torch.equal(*(next(iter(s.values())) for s in (model.state_dict(), before)))


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("precision", ["32", "bf16", "fp16"])
def test_the_optimizer_is_one_kernel_unless_it_unscales_gradients_to_be_clipped(
    make: Make, splits: Splits, precision: Any, clip: float | None
) -> None:
    config = make(optim=OptimConfig(clip=clip), precision=precision)
    model = build_model(config, DataInfo.of(splits))
    fused = not (precision == "fp16" and clip)
    assert bool(make_optimizer(model, config, torch.device("cuda")).defaults["fused"]) == fused
    assert not make_optimizer(model, config, torch.device("cpu")).defaults["fused"]


def test_algorithms_of_convolutions_are_tried_in_training_alone() -> None:
    before = torch.backends.cudnn.benchmark
    with fast_convolutions(torch.device("cuda")):
        assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark == before
    with fast_convolutions(torch.device("cpu")):
        assert torch.backends.cudnn.benchmark == before


def test_a_warm_up_over_the_whole_run_has_a_last_rate() -> None:
    schedule = ScheduleConfig("cosine", warmup=2.0)
    found = [factor(schedule, step, steps_per_epoch=2, epochs=2) for step in range(5)]
    assert found == [0.25, 0.5, 0.75, 1.0, 1.0]
