"""Base class of layer replacements: it holds the layer, and nothing bypasses it."""

from typing import Any

from torch import Tensor, nn

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Guarded:
    """Stands for a tensor that may be asked about, but not computed with."""

    def __init__(self, tensor: Tensor, refusal: str) -> None:
        self._tensor = tensor
        self._refusal = refusal

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "shape", "ndim", "requires_grad", "is_cuda"):
            return getattr(self._tensor, name)
        raise AttributeError(self._refusal)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        guarded = next(arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, cls))
        raise TypeError(guarded._refusal)

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(self._refusal)

    # Python looks for operators in the class and does not ask __getattr__.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = __neg__ = __getitem__ = _refuse


class Wrapper(nn.Module):
    """A layer with something added; ``convert`` puts it in the layer's place, ``restore`` takes it out.

    Code around a layer may ask for its ``in_features``, ``stride`` or ``weight.dtype`` and is answered by
    the layer. Code that computes with the ``guarded`` tensors would go past what was added, in silence:
    it gets an error that names the layer. Forward and backward hooks of the layer move to the wrapper.
    """

    guarded: tuple[str, ...] = ("weight", "bias")
    added = "the members"  # what would be bypassed

    def __init__(self, layer: nn.Module, path: str = "") -> None:
        super().__init__()
        self.layer = layer
        self.path = path
        self.in_place = True  # until it is taken out of the network again
        move_hooks(layer, self)

    def __getattr__(self, name: str) -> Any:
        # Without a layer it is still being made, copied or unpickled.
        if name in self.guarded and "layer" in self.__dict__.get("_modules", {}):
            tensor = getattr(self.layer, name)
            return tensor if tensor is None else Guarded(tensor, self._refusal(name))
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "layer" not in self._modules:
                raise
            return getattr(self.layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.guarded:
            raise AttributeError(f"{self._refusal(name)} To load a {name}, set .layer.{name}.")
        super().__setattr__(name, value)

    def _refusal(self, name: str) -> str:
        return (
            f"the code around {self.path or 'this layer'!r} uses its .{name} directly, past its forward: "
            f"{self.added} would be bypassed in silence. Leave the layer out with "
            f"exclude={self.path or '...'!r}; the {name} of the layer inside is .layer.{name}."
        )

    def unconverted(self) -> nn.Module:
        """Return a layer of the type and widths that the network was built with, without hooks."""
        return self.layer

    def restore(self) -> nn.Module:
        """The layer, as a network without the method would have it."""
        move_hooks(self, self.layer)
        self.in_place = False
        return self.layer


def mean_of_copies(copies: nn.Parameter) -> nn.Parameter:
    """Return the mean of what every member has, (J, ...); equal copies come back to the last bit."""
    first = copies[0]
    return nn.Parameter((first + (copies - first).mean(0)).detach(), copies.requires_grad)


def move_hooks(source: nn.Module, target: nn.Module) -> None:
    """Move forward and backward hooks to the module that takes another one's place."""
    # The dictionaries themselves move: the handles that users hold go on working.
    for name in HOOKS:
        theirs, mine = source.__dict__.get(name), target.__dict__.get(name)
        if theirs is not None and mine is not None:
            source.__dict__[name], target.__dict__[name] = mine, theirs
    source._is_full_backward_hook, target._is_full_backward_hook = (
        target._is_full_backward_hook,
        source._is_full_backward_hook,
    )
