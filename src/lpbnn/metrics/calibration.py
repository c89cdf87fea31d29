r"""Does a confidence of 0.8 mean right eight times in ten? ECE and the reliability diagram.

Bins are equal-width and closed above, $B_b = (\frac{b-1}{B}, \frac{b}{B}]$, with
$B = 15$; the confidence is the largest class probability.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lpbnn.metrics import _base as base
from lpbnn.metrics.classification import ReliabilityBins, bin_edges, classified


def ece(
    probs: Tensor, labels: Tensor, *, num_bins: int = 15, ignore_index: base.IgnoreIndex = None
) -> float:
    r"""Expected calibration error: the gap between confidence and accuracy, weighted by bin.

    $$
    \mathrm{ECE} = \sum_{b=1}^{B} \frac{|B_b|}{N}
    \left|\mathrm{acc}(B_b) - \mathrm{conf}(B_b)\right|
    $$

    ``probs`` is (N, C) or (N, C, H, W), ``labels`` (N,) or (N, H, W).

    >>> ece(torch.tensor([[0.8, 0.2], [0.8, 0.2]]), torch.tensor([0, 1]))
    0.300...
    """
    return classified(probs, labels, num_bins=num_bins, ignore_index=ignore_index).compute()["ece"]


def reliability(
    probs: Tensor, labels: Tensor, *, num_bins: int = 15, ignore_index: base.IgnoreIndex = None
) -> ReliabilityBins:
    r"""Per bin: mean confidence, accuracy and count, the bars of a reliability diagram.

    $$
    \mathrm{conf}(B_b) = \frac{1}{|B_b|} \sum_{i \in B_b} \max_c p_{ic}, \quad
    \mathrm{acc}(B_b) = \frac{1}{|B_b|} \sum_{i \in B_b} [\hat y_i = y_i]
    $$

    >>> bins = reliability(torch.tensor([[0.9, 0.1], [0.7, 0.3]]), torch.tensor([0, 1]), num_bins=4)
    >>> bins.confidence, bins.accuracy, bins.count
    (tensor([   nan,    nan, 0.7000, 0.9000], dtype=torch.float64),
     tensor([nan, nan, 0., 1.], dtype=torch.float64),
     tensor([0, 0, 1, 1]))
    """
    return classified(probs, labels, num_bins=num_bins, ignore_index=ignore_index).reliability()


def adaptive_ece(
    probs: Tensor, labels: Tensor, *, num_bins: int = 15, ignore_index: base.IgnoreIndex = None
) -> float:
    r"""ECE with bins of equally many examples, in the order of confidence.

    Equal-width bins of a sure classifier are nearly all empty, and its ECE is that of one bin; these are
    not. All data are sorted, so there is no streaming version.

    Nguyen, O'Connor: Posterior calibration and exploratory analysis for natural language processing
    models, EMNLP 2015.

    >>> probs = torch.tensor([[0.8, 0.2], [0.9, 0.1]])
    >>> round(
    ...     adaptive_ece(probs, torch.tensor([0, 1]), num_bins=2), 4
    ... )  # |1 - 0.8| / 2 + |0 - 0.9| / 2
    0.55
    """
    probs, labels = _checked_rows(probs, labels, num_bins, ignore_index)
    confidence, predicted = probs.max(1)
    confidence, order = confidence.sort()
    gaps = (predicted == labels)[order].double() - confidence
    parts = gaps.tensor_split(min(num_bins, len(gaps)))
    return sum(abs(float(part.sum())) for part in parts) / len(gaps)


def classwise_ece(
    probs: Tensor, labels: Tensor, *, num_bins: int = 15, ignore_index: base.IgnoreIndex = None
) -> float:
    r"""ECE of the probability of every class, not of the largest one alone; mean over the classes.

    $$
    \frac1C \sum_c \sum_b \frac{|B_{bc}|}{N} \left|\mathrm{freq}_c(B_{bc}) -
    \overline{p_c}(B_{bc})\right|
    $$

    Kull et al.: Beyond temperature scaling, NeurIPS 2019.

    >>> round(classwise_ece(torch.tensor([[0.8, 0.2], [0.8, 0.2]]), torch.tensor([0, 1])), 4)
    0.3
    """
    probs, labels = _checked_rows(probs, labels, num_bins, ignore_index)
    edges = bin_edges(num_bins, probs.dtype, probs.device)
    total = 0.0
    for c in range(probs.shape[1]):
        own = probs[:, c].contiguous()
        bins = torch.bucketize(own, edges).sub_(1).clamp_(0, num_bins - 1)
        total += float(base.tally(bins, (labels == c).double() - own, num_bins).abs().sum())
    return total / probs.numel()


def _checked_rows(
    probs: Tensor, labels: Tensor, num_bins: int, ignore_index: base.IgnoreIndex
) -> tuple[Tensor, Tensor]:
    """Return float64 rows (N, C) and labels (N,) that count, of the inputs of `ece`."""
    classified(probs, labels, num_bins=num_bins, ignore_index=ignore_index).require_valid()
    counted = base.kept(labels, ignore_index)
    return probs.detach().movedim(1, -1)[counted].double(), labels[counted].long()


def corruption_means(results: Iterable[Mapping[str, float]]) -> dict[str, float]:
    r"""cA and cE: accuracy and ECE averaged over the corruption sets, each set counting once.

    $$
    \mathrm{cA} = \frac{1}{K} \sum_k \mathrm{accuracy}_k, \quad
    \mathrm{cE} = \frac{1}{K} \sum_k \mathrm{ECE}_k
    $$

    ``results`` holds what `ClassificationMetrics` computed on each set (15 corruptions x 5
    severities: 75 sets).

    >>> corruption_means([{"accuracy": 0.9, "ece": 0.25}, {"accuracy": 0.5, "ece": 0.5}])
    {'ca': 0.7, 'ce': 0.375}
    """
    sets = list(results)
    base.require(
        all("accuracy" in one and "ece" in one for one in sets) and bool(sets),
        f"{len(sets)} results with keys {sorted({key for one in sets for key in one})}",
        "at least one result, each with 'accuracy' and 'ece'",
        "pass ClassificationMetrics().compute() of every corruption set",
    )
    return {
        short: math.fsum(one[key] for one in sets) / len(sets)
        for short, key in (("ca", "accuracy"), ("ce", "ece"))
    }
