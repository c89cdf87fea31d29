"""One pass over a data set: predictions in batches, and what is kept of them in bounded memory.

Every batch is predicted with the same seed, so the members are the same networks from the first
example to the last, and measuring twice gives the same numbers.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpbnn.data import Examples, Splits
from lpbnn.data.augment import batches
from lpbnn.engine.build import DataInfo
from lpbnn.engine.config import EvalConfig, RunConfig
from lpbnn.engine.feed import preparation
from lpbnn.metrics import (
    ClassificationMetrics,
    DiversityMetrics,
    ImageDetectionMetrics,
    MeanIoU,
    PooledDetectionMetrics,
    RegressionMetrics,
)
from lpbnn.model import Model
from lpbnn.predict import Prediction, predict

if TYPE_CHECKING:
    from lightning.fabric import Fabric

HISTOGRAM_BINS = 50
PIXELS_AT_ONCE = 2**20  # one frame of 1280x720: its probabilities alone, a class each, are 50 MB
# Rank 0 measures alone: a metric that waited for the other ranks would wait for ever.
ALONE: dict[str, Any] = {"distributed_available_fn": lambda: False}


class NotFinite(ValueError):
    """Predictions that are no numbers: the weights have diverged."""


class Predictor:
    """A model with all it needs to answer for raw inputs: preparation, precision, samples, seed."""

    def __init__(
        self,
        model: Model,
        info: DataInfo,
        config: RunConfig,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        samples: int | None = None,
    ) -> None:
        self.model, self.info, self.seed, self.device = model, info, config.seed, device
        self.settings: EvalConfig = config.evaluate
        self.samples = self.settings.samples if samples is None else samples
        self.prepare = preparation(info, device, config.channels_last)
        self.autocast = autocast

    def __call__(self, inputs: Tensor, keep_members: bool = True) -> Prediction:
        """The prediction for raw inputs of any device."""
        with self.autocast():
            return predict(
                self.model,
                self.prepare(inputs.to(self.device, non_blocking=True)),
                samples=self.samples,
                chunk=self.settings.chunk,
                keep_members=keep_members,
                seed=self.seed,
            )

    @property
    def batch_size(self) -> int:
        """Examples at once: as set, and of large pictures fewer."""
        pixels = math.prod(self.info.shape[1:])
        return max(1, min(self.settings.batch_size, PIXELS_AT_ONCE // pixels))

    def over(self, data: Examples, tally: "Tally") -> "Tally":
        """Everything in ``data``, added to ``tally``, which is returned."""
        for x, y in batches(data.to(self.device), self.batch_size, shuffle=False):
            prediction = self(x, keep_members=tally.needs_members)
            tally.add(prediction, y, self.model.score(prediction))
        return tally


class Tally:
    """What any data set leaves: scores, a histogram of confidences, the mean uncertainties."""

    needs_members = False

    def __init__(self, info: DataInfo, device: torch.device) -> None:
        self.info, self.device = info, device
        self.count = 0
        self.bad = torch.zeros((), dtype=torch.int64, device=device)
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.histogram = torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=device)
        self.scores: list[Tensor] = []

    def add(self, prediction: Prediction, targets: Tensor, scores: Tensor) -> None:
        """One batch."""
        kinds = (prediction.total, prediction.aleatoric, prediction.epistemic)
        self.sums += torch.stack([kind.double().mean() for kind in kinds]) * len(targets)
        self.count += len(targets)
        self.bad += (~prediction.average.isfinite()).sum()
        if self.info.task != "regression":
            # NaN has no bin: it is counted as bad and put into the first.
            place = (prediction.confidence.nan_to_num(0) * HISTOGRAM_BINS).long().flatten()
            place = place.clamp(0, HISTOGRAM_BINS - 1)
            self.histogram.index_add_(0, place, torch.ones_like(place))
        if self.info.task != "segmentation":  # a score per pixel would not be bounded
            self.scores.append(scores.float())

    def check(self) -> None:
        """Raise ``NotFinite`` if a prediction was no number."""
        if bad := int(self.bad):
            raise NotFinite(
                f"{bad} predicted numbers of {self.info.name!r} are NaN or infinite: the model has "
                "diverged. Fix: train it with a smaller learning rate or with clipping."
            )

    def uncertainty(self) -> dict[str, float]:
        """Mean total, aleatoric and epistemic uncertainty (nats, or the normalised variance)."""
        names = ("total", "aleatoric", "epistemic")
        return dict(zip(names, (self.sums / max(1, self.count)).tolist(), strict=True))

    def metrics(self) -> dict[str, float]:
        """The metrics of the task."""
        self.check()
        return {}


class ClassificationTally(Tally):
    """Accuracy, NLL, Brier, ECE; the diversity of the members; the probabilities, where asked for."""

    needs_members = True

    def __init__(
        self,
        info: DataInfo,
        device: torch.device,
        diversity: DiversityMetrics | None = None,
        keep: bool = False,
    ) -> None:
        super().__init__(info, device)
        self.classes = ClassificationMetrics(**ALONE).to(device)
        self.diversity, self.keep = diversity, keep
        self.probs: list[Tensor] = []

    def add(self, prediction: Prediction, targets: Tensor, scores: Tensor) -> None:
        super().add(prediction, targets, scores)
        self.classes.update(prediction.probs, targets)
        members = prediction.members
        if members is not None and len(members) > 1:
            if self.diversity is None:
                self.diversity = DiversityMetrics(len(members), **ALONE).to(self.device)
            self.diversity.update(members, targets)
        if self.keep:
            self.probs.append(prediction.probs.float())

    def metrics(self) -> dict[str, float]:
        self.check()
        return self.classes.compute()


class RegressionTally(Tally):
    """NLL, RMSE and coverage, in the targets' own unit; the predictive means and spreads."""

    needs_members = True

    def __init__(self, info: DataInfo, device: torch.device) -> None:
        super().__init__(info, device)
        self.numbers = RegressionMetrics(**ALONE).to(device)
        self.curves: list[Tensor] = []  # (3, N, K): mean, aleatoric and epistemic deviation

    def add(self, prediction: Prediction, targets: Tensor, scores: Tensor) -> None:
        super().add(prediction, targets, scores)
        scale, shift = self.info.target_std, self.info.target_mean
        assert prediction.members is not None
        assert prediction.member_variances is not None
        targets = targets.reshape(prediction.members.shape[1:]).to(prediction.members.dtype)
        self.numbers.update(
            prediction.members * scale + shift, prediction.member_variances * scale**2, targets
        )
        mean = prediction.mean * scale + shift
        spreads = [v.sqrt() * scale for v in (prediction.aleatoric, prediction.epistemic)]
        self.curves.append(torch.stack([mean, *spreads]))

    def metrics(self) -> dict[str, float]:
        self.check()
        return self.numbers.compute()


