"""Counts of predictions: pixels that count, draws, histograms."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lpbnn import data
from lpbnn.predict import Prediction, predict
from lpbnn.training import RunConfig
from lpbnn.training.build import DataInfo, build_model
from lpbnn.training.config import EvalConfig
from lpbnn.training.evaluator import (
    HISTOGRAM_BINS,
    Predictor,
    SegmentationEvaluator,
    make_evaluator,
)
from lpbnn.training.loop import fit


def test_a_prediction_has_the_precision_and_the_mode_of_the_run() -> None:
    config, splits = RunConfig("batchensemble"), data.load("digits")
    info = DataInfo.of(splits)
    model, images = build_model(config, info).train(), splits.test.inputs[:4]
    seen: list[tuple[torch.dtype, bool]] = []
    model.net.register_forward_hook(
        lambda module, args, output: seen.append((output.dtype, model.training))
    )
    for precision, dtype in (("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)):
        fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
        Predictor(model, info, config, fabric)(images)
        assert set(seen) == {(dtype, False)}
        seen.clear()
    assert model.training


@pytest.mark.parametrize("keep", [False, True])
def test_probabilities_of_all_examples_are_held_on_request_alone(keep: bool) -> None:
    config, splits = RunConfig("batchensemble"), data.load("digits")
    info, options = DataInfo.of(splits), {"keep": True} if keep else {}
    evaluator = make_evaluator(info, torch.device("cpu"), **options)
    Predictor(build_model(config, info), info, config).over(splits.test, evaluator)
    assert ("probs" in evaluator.rows[0]) == keep


def test_a_validation_draws_each_member_once() -> None:
    """However many draws the evaluation at the end takes."""
    splits = data.load("digits")
    small = replace(splits, val=splits.val.take(slice(60)))
    quick = {"epochs": 1, "device": "cpu", "progress": False}
    config = RunConfig("lpbnn", backbone="mlp", backbone_options={"hidden": (8,)}, **quick)
    for samples in (1, 5):
        settings = replace(config, evaluate=EvalConfig(samples=samples))
        model, info = build_model(config, DataInfo.of(splits)), DataInfo.of(splits)
        (row,) = fit(model, small, settings).rows
        once = Predictor(model, info, config).over(
            small.val, make_evaluator(info, torch.device("cpu"))
        )
        expected = {f"val_{name}": value for name, value in once.metrics().items()}
        assert {name: value for name, value in row.items() if "val_" in name} == expected


VOID, STRANGE = 255, 9


def pixels(is_ood: bool = False) -> tuple[SegmentationEvaluator, list[Prediction], list[Tensor]]:
    """Two batches of scenes, of which the second has hardly a pixel that counts."""
    splits = data.load("street-scenes", train=1, val=1, test=1, size=(16, 16))
    info = DataInfo.of(splits)
    assert (info.ignore_index, info.ood_index, info.num_classes) == (VOID, STRANGE, STRANGE)
    evaluator = SegmentationEvaluator(info, torch.device("cpu"), is_ood=is_ood)
    draws = torch.Generator().manual_seed(0)
    predictions, labels = [], []
    for scenes in (3, 1):
        probs = torch.rand(scenes, STRANGE, 6, 8, generator=draws).softmax(1)
        parts = torch.rand(2, scenes, 6, 8, generator=draws)
        scores = 1 - probs.amax(1)
        predictions.append(Prediction("segmentation", probs, *parts, scores))
        targets = torch.randint(0, STRANGE + 1, (scenes, 6, 8), generator=draws)
        labels.append(targets.where(torch.rand(targets.shape, generator=draws) < 0.7, VOID))
    labels[1][:] = VOID
    labels[1][0, 0, :2] = torch.tensor([0, STRANGE])
    return evaluator, predictions, labels


def fed(
    evaluator: SegmentationEvaluator, predictions: list[Prediction], labels: list[Tensor]
) -> Any:
    for prediction, targets in zip(predictions, labels, strict=True):
        evaluator.add(prediction, targets)
    return evaluator.totals.compute(), evaluator.totals.histogram.tolist()


@pytest.mark.parametrize("is_ood", [False, True])
def test_uncertainty_and_histogram_are_of_the_pixels_that_count(is_ood: bool) -> None:
    """Each with the same weight, whichever scene and batch it is in; strange ones in strange sets."""
    evaluator, predictions, labels = pixels(is_ood)
    uncertainty, histogram = fed(evaluator, predictions, labels)
    left_out = (VOID,) if is_ood else (VOID, STRANGE)
    valid = [~torch.isin(targets, torch.tensor(left_out)) for targets in labels]
    for name in ("total", "aleatoric", "epistemic"):
        values = torch.cat([getattr(p, name)[v] for p, v in zip(predictions, valid, strict=True)])
        assert uncertainty[name] == pytest.approx(float(values.double().mean()), rel=1e-12)
    sure = torch.cat([p.confidence[v] for p, v in zip(predictions, valid, strict=True)])
    assert histogram == torch.histc(sure, HISTOGRAM_BINS, 0, 1).long().tolist()


def test_what_is_said_of_void_pixels_changes_nothing() -> None:
    evaluator, predictions, labels = pixels()
    before = fed(evaluator, predictions, labels)
    for prediction, targets in zip(predictions, labels, strict=True):
        out = (targets == VOID) | (targets == STRANGE)
        for part in (prediction.aleatoric, prediction.epistemic):
            part[out] = 100.0
        sure = torch.eye(STRANGE)[0].expand(int(out.sum()), -1)
        prediction.average.movedim(1, -1)[out] = sure
    assert fed(pixels()[0], predictions, labels) == before


def test_scenes_that_are_void_all_over_have_no_uncertainty() -> None:
    evaluator, predictions, labels = pixels()
    void = [torch.full_like(targets, VOID) for targets in labels]
    uncertainty, histogram = fed(evaluator, predictions, void)
    assert uncertainty == {"total": 0.0, "aleatoric": 0.0, "epistemic": 0.0}
    assert sum(histogram) == 0


def test_pixels_of_no_class_are_not_to_be_detected() -> None:
    evaluator, predictions, labels = pixels()
    fed(evaluator, predictions, labels)
    ood = sum(int((targets == STRANGE).sum()) for targets in labels)
    void = sum(int((targets == VOID).sum()) for targets in labels)
    every = sum(targets.numel() for targets in labels)
    counted = evaluator.pooled.histogram.sum(1).tolist()
    assert counted == [every - void - ood, ood]


def test_a_certain_class_is_in_the_last_bin() -> None:
    info = DataInfo.of(data.load("digits"))
    evaluator = make_evaluator(info, torch.device("cpu"))
    zeros = torch.zeros(2)
    probs = torch.eye(info.num_classes)[:2]
    evaluator.add(Prediction("classification", probs, zeros, zeros, zeros), torch.tensor([0, 1]))
    assert evaluator.totals.histogram.tolist() == [0] * (HISTOGRAM_BINS - 1) + [2]


@pytest.mark.parametrize("samples", [None, 1, 2])
def test_a_run_predicts_raw_inputs_as_predict_does_normalised_ones(samples: int | None) -> None:
    splits = data.load("digits")
    config = RunConfig("lpbnn", seed=7, evaluate=EvalConfig(samples=3, chunk=5))
    model, x = build_model(config, DataInfo.of(splits)), splits.test.inputs[:6]
    predictor = Predictor(model, DataInfo.of(splits), config, samples=samples)
    count = 3 if samples is None else samples
    expected = predict(model, splits.normalise(x), samples=count, seed=7)
    assert predictor.members == 4 * count
    for keep in (True, False):
        found = predictor(x, keep_members=keep)
        torch.testing.assert_close(found.probs, expected.probs)
        assert (found.members is None) != keep
    assert torch.equal(predictor(x).probs, predictor(x).probs)


def test_large_pictures_are_predicted_a_few_at_a_time() -> None:
    splits = data.load("digits")
    info = DataInfo.of(splits)
    config = RunConfig("mcp", evaluate=EvalConfig(batch_size=100))
    model = build_model(config, info)
    sizes = {8: 100, 102: 100, 104: 96, 724: 2, 725: 1, 4000: 1}
    for side, expected in sizes.items():
        large = replace(info, shape=(3, side, side))
        predictor = Predictor(model, large, config)
        assert predictor.batch_size == expected, side


def test_scenes_without_an_anomaly_have_no_detection() -> None:
    evaluator, predictions, labels = pixels()
    fed(evaluator, predictions, [part.where(part != STRANGE, VOID) for part in labels])
    assert evaluator.detection() == {}
