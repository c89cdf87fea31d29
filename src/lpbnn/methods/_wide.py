"""Running averages stay in float32 at least, whatever precision their network is cast to."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

from lpbnn.rank_one.factors import at_least_float32


class WideBuffers(nn.Module):
    """To be inherited first: the module's own buffers are moved, but never cast to half precision.

    There an average would stand still: in bfloat16, 0.999 * 13 is 13. (And a weight of 1e-8 would be 0, in
    float16.)

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
        given = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in given.items():
            made = self._buffers[name]
            if buffer is not None and made is not None and at_least_float32(made) is not made:
                self._buffers[name] = at_least_float32(buffer).to(made.device)
        return self


class Tensors(nn.Module):
    """Tensors under the names of a network's, as buffers: they are moved, copied and saved with it.

    Example:
        >>> import torch
        >>> list(Tensors({"layer.weight": torch.zeros(2)}).by_name())
        ['layer.weight']
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "/"), tensor)  # no buffer has a dot in its name

    def by_name(self) -> dict[str, Tensor]:
        return {name.replace("/", "."): tensor for name, tensor in self.named_buffers()}


class Moments(WideBuffers, Tensors):
    """Tracked means or variances: single steps are too small for half precision."""
