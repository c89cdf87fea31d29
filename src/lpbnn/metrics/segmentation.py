"""Maps instead of vectors: mean IoU, and detection of out-of-distribution pixels.

For accuracy, NLL, Brier and ECE over pixels, give maps (N, C, H, W) to
`lpbnn.metrics.ClassificationMetrics` with ``ignore_index``. Void pixels are left out
everywhere here; the original anomaly-seg code counts them as in-distribution.
"""

from typing import Any

import torch
from torch import Tensor

from lpbnn.metrics import _base as base
from lpbnn.metrics.detection import (
    KEYS,
    PooledDetectionMetrics,
    check_scores,
    ranked,
    require_no_nan,
)

VOID = 255  # what the label maps of nearly every data set say where there is no class


class MeanIoU(base.StreamingMetric):
    """Streaming `miou`: the state is one (classes x classes) confusion matrix.

    >>> metric = MeanIoU(num_classes=2)
    >>> metric.update(torch.tensor([[[0, 1]]]), torch.tensor([[[0, 1]]]))
    >>> metric.update(torch.tensor([[[1, 1]]]), torch.tensor([[[0, 255]]]))
    >>> float(metric.compute()), metric.per_class()
    (0.5, tensor([0.5000, 0.5000], dtype=torch.float64))
    """

    higher_is_better: bool | None = True
    confusion: Tensor
    faults: Tensor

    def __init__(
        self, num_classes: int, *, ignore_index: base.IgnoreIndex = VOID, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        base.require(
            num_classes >= 1, f"num_classes is {num_classes}", "at least 1", "count the classes"
        )
        base.require(
            num_classes <= VOID or ignore_index != VOID,
            f"MeanIoU of {num_classes} classes has ignore_index={VOID}, the default where there are fewer",
            "a label that is no class: pixels of that class would count nowhere",
            f"pass ignore_index=None or that of the void labels; ({VOID},) leaves the class out on purpose",
        )
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.add_sum("confusion", num_classes, num_classes)  # rows: labels, columns: predictions
        self.add_sum("faults", 2)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Add class maps (N, H, W), or the probabilities (N, C, H, W) they are the argmax of."""
        if isinstance(predictions, Tensor) and predictions.is_floating_point():
            base.check_probs(predictions, labels, "predictions")
            base.require(
                predictions.shape[1] == self.num_classes,
                f"predictions has shape {tuple(predictions.shape)}",
                f"{self.num_classes} classes in dim 1",
                "build MeanIoU with the network's number of classes",
            )
            for some, of_them in base.pieces(predictions.detach(), labels):
                best, predicted = some.max(1)
                self._add(predicted.where(~best.isnan(), -1), of_them)
        else:
            shape = tuple(getattr(labels, "shape", ()))
            base.check_labels(predictions, shape, f"labels has shape {shape}", "predictions")
            base.check_labels(labels, shape, f"predictions has shape {shape}")
            maps = (part.flatten().split(base.CHUNK) for part in (predictions, labels))
            for some, of_them in zip(*maps, strict=True):
                self._add(some, of_them)

    def _add(self, predicted: Tensor, labels: Tensor) -> None:
        size = self.num_classes
        labels, predicted = labels.long(), predicted.long()
        kept = base.kept(labels, self.ignore_index)
        faults = [(kept & ((x < 0) | (x >= size))).sum() for x in (predicted, labels)]
        cell = labels.clamp(0, size - 1) * size + predicted.clamp(0, size - 1)
        confusion = base.tally(cell, kept.long(), size * size).view(size, size)
        self.add(confusion=confusion, faults=torch.stack(faults))

    def _ious(self) -> Tensor:
        top = f"0..{self.num_classes - 1}"
        base.require_none(
            self.faults,
            (
                (
                    f"{{}} predicted classes are NaN or outside {top}",
                    "class indices, or probabilities without NaN",
                    "check the network's outputs",
                ),
                (
                    f"{{}} labels lie outside {top}",
                    "class indices, or ignored labels",
                    "name void and anomaly labels, for instance ignore_index=(255, 13)",
                ),
            ),
        )
        base.require_seen(int(self.confusion.sum()), self, "labelled pixels")
        hits = self.confusion.diagonal()
        return hits / (self.confusion.sum(0) + self.confusion.sum(1) - hits).double()

    def per_class(self) -> Tensor:
        """(classes,) IoU, NaN for a class that is in neither labels nor predictions."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return self._ious()

    def compute(self) -> Tensor:
        """The mean IoU of everything seen, a float64 scalar."""
        return self._ious().nanmean()


def miou(
    predictions: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    ignore_index: base.IgnoreIndex = VOID,
) -> float:
    r"""Mean over the classes of intersection over union, counted over the whole data set.

    $$\frac{1}{C} \sum_c \frac{\mathrm{TP}_c}{\mathrm{TP}_c + \mathrm{FP}_c + \mathrm{FN}_c}$$

    Pixels whose label is ``ignore_index`` (one index or several; that of ``lpbnn.build``) count nowhere,
    not even as false positives; classes that occur in neither labels nor predictions are left out of the
    mean.

    >>> miou(torch.tensor([[[0, 1, 1]]]), torch.tensor([[[0, 0, 255]]]), num_classes=2)
    0.25
    """
    metric = MeanIoU(num_classes, ignore_index=ignore_index)
    return float(base.seen_once(metric, predictions, labels).compute())


class ImageDetectionMetrics(base.StreamingMetric):
    """AUROC, AUPR and FPR95 of each image, averaged over images: the anomaly-seg protocol.

    Exact (each map is sorted), in constant memory. Images without out-of-distribution pixels, or
    with nothing else, have no ranking and are left out; ``images`` counts the others.

    >>> metrics = ImageDetectionMetrics()
    >>> scores = torch.tensor([[[0.1, 0.3, 0.2, 0.9]], [[0.1, 0.2, 0.3, 0.4]]])
    >>> is_ood = torch.tensor([[[False, False, True, True]], [[False, False, False, False]]])
    >>> metrics.update(scores, is_ood)
    >>> {key: round(value, 4) for key, value in metrics.compute().items()}
    {'auroc': 0.75, 'aupr': 0.8333, 'fpr95': 0.5}
    >>> int(metrics.images)
    1
    """

    sums: Tensor
    images: Tensor
    faults: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sum("sums", len(KEYS), dtype=torch.float64)
        self.add_sum("images")
        self.add_sum("faults")

    def update(self, scores: Tensor, is_ood: Tensor, valid: Tensor | None = None) -> None:
        """Add maps (N, H, W), with boolean ``is_ood`` and ``valid`` (False: void) of that shape."""
        check_scores(scores, is_ood, valid)
        base.require(
            scores.ndim == 3 and 0 not in scores.shape[1:],
            f"scores has shape {tuple(scores.shape)}",
            "maps of shape (N, H, W)",
            "for one map pass scores[None] and is_ood[None]",
        )
        for index, score in enumerate(scores.detach()):
            counted = None if valid is None else valid[index].flatten()
            self._add(score.flatten(), is_ood[index].flatten(), counted)

    def _add(self, scores: Tensor, is_ood: Tensor, valid: Tensor | None) -> None:
        values = ranked(scores, is_ood, valid)
        defined = values.isfinite().all()
        nan = scores.isnan() if valid is None else scores.isnan() & valid
        self.add(sums=values.where(defined, 0), images=defined.long(), faults=nan.sum())

    def compute(self) -> dict[str, float]:
        """Means over the images with both kinds of pixels; ``ValueError`` if there is none."""
        require_no_nan(int(self.faults))
        base.require_seen(int(self.images), self, "image with both kinds of pixels")
        return dict(zip(KEYS, (self.sums / self.images).tolist(), strict=True))


def pixel_detection(
    scores: Tensor, is_ood: Tensor, valid: Tensor | None = None, *, pooled: bool = False
) -> dict[str, float]:
    r"""AUROC, AUPR and FPR95 of out-of-distribution pixels in maps (N, H, W).

    $$
    m = \frac{1}{|I|} \sum_{i \in I} m(\text{pixels of image } i), \quad
    I = \{\text{images with both kinds of pixels}\}
    $$

    With ``pooled=True``, over all pixels together, through the histogram of
    `PooledDetectionMetrics`.

    >>> scores = torch.tensor([[[0.1, 0.3, 0.2, 0.9]], [[0.1, 0.2, 0.3, 0.4]]])
    >>> is_ood = torch.tensor([[[False, False, True, True]], [[False, False, False, False]]])
    >>> (
    ...     pixel_detection(scores, is_ood)["auroc"],
    ...     pixel_detection(scores, is_ood, pooled=True)["auroc"],
    ... )
    (0.75, 0.7083...)
    """
    metric = PooledDetectionMetrics() if pooled else ImageDetectionMetrics()
    return base.seen_once(metric, scores, is_ood, valid).compute()
