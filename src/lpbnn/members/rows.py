r"""The member axis: the one place that knows how a batch and an ensemble share the first dimension.

Rows are **member-major**. A batch of B examples spread over J members has the rows

    (member 0, example 0), (member 0, example 1), ..., (member 1, example 0), ...

so row = member * (rows / J) + position, and ``gather`` is a reshape. Two ways to spread:

- ``repeat``: every member sees every example; J * B rows, position = example.
- ``split``: every member sees its own slice of ceil(B / J) examples. Where J does not divide B the
  first examples are dealt out a second time so that no member goes hungry, and ``row_weights``
  makes every example count once in the mean.

Example:
    >>> import torch
    >>> x = torch.tensor([10, 20, 30])
    >>> spread(x, members=2).tolist()
    [10, 20, 30, 10, 20, 30]
    >>> spread(x, members=2, mode="split").tolist()
    [10, 20, 30, 10]
    >>> gather(spread(x, members=2), members=2).tolist()
    [[10, 20, 30], [10, 20, 30]]
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

BatchMode = Literal["repeat", "split"]
BATCH_MODES: tuple[str, ...] = get_args(BatchMode)
# Torch's names of masks (queries, keys) that all examples share; those of padding have a row for each.
ATTENTION_MASKS = ("src_mask", "tgt_mask", "memory_mask", "attn_mask")
Places = Sequence[tuple[int, str]]  # of arguments, by position and by name
Tables = Mapping[int, tuple[Tensor, int]]  # tensors by their id, with how often each was written to


def rows_needed(batch: int, members: int, mode: BatchMode = "repeat") -> int:
    """How many rows ``spread`` makes of ``batch`` examples; always a multiple of ``members``."""
    return batch * members if mode == "repeat" else -(-batch // members) * members


def spread(x: Tensor, members: int, mode: BatchMode = "repeat") -> Tensor:
    """Batch (B, ...) to member-major rows (rows, ...)."""
    batch = x.shape[0]
    if mode == "repeat":
        return torch.cat([x] * members) if members > 1 else x  # cat keeps channels_last
    if batch % members == 0:
        return x
    return x[torch.arange(rows_needed(batch, members, mode), device=x.device) % batch]


def gather(rows: Tensor, members: int) -> Tensor:
    """Member-major rows (J * n, ...) to (J, n, ...): a view, never a copy."""
    return rows.view(members, rows.shape[0] // members, *rows.shape[1:])  # quicker than unflatten


def per_row(factor: Tensor, rows: int) -> Tensor:
    """One vector per member, (J, C), to one vector per row, (rows, C)."""
    return factor.unsqueeze(1).expand(-1, rows // factor.shape[0], -1).flatten(0, 1)


def times(
    x: Tensor, factor: Tensor, channels_last: bool = False, shift: Tensor | None = None
) -> Tensor:
    """Every row times its member's vector, ``factor`` (J or rows, C), plus another, in x's precision.

    Channels are second, or last (Linear).

    Example:
        >>> times(torch.ones(4, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))[:, 0].tolist()
        [1.0, 1.0, 3.0, 3.0]
    """
    if torch.compiler.is_compiling():
        # A compiler fuses what is summed by row with its neighbours, what is summed by member less well.
        factor = per_row(factor, x.shape[0])
        shift = None if shift is None else per_row(shift, x.shape[0])
        return _times(x, factor, shift, -1 if channels_last else 1)
    rows = gather(x, factor.shape[0])
    return _joined(_times(rows, factor, shift, -1 if channels_last else 2))


def _times(rows: Tensor, factor: Tensor, shift: Tensor | None, channels: int) -> Tensor:
    """For rows with a factor each, (rows, C, ...), or by member, (J, rows / J, C, ...)."""
    scale = vectors(factor, rows, channels)
    if shift is None:
        return rows * scale
    return torch.addcmul(vectors(shift, rows, channels), rows, scale)


def plus(x: Tensor, vector: Tensor) -> Tensor:
    """Every row plus its member's vector (J, C), channels second."""
    rows = gather(x, vector.shape[0])
    return _joined(rows + vectors(vector, rows))


def _joined(rows: Tensor) -> Tensor:
    """(J, rows / J, ...) as rows. No view: autograd forbids some changes of one in place (a ReLU's)."""
    return torch.ops.aten._unsafe_view(rows, (rows.shape[0] * rows.shape[1], *rows.shape[2:]))


def vectors(factor: Tensor, rows: Tensor, channels: int = 2) -> Tensor:
    """(J, C) in the precision and for the shape of rows (J, ..., C, ...), whose ``channels`` are named."""
    shape = [1] * rows.dim()
    shape[0], shape[channels] = factor.shape
    return factor.to(rows.dtype).view(shape)


