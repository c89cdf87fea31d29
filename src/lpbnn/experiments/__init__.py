"""One file per table or figure of the paper: its settings, its cost, the paper's numbers, one command.

An experiment file has, in this order, a docstring (first line: what it shows; then the command and
its cost), the ``PAPER``'s numbers where it has them, ``Config`` (a frozen dataclass) and
``run(config, console) -> Path | None``, which trains what is missing, prints the table and returns the
report it wrote. Folders added to ``lpbnn.experiments.__path__`` are searched too.
"""

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any

from rich.console import Console
from tyro.conf import arg

from lpbnn.data import unknown
from lpbnn.experiments._published import published

__all__ = ["command", "describe", "load", "names", "published"]


def names() -> list[str]:
    """Every experiment, in alphabetical order.

    >>> "stability" in names()
    True
    """
    found = {module.name for module in pkgutil.iter_modules(__path__)}
    return sorted(name for name in found if not name.startswith("_"))


def load(name: str) -> ModuleType:
    """The module of an experiment."""
    if name not in names():
        raise unknown("experiment", name, names())
    return importlib.import_module(f"{__name__}.{name}")


def describe(name: str) -> str:
    """The first line of its file."""
    return (load(name).__doc__ or "").strip().splitlines()[0]


def command(name: str, console: Console) -> Callable[..., None]:
    """A command of the experiment's own options, for tyro."""
    module = load(name)

    def run(config: Any) -> None:
        module.run(config, console)

    run.__annotations__ = {"config": Annotated[module.Config, arg(name="")], "return": None}
    run.__doc__ = (module.__doc__ or "").replace("``", "")
    return run
