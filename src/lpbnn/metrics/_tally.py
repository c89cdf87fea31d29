"""One pass over class probabilities: everything accuracy, NLL, Brier and ECE need."""

from typing import Any

import torch
from torch import Tensor

from lpbnn.metrics import _base as base

# A probability that underflowed costs 87.3 nats; without a floor one such example would make the
# NLL of a whole data set infinite. The smallest normal float32, whatever dtype was given.
PROBABILITY_FLOOR = torch.finfo(torch.float32).tiny


def bin_edges(num_bins: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """The ``num_bins + 1`` edges k / num_bins, rounded as a probability of ``dtype`` is rounded.

    So that a confidence written as 0.2 meets the edge 3/15 in bfloat16 as in float64.

    >>> bin_edges(4, torch.float32)
    tensor([0.0000, 0.2500, 0.5000, 0.7500, 1.0000])
    """
    steps = torch.arange(
        num_bins + 1, dtype=base.wide(torch.device(device or "cpu")), device=device
    )
    return (steps / num_bins).to(dtype).to(base.working(dtype))


class ProbabilityTally(base.StreamingMetric):
    """Sums over the labelled examples, by confidence bin; the metrics are ratios of these sums.

    State: ``counts`` (2, bins) = examples and correct ones, ``confidence`` (bins,) = summed
    confidence, ``sums`` = summed NLL and Brier score, ``faults`` = rows that are no distribution
    and labels out of range.
    """

    key = ""  # of `values`, in the classes of one metric
    counts: Tensor
    confidence: Tensor
    sums: Tensor
    faults: Tensor

    def __init__(
        self, *, num_bins: int = 15, ignore_index: base.IgnoreIndex = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        base.require(
            num_bins >= 1, f"num_bins is {num_bins}", "at least 1", "leave it at 15, as published"
        )
        self.num_bins = num_bins
        self.ignore_index = ignore_index
        self.add_sum("counts", 2, num_bins)
        self.add_sum("confidence", num_bins, dtype=torch.float64)
        self.add_sum("sums", 2, dtype=torch.float64)
        self.add_sum("faults", 2)

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add a batch: ``probs`` (N, C) or (N, C, H, W), ``labels`` (N,) or (N, H, W)."""
        base.check_probs(probs, labels)
        for some, of_them in base.pieces(probs.detach(), labels):
            self._add(some, of_them)

    def _add(self, probs: Tensor, labels: Tensor) -> None:
        classes, device, dtype = probs.shape[1], probs.device, probs.dtype
        # Passes an average of bfloat16 softmaxes over many classes; no logits pass it.
        tolerance = max(1e-3, 4 * torch.finfo(dtype).eps)
        probs, labels = probs.to(base.working(dtype)), labels.long()
        kept = base.kept(labels, self.ignore_index)
        in_range = (labels >= 0) & (labels < classes)
        # Comparisons with NaN are false, so NaN counts as "not a distribution" too.
        distribution = ((probs.sum(1) - 1).abs() <= tolerance) & (probs.amin(1) >= 0)
        faults = torch.stack([(kept & ~distribution).sum(), (kept & ~in_range).sum()])

        # Clamped because an index out of range would abort the CUDA context: it is counted above.
        labels = labels.clamp(0, classes - 1)
        confidence, predicted = probs.max(1)
        true = probs.gather(1, labels.unsqueeze(1))
        nll = -true.squeeze(1).clamp_min(PROBABILITY_FLOOR).log()
        # Residuals rather than 1 - 2 p_y + sum p^2, which cancels to noise for a sure prediction.
        brier = probs.scatter(1, labels.unsqueeze(1), true - 1).square_().sum(1)
        sums = torch.stack([nll, brier]).where(kept, 0).flatten(1).sum(1, dtype=base.wide(device))

        edges = bin_edges(self.num_bins, dtype, device)
        # `bucketize` returns i with edges[i-1] < c <= edges[i]: bins (lo, hi]. The clamp keeps a
        # confidence of 1 + rounding in the last bin.
        bins = torch.bucketize(confidence, edges).sub_(1).clamp_(0, self.num_bins - 1)
        correct = kept & (predicted == labels)
        counts = [base.tally(bins, hits.long(), self.num_bins) for hits in (kept, correct)]
        summed = base.tally(bins, confidence.where(kept, 0).to(base.wide(device)), self.num_bins)

        self.add(counts=torch.stack(counts), confidence=summed, sums=sums, faults=faults)

    def require_valid(self) -> None:
        """Raise a ``ValueError`` if what was seen cannot be scored."""
        base.require_none(
            self.faults,
            (
                (
                    "{} rows of probs are negative, NaN or do not sum to one",
                    "probabilities over the classes (dim 1)",
                    "pass logits.softmax(1), averaged over members as probabilities",
                ),
                base.LABELS_OUTSIDE,
            ),
        )
        base.require_seen(int(self.counts[0].sum()), self, "labelled examples")

    def compute(self) -> Any:
        """The metric called ``key`` of everything seen, a float64 scalar."""
        return self.values()[self.key]

    def values(self) -> dict[str, Tensor]:
        """Return every metric of this pass, as float64 scalars."""
        self.require_valid()
        total = self.counts[0].sum()
        nll, brier = self.sums / total
        return {
            "accuracy": self.counts[1].sum() / total.double(),
            "nll": nll,
            "brier": brier,
            "ece": (self.counts[1] - self.confidence).abs().sum() / total,
        }
