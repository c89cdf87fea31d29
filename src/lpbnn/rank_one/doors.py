"""The doors of a network: at which modules the batch becomes members, so that what is before runs once."""

import difflib
from collections.abc import Sequence
from typing import NoReturn

from torch import nn

from lpbnn.rank_one.layer import SUPPORTED, FastWeight

UNCONVERTED = (*SUPPORTED, nn.RNNBase, nn.MultiheadAttention)  # what is worth running only once


def find_stages(net: nn.Module) -> list[str]:
    """Where the batch becomes members: the smallest module that holds every converted layer.

    Where that is the network itself and part of it is unconverted, its children that hold converted
    layers: the first of them to be called spreads the batch, and what runs before it is shared.

    A module may name parts of itself instead, ``spread_at = ("first", "second")``, in the order of their
    calls. That is a promise, too: whatever of the batch meets a member's work, meets it inside of one.
    """
    if not has_unconverted(net):
        return [""]
    path, module = "", net
    while not isinstance(module, FastWeight):
        if named := _named(path, module):
            return named
        children = _holders(path, module)
        if len(children) > 1:
            return [path] if path and _is_called(module) else _called(children)
        path, module = children[0]
    return [path]


def _named(path: str, module: nn.Module) -> list[str]:
    """The parts that a module names, from the first with a converted layer on; none that do not fit."""
    names = getattr(module, "spread_at", ())
    try:
        layers = [_converted(module.get_submodule(name)) for name in names]
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"{type(module).__name__} has spread_at = {names!r}; expected the names of modules of its own, "
            "in the order of their calls. Fix: spread_at = ('first', 'second')."
        ) from error
    if _converted(module) != set().union(*layers):
        return []  # members begin outside of them, too
    first = next(i for i, part in enumerate(layers) if part)
    named = [f"{path}.{name}" if path else name for name in names[first:]]
    return named if len(named) > 1 else []  # of one, there may be a smaller part


def check_stage(net: nn.Module, spread_at: str | Sequence[str] | None) -> None:
    """Refuse a ``spread_at`` that is no path in the network, or a list that is not of such paths."""
    if spread_at is None:
        return
    paths = [path for path, _ in net.named_modules()]
    stages = [spread_at] if isinstance(spread_at, str) else list(spread_at)
    if not stages:
        raise ValueError(
            "spread_at=[] names no module. Fix: None finds one, '' is the whole network."
        )
    for stage in stages:
        if stage not in paths:
            close = difflib.get_close_matches(str(stage), paths, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"spread_at={stage!r} is no module of the network.{hint}")


def where_spread(stages: Sequence[str]) -> str:
    """What to do where rows and examples met."""
    return (
        f"lpbnn spreads the batch over the members at {list(stages)}. If that module is not called, or a "
        "tensor goes around it and meets its output (a skip), spread the batch earlier. Fix: "
        "build(..., spread_at='') for the whole network, or spread_at= the path of an earlier module."
    )


def raise_with(advice: str, error: Exception) -> NoReturn:
    """Raise the error with the advice in its message, where a log that prints no notes has it, too.

    One of a kind of its own, of memory that ran out for example, is what others look for: it gets a note.
    """
    if advice and type(error) in (RuntimeError, ValueError):
        raise type(error)(f"{error}\n{advice}") from error
    if advice:
        error.add_note(advice)
    raise error


def has_unconverted(module: nn.Module) -> bool:
    """Whether a layer below could have been converted and was not."""
    if isinstance(module, FastWeight):
        return False
    return isinstance(module, UNCONVERTED) or any(map(has_unconverted, module.children()))


def _holders(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children that hold converted layers."""
    return [
        (f"{path}.{name}" if path else name, child)
        for name, child in module.named_children()
        if _converted(child)
    ]


def _converted(module: nn.Module) -> set[nn.Module]:
    return {inner for inner in module.modules() if isinstance(inner, FastWeight)}


def _is_called(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)  # these have no forward


def _called(holders: list[tuple[str, nn.Module]]) -> list[str]:
    """The paths, with lists of modules replaced by what they hold."""
    found = []
    for path, module in holders:
        found += [path] if _is_called(module) else _called(_holders(path, module))
    return found
