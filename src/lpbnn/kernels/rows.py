"""Products of rows with their members' factors, written for eager kernels and for compilers."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpbnn.members.rows import gather
from lpbnn.precision import at_least_float32

IN_ONE_KERNEL = 8  # tensors that a compiler stacks at once

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
    return y if compiling else _without_view(y, x.shape)


def shift_rows(x: Tensor, vector: Tensor) -> Tensor:
    """Return every row (rows, C, ...) plus its member's vector (J, C)."""
    rows = gather(x, vector.shape[0])
    return _without_view(rows + as_vectors(vector, rows), x.shape)


def per_row(factor: Tensor, rows: int) -> Tensor:
    """Repeat one vector per member, (J, C), to one vector per row, (rows, C)."""
    return factor.unsqueeze(1).expand(-1, rows // factor.shape[0], -1).flatten(0, 1)


def copy_to_rows(factors: Tensor, rows_per_member: int) -> Tensor:
    """Return factors (L, J, m) of L layers with a copy for every row of a member, for a compiler.

    It sums the gradients of copies that are made here, for all layers at once, faster than those it makes
    layer by layer. Without a compiler the factors stay as they are.
    """
    if rows_per_member == 1 or not torch.compiler.is_compiling():
        return factors
    return factors.unsqueeze(2).expand(-1, -1, rows_per_member, -1).flatten(1, 2)


def as_vectors(factor: Tensor, rows: Tensor, channels: int = 2) -> Tensor:
    """Return (J, C) in the precision of rows (J, ..., C, ...) and in a shape that broadcasts to them."""
    shape = [1] * rows.dim()
    shape[0], shape[channels] = factor.shape
    return factor.to(rows.dtype).view(shape)


def prefers_member_weights(layer: Any, x: Tensor, r: Tensor, s: Tensor) -> bool:
    """Return True if a product with each member's weight is faster than scaled activations.

    A compiler fuses the two scalings into the neighbouring kernels, and must not be made to specialise on the
    batch. On a GPU J small convolutions leave it half empty.
    """
    if torch.compiler.is_compiling() or len(r) != len(s):
        return False
    if x.is_cuda and not isinstance(layer, nn.Linear):
        return False
    inputs, outputs = r.shape[1], s.shape[1]
    return len(s) * layer.weight.numel() * inputs <= x.numel() * (inputs + outputs)


def is_one_product(layer: nn.Module, r: Tensor, s: Tensor) -> bool:
    """Return True if more members are nothing but more rows of the weight."""
    if len(r) != len(s):  # every row has its own copy of r
        return False
    convolution = isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.groups == 1
    return isinstance(layer, nn.Linear) or (convolution and layer.padding_mode == "zeros")


def run_all_members(layer: nn.Module, x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """Return the rows of all members, member-major, for a batch x (B, ...) that is not expanded yet.

    Args:
        weights: (J, *weight.shape).
        bias: (J, p) or None.
    """
    members = weights.shape[0]
    weight, shift = weights.flatten(0, 1), None if bias is None else bias.flatten()
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, shift).unflatten(-1, (members, -1)).movedim(-2, 0).flatten(0, 1)
    convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
    y = convolve(x, weight, shift, layer.stride, layer.padding, layer.dilation)  # type: ignore[arg-type]
    rows = y.unflatten(1, (members, -1)).transpose(0, 1).flatten(0, 1)
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return rows.contiguous(memory_format=torch.channels_last) if last else rows.contiguous()


def stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors stacked, in float32 or better."""
    if len(tensors) == 1:
        return at_least_float32(tensors[0].unsqueeze(0))  # no copy
    if torch.compiler.is_compiling() and len(tensors) > IN_ONE_KERNEL:
        # With more tensors than this the compiler makes a kernel each; with a stack of stacks, one for all.
        starts = range(0, len(tensors), IN_ONE_KERNEL)
        parts = [torch.stack(list(tensors[i : i + IN_ONE_KERNEL])) for i in starts]
        return at_least_float32(torch.cat(parts))
    return at_least_float32(torch.stack(list(tensors)))
