"""One pass over a data set: predictions in batches, and what is counted of them in bounded memory.

Every batch is predicted with the same seed, so the members are the same networks from the first example to
the last, and measuring twice gives the same numbers.
"""

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lpbnn.data import Examples
from lpbnn.data.augment import Normalise, batch_indices
from lpbnn.metrics import (
    ClassificationMetrics,
    DiversityMetrics,
    ImageDetectionMetrics,
    MeanIoU,
    PooledDetectionMetrics,
    RegressionMetrics,
)
from lpbnn.metrics._base import kept
from lpbnn.model import UncertainModel
from lpbnn.predict import Prediction, predict
from lpbnn.training.build import DataInfo
from lpbnn.training.config import RunConfig

if TYPE_CHECKING:
    from lightning.fabric import Fabric

PIXELS_AT_ONCE = 2**20  # one frame of 1280x720: its probabilities alone, a class each, are 50 MB
HISTOGRAM_BINS = 50
KINDS = ("total", "aleatoric", "epistemic")


# One process measures: a metric that waited for the others would wait for ever.
ALONE: dict[str, Any] = {"distributed_available_fn": lambda: False}


class NotFinite(ValueError):
    """Predictions that are no numbers: the weights have diverged."""


class Totals:
    """Counts of any data set: cells that count, non-finite numbers, confidences, uncertainties.

    A cell is an example, or a pixel of a segmentation set.
    """

    def __init__(self, device: torch.device) -> None:
        self.cells = torch.zeros((), dtype=torch.int64, device=device)
        self.bad = torch.zeros((), dtype=torch.int64, device=device)
        self.histogram = torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=device)
        self.uncertainty = torch.zeros(len(KINDS), dtype=torch.float64, device=device)

    def update(self, prediction: Prediction, valid: Tensor | None) -> None:
        """Add a batch; ``valid`` marks the pixels that count, None counts every example."""
        count = len(prediction.average)
        self.cells = self.cells + (count if valid is None else valid.sum())
        self.bad = self.bad + (~prediction.average.isfinite()).sum()
        if prediction.task == "regression":  # a variance may overflow where the mean does not
            self.bad = self.bad + (~prediction.aleatoric.isfinite()).sum()
        else:
            # NaN has no bin: it is counted as bad and put into the first.
            place = (prediction.confidence.nan_to_num(0) * HISTOGRAM_BINS).long().flatten()
            ones = torch.ones_like(place) if valid is None else valid.flatten().long()
            place = place.clamp(0, HISTOGRAM_BINS - 1)
            self.histogram = self.histogram.index_add(0, place, ones)
        values = [getattr(prediction, kind).double() for kind in KINDS]
        if valid is None:
            sums = torch.stack([value.mean() for value in values]) * count
        else:
            sums = torch.stack([value.where(valid, 0).sum() for value in values])
        self.uncertainty = self.uncertainty + sums

    def compute(self) -> dict[str, float]:
        """Return the mean uncertainties (nats, or the normalised variance), each cell counting alike."""
        means = self.uncertainty / self.cells.clamp(min=1)
        return dict(zip(KINDS, means.tolist(), strict=True))


