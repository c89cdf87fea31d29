"""Three processes (here: threads), one without a batch, find what one finds, to the last bit."""

import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lpbnn import data
from lpbnn.predict import Prediction
from lpbnn.training import RunConfig
from lpbnn.training.build import DataInfo, build_model
from lpbnn.training.config import EvalConfig
from lpbnn.training.distributed import Ranks
from lpbnn.training.evaluator import (
    HISTOGRAM_BINS,
    Evaluator,
    NotFinite,
    Predictor,
    SegmentationEvaluator,
    make_evaluator,
)
from lpbnn.training.loop import fit

WORLD = 3
RUNS: dict[str, tuple[RunConfig, dict[str, int]]] = {
    "classes": (RunConfig("batchensemble", evaluate=EvalConfig(batch_size=300)), {}),
    "pixels": (
        RunConfig(
            "batchensemble",
            {"include": "decoder.*"},
            "deeplab-resnet18",
            {"width": 4, "channels": 8},
            "street-scenes",
            evaluate=EvalConfig(batch_size=2),
        ),
        {"train": 2, "val": 2, "test": 4},
    ),
    "numbers": (
        RunConfig(
            "batchensemble", backbone="mlp", data="diabetes", evaluate=EvalConfig(batch_size=50)
        ),
        {},
    ),
}


class Threads(Ranks):
    """A process that is a thread."""

    def __init__(self, rank: int, meeting: threading.Barrier, given: dict[int, Any]) -> None:
        self.rank, self.world, self.meeting, self.given = rank, WORLD, meeting, given

    def gather(self, mine: Any) -> list[Any]:
        self.given[self.rank] = mine
        self.meeting.wait()
        return [self.given[rank] for rank in range(WORLD)]


def found(evaluator: Evaluator) -> str:
    """Everything that comes of a evaluator, exactly."""
    parts = [
        evaluator.metrics(),
        evaluator.totals.compute(),
        evaluator.totals.histogram.tolist(),
        int(evaluator.totals.examples),
    ]
    for _, rows in sorted(evaluator.rows.items()):
        parts += [(name, values.tolist()) for name, values in rows.items()]
    if isinstance(evaluator, SegmentationEvaluator):
        parts.append(evaluator.detection())
    if (diversity := getattr(evaluator, "diversity", None)) is not None:
        parts.append(diversity.compute())
    return json.dumps(parts)


@pytest.mark.parametrize("kind", RUNS)
def test_shares_make_the_whole(kind: str) -> None:
    config, options = RUNS[kind]
    splits = data.load(config.data, **options)
    info, device = DataInfo.of(splits), torch.device("cpu")
    model = build_model(config, info)
    meeting, given = threading.Barrier(WORLD, timeout=60), {}

    def measured(predictor: Predictor) -> str:
        evaluator = make_evaluator(info, device, True, predictor.members)
        return found(predictor.over(splits.test, evaluator))

    def share(rank: int) -> str:
        predictor = Predictor(copy.deepcopy(model), info, config)
        predictor.ranks = Threads(rank, meeting, given)
        return measured(predictor)

    alone = Predictor(model, info, config)
    batches = -(-len(splits.test) // alone.batch_size)
    assert batches == WORLD - 1  # the last one sees nothing
    whole = measured(alone)
    with ThreadPoolExecutor(WORLD) as pool:
        assert list(pool.map(share, range(WORLD))) == [whole] * WORLD


def test_a_share_that_is_no_number_is_seen_by_all() -> None:
    config, _ = RUNS["classes"]
    splits = data.load("digits")
    info, device = DataInfo.of(splits), torch.device("cpu")
    meeting, given = threading.Barrier(WORLD, timeout=60), {}

    def share(rank: int) -> Evaluator:
        model = build_model(config, info)
        if rank == 1:
            torch.nn.init.constant_(next(model.parameters()), torch.nan)
        predictor = Predictor(model, info, config)
        predictor.ranks = Threads(rank, meeting, given)
        return predictor.over(splits.test, make_evaluator(info, device))

    with ThreadPoolExecutor(WORLD) as pool:
        for evaluator in pool.map(share, range(WORLD)):
            with pytest.raises(NotFinite, match="the model has diverged"):
                evaluator.metrics()


def test_a_validation_draws_each_member_once() -> None:
    """However many draws the evaluation at the end takes."""
    splits = data.load("digits")
    small = replace(splits, val=splits.val.take(slice(60)))
    quick = {"epochs": 1, "device": "cpu", "progress": False}
    config = RunConfig("lpbnn", backbone="mlp", backbone_options={"hidden": (8,)}, **quick)
    rows = []
    for samples in (1, 5):
        settings = replace(config, evaluate=EvalConfig(samples=samples))
        (row,) = fit(build_model(config, DataInfo.of(splits)), small, settings).rows
        rows.append({name: value for name, value in row.items() if name.startswith("val_")})
    assert rows[0] == rows[1] != {}


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
    for number, (prediction, targets) in enumerate(zip(predictions, labels, strict=True)):
        evaluator.add(number, prediction, targets)
    evaluator.merge(Ranks())
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
    assert int(evaluator.totals.examples) == 4


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


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_sums_and_rows_are_in_the_order_of_the_data(order: tuple[int, ...]) -> None:
    """Whichever batch came first: floating-point sums depend on their order."""
    info = DataInfo.of(data.load("digits"))
    evaluator = make_evaluator(info, torch.device("cpu"))
    for number in order:
        size = (1e16, 1.0, -1e16)[number]
        probs = torch.full((1, info.num_classes), 1 / info.num_classes)
        parts = torch.tensor([size]), torch.tensor([0.0]), torch.tensor([float(number)])
        evaluator.add(number, Prediction("classification", probs, *parts), torch.tensor([0]))
    evaluator.merge(Ranks())
    in_order = torch.tensor([1e16, 1.0, -1e16]).double().cumsum(0)[-1]
    assert float(evaluator.totals.uncertainty[0]) == float(in_order)
    assert evaluator.all_rows("scores").tolist() == [0.0, 1.0, 2.0]


def test_a_certain_class_is_in_the_last_bin() -> None:
    info = DataInfo.of(data.load("digits"))
    evaluator = make_evaluator(info, torch.device("cpu"))
    zeros = torch.zeros(2)
    probs = torch.eye(info.num_classes)[:2]
    evaluator.add(0, Prediction("classification", probs, zeros, zeros, zeros), torch.tensor([0, 1]))
    assert evaluator.totals.histogram.tolist() == [0] * (HISTOGRAM_BINS - 1) + [2]
