"""Temperature and vector scaling: the minimum of the held-out NLL, kept with the model."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import small
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import lpbnn
from lpbnn.calibration import calibrate, fit_scaling
from lpbnn.calibration.held_out import choose_cells
from lpbnn.calibration.scaling import mixture_nll
from lpbnn.likelihoods import Categorical, Gaussian, MultiLabel, Scaling, Segmentation
from lpbnn.methods.ensemble import from_members
from lpbnn.predict import Prediction

ALL_METHODS = (
    "batchensemble",
    "duq",
    "edl",
    "ensemble",
    "lpbnn",
    "mcdropout",
    "mcp",
    "meanfield",
    "mimo",
    "rank1",
)


def overconfident(members: int = 1, n: int = 2000, factor: float = 3.0) -> tuple[Tensor, Tensor]:
    """Outputs of members, ``factor`` times as large as those from which the labels are drawn."""
    outputs = 1.5 * torch.randn(n, 4) + 0.2 * torch.randn(members, n, 4)
    labels = outputs.softmax(-1).mean(0).multinomial(1).squeeze(1)
    return factor * outputs, labels


def held_out(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Three batches, with labels less sure than the model that they are for."""
    wrapped = model if isinstance(model, lpbnn.UncertainModel) else lpbnn.build(model, "mcp")
    x = torch.randn(300, 5)
    y = lpbnn.predict(wrapped, x, seed=0).probs.sqrt().multinomial(1).squeeze(1)
    return list(zip(x.split(100), y.split(100), strict=True))


def test_a_model_in_training_mode_is_calibrated_in_evaluation_mode() -> None:
    """Its dropout and batch norm included, whose statistics stay as they are."""
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model = lpbnn.build(net, "mcp").eval()
    batches = held_out(model)
    expected = calibrate(copy.deepcopy(model), batches)
    before = copy.deepcopy(net.state_dict())
    found = calibrate(model.train(), batches)
    torch.testing.assert_close(found.scale, expected.scale)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(module.training for module in net.modules())


# What is fitted


@pytest.mark.parametrize("members", [1, 3])
def test_the_nll_of_labels_is_that_of_each_averaged_probability(members: int) -> None:
    outputs, labels = torch.randn(members, 20, 4), torch.randint(2, (20, 4))
    probs = outputs.sigmoid().mean(0)
    expected = F.binary_cross_entropy(probs, labels.float(), reduction="none").sum(1)
    torch.testing.assert_close(mixture_nll(outputs, labels), expected)


@pytest.mark.parametrize("members", [1, 3])
def test_the_temperature_is_the_minimum_of_the_nll_of_averaged_probabilities(members: int) -> None:
    outputs, labels = overconfident(members)

    def nll(log_t: float) -> float:
        probs = (outputs.double() / torch.tensor(log_t).exp()).softmax(-1).mean(0)
        return F.nll_loss(probs.log(), labels).item()

    best = minimize_scalar(nll, bounds=(-3, 3), options={"xatol": 1e-8}, method="bounded").x
    found = fit_scaling(outputs, labels).temperature
    assert found == pytest.approx(torch.tensor(best).exp().item(), rel=1e-4)


def test_the_temperature_that_made_the_outputs_is_found() -> None:
    outputs, labels = overconfident(n=50_000)
    assert fit_scaling(outputs, labels).temperature == pytest.approx(3, rel=0.05)


def test_vector_scaling_finds_scale_and_bias_of_every_class() -> None:
    true = 1.5 * torch.randn(100_000, 3)
    labels = true.softmax(-1).multinomial(1).squeeze(1)
    scale, bias = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([-1.0, 0.0, 1.0])
    found = fit_scaling(((true - bias) / scale).unsqueeze(0), labels, "vector")
    torch.testing.assert_close(found.scale, scale, rtol=0.1, atol=0)
    torch.testing.assert_close(found.bias - found.bias[1], bias, rtol=0, atol=0.1)


@pytest.mark.parametrize("kind", ["temperature", "vector"])
def test_the_gradient_of_the_nll_vanishes_at_the_fit(kind: Any) -> None:
    outputs, labels = overconfident(2)
    found = fit_scaling(outputs, labels, kind).double()
    found.scale.requires_grad_()
    mixture_nll(found(outputs.double(), members=True), labels).mean().backward()
    assert found.scale.grad is not None
    assert found.scale.grad.abs().max() < 1e-6


