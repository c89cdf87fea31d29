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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

BatchMode = Literal["repeat", "split"]


def rows_needed(batch: int, members: int, mode: BatchMode = "repeat") -> int:
    """Return how many rows ``expand_batch`` makes of ``batch`` examples: a multiple of ``members``."""
    return batch * members if mode == "repeat" else -(-batch // members) * members


def expand_batch(x: Tensor, members: int, mode: BatchMode = "repeat") -> Tensor:
    """Expand a batch (B, ...) to member-major rows (rows, ...); also tensors of J members to several draws."""
    batch = x.shape[0]
    if mode == "repeat":
        return torch.cat([x] * members) if members > 1 else x  # cat keeps channels_last
    if batch % members == 0:
        return x
    return x[torch.arange(rows_needed(batch, members, mode), device=x.device) % batch]


def gather(rows: Tensor, members: int) -> Tensor:
    """Return member-major rows (J * n, ...) as (J, n, ...): a view, never a copy."""
    return rows.view(members, rows.shape[0] // members, *rows.shape[1:])  # quicker than unflatten


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a nested structure with a function applied to its tensors.

    Most are a tensor, a tuple or a dict. Torch's ``tree_map_only``, which knows all structures, takes ten times
    as long for these.

    Example:
        >>> map_tensors(torch.neg, ((torch.tensor(1), "flag"), {"x": [torch.tensor(2)]}))
        ((tensor(-1), 'flag'), {'x': [tensor(-2)]})
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if type(tree) is tuple:
        return tuple([map_tensors(function, item) for item in tree])
    if type(tree) is dict:
        return {name: map_tensors(function, item) for name, item in tree.items()}
    return tree_map_only(Tensor, function, tree)


def concatenate(parts: Sequence[Any]) -> Any:
    """Return tensors, or nested structures of them, one after another along the first dimension."""
    return parts[0] if len(parts) == 1 else tree_map(lambda *own: torch.cat(own), *parts)


def member_rows(
    outputs: Any, targets: Any, row_weights: Tensor | None = None
) -> tuple[Any, Any, Tensor | None]:
    """Return outputs (S, B, ...) of members as rows (S * B, ...), with the targets and weights of each.

    Example:
        >>> rows, targets, _ = member_rows(torch.zeros(2, 3, 4), torch.tensor([0, 1, 2]))
        >>> tuple(rows.shape), targets.tolist()
        ((6, 4), [0, 1, 2, 0, 1, 2])
    """
    expand = partial(expand_batch, members=tree_leaves(outputs)[0].shape[0])
    rows = map_tensors(lambda output: output.flatten(0, 1), outputs)
    return rows, *map_tensors(expand, (targets, row_weights))


def member_examples(member: int, batch: int, members: int) -> list[int]:
    """Return the examples that ``expand_batch`` assigns to a member in the mode ``split``.

    Example:
        >>> member_examples(1, batch=3, members=2)
        [2, 0]
    """
    size = rows_needed(batch, members, "split") // members
    return [i % batch for i in range(member * size, (member + 1) * size)]


def row_weights(batch: int, members: int, device: torch.device) -> Tensor:
    """Return the weights of the rows of a split batch that make each example count once.

    Example:
        >>> row_weights(3, 2, torch.device("cpu")).tolist()
        [0.5, 1.0, 1.0, 0.5]
    """
    # Counted by hand: torch.bincount would wait for a GPU.
    rows = rows_needed(batch, members, "split")
    example = torch.arange(rows, device=device) % batch
    return 1.0 / (rows // batch + (example < rows % batch))
