"""TRADI: the filters against closed forms, the draws against their covariance, the drawn networks."""

import copy
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Mlp, ResNet, UsersOwn
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import lpbnn
from lpbnn import likelihoods
from lpbnn.methods.tradi import TRADI, Config
from lpbnn.model import NotFittedWarning

Batch = tuple[Any, Tensor]


def build(net: nn.Module, **options: Any) -> TRADI:
    model = lpbnn.build(net, "tradi", **options)
    assert isinstance(model, TRADI)
    return model


def batches(shape: tuple[int, ...], *sizes: int, dtype: Any = None) -> list[Batch]:
    return [(torch.randn(n, *shape, dtype=dtype), torch.randint(3, (n,))) for n in sizes]


def train(model: TRADI, data: list[Batch], lr: float = 0.1, given: bool = False) -> None:
    sgd = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    for x, y in data:
        sgd.zero_grad()
        model.loss(x, y)["loss"].backward()
        sgd.step()
        model.after_step(lr) if given else model.after_step()


def fitted(net: nn.Module, shape: tuple[int, ...], **options: Any) -> tuple[TRADI, list[Batch]]:
    model, data = build(net, **options), batches(shape, 8, 8, 5)
    train(model, data)
    model.after_fit(data)
    return model, data


class Quadratic:
    """Gradient descent on a w^2 / 2 from w_0 = 1: w_t = rho^t with rho = 1 - lr a."""

    lr, a = 0.1, 0.5
    rho = 1 - lr * a

    def __init__(self, **options: float) -> None:
        self.model = build(nn.Linear(1, 1, bias=False), **options).double()
        (self.w,) = self.model.net.parameters()
        nn.init.ones_(self.w)

    def descend(self, steps: int, given: bool) -> tuple[float, float]:
        for _ in range(steps):
            self.w.grad = self.a * self.w.detach()
            with torch.no_grad():
                self.w -= self.lr * self.w.grad
            self.model.after_step(self.lr) if given else self.model.after_step()
        (mean,), (variance,) = self.model.mean.buffers(), self.model.variance.buffers()
        return mean.item(), variance.item()


def gains(noise: float, steps: int, measurement: float = 10.0) -> list[float]:
    """Return the gains of a textbook Kalman filter with an uninformative prior."""
    found, p = [], 1e30
    for _ in range(steps):
        predicted = p + noise
        found.append(predicted / (predicted + measurement))
        p = (1 - found[-1]) * predicted if found[-1] < 1 else measurement
    return found


def test_the_gain_is_that_of_a_kalman_filter() -> None:
    model = build(Mlp()).double()
    for k_mean, k_variance in zip(gains(1e-4, 3000), gains(5e-5, 3000), strict=True):
        model.after_step()
        assert model.memory.reciprocal().tolist() == pytest.approx([k_mean, k_variance])
    assert model.memory.tolist() == pytest.approx([316.7, 447.7], abs=0.1)


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_with_the_rate_the_mean_is_the_trajectory_and_the_variance_a_leaking_sum(
    steps: int,
) -> None:
    """Plain SGD moves by -lr g itself, so prediction and measurement of the mean agree."""
    mean, variance = Quadratic().descend(steps, given=True)
    quadratic, leaks = Quadratic, [1 - k for k in gains(5e-5, steps)]
    expected = 0.0
    for step in range(1, steps + 1):
        squared = (quadratic.lr * quadratic.a * quadratic.rho ** (step - 1)) ** 2
        for leak in leaks[step - 1 :]:
            squared *= leak
        expected += squared
    assert mean == pytest.approx(quadratic.rho**steps)
    assert variance == pytest.approx(expected)


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_without_the_rate_and_noise_the_mean_is_the_average_of_the_trajectory(steps: int) -> None:
    rho = Quadratic.rho
    mean, variance = Quadratic(mean_noise=0, variance_noise=0).descend(steps, given=False)
    means = [rho * (1 - rho**t) / (t * (1 - rho)) for t in range(1, steps + 1)]
    assert mean == pytest.approx(means[-1])
    deviations = [(rho**t - means[t - 1]) ** 2 for t in range(1, steps + 1)]
    assert variance == pytest.approx(sum(deviations) / steps)


def test_the_moments_of_a_stationary_weight_are_tracked() -> None:
    model = build(nn.Linear(1000, 1, bias=False))
    (weight,) = model.net.parameters()
    for _ in range(2000):
        nn.init.normal_(weight, 0.3, 0.05)
        model.after_step()
    (mean,), (variance,) = model.mean.buffers(), model.variance.buffers()
    assert (mean - 0.3).abs().max() < 0.02
    assert variance.mean().sqrt().item() == pytest.approx(0.05, rel=0.02)


