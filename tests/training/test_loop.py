"""The loop: what it calls, when it stops, what it costs."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lpbnn
from lpbnn import data, methods
from lpbnn.data import Splits
from lpbnn.model import UncertainModel
from lpbnn.training import OptimConfig, RunConfig, ScheduleConfig
from lpbnn.training.build import DataInfo, build_model
from lpbnn.training.loop import Training, fit
from lpbnn.training.rundir import RunDir
from lpbnn.training.step import factor, make_optimizer, make_recordable, matching, set_rate

Make = Callable[..., RunConfig]
CONSTANT = ScheduleConfig("constant")


def trained(config: RunConfig, splits: Splits, **options: Any) -> tuple[UncertainModel, Training]:
    model = build_model(config, DataInfo.of(splits))
    return model, fit(model, splits, config, **options)


@pytest.mark.parametrize("method", methods.names())
def test_every_method_trains(make: Make, splits: Splits, method: str) -> None:
    optim = OptimConfig(lr=0.02, nesterov=False)  # duq diverges with more
    config = make(method, optim=optim, epochs=3)
    model, training = trained(config, splits)
    assert (training.epochs, training.diverged) == (3, None)
    for row in training.rows:
        terms = set(row) - {"epoch", "lr", "loss", "images_per_second", "seconds"}
        parts = [row[name] for name in terms if not name.startswith("val_")]
        assert row["loss"] == pytest.approx(sum(parts), rel=1e-4)
    before = build_model(config, DataInfo.of(splits)).state_dict()
    assert not all(torch.equal(before[k], v) for k, v in model.state_dict().items() if k in before)


@pytest.mark.parametrize("before", [False, True])
def test_a_model_learns_in_training_mode_and_is_validated_in_evaluation_mode(
    make: Make, splits: Splits, before: bool
) -> None:
    config = make("lpbnn", epochs=2)
    model = build_model(config, DataInfo.of(splits)).train(before)
    seen: list[tuple[bool, bool, bool]] = []
    model.net.register_forward_hook(
        lambda net, args, output: seen.append(
            (model.training, net.training, torch.is_grad_enabled())
        )
    )
    fit(model, splits, config)
    changes = [seen[0], *(now for last, now in pairwise(seen) if now != last)]
    learning = [modes for modes in changes if modes != (False, False, False)]
    assert learning[-2:] == [(True, True, True)] * 2
    assert changes[-1] == (False, False, False)


def test_the_same_seed_gives_the_same_weights(make: Make, splits: Splits) -> None:
    states = []
    for seed in (0, 0, 1):
        torch.rand(seed)  # torch's generators are elsewhere each time
        states.append(trained(make("lpbnn", seed=seed), splits)[0].state_dict())
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert not all(torch.equal(states[0][k], states[2][k]) for k in states[0])


def test_the_caller_keeps_his_generators(make: Make, splits: Splits) -> None:
    before = torch.get_rng_state()
    trained(make("lpbnn"), splits)
    assert torch.equal(torch.get_rng_state(), before)


def test_hooks_are_called_in_their_order(
    make: Make, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def after_fit(self: UncertainModel, batches: Iterable[tuple[Any, Tensor]]) -> None:
        calls.append(("fit", sum(len(y) for _, y in batches)))

    monkeypatch.setattr(UncertainModel, "before_epoch", lambda self, *args: calls.append(args))
    monkeypatch.setattr(UncertainModel, "after_step", lambda self, lr: calls.append(lr))
    monkeypatch.setattr(UncertainModel, "after_fit", after_fit)
    trained(make(schedule=ScheduleConfig("step", milestones=(1,))), splits)
    calls = [round(call, 9) if isinstance(call, float) else call for call in calls]
    assert calls == [(0, 2), *[0.1] * 4, (1, 2), *[0.01] * 4, ("fit", 200)]


def test_divergence_is_a_result(make: Make, splits: Splits, tmp_path: Path) -> None:
    """The stability table of the paper: the epoch is recorded, the last finite weights are kept."""
    optim = OptimConfig(lr=1e30, nesterov=False)
    config = make(optim=optim, schedule=CONSTANT, epochs=5)
    model, training = trained(config, splits, folder=prepared(tmp_path, config, splits))
    assert (training.epochs, training.diverged) == (0, 1)
    assert not math.isfinite(training.rows[-1]["loss"])
    fresh = build_model(config, DataInfo.of(splits)).state_dict()
    assert all(torch.equal(fresh[k], v) for k, v in model.state_dict().items())
    _, resumed = trained(config, splits, folder=RunDir(tmp_path), resume=True)
    assert (resumed.epochs, resumed.diverged, len(resumed.rows)) == (0, 1, 1)


def test_divergence_later_keeps_the_epoch_before(
    make: Make, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, steps = make(epochs=5), 0
    until = trained(replace(config, schedule=CONSTANT, epochs=2), splits)[0].state_dict()

    def blow_up(self: UncertainModel, lr: float) -> None:
        nonlocal steps
        steps += 1
        if steps == 12:  # the last step of the third epoch: its loss was still finite
            next(self.parameters()).data.fill_(torch.inf)

    monkeypatch.setattr(UncertainModel, "after_step", blow_up)
    model, training = trained(replace(config, schedule=CONSTANT), splits)
    assert (training.epochs, training.diverged) == (2, 3)
    assert all(torch.equal(until[k], v) for k, v in model.state_dict().items())


def test_predictions_that_overflow_count_as_divergence(
    make: Make, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swell(self: UncertainModel, lr: float) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(1e30)  # finite, but not their products

    monkeypatch.setattr(UncertainModel, "after_step", swell)
    one_step = make(batch_size=200)
    assert trained(one_step, splits)[1].diverged == 1


def test_variances_that_overflow_count_as_divergence(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swell(self: UncertainModel, lr: float) -> None:
        with torch.no_grad():
            *_, weight, bias = self.parameters()
            for spread in (weight[1:], bias[1:]):
                spread.fill_(torch.finfo().max)  # finite, but not their sum

    monkeypatch.setattr(UncertainModel, "after_step", swell)
    one_step = make(data="diabetes", batch_size=1000)
    assert trained(one_step, data.load("diabetes"))[1].diverged == 1


def test_a_mask_of_infinities_is_no_divergence(make: Make, splits: Splits) -> None:
    """A causal mask is kept as a buffer by many a network, in its state dict or not."""
    config = make("lpbnn")
    model = build_model(config, DataInfo.of(splits))
    for name, kept in (("mask", True), ("other_mask", False)):
        mask = nn.Transformer.generate_square_subsequent_mask(3)
        model.net.register_buffer(name, mask, persistent=kept)
    assert fit(model, splits, config).diverged is None


def test_one_example_left_over_at_the_end_stops_no_batch_norm(make: Make, splits: Splits) -> None:
    """Training leaves it out (drop_last); tradi's drawn networks see all of the data once more."""
    part = replace(splits, train=splits.train.take(slice(193)))
    widths = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
    model = lpbnn.build(nn.Sequential(nn.Flatten(), *widths), "tradi")
    fit(model, part, make("tradi", drop_last=True, batch_size=64))
    assert model.members == 4


