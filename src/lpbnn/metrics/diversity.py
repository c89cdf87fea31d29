r"""Do the members of an ensemble make different errors? Four numbers, averaged over the pairs.

For two members, $N_{11}$ examples are right for both, $N_{00}$ wrong for both,
$N_{10}$ and $N_{01}$ right for one only. A pair for which a ratio is 0/0 (two members
that never err, say) is left out of the mean; if all pairs are, the result is NaN.

Everything takes the members' probabilities (S, N, C), or maps (S, N, C, H, W); only their argmax
is used, so logits do as well.
"""

from typing import Any

import torch
from torch import Tensor

from lpbnn.metrics import _base as base


class DiversityMetrics(base.StreamingMetric):
    """Ratio-error, Q-statistic, correlation and disagreement, from S x S counts.

    >>> metrics = DiversityMetrics(members=2)
    >>> first = torch.eye(2)[[0, 0, 1, 1, 1]]  # right on 0, 1, 3
    >>> second = torch.eye(2)[[0, 1, 1, 0, 1]]  # right on 0 alone
    >>> metrics.update(torch.stack([first, second]), torch.tensor([0, 0, 0, 1, 0]))
    >>> {key: round(value, 4) for key, value in metrics.compute().items()}
    {'ratio_error': 1.0, 'q_statistic': 1.0, 'correlation': 0.4082, 'disagreement': 0.4}
    """

    both_right: Tensor
    agreements: Tensor
    examples: Tensor
    faults: Tensor

    def __init__(
        self, members: int, *, ignore_index: base.IgnoreIndex = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        base.require(
            members >= 2,
            f"{members} member(s) were given",
            "at least two, to have a pair",
            "predict with more members or samples",
        )
        self.members = members
        self.ignore_index = ignore_index
        self.add_sum("both_right", members, members)  # the diagonal: how often each is right
        self.add_sum("agreements", members, members)
        self.add_sum("examples")
        self.add_sum("faults", 2)

    def update(self, members: Tensor, labels: Tensor) -> None:
        """Add a batch: ``members`` (S, N, C) or (S, N, C, H, W), ``labels`` (N,) or (N, H, W)."""
        base.check_floating("members", members)
        base.require(
            members.ndim >= 3 and len(members) == self.members,
            f"members has shape {tuple(members.shape)}",
            f"(S, N, C) or (S, N, C, H, W) with S = {self.members}",
            "pass the probabilities of every member, stacked along dim 0",
        )
        base.check_probs(members[0], labels, "members[0]")
        for some, of_them in base.pieces(members.detach(), labels, batch=1):
            self._add(some, of_them.long())

    def _add(self, members: Tensor, labels: Tensor) -> None:
        kept = base.kept(labels, self.ignore_index)
        top, predictions = members.max(2)
        nan = (kept & top.isnan()).sum()
        outside = (kept & ((labels < 0) | (labels >= members.shape[2]))).sum()
        right = (predictions == labels) & kept
        # Row by row rather than as a matrix product: exact under autocast, and S is small.
        both = torch.stack([(right & row).flatten(1).sum(1) for row in right])
        same = torch.stack([((predictions == row) & kept).flatten(1).sum(1) for row in predictions])

        faults = torch.stack([nan, outside])
        self.add(both_right=both, agreements=same, examples=kept.sum(), faults=faults)

    def compute(self) -> dict[str, float]:
        """``{"ratio_error", "q_statistic", "correlation", "disagreement"}``, means over pairs."""
        base.require_none(
            self.faults,
            (
                ("{} predictions are NaN", "probabilities", "check the members' outputs"),
                base.LABELS_OUTSIDE,
            ),
        )
        base.require_seen(int(self.examples), self, "labelled examples")
        first, second = torch.triu_indices(self.members, self.members, 1)
        pairs, alone = self.both_right.double().cpu(), self.both_right.diagonal().double().cpu()
        n11 = pairs[first, second]
        n10, n01 = alone[first] - n11, alone[second] - n11
        n00 = int(self.examples) - n11 - n10 - n01
        product, cross = n11 * n00, n10 * n01
        margins = (n11 + n10) * (n01 + n00) * (n11 + n01) * (n10 + n00)
        agreement = self.agreements.double().cpu()[first, second] / int(self.examples)
        per_pair = {
            "ratio_error": (n10 + n01) / n00,
            "q_statistic": (product - cross) / (product + cross),
            "correlation": (product - cross) / margins.sqrt(),
            "disagreement": 1 - agreement,
        }
        return {key: float(values.nanmean()) for key, values in per_pair.items()}


def _diversity(members: Tensor, labels: Tensor, ignore_index: base.IgnoreIndex) -> dict[str, float]:
    count = len(members) if isinstance(members, Tensor) and members.ndim else 2
    metric = DiversityMetrics(count, ignore_index=ignore_index)
    return base.seen_once(metric, members, labels).compute()


def ratio_error(members: Tensor, labels: Tensor, *, ignore_index: base.IgnoreIndex = None) -> float:
    r"""Errors of one member alone per error of both; higher is more diverse.

    $$(N_{10} + N_{01}) / N_{00}$$

    Infinite when a pair errs, but never together.

    >>> members = torch.eye(2)[torch.tensor([[0, 0, 1], [0, 1, 1]])]
    >>> ratio_error(members, torch.tensor([0, 0, 0]))
    1.0
    """
    return _diversity(members, labels, ignore_index)["ratio_error"]


def q_statistic(members: Tensor, labels: Tensor, *, ignore_index: base.IgnoreIndex = None) -> float:
    r"""Yule's Q of the two members' correctness, in [-1, 1]; lower is more diverse.

    $$\frac{N_{11} N_{00} - N_{10} N_{01}}{N_{11} N_{00} + N_{10} N_{01}}$$

    >>> members = torch.eye(2)[torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])]
    >>> q_statistic(members, torch.tensor([0, 0, 0, 0]))
    0.0
    """
    return _diversity(members, labels, ignore_index)["q_statistic"]


def correlation(members: Tensor, labels: Tensor, *, ignore_index: base.IgnoreIndex = None) -> float:
    r"""Pearson correlation of the two members' error vectors, in [-1, 1]; lower is more diverse.

    $$
    \frac{N_{11} N_{00} - N_{10} N_{01}}
    {\sqrt{(N_{11}+N_{10}) (N_{01}+N_{00}) (N_{11}+N_{01}) (N_{10}+N_{00})}}
    $$

    >>> members = torch.eye(2)[torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])]
    >>> correlation(members, torch.tensor([0, 0, 0, 0]))
    1.0
    """
    return _diversity(members, labels, ignore_index)["correlation"]


def disagreement(members: Tensor) -> float:
    r"""Share of examples to which two members give different labels; higher is more diverse.

    $$\frac{1}{N} \sum_i [\hat y_i^{(1)} \ne \hat y_i^{(2)}]$$

    Needs no labels, so it can be taken on out-of-distribution data as well.

    >>> disagreement(torch.eye(2)[torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])])
    0.25
    """
    base.check_floating("members", members)
    shape = members.shape[1:2] + members.shape[3:]
    labels = torch.zeros(shape, dtype=torch.int64, device=members.device)
    return _diversity(members, labels, None)["disagreement"]