def test_the_covariance_of_draws_is_the_kernel() -> None:
    model = build(Mlp(), frequency=2.0)
    mean = torch.tensor([0.0, 0.1, 0.5, 1.5], dtype=torch.float64)
    variance = torch.tensor([1.0, 4.0, 0.25, 1.0], dtype=torch.float64)
    draws = torch.stack([model._draw(mean, variance) for _ in range(6000)])
    torch.testing.assert_close(draws.mean(0), mean, rtol=0, atol=0.12)
    deviation = variance.sqrt()
    correlation = torch.cov(draws.T) / (deviation[:, None] * deviation)
    kernel = torch.exp(-2.0 * (mean[:, None] - mean).square())
    torch.testing.assert_close(correlation, kernel, rtol=0, atol=0.1)


def test_weights_of_equal_mean_are_perfectly_correlated() -> None:
    mean, variance = torch.full((50,), 0.2), torch.rand(50)
    draw = build(Mlp())._draw(mean, variance)
    moved = (draw - mean) / variance.sqrt()
    torch.testing.assert_close(moved, moved[:1].expand(50), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", [False, True])
def test_a_drawn_member_is_an_ordinary_network(given: bool) -> None:
    model, data = build(ResNet(), members=3), batches((3, 8, 8), 8, 8, 5)
    train(model, data, given=given)
    model.after_fit(data)
    x = torch.randn(4, 3, 8, 8)
    prediction = lpbnn.predict(model, x)
    for j in range(3):
        net = copy.deepcopy(model.net).eval()
        weights = {name: t[j] for name, t in model.drawn.by_name().items()}
        assert set(weights) == set(net.state_dict())
        net.load_state_dict(weights)
        torch.testing.assert_close(prediction.members[j], net(x).softmax(1))
    assert not torch.allclose(prediction.members[0], prediction.members[1], atol=1e-5)
    torch.testing.assert_close(prediction.probs, prediction.members.mean(0))


@pytest.mark.parametrize("sizes", [(7, 7, 2), (5, 3), (2, 9, 4)])
def test_every_member_has_the_statistics_of_the_data_under_its_own_weights(
    sizes: tuple[int, ...],
) -> None:
    """Averages over examples, for any batch sizes, from a generator that can be read only once."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))
    model, data = build(net, members=3).double(), batches((1, 8, 8), *sizes, dtype=torch.float64)
    train(model, data)
    before = copy.deepcopy(model.net.state_dict())

    def once() -> Iterator[Batch]:
        yield from data

    model.after_fit(once())
    x = torch.cat([x for x, _ in data])
    drawn = model.drawn.by_name()
    for j in range(3):
        seen = nn.functional.conv2d(x, drawn["0.weight"][j], drawn["0.bias"][j])
        torch.testing.assert_close(drawn["1.running_mean"][j], seen.mean((0, 2, 3)))
    torch.testing.assert_close(model.net.state_dict(), before)
    assert (model.training, net[1].training, net[1].momentum) == (True, True, 0.1)


def test_before_after_fit_and_in_training_mode_the_network_itself_predicts() -> None:
    model, x = build(Mlp(), members=5), torch.randn(4, 5)
    assert model.members == 1
    with pytest.warns(UserWarning, match="tradi has tracked no training step"):
        prediction = lpbnn.predict(model, x)
    torch.testing.assert_close(prediction.probs, model.net(x).softmax(1))
    train(model, batches((5,), 6, 6))
    model.after_fit([])  # no batch norm: no data needed
    assert model.members == 5
    assert model.eval()(x).shape == (5, 4, 3)
    torch.testing.assert_close(model.train()(x)[0], model.net(x))
    train(model, batches((5,), 6))  # training can go on


def test_a_prediction_without_tracked_steps_warns_once(recwarn: pytest.WarningsRecorder) -> None:
    model, x = build(Mlp()), torch.randn(4, 5)
    with pytest.warns(NotFittedWarning, match=r"model.after_step\(lr\).*model.after_fit") as caught:
        lpbnn.predict(model, x)
    assert caught[0].filename == __file__
    lpbnn.predict(model, x)
    assert not recwarn.list


def test_validation_between_epochs_and_predictions_after_after_fit_do_not_warn(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model, x, data = build(Mlp()), torch.randn(4, 5), batches((5,), 6, 6)
    model.before_epoch(0, 2)
    lpbnn.predict(model, x)  # before the first step
    train(model, data)
    lpbnn.predict(model, x)
    model.before_epoch(1, 2)
    train(model, data)
    model.after_fit(data)
    lpbnn.predict(model, x)
    finished = build(Mlp())
    finished.load_state_dict(model.state_dict())
    lpbnn.predict(finished, x)
    assert not recwarn.list


@pytest.mark.parametrize("epochs", [0, 2])
def test_a_training_without_after_fit_warns_once(
    recwarn: pytest.WarningsRecorder, epochs: int
) -> None:
    """After the last epoch, in a loop without before_epoch, and after loading a state dict."""
    model, x, data = build(Mlp()), torch.randn(4, 5), batches((5,), 6, 6)
    for epoch in range(epochs):
        model.before_epoch(epoch, epochs)
        train(model, data)
    if not epochs:
        train(model, data)
    loaded = build(Mlp())
    loaded.load_state_dict(model.state_dict())
    for unfinished in (model, loaded):
        with pytest.warns(
            NotFittedWarning, match=r"drawn no networks.* Fix: .*after_fit"
        ) as caught:
            prediction = lpbnn.predict(unfinished, x)
        assert caught[0].filename == __file__
        assert prediction.epistemic.abs().max() < 1e-6  # as it says
        lpbnn.predict(unfinished, x)
        train(unfinished, data)
        lpbnn.predict(unfinished, x)
        unfinished.after_fit(data)
        lpbnn.predict(unfinished, x)
    assert not recwarn.list


def test_a_missing_after_fit_warns_after_a_warning_about_missing_steps() -> None:
    model, x, data = build(Mlp()), torch.randn(4, 5), batches((5,), 6, 6)
    with pytest.warns(NotFittedWarning, match="tracked no training step"):
        lpbnn.predict(model, x)
    train(model, data)
    with pytest.warns(NotFittedWarning, match="drawn no networks"):
        lpbnn.predict(model, x)


def test_a_loop_may_ignore_the_warning_by_its_category(recwarn: pytest.WarningsRecorder) -> None:
    model, data = build(Mlp()), batches((5,), 6)
    model.before_epoch(0, 1)
    train(model, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotFittedWarning)
        lpbnn.predict(model, data[0][0])  # the validation of the last epoch
    assert not recwarn.list


def statistics(kind: type[nn.Module], data: list[Batch], given: list[Any]) -> dict[str, Tensor]:
    """Return the drawn tensors after ``after_fit(given)``, from a fixed seed."""
    torch.manual_seed(1)
    model = build(kind(), members=2)
    train(model, data)
    torch.manual_seed(2)
    model.after_fit(given)
    return model.drawn.by_name()


class TwoInputs(nn.Module):
    """A network with batch norm and a second input, required or optional."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.head(self.norm(x + context))


class OptionalInput(TwoInputs):
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.head(self.norm(x if context is None else x + context))


def test_after_fit_takes_batches_and_inputs() -> None:
    data = batches((3, 8, 8), 8, 5)
    with_targets = statistics(ResNet, data, data)
    for given in (
        [x for x, _ in data],
        [(x,) for x, _ in data],
        [[x, y] for x, y in data],
        [((x,), y) for x, y in data],
        [{"x": x} for x, _ in data],
        [({"x": x}, y) for x, y in data],
    ):
        torch.testing.assert_close(statistics(ResNet, data, given), with_targets)


def test_after_fit_takes_inputs_of_a_network_with_two_arguments() -> None:
    data = [((torch.randn(6, 5), torch.randn(6, 5)), torch.randint(3, (6,))) for _ in range(2)]
    with_targets = statistics(TwoInputs, data, data)
    named = [{"x": x, "context": context} for (x, context), _ in data]
    torch.testing.assert_close(statistics(TwoInputs, data, named), with_targets)


def test_after_fit_takes_pairs_as_inputs_and_targets_if_the_second_argument_is_optional() -> None:
    data = batches((5,), 6, 6)
    plain = statistics(OptionalInput, data, [x for x, _ in data])
    torch.testing.assert_close(statistics(OptionalInput, data, data), plain)


def test_after_fit_refuses_tuples_that_are_no_pairs() -> None:
    data = batches((3, 8, 8), 8)
    x, y = data[0]
    with pytest.raises(TypeError, match=r"a pair \(inputs, targets\); got a tuple of 3"):
        statistics(ResNet, data, [(x, y, torch.ones(8))])


def test_a_failed_after_fit_draws_nothing() -> None:
    model, data = build(ResNet()), batches((3, 8, 8), 8)
    train(model, data)
    with pytest.raises(TypeError, match="got a tuple of 3"):
        model.after_fit([(1, 2, 3)])
    assert not model.is_drawn
    assert model.members == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_filters_work_in_half_precision(when: str) -> None:
    net = nn.Sequential(nn.Linear(1000, 1, bias=False), nn.Linear(1, 3))
    model = build(net.bfloat16()) if when == "before" else build(net).bfloat16()
    moments = (*model.mean.buffers(), *model.variance.buffers(), model.memory, model.ratios)
    assert {tensor.dtype for tensor in moments} == {torch.float32}
    weight = net[0].weight
    for _ in range(2000):
        nn.init.normal_(weight, 0.3, 0.05)
        weight.grad = torch.zeros_like(weight)
        model.after_step(0.1)
    assert model.memory.tolist() == pytest.approx([316.7, 447.7], rel=0.01)
    mean, variance = model.mean.by_name()["0.weight"], model.variance.by_name()["0.weight"]
    assert (mean - 0.3).abs().max() < 0.02
    assert variance.mean().sqrt().item() == pytest.approx(0.05, rel=0.02)
    model.after_fit([])
    assert {tensor.dtype for tensor in model.drawn.buffers()} == {torch.bfloat16}
    x = torch.randn(2, 1000, dtype=torch.bfloat16)
    assert lpbnn.predict(model, x).members.shape == (4, 2, 3)


def test_a_step_that_a_grad_scaler_skipped_moves_no_filter() -> None:
    """If gradients overflow, as they do until the scale of fp16 is found, the weights do not change."""
    model = build(nn.Linear(4, 3))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    ((x, y),) = batches((4,), 8)
    before = [p.detach().clone() for p in model.net.parameters()]
    scaler.scale(model.loss(1e3 * x, y)["loss"]).backward()
    scaler.step(sgd)
    model.after_step(0.1)
    assert not model.net[0].weight.grad.isfinite().all()
    for moments, expected in (
        (model.mean, before),
        (model.variance, map(torch.zeros_like, before)),
    ):
        torch.testing.assert_close(list(moments.buffers()), list(expected), rtol=0, atol=0)


def test_predictions_do_not_depend_on_the_chunk() -> None:
    model, _ = fitted(Mlp(), (5,), members=3)
    whole = lpbnn.predict(model, x := torch.randn(4, 5)).members
    for chunk in (1, 2, 3, 8, 100):
        torch.testing.assert_close(lpbnn.predict(model, x, chunk=chunk, samples=2).members, whole)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_passes_of_any_width_have_all_members(width: int) -> None:
    model, _ = fitted(Mlp(), (5,), members=3)
    x = torch.randn(4, 5)
    parts = [run(x) for run in model.eval().passes(1, width)]
    torch.testing.assert_close(torch.cat(parts), model(x))


def test_the_same_seed_draws_the_same_networks() -> None:
    model, data = fitted(Mlp(), (5,))
    other = copy.deepcopy(model)
    for m in (model, other):
        torch.manual_seed(3)
        m.after_fit(data)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_a_new_model_loads_a_state_with_or_without_drawn_networks(tmp_path: Path) -> None:
    x = torch.randn(4, 3, 8, 8)
    model, _ = fitted(ResNet(), (3, 8, 8), members=3)
    expected = lpbnn.predict(model, x).members
    fresh = build(ResNet(), members=7)  # the drawn networks are as many as were saved
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(lpbnn.predict(fresh, x).members, expected)
    save_model(model, str(tmp_path / "model.safetensors"))
    fresh = build(ResNet())
    load_model(fresh, str(tmp_path / "model.safetensors"))
    assert torch.equal(lpbnn.predict(fresh, x).members, expected)
    fresh.load_state_dict(build(ResNet()).state_dict())
    assert fresh.members == 1
    double = build(ResNet()).double()
    double.load_state_dict(model.state_dict())
    torch.testing.assert_close(lpbnn.predict(double, x.double()).members.float(), expected)


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_drawn_networks_are_loaded_onto_the_device_of_the_model() -> None:
    model, _ = fitted(Mlp(), (5,), members=3)
    fresh = build(Mlp()).to("meta")
    fresh.load_state_dict(model.state_dict())
    assert fresh.is_drawn
    assert {tensor.device.type for tensor in fresh.state_dict().values()} == {"meta"}


def test_a_resumed_training_tracks_as_if_uninterrupted() -> None:
    model, data = build(Mlp()), batches((5,), 6, 6, 6, 6)
    train(model, data[:2])
    resumed = build(Mlp())
    resumed.load_state_dict(model.state_dict())
    for m in (model, resumed):
        train(m, data[2:])
    torch.testing.assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_frozen_weights_are_neither_tracked_nor_copied() -> None:
    net = Mlp()
    net[0].requires_grad_(False)
    model, _ = fitted(net, (5,))
    assert {name[0] for name in model.drawn.by_name()} == {"2", "4"}
    assert lpbnn.predict(model, torch.randn(2, 5)).members.shape == (4, 2, 3)


def test_a_module_used_twice_is_drawn_once() -> None:
    model = build(UsersOwn(), members=2)
    data = [((torch.randn(6, 5), torch.randn(6, 3)), torch.randint(3, (6,)))] * 3
    train(model, data)
    model.after_fit(data)
    net = copy.deepcopy(model.net)
    for name, tensor in model.drawn.by_name().items():
        net.get_parameter(name).data.copy_(tensor[1])
    torch.testing.assert_close(model.eval()(*data[0][0])[1], net(*data[0][0]))


def test_a_regression_averages_means_and_variances() -> None:
    model = build(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)), task="regression")
    data = [(torch.randn(6, 5), torch.randn(6, 1))] * 4
    train(model, data, lr=0.02)
    model.after_fit(data)
    prediction = lpbnn.predict(model, data[0][0])
    assert prediction.mean.shape == (6, 1)
    assert (prediction.epistemic > 0).all()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.body(x))
        return {"kind": self.kind(x), "size": self.size(x)}


