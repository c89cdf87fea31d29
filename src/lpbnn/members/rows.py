r"""The member axis: how a batch and an ensemble share the first dimension.

Rows are **member-major**. A batch of B examples expanded to J members has the rows

    (member 0, example 0), (member 0, example 1), ..., (member 1, example 0), ...

so row = member * (rows / J) + position, and ``gather`` is a reshape. There are two modes:

- ``repeat``: every member sees every example; J * B rows, position = example.
- ``split``: every member sees its own slice of ceil(B / J) examples. If J does not divide B, the first
  examples are assigned a second time, so that no member is left without examples, and ``row_weights``
  makes every example count once in the mean.

Example:
    >>> import torch
    >>> x = torch.tensor([10, 20, 30])
    >>> expand_batch(x, members=2).tolist()
    [10, 20, 30, 10, 20, 30]
    >>> expand_batch(x, members=2, mode="split").tolist()
    [10, 20, 30, 10]
    >>> gather(expand_batch(x, members=2), members=2).tolist()
    [[10, 20, 30], [10, 20, 30]]
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

BatchMode = Literal["repeat", "split"]
BATCH_MODES: tuple[str, ...] = get_args(BatchMode)
# Torch's names of (queries, keys) masks that all examples share; padding masks have a row per example.
ATTENTION_MASKS = ("src_mask", "tgt_mask", "memory_mask", "attn_mask")


class Argument(NamedTuple):
    """An argument of a network that is special, by position and name.

    Args:
        kind: "mask", an attention mask by torch's names; "other mask", a mask by any name in a network with
            attention; "shared", which was seen to have no row per example.
    """

    position: int  # -1: by name only
    name: str
    kind: Literal["mask", "other mask", "shared"] = "mask"


MaskArguments = Sequence[Argument]


def rows_needed(batch: int, members: int, mode: BatchMode = "repeat") -> int:
    """Return how many rows ``expand_batch`` makes of ``batch`` examples: a multiple of ``members``."""
    return batch * members if mode == "repeat" else -(-batch // members) * members


def expand_batch(x: Tensor, members: int, mode: BatchMode = "repeat") -> Tensor:
    """Expand a batch (B, ...) to member-major rows (rows, ...)."""
    batch = x.shape[0]
    if mode == "repeat":
        return torch.cat([x] * members) if members > 1 else x  # cat keeps channels_last
    if batch % members == 0:
        return x
    return x[torch.arange(rows_needed(batch, members, mode), device=x.device) % batch]


def gather(rows: Tensor, members: int) -> Tensor:
    """Return member-major rows (J * n, ...) as (J, n, ...): a view, never a copy."""
    return rows.view(members, rows.shape[0] // members, *rows.shape[1:])  # quicker than unflatten


def member_examples(member: int, batch: int, members: int) -> list[int]:
    """Return the examples that ``expand_batch`` assigns to a member in the mode ``split``.

    Example:
        >>> member_examples(1, batch=3, members=2)
        [2, 0]
    """
    size = rows_needed(batch, members, "split") // members
    return [i % batch for i in range(member * size, (member + 1) * size)]


def row_weights(batch: int, members: int, mode: BatchMode, device: torch.device) -> Tensor | None:
    """Return the weights of the rows that make each example count once; None if all are equal.

    Example:
        >>> row_weights(3, 2, "split", torch.device("cpu")).tolist()
        [0.5, 1.0, 1.0, 0.5]
    """
    if mode == "repeat" or batch % members == 0:
        return None
    # Counted by hand: torch.bincount would wait for a GPU.
    rows = rows_needed(batch, members, mode)
    example = torch.arange(rows, device=device) % batch
    return 1.0 / (rows // batch + (example < rows % batch))


def is_batched(x: Tensor, batch: int, masks: Sequence[Tensor] = ()) -> bool:
    """Return True if an input holds the examples: if its first dimension is the batch.

    The attention ``masks`` never do, however long their sequences are.
    """
    if x.dim() == 0 or x.shape[0] != batch or isinstance(x, nn.Parameter):
        return False
    return not masks or all(x is not mask for mask in masks)


def batched(tree: Any, batch: int, masks: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return the tensors of a nested structure that hold the examples."""
    leaves = tree_leaves(tree)
    return [x for x in leaves if isinstance(x, Tensor) and is_batched(x, batch, masks)]