@pytest.mark.parametrize("factor", [0.03, 0.1, 10.0, 30.0])
def test_the_temperature_grows_with_the_outputs(factor: float) -> None:
    outputs, labels = overconfident(members=2)
    one, other = (fit_scaling(part, labels).temperature for part in (outputs, factor * outputs))
    assert other == pytest.approx(factor * one, rel=1e-5)


@pytest.mark.parametrize("factor", [0.001, 50.0])
def test_a_temperature_beyond_a_hundred_is_no_minimum(factor: float) -> None:
    outputs, labels = overconfident()  # three times too large
    with pytest.raises(ValueError, match="no temperature is best"):
        fit_scaling(factor * outputs, labels)


def test_fits_need_no_gradients_around_them() -> None:
    model: Any = lpbnn.build(small(), "lpbnn", num_data=100)
    batches, data = held_out(model), overconfident()
    expected = fit_scaling(*data).temperature, calibrate(model, batches).temperature
    with torch.no_grad():
        assert (fit_scaling(*data).temperature, calibrate(model, batches).temperature) == expected


def test_nll_of_the_mixture_is_that_of_averaged_probabilities() -> None:
    outputs, labels = overconfident(3, n=50)
    expected = -outputs.softmax(-1).mean(0).log().gather(1, labels.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(mixture_nll(outputs, labels), expected)


def test_the_fit_does_not_depend_on_the_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, labels = overconfident(2)
    whole = fit_scaling(outputs, labels, "vector").scale
    monkeypatch.setattr("lpbnn.calibration.scaling.AT_ONCE", 100)
    torch.testing.assert_close(fit_scaling(outputs, labels, "vector").scale, whole)


def test_segmentation_leaves_out_the_ignored_pixels() -> None:
    outputs, labels = overconfident(2, n=600)
    maps = outputs.view(2, 6, 10, 10, 4).movedim(-1, 2)
    targets = labels.view(6, 10, 10).clone()
    targets[:, 0] = 255
    keep = torch.ones(6, 10, 10, dtype=torch.bool)
    keep[:, 0] = False
    expected = fit_scaling(outputs[:, keep.flatten()], labels[keep.flatten()])
    found = fit_scaling(maps, targets, likelihood=Segmentation(ignore_index=255))
    torch.testing.assert_close(found.scale, expected.scale)


def test_classes_last_are_scaled_like_classes_second() -> None:
    outputs, labels = overconfident(2, n=600)
    last = fit_scaling(
        outputs.view(2, 60, 10, 4), labels.view(60, 10), "vector", Categorical(dim=-1)
    )
    expected = fit_scaling(outputs, labels, "vector")
    torch.testing.assert_close(last.scale, expected.scale, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        last(outputs.view(2, 60, 10, 4), members=True).flatten(1, 2),
        expected(outputs, members=True),
        rtol=1e-3,
        atol=1e-3,
    )


def test_several_labels_are_scaled_by_the_binary_likelihood() -> None:
    true = 2 * torch.randn(20_000, 3)
    labels = torch.bernoulli(true.sigmoid())
    found = fit_scaling(2 * true.unsqueeze(0), labels, likelihood=MultiLabel())
    assert found.temperature == pytest.approx(2, rel=0.05)


# With a model


@pytest.mark.parametrize("method", ALL_METHODS)
def test_predict_uses_the_scaling_of_every_method(method: str) -> None:
    options = {"num_data": 100, "members": 2 if method not in ("duq", "edl", "mcp") else 1}
    net = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3))
    model = lpbnn.build(net, method, check=False, **options)
    data = held_out(model)
    before = lpbnn.predict(model, data[0][0], seed=0)
    scaling = calibrate(model, data)
    after = lpbnn.predict(model, data[0][0], seed=0)
    assert before.members is not None
    assert after.members is not None
    expected = (before.members.log() * scaling.scale).softmax(-1)
    torch.testing.assert_close(after.members, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(after.probs, expected.mean(0), rtol=1e-3, atol=1e-5)


def test_the_nll_of_predictions_on_the_held_out_data_is_at_its_minimum() -> None:
    model = lpbnn.build(small(), "ensemble", members=3)
    data = held_out(model)
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    t = calibrate(model, data).temperature

    def nll(temperature: float) -> float:
        model.likelihood.scaling = Scaling(torch.tensor(1 / temperature))
        return F.nll_loss(lpbnn.predict(model, x).probs.log(), y).item()

    assert nll(t) <= min(nll(0.98 * t), nll(1.02 * t), nll(1.0))


def test_a_second_calibration_starts_from_the_outputs_as_they_were() -> None:
    model = lpbnn.build(small(), "lpbnn", members=2, num_data=10)
    data = held_out(model)
    first, second = calibrate(model, data).scale, calibrate(model, data).scale
    torch.testing.assert_close(first, second)


def test_scores_of_the_method_itself_stay_as_they_were() -> None:
    model = lpbnn.build(small(), "edl")
    data = held_out(model)
    before = lpbnn.predict(model, data[0][0]).ood_score
    calibrate(model, data)
    assert torch.equal(lpbnn.predict(model, data[0][0]).ood_score, before)


def test_training_does_not_see_the_scaling() -> None:
    model = lpbnn.build(small(), "mcp")
    (x, y), *_ = data = held_out(model)
    before = model.loss(x, y)["loss"]
    calibrate(model, data)
    assert torch.equal(model.loss(x, y)["loss"], before)


def test_modes_and_gradients_are_left_as_they_were() -> None:
    model = lpbnn.build(small(), "lpbnn", num_data=10).train()
    calibrate(model, held_out(model))
    assert all(module.training for module in model.net.modules())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["temperature", "vector"])
