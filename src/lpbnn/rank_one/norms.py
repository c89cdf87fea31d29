"""One batch norm per member."""

import copy

import torch
from torch import Tensor, nn

from lpbnn.convert.wrapper import Wrapper
from lpbnn.members.call import raise_with_advice
from lpbnn.members.passes import MemberPass, PassSlot, require_member_rows
from lpbnn.members.rows import gather

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class MemberNorm(Wrapper):
    """A batch norm, once per member; rows are member-major (see ``lpbnn.members.rows``).

    Args:
        layer: the batch norm to copy.
        members: how many copies.
        path: the batch norm's path in the network.

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
        layer.requires_grad_(False)  # it only keeps its place for undo
        self.slot = PassSlot()  # the model replaces it

    def extra_repr(self) -> str:
        return f"members={len(self.norms)}"

    def forward(self, input: Tensor) -> Tensor:
        state: MemberPass | None = self.slot.get()
        count = len(self.norms)
        # A frozen ensemble has several samples of each member, which share its norm.
        first, rows = (0, count) if state is None else (state.sampled.first, state.count)
        if rows == 1:
            return self.norms[first % count](input)
        require_member_rows(input.shape[0], rows, state, self.path)
        parts = enumerate(gather(input, rows).unbind(), start=first)
        try:
            return torch.cat([self.norms[member % count](part) for member, part in parts])
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            batch = input.shape[0] if state is None else state.batch
            advice = (
                f"{count} members share a batch of {batch}, and each normalises its own part of it. Fix: "
                "larger batches (drop_last=True where only the last one is small), batch_mode='repeat', "
                "or batch_norm='shared'."
            )
            raise_with_advice(advice, error)

    def restore(self) -> nn.Module:
        """Return one batch norm with the mean of the members' tensors; equal ones return bit for bit."""
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
