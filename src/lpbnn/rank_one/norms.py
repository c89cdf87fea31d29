"""Batch norm among members: one for each of them, or one for all whose sums are cheap to compile."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lpbnn.convert.wrapper import Wrapper
from lpbnn.likelihoods import at_least_float32
from lpbnn.members.rows import gather

IN_ONE_PASS = 2**11  # pixels of a row that a compiler sums in one piece
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class MemberNorm(Wrapper):
    """A batch norm, once per member; rows are member-major (see ``lpbnn.members``).

    Example:
        >>> norm = MemberNorm(nn.BatchNorm1d(3), members=2)
        >>> x = torch.cat([torch.randn(50, 3), 100 + torch.randn(50, 3)])
        >>> bool((norm(x).view(2, 50, 3).mean(1).abs() < 1e-4).all())  # each member by its own mean
        True
    """

    guarded = ("weight", "bias", "running_mean", "running_var")

    def __init__(self, layer: nn.Module, members: int, path: str = "") -> None:
        super().__init__(layer, path)
        self.norms = nn.ModuleList(copy.deepcopy(layer) for _ in range(members))
        # The layer inside only keeps its place for undo; its tensors are the members' now.
        layer.requires_grad_(False)
        self._held: Sequence[int] | None = None  # which members the rows of this pass belong to

    def extra_repr(self) -> str:
        return f"members={len(self.norms)}"

    def forward(self, x: Tensor) -> Tensor:
        members = range(len(self.norms)) if self._held is None else self._held
        parts = zip(gather(x, len(members)).unbind(), members, strict=True)
        return torch.cat([self.norms[member % len(self.norms)](part) for part, member in parts])

    def restore(self) -> nn.Module:
        """One batch norm with the mean of the members' tensors; equal ones come back bit for bit."""
        states = [norm.state_dict() for norm in self.norms]
        merged = {}
        for name, first in states[0].items():
            if first.is_floating_point():
                change = torch.stack([state[name] - first for state in states]).mean(0)
                first = first + change
            merged[name] = first
        self.layer.load_state_dict(merged)
        for mine, theirs in zip(self.layer.parameters(), self.norms[0].parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        return super().restore()


class RowNorm(nn.BatchNorm2d):
    """Torch's ``BatchNorm2d`` to rounding, and itself but in compiled training on a GPU.

    There, the gradients of r and s are sums over the pixels of each row, and batch norm's own sums go over
    all rows. Two passes over the same map, unless batch norm sums by row first as well: then a compiler
    makes one of them (docs/cost.md). A row of more than ``IN_ONE_PASS`` pixels is summed in parts,
    and nothing is fused with the sums.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (torch.compiler.is_compiling() and self.training and input.is_cuda):
            return super().forward(input)
        usual = self.affine and self.track_running_stats and self.momentum is not None
        several = input.dim() == 4 and input.numel() > input.shape[1]  # or torch says what is wrong
        fits = several and input.shape[2] * input.shape[3] <= IN_ONE_PASS
        return by_rows(self, input) if usual and fits else super().forward(input)

    def _get_name(self) -> str:
        return "BatchNorm2d"


def by_rows(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """What a batch norm does in training, by the means m and variances v of each row and channel.

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
        # The deviations sum to 0, so nothing of the gradient goes through the mean here.
        variance = v.mean(0) + (m - mean.detach()).square().mean(0)
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
            unbiased = variance * (numbers / (numbers - 1))
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), norm.momentum)
        scale = (variance + norm.eps).rsqrt() * norm.weight
        shift = norm.bias - mean * scale
        # Spread over the rows by hand: so the gradients of scale and shift are summed by row first, too.
        rows = [factor.expand(len(x), -1)[:, :, None, None] for factor in (shift, scale)]
        return torch.addcmul(rows[0], values, rows[1]).to(x.dtype)


def sum_by_rows(net: nn.Module, yes: bool = True) -> None:
    """Make the network's own batch norms ``RowNorm``, or what they were; their tensors stay."""
    before, after = (nn.BatchNorm2d, RowNorm) if yes else (RowNorm, nn.BatchNorm2d)
    for module in net.modules():
        if type(module) is before:
            module.__class__ = after  # type: ignore[assignment]


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is one of torch's own batch norms (a synchronised one stays shared)."""
    return type(module) in (*BATCH_NORMS, RowNorm)
