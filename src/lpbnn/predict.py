"""Prediction: the mean over members of the probabilities, and what the members disagree about."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lpbnn.losses import Task
from lpbnn.members import is_batched
from lpbnn.model import Model, as_call, at_least_one, batch_size

# Outputs that are made probabilities together: 16 MiB of them, more than any batch of labels has.
AT_ONCE = 2**22
# Members behind a shared part that one pass of it serves: their outputs are all there at its end.
TOGETHER = 16


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


def predict(
    model: nn.Module,
    x: Any,
    *,
    samples: int = 1,
    chunk: int | None = None,
    keep_members: bool = True,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Prediction:
    """Every example by every member, ``samples`` draws each; the probabilities are averaged.

    Args:
        x: the inputs: a tensor, a tuple of arguments or a mapping of keywords.
        samples: draws of each of the J members; S = samples * J.
        chunk: at most this many rows (member, example) go through the network at once. The answer
            does not depend on it.
        keep_members: False keeps running sums only, so memory does not grow with the samples.
        seed: makes the draws repeatable and leaves torch's generators as they were.
        generator: the same, seeded from this generator.

    An input counts as batched if its first dimension is that of the first input. The model is put in
    evaluation mode and given back as it was. One model serves one thread at a time: give each thread its
    own ``copy.deepcopy``.

    Example:
        >>> import lpbnn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = lpbnn.build(net, "lpbnn", members=4, num_data=100)
        >>> p = predict(model, torch.randn(5, 4), samples=2, seed=0)
        >>> tuple(p.probs.shape), tuple(p.members.shape), tuple(p.epistemic.shape)
        ((5, 3), (8, 5, 3), (5,))
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"predict takes a model that lpbnn.build or lpbnn.freeze returned; got "
            f"{type(model).__name__}. A plain network becomes one with lpbnn.build(net, 'mcp')."
        )
    samples = at_least_one("samples", samples)
    chunk = None if chunk is None else at_least_one("chunk", chunk)
    args, kwargs = as_call(x)
    batch = batch_size(args, kwargs)
    width, step = _portions(batch, model, samples, chunk)
    step = _unmistakable(step, batch, (args, kwargs))
    sums: list[_Sums] = []
    with evaluating(model), seeded(seed, generator, model), torch.no_grad():
        for run in model.passes(samples, width):
            for index, start in enumerate(range(0, batch, step)):
                part_args, part_kwargs = _part((args, kwargs), batch, slice(start, start + step))
                if index == len(sums):
                    sums.append(_Sums(model.task, keep_members))
                # The outputs are gone before the next pass makes its own.
                sums[index].add_all(model, run(*part_args, **part_kwargs))
    return _merge([part.finish() for part in sums])


def entropy(probs: Tensor, dim: int = 1) -> Tensor:
    r"""H(p) = -sum_c p_c log p_c in nats, with 0 log 0 = 0.

    Example:
        >>> round(entropy(torch.tensor([[0.5, 0.5]])).item(), 4)
        0.6931
    """
    return torch.special.entr(probs).sum(dim)


class _Sums:
    """Running sums over members; the members themselves only where they are to be kept."""

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
        """Values (s, b, ...): Welford's update, so that a large mean does not drown the variance."""
        if strangeness is not None:
            sum_ = strangeness.sum(0)
            self.strangeness = sum_ if self.strangeness is None else self.strangeness + sum_
        for i, value in enumerate(values):
            self.count += 1
            within = entropy(value) if variances is None else variances[i]
            if self.count == 1:
                self.mean, self.within = value.clone(), within.clone()
                self.between = torch.zeros((), dtype=value.dtype, device=value.device)
                continue
            delta = value - self.mean
            self.mean = self.mean.add_(delta, alpha=1 / self.count)
            self.within = self.within.add_((within - self.within), alpha=1 / self.count)
            if variances is not None:
                self.between = self.between + delta * (value - self.mean)
        if self.kept is not None:
            self.kept.append(values)
            if variances is not None:
                self.kept_variances.append(variances)

    def finish(self) -> Prediction:
        if self.task == "regression":
            epistemic = (self.between / self.count).expand_as(self.mean)
        else:
            epistemic = (entropy(self.mean) - self.within).clamp_min(0)  # rounding alone goes below
        members = torch.cat(self.kept) if self.kept is not None else None
        variances = torch.cat(self.kept_variances) if self.kept_variances else None
        own = None if self.strangeness is None else self.strangeness / self.count
        return Prediction(self.task, self.mean, self.within, epistemic, members, variances, own)


def _merge(parts: list[Prediction]) -> Prediction:
    if len(parts) == 1:
        return parts[0]

    def joined(name: str, dim: int) -> Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values, dim)

    return Prediction(
        parts[0].task,
        torch.cat([part.average for part in parts]),
        torch.cat([part.aleatoric for part in parts]),
        torch.cat([part.epistemic for part in parts]),
        joined("members", 1),
        joined("member_variances", 1),
        joined("strangeness", 0),
    )


def _portions(batch: int, model: Model, samples: int, chunk: int | None) -> tuple[int, int]:
    """Members and examples per pass, so that at most ``chunk`` rows are in the network at once."""
    members = model.members
    if chunk is None:
        draws = min(samples, max(1, TOGETHER // members)) if model.shared_part else 1
        return members * draws, batch
    if not model.in_rows:
        return members, min(chunk, batch)
    if batch * members <= chunk:  # room for several draws at once
        return min(members * samples, chunk // (batch * members) * members), batch
    width = min(members, chunk)
    return width, max(1, chunk // width)


def _unmistakable(step: int, batch: int, call: Any) -> int:
    """A portion of another size than any input that is no batch, so that none is taken for examples."""
    others = {
        leaf.shape[0]
        for leaf in tree_leaves(call)
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] != batch
    }
    if step >= batch:
        return step
    while step > 1 and (step in others or batch % step in others):
        step -= 1
    return step


def _part(call: Any, batch: int, rows: slice) -> Any:
    if rows.start == 0 and rows.stop >= batch:
        return call

    def cut(x: Tensor) -> Tensor:
        return x[rows] if is_batched(x, batch) else x

    return tree_map_only(Tensor, cut, call)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def seeded(seed: int | None, generator: torch.Generator | None, model: nn.Module) -> Iterator[None]:
    """Torch's global generators, seeded inside the block and as they were after it."""
    if seed is not None and generator is not None:
        raise ValueError("give seed or generator, not both.")
    if generator is not None:
        device = generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=device).item())
    if seed is None:
        yield
        return
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        # Not torch.manual_seed: it would reseed GPUs that this model does not use.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