class SegmentationTally(Tally):
    """mIoU and the pixels' metrics; detection of out-of-distribution pixels, by image and pooled."""

    def __init__(self, info: DataInfo, device: torch.device) -> None:
        super().__init__(info, device)
        assert info.num_classes is not None
        self.ignored = tuple(i for i in (info.ignore_index, info.ood_index) if i is not None)
        self.classes = ClassificationMetrics(ignore_index=self.ignored, **ALONE).to(device)
        self.overlap = MeanIoU(info.num_classes, ignore_index=self.ignored, **ALONE).to(device)
        self.by_image = ImageDetectionMetrics(**ALONE).to(device)
        self.pooled = PooledDetectionMetrics(**ALONE).to(device)

    def add(self, prediction: Prediction, targets: Tensor, scores: Tensor) -> None:
        super().add(prediction, targets, scores)
        self.classes.update(prediction.probs, targets)
        self.overlap.update(prediction.labels, targets)
        if self.info.ood_index is not None:
            is_ood = targets == self.info.ood_index
            valid = torch.ones_like(is_ood)
            if self.info.ignore_index is not None:
                valid = targets != self.info.ignore_index
            self.by_image.update(scores, is_ood, valid)
            self.pooled.update(scores, is_ood, valid)

    def metrics(self) -> dict[str, float]:
        self.check()
        return {"miou": float(self.overlap.compute()), **self.classes.compute()}

    def detection(self) -> dict[str, dict[str, float]]:
        """By image, and over all pixels together; empty where no image has both kinds."""
        if self.info.ood_index is None or int(self.by_image.images) == 0:
            return {}
        return {"pixels": self.by_image.compute(), "pixels_pooled": self.pooled.compute()}


def tally_of(info: DataInfo, device: torch.device, keep: bool = False) -> Tally:
    """The tally of a task."""
    if info.task == "regression":
        return RegressionTally(info, device)
    if info.task == "segmentation":
        return SegmentationTally(info, device)
    return ClassificationTally(info, device, keep=keep)


def validate(model: Model, splits: Splits, config: RunConfig, fabric: "Fabric") -> dict[str, float]:
    """The metrics on the validation part, one draw per member, as ``val_...``."""
    info = DataInfo.of(splits)
    predictor = Predictor(model, info, config, fabric.device, fabric.autocast, samples=1)
    found = predictor.over(splits.val, tally_of(info, fabric.device)).metrics()
    return {f"val_{name}": value for name, value in found.items()}
