"""What is kept of predictions, in bounded memory: metrics, scores, a histogram of confidences.

The batches of a data set may be seen by several processes. ``merge`` then gives each of them exactly what
one process would have found, to the last bit: counts are integers, numbers of single examples are put in
the order of the batches, and sums of real numbers are added up in that order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lpbnn.metrics._base import StreamingMetric
from lpbnn.predict import Prediction
from lpbnn.training.build import DataInfo
from lpbnn.training.ranks import Ranks

HISTOGRAM_BINS = 50


def _never() -> bool:
    return False


# Tallies meet by ``merge``: a metric that also waited for the other processes would wait for ever.
ALONE: dict[str, Any] = {"distributed_available_fn": _never}


class NotFinite(ValueError):
    """Predictions that are no numbers: the weights have diverged."""


@dataclass
class Seen:
    """What one process has seen: counts over its batches, and what depends on their order by batch."""

    counts: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Counts of the metrics."""
    sums: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Sums of real numbers, by the number of the batch."""
    rows: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Numbers of single examples, by the number of the batch."""


class Tally:
    """What any data set leaves: scores, a histogram of confidences, the mean uncertainties."""

    needs_members = False

    def __init__(self, info: DataInfo, device: torch.device) -> None:
        self.info, self.device = info, device
        self.seen = Seen(
            {
                "examples": torch.zeros((), dtype=torch.int64, device=device),
                "valid": torch.zeros((), dtype=torch.int64, device=device),
                "bad": torch.zeros((), dtype=torch.int64, device=device),
                "histogram": torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=device),
            }
        )
        self.held: dict[str, StreamingMetric] = {}
        self.sums: Mapping[str, Tensor] = {}  # over all batches, once they are merged

    def add(self, number: int, prediction: Prediction, targets: Tensor, scores: Tensor) -> None:
        """The batch that is the ``number``-th of the data set."""
        valid = self._valid(targets)
        self._count(prediction, targets, valid)
        rows = self._rows(prediction, scores)
        self.update(prediction, targets, scores)
        uncertainty = self._uncertainty(prediction, targets, valid)
        self.seen.sums[number] = {"uncertainty": uncertainty, **self._taken_out()}
        if rows:
            self.seen.rows[number] = rows

    def _valid(self, targets: Tensor) -> Tensor | None:
        """Which pixels count, as true and false; None: every example does."""
        return None

    def _count(self, prediction: Prediction, targets: Tensor, valid: Tensor | None) -> None:
        counts = self.seen.counts
        counts["examples"] += len(targets)
        counts["valid"] += len(targets) if valid is None else valid.sum()
        counts["bad"] += (~prediction.average.isfinite()).sum()
        if self.info.task == "regression":  # a variance may overflow where the mean does not
            counts["bad"] += (~prediction.aleatoric.isfinite()).sum()
        else:
            # NaN has no bin: it is counted as bad and put into the first.
            place = (prediction.confidence.nan_to_num(0) * HISTOGRAM_BINS).long().flatten()
            place = place.clamp(0, HISTOGRAM_BINS - 1)
            ones = torch.ones_like(place) if valid is None else valid.flatten().long()
            counts["histogram"].index_add_(0, place, ones)

    def _uncertainty(self, prediction: Prediction, targets: Tensor, valid: Tensor | None) -> Tensor:
        """Total, aleatoric and epistemic, summed over the examples or pixels that count."""
        kinds = (prediction.total, prediction.aleatoric, prediction.epistemic)
        if valid is None:
            return torch.stack([kind.double().mean() for kind in kinds]) * len(targets)
        return torch.stack([kind.double().where(valid, 0).sum() for kind in kinds])

    def _rows(self, prediction: Prediction, scores: Tensor) -> dict[str, Tensor]:
        """What is kept of every example; a score per pixel would not be bounded."""
        return {} if self.info.task == "segmentation" else {"scores": scores.float()}

    def update(self, prediction: Prediction, targets: Tensor, scores: Tensor) -> None:
        """Feed the task's metrics."""

    def _taken_out(self) -> dict[str, Tensor]:
        """The real sums that a batch left in the metrics, which are at zero again."""
        taken = {}
        for key, metric in self.held.items():
            for name, state in metric.metric_state.items():
                if isinstance(state, Tensor) and state.is_floating_point():
                    taken[f"{key}/{name}"] = state
                    setattr(metric, name, torch.zeros_like(state))
        return taken

    def merge(self, ranks: Ranks) -> None:
        """Everything that all processes saw, in each of them; to be called once, after the last batch."""
        seen = self.seen
        if ranks.world > 1:
            seen.states = {key: metric.metric_state for key, metric in self.held.items()}  # type: ignore[misc]
            everyone = ranks.gather(Seen(**tree_map_only(Tensor, Tensor.cpu, vars(seen))))
            for other in (one for rank, one in enumerate(everyone) if rank != ranks.rank):
                self._take_in(Seen(**tree_map_only(Tensor, self._here, vars(other))))
        total: dict[str, Tensor] = {}
        for _, sums in sorted(seen.sums.items()):
            for name, part in sums.items():
                total[name] = total[name] + part if name in total else part
        for key, metric in self.held.items():
            for name in metric.metric_state:
                if f"{key}/{name}" in total:
                    setattr(metric, name, total[f"{key}/{name}"])
        self.sums = total

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def _take_in(self, other: Seen) -> None:
        for name, count in other.counts.items():  # not in place: this one's were given away
            self.seen.counts[name] = self.seen.counts[name] + count
        for key, state in other.states.items():
            if key not in self.held:
                self._make(key, state)
            self.held[key].merge_state(state)
        self.seen.sums |= other.sums
        self.seen.rows |= other.rows

    def _make(self, key: str, state: dict[str, Tensor]) -> None:
        """A metric that another process has and this one, without a batch, has not."""
        raise KeyError(key)

    def rows(self, name: str) -> list[Tensor]:
        """The numbers of single examples, batch by batch, in the order of the data."""
        return [rows[name] for _, rows in sorted(self.seen.rows.items()) if name in rows]

    @property
    def scores(self) -> Tensor:
        """How strange each example looks, in the order of the data."""
        return torch.cat(self.rows("scores"))

    @property
    def histogram(self) -> Tensor:
        return self.seen.counts["histogram"]

    def check(self) -> None:
        """Raise ``NotFinite`` if a prediction was no number."""
        if bad := int(self.seen.counts["bad"]):
            raise NotFinite(
                f"{bad} predicted numbers of {self.info.name!r} are NaN or infinite: the model has "
                "diverged. Fix: train it with a smaller learning rate or with clipping."
            )

    def uncertainty(self) -> dict[str, float]:
        """Mean total, aleatoric and epistemic uncertainty (nats, or the normalised variance).

        Over the examples; of scenes over the pixels that count, each with the same weight.
        """
        names = ("total", "aleatoric", "epistemic")
        if "uncertainty" not in self.sums:
            return dict.fromkeys(names, 0.0)
        means = self.sums["uncertainty"] / self.seen.counts["valid"].clamp(min=1)
        return dict(zip(names, means.tolist(), strict=True))

    def metrics(self) -> dict[str, float]:
        """The metrics of the task."""
        self.check()
        return {}


T = TypeVar("T", bound=Tally)
