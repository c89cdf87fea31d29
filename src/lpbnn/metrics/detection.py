r"""Does the score tell out-of-distribution inputs from the others? AUROC, AUPR, FPR at 95 % TPR.

**Out-of-distribution is the positive class, and a higher score means more out-of-distribution**
(1 - max probability, an entropy, ...). With $\mathrm{TP}_k, \mathrm{FP}_k$ the numbers of
positives and negatives scored at or above the k-th largest *distinct* score: examples with equal
scores always move together, so nothing depends on the order of the data.

Scores may be any reals: torchmetrics' own AUROC is not used, because it passes scores outside
[0, 1] through a float32 sigmoid, where scores of 100 and 101 become equal.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from lpbnn.metrics import _base as base

KEYS = ("auroc", "aupr", "fpr95")
BITS = 20  # of a score in the histogram of `PooledDetectionMetrics`
BINS = 2**BITS
ZERO = BINS // 2


def check_scores(scores: Tensor, is_ood: Tensor, valid: Tensor | None = None) -> None:
    """``scores`` floating point, ``is_ood`` (and ``valid``) boolean, all of one shape."""
    base.check_floating("scores", scores)
    for name, mask in (("is_ood", is_ood), ("valid", valid)):
        if mask is None:
            continue
        base.require(
            isinstance(mask, Tensor) and mask.dtype == torch.bool,
            f"{name} is {getattr(mask, 'dtype', type(mask).__name__)}",
            "a boolean tensor, so that there is no doubt which class is positive",
            "pass for instance labels == ood_class",
        )
        base.require(
            mask.shape == scores.shape,
            f"{name} has shape {tuple(mask.shape)} while scores has {tuple(scores.shape)}",
            "the same shape",
            "pass the scores and the masks of the same examples",
        )


def areas(positives: Tensor, negatives: Tensor) -> Tensor:
    """(AUROC, AUPR, FPR95) from the numbers of positives and negatives at each score, descending.

    One place for all three, whether a step is one distinct score or one bin of a histogram. Steps
    without examples change nothing. NaN where a class is missing.

    >>> areas(torch.tensor([1, 1, 0]), torch.tensor([0, 1, 2]))
    tensor([0.9167, 0.8333, 0.3333], dtype=torch.float64)
    """
    tp, fp, real = positives.cumsum(0), negatives.cumsum(0), base.wide(positives.device)
    all_positives, all_negatives = positives.sum().to(real), negatives.sum().to(real)
    # Each negative meets the positives above it as wins for them, and its equals as half a win.
    wins = (negatives.to(real) * (tp.to(real) - positives.to(real) / 2)).sum()
    auroc = wins / all_negatives / all_positives
    aupr = (positives * (tp.to(real) / (tp + fp).clamp_min(1))).sum() / all_positives
    # 20 TP >= 19 P in integers: .95 is not a binary fraction. FP only grows: first is smallest.
    reached = 20 * tp >= 19 * positives.sum()
    fpr95 = fp.where(reached, negatives.sum()).amin() / all_negatives
    fpr95 = fpr95.where(all_positives > 0, torch.nan)
    return torch.stack([auroc, aupr, fpr95])


def ranked(scores: Tensor, is_ood: Tensor, valid: Tensor | None = None) -> Tensor:
    """(AUROC, AUPR, FPR95) of a flat list of scores, exactly, without a device sync.

    >>> ranked(torch.tensor([0.1, 0.1, 0.9]), torch.tensor([False, True, True]))
    tensor([0.7500, 0.8333, 1.0000], dtype=torch.float64)
    """
    if valid is None:
        valid = torch.ones_like(is_ood)
    else:  # what is not valid sorts last and weighs nothing
        scores = scores.where(valid, -torch.inf)
    scores, order = scores.sort(descending=True)
    step = torch.zeros_like(order)
    step[1:] = (scores[1:] != scores[:-1]).cumsum(0)
    positives = base.tally(step, (is_ood & valid)[order].long(), len(step))
    negatives = base.tally(step, (~is_ood & valid)[order].long(), len(step))
    return areas(positives, negatives)


def require_both(positives: int, negatives: int) -> None:
    """Raise a ``ValueError`` when there is nothing to tell apart."""
    base.require(
        positives > 0 and negatives > 0,
        f"{positives} out-of-distribution and {negatives} in-distribution examples were scored",
        "at least one of each",
        "update with both data sets (is_ood all False, then all True) before compute()",
    )


def require_no_nan(count: int) -> None:
    """Raise a ``ValueError`` for NaN scores, which have no rank."""
    base.require(
        count == 0,
        f"{count} scores are NaN",
        "real numbers",
        "check the network's outputs; infinite scores are allowed",
    )


class DetectionMetrics(base.StreamingMetric):
    """AUROC, AUPR and FPR95 together, exactly; keeps 16 bytes per example.

    For more than some tens of millions of scores (the pixels of a segmentation set) use
    `PooledDetectionMetrics`, whose memory is bounded.

    >>> metrics = DetectionMetrics()
    >>> metrics.update(torch.tensor([0.1, 0.3]), torch.tensor([False, False]))
    >>> metrics.update(torch.tensor([0.2, 0.9]), torch.tensor([True, True]))
    >>> {key: round(value, 4) for key, value in metrics.compute().items()}
    {'auroc': 0.75, 'aupr': 0.8333, 'fpr95': 0.5}
    """

    scores: list[Tensor]
    is_ood: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("is_ood", [], dist_reduce_fx="cat")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of both states: a DDP rank that saw nothing sends an empty tensor of it."""
        return torch.float64

    def update(self, scores: Tensor, is_ood: Tensor) -> None:
        """Add a batch of any shape: ``scores`` floating point, ``is_ood`` boolean."""
        check_scores(scores, is_ood)
        self.scores.append(scores.detach().flatten().to(self.device).to(self.dtype))
        self.is_ood.append(is_ood.flatten().to(self.device).to(self.dtype))

    def compute(self) -> dict[str, float]:
        """``{"auroc", "aupr", "fpr95"}`` of everything seen; ``ValueError`` if a class is missing."""
        base.require_seen(len(self.scores), self, "scores")
        scores, is_ood = dim_zero_cat(self.scores), dim_zero_cat(self.is_ood).bool()
        require_no_nan(int(scores.isnan().sum()))
        require_both(int(is_ood.sum()), int((~is_ood).sum()))
        return dict(zip(KEYS, ranked(scores, is_ood).tolist(), strict=True))