class Evaluator:
    """Everything that is counted or kept of the predictions for a data set of any task."""

    needs_members = False

    def __init__(self, info: DataInfo, device: torch.device) -> None:
        self.info, self.device = info, device
        self.totals = Totals(device)
        self.rows: list[dict[str, Tensor]] = []  # of single examples, by batch

    def add(self, prediction: Prediction, targets: Tensor) -> None:
        """Add a batch."""
        self.totals.update(prediction, self.valid(targets))
        self.update(prediction, targets)
        self.rows.append(self.rows_of(prediction))

    def valid(self, targets: Tensor) -> Tensor | None:
        """Return which pixels count; None if every example does."""
        return None

    def update(self, prediction: Prediction, targets: Tensor) -> None:
        """Update the task's metrics."""

    def rows_of(self, prediction: Prediction) -> dict[str, Tensor]:
        """Return what is kept of every example."""
        return {"scores": prediction.ood_score.float()}

    def all_rows(self, name: str, dim: int = 0) -> Tensor:
        """Return the numbers of single examples, in the order of the data."""
        return torch.cat([rows[name] for rows in self.rows], dim)

    def check(self) -> None:
        """Raise ``NotFinite`` if a prediction was no number."""
        if bad := int(self.totals.bad):
            raise NotFinite(
                f"{bad} predicted numbers of {self.info.name!r} are NaN or infinite: the model has "
                "diverged. Fix: train it with a smaller learning rate or with clipping."
            )

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the task."""
        self.check()
        return {}


class ClassificationEvaluator(Evaluator):
    """Accuracy, NLL, Brier, ECE; the diversity of several members; the probabilities, if they are to be kept.

    Args:
        keep: keep the probabilities of every example.
        members: of every prediction, whose diversity is measured; 1 does without.
    """

    def __init__(
        self, info: DataInfo, device: torch.device, keep: bool = False, members: int = 1
    ) -> None:
        super().__init__(info, device)
        self.keep, self.needs_members = keep, members > 1
        self.classes = ClassificationMetrics(**ALONE).to(device)
        self.diversity: DiversityMetrics | None = None
        if members > 1:
            self.diversity = DiversityMetrics(members, **ALONE).to(device)

    def rows_of(self, prediction: Prediction) -> dict[str, Tensor]:
        probs = {"probs": prediction.probs.float()} if self.keep else {}
        return super().rows_of(prediction) | probs

    def update(self, prediction: Prediction, targets: Tensor) -> None:
        self.classes.update(prediction.probs, targets)
        if self.diversity is not None:
            assert prediction.members is not None
            self.diversity.update(prediction.members, targets)

    def metrics(self) -> dict[str, float]:
        self.check()
        return self.classes.compute()


class RegressionEvaluator(Evaluator):
    """NLL, RMSE and coverage, in the targets' own unit; the predicted means and standard deviations."""

    needs_members = True

    def __init__(self, info: DataInfo, device: torch.device) -> None:
        super().__init__(info, device)
        self.numbers = RegressionMetrics(**ALONE).to(device)

    def rows_of(self, prediction: Prediction) -> dict[str, Tensor]:
        """Return the scores, and (3, N, K): mean, aleatoric and epistemic deviation."""
        scale, shift = self.info.target_std, self.info.target_mean
        stds = [v.sqrt() * scale for v in (prediction.aleatoric, prediction.epistemic)]
        curves = torch.stack([prediction.mean * scale + shift, *stds])
        return super().rows_of(prediction) | {"curves": curves}

    def update(self, prediction: Prediction, targets: Tensor) -> None:
        scale, shift = self.info.target_std, self.info.target_mean
        members, variances = prediction.members, prediction.member_variances
        assert members is not None
        assert variances is not None
        targets = targets.reshape(members.shape[1:]).to(members.dtype)
        self.numbers.update(members * scale + shift, variances * scale**2, targets)

    def metrics(self) -> dict[str, float]:
        self.check()
        return self.numbers.compute()


