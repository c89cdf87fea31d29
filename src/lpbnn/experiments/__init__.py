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

from lpbnn import source
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
    _require_known(name)
    return importlib.import_module(f"{__name__}.{name}")


def describe(name: str) -> str:
    """Return the first line of its file, which is not imported."""
    return text(name).splitlines()[0]


def text(name: str) -> str:
    """Return what the file of an experiment says about it, for a terminal; it is not imported."""
    _require_known(name)
    return source.doc(f"{__name__}.{name}").replace("``", "")


def command(name: str, console: Console) -> Callable[..., None]:
    """A command of the experiment's own options, for tyro."""
    module = load(name)

    def run(config: Any) -> None:
        module.run(config, console)

    run.__annotations__ = {"config": Annotated[module.Config, arg(name="")], "return": None}
    run.__doc__ = text(name)
    return run


def _require_known(name: str) -> None:
    if name not in names():
        from lpbnn.data import unknown  # imports torch: not for --help

        raise unknown("experiment", name, names())