def bin_of(scores: Tensor) -> Tensor:
    """The bin of each score: an order-preserving map from the reals to 0..BINS-1.

    >>> bins = bin_of(torch.tensor([-1.0, -0.0, 0.0, 1e-9, 0.7, 0.7001, 0.702, torch.inf]))
    >>> bins.diff().sign().tolist()  # -0.0 is 0.0; 0.7 and 0.7001 are closer than 0.05 %
    [1, 0, 1, 1, 0, 1, 1]
    """
    single = scores.to(torch.float32)
    if scores.dtype == torch.float64:  # 1e-60 is not zero, though no float32 comes nearer to it
        nearest = torch.full_like(single, 2.0**-149).copysign(single)
        single = single.where((single != 0) | (scores == 0), nearest)
    # Adding zero turns -0.0 into 0.0, whose bit patterns are at opposite ends.
    bits = (single + 0.0).view(torch.int32)
    # Read as integers, positive floats are in order and negative ones in reverse: flip those.
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # The -1, +1 leave zero alone in its bin.
    shift = 32 - BITS
    return ((key - (key > 0).int()) >> shift) + (key > 0).int() + ZERO


class PooledDetectionMetrics(base.StreamingMetric):
    """AUROC, AUPR and FPR95 over all scores together, in a histogram of 16 MiB whatever their number.

    The 1,500 test maps of StreetHazards hold 1.4e9 pixel scores; kept, they would fill 11 GB. A bin holds
    the float32 numbers that agree in sign, exponent and the first 11 bits of the fraction: scores further
    apart than a factor 1 + 2**-11 (0.05 %) are told apart, at 1e-6 as at 1e6. Zero has a bin of its own, and
    so has every float16 and bfloat16 number. ``compute`` treats the scores of one bin as equal. ``valid``
    marks what counts (leave void pixels out).

    >>> metrics = PooledDetectionMetrics()
    >>> scores = torch.tensor([[0.1, 0.3], [0.2, 0.9]])
    >>> is_ood = torch.tensor([[False, False], [True, True]])
    >>> metrics.update(scores, is_ood)
    >>> {key: round(value, 4) for key, value in metrics.compute().items()}
    {'auroc': 0.75, 'aupr': 0.8333, 'fpr95': 0.5}
    """

    histogram: Tensor
    faults: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sum("histogram", 2, BINS)  # in-distribution, out-of-distribution
        self.add_sum("faults")

    def update(self, scores: Tensor, is_ood: Tensor, valid: Tensor | None = None) -> None:
        """Add scores of any shape, with boolean ``is_ood`` and ``valid`` of that shape."""
        check_scores(scores, is_ood, valid)
        device = scores.device
        histogram = torch.zeros(2 * BINS, dtype=torch.int64, device=device)
        faults = torch.zeros((), dtype=torch.int64, device=device)
        masks = torch.ones_like(is_ood) if valid is None else valid
        flat = (part.detach().flatten().split(base.CHUNK) for part in (scores, is_ood, masks))
        for some, ood, counted in zip(*flat, strict=True):
            cell = bin_of(some) + ood.int() * BINS
            nan = some.isnan()
            histogram.index_add_(0, cell.where(~nan, 0), (counted & ~nan).long())
            faults += (counted & nan).sum()
        self.add(histogram=histogram.view(2, BINS), faults=faults)

    def compute(self) -> dict[str, float]:
        """``{"auroc", "aupr", "fpr95"}`` of everything seen; ``ValueError`` if a class is missing."""
        require_no_nan(int(self.faults))
        negatives, positives = self.histogram[:, self.histogram.sum(0) > 0].flip(1)
        require_both(int(positives.sum()), int(negatives.sum()))
        return dict(zip(KEYS, areas(positives, negatives).tolist(), strict=True))


