r"""MCP: the plain network; its confidence is the maximum class probability.

.. math:: p(y|x) = \mathrm{softmax}(f(x)), \quad \text{score} = 1 - \max_c p_c

Hendrycks, Gimpel: A baseline for detecting misclassified and out-of-distribution examples, ICLR 2017.
"""

import dataclasses
from typing import Any

from torch import Tensor, nn

from lpbnn.model import Model, batch_size


@dataclasses.dataclass(frozen=True)
class Config:
    num_data: int | None = None  # not needed: taken so that methods can be swapped
    members: int = 1

    def __post_init__(self) -> None:
        if self.members != 1:
            raise ValueError(
                f"members={self.members!r}: mcp is one network; use 'ensemble' for more."
            )


class Plain(Model):
    """One network, one answer."""

    stochastic = False

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        batch_size(args, kwargs)
        return self.readout(self.net(*args, **kwargs)).unsqueeze(0)


def build(net: nn.Module, config: Config, **model_options: Any) -> Model:
    return Plain(net, **model_options)
