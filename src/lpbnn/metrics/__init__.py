"""Metrics with their conventions written down: calibration, detection, segmentation, diversity.

Each metric is a function for data at hand and a streaming ``torchmetrics.Metric`` for data in
batches; both give the same number. The classes named ``...Metrics`` compute a family in one pass
and return ``dict[str, float]``; the others return a scalar tensor. :data:`METRICS` says what each
key means and which way is better.

=========================  ========================================================================
classification             accuracy, NLL, Brier                        probs (N, C), labels (N,)
calibration                ECE, reliability diagram, cA / cE           probs (N, C), labels (N,)
detection, pooled          AUROC, AUPR, FPR95; OOD is positive         scores, is_ood (same shape)
segmentation               mIoU, per-image and pooled detection        maps (N, C, H, W) or (N, H, W)
diversity                  ratio-error, Q, correlation, disagreement   members (S, N, C), labels (N,)
regression                 mixture NLL, RMSE, coverage                 means, variances (S, N)
=========================  ========================================================================

Nothing to average, one class only, NaN, labels out of range, rows that do not sum to one: all raise
``ValueError``, at ``update`` for shapes and dtypes and at ``compute`` for values.

torchmetrics supplies the machinery (state, reset, DDP). Its own ECE has bins [lo, hi) and keeps
every confidence, its AUROC squashes scores through a sigmoid, and both check values with a device
sync per batch; so the counting is ours.
"""

from lpbnn.metrics.calibration import ECE, ReliabilityBins, corruption_means, ece, reliability
from lpbnn.metrics.classification import (
    NLL,
    Accuracy,
    Brier,
    ClassificationMetrics,
    accuracy,
    brier,
    nll,
)
from lpbnn.metrics.detection import AUPR, AUROC, FPR95, DetectionMetrics, aupr, auroc, fpr95
from lpbnn.metrics.diversity import (
    DiversityMetrics,
    correlation,
    disagreement,
    q_statistic,
    ratio_error,
)
from lpbnn.metrics.info import METRICS, MetricInfo
from lpbnn.metrics.pooled import PooledDetectionMetrics
from lpbnn.metrics.regression import RegressionMetrics, coverage, mixture_nll, rmse
from lpbnn.metrics.segmentation import ImageDetectionMetrics, MeanIoU, miou, pixel_detection

__all__ = [
    "AUPR",
    "AUROC",
    "ECE",
    "FPR95",
    "METRICS",
    "NLL",
    "Accuracy",
    "Brier",
    "ClassificationMetrics",
    "DetectionMetrics",
    "DiversityMetrics",
    "ImageDetectionMetrics",
    "MeanIoU",
    "MetricInfo",
    "PooledDetectionMetrics",
    "RegressionMetrics",
    "ReliabilityBins",
    "accuracy",
    "aupr",
    "auroc",
    "brier",
    "correlation",
    "corruption_means",
    "coverage",
    "disagreement",
    "ece",
    "fpr95",
    "miou",
    "mixture_nll",
    "nll",
    "pixel_detection",
    "q_statistic",
    "ratio_error",
    "reliability",
    "rmse",
]
