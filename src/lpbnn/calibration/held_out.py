"""Held-out outputs: what the members of a model return for data it was not trained on, with the labels."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpbnn.likelihoods import (
    Categorical,
    Likelihood,
    MultiHead,
    MultiLabel,
    member_axis,
    require_tensor,
)
from lpbnn.members.call import as_call, batch_size, copy_tensors
from lpbnn.members.rows import concatenate, map_tensors
from lpbnn.model import Outputs, UncertainModel, at_least_one
from lpbnn.precision import at_least_float32
from lpbnn.predict import seeded_passes, to_device

CELLS_PER_EXAMPLE = 2000  # pixels of one map that take part in a fit


class Cells(NamedTuple):
    """The outputs of members for N labelled examples (pixels, tokens), without their layout.

    Args:
        outputs: (S, N, C).
        labels: (N,) integers; with several labels (N, K) zeros and ones.
    """

    outputs: Tensor
    labels: Tensor


def batch_pairs(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield inputs and targets of every batch; refuse batches that are something else."""
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"expected batches (inputs, targets), as a DataLoader yields; got "
            f"{type(batches).__name__}. Fix: [(x, y)] for data that are one batch."
        )
    empty = True
    for batch in batches:
        empty = False
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            given = f"{type(batch).__name__}"
            if isinstance(batch, Mapping):
                given += f" with the keys {list(batch)}"
            elif isinstance(batch, tuple | list):
                given += f" of {len(batch)}"
            raise TypeError(
                f"expected batches (inputs, targets); got a {given}. Fix: [(x, y)] for data that are one "
                "batch; a generator that takes batches apart, for example ((batch['x'], batch['y']) for "
                "batch in loader)."
            )
        yield batch[0], batch[1]
    if empty:
        raise ValueError(
            "there are no batches. Fix: held-out data; a generator can be read only once."
        )


def member_outputs(model: UncertainModel, x: Any, samples: int, seed: int | None) -> Outputs:
    """Return the outputs (S, B, ...) of all members for a batch, before any scaling.

    They are those from which ``predict(model, x, samples=samples, seed=seed)`` averages.
    """
    samples = at_least_one("samples", samples)
    args, kwargs = as_call(x)
    width, _ = model.chunk_sizes(batch_size(args, kwargs), samples, None)
    parts = []
    with model.evaluating(), torch.no_grad():
        for run in seeded_passes(model, samples, width, seed):
            part_args, part_kwargs = copy_tensors((args, kwargs))
            parts.append(map_tensors(torch.clone, run(*part_args, **part_kwargs)))
    return concatenate(parts)


def require_classes(likelihood: Likelihood) -> "Categorical | MultiLabel":
    """Refuse a likelihood whose outputs are no logits of classes or labels."""
    if not isinstance(likelihood, Categorical | MultiLabel):
        raise TypeError(
            f"a calibration is fitted to the outputs of classes or labels; this is {likelihood.task}. Fix: "
            "for numbers, intervals by conformal prediction (lpbnn.calibration.fit_conformal); for several "
            "heads, a scaling of each (calibrate), or fit_scaling(outputs[name], labels[name])."
        )
    return likelihood


def to_cells(
    outputs: Tensor,
    labels: Any,
    likelihood: Likelihood,
    cells_per_example: int | None = None,
    generator: torch.Generator | None = None,
) -> Cells:
    """Return the labelled cells of a batch.

    Args:
        outputs: (S, B, ...), in the layout of the likelihood.
        labels: as the likelihood takes them; integers, not probabilities.
        likelihood: of classes or labels.
        cells_per_example: at most this many cells of a map, drawn at random; None takes all.
        generator: of the draw, on the CPU.
    """
    likelihood = require_classes(likelihood)
    require_tensor(outputs, "outputs")
    if outputs.dim() < 3:
        raise ValueError(
            f"expected outputs of members (S, B, C, ...), got {tuple(outputs.shape)}. Fix: "
            "outputs.unsqueeze(0) for a single network."
        )
    classes = outputs.movedim(member_axis(likelihood.dim), -1)
    if isinstance(likelihood, Categorical):
        labels = likelihood.check_targets(outputs[0], labels)
        if labels.is_floating_point():
            raise ValueError("a calibration needs labels, got probabilities. Fix: y.argmax(1).")
        labels = labels.to(outputs.device)
        counted = labels != likelihood.ignore_index
        wrong = counted & ((labels < 0) | (labels >= classes.shape[-1]))
        if bool(wrong.any()):
            raise likelihood.label_error(labels, classes.shape[-1])
    else:
        likelihood.nll(outputs[0], labels)  # refuses another shape
        labels = labels.to(outputs.device).movedim(likelihood.dim, -1)
        counted = torch.ones_like(labels[..., 0], dtype=torch.bool)
    chosen = choose_cells(counted, cells_per_example, generator)
    return Cells(
        at_least_float32(classes.flatten(1, -2)[:, chosen]),
        labels.flatten(0, counted.dim() - 1)[chosen],
    )


def choose_cells(counted: Tensor, most: int | None, generator: torch.Generator | None) -> Tensor:
    """Return the indices of the cells that count, at most ``most`` of each example."""
    if most is None or counted.dim() == 1 or counted[0].numel() <= most:
        return counted.flatten().nonzero().squeeze(1)
    noise = torch.rand(counted.shape, generator=generator).to(counted.device)
    best = noise.masked_fill(~counted, -1).flatten(1).topk(most)
    offsets = torch.arange(len(counted), device=counted.device).unsqueeze(1) * counted[0].numel()
    return (best.indices + offsets)[best.values >= 0]


def collect(
    model: UncertainModel,
    batches: Iterable[Any],
    samples: int,
    seed: int | None,
    cells_per_example: int | None,
) -> Cells:
    """Return the outputs of a model's members for held-out batches.

    Every batch is predicted by the same draws. Of a map at most ``cells_per_example`` labelled pixels are
    kept, so that memory grows with the examples and not with their size.
    """
    require_classes(model.likelihood)
    (cells,) = collect_heads(model, batches, samples, seed, cells_per_example).values()
    return cells


def collect_heads(
    model: UncertainModel,
    batches: Iterable[Any],
    samples: int,
    seed: int | None,
    cells_per_example: int | None,
) -> dict[str, Cells]:
    """Return what ``collect`` does for each head of classes or labels, by name; "" is the only one."""
    likelihood = model.likelihood
    several = isinstance(likelihood, MultiHead)
    heads = {
        name: head
        for name, head in likelihood.heads.items()
        if isinstance(head, Categorical | MultiLabel)
    }
    if not heads:
        require_classes(likelihood)
    generator = torch.Generator().manual_seed(0)
    parts: dict[str, list[Cells]] = {name: [] for name in heads}
    for x, y in batch_pairs(batches):
        outputs = member_outputs(model, to_device(x, model), samples, seed)
        if several and not (isinstance(y, Mapping) and heads.keys() <= y.keys()):
            raise TypeError(
                f"expected labels by the name of the head, {', '.join(heads)}; got {type(y).__name__}. Fix: "
                f"(inputs, {{{next(iter(heads))!r}: labels, ...}})."
            )
        for name, head in heads.items():
            own, labels = (outputs[name], y[name]) if several else (outputs, y)
            parts[name].append(to_cells(own, labels, head, cells_per_example, generator))
    return {
        name: Cells(
            torch.cat([part.outputs for part in own], 1), torch.cat([part.labels for part in own])
        )
        for name, own in parts.items()
    }
