r"""Detection metrics over billions of scores: a histogram of bounded size, with its error bound.

The 1,500 test maps of StreetHazards hold 1.4e9 pixel scores. Kept, they would fill 11 GB; counted
in `BINS` bins they fill 16 MiB, need no range in advance, and the error is known.

A bin holds the float32 numbers that agree in sign, exponent and the first 11 bits of the fraction:
scores further apart than a factor $1 + 2^{-11}$ (0.05 %) are told apart, at 1e-6 as at 1e6.
Zero has a bin of its own, and so has every float16 and bfloat16 number.
"""

from typing import Any

import torch
from torch import Tensor

from lpbnn.metrics import _base as base
from lpbnn.metrics.detection import KEYS, areas, check_scores, require_both, require_no_nan

BITS = 20
BINS = 2**BITS
ZERO = BINS // 2


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
    """AUROC, AUPR and FPR95 over all scores together, in 16 MiB whatever their number.

    ``compute`` treats the scores of one bin as equal; `error_bounds` says how far the exact
    values can be from that. ``valid`` marks what counts (leave void pixels out).

    >>> metrics = PooledDetectionMetrics()
    >>> scores = torch.tensor([[0.1, 0.3], [0.2, 0.9]])
    >>> is_ood = torch.tensor([[False, False], [True, True]])
    >>> metrics.update(scores, is_ood)
    >>> {key: round(value, 4) for key, value in metrics.compute().items()}
    {'auroc': 0.75, 'aupr': 0.8333, 'fpr95': 0.5}
    >>> metrics.error_bounds()
    {'auroc': 0.0, 'aupr': 0.0, 'fpr95': 0.0}
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

    def _steps(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positives and negatives of each occupied bin, highest first, and whether it is not zero."""
        require_no_nan(int(self.faults))
        bins = self.histogram.sum(0).nonzero().squeeze(1).flip(0)
        negatives, positives = self.histogram[:, bins]
        require_both(int(positives.sum()), int(negatives.sum()))
        return positives, negatives, bins != ZERO

    def compute(self) -> dict[str, float]:
        """``{"auroc", "aupr", "fpr95"}`` of everything seen; ``ValueError`` if a class is missing."""
        positives, negatives, _ = self._steps()
        return dict(zip(KEYS, areas(positives, negatives).tolist(), strict=True))

    def error_bounds(self) -> dict[str, float]:
        r"""The most by which each value of ``compute`` can differ from the exact one.

        With $p, n$ positives and negatives in a bin, out of $P, N$ in all, and
        $\mathrm{TP}, \mathrm{FP}$ of them in this bin and above:

        - AUROC: a pair in one bin counts half and should count 0 or 1:
          $\frac{1}{2} \sum p n / (P N)$;
        - AUPR: compared with the bin's positives tied above its negatives, precision
          $\mathrm{TP} / (\mathrm{TP} + \mathrm{FP} - n)$, and one by one below them,
          $\sum_{i=1}^{p} (\mathrm{TP} - p + i) / (\mathrm{TP} - p + i + \mathrm{FP})$;
        - FPR95: the exact threshold is inside the bin where the TPR reaches .95: $n / N$.

        The scores in the bin of zero are equal, so it adds nothing.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            positives, negatives, spread = self._steps()
        tp, fp = positives.cumsum(0).double(), negatives.cumsum(0).double()
        p, n = (positives * spread).double(), (negatives * spread).double()
        auroc = (p * n).sum() / 2 / tp[-1] / fp[-1]
        taken = p * tp / (tp + fp)
        best = p * tp / (tp + fp - n).clamp_min(1)
        # sum of 1 - FP / (TP - p + i + FP), by the digamma function's sum of reciprocals
        worst = p - fp * (torch.digamma(tp + fp + 1) - torch.digamma(tp + fp - p + 1))
        aupr = torch.max((best - taken).sum(), (taken - worst).sum()) / tp[-1]
        fpr95 = n[(20 * tp < 19 * tp[-1]).sum()] / fp[-1]
        return dict(zip(KEYS, map(float, (auroc, aupr, fpr95)), strict=True))
