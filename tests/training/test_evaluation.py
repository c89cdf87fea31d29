"""Every number is the one its definition gives, and the report finds every array it needs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lpbnn
from lpbnn import data, methods, metrics
from lpbnn.data import Dataset, Splits
from lpbnn.data.corruptions import CORRUPTIONS, corrupt
from lpbnn.training import EvalConfig, OptimConfig, RunConfig
from lpbnn.training.build import DataInfo, build_model
from lpbnn.training.evaluation import KEPT_POINTS, _training_points, evaluate
from lpbnn.training.evaluator import NotFinite
from lpbnn.training.loop import fit
from lpbnn.training.run import reevaluate, run

Make = Callable[..., RunConfig]


def trained(config: RunConfig, splits: Splits) -> lpbnn.UncertainModel:
    model = build_model(config, DataInfo.of(splits))
    fit(model, splits, config)
    return model


def predicted(model: Any, splits: Splits, part: Dataset, samples: int = 1) -> lpbnn.Prediction:
    return lpbnn.predict(model, splits.normalise(part.inputs), samples=samples, seed=0)


@pytest.mark.parametrize("method", methods.names())
def test_every_method_is_measured_with_the_channels_last(
    make: Make, splits: Splits, tmp_path: Path, method: str
) -> None:
    """Also what is read back, and what keeps stacks of weights, as tradi does."""
    config = make(method, backbone="lenet", backbone_options={}, channels_last=True, epochs=1)
    results = run(config, tmp_path, splits=splits)
    again = reevaluate(tmp_path, splits=splits)
    assert again["test"] == pytest.approx(results["test"], rel=1e-4)


@pytest.mark.parametrize("method", ["mcp", "lpbnn", "edl"])
def test_classification_by_its_definitions(make: Make, splits: Splits, method: str) -> None:
    config = make(method, evaluate=EvalConfig(samples=2, batch_size=33, examples=2))
    model = trained(config, splits)
    results, arrays = evaluate(model, splits, config)
    p, labels = predicted(model, splits, splits.test, samples=2), splits.test.targets
    assert results["test"] == pytest.approx(
        {
            "accuracy": metrics.accuracy(p.probs, labels),
            "nll": metrics.nll(p.probs, labels),
            "brier": metrics.brier(p.probs, labels),
            "ece": metrics.ece(p.probs, labels),
        }
    )
    q = predicted(model, splits, splits.ood["photos"], samples=2)
    scores = torch.cat([p.ood_score, q.ood_score])
    is_ood = torch.arange(len(scores)) >= len(labels)
    assert results["ood"]["photos"] == pytest.approx(
        {
            "auroc": metrics.auroc(scores, is_ood),
            "aupr": metrics.aupr(scores, is_ood),
            "fpr95": metrics.fpr95(scores, is_ood),
        }
    )
    assert results["uncertainty"]["photos"]["epistemic"] == pytest.approx(
        q.epistemic.mean().item(), abs=1e-6
    )
    members = p.members
    assert members is not None
    assert results["cost"]["members"] == len(members) == (8 if method == "lpbnn" else 1)
    if method == "lpbnn":
        found = results["diversity"]["test"]
        assert found["disagreement"] == pytest.approx(metrics.disagreement(members))
        assert found["q_statistic"] == pytest.approx(metrics.q_statistic(members, labels))
    else:
        assert results["diversity"] == {"test": None, "corrupted": None}
    np.testing.assert_allclose(arrays["test/probs"], p.probs, atol=1e-6)
    np.testing.assert_array_equal(arrays["test/labels"], labels)
    assert results["cost"]["parameters"] == sum(w.numel() for w in model.parameters())
    assert results["cost"]["predict_seconds_per_1000"] > 0
    assert results["corruption"] is None


def test_measuring_leaves_no_trace_and_repeats(make: Make, splits: Splits) -> None:
    config = make("lpbnn")
    model = trained(config, splits)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    first, second = (evaluate(model, splits, config).results for _ in range(2))
    for one in (first, second):
        one.pop("cost")
    assert first == second
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("chunk", [7, 100])
def test_chunks_bound_the_memory_and_change_nothing(make: Make, splits: Splits, chunk: int) -> None:
    config = make("lpbnn")
    model = trained(config, splits)
    whole = evaluate(model, splits, config).results
    small = replace(config, evaluate=replace(config.evaluate, chunk=chunk))
    parts = evaluate(model, splits, small).results
    assert parts["test"] == pytest.approx(whole["test"], rel=1e-4)
    assert parts["ood"]["photos"] == pytest.approx(whole["ood"]["photos"], rel=1e-4)


def test_corruptions_by_their_definitions(make: Make, splits: Splits, tmp_path: Path) -> None:
    settings = EvalConfig(corruptions=True, severities=(1, 5), corruption_images=40, examples=0)
    config = make("batchensemble", evaluate=settings)
    model = trained(config, splits)
    results = evaluate(model, splits, config).results
    found, test = results["corruption"], splits.test.take(slice(40))
    assert list(found["sets"]) == list(CORRUPTIONS)
    assert (found["origin"], found["frost"], found["images"]) == ("generated", "procedural", 40)
    fog = Dataset(corrupt(test.inputs, "fog", 5), test.targets)
    p = predicted(model, splits, fog)
    assert found["sets"]["fog"]["5"]["ece"] == pytest.approx(metrics.ece(p.probs, test.targets))
    accuracies = [levels[s]["accuracy"] for levels in found["sets"].values() for s in levels]
    assert len(accuracies) == 30
    assert found["ca"] == pytest.approx(sum(accuracies) / 30)
    worst = [levels["5"]["nll"] for levels in found["sets"].values()]
    assert found["severities"]["5"]["nll"] == pytest.approx(sum(worst) / 15)
    assert results["diversity"]["corrupted"]["disagreement"] > 0

    # The same from a folder in the published layout.
    for name in CORRUPTIONS:
        rows = torch.cat([corrupt(test.inputs, name, level) for level in range(1, 6)])
        np.save(tmp_path / f"{name}.npy", rows.permute(0, 2, 3, 1).numpy())
    np.save(tmp_path / "labels.npy", np.tile(test.targets.numpy().astype(np.uint8), 5))
    official = replace(settings, corruption_root=str(tmp_path))
    again = evaluate(model, splits, replace(config, evaluate=official)).results["corruption"]
    assert (again["ca"], again["origin"], again["frost"]) == (found["ca"], "official", None)
    others = replace(splits, test=Dataset(splits.test.inputs, splits.test.targets.roll(1)))
    with pytest.raises(ValueError, match="another data set's"):
        evaluate(model, others, replace(config, evaluate=official))


@pytest.mark.parametrize("score", ["entropy", "confidence"])
def test_unknown_images_are_told_by_the_score_of_the_settings(
    make: Make, splits: Splits, score: Literal["entropy", "confidence"]
) -> None:
    config = make("mcp")
    model = trained(config, splits)
    again = replace(config, evaluate=EvalConfig(score=score))
    arrays = evaluate(model, splits, again).arrays
    p = predicted(model, splits, splits.test)
    expected = p.total if score == "entropy" else 1 - p.confidence
    torch.testing.assert_close(torch.from_numpy(arrays["test/scores"]), expected)


def test_the_arrays_of_the_report(make: Make, splits: Splits) -> None:
    settings = EvalConfig(examples=3, corruptions=True, severities=(5,), score="confidence")
    config = make("lpbnn", evaluate=settings)
    results, arrays = evaluate(trained(config, splits), splits, config)
    count = arrays["reliability/count"]
    gaps = np.abs(arrays["reliability/accuracy"] - arrays["reliability/confidence"])
    assert np.nansum(gaps * count) / 80 == pytest.approx(results["test"]["ece"])
    assert arrays["histogram/edges"].shape == (51,)
    assert arrays["histogram/test"].sum() == 80
    assert arrays["histogram/ood/photos"].sum() == 60
    assert arrays["ood/photos/scores"].shape == (60,)
    counts, _ = np.histogram(1 - arrays["test/scores"], arrays["histogram/edges"])
    assert np.abs(counts - arrays["histogram/test"]).sum() <= 2  # rounding at an edge
    for kind in ("test", "corrupted", "ood/photos"):
        where = f"examples/{kind}"
        assert arrays[f"{where}/images"].shape == (3, 1, 8, 8)
        assert arrays[f"{where}/images"].dtype == np.uint8
        assert arrays[f"{where}/members"].shape == (4, 3, 10)
        np.testing.assert_allclose(arrays[f"{where}/members"].sum(-1), 1, rtol=1e-5)
        mean = arrays[f"{where}/members"].mean(0)
        np.testing.assert_array_equal(arrays[f"{where}/predicted"], mean.argmax(-1))
        np.testing.assert_allclose(arrays[f"{where}/confidence"], mean.max(-1), rtol=1e-5)
    index = arrays["examples/test/index"]
    np.testing.assert_array_equal(index, [0, 40, 79])  # by place, not by what the model thinks
    np.testing.assert_array_equal(arrays["examples/test/labels"], splits.test.targets[index])
    np.testing.assert_allclose(
        arrays["test/probs"][index], arrays["examples/test/members"].mean(0), atol=1e-5
    )
    assert arrays["examples/corrupted/corruption"].tolist() == [
        "gaussian_noise",
        "motion_blur",
        "fog",
    ]
    shown = splits.test.inputs[index]
    for i, name in enumerate(arrays["examples/corrupted/corruption"]):  # each its own noise
        expected = corrupt(shown, name, int(arrays["examples/corrupted/severity"][i]))[i]
        np.testing.assert_array_equal(arrays["examples/corrupted/images"][i], expected)
    width = len(arrays["posterior/correlation"])
    assert str(arrays["posterior/layer"]) == "layers.0"
    assert arrays["posterior/mean"].shape == arrays["posterior/std"].shape == (4, width) == (4, 64)
    np.testing.assert_allclose(np.diag(arrays["posterior/correlation"]), 1, rtol=1e-4)


def test_regression_in_the_unit_of_its_targets(make: Make) -> None:
    cubic = data.load("cubic")
    config = make("lpbnn", batch_size=20, epochs=5, optim=OptimConfig(lr=0.01))
    model = trained(config, cubic)
    results, arrays = evaluate(model, cubic, config)
    p = predicted(model, cubic, cubic.test)
    assert p.members is not None
    assert p.member_variances is not None
    scale, shift = cubic.target_std, cubic.target_mean
    means, variances = p.members * scale + shift, p.member_variances * scale**2
    targets = cubic.test.targets
    assert results["test"] == pytest.approx(
        {
            "nll": metrics.mixture_nll(means, variances, targets),
            "rmse": metrics.rmse(means, targets),
            "coverage": metrics.coverage(means, variances, targets),
        },
        rel=1e-4,
    )
    np.testing.assert_allclose(arrays["test/mean"], p.mean * scale + shift, rtol=1e-4)
    np.testing.assert_allclose(arrays["test/aleatoric_std"], p.aleatoric.sqrt() * scale, rtol=1e-4)
    assert arrays["ood/outside/inputs"].shape == arrays["ood/outside/mean"].shape == (200, 1)
    assert 0 <= results["ood"]["outside"]["auroc"] <= 1
    assert not any("histogram" in name or "examples" in name for name in arrays)


class Pixels(nn.Module):
    """Logits from the value of a pixel: right where the picture shows its label."""

    def forward(self, x: Tensor) -> Tensor:
        return -((x - torch.arange(3.0).view(3, 1, 1)) ** 2)


def test_the_training_points_of_a_curve_are_kept(make: Make) -> None:
    for name, expected in (("cubic", True), ("diabetes", False)):  # one input, ten inputs
        splits = data.load(name)
        config = make("mcp", data=name, backbone="mlp")
        _, arrays = evaluate(trained(config, splits), splits, config)
        assert ("train/inputs" in arrays) == expected
        if expected:
            inputs, targets = splits.train[:]
            np.testing.assert_array_equal(arrays["train/inputs"], inputs)
            np.testing.assert_array_equal(arrays["train/targets"], targets)


def test_segmentation_finds_strange_pixels(make: Make) -> None:
    labels = torch.randint(0, 3, (6, 12, 10))
    labels[:, :2] = 255
    images = labels.clamp(0, 2).unsqueeze(1).to(torch.uint8) * 51
    labels[:4, 5, :3] = 3  # strange, and between two classes
    images[:4, 0, 5, :3] = 76
    part = Dataset(images, labels)
    splits = Splits(
        name="scenes",
        task="segmentation",
        train=part,
        val=part,
        test=part,
        num_classes=3,
        mean=(0.0,),
        std=(0.2,),
        description="",
        source="generated",
        ignore_index=255,
        ood_index=3,
    )
    model = lpbnn.build(Pixels(), "mcp", task="segmentation", ignore_index=255)
    settings = EvalConfig(batch_size=4, examples=2)
    results, arrays = evaluate(model, splits, make(evaluate=settings))
    assert results["test"]["miou"] == results["test"]["accuracy"] == 1
    assert results["ood"]["pixels"] == pytest.approx({"auroc": 1, "aupr": 1, "fpr95": 0})
    assert results["ood"]["pixels_pooled"]["auroc"] == pytest.approx(1)
    assert arrays["examples/test/confidence"].shape == (2, 12, 10)
    assert arrays["examples/test/predicted"].shape == (2, 12, 10)
    assert arrays["reliability/count"].sum() == ((labels != 255) & (labels != 3)).sum()
    assert "test/probs" not in arrays


def test_nothing_out_of_distribution_unless_asked(make: Make, splits: Splits) -> None:
    config = make(evaluate=EvalConfig(ood=False, examples=1))
    results, arrays = evaluate(trained(config, splits), splits, config)
    assert results["ood"] == {}
    assert not any("ood" in name for name in arrays)


def test_predictions_that_are_no_numbers_are_told(make: Make, splits: Splits) -> None:
    model = build_model(make(), DataInfo.of(splits))
    next(model.parameters()).data.fill_(torch.nan)
    with pytest.raises(NotFinite, match="800 predicted numbers of 'digits' are NaN or infinite"):
        evaluate(model, splits, make())


class NanForBright(nn.Module):
    """A network whose outputs for bright pictures are no numbers."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = nn.Parameter(torch.randn(classes))

    def forward(self, x: Tensor) -> Tensor:
        bright = x.flatten(1).mean(1) > 1
        return torch.where(bright[:, None], torch.nan, self.classes.expand(len(x), -1))


def test_predictions_for_other_data_that_are_no_numbers_are_told(
    make: Make, splits: Splits
) -> None:
    """As those for the test set are: a run with them is listed as diverged, not ended by an error."""
    white = Dataset(torch.full_like(splits.test.inputs, 255), splits.test.targets)
    model = lpbnn.build(NanForBright(splits.num_classes or 0), "mcp")
    with pytest.raises(NotFinite, match="are NaN or infinite: the model has diverged"):
        evaluate(model, replace(splits, ood={"white": white}), make())


def test_a_large_training_set_is_not_kept_for_the_figure_of_a_curve() -> None:
    x = torch.linspace(0, 1, KEPT_POINTS + 1)[:, None]
    assert _training_points(Dataset(x, x)) == {}
    assert _training_points(Dataset(x[1:], x[1:]))["train/inputs"].shape == (KEPT_POINTS, 1)
    assert _training_points(Dataset(x[:9].expand(9, 2), x[:9])) == {}