class SegmentationEvaluator(Evaluator):
    """mIoU and the pixels' metrics; detection of out-of-distribution pixels, by image and pooled.

    A void pixel counts nowhere; one out of distribution is there to be detected, and counts in nothing else.

    Args:
        is_ood: a set of out-of-distribution scenes, whose uncertainty includes that of their OOD pixels.
    """

    def __init__(self, info: DataInfo, device: torch.device, is_ood: bool = False) -> None:
        super().__init__(info, device)
        assert info.num_classes is not None
        ignored = tuple(i for i in (info.ignore_index, info.ood_index) if i is not None)
        self.uncounted = info.ignore_index if is_ood else ignored
        self.classes = ClassificationMetrics(ignore_index=ignored, **ALONE).to(device)
        self.overlap = MeanIoU(info.num_classes, ignore_index=ignored, **ALONE).to(device)
        self.by_image = ImageDetectionMetrics(**ALONE).to(device)
        self.pooled = PooledDetectionMetrics(**ALONE).to(device)

    def valid(self, targets: Tensor) -> Tensor:
        return kept(targets, self.uncounted)

    def rows_of(self, prediction: Prediction) -> dict[str, Tensor]:
        """Return nothing: a score per pixel would not be bounded."""
        return {}

    def update(self, prediction: Prediction, targets: Tensor) -> None:
        self.classes.update(prediction.probs, targets)
        self.overlap.update(prediction.labels, targets)
        if self.info.ood_index is not None:
            is_ood = targets == self.info.ood_index
            valid = kept(targets, self.info.ignore_index)
            self.by_image.update(prediction.ood_score, is_ood, valid)
            self.pooled.update(prediction.ood_score, is_ood, valid)

    def metrics(self) -> dict[str, float]:
        self.check()
        return {"miou": float(self.overlap.compute()), **self.classes.compute()}

    def detection(self) -> dict[str, dict[str, float]]:
        """Return the metrics by image, and over all pixels; nothing if no image has both kinds."""
        if self.info.ood_index is None or int(self.by_image.images) == 0:
            return {}
        return {"pixels": self.by_image.compute(), "pixels_pooled": self.pooled.compute()}


def make_evaluator(
    info: DataInfo, device: torch.device, keep: bool = False, members: int = 1
) -> Evaluator:
    """Return the evaluator of a task; ``keep`` and ``members`` are of a classification's."""
    if info.task == "regression":
        return RegressionEvaluator(info, device)
    if info.task == "segmentation":
        return SegmentationEvaluator(info, device)
    return ClassificationEvaluator(info, device, keep, members)


E = TypeVar("E", bound=Evaluator)


class Predictor:
    """A model with all it needs to predict for raw inputs: normalisation, precision, samples, seed.

    Predictions that are no numbers are counted (``Evaluator.check``), not refused.

    Args:
        config: the seed of the draws, the layout of the images, and ``config.evaluate``.
        fabric: device and precision; None: the CPU in float32.
        samples: draws of each member; None for those of the config.
    """

    allow_not_finite = True

    def __init__(
        self,
        model: UncertainModel,
        info: DataInfo,
        config: RunConfig,
        fabric: "Fabric | None" = None,
        samples: int | None = None,
    ) -> None:
        self.model, self.info, self.seed = model, info, config.seed
        self.device = torch.device("cpu") if fabric is None else fabric.device
        self.autocast = nullcontext if fabric is None else fabric.autocast
        self.settings = config.evaluate
        self.samples = self.settings.samples if samples is None else samples
        dims = len(info.shape)
        self.prepare = Normalise(info.mean, info.std, dims, config.channels_last).to(self.device)

    def __call__(self, inputs: Tensor, keep_members: bool = True) -> Prediction:
        """Return the prediction for raw inputs of any device."""
        with self.autocast():
            return predict(
                self.model,
                self.prepare(inputs.to(self.device, non_blocking=True)),
                samples=self.samples,
                chunk=self.settings.chunk,
                keep_members=keep_members,
                seed=self.seed,
                allow_not_finite=self.allow_not_finite,
            )

    @property
    def members(self) -> int:
        """Predictions that are averaged for an input."""
        return self.model.members * (self.samples if self.model.stochastic else 1)

    @property
    def batch_size(self) -> int:
        """Examples at once: as set, and fewer if the pictures are large."""
        pixels = math.prod(self.info.shape[1:])
        return max(1, min(self.settings.batch_size, PIXELS_AT_ONCE // pixels))

    def over(self, data: Examples, evaluator: E) -> E:
        """Add predictions for all of ``data`` to ``evaluator``, and return it."""
        parts = batch_indices(len(data), self.batch_size)
        for x, y in data.to(self.device).stream(parts):
            evaluator.add(self(x, keep_members=evaluator.needs_members), y)
        return evaluator