def test_the_scaling_travels_with_the_state_dict(kind: Any) -> None:
    model, other = (lpbnn.build(small(), "ensemble", members=2) for _ in range(2))
    data = held_out(model)
    calibrate(model, data, kind)
    other.load_state_dict(model.state_dict())
    x = data[0][0]
    assert torch.equal(lpbnn.predict(other, x).probs, lpbnn.predict(model, x).probs)


def test_the_scaling_of_classes_that_are_last_travels_with_the_state_dict() -> None:
    model, other = (
        lpbnn.build(nn.Linear(5, 3), "ensemble", members=2, likelihood=Categorical(dim=-1))
        for _ in range(2)
    )
    x = torch.randn(300, 4, 5)
    y = lpbnn.predict(model, x).probs.sqrt().flatten(0, 1).multinomial(1).view(300, 4)
    calibrate(model, [(x, y)], "vector")
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(lpbnn.predict(other, x).probs, lpbnn.predict(model, x).probs)


def test_a_state_dict_without_scaling_removes_it() -> None:
    model = lpbnn.build(small(), "mcp")
    plain = copy.deepcopy(model.state_dict())
    calibrate(model, held_out(model))
    model.load_state_dict(plain)
    assert model.likelihood.scaling is None


def test_the_scaling_travels_with_a_pickle_and_a_copy() -> None:
    model = lpbnn.build(small(), "lpbnn", num_data=10)
    data = held_out(model)
    calibrate(model, data, "vector")
    x = data[0][0]
    expected = lpbnn.predict(model, x, seed=0).probs
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(lpbnn.predict(twin, x, seed=0).probs, expected)


def test_a_frozen_model_returns_scaled_outputs_and_predicts_the_same() -> None:
    model = lpbnn.build(small(), "lpbnn", members=2, num_data=10)
    data = held_out(model)
    calibrate(model, data, "vector")
    x = data[0][0]
    frozen = lpbnn.freeze(model, samples=2, seed=1)
    expected = lpbnn.predict(model, x, samples=2, seed=1)
    torch.testing.assert_close(lpbnn.predict(frozen, x).probs, expected.probs)
    torch.testing.assert_close(frozen(x).softmax(-1), expected.members)
    exported = torch.export.export(frozen, (x,)).module()
    torch.testing.assert_close(exported(x).softmax(-1), expected.members)


def test_an_ensemble_of_calibrated_models_is_not_calibrated() -> None:
    models = [lpbnn.build(small(), "mcp") for _ in range(2)]
    calibrate(models[0], held_out(models[0]))
    assert from_members(models).likelihood.scaling is None
    assert models[0].likelihood.scaling is not None


def test_a_plain_network_gets_a_scaling_to_put_behind_it() -> None:
    net = nn.Linear(5, 3)
    data = held_out(net)
    scaling = calibrate(net, data)
    wrapped = lpbnn.build(net, "mcp")
    calibrate(wrapped, data)
    x = data[0][0]
    expected = lpbnn.predict(wrapped, x).probs
    torch.testing.assert_close(nn.Sequential(net, scaling)(x).softmax(1), expected)