class Reads(TorchDispatchMode):
    """Counts how often a number is fetched from the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["mcp", "lpbnn"])
def test_no_step_waits_for_the_device(make: Make, splits: Splits, method: str) -> None:
    counts = []
    for batch in (100, 10):
        config = make(method, batch_size=batch, optim=OptimConfig(clip=1.0), epochs=1)
        with Reads() as reads:
            trained(config, splits)
        counts.append(reads.count)
    assert counts[0] == counts[1]


def test_the_numbers_of_the_log(make: Make, splits: Splits) -> None:
    schedule = ScheduleConfig("step", milestones=(1,))
    _, training = trained(make(schedule=schedule, validate_every=2, epochs=3), splits)
    first, second, third = training.rows
    assert [row["lr"] for row in training.rows] == pytest.approx([0.1, 0.01, 0.01])
    assert "val_accuracy" not in first
    assert 0 <= second["val_accuracy"] <= 1
    assert "val_accuracy" in third  # the last epoch is always looked at
    assert first["images_per_second"] == pytest.approx(200 / first["seconds"])
    assert training.seconds == pytest.approx(sum(row["seconds"] for row in training.rows))
    assert training.peak_memory > 0


def test_a_set_without_validation_is_fine(make: Make, splits: Splits) -> None:
    nothing = replace(splits, val=splits.val.take(slice(0)))
    assert not any("val" in name for name in trained(make(), nothing)[1].rows[0])


def test_clipping_bounds_the_step(make: Make, splits: Splits) -> None:
    optim = OptimConfig(lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, clip=1e-3)
    config = make(optim=optim, schedule=CONSTANT, batch_size=200, epochs=1)
    start = build_model(config, DataInfo.of(splits)).state_dict()
    end = trained(config, splits)[0].state_dict()
    moved = torch.stack([(end[k] - start[k]).square().sum() for k in start]).sum().sqrt()
    assert moved.item() == pytest.approx(1e-3, rel=1e-2)


def test_bf16_is_used_and_targets_are_not_rounded(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    loss = UncertainModel.loss

    def spy(self: UncertainModel, x: Tensor, y: Tensor, weight: None = None) -> Any:
        seen.update(x=x, y=y, inside=self.net(x).dtype)
        return loss(self, x, y)

    monkeypatch.setattr(UncertainModel, "loss", spy)
    table = data.load("diabetes")
    config = make(precision="bf16", batch_size=266, optim=OptimConfig(lr=0.01))
    model, training = trained(config, table)
    assert seen["inside"] == torch.bfloat16
    assert seen["y"].dtype == seen["x"].dtype == torch.float32
    assert not torch.equal(seen["y"].bfloat16().float(), seen["y"])
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert math.isfinite(training.rows[-1]["val_nll"])


def test_compile_trains_to_the_same_weights(
    make: Make, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, compile = [], torch.compile

    def quick(function: Any, options: Any) -> Any:
        compiled.append(function)
        return compile(function, backend="eager")

    monkeypatch.setattr(torch, "compile", quick)
    plain, fast = (trained(make("lpbnn", compile=c), splits)[0].state_dict() for c in (False, True))
    assert len(compiled) == 1
    for name, tensor in plain.items():
        torch.testing.assert_close(fast[name], tensor, msg=name)


@pytest.mark.parametrize(("method", "graphs"), [("lpbnn", 1), ("rank1", 1)])
def test_compile_does_not_compile_again_and_again(
    make: Make, splits: Splits, monkeypatch: pytest.MonkeyPatch, method: str, graphs: int
) -> None:
    """Not for the short last batch, nor for a weight of the KL that changes every epoch."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options: compile(f, backend=counter))
    trained(make(method, compile=True, epochs=5, validate_every=0), splits)
    assert counter.frame_count == graphs


