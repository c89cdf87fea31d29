r"""Detection metrics over billions of scores: a histogram of bounded size.

The 1,500 test maps of StreetHazards hold 1.4e9 pixel scores. Kept, they would fill 11 GB; counted
in `BINS` bins they fill 16 MiB and need no range in advance.

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

    ``compute`` treats the scores of one bin as equal. ``valid`` marks what counts (leave void pixels
    out).

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
