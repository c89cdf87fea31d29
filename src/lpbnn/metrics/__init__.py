r"""Metrics with their conventions written down: calibration, detection, segmentation, diversity.

Most metrics are a function for data at hand, and a value of a streaming ``torchmetrics.Metric`` for
data in batches; both give the same number. Those that sort all data, or compare all members, are functions
only. The classes named ``...Metrics`` compute a family in one pass and return ``dict[str, float]``;
`MeanIoU` returns a scalar tensor. `METRICS` says what each key means and which way is better.

| metrics | | inputs |
| --- | --- | --- |
| classification | accuracy, NLL, Brier | probs (N, C), labels (N,) |
| calibration | ECE, reliability diagram, cA, cE | probs (N, C), labels (N,) |
| | adaptive and classwise ECE (functions only) | probs (N, C), labels (N,) |
| selective prediction | risk-coverage curve, AURC, AUGRC | uncertainty, losses (N,) |
| prediction sets | coverage, size | sets (N, C), labels (N,) |
| detection, pooled | AUROC, AUPR, FPR95; OOD is positive | scores, is_ood (same shape) |
| segmentation | mIoU, per-image and pooled detection | maps (N, C, H, W) or (N, H, W) |
| diversity | ratio-error, Q, correlation, disagreement | members (S, N, C), labels (N,) |
| regression | mixture NLL, RMSE, coverage | means, variances (S, N) |
| | CRPS, quantile calibration (functions only) | means, variances (S, N) |

Nothing to average, one class only, NaN, labels out of range, rows that do not sum to one: all raise
``ValueError``, at ``update`` for shapes and dtypes and at ``compute`` for values.

torchmetrics supplies the machinery (state, reset, DDP). Its own ECE has bins [lo, hi) and keeps
every confidence, its AUROC squashes scores through a sigmoid, and both check values with a device
sync per batch; so the counting is ours.
"""

from lpbnn.extras import missing
from lpbnn.metric_info import METRICS, MetricInfo

try:
    from lpbnn.metrics.calibration import (
        ReliabilityBins,
        adaptive_ece,
        classwise_ece,
        corruption_means,
        ece,
        reliability,
    )
    from lpbnn.metrics.classification import ClassificationMetrics, accuracy, brier, nll
    from lpbnn.metrics.detection import (
        DetectionMetrics,
        PooledDetectionMetrics,
        aupr,
        auroc,
        fpr95,
    )
    from lpbnn.metrics.diversity import (
        DiversityMetrics,
        correlation,
        disagreement,
        q_statistic,
        ratio_error,
    )
    from lpbnn.metrics.regression import (
        RegressionMetrics,
        coverage,
        crps,
        mixture_nll,
        quantile_calibration,
        quantile_error,
        rmse,
    )
    from lpbnn.metrics.segmentation import ImageDetectionMetrics, MeanIoU, miou, pixel_detection
    from lpbnn.metrics.selective import RiskCoverage, augrc, aurc, risk_coverage
    from lpbnn.metrics.sets import interval_coverage, set_coverage, set_size
except ModuleNotFoundError as error:
    raise missing(error) from error

__all__ = [
    "METRICS",
    "ClassificationMetrics",
    "DetectionMetrics",
    "DiversityMetrics",
    "ImageDetectionMetrics",
    "MeanIoU",
    "MetricInfo",
    "PooledDetectionMetrics",
    "RegressionMetrics",
    "ReliabilityBins",
    "RiskCoverage",
    "accuracy",
    "adaptive_ece",
    "augrc",
    "aupr",
    "aurc",
    "auroc",
    "brier",
    "classwise_ece",
    "correlation",
    "corruption_means",
    "coverage",
    "crps",
    "disagreement",
    "ece",
    "fpr95",
    "interval_coverage",
    "miou",
    "mixture_nll",
    "nll",
    "pixel_detection",
    "q_statistic",
    "quantile_calibration",
    "quantile_error",
    "ratio_error",
    "reliability",
    "risk_coverage",
    "rmse",
    "set_coverage",
    "set_size",
]
