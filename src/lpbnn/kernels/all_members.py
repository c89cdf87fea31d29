"""All members of a layer as one product with J times the outputs, on a batch that is not expanded yet."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def is_one_product(layer: nn.Module) -> bool:
    """True if more outputs are nothing but more rows of the weight."""
    convolution = isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.groups == 1
    return isinstance(layer, nn.Linear) or (convolution and layer.padding_mode == "zeros")


def run_all_members(layer: nn.Module, x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """Return the rows of all members, member-major, for a batch x (B, ...).

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