def auroc(scores: Tensor, is_ood: Tensor) -> float:
    r"""Probability that an out-of-distribution example outscores another one (ties count half).

    $$\mathrm{AUROC} = P(s_+ > s_-) + \tfrac{1}{2} P(s_+ = s_-)$$

    ``ValueError`` if one of the two classes is missing.

    >>> auroc(torch.tensor([0.1, 0.3, 0.2, 0.9]), torch.tensor([False, False, True, True]))
    0.75
    """
    return base.seen_once(DetectionMetrics(), scores, is_ood).compute()["auroc"]


def aupr(scores: Tensor, is_ood: Tensor) -> float:
    r"""Area under the precision-recall curve as average precision (no interpolation).

    $$
    \mathrm{AP} = \sum_k (R_k - R_{k-1}) P_k, \quad
    P_k = \frac{\mathrm{TP}_k}{\mathrm{TP}_k + \mathrm{FP}_k}, \quad
    R_k = \frac{\mathrm{TP}_k}{\mathrm{TP}_\infty}
    $$

    ``ValueError`` if one of the two classes is missing.

    >>> aupr(torch.tensor([0.1, 0.3, 0.2, 0.9]), torch.tensor([False, False, True, True]))
    0.8333...
    """
    return base.seen_once(DetectionMetrics(), scores, is_ood).compute()["aupr"]


def fpr95(scores: Tensor, is_ood: Tensor) -> float:
    r"""False-positive rate at the first (highest) threshold whose true-positive rate reaches .95.

    $$
    \mathrm{FP}_{k^*} / \mathrm{FP}_\infty, \quad
    k^* = \min \{k : \mathrm{TP}_k \ge 0.95\, \mathrm{TP}_\infty\}
    $$

    No interpolation between thresholds; the anomaly-seg code takes the *nearest* rate to .95
    instead. ``ValueError`` if one of the two classes is missing.

    >>> fpr95(torch.tensor([0.1, 0.3, 0.2, 0.9]), torch.tensor([False, False, True, True]))
    0.5
    """
    return base.seen_once(DetectionMetrics(), scores, is_ood).compute()["fpr95"]
