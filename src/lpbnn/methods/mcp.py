r"""MCP: the plain network; its confidence is the maximum class probability.

The baseline of every comparison: one deterministic network, no members, no epistemic uncertainty. Its
uncertainty is that of its own class probabilities; in regression, the variance that it predicts.

$$p(y|x) = \mathrm{softmax}(f(x)), \quad \text{score} = 1 - \max_c p_c$$

Hendrycks, Gimpel: A baseline for detecting misclassified and out-of-distribution examples, ICLR 2017.
"""

import dataclasses
from typing import Any

from torch import nn

from lpbnn.model import Outputs, UncertainModel, stack_members
from lpbnn.options import OneNetwork, Options


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Options of mcp: none of its own."""

    members: OneNetwork = 1  # mcp is one network


class MCP(UncertainModel):
    """One deterministic network.

    Example:
        >>> import torch
        >>> model = MCP(nn.Linear(4, 3))
        >>> tuple(model(torch.randn(5, 4)).shape)  # (members, batch, classes)
        (1, 5, 3)
    """

    stochastic = False

    def outputs(self, *args: Any, **kwargs: Any) -> Outputs:
        return stack_members([self.run_network(*args, **kwargs)])


def build(net: nn.Module, config: Config, **model_options: Any) -> MCP:
    """Wrap a network as MCP."""
    return MCP(net, **model_options)
