"""The last linear layer of a network: find it, remove it, and put it back on ``lpbnn.undo``."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

from lpbnn.convert.convert import replace_modules
from lpbnn.convert.wrapper import Wrapper


class RemovedHead(Wrapper, nn.Identity):
    """An identity in place of a head; ``restore`` returns the head.

    The removed head is no submodule, so the network's parameters and state dict do not contain it. It
    follows the network to other devices and dtypes.

    Example:
        >>> head = nn.Linear(3, 2)
        >>> removed = RemovedHead(head)
        >>> len(list(removed.parameters())), removed.restore() is head
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


def remove_head(net: nn.Module, path: str) -> None:
    """Replace the layer at ``path`` by an identity that remembers it."""
    head = net.get_submodule(path)
    replace_modules(net, {id(head): RemovedHead(head, path)})


def find_head(net: nn.Module, path: str | None, method: str) -> tuple[str, nn.Linear]:
    """Return the path of the network's last linear layer, and the layer.

    Args:
        net: the network.
        path: the path that the user gave; None takes the layer called "head", else the last registered.
        method: the name of the method, for error messages.
    """
    linear = {p: m for p, m in net.named_modules() if isinstance(m, nn.Linear) and p}
    if path is not None:
        if path not in linear:
            raise ValueError(
                f"head={path!r} is no nn.Linear of the network. Linear layers found: "
                f"{', '.join(linear) or 'none'}."
            )
        return path, linear[path]
    if not linear:
        raise ValueError(
            f"{method} replaces the nn.Linear that the network ends with, and {type(net).__name__} has "
            "none. Fix: end the network with nn.Flatten() and nn.Linear(features, classes)."
        )
    path = "head" if "head" in linear else next(reversed(linear))
    return path, linear[path]
