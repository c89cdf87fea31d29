"""One file per table or figure of the paper: its settings, its cost, the paper's numbers, one command.

An experiment file has, in this order, a docstring (first line: what it shows; then the command and
its cost), the paper's numbers where it has them, ``Config`` (a frozen dataclass) and
``run(config, console) -> Path``, which trains the missing runs, prints the table and returns the path
of the report. Folders added to ``lpbnn.experiments.__path__`` are searched too.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from tyro.conf import arg

from lpbnn import registry, source

if TYPE_CHECKING:
    from lpbnn.report import PaperTable

__all__ = ["command", "describe", "load", "names", "published"]


def names() -> list[str]:
    """Return every experiment, in alphabetical order.

    >>> "stability" in names()
    True
    """
    return registry.modules(__name__)


def load(name: str) -> ModuleType:
    """Return the module of an experiment."""
    _require_known(name)
    return importlib.import_module(f"{__name__}.{name}")


def describe(name: str) -> str:
    """Return the first line of its file, which is not imported."""
    return text(name).splitlines()[0]


def text(name: str) -> str:
    """Return the docstring of an experiment's file, which is not imported, for a terminal."""
    _require_known(name)
    return source.doc(f"{__name__}.{name}").replace("``", "")


def command(name: str, console: Console) -> Callable[..., None]:
    """Return a command with the experiment's own options, for tyro."""
    module = load(name)

    def run(config: Any) -> None:
        module.run(config, console)

    run.__annotations__ = {"config": Annotated[module.Config, arg(name="")], "return": None}
    run.__doc__ = text(name)
    return run


def published(data: str, backbone: str) -> "PaperTable | None":
    """Return the paper's numbers for a data set and a network; None if it has none."""
    from lpbnn.experiments import diversity, stability, table1, table2
    from lpbnn.report import PaperTable

    if data in table2.PAPER and backbone.startswith("deeplab"):
        return table2.paper(data)
    if data == "cifar10" and backbone.startswith("wrn"):
        found, diverse = table1.paper(data), diversity.paper().rows
        rows = {method: {**row, **diverse.get(method, {})} for method, row in found.rows.items()}
        return PaperTable(found.source, rows)
    if data.startswith("cifar") and backbone.startswith("wrn"):
        return table1.paper(data)
    return stability.paper() if backbone == "lenet" and data == "cifar10" else None


def _require_known(name: str) -> None:
    if name not in names():
        raise registry.unknown("experiment", name, names())
