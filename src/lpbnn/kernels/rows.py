"""Products of rows with their members' vectors, written for eager kernels and for compilers."""

import torch
from torch import Tensor

from lpbnn.members.rows import gather

# A view of the product could not be changed in place by every layer behind it (a ReLU, for example).
_without_view = getattr(torch.ops.aten, "_unsafe_view", torch.reshape)


def scale_rows(
    x: Tensor, factor: Tensor, channels_last: bool = False, shift: Tensor | None = None
) -> Tensor:
    """Return every row times its member's vector, plus another vector, in the precision of x.

    Args:
        x: (rows, C, ...), member-major; with ``channels_last`` (rows, ..., C), as for Linear.
        factor: (J, C), or one vector per row, (rows, C).
        shift: (J, C), added after the product.

    Example:
        >>> scale_rows(torch.ones(4, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))[:, 0].tolist()
        [1.0, 1.0, 3.0, 3.0]
    """
    compiling = torch.compiler.is_compiling()
    if compiling:
        # A compiler fuses sums by row with their neighbours, sums by member less well.
        factor = per_row(factor, x.shape[0])
        shift = None if shift is None else per_row(shift, x.shape[0])
    rows = x if compiling else gather(x, factor.shape[0])
    channels = -1 if channels_last else 1 if compiling else 2
    scale = as_vectors(factor, rows, channels)
    offset = None if shift is None else as_vectors(shift, rows, channels)
    y = rows * scale if offset is None else torch.addcmul(offset, rows, scale)
    return y if compiling else _join(y)


def shift_rows(x: Tensor, vector: Tensor) -> Tensor:
    """Return every row (rows, C, ...) plus its member's vector (J, C)."""
    rows = gather(x, vector.shape[0])
    return _join(rows + as_vectors(vector, rows))


def per_row(factor: Tensor, rows: int) -> Tensor:
    """Repeat one vector per member, (J, C), to one vector per row, (rows, C)."""
    return factor.unsqueeze(1).expand(-1, rows // factor.shape[0], -1).flatten(0, 1)


def as_vectors(factor: Tensor, rows: Tensor, channels: int = 2) -> Tensor:
    """Return (J, C) in the precision of rows (J, ..., C, ...) and in a shape that broadcasts to them."""
    shape = [1] * rows.dim()
    shape[0], shape[channels] = factor.shape
    return factor.to(rows.dtype).view(shape)


def _join(rows: Tensor) -> Tensor:
    """Return (J, rows / J, ...) as (rows, ...)."""
    return _without_view(rows, (rows.shape[0] * rows.shape[1], *rows.shape[2:]))
