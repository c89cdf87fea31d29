"""Quality of class probabilities: accuracy and the two proper scores, NLL and Brier.

Everything takes ``probs`` (N, C) and ``labels`` (N,), or maps (N, C, H, W) and (N, H, W). The
probabilities of an ensemble are averaged over its members before they get here.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True, eq=False)
class ReliabilityBins:
    """The bars of a reliability diagram; ``confidence`` and ``accuracy`` are NaN in empty bins."""

    edges: Tensor
    """(B + 1,) float64: bin b is ``(edges[b], edges[b + 1]]``."""
    confidence: Tensor
    """(B,) float64: mean confidence of the bin's examples."""
    accuracy: Tensor
    """(B,) float64: share of the bin's examples that are right."""
    count: Tensor
    """(B,) int64: number of the bin's examples."""

    @property
    def ece(self) -> float:
        """The expected calibration error of these bins.

        >>> metrics = ClassificationMetrics()
        >>> metrics.update(torch.tensor([[0.8, 0.2], [0.8, 0.2]]), torch.tensor([0, 1]))
        >>> metrics.reliability().ece
        0.300...
        """
        gap = (self.accuracy - self.confidence).abs().nan_to_num(0)
        return float((gap * self.count).sum() / self.count.sum())


class ClassificationMetrics(base.StreamingMetric):
    """Accuracy, NLL, Brier score and ECE together, in one pass and bounded memory.

    State: ``counts`` (2, bins) = examples and correct ones, ``confidence`` (bins,) = summed
    confidence, ``sums`` = summed NLL and Brier score, ``faults`` = rows that are no distribution
    and labels out of range.

    >>> metrics = ClassificationMetrics()
    >>> metrics.update(torch.tensor([[0.8, 0.2], [0.6, 0.4]]), torch.tensor([0, 1]))
    >>> {key: round(value, 4) for key, value in metrics.compute().items()}
    {'accuracy': 0.5, 'nll': 0.5697, 'brier': 0.4, 'ece': 0.4}

    Bad data is reported by ``compute``, so that ``update`` never waits for the GPU:

    >>> metrics.update(torch.tensor([[0.8, 0.2]]), torch.tensor([2]))
    >>> metrics.compute()
    Traceback (most recent call last):
    ValueError: 1 labels lie outside 0..C-1; expected class indices below the number of
    classes; name void labels with ignore_index=..., or remap the labels
    """

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

    def compute(self) -> dict[str, float]:
        """``{"accuracy", "nll", "brier", "ece"}`` of everything seen; ``ValueError`` if nothing."""
        self.require_valid()
        total = self.counts[0].sum()
        gaps = (self.counts[1] - self.confidence).abs().sum()
        sums = torch.stack([self.counts[1].sum(), *self.sums, gaps]) / total
        return dict(zip(("accuracy", "nll", "brier", "ece"), sums.tolist(), strict=True))

    def reliability(self) -> ReliabilityBins:
        """The bars of the reliability diagram of everything seen, on the CPU."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            self.require_valid()
            count, correct = self.counts.cpu()
            confidence = self.confidence.cpu()
        edges = bin_edges(self.num_bins, torch.float64)
        return ReliabilityBins(edges, confidence / count, correct.double() / count, count)


def classified(probs: Tensor, labels: Tensor, **options: Any) -> ClassificationMetrics:
    """The metrics of data at hand."""
    return base.seen_once(ClassificationMetrics(**options), probs, labels)


def accuracy(probs: Tensor, labels: Tensor, *, ignore_index: base.IgnoreIndex = None) -> float:
    r"""Share of examples whose most probable class is the label (the first one, on a tie).

    $$\frac{1}{N} \sum_i [\arg\max_c p_{ic} = y_i]$$

    >>> accuracy(torch.tensor([[0.8, 0.2], [0.6, 0.4]]), torch.tensor([0, 1]))
    0.5
    """
    return classified(probs, labels, ignore_index=ignore_index).compute()["accuracy"]


def nll(probs: Tensor, labels: Tensor, *, ignore_index: base.IgnoreIndex = None) -> float:
    r"""Mean negative log-likelihood of the labels, in nats.

    $$-\frac{1}{N} \sum_i \log \max(p_{i y_i}, 2^{-126})$$

    The floor is the smallest normal float32: a probability that underflowed to zero costs 87.3
    nats instead of making the whole data set infinite.

    >>> round(nll(torch.tensor([[0.8, 0.2], [0.6, 0.4]]), torch.tensor([0, 1])), 4)
    0.5697
    """
    return classified(probs, labels, ignore_index=ignore_index).compute()["nll"]


def brier(probs: Tensor, labels: Tensor, *, ignore_index: base.IgnoreIndex = None) -> float:
    r"""Mean Brier score, summed over the classes: 0 is perfect, 2 is sure and wrong.

    $$\frac{1}{N} \sum_i \sum_c \left(p_{ic} - [c = y_i]\right)^2$$

    >>> round(brier(torch.tensor([[0.8, 0.2], [0.6, 0.4]]), torch.tensor([0, 1])), 4)
    0.4
    """
    return classified(probs, labels, ignore_index=ignore_index).compute()["brier"]