def row_weights(batch: int, members: int, mode: BatchMode, device: torch.device) -> Tensor | None:
    """Weights of the rows that make each example count once; None where they are all equal.

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
    """Whether a tensor that goes into a network holds the examples: by its first dimension alone.

    None of ``masks`` does, however long their sequences are.
    """
    if x.dim() == 0 or x.shape[0] != batch or isinstance(x, nn.Parameter):
        return False
    return not any(x is mask for mask in masks)


def mask_places(module: nn.Module) -> Places:
    """Where a module takes masks of attention, by their names in torch.

    Example:
        >>> mask_places(nn.TransformerEncoderLayer(4, 2))
        [(1, 'src_mask')]
    """
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # no Python function
        return []
    # Elsewhere than in torch's own encoder a "mask" is as often one of padding, (batch, time).
    masks = (
        (*ATTENTION_MASKS, "mask") if isinstance(module, nn.TransformerEncoder) else ATTENTION_MASKS
    )
    return [(i, name) for i, name in enumerate(names) if name in masks]


def masks_given(places: Places, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The masks of attention among the arguments of a call, (time, time): no examples.

    Oblong ones may be of padding, (batch, time), in a module that calls these by the same name.
    """
    masks = _given(places, args, kwargs, dims=2)
    return [mask for mask in masks if mask.shape[0] == mask.shape[1]]


def masks_by_head(
    places: Places, args: Sequence[Any], kwargs: dict[str, Any], batch: int
) -> list[Tensor]:
    """Those of the masks that are of every example and head, (batch * heads, queries, keys)."""
    masks = _given(places, args, kwargs, dims=3)
    return [m for m in masks if m.shape[0] != batch and m.shape[0] % batch == 0]


def _given(places: Places, args: Sequence[Any], kwargs: dict[str, Any], dims: int) -> list[Tensor]:
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in places]
    return [mask for mask in given if isinstance(mask, Tensor) and mask.dim() == dims]


def spread_tree(
    tree: Any,
    batch: int,
    members: int,
    mode: BatchMode = "repeat",
    masks: Sequence[Tensor] = (),
) -> Any:
    """Spread every tensor in a nested structure whose first dimension is the batch, but no ``masks``."""

    def one(x: Tensor) -> Tensor:
        return spread(x, members, mode) if is_batched(x, batch, masks) else x

    return tree_map_only(Tensor, one, tree)


def batched(tree: Any, batch: int, masks: Sequence[Tensor] = ()) -> list[Tensor]:
    """The tensors of a nested structure that hold the examples."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if is_batched(leaf, batch, masks)]


def copied(tree: Any, batch: int, members: int = 1, masks: Sequence[Tensor] = ()) -> Any:
    """``spread_tree`` in memory of its own, for one member too: one may change its input for itself."""

    def one(x: Tensor) -> Tensor:
        if not is_batched(x, batch, masks):
            return x
        return x.clone() if members == 1 else spread(x, members)

    return tree_map_only(Tensor, one, tree)


def require_multiple(rows: int, members: int, layer: str) -> None:
    """Refuse rows that cannot be those of the members."""
    if rows % members:
        raise ValueError(
            f"{layer!r} got {rows} rows for {members} members; rows are member-major and a multiple of "
            "the members. Call the built model, or spread the batch first with lpbnn.members.rows.spread."
        )


def require_rows(rows: int, expected: int, layer: str) -> None:
    """Refuse rows that are not those of a pass of ``expected`` rows (0: nobody said)."""
    if expected and rows % expected:
        raise ValueError(
            f"{layer!r} got an input with first dimension {rows}, in a pass of {expected} rows: its "
            "rows are not those of the batch (time first, or no batch at all), and members would "
            f"mix in silence. Leave the layer out with exclude={layer!r}, or put the batch first."
        )


def writes(x: Tensor) -> int:
    """How often a tensor was written to; one made in inference mode does not know."""
    return 0 if x.is_inference() else x._version


def refuse_table(x: Tensor, tables: Tables, layer: str) -> None:
    """Refuse a tensor of the network itself, whose rows are as many as the batch's only by chance.

    ``tables`` are its parameters and buffers. One that is expanded has a row for each example, and one that
    was written to in this pass may hold them.
    """
    whole = x if x._base is None else x._base
    table, version = tables.get(id(whole), (None, 0))
    if table is whole and writes(whole) == version and x.stride(0):
        raise ValueError(
            f"{layer!r} got a parameter or buffer of the network as its input, of shape {tuple(x.shape)}: "
            "its rows are no examples, and members would mix in silence. Leave the layer out with "
            f"exclude={layer!r}, or expand its input to a row for each example."
        )