def test_channels_last_trains_to_the_same_weights(make: Make, splits: Splits) -> None:
    states = []
    for channels_last in (False, True):
        config = make(backbone="lenet", backbone_options={}, channels_last=channels_last, epochs=1)
        states.append(trained(config, splits)[0].state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_fast_weights_have_their_own_rate_and_no_decay(make: Make, splits: Splits) -> None:
    config = make("batchensemble", method_options={"fast_lr": 0.5})
    model = build_model(config, DataInfo.of(splits))
    slow, fast = make_optimizer(model, config, torch.device("cpu")).param_groups
    assert (slow["initial_lr"], slow["weight_decay"]) == (0.1, 1e-4)
    assert (fast["initial_lr"], fast["weight_decay"]) == (0.05, 0.0)


@pytest.mark.parametrize("method", ["mcp", "ensemble", "lpbnn"])
def test_a_part_of_the_network_has_a_rate_of_its_own(make: Make, method: str) -> None:
    streets = data.load("street-scenes", train=2, val=1, test=1, size=(32, 32))
    small = {"width": 4, "channels": 8}
    config = make(method, backbone="deeplab-resnet18", backbone_options=small)
    slow = replace(config, optim=OptimConfig(lr=0.1, parts={"encoder.*": 0.1}))
    model = build_model(config, DataInfo.of(streets))
    groups = make_optimizer(model, slow, torch.device("cpu")).param_groups
    rates = {id(p): group["initial_lr"] for group in groups for p in group["params"]}
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    plain = make_optimizer(model, config, torch.device("cpu")).param_groups
    assert decays == {id(p): g["weight_decay"] for g in plain for p in g["params"]}
    for name, parameter in model.named_parameters():  # a factor's own encoder is another thing
        encoder = re.match(r"net\.(\d\.)?encoder\.", name) is not None
        assert rates[id(parameter)] == pytest.approx(0.01 if encoder else 0.1), name
    wrong = replace(config, optim=OptimConfig(parts={"encodr.*": 0.1}))
    with pytest.raises(ValueError, match=r"optim.parts\['encodr.\*'\] matches no parameter"):
        make_optimizer(model, wrong, torch.device("cpu"))


def test_adamw_takes_its_betas_from_momentum(make: Make, splits: Splits) -> None:
    config = make(optim=OptimConfig("adamw", lr=1e-3, momentum=0.8))
    model, training = trained(config, splits)
    optimizer = make_optimizer(model, config, torch.device("cpu"))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.999)
    assert training.epochs == 2