def test_pixels_of_large_maps_are_drawn_repeatably() -> None:
    model = lpbnn.build(nn.Conv2d(3, 4, 1), "mcp", task="segmentation", ignore_index=255)
    x = torch.randn(4, 3, 40, 40)
    probs = lpbnn.predict(model, x).probs.movedim(1, -1).sqrt()
    y = probs.reshape(-1, 4).multinomial(1).view(4, 40, 40)
    few = [calibrate(model, [(x, y)], cells_per_example=800).temperature for _ in range(2)]
    assert few[0] == few[1]
    every = calibrate(model, [(x, y)], cells_per_example=None).temperature
    assert few[0] == pytest.approx(every, rel=0.2)


@pytest.mark.parametrize("most", [1, 7, 99, 1000])
def test_only_pixels_that_count_are_drawn_and_each_once(most: int) -> None:
    counted = torch.rand(5, 10, 10) < 0.3
    chosen = choose_cells(counted, most, torch.Generator())
    assert counted.flatten()[chosen].all()
    assert len(chosen.unique()) == len(chosen)
    per_example = torch.bincount(chosen // 100, minlength=5)
    assert torch.equal(per_example, counted.flatten(1).sum(1).clamp_max(most))


# Bad input


def test_a_class_without_labels_refuses_vector_scaling() -> None:
    outputs, labels = overconfident()
    with pytest.raises(ValueError, match="lack \\[3\\].*kind='temperature'"):
        fit_scaling(outputs[:, labels != 3], labels[labels != 3], "vector")


def test_perfect_predictions_refuse_a_temperature() -> None:
    outputs, _ = overconfident()
    with pytest.raises(ValueError, match="no temperature is best.*right"):
        fit_scaling(outputs, outputs[0].argmax(1))


def test_perfect_predictions_refuse_vector_scaling() -> None:
    outputs, _ = overconfident()
    with pytest.raises(ValueError, match="separates .* kind='temperature'"):
        fit_scaling(outputs, outputs[0].argmax(1), "vector")


def test_outputs_that_say_nothing_refuse_a_temperature() -> None:
    outputs, labels = overconfident()
    with pytest.raises(ValueError, match="no temperature is best.*say nothing"):
        fit_scaling(-outputs, labels)


def test_nan_is_refused() -> None:
    outputs, labels = overconfident()
    outputs[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="not all finite"):
        fit_scaling(outputs, labels)


def test_labels_that_are_no_classes_are_named() -> None:
    outputs, labels = overconfident()
    with pytest.raises(IndexError, match="labels are 0 to 3.*got \\[7\\]"):
        fit_scaling(outputs, labels.masked_fill(labels == 3, 7))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("kind", ["temperature", "vector"])
def test_labels_of_any_integer_type_give_the_same_scaling(dtype: torch.dtype, kind: Any) -> None:
    outputs, labels = overconfident(2, n=200)
    expected, found = (fit_scaling(outputs, y, kind=kind) for y in (labels, labels.to(dtype)))
    assert torch.equal(found.scale, expected.scale)


def test_nothing_but_ignored_labels_is_refused() -> None:
    outputs, labels = overconfident()
    with pytest.raises(ValueError, match="no held-out example"):
        fit_scaling(outputs, torch.full_like(labels, -100))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (torch.randn(5, 4), "got Tensor.*\\[\\(x, y\\)\\]"),
        ([torch.randn(5, 4)], "expected batches \\(inputs, targets\\); got a Tensor"),
        ([{"x": torch.randn(5, 4)}], "keys \\['x'\\]"),
        ([(torch.randn(5, 4),)], "tuple of 1"),
        ([], "there are no batches"),
    ],
)
def test_a_loader_of_wrong_structure_is_refused(batches: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        calibrate(lpbnn.build(small(), "mcp"), batches)


class Heads(nn.Module):
    """A head of three classes, one of two labels and one of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.tags, self.size = nn.Linear(4, 3), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"kind": 4 * self.kind(x), "tags": 4 * self.tags(x), "size": self.size(x)}


def test_every_head_of_classes_gets_a_scaling_of_its_own() -> None:
    likelihood = {"kind": Categorical(), "tags": MultiLabel(), "size": Gaussian()}
    model: Any = lpbnn.build(Heads(), "batchensemble", members=2, likelihood=likelihood)
    x = torch.randn(500, 4)
    p: Any = lpbnn.predict(model, x)
    kind = p["kind"].probs.sqrt().multinomial(1).squeeze(1)
    tags = (p["tags"].probs.sqrt() > torch.rand(500, 2)).float()
    targets = {"kind": kind, "tags": tags, "size": torch.randn(500, 1)}
    found: Any = calibrate(model, [(x, targets)])
    assert list(found) == ["kind", "tags"]
    outputs = model.eval()(x)
    for name, scaling in found.items():
        head = model.likelihood.heads[name]
        assert head.scaling is scaling
        alone = fit_scaling(outputs[name].detach(), targets[name], likelihood=head)
        assert scaling.temperature == pytest.approx(alone.temperature)
    other: Any = lpbnn.build(Heads(), "batchensemble", members=2, likelihood=likelihood)
    other.load_state_dict(model.state_dict())
    after: Any = lpbnn.predict(other, x)
    expected = Prediction.from_outputs(outputs["kind"].detach(), model.likelihood.heads["kind"])
    torch.testing.assert_close(after["kind"].probs, expected.probs)
    with pytest.raises(TypeError, match=r"labels by the name of the head, kind, tags; got Tensor"):
        calibrate(model, [(x, kind)])


def test_regression_names_conformal_prediction() -> None:
    model = lpbnn.build(nn.Linear(4, 2), "mcp", task="regression")
    with pytest.raises(TypeError, match="conformal"):
        calibrate(model, [(torch.randn(5, 4), torch.randn(5, 1))])


def test_outputs_without_members_are_refused() -> None:
    outputs, labels = overconfident()
    with pytest.raises(TypeError, match="outputs are a tensor; got ndarray"):
        fit_scaling(outputs.numpy(), labels)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a model or a network; got type"):
        calibrate(nn.Linear, [])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unsqueeze\\(0\\)"):
        fit_scaling(outputs[0], labels)


def test_no_draws_are_refused() -> None:
    model = lpbnn.build(nn.Linear(4, 3), "mcdropout", include="*")
    with pytest.raises(ValueError, match="samples=0: expected an integer of at least 1"):
        calibrate(model, [(torch.randn(5, 4), torch.randint(0, 3, (5,)))], samples=0)


@pytest.mark.parametrize("built", [True, False])
def test_every_module_keeps_its_own_mode(built: bool) -> None:
    """Of a network in training whose norms are frozen, for example."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).train()
    net[1].eval()
    model, x = lpbnn.build(net, "mcp") if built else net, torch.randn(200, 4)
    y = lpbnn.build(copy.deepcopy(net).eval(), "mcp")(x)[0].softmax(1).multinomial(1).squeeze(1)
    calibrate(model, [(x, y)])
    assert [module.training for module in net] == [True, False, True]


@pytest.mark.parametrize("shape", [(), (5,), (5, 6), (5, 6, 7)], ids=str)
@pytest.mark.parametrize("members", [False, True])
@pytest.mark.parametrize("dim", [1, -1])
def test_every_class_has_its_scale_and_bias_in_outputs_of_any_layout(
    shape: tuple[int, ...], members: bool, dim: int
) -> None:
    scale, bias = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([0.5, 0.0, 4.0])
    last = torch.randn(*([2] if members else []), 4, *shape, 3)
    axis = dim if dim == -1 else 1 + members
    scaled = Scaling(scale, bias, dim)(last.movedim(-1, axis), members=members)
    torch.testing.assert_close(scaled.movedim(axis, -1), last * scale + bias)
    halved = Scaling(torch.tensor(0.5), dim=dim)(last.movedim(-1, axis), members=members)
    torch.testing.assert_close(halved.movedim(axis, -1), last / 2)


def test_outputs_of_huge_size_have_no_temperature() -> None:
    """The best scale is 0 in float32, and its temperature infinite."""
    outputs = torch.zeros(1, 8, 2, dtype=torch.float64)
    outputs[..., 0] = 1e300
    with pytest.raises(ValueError, match="no temperature is best.*say nothing"):
        fit_scaling(outputs, torch.ones(8, dtype=torch.int64))
