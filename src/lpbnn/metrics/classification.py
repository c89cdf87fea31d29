"""Quality of class probabilities: accuracy and the two proper scores, NLL and Brier.

Everything takes ``probs`` (N, C) and ``labels`` (N,), or maps (N, C, H, W) and (N, H, W). The
probabilities of an ensemble are averaged over its members before they get here.
"""

from torch import Tensor

from lpbnn.metrics import _base as base
from lpbnn.metrics._tally import ProbabilityTally
from lpbnn.metrics.calibration import ReliabilityBins, reliability_of


class ClassificationMetrics(ProbabilityTally):
    """Accuracy, NLL, Brier score and ECE together, in one pass and bounded memory.

    >>> import torch
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

    def compute(self) -> dict[str, float]:
        """``{"accuracy", "nll", "brier", "ece"}`` of everything seen; ``ValueError`` if nothing."""
        return {key: float(value) for key, value in self.values().items()}

    def reliability(self) -> ReliabilityBins:
        """The bars of the reliability diagram of everything seen, on the CPU."""
        return reliability_of(self)


class Accuracy(ProbabilityTally):
    """Streaming `accuracy`."""

    key = "accuracy"
    higher_is_better: bool | None = True


class NLL(ProbabilityTally):
    """Streaming `nll`."""

    key = "nll"
    higher_is_better: bool | None = False


class Brier(ProbabilityTally):
    """Streaming `brier`."""

    key = "brier"
    higher_is_better: bool | None = False


def accuracy(probs: Tensor, labels: Tensor, *, ignore_index: base.IgnoreIndex = None) -> float:
    r"""Share of examples whose most probable class is the label (the first one, on a tie).

    $$\frac{1}{N} \sum_i [\arg\max_c p_{ic} = y_i]$$

    >>> import torch
    >>> accuracy(torch.tensor([[0.8, 0.2], [0.6, 0.4]]), torch.tensor([0, 1]))
    0.5
    """
    return float(base.seen_once(Accuracy(ignore_index=ignore_index), probs, labels).compute())


def nll(probs: Tensor, labels: Tensor, *, ignore_index: base.IgnoreIndex = None) -> float:
    r"""Mean negative log-likelihood of the labels, in nats.

    $$-\frac{1}{N} \sum_i \log \max(p_{i y_i}, 2^{-126})$$

    The floor is the smallest normal float32: a probability that underflowed to zero costs 87.3
    nats instead of making the whole data set infinite.

    >>> import torch
    >>> round(nll(torch.tensor([[0.8, 0.2], [0.6, 0.4]]), torch.tensor([0, 1])), 4)
    0.5697
    """
    return float(base.seen_once(NLL(ignore_index=ignore_index), probs, labels).compute())


def brier(probs: Tensor, labels: Tensor, *, ignore_index: base.IgnoreIndex = None) -> float:
    r"""Mean Brier score, summed over the classes: 0 is perfect, 2 is sure and wrong.

    $$\frac{1}{N} \sum_i \sum_c \left(p_{ic} - [c = y_i]\right)^2$$

    >>> import torch
    >>> round(brier(torch.tensor([[0.8, 0.2], [0.6, 0.4]]), torch.tensor([0, 1])), 4)
    0.4
    """
    return float(base.seen_once(Brier(ignore_index=ignore_index), probs, labels).compute())
