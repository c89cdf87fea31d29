"""The tally of each task: its metrics, and what is kept of its single examples.

Of street scenes, a pixel that is void counts nowhere; one out of distribution is there to be detected, and
counts in nothing else.
"""

import torch
from torch import Tensor

from lpbnn.metrics import (
    ClassificationMetrics,
    DiversityMetrics,
    ImageDetectionMetrics,
    MeanIoU,
    PooledDetectionMetrics,
    RegressionMetrics,
)
from lpbnn.metrics._base import kept
from lpbnn.predict import Prediction
from lpbnn.training.build import DataInfo
from lpbnn.training.tally import ALONE, Tally


class ClassificationTally(Tally):
    """Accuracy, NLL, Brier, ECE; the diversity of the members; the probabilities, where asked for."""

    needs_members = True

    def __init__(self, info: DataInfo, device: torch.device, keep: bool = False) -> None:
        super().__init__(info, device)
        self.classes = ClassificationMetrics(**ALONE).to(device)
        self.held["classes"] = self.classes
        self.keep = keep

    def _rows(self, prediction: Prediction, scores: Tensor) -> dict[str, Tensor]:
        kept = {"probs": prediction.probs.float()} if self.keep else {}
        return super()._rows(prediction, scores) | kept

    def update(self, prediction: Prediction, targets: Tensor, scores: Tensor) -> None:
        self.classes.update(prediction.probs, targets)
        members = prediction.members
        if members is not None and len(members) > 1:
            if self.diversity is None:
                self.held["diversity"] = DiversityMetrics(len(members), **ALONE).to(self.device)
            self.held["diversity"].update(members, targets)

    def _make(self, key: str, state: dict[str, Tensor]) -> None:
        members = len(state["both_right"])
        self.held[key] = DiversityMetrics(members, **ALONE).to(self.device)

    @property
    def diversity(self) -> DiversityMetrics | None:
        """None for a single member."""
        return self.held.get("diversity")  # type: ignore[return-value]

    def metrics(self) -> dict[str, float]:
        self.check()
        return self.classes.compute()


class RegressionTally(Tally):
    """NLL, RMSE and coverage, in the targets' own unit; the predictive means and spreads."""

    needs_members = True

    def __init__(self, info: DataInfo, device: torch.device) -> None:
        super().__init__(info, device)
        self.numbers = RegressionMetrics(**ALONE).to(device)
        self.held["numbers"] = self.numbers

    def _rows(self, prediction: Prediction, scores: Tensor) -> dict[str, Tensor]:
        """And the curves, (3, N, K): mean, aleatoric and epistemic deviation."""
        scale, shift = self.info.target_std, self.info.target_mean
        mean = prediction.mean * scale + shift
        spreads = [v.sqrt() * scale for v in (prediction.aleatoric, prediction.epistemic)]
        return super()._rows(prediction, scores) | {"curves": torch.stack([mean, *spreads])}

    def update(self, prediction: Prediction, targets: Tensor, scores: Tensor) -> None:
        scale, shift = self.info.target_std, self.info.target_mean
        assert prediction.members is not None
        assert prediction.member_variances is not None
        targets = targets.reshape(prediction.members.shape[1:]).to(prediction.members.dtype)
        self.numbers.update(
            prediction.members * scale + shift, prediction.member_variances * scale**2, targets
        )

    def metrics(self) -> dict[str, float]:
        self.check()
        return self.numbers.compute()


class SegmentationTally(Tally):
    """mIoU and the pixels' metrics; detection of out-of-distribution pixels, by image and pooled.

    Args:
        is_ood: a set of strange scenes, whose uncertainty is that of the strange pixels too.
    """

    def __init__(self, info: DataInfo, device: torch.device, is_ood: bool = False) -> None:
        super().__init__(info, device)
        assert info.num_classes is not None
        self.ignored = tuple(i for i in (info.ignore_index, info.ood_index) if i is not None)
        self.uncounted = info.ignore_index if is_ood else self.ignored
        self.classes = ClassificationMetrics(ignore_index=self.ignored, **ALONE).to(device)
        self.overlap = MeanIoU(info.num_classes, ignore_index=self.ignored, **ALONE).to(device)
        self.by_image = ImageDetectionMetrics(**ALONE).to(device)
        self.pooled = PooledDetectionMetrics(**ALONE).to(device)
        self.held |= {"classes": self.classes, "overlap": self.overlap}
        if info.ood_index is not None:
            self.held |= {"by_image": self.by_image, "pooled": self.pooled}

    def _valid(self, targets: Tensor) -> Tensor:
        return kept(targets, self.uncounted)

    def update(self, prediction: Prediction, targets: Tensor, scores: Tensor) -> None:
        self.classes.update(prediction.probs, targets)
        self.overlap.update(prediction.labels, targets)
        if self.info.ood_index is not None:
            is_ood = targets == self.info.ood_index
            valid = kept(targets, self.info.ignore_index)
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
