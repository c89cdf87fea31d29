"""MemberLinear: a linear layer of which every member has its own."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpbnn.convert.wrapper import Wrapper, mean_of_copies
from lpbnn.members.passes import MemberPass, PassSlot, require_member_rows
from lpbnn.members.rows import expand_batch, gather


class MemberLinear(Wrapper):
    """A Linear layer with a weight and a bias for each member; rows are member-major.

    All start as those of a new layer do, each at random, whatever the given layer has learned.

    Args:
        layer: the layer to replace.
        members: J.
        path: the layer's path in the network.

    Example:
        >>> layer = MemberLinear(nn.Linear(3, 2), members=4)
        >>> tuple(layer(torch.randn(8, 3)).shape)  # two examples for each of the four members
        (8, 2)
    """

    member_bias: nn.Parameter | None

    def __init__(self, layer: nn.Module, members: int, path: str = "") -> None:
        if type(layer) is not nn.Linear:
            raise ValueError(
                f"{path!r} is a {type(layer).__name__}, and only a Linear layer can be each member's own. "
                "Fix: unshared= with the path of the last layer, such as 'head'."
            )
        super().__init__(layer, path)
        self.members = members
        new = [copy.deepcopy(layer) for _ in range(members)]
        for own in new:
            own.reset_parameters()
        self.member_weight = _stack([own.weight for own in new], layer.weight)
        self.register_parameter("member_bias", None)
        if layer.bias is not None:
            self.member_bias = _stack([own.bias for own in new], layer.bias)
        layer.requires_grad_(False)  # it only keeps its place for undo
        self.slot = PassSlot()  # the model replaces it
        self.expands_batch = False  # True if it may receive a batch that is not expanded yet

    def extra_repr(self) -> str:
        return f"members={self.members}"

    def forward(self, input: Tensor) -> Tensor:
        state: MemberPass | None = self.slot.get()
        weight: Tensor = self.member_weight
        bias: Tensor | None = self.member_bias
        if state is not None:
            weight = state.sampled.select(weight)
            bias = None if bias is None else state.sampled.select(bias)
        count = len(weight)
        if count == 1:
            return F.linear(input, weight[0], None if bias is None else bias[0])
        if self.expands_batch and state is not None and input.shape[0] * count == state.rows:
            input = expand_batch(input, count)
        require_member_rows(input.shape[0], count, state, self.path)
        rows = gather(input, count).flatten(1, -2)
        y = rows @ weight.mT if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
        y = torch.cat(y.unbind())  # flattened, it could not be exported for a batch of any size
        return y if input.dim() == 2 else y.unflatten(0, input.shape[:-1])

    def restore(self) -> nn.Module:
        """Return the layer with the mean of the members' weights and of their biases."""
        self.layer.weight = mean_of_copies(self.member_weight)
        if self.member_bias is not None:
            self.layer.bias = mean_of_copies(self.member_bias)
        return super().restore()


def _stack(tensors: list[Tensor], like: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.stack(tensors).detach(), like.requires_grad)
