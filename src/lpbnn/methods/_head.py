"""The linear layer that a network ends with: found, taken out, and given back by ``undo``."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

from lpbnn.convert.convert import replace_modules
from lpbnn.convert.wrapper import Wrapper


class TakenOut(Wrapper, nn.Identity):
    """Stands where a head was and lets the features through; ``restore`` gives the head back.

    Until then the head is no part of the network: neither its parameters nor its state dict have it. It
    only goes where the network goes, to a device or a precision.

    Example:
        >>> head = nn.Linear(3, 2)
        >>> place = TakenOut(head)
        >>> len(list(place.parameters())), place.restore() is head
        (0, True)
    """

    guarded = ()

    def __init__(self, layer: nn.Module, path: str = "") -> None:
        super().__init__(layer, path)
        self.__dict__["layer"] = self._modules.pop("layer")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.layer._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def restore(self) -> nn.Module:
        self.layer.train(self.training)
        return super().restore()


def take_out(net: nn.Module, path: str) -> None:
    """Put ``TakenOut`` in the place of the layer at ``path``."""
    head = net.get_submodule(path)
    replace_modules(net, {id(head): TakenOut(head, path)})


def find_head(net: nn.Module, path: str | None) -> tuple[str, nn.Linear]:
    """The linear layer that the network ends with, under its path."""
    linear = {p: m for p, m in net.named_modules() if isinstance(m, nn.Linear) and p}
    found = ", ".join(linear) or "none"
    if path is not None:
        if path not in linear:
            raise ValueError(
                f"head={path!r} is no nn.Linear of the network. Linear layers found: {found}."
            )
        return path, linear[path]
    if not linear:
        raise ValueError(
            f"duq takes out the nn.Linear that the network ends with, and {type(net).__name__} has "
            "none. Fix: end the network with nn.Flatten() and nn.Linear(features, classes)."
        )
    path = "head" if "head" in linear else next(reversed(linear))
    return path, linear[path]