def test_several_heads_are_predicted_by_every_drawn_network() -> None:
    heads = {"kind": likelihoods.Categorical(), "size": likelihoods.Gaussian()}
    model = build(TwoHeads(), members=3, likelihood=heads)
    x, y = torch.randn(6, 5), {"kind": torch.randint(3, (6,)), "size": torch.randn(6, 1)}
    assert list(model.loss(x, y)) == ["loss", "nll", "nll/kind", "nll/size"]
    train(model, [(x, y)] * 3)  # type: ignore[list-item]
    model.after_fit([])
    prediction = lpbnn.predict(model, x)
    assert prediction["kind"].members.shape == (3, 6, 3)
    assert prediction["size"].members.shape == (3, 6, 1)
    assert (prediction["size"].epistemic > 0).all()


def test_threads_predict_with_all_drawn_networks() -> None:
    model, _ = fitted(Mlp(), (5,), members=3)
    inputs = [torch.randn(64, 5) for _ in range(8)]
    expected = [lpbnn.predict(model.eval(), x).members for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            found = list(pool.map(lambda x: lpbnn.predict(model, x).members, inputs))
            torch.testing.assert_close(found, expected)


def test_the_drawn_networks_compile_into_one_graph() -> None:
    model, _ = fitted(ResNet(), (3, 8, 8), members=2)
    x = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        compiled = torch.compile(model.eval(), backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled, model(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 0}, "members=0: expected an integer of at least 1"),
        ({"features": 2.5}, "features=2.5: expected an integer of at least 1"),
        ({"mean_noise": -1}, "mean_noise=-1: expected a number of at least 0"),
        ({"measurement_noise": 0}, "measurement_noise=0: expected a number above 0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**options)


def test_errors_name_what_is_missing() -> None:
    with pytest.raises(ValueError, match="the network has none. Fix: net.requires_grad_"):
        build(Mlp().requires_grad_(False))
    model = build(ResNet())
    with pytest.raises(RuntimeError, match=r"tracked no weights. Fix: call model.after_step\(\)"):
        model.after_fit(batches((3, 8, 8), 4))
    with pytest.raises(RuntimeError, match=r"after_step\(lr=0.1\) reads the gradients"):
        model.after_step(0.1)
    model.after_step()
    with pytest.raises(ValueError, match="no batches.* Fix: model.after_fit"):
        model.after_fit([])
    assert model.members == 1
    assert model.eval()(torch.randn(2, 3, 8, 8)).shape == (1, 2, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_of_half_precision_weights_moves_the_filter_without_rounding(dtype: Any) -> None:
    model = build(nn.Linear(50, 1, bias=False).to(dtype))
    (weight,) = model.net.parameters()
    weight.grad = torch.randn_like(weight)
    (mean,) = model.mean.by_name().values()
    before = mean.clone()
    model.ratios.zero_()
    model.memory.fill_(1e12)  # so that the gain is nearly zero
    model.after_step(0.1)
    torch.testing.assert_close(mean, before - 0.1 * weight.grad.float(), rtol=1e-6, atol=1e-7)