def expand_tree(
    tree: Any,
    batch: int,
    members: int,
    mode: BatchMode = "repeat",
    masks: Sequence[Tensor] = (),
) -> Any:
    """Expand every tensor in a nested structure whose first dimension is the batch, except ``masks``."""

    def expand(x: Tensor) -> Tensor:
        return expand_batch(x, members, mode) if is_batched(x, batch, masks) else x

    return tree_map_only(Tensor, expand, tree)


def copy_tensors(tree: Any) -> Any:
    """Return a nested structure with its tensors in memory of their own, for code that changes them.

    Parameters stay: they are learned, and a copy would be another one.
    """
    return tree_map_only(Tensor, lambda x: x if isinstance(x, nn.Parameter) else x.clone(), tree)


def take_examples(
    arguments: "MaskArguments",
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: int,
    examples: slice | Sequence[int],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call with some of its examples, in every tensor that holds them.

    Attention masks stay, unless they have a row per example and head: these rows go with the examples.

    Example:
        >>> take_examples([], (torch.tensor([10, 20, 30]),), {}, batch=3, examples=[2, 0])
        ((tensor([30, 10]),), {})
    """
    chosen = examples if isinstance(examples, slice) else list(examples)
    masks = find_masks(arguments, args, kwargs)
    head_masks = find_head_masks(arguments, args, kwargs, batch)

    def take(x: Tensor) -> Tensor:
        if any(x is mask for mask in head_masks):
            return x.unflatten(0, (batch, -1))[chosen].flatten(0, 1)
        return x[chosen] if is_batched(x, batch, masks) else x

    return tree_map_only(Tensor, take, (args, kwargs))


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
    return [
        Argument(i, name, "mask" if name in masks else "other mask")
        for i, name in enumerate(_parameter_names(module))
        if name in masks or (attends and "mask" in name)
    ]


def shared_arguments(
    module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], batch: int
) -> list[Argument]:
    """Return the arguments of a call that hold no examples: they have no row for each, nor several.

    They hold none in later calls either, even if a batch has by chance as many examples as they have rows.

    Example:
        >>> shared_arguments(
        ...     nn.Bilinear(2, 2, 1), (torch.zeros(4, 2), torch.zeros(3, 2)), {}, batch=4
        ... )
        [Argument(position=1, name='input2', kind='shared')]
    """
    names = _parameter_names(module)
    given = [(i, names[i] if i < len(names) else "", value) for i, value in enumerate(args)]
    given += [(names.index(n) if n in names else -1, n, value) for n, value in kwargs.items()]
    return [
        Argument(i, name, "shared")
        for i, name, value in given
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] % batch
    ]


def call_kind(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return which arguments a call has: how many dimensions each tensor, and the value of each flag.

    Calls of one kind take the same way through a network, if its code does not look at sizes or values.

    Example:
        >>> call_kind((torch.zeros(8, 5), None), {"mask": torch.zeros(8, 5, 5), "causal": True})
        '0:2 mask:3 causal:True'
    """
    return " ".join(
        f"{name}:{leaf if isinstance(leaf, bool) else leaf.dim()}"
        for name, value in (*enumerate(args), *kwargs.items())
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor | bool)
    )


def _parameter_names(module: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # no Python function
        return []


def find_masks(
    arguments: MaskArguments, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the tensors of a call that hold no examples: attention masks (time, time), and shared ones.

    Oblong masks may be padding masks (batch, time), in a module that gives these the same name.
    """
    if not arguments:
        return []
    return [
        value
        for value, kind in _given(arguments, args, kwargs)
        if kind == "shared"
        or (kind == "mask" and value.dim() == 2 and value.shape[0] == value.shape[1])
    ]


def find_head_masks(
    arguments: MaskArguments, args: Sequence[Any], kwargs: dict[str, Any], batch: int
) -> list[Tensor]:
    """Return the attention masks with a row per example and head, (batch * heads, queries, keys)."""
    return [
        value
        for value, kind in _given(arguments, args, kwargs)
        if kind != "shared"
        and value.dim() == 3
        and value.shape[0] != batch
        and value.shape[0] % batch == 0
    ]


def _given(
    arguments: MaskArguments, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[tuple[Tensor, str]]:
    """Return the tensors of a call that are special arguments, and of which kind."""
    given = []
    for i, name, kind in arguments:
        value = args[i] if 0 <= i < len(args) else kwargs.get(name)
        if isinstance(value, Tensor):
            given.append((value, kind))
    return given
