"""A call of a network: its arguments, which of them hold the examples, and what was found for such calls.

A tensor holds the examples if its first dimension is the batch, that of the first tensor. Attention masks
and other shared inputs do not, whatever their size; they are found by their place and name.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lpbnn.members.rows import map_tensors

Execution = Literal["unchecked", "batched", "loop", "single"]
EXECUTIONS: tuple[str, ...] = get_args(Execution)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs of a call
# Torch's names of (queries, keys) masks that all examples share; padding masks have a row per example.
ATTENTION_MASKS = ("src_mask", "tgt_mask", "memory_mask", "attn_mask")


class Argument(NamedTuple):
    """An argument of a module that is or may be an attention mask, by position and name.

    Args:
        kind: "mask", by torch's names; "other mask", by any name in a network with attention.
    """

    position: int
    name: str
    kind: Literal["mask", "other mask"] = "mask"


class CallCheck(NamedTuple):
    """The result of ``lpbnn.check`` for calls of one kind (``call_kind``).

    Args:
        execution: "batched" if members may run as rows of one batch, "loop" if they must run one after
            another, "single" if the method runs whole networks anyway.
        independent_rows: False if the output of an example depends on the other examples, on their number
            or on its own place; None if that was not compared.
        shared_inputs: which tensors were seen to hold no examples, by their place among the tensors of the
            call; "" is the network's call, and the others are those of expansion points.
    """

    execution: Execution = "unchecked"
    independent_rows: bool | None = None
    shared_inputs: Mapping[str, Sequence[int]] = {}


class Call:
    """The arguments of one call of a network, and which of its tensors hold the examples.

    Args:
        args: the network's arguments.
        kwargs: its keyword arguments.
        mask_arguments: which arguments are masks or may be, by name (``mask_arguments``).
        check: what is known of calls of this kind.
        batch: the number of examples, if it is not that of the first tensor.
        masks: tensors that hold no examples, whatever their size.
        shared: the same, by their place among the tensors; None if that is not known: the names of
            ``mask_arguments`` decide then.

    Example:
        >>> from lpbnn.members.rows import expand_batch
        >>> call = Call((torch.tensor([10, 20, 30]),), {"scale": torch.ones(2)})
        >>> call.batch, call.map_examples(expand_batch, members=2)
        (3, ((tensor([10, 20, 30, 10, 20, 30]),), {'scale': tensor([1., 1.])}))
        >>> call.take([2, 0]).args
        (tensor([30, 10]),)
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mask_arguments: Sequence[Argument] = (),
        check: CallCheck | None = None,
        batch: int | None = None,
        masks: Sequence[Tensor] = (),
        shared: Sequence[int] | None = None,
    ) -> None:
        self.args, self.kwargs, self.mask_arguments = args, kwargs, mask_arguments
        self.check = check or CallCheck()
        self.batch = batch_size(args, kwargs) if batch is None else batch
        self.tensors = tensors_in(args, kwargs)
        self.masks = list(masks)
        if shared:
            self.masks += [x for i, x in enumerate(self.tensors) if i in shared]
        self.head_masks: list[Tensor] = []  # with a row per example and head
        for i, name, kind in mask_arguments:
            value = args[i] if i < len(args) else kwargs.get(name)
            if not isinstance(value, Tensor):
                continue
            # Oblong masks may be padding masks (batch, time), in a module that gives these the same name.
            square = value.dim() == 2 and value.shape[0] == value.shape[1]
            if kind == "mask" and square:
                if shared is None:
                    self.masks.append(value)
            elif (
                value.dim() == 3 and self.batch < value.shape[0] and not value.shape[0] % self.batch
            ):
                self.head_masks.append(value)

    @property
    def examples(self) -> list[Tensor]:
        """The tensors that hold the examples."""
        return [x for x in self.tensors if is_batched(x, self.batch, self.masks)]

    def map_examples(self, function: Callable[..., Tensor], **options: Any) -> Any:
        """Return (args, kwargs) with ``function`` applied to the tensors that hold the examples."""

        def apply(x: Tensor) -> Tensor:
            return function(x, **options) if is_batched(x, self.batch, self.masks) else x

        return map_tensors(apply, (self.args, self.kwargs))

    def take(self, examples: slice | Sequence[int]) -> "Call":
        """Return the call of some of the examples.

        Masks stay, unless they have a row per example and head: these rows go with the examples.
        """
        chosen = examples if isinstance(examples, slice) else list(examples)

        def take(x: Tensor) -> Tensor:
            if any(x is mask for mask in self.head_masks):
                return x.unflatten(0, (self.batch, -1))[chosen].flatten(0, 1)
            if not is_batched(x, self.batch, self.masks):
                return x
            if x.layout is torch.strided:
                return x[chosen]
            rows = range(self.batch)[chosen] if isinstance(chosen, slice) else chosen
            return x.to_sparse().index_select(0, torch.tensor([*rows], device=x.device))

        return self.replace(*map_tensors(take, (self.args, self.kwargs)))

    def replace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call":
        """Return the call with other tensors in the place of these."""
        return Call(
            args, kwargs, self.mask_arguments, self.check, shared=self.find_shared().get("")
        )

    def find_shared(self, key: str = "", rows: int = 0) -> dict[str, list[int]]:
        """Return which tensors hold no examples: they have no row for each, and are not expanded yet.

        They hold none in later calls either, even if a batch has by chance as many examples as they have rows.

        Args:
            key: of the call, in ``CallCheck.shared_inputs``.
            rows: of the expanded batch, if some tensors may be expanded.

        Returns:
            The places of these tensors, under the key; nothing if a mask has as many rows as there are
            examples, which may be one of padding.

        Example:
            >>> Call((torch.zeros(4, 2), {"table": torch.zeros(3, 2)}), {}).find_shared()
            {'': [1]}
        """
        found = []
        for i, x in enumerate(self.tensors):
            other = x.dim() > 0 and x.shape[0] not in (self.batch, rows)
            if other and all(x is not mask for mask in self.head_masks):
                found.append(i)
            elif any(x is mask for mask in self.masks):
                return {}
        return {key: found}


