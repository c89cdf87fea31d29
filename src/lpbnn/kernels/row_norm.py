"""Batch norm whose sums are cheap to compile beside those of the member factors."""

import torch
from torch import Tensor, nn

from lpbnn.precision import at_least_float32

IN_ONE_PASS = 2**11  # pixels of a row that a compiler sums in one piece


class RowNorm(nn.BatchNorm2d):
    """``BatchNorm2d`` to rounding, and exactly that outside of compiled training on a GPU.

    In compiled training the gradients of r and s are sums over the pixels of each row, and batch norm sums
    over all rows: two passes over one map, unless batch norm sums by row first as well. Then a compiler
    makes one of them (docs/results/cost.md). A row of more than ``IN_ONE_PASS`` pixels is summed in parts, and
    nothing is fused with its sums.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (torch.compiler.is_compiling() and self.training and input.is_cuda):
            return super().forward(input)
        usual = self.affine and self.track_running_stats and self.momentum is not None
        several = input.dim() == 4 and input.numel() > input.shape[1]  # or torch says what is wrong
        fits = several and input.shape[2] * input.shape[3] <= IN_ONE_PASS
        return normalise_by_rows(self, input) if usual and fits else super().forward(input)

    def _get_name(self) -> str:
        return "BatchNorm2d"


def normalise_by_rows(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Apply a batch norm in training, by the means m and variances v of each row and channel.

    mean = mean(m), variance = mean(v) + mean((m - mean)^2), over the rows. For first derivatives only.
    """
    numbers = x.numel() // x.shape[1]
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    with torch.autocast(x.device.type, enabled=False):
        values = at_least_float32(x)
        v, m = torch.var_mean(values, (2, 3), correction=0)
        mean = m.mean(0)
        # The deviations sum to 0, so no part of the gradient goes through the mean here.
        variance = v.mean(0) + (m - mean.detach()).square().mean(0)
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
            unbiased = variance * (numbers / (numbers - 1))
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), norm.momentum)
        scale = (variance + norm.eps).rsqrt() * norm.weight
        shift = norm.bias - mean * scale
        # Expanded to the rows by hand, so that the gradients of scale and shift are summed by row first.
        rows = [factor.expand(len(x), -1)[:, :, None, None] for factor in (shift, scale)]
        return torch.addcmul(rows[0], values, rows[1]).to(x.dtype)


def use_row_norms(net: nn.Module) -> None:
    """Make a network's ``BatchNorm2d`` modules ``RowNorm``, in place; their tensors stay."""
    for module in net.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = RowNorm


def restore_batch_norms(net: nn.Module) -> None:
    """Undo ``use_row_norms``."""
    for module in net.modules():
        if type(module) is RowNorm:
            module.__class__ = nn.BatchNorm2d  # type: ignore[assignment]
