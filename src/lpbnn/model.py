"""What every method gives back: a network, a likelihood, and a way to be uncertain."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lpbnn.likelihoods import (
    Task,
    at_least_float32,
    check_batch,
    check_outputs,
    nll,
    split_gaussian,
)

if TYPE_CHECKING:
    from lpbnn.prediction import Prediction

Terms = dict[str, Tensor]
Pass = Callable[..., Tensor]
NOT_GIVEN: Any = object()
Readout = Callable[[Any], Tensor]


class Model(nn.Module):
    """The contract of all methods; ``lpbnn.predict`` and the engine know nothing else.

    A method defines ``outputs`` and, where it has them, its own ``loss``, ``passes``, ``likelihood``,
    ``score``, ``parameter_groups`` and hooks.

    Args:
        net: any module.
        task: "classification", "segmentation" or "regression".
        readout: takes the output tensor out of what ``net`` returns, where that is not a tensor.
        ignore_index: the label that does not count (void pixels).
        class_weights: one weight per class in the likelihood.
    """

    members: int = 1  # predictions that one pass gives
    stochastic: bool = True  # whether a second pass differs from the first
    in_rows: bool = True  # whether members go through the network together, as rows, or in turn
    # shared_part: members may go in turn behind a part that all of them share, so that one pass of it can
    # serve several draws. nothing_shared: a few members at a time compute nothing again.
    shared_part: bool = False
    nothing_shared: bool = False
    # Set by a training loop that calls every hook below: no method need tell of one that was forgotten.
    calls_all_hooks: bool = False

    def __init__(
        self,
        net: nn.Module,
        task: Task = "classification",
        readout: Readout | None = None,
        ignore_index: int = -100,
        class_weights: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.task: Task = task
        self.readout = readout or read_output
        self.ignore_index = ignore_index
        self.register_buffer("class_weights", class_weights, persistent=False)

    @property
    def networks(self) -> list[nn.Module]:
        """What a user gave, or would compile: the network, or those of an ensemble of several."""
        return [self.net]

    # The first argument stands alone so that torch.export's dynamic_shapes can be given as usual.
    def forward(self, x: Any = NOT_GIVEN, /, *args: Any, **kwargs: Any) -> Tensor:
        """Every member's outputs for every example, (S, B, C, ...); arguments are the network's."""
        return self.outputs(*(args if x is NOT_GIVEN else (x, *args)), **kwargs)

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        """What a method defines: the outputs (S, B, C, ...) of its members."""
        raise NotImplementedError

    def loss(self, x: Any, y: Tensor) -> Terms:
        """The training loss and its terms by name; ``loss`` is the sum of the others."""
        check_batch(x, y, self.task)
        args, kwargs = as_call(x)
        outputs = self.outputs(*args, **kwargs)
        return total(
            nll=self.nll(outputs.flatten(0, 1), y.repeat(len(outputs), *(1,) * (y.dim() - 1)))
        )

    def nll(self, outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean negative log-likelihood of rows of outputs."""
        return nll(outputs, y, self.task, weights, self.class_weights, self.ignore_index)  # type: ignore[arg-type]

    def passes(self, samples: int, width: int) -> Iterator[Pass]:
        """Functions of the inputs that each stand for up to ``width`` members, fixed while in use.

        Together they give ``samples`` draws of every member. A deterministic model gives one.
        """
        for _ in range(samples if self.stochastic else 1):
            yield self

    def likelihood(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Member outputs (S, B, ...) to what is averaged: probabilities, or means and variances."""
        check_outputs(outputs.shape[1:], self.task)
        if self.task == "regression":
            return split_gaussian(outputs)
        return at_least_float32(outputs).softmax(2), None

    def strangeness(self, outputs: Tensor) -> Tensor | None:
        """The method's own uncertainty of member outputs, (S, B, ...), where probabilities lose it."""
        return None

    def parameter_groups(
        self, weight_decay: float = 0.0, lr: float | None = None
    ) -> list[dict[str, Any]]:
        """Groups for any torch optimizer: what decays and what does not."""
        return [_group("slow", list(self.parameters()), weight_decay, lr)]

    def score(self, prediction: "Prediction") -> Tensor:
        """How strange each input looks, higher is stranger: 1 - max probability, or the variance."""
        if not hasattr(prediction, "strangeness"):
            raise TypeError(
                f"score takes what lpbnn.predict returned; got {type(prediction).__name__}. "
                "Fix: model.score(lpbnn.predict(model, x))."
            )
        if prediction.strangeness is not None:
            return prediction.strangeness
        if self.task == "regression":
            return prediction.total.sum(-1)
        return 1 - prediction.confidence

    def before_epoch(self, epoch: int, epochs: int) -> None:
        """A training loop calls this before every epoch (from 0) of ``epochs``: annealing.

        What it changes is best a buffer: a compiled step is compiled anew for another Python number.
        """

    def look_again(self) -> None:
        """Notice layers that were replaced; called before a compiled step, which does not look itself."""

    def phase(self) -> object:
        """What ``before_epoch`` sets beside buffers: a step recorded in one phase is replayed in no other.

        To be overridden with ``before_epoch``, in the same class; where it is not, every epoch is a phase
        of its own.
        """
        return None

    def after_step(self, lr: float | Tensor = 0.0) -> None:
        """A training loop calls this after every optimizer step, gradients still there, with its rate.

        The rate is a tensor where the step is recorded as a CUDA graph: to be computed with, not read.
        """

    def after_fit(self, batches: Iterable[tuple[Any, Tensor]]) -> None:
        """A training loop calls this at the end, with the training batches: last statistics."""


def _group(
    name: str, parameters: list[nn.Parameter], weight_decay: float, lr: float | None
) -> dict[str, Any]:
    group: dict[str, Any] = {"name": name, "params": parameters, "weight_decay": weight_decay}
    return group if lr is None else {**group, "lr": lr}


def two_groups(
    slow: list[nn.Parameter],
    fast: list[nn.Parameter],
    weight_decay: float,
    lr: float | None,
    fast_lr: float,
) -> list[dict[str, Any]]:
    """Slow weights decay; fast ones do not, and may learn at their own rate (a factor of ``lr``)."""
    if lr is None and fast_lr != 1:
        raise ValueError(
            f"the fast weights learn at {fast_lr} times the rate, so the rate must be known here. "
            "Fix: parameter_groups(weight_decay=..., lr=...), with the optimizer's own lr."
        )
    return [
        _group("slow", slow, weight_decay, lr),
        _group("fast", fast, 0.0, None if lr is None else lr * fast_lr),
    ]


def total(**terms: Tensor) -> Terms:
    """{"loss": the sum, ...the terms}."""
    return {"loss": reduce(add, terms.values()), **terms}


class LossStep(nn.Module):
    """``loss`` as a forward: what DistributedDataParallel, FSDP or Accelerate should wrap.

    They synchronise gradients of what goes through ``forward``; a call of ``ddp.module.loss`` goes past
    them.

    Example:
        >>> import lpbnn
        >>> step = LossStep(lpbnn.build(nn.Linear(3, 2), "mcp"))
        >>> sorted(step(torch.randn(4, 3), torch.tensor([0, 1, 1, 0])))
        ['loss', 'nll']
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any, y: Tensor) -> Terms:
        return self.model.loss(x, y)


def at_least_one(name: str, value: Any) -> int:
    """An integer of at least 1, of any integer type (numpy's too)."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 1:
        raise ValueError(f"{name}={value!r}: expected an integer of at least 1.")
    return value.__index__()


def walk(net: nn.Module, into: Callable[[nn.Module], bool] | None = None) -> Iterator[nn.Module]:
    """``net.modules()``, in its order and several times as fast, for what is walked at every call.

    Args:
        into: which modules to look below of; all of them by default.
    """
    stack, seen = [net], set()
    while stack:
        module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        yield module
        if module._modules and (into is None or into(module)):
            stack += [child for child in reversed(module._modules.values()) if child is not None]


def as_call(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the network takes it: a tensor, a tuple of arguments, or a mapping of keywords."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return tuple(x) if isinstance(x, tuple | list) else (x,), {}


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The examples in a call; refuses what no network of ours can take."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not tensors:
        given = ", ".join(type(value).__name__ for value in (*args, *kwargs.values())) or "nothing"
        raise TypeError(f"expected a tensor of inputs, got {given}. Fix: torch.as_tensor(...).")
    first = next((tensor for tensor in tensors if tensor.dim() > 0), None)
    if first is None:
        raise ValueError("expected a batch, got a tensor without dimensions. Fix: x.unsqueeze(0).")
    if torch.compiler.is_compiling():
        return first.shape[0]  # looking at sizes would make the compiler specialise
    if first.shape[0] == 0:
        raise ValueError(f"the batch is empty: inputs of shape {tuple(first.shape)}.")
    integers = first.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    if first.dtype == torch.uint8 or (integers and first.dim() >= 4):  # fewer dimensions: tokens
        raise TypeError(
            f"expected floating-point inputs, got {first.dtype} of shape {tuple(first.shape)}. "
            "Fix: x.float() / 255, then the normalisation the network was trained with."
        )
    return first.shape[0]


def read_output(output: Any) -> Tensor:
    """The tensor of outputs in what a network returns: itself, ["out"], ["logits"] or .logits."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        for key in ("out", "logits"):
            if key in output:
                return output[key]
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    given = (
        f"a mapping with {list(output)}" if isinstance(output, Mapping) else type(output).__name__
    )
    raise TypeError(
        f"the network returned {given}; expected a tensor, or a mapping with 'out' or 'logits'. "
        "Fix: build(..., readout=lambda output: output[0])."
    )