def call_kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return which arguments a call has: the dimensions of each tensor, the value of each flag or string.

    Calls of one kind take the same way through a network, if its code does not look at sizes or numbers.

    Example:
        >>> call_kind((torch.zeros(8, 5), None), {"mask": torch.zeros(8, 5, 5), "causal": True})
        '0:2 mask:3 causal:True'
        >>> call_kind((torch.zeros(8, 5), {"edges": torch.zeros(2, 9)}), {})
        '0:2 1.edges:2'
    """
    return " ".join(_describe_leaves("", dict(enumerate(args)) | kwargs))


def _describe_leaves(prefix: str, values: Mapping[Any, Any]) -> list[str]:
    """Return the path and the kind of every leaf: keys may choose the way through a network, too."""
    found = []
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Tensor | bool | str):
            found.append(f"{path}:{value.dim() if isinstance(value, Tensor) else value}")
        elif isinstance(value, Mapping | tuple | list):
            parts = value if isinstance(value, Mapping) else dict(enumerate(value))
            found += _describe_leaves(f"{path}.", parts)
    return found


def as_call(x: Any) -> Arguments:
    """Return a batch as arguments: a tensor, a tuple of arguments, or a mapping of keywords."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return tuple(x) if isinstance(x, tuple | list) else (x,), {}


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors of a call, in the order of its arguments."""
    values = (*args, *kwargs.values())
    return [x for value in values for x in tree_leaves(value) if isinstance(x, Tensor)]


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of examples in a call: the first dimension of its first tensor."""
    tensors = tensors_in(args, kwargs)
    if not tensors:
        given = ", ".join(type(value).__name__ for value in (*args, *kwargs.values())) or "nothing"
        raise TypeError(f"expected a tensor of inputs, got {given}. Fix: torch.as_tensor(...).")
    first = next(filter(torch.Tensor.dim, tensors), None)
    if first is None:
        raise ValueError("expected a batch, got a tensor without dimensions. Fix: x.unsqueeze(0).")
    if first.shape[0] == 0:
        raise ValueError(f"the batch is empty: inputs of shape {tuple(first.shape)}.")
    integers = first.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    if first.dtype == torch.uint8 or (integers and first.dim() >= 4):  # fewer dimensions: tokens
        raise TypeError(
            f"expected floating-point inputs, got {first.dtype} of shape {tuple(first.shape)}. "
            "Fix: x.float() / 255, then the normalisation the network was trained with."
        )
    return first.shape[0]


def is_batched(x: Tensor, batch: int, masks: Sequence[Tensor] = ()) -> bool:
    """Return True if a tensor holds the examples: its first dimension is the batch, and it is no mask."""
    if x.dim() == 0 or x.shape[0] != batch or isinstance(x, nn.Parameter):
        return False
    return not masks or all(x is not mask for mask in masks)


def copy_tensors(tree: Any) -> Any:
    """Return a nested structure with its tensors in memory of their own, for code that changes them.

    Parameters stay: they are learned, and a copy would be another one.
    """
    return map_tensors(lambda x: x if isinstance(x, nn.Parameter) else x.clone(), tree)


def raise_with_advice(advice: str, error: Exception) -> NoReturn:
    """Raise the error with the advice in its message, for logs that print no notes.

    Errors of a special kind, for example out of memory, are what other code looks for: they get a note.
    """
    if advice and type(error) in (RuntimeError, TypeError, ValueError):
        raise type(error)(f"{error}\n{advice}") from error
    if advice:
        error.add_note(advice)
    raise error


def mask_arguments(module: nn.Module) -> list[Argument]:
    """Return which arguments of a module are attention masks, or may be, by their names.

    Example:
        >>> mask_arguments(nn.TransformerEncoderLayer(4, 2))[0]
        Argument(position=1, name='src_mask', kind='mask')
    """
    # Elsewhere than in torch's own encoder a "mask" is as often one of padding, (batch, time).
    masks = (
        (*ATTENTION_MASKS, "mask") if isinstance(module, nn.TransformerEncoder) else ATTENTION_MASKS
    )
    attends = any(hasattr(inner, "num_heads") for inner in module.modules())
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # no Python function
        names = []
    return [
        Argument(i, name, "mask" if name in masks else "other mask")
        for i, name in enumerate(names)
        if name in masks or (attends and "mask" in name)
    ]
