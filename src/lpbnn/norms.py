"""Batch norm for each member, statistics and affine map: members are normalised as networks apart."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lpbnn.members import gather
from lpbnn.wrapper import Wrapper

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


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is one of torch's own batch norms (a synchronised one stays shared)."""
    return type(module) in BATCH_NORMS
