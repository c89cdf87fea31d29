"""Prediction: average what the members say, and measure how much they disagree."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from lpbnn.convert.wrapper import Wrapper
from lpbnn.draws import PrivateDraws, seed_from
from lpbnn.extras import missing
from lpbnn.likelihoods import Categorical, Likelihood, MultiHead, Summary
from lpbnn.members.call import (
    Arguments,
    as_call,
    batch_size,
    copy_tensors,
    is_batched,
    raise_with_advice,
    tensors_in,
)
from lpbnn.members.rows import map_tensors
from lpbnn.model import LossStep, Pass, UncertainModel, at_least_one

if TYPE_CHECKING:
    import numpy as np

    from lpbnn.calibration.conformal import Conformal

# Outputs that are summarised together, 32 MiB of float32: more than any batch of labels has.
AT_ONCE = 2**23
WAS_CUT = (
    "predict(chunk=...) cut the batch: an input whose batch is not the first dimension (an initial state) "
    "was not cut with it. Fix: predict without chunk, or with smaller batches."
)
ONE_CALL = (
    "A tuple holds the arguments of one call of the network. Fix: iter(...) for several batches, batch[0] of "
    "a pair (inputs, targets)."
)
# Modules that hold a model and change nothing in its predictions; torch.compile's has "_orig_mod".
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel, LossStep)


@dataclass(frozen=True, repr=False)
class Prediction:
    r"""The averaged prediction of S members and its uncertainty, for every example (pixel, token).

    - Classes: ``probs`` are the mean probabilities; total = H(mean p), aleatoric = mean H(p), epistemic =
      their difference, the mutual information of label and member, in nats. Shapes (B, ...).
    - Several labels: the same for every label, (B, K, ...).
    - Numbers: ``mean``; aleatoric = mean variance, epistemic = variance of the means, total = their sum and
      ``std`` its root, all of the targets' shape (B, K, ...). A custom likelihood has ``values`` and the same
      uncertainties.

    Args:
        task: the likelihood's task.
        average: what the likelihood averages over members: ``probs``, ``mean`` or ``values``, (B, ...).
        aleatoric: the uncertainty that members see in the data.
        epistemic: the disagreement of the members.
        ood_score: (B, ...), higher for inputs unlike the training data: the method's own score, or the total
            uncertainty, summed over the numbers of an example; of pixels 1 - the largest probability.
        members: (S, B, ...), the values of every member; None if they were not kept.
        member_variances: (S, B, ...), the variances of every member of a regression.
        quantity: the name of ``average``.
        class_dim: the axis of ``average`` that sums to one; None if none does.

    Example:
        >>> import lpbnn
        >>> p = predict(lpbnn.build(nn.Linear(4, 3), "ensemble", members=5), torch.randn(2, 4))
        >>> p
        Prediction(classification, probs of shape (2, 3), members: 5)
        >>> torch.allclose(p.total, p.aleatoric + p.epistemic), p.labels.shape, p.ood_score.shape
        (True, torch.Size([2]), torch.Size([2]))
    """

    task: str
    average: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    ood_score: Tensor
    members: Tensor | None = None
    member_variances: Tensor | None = None
    quantity: Literal["probs", "mean", "values"] = "probs"
    class_dim: int | None = 1

    def __repr__(self) -> str:
        kept = "not kept" if self.members is None else len(self.members)
        shape = tuple(self.average.shape)
        return f"Prediction({self.task}, {self.quantity} of shape {shape}, members: {kept})"

    @property
    def total(self) -> Tensor:
        """The total uncertainty: aleatoric + epistemic."""
        return self.aleatoric + self.epistemic

    @property
    def values(self) -> Tensor:
        """The average over members, whatever the likelihood averages."""
        return self.average

    @property
    def probs(self) -> Tensor:
        """Mean probabilities: (B, C, ...) of classes, or (B, K, ...) of labels."""
        self._require("probs", "probs")
        return self.average

    @property
    def mean(self) -> Tensor:
        """Mean of the members' means, (B, K, ...)."""
        self._require("mean", "mean")
        return self.average

    @property
    def std(self) -> Tensor:
        """Standard deviation of the predicted numbers, in the targets' unit: the root of ``total``.

        Also of a likelihood of your own, if its ``summary`` returns numbers with their variance.

        >>> import lpbnn
        >>> p = predict(lpbnn.build(nn.Linear(4, 2), "mcp", task="regression"), torch.randn(3, 4))
        >>> p.std.shape, torch.allclose(p.std**2, p.aleatoric + p.epistemic)
        (torch.Size([3, 1]), True)
        """
        if self.quantity != "values":
            self._require("std", "mean")
        return self.total.sqrt()

    @property
    def labels(self) -> Tensor:
        """The most probable class, (B, ...); of several labels True for the probable ones, (B, K, ...)."""
        self._require("labels", "probs")
        return self.average > 0.5 if self.class_dim is None else self.average.argmax(self.class_dim)

    @property
    def confidence(self) -> Tensor:
        """The probability that each of ``labels`` is right, in its shape."""
        self._require("confidence", "probs")
        if self.class_dim is None:
            return torch.maximum(self.average, 1 - self.average)
        return self.average.amax(self.class_dim)

    def sets(self, conformal: "Conformal", level: float = 0.9) -> Tensor:
        """Return the conformal prediction sets: which classes are in, in the shape of ``probs``.

        A set contains the right class with a probability of ``level``.

        Args:
            conformal: from ``lpbnn.calibration.fit_conformal``.
            level: the coverage.
        """
        _require_conformal(conformal, level, "sets(conformal, level)")
        return conformal.sets(self, level)

    def interval(
        self, level: float = 0.9, conformal: "Conformal | None" = None
    ) -> tuple[Tensor, Tensor]:
        """Return lower and upper bounds of an interval around ``mean``, each in its shape.

        Args:
            level: the probability that a target lies inside.
            conformal: from ``lpbnn.calibration.fit_conformal``; the level then holds whether or not the
                model's variances are right. None takes the normal distribution of mean and total variance.
        """
        _require_conformal(conformal, level, "interval(level, conformal)", optional=True)
        if conformal is not None:
            return conformal.interval(self, level)
        if not 0 < level < 1:
            raise ValueError(f"level={level!r}: expected a share between 0 and 1, such as 0.9.")
        quantile = torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)).item()
        half = quantile * self.total.sqrt()
        return self.mean - half, self.mean + half

    def cpu(self) -> "Prediction":
        """Return the prediction on the CPU."""
        moved = {name: value.cpu() for name, value in self._tensors().items()}
        return replace(self, **moved)

    def to_dict(self) -> dict[str, Tensor]:
        """Return all tensors by name: the average by its own name, labels and confidence if there are any.

        Example:
            >>> import lpbnn
            >>> p = predict(lpbnn.build(nn.Linear(4, 3), "mcp"), torch.randn(2, 4))
            >>> list(p.to_dict())
            ['probs', 'labels', 'confidence', 'total', 'aleatoric', 'epistemic', 'ood_score', 'members']
        """
        found = {self.quantity: self.average}
        if self.quantity == "probs":
            found |= {"labels": self.labels, "confidence": self.confidence}
        tensors = self._tensors()
        del tensors["average"]
        return {**found, "total": self.total, **tensors}

    def numpy(self) -> "dict[str, np.ndarray]":
        """Return ``to_dict`` as NumPy arrays, for ``numpy.savez`` or a data frame."""
        return {
            name: (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
            for name, value in self.to_dict().items()
        }

    @staticmethod
    def cat(parts: "Sequence[Prediction]") -> "Prediction":
        """Join the predictions of several batches by the same members."""
        if not parts:
            raise ValueError("there are no predictions to join. Fix: at least one.")
        if wrong := [type(p).__name__ for p in parts if not isinstance(p, Prediction)]:
            raise TypeError(
                f"expected predictions, got {wrong[0]}. Fix: of several heads, join those of each."
            )
        kinds = {(p.task, p.quantity, p.class_dim) for p in parts}
        kept = {None if p.members is None else len(p.members) for p in parts}
        if len(kinds) > 1 or len(kept) > 1:
            raise ValueError(
                "predictions to join are of one task and have the same number of members; got "
                f"{', '.join(map(repr, parts[:5]))}."
            )
        return merge(list(parts))

    @staticmethod
    def from_outputs(
        outputs: Any,
        likelihood: Likelihood | None = None,
        keep_members: bool = True,
        allow_not_finite: bool = False,
    ) -> "Prediction":
        """Return the prediction that follows from outputs of members, for example those of an ONNX graph.

        A score that a method has of its own is not part of it.

        Args:
            outputs: (S, B, ...), a tensor or an array; of several heads a mapping of them, which gives a
                dict of predictions.
            likelihood: by default ``Categorical()``. The outputs of a frozen model go with the likelihood
                of that model: they are calibrated already.
            keep_members: False drops the members.
            allow_not_finite: as in ``predict``.

        Example:
            >>> import lpbnn
            >>> frozen, x = (
            ...     lpbnn.freeze(lpbnn.build(nn.Linear(4, 3), num_data=9)),
            ...     torch.randn(2, 4),
            ... )
            >>> p = Prediction.from_outputs(frozen(x).numpy(), frozen.likelihood)
            >>> torch.allclose(p.probs, predict(frozen, x).probs)
            True
        """
        likelihood = likelihood or Categorical()
        if isinstance(likelihood, MultiHead):
            if not isinstance(outputs, Mapping) or set(outputs) != set(likelihood.heads):
                raise ValueError(
                    f"expected a mapping with the outputs of each head: {', '.join(likelihood.heads)}."
                )
            options = {"keep_members": keep_members, "allow_not_finite": allow_not_finite}
            return {  # type: ignore[return-value]  # as in predict
                name: Prediction.from_outputs(outputs[name], head, **options)
                for name, head in likelihood.heads.items()
            }
        given = type(outputs).__name__
        with suppress(TypeError, ValueError, RuntimeError):
            outputs = torch.as_tensor(outputs)
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            given = str(outputs.dtype) if isinstance(outputs, Tensor) else given
            raise TypeError(
                f"expected outputs of members, floating-point numbers (S, B, ...); got {given}. Fix: a tensor "
                "or an array."
            )
        if outputs.dim() < 2 or not len(outputs):
            raise ValueError(
                f"expected outputs of members (S, B, ...), got {tuple(outputs.shape)}. Fix: "
                "outputs[None] for a single network."
            )
        sums = MemberSums(likelihood, keep_members)
        sums.add_summary(likelihood.summary(outputs), None)
        return flag_not_finite(sums.finish(), None, allow_not_finite)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _require(self, name: str, quantity: str) -> None:
        if self.quantity != quantity:
            instead = "total" if name in ("confidence", "std") else self.quantity
            raise AttributeError(f"a {self.task} prediction has no {name}; use {instead}.")


def _require_conformal(conformal: Any, level: Any, call: str, optional: bool = False) -> None:
    """Refuse arguments of another type, such as the two in the wrong order."""
    known = hasattr(conformal, "thresholds") or (optional and conformal is None)
    if not known or not isinstance(level, int | float):
        given = [type(value).__name__ for value in (conformal, level)]
        raise TypeError(
            f"expected conformal scores and a level; got {given[0]} and {given[1]}. Fix: {call}, with "
            "conformal = lpbnn.calibration.fit_conformal(p_held_out, y)."
        )


def predict(
    model: nn.Module,
    x: Any,
    *,
    samples: int = 1,
    chunk: int | None = None,
    keep_members: bool | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    allow_not_finite: bool = False,
    progress: bool = False,
) -> Prediction:
    """Predict every example with every member, ``samples`` draws each, and average.

    Args:
        model: what ``lpbnn.build`` or ``lpbnn.freeze`` returned. The model inside of ``torch.compile``,
            ``DataParallel``, ``DistributedDataParallel``, ``AveragedModel`` or ``LossStep`` is used
            directly. It runs in evaluation mode and gets its modes back.
        x: the inputs: a tensor, a tuple of arguments or a mapping of keywords. One of them is cut into
            parts with the batch if its first dimension is that of the first. Or a ``DataLoader``, a
            generator or another iterable of batches, each of them inputs or a pair (inputs, targets): they
            are moved to the model's device and predicted one after the other, by the same members if there
            is a seed, and the results are joined on the CPU.
        samples: draws of each of the J members; S = samples * J.
        chunk: at most this many rows (member, example) are in the network at once. The result does not
            depend on it.
        keep_members: False keeps running sums only, so memory does not grow with the samples. By default
            members are kept for one batch, and not for many.
        seed: makes the draws of the members repeatable. They come from generators of their own: torch's
            are neither read nor set, so threads do not disturb each other. What the network itself draws,
            in evaluation mode too, comes from torch's.
        generator: the same, seeded from this generator.
        allow_not_finite: False raises a ``ValueError`` if inputs or outputs are NaN or infinite. True gives
            these examples NaN for the prediction and its uncertainties, and an infinite OOD score.
        progress: show a bar over the batches.

    Returns:
        The prediction; for a network with several heads a dict of them, by name.

    Example:
        >>> import lpbnn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = lpbnn.build(net, "ensemble", members=4)
        >>> p = predict(model, torch.randn(5, 4))
        >>> tuple(p.probs.shape), tuple(p.members.shape), tuple(p.epistemic.shape)
        ((5, 3), (4, 5, 3), (5,))
    """
    if generator is not None:
        seed = seed_from(generator, seed)
    if not isinstance(x, Tensor) and holds_batches(x):
        options: dict[str, Any] = {
            "samples": samples,
            "chunk": chunk,
            "keep_members": bool(keep_members),
            "seed": seed,  # one for all batches: the members are the same networks
            "allow_not_finite": allow_not_finite,
        }
        return _predict_batches(unwrap(model), x, progress, options)
    if isinstance(x, Dataset):
        raise TypeError(
            f"expected inputs or batches of them; got a data set, {type(x).__name__}. Fix: "
            "DataLoader(dataset, batch_size=100)."
        )
    if isinstance(x, list):
        raise TypeError(
            f"expected inputs, or batches of them; got a list of {len(x)}. Fix: batch[0] of a pair (inputs, "
            "targets); tuple(...) for several arguments of the network; iter(...) for several batches."
        )
    if not isinstance(model, UncertainModel):
        model = unwrap(model)
    samples = at_least_one("samples", samples)
    chunk = None if chunk is None else at_least_one("chunk", chunk)
    keep = keep_members is not False
    inputs = as_call(x)
    batch = batch_size(*inputs)
    bad = not_finite(inputs, batch)
    if bad is not None and not allow_not_finite:
        raise _not_finite_error("inputs", bad)
    width, step = model.chunk_sizes(batch, samples, chunk)
    heads = model.likelihood.heads
    with model.evaluating(), torch.no_grad():
        parts = [inputs] if step >= batch else _cut(model, inputs, step)
        sums = {name: [MemberSums(head, keep) for _ in parts] for name, head in heads.items()}
        for run in seeded_passes(model, samples, width, seed):
            for i, part in enumerate(parts):
                # A network may change its inputs in place, and the next pass needs them as they are.
                args, kwargs = copy_tensors(part)
                try:
                    outputs = run(*args, **kwargs)
                except RuntimeError as error:
                    raise_with_advice(WAS_CUT if len(parts) > 1 else "", error)
                except TypeError as error:
                    raise_with_advice(ONE_CALL if len(args) > 1 else "", error)
                for name in heads:
                    head = outputs[name] if isinstance(outputs, Mapping) else outputs
                    sums[name][i].add(head, model.ood_score)
                outputs = head = None  # before the next pass makes its own
    found = {}
    for name, own in sums.items():
        prediction = merge([part.finish() for part in own])
        found[name] = flag_not_finite(prediction, bad, allow_not_finite)
    # The annotation is for the usual case, one head: a type checker cannot tell the two apart.
    return found if isinstance(model.likelihood, MultiHead) else found[""]  # type: ignore[return-value]


def _predict_batches(
    model: UncertainModel, batches: Iterable[Any], progress: bool, options: dict[str, Any]
) -> Prediction:
    """Predict batch after batch; what was predicted lies on the CPU."""
    if progress:
        try:
            from rich.progress import track
        except ModuleNotFoundError as error:
            raise missing(error) from error

        size = len(batches) if isinstance(batches, Sized) else None
        batches = track(batches, "predict", total=size)
    found: dict[str, list[Prediction]] = {}
    for number, batch in enumerate(batches):
        x = inputs_of(batch)
        x = tuple(x) if isinstance(x, list) else x  # a DataLoader makes lists of tuples
        try:
            p: Any = predict(model, to_device(x, model), **options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise_with_advice(_batch_advice(number, x), error)
        for name, head in (p if isinstance(p, dict) else {"": p}).items():
            _append(found.setdefault(name, []), head.cpu())
    if not found:
        raise ValueError(
            "there are no batches. Fix: a generator can be read only once; make a new one."
        )
    joined = {name: Prediction.cat(parts) for name, parts in found.items()}
    return joined.get("", joined)  # type: ignore[return-value]


def holds_batches(x: Any) -> bool:
    """Return True for a ``DataLoader`` and for any other iterable that is not the inputs of one call.

    Example:
        >>> holds_batches(iter([])), holds_batches(torch.zeros(2)), holds_batches((1, 2))
        (True, False, False)
    """
    if isinstance(x, DataLoader | Iterator):
        return True
    inputs = Tensor | tuple | list | Mapping | Dataset | str | bytes
    return isinstance(x, Iterable) and not isinstance(x, inputs) and not hasattr(x, "__array__")


def _append(parts: list[Prediction], part: Prediction) -> None:
    """Append a part, and join the last parts while that doubles them.

    Thousands of small tensors, each allocated between the large ones of a pass, would leave memory in
    pieces that no later pass can use: forty times the size of the predictions was seen.
    """
    parts.append(part)
    while len(parts) > 1 and len(parts[-1].average) >= len(parts[-2].average):
        last = parts.pop()
        parts[-1] = Prediction.cat([parts[-1], last])


def _batch_advice(number: int, x: Any) -> str:
    advice = f"This is batch {number}, counted from 0."
    if isinstance(x, Tensor):
        advice += f" Its inputs are {x.dtype} of shape {tuple(x.shape)}."
    if isinstance(x, Mapping):
        advice += (
            f" Its keys {', '.join(map(repr, x))} are the network's keywords. Fix: a generator that leaves out "
            "the others, for example ({'x': batch['x']} for batch in loader)."
        )
    return advice


def inputs_of(batch: Any) -> Any:
    """Return the inputs of a batch: itself, or the first of a pair (inputs, targets).

    Example:
        >>> inputs_of([torch.zeros(2, 3), torch.zeros(2)]).shape
        torch.Size([2, 3])
    """
    if isinstance(batch, tuple | list):
        if len(batch) in (1, 2):
            return batch[0]
        raise TypeError(
            f"a batch is the inputs, or a pair (inputs, targets); got a {type(batch).__name__} of "
            f"{len(batch)}. Fix: several inputs are a tuple or mapping of their own, ((a, b), y)."
        )
    return batch


def to_device(tree: Any, model: nn.Module) -> Any:
    """Return tensors on the device of the model's first parameter."""
    first = next(chain(model.parameters(), model.buffers()), None)
    if first is None:
        return tree
    if isinstance(tree, Mapping):  # torch looks into a dict, not into a tokenizer's BatchEncoding
        tree = dict(tree)
    return map_tensors(lambda t: t.to(first.device, non_blocking=True), tree)


def unwrap(model: nn.Module) -> UncertainModel:
    """Return the model inside of the wrappers that ``predict`` takes; refuse anything else.

    Example:
        >>> import lpbnn
        >>> model = lpbnn.build(nn.Linear(4, 3), "mcp")
        >>> unwrap(AveragedModel(LossStep(model))).task
        'classification'
    """
    inner = model
    while isinstance(inner, nn.Module) and not isinstance(inner, UncertainModel):
        names = ("_orig_mod", "module", "model") if isinstance(inner, WRAPPERS) else ("_orig_mod",)
        found = next((inner._modules[name] for name in names if name in inner._modules), None)
        if found is None:
            break
        inner = found
    if isinstance(inner, UncertainModel):
        return inner
    held = inner.named_modules() if isinstance(inner, nn.Module) else ()
    path = next((path for path, module in held if isinstance(module, UncertainModel)), None)
    advice = "A plain network becomes one with lpbnn.build(net, 'mcp')."
    if path is not None:
        advice = f"It holds one as {path!r}, around which it may compute more; give that one."
    elif isinstance(inner, nn.Module) and any(isinstance(m, Wrapper) for m in inner.modules()):
        advice = "Its layers were converted by lpbnn.build; give the model that build returned."
    raise TypeError(
        "expected a model that lpbnn.build or lpbnn.freeze returned; got "
        f"{type(inner).__name__}. {advice}"
    )


def _cut(model: UncertainModel, inputs: Arguments, step: int) -> list[Arguments]:
    """Return the inputs of every ``step`` examples; refuse examples that depend on each other."""
    call = model.independent_call(*inputs)
    # A part may not have as many rows as an input that is not a batch: it would be taken for one.
    others = {x.shape[0] for x in call.tensors if x.dim() > 0} - {call.batch}
    while step > 1 and (step in others or call.batch % step in others):
        step -= 1
    parts = [call.take(slice(start, start + step)) for start in range(0, call.batch, step)]
    return [(part.args, part.kwargs) for part in parts]


class MemberSums:
    """Running sums over members, for one part of the batch and one head; the members only if they are kept.

    Probabilities and entropies are plain sums until ``finish``. Values with variances are running means,
    by Welford's update, so that a large mean does not drown the variance. A map with many pixels is summed
    in strips, each with sums of its own: the probabilities of one member for a street scene, and what they
    are computed through, would take more memory than the network itself.
    """

    def __init__(self, likelihood: Likelihood, keep: bool) -> None:
        self.likelihood, self.keep, self.count = likelihood, keep, 0
        self.members: list[Tensor] = []  # if they are kept
        self.variances: list[Tensor] = []
        self.mean = self.within = self.between = torch.zeros(())
        self.own: Tensor | None = None  # sum of the method's own scores
        self.strips: list[MemberSums] = []
        self.dim = 0  # along which the strips lie

    def add(self, outputs: Tensor, score: Callable[[Tensor], Tensor | None]) -> None:
        """Add members by their outputs (s, b, ...).

        Args:
            outputs: of the members.
            score: the method's own score of outputs, (s, b, ...); None if it has none.
        """
        likelihood, sums, strips = self.likelihood, [self], (outputs,)
        count = -(-outputs[0].numel() // AT_ONCE)
        # The base class's score is one number for a whole map.
        by_cell = likelihood.cellwise and type(likelihood).ood_score is not Likelihood.ood_score
        if count > 1 and by_cell and likelihood.dim == 1 and outputs.dim() > 3 and not self.keep:
            self.dim = 3 - outputs.dim()  # the height, counted from the end
            strips = outputs.split(-(-outputs.shape[3] // count), 3)
            self.strips = self.strips or [MemberSums(likelihood, False) for _ in strips]
            sums = self.strips
        for own, strip in zip(sums, strips, strict=True):
            # The probabilities of all members for every pixel would be most of the memory.
            few = max(1, AT_ONCE // max(1, strip[0].numel()))
            for members in strip.split(few):
                own.add_summary(likelihood.summary(members), score(members))

    def add_summary(self, summary: Summary, own: Tensor | None) -> None:
        """Add members by their summary, and their own OOD scores (s, b, ...) if the method has any."""
        if own is not None:
            self.own = own.sum(0) if self.own is None else self.own + own.sum(0)
        if self.keep:
            self.members.append(summary.values)
            if summary.variances is not None:
                self.variances.append(summary.variances)
        # One member after the other: the sum is the same to the last bit however members are divided.
        for value, within in zip(summary.values, summary.aleatoric, strict=True):
            self.count += 1
            if self.count == 1:
                self.mean, self.within = value, within
                self.between = torch.zeros((), dtype=value.dtype, device=value.device)
            elif not self.likelihood.information:
                delta, share = value - self.mean, 1 / self.count
                self.mean = self.mean.add(delta, alpha=share)
                self.within = self.within.add(within - self.within, alpha=share)
                self.between = self.between + delta * (value - self.mean)
            elif self.count == 2:  # the first sum gets its own memory; the summary is not changed
                self.mean, self.within = self.mean + value, self.within + within
            else:
                self.mean, self.within = self.mean.add_(value), self.within.add_(within)

    def finish(self) -> Prediction:
        """Return the prediction of the members added."""
        if self.strips:
            return merge([strip.finish() for strip in self.strips], self.dim)
        likelihood, mean, within = self.likelihood, self.mean, self.within
        if likelihood.information:
            if self.count > 1:
                mean, within = mean.div_(self.count), within.div_(self.count)
            total = likelihood.total(mean)
            epistemic = (total - within).clamp_min(0)  # rounding alone goes below
        else:
            epistemic = (self.between / self.count).expand_as(mean)
            total = within + epistemic
        own = None if self.own is None else self.own / self.count
        return Prediction(
            task=likelihood.task,
            average=mean,
            aleatoric=within,
            epistemic=epistemic,
            ood_score=likelihood.ood_score(mean, total) if own is None else own,
            members=torch.cat(self.members) if self.members else None,
            member_variances=torch.cat(self.variances) if self.variances else None,
            quantity=likelihood.quantity,
            class_dim=likelihood.class_dim,
        )


def merge(parts: list[Prediction], dim: int = 0) -> Prediction:
    """Join predictions of parts of a batch (dimension 0), or of strips of its maps.

    Example:
        >>> import lpbnn
        >>> model, x = lpbnn.build(nn.Linear(4, 3), "mcp"), torch.randn(5, 4)
        >>> merge([predict(model, part) for part in x.split(2)]).probs.shape
        torch.Size([5, 3])
    """
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Any] = {}
    for field in fields(Prediction):
        found = [getattr(part, field.name) for part in parts]
        along = 1 if dim == 0 and field.name.startswith("member") else dim
        joined[field.name] = torch.cat(found, along) if isinstance(found[0], Tensor) else found[0]
    return Prediction(**joined)


def seeded_passes(
    model: UncertainModel, samples: int, width: int, seed: int | None
) -> Iterator[Pass]:
    """Yield ``model.passes(samples, width)``; what they draw comes from private generators, if seeded."""
    passes = model.passes(samples, width)
    if seed is None:
        yield from passes
        return
    draws = PrivateDraws(seed)
    while True:
        with draws:
            run = next(passes, None)
        if run is None:
            return
        # A pass that is the model itself draws when it is called.
        draws_later = run is model and model.stochastic
        yield partial(_call_within, draws, run) if draws_later else run


def _call_within(draws: PrivateDraws, run: Pass, *args: Any, **kwargs: Any) -> Any:
    with draws:
        return run(*args, **kwargs)


def not_finite(inputs: Arguments, batch: int) -> Tensor | None:
    """Return which examples hold NaN, or infinity in the first input; None if none do.

    Other inputs may hold infinity: masks that are added to a logit do.
    """
    bad, first = None, True
    for x in tensors_in(*inputs):
        if not is_batched(x, batch):
            continue
        numbers = x.is_floating_point() or x.is_complex()
        if numbers and not x.is_meta:  # a meta tensor has no values
            sparse = x.layout is not torch.strided
            values = (x := x.to_sparse().coalesce()).values() if sparse else x
            wrong = ~values.isfinite() if first else values.isnan()
            rows = wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong
            if sparse:  # from stored values to their rows
                wrong = torch.zeros(batch, dtype=torch.bool, device=x.device)
                rows = wrong.index_fill(0, x.indices()[0][rows], True)
            bad = rows if bad is None else bad | rows.to(bad.device)
        first = False
    return bad if bad is not None and bool(bad.any()) else None


def flag_not_finite(prediction: Prediction, bad: Tensor | None, allowed: bool) -> Prediction:
    """Return the prediction; its examples that are no numbers as NaN with an infinite score, or an error.

    Args:
        prediction: of a batch.
        bad: (B,), examples whose inputs are no numbers; None if there are none.
        allowed: False raises a ``ValueError`` if there are any.
    """
    p, names = prediction, ("average", "aleatoric", "epistemic", "ood_score")
    if p.average.is_meta:
        return p
    # A finite sum has no infinite terms; a sum that overflows leads to a closer look.
    total = p.average.sum() + p.aleatoric.sum() + p.epistemic.sum() + p.ood_score.sum()
    if bad is None and bool(total.isfinite()):
        return p
    wrong = torch.zeros(len(p.average), dtype=torch.bool, device=p.average.device)
    for name in names:
        values = ~getattr(p, name).isfinite()
        wrong |= values.flatten(1).any(1) if values.dim() > 1 else values
    if bad is not None:
        wrong |= bad.to(wrong.device)
    if not bool(wrong.any()):
        return p
    if not allowed:
        raise _not_finite_error("outputs", wrong)
    changed: dict[str, Any] = {}
    for name in names:
        values = getattr(p, name)
        shape = (-1, *(1,) * (values.dim() - 1))
        changed[name] = values.masked_fill(
            wrong.view(shape), math.inf if name == "ood_score" else math.nan
        )
    return replace(p, **changed)


def _not_finite_error(what: str, rows: Tensor) -> ValueError:
    numbers = rows.nonzero().flatten().tolist()
    fix = (
        "clean the data" if what == "inputs" else "check the weights: a training may have diverged"
    )
    more = ", ..." if len(numbers) > 8 else ""
    return ValueError(
        f"the {what} of {len(numbers)} of {len(rows)} examples are NaN or infinite: examples "
        f"{', '.join(map(str, numbers[:8]))}{more}. Fix: {fix}; or predict(..., allow_not_finite=True), "
        "which gives them the probability NaN and an infinite OOD score."
    )
