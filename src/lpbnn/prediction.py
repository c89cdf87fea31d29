"""The answer and its uncertainty: running sums over members, and what they come to."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lpbnn.likelihoods import Task
from lpbnn.model import Model

# Outputs that are made probabilities together: 32 MiB of them, more than any batch of labels has.
AT_ONCE = 2**23


@dataclass(frozen=True, repr=False)
class Prediction:
    r"""The answer and its uncertainty, example by example (pixel by pixel for segmentation).

    Classification: ``probs`` is the mean over the S members; total = H(mean p),
    aleatoric = mean H(p), epistemic = their difference, the mutual information (nats).
    Regression: ``mean``; aleatoric = mean variance, epistemic = variance of the means, total = sum.
    """

    task: Task
    average: Tensor  # mean probabilities (B, C, ...), or mean of the means (B, K)
    aleatoric: Tensor
    epistemic: Tensor
    members: Tensor | None  # (S, B, C, ...) probabilities, or (S, B, K) means; None if not kept
    member_variances: Tensor | None = None  # regression only
    strangeness: Tensor | None = None  # the method's own uncertainty (B, ...), mean over members

    def __repr__(self) -> str:
        kept = "not kept" if self.members is None else len(self.members)
        shape = tuple(self.average.shape)
        return f"Prediction({self.task}, average of shape {shape}, members: {kept})"

    @property
    def total(self) -> Tensor:
        return self.aleatoric + self.epistemic

    @property
    def probs(self) -> Tensor:
        self._needs_classes("probs", "mean")
        return self.average

    @property
    def labels(self) -> Tensor:
        """The most probable class, (B, ...)."""
        self._needs_classes("labels", "mean")
        return self.average.argmax(1)

    @property
    def confidence(self) -> Tensor:
        """The probability of the label, (B, ...)."""
        self._needs_classes("confidence", "total")
        return self.average.amax(1)

    @property
    def mean(self) -> Tensor:
        if self.task != "regression":
            raise AttributeError(f"a {self.task} prediction has no mean; use probs.")
        return self.average

    def _needs_classes(self, name: str, instead: str) -> None:
        if self.task == "regression":
            raise AttributeError(f"a regression prediction has no {name}; use {instead}.")


def entropy(probs: Tensor, dim: int = 1) -> Tensor:
    r"""H(p) = -sum_c p_c log p_c in nats, with 0 log 0 = 0.

    Example:
        >>> round(entropy(torch.tensor([[0.5, 0.5]])).item(), 4)
        0.6931
    """
    return torch.special.entr(probs).sum(dim)


class Sums:
    """Running sums over members; the members themselves only where they are to be kept.

    Of probabilities they are plain sums until the end. ``mean`` and ``within`` of a regression are means at
    any time, by Welford's update, so that a large mean does not drown the variance.
    """

    def __init__(self, task: Task, keep: bool) -> None:
        self.task: Task = task
        self.kept: list[Tensor] | None = [] if keep else None
        self.kept_variances: list[Tensor] = []
        self.count = 0
        self.mean = self.within = self.between = torch.zeros(())
        self.strangeness: Tensor | None = None  # a sum until it is finished

    def add_all(self, model: Model, outputs: Tensor) -> None:
        """Outputs (s, b, ...) of members, made probabilities a few members at a time."""
        # Those of every member for every pixel of a street scene would be most of the memory.
        few = max(1, AT_ONCE // max(1, outputs[0].numel()))
        for part in outputs.split(few):
            self.add(*model.likelihood(part), model.strangeness(part))

    def add(self, values: Tensor, variances: Tensor | None, strangeness: Tensor | None) -> None:
        """Values (s, b, ...) of members, with their variances in a regression."""
        if strangeness is not None:
            sum_ = strangeness.sum(0)
            self.strangeness = sum_ if self.strangeness is None else self.strangeness + sum_
        if variances is None:
            self._add_probabilities(values)
        else:
            self._add_gaussians(values, variances)
            if self.kept is not None:
                self.kept_variances.append(variances)
        if self.kept is not None:
            self.kept.append(values)

    def _add_probabilities(self, values: Tensor) -> None:
        # One after the other, so that the sum is the same to the last bit however members are divided.
        for value, within in zip(values, entropy(values, 2), strict=True):
            if self.count == 0:
                self.mean, self.within = value, within
            elif self.count == 1:
                # The first sum has memory of its own; what was given is not changed.
                self.mean, self.within = self.mean + value, self.within + within
            else:
                self.mean, self.within = self.mean.add_(value), self.within.add_(within)
            self.count += 1

    def _add_gaussians(self, values: Tensor, variances: Tensor) -> None:
        for value, within in zip(values, variances, strict=True):
            self.count += 1
            if self.count == 1:
                self.mean, self.within = value.clone(), within.clone()
                self.between = torch.zeros((), dtype=value.dtype, device=value.device)
                continue
            delta = value - self.mean
            self.mean = self.mean.add_(delta, alpha=1 / self.count)
            self.within = self.within.add_((within - self.within), alpha=1 / self.count)
            self.between = self.between + delta * (value - self.mean)

    def finish(self) -> Prediction:
        if self.task == "regression":
            epistemic = (self.between / self.count).expand_as(self.mean)
        else:
            if self.count > 1:
                self.mean, self.within = self.mean.div_(self.count), self.within.div_(self.count)
            epistemic = (entropy(self.mean) - self.within).clamp_min(0)  # rounding alone goes below
        members = torch.cat(self.kept) if self.kept is not None else None
        variances = torch.cat(self.kept_variances) if self.kept_variances else None
        own = None if self.strangeness is None else self.strangeness / self.count
        return Prediction(self.task, self.mean, self.within, epistemic, members, variances, own)


class Strips:
    """Sums over the members for pictures, a strip of them at a time where their pixels are many.

    The probabilities of one member for a street scene, and what they are computed through, would take more
    memory than the network itself.
    """

    def __init__(self, task: Task, keep: bool) -> None:
        self.task: Task = task
        self.keep = keep
        self.parts: list[Sums] = []
        self.dim = 0

    def add(self, model: Model, outputs: Tensor) -> None:
        """Outputs (s, b, ...) of members."""
        strips: tuple[Tensor, ...] = (outputs,)
        if self.task == "segmentation" and not self.keep and outputs.dim() > 3:
            self.dim = 3 - outputs.dim()  # of a picture's height, from the end: so in every answer
            count = -(-outputs[0].numel() // AT_ONCE)
            strips = outputs.split(-(-outputs.shape[3] // count), 3)
        for i, strip in enumerate(strips):
            if i == len(self.parts):
                self.parts.append(Sums(self.task, self.keep))
            self.parts[i].add_all(model, strip)

    def finish(self) -> Prediction:
        return merge([part.finish() for part in self.parts], self.dim)


def merge(parts: list[Prediction], dim: int = 0) -> Prediction:
    """The answers to parts of a batch (dimension 0), or to strips of its pictures, as one."""
    if len(parts) == 1:
        return parts[0]

    joined: dict[str, Any] = {}
    for field in fields(Prediction):
        found = [getattr(part, field.name) for part in parts]
        along = 1 if dim == 0 and field.name.startswith("member") else dim
        joined[field.name] = torch.cat(found, along) if isinstance(found[0], Tensor) else found[0]
    return Prediction(**joined)