@pytest.mark.parametrize("name", ["constant", "step", "cosine", "poly"])
def test_every_schedule_warms_up_and_never_rises_after(name: Any) -> None:
    schedule = ScheduleConfig(name, warmup=2, milestones=(5, 8))
    rates = [factor(schedule, step, 7, 10) for step in range(70)]
    assert rates[:14] == pytest.approx([(i + 1) / 14 for i in range(14)])
    assert all(0 < later <= earlier for earlier, later in pairwise(rates[14:]))
    assert (rates[-1] == 1) == (name == "constant")


def prepared(path: Path, config: RunConfig, splits: Splits) -> RunDir:
    folder = RunDir(path)
    folder.prepare(config, DataInfo.of(splits))
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without CUDA says")
def test_what_needs_cuda_says_so(make: Make, splits: Splits) -> None:
    with pytest.raises(ValueError, match="torch finds no CUDA device"):
        trained(make(device="cuda"), splits)
    with pytest.raises(ValueError, match="'fp16', which needs CUDA"):
        trained(make(precision="fp16"), splits)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_checkpoint_from_another_device_does_not_decide_how_steps_are_made(
    make: Make, splits: Splits, name: str
) -> None:
    """What a CPU's optimizer saved, loaded into one whose steps are to be recorded."""
    config = make(optim=OptimConfig(name))
    model = build_model(config, DataInfo.of(splits))
    plain, recorded = (
        make_optimizer(model, config, torch.device("cpu"), capturable=kind)
        for kind in (False, True)
    )
    model.loss(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))["loss"].backward()
    plain.step()
    recorded.load_state_dict(plain.state_dict())
    make_recordable(recorded, torch.device("cpu"))
    for group in recorded.param_groups:
        assert isinstance(group["lr"], Tensor)
        assert group.get("capturable", True)
    set_rate(recorded, 0.5)
    assert [group["lr"].item() for group in recorded.param_groups] == pytest.approx(
        [0.5 * group["initial_lr"] for group in recorded.param_groups]
    )


def test_parts_of_a_sequential_are_found_by_their_numbers() -> None:
    model = lpbnn.build(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), "mcp")
    assert len(matching(model, "0.*")) == 2

    class Chain(nn.ModuleList):
        """A list that is one network, not several."""

    assert len(matching(lpbnn.build(Chain([nn.Linear(2, 2), nn.Linear(2, 2)]), "mcp"), "0.*")) == 2
    with pytest.raises(ValueError, match="matches no parameter"):
        matching(model, "weight")


def test_a_training_without_a_finished_epoch_has_nothing_to_finish(
    make: Make, splits: Splits
) -> None:
    config, calls = make("mcp", optim=OptimConfig(lr=1e30)), []
    model = build_model(config, DataInfo.of(splits))
    model.after_fit = calls.append  # type: ignore[method-assign]
    training = fit(model, splits, config)
    assert (training.epochs, training.diverged) == (0, 1)
    assert not calls
