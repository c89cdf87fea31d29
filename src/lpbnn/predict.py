"""Prediction: the mean over members of the probabilities, and what the members disagree about."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lpbnn.members.rows import is_batched, mask_places, masks_by_head, masks_given
from lpbnn.model import LossStep, Model, as_call, at_least_one, batch_size, walk
from lpbnn.prediction import Prediction, Strips, merge

# Members behind a shared part that one pass of it serves: their outputs are all there at its end.
TOGETHER = 16
# What a model may be given in, beside torch.compile's own wrapper.
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, LossStep)


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
    own ``copy.deepcopy``. Of a model in ``torch.compile`` or ``DistributedDataParallel`` the model itself
    is called, without them.

    Example:
        >>> import lpbnn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = lpbnn.build(net, "lpbnn", members=4, num_data=100)
        >>> p = predict(model, torch.randn(5, 4), samples=2, seed=0)
        >>> tuple(p.probs.shape), tuple(p.members.shape), tuple(p.epistemic.shape)
        ((5, 3), (8, 5, 3), (5,))
    """
    model = _unwrapped(model)
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
    places = mask_places(model.networks[0])
    masks = masks_given(places, args, kwargs)
    by_head = masks_by_head(places, args, kwargs, batch)
    sums: list[Strips] = []
    with evaluating(model), seeded(seed, generator, model), torch.no_grad():
        for run in model.passes(samples, width):
            for index, start in enumerate(range(0, batch, step)):
                part_args, part_kwargs = _part(
                    (args, kwargs), batch, slice(start, start + step), masks, by_head
                )
                if index == len(sums):
                    sums.append(Strips(model.task, keep_members))
                # The outputs are gone before the next pass makes its own.
                sums[index].add(model, run(*part_args, **part_kwargs))
    return merge([part.finish() for part in sums])


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of torch.compile, DataParallel, DistributedDataParallel or ``LossStep``."""
    while isinstance(model, nn.Module) and not isinstance(model, Model):
        names = ("_orig_mod", "module", "model") if isinstance(model, WRAPPERS) else ("_orig_mod",)
        inner = next((model._modules[name] for name in names if name in model._modules), None)
        if inner is None:
            break
        model = inner
    return model


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
    if model.nothing_shared:  # few members with all examples: each is nearer to a plain network
        return max(1, chunk // batch), min(batch, chunk)
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


def _part(
    call: Any, batch: int, rows: slice, masks: Sequence[Tensor], by_head: Sequence[Tensor]
) -> Any:
    if rows.start == 0 and rows.stop >= batch:
        return call

    def cut(x: Tensor) -> Tensor:
        if any(x is mask for mask in by_head):
            return x.unflatten(0, (batch, -1))[rows].flatten(0, 1)
        return x[rows] if is_batched(x, batch, masks) else x

    return tree_map_only(Tensor, cut, call)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in walk(model)]
    if not any(mode for _, mode in modes):
        yield  # as it is between most predictions: setting flags is slow
        return
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
