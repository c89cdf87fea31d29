"""The contract of a method: one file here, found by its name.

A method file has, in this order,

- a docstring whose first line is its claim, then the equation and the paper;
- ``Config``: a frozen dataclass with a default for every option of the method (a subclass of
  ``lpbnn.options.Options``, which checks the values against their annotations);
- ``build(net, config, **model_options) -> UncertainModel``: wraps the network, in place. The model options
  are ``likelihood`` and ``readout``. ``lpbnn.build`` takes back what an error leaves half done.

Its model (see ``lpbnn.model.UncertainModel``) defines ``outputs`` and, where needed, its own ``loss``,
``passes``, ``ood_score``, ``fast_parameters`` and the hooks ``before_epoch``, ``after_step`` and
``after_fit``. Nothing else in the project names a method.

A method may be in another package, which names it in the entry-point group ``lpbnn.methods``; a script may
``register`` one for itself. ``lpbnn.testing.MethodConformance`` tests it (docs/howto/add-a-method.md).
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from lpbnn import registry, source

GROUP = "lpbnn.methods"  # of entry points
_OWN = {name: f"{__name__}.{name}" for name in registry.modules(__name__)}  # full names of modules
_registered: dict[str, str] = {}  # the same of those that a script registered


def names() -> list[str]:
    """Return every method, in alphabetical order.

    Example:
        >>> "lpbnn" in names()
        True
    """
    return sorted(_modules())


def register(name: str, module: ModuleType) -> None:
    """Make a module a method, for this process; a package uses an entry point instead.

    Args:
        name: of the method, as ``lpbnn.build`` shall know it.
        module: an imported module with ``Config`` and ``build``, as described above.

    Example:
        >>> from lpbnn.methods import mcp
        >>> register("plain", mcp)
        >>> describe("plain") == describe("mcp")
        True
        >>> del _registered["plain"]
    """
    if not isinstance(module, ModuleType):
        raise TypeError(
            f"expected a module, got {type(module).__name__}. Fix: import it, and give the module itself."
        )
    known = _modules()
    if not str(name).isidentifier() or known.get(name, module.__name__) != module.__name__:
        taken = f" {known[name]} has it." if name in known else ""
        raise ValueError(f"name={name!r}: expected a Python name that no method has.{taken}")
    _require_contract(module)
    _registered[name] = module.__name__


def _require_contract(module: ModuleType) -> None:
    missing = [part for part in ("Config", "build") if not hasattr(module, part)]
    if missing or sys.modules.get(module.__name__) is not module:
        problem = f"has no {' and no '.join(missing)}" if missing else "is not in sys.modules"
        raise TypeError(
            f"{module.__name__} {problem}. A method is an importable module with a Config and a "
            "function build(net, config, **model_options); see docs/howto/add-a-method.md."
        )


def _modules() -> dict[str, str]:
    """Return the full name of each method's module; a file in this folder comes first."""
    return {**_installed(), **_registered, **_OWN}


@cache
def _installed() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=GROUP)}


def load(name: str) -> ModuleType:
    """Return the module of a method.

    Example:
        >>> load("mcp").__name__
        'lpbnn.methods.mcp'
    """
    with _module(name) as path:
        module = importlib.import_module(path)
        _require_contract(module)
    return module


@contextmanager
def _module(name: str) -> Iterator[str]:
    """Give the full name of a method's module; name the package of others that cannot be used."""
    known = _modules()
    if name not in known:
        raise registry.unknown("method", name, sorted(known))
    path = known[name]
    try:
        yield path
    except Exception as error:  # their code may fail in any way
        if path != _installed().get(name):
            raise
        why = str(error).rstrip(".")
        raise ValueError(
            f"the method {name!r} is {path!r} of another package, which cannot be used: {why}. Fix: repair "
            "that package, or uninstall it."
        ) from error


def describe(name: str) -> str:
    """Return one line about a method: the first line of its file, which is not imported.

    Example:
        >>> describe("mcp")
        'MCP: the plain network; its confidence is the maximum class probability.'
    """
    with _module(name) as path:
        return next(iter(source.doc(path).splitlines()), "")


def options(name: str) -> list[source.Option]:
    """Return the options of a method: the fields of its ``Config``.

    Example:
        >>> [option.name for option in options("mcp")]
        ['num_data', 'members']
    """
    own = source.stored("method", name) if _modules().get(name) == _OWN.get(name) else None
    return source.config_options(load(name).Config) if own is None else own


def configure(module: ModuleType, options: Mapping[str, Any]) -> Any:
    """Return the method's ``Config`` from keyword options; an unknown option names the right one.

    Example:
        >>> configure(load("ensemble"), {"members": 3}).members
        3
    """
    known = module.Config.__dataclass_fields__
    for name in options:
        if name not in known:
            method = module.__name__.rpartition(".")[2]
            raise TypeError(
                f"{method} has no option {name!r}.{registry.did_you_mean(name, known)} Its options are: "
                f"{', '.join(known)}."
            )
    return module.Config(**options)
