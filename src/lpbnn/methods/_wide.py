"""Running averages that stay in float32 when their network is cast to half precision."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

from lpbnn.likelihoods import at_least_float32


class WideBuffers(nn.Module):
    """A module whose own buffers follow it to a device, but never to half precision.

    Inherit from it first. In half precision a running average would not move: in bfloat16 0.999 * 13 is 13,
    and in float16 a weight of 1e-8 is 0.

    Example:
        >>> import torch
        >>> class Average(WideBuffers):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.register_buffer("value", torch.full((1,), 1.001))
        >>> Average().bfloat16().value
        tensor([1.0010])
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            cast = self._buffers[name]
            if buffer is not None and cast is not None and at_least_float32(cast) is not cast:
                self._buffers[name] = at_least_float32(buffer).to(cast.device)
        return self


class NamedTensors(nn.Module):
    """Tensors under the names of a network's parameters, as buffers: moved, copied and saved with it.

    Example:
        >>> import torch
        >>> list(NamedTensors({"layer.weight": torch.zeros(2)}).by_name())
        ['layer.weight']
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(buffer_name(name), tensor)

    def by_name(self) -> dict[str, Tensor]:
        """Return the tensors under the names that they were given with."""
        return {name.replace("/", "."): tensor for name, tensor in self.named_buffers()}


class Moments(WideBuffers, NamedTensors):
    """Tracked means or variances: single updates are too small for half precision."""


def buffer_name(name: str) -> str:
    """Return the name of the buffer for a parameter: torch allows no dots in names of buffers."""
    return name.replace(".", "/")
