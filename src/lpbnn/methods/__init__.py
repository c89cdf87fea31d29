"""The contract of a method: one file here, found by its name.

A method file has, in this order,

- a docstring whose first line is its claim, then the equation and the paper;
- ``Config``: a frozen dataclass with a default for every option of the method (a subclass of
  ``_options.Options``, which checks the values against their annotations);
- ``build(net, config, **model_options) -> UncertainModel``: wraps the network. The model options are
  ``likelihood`` and ``readout``.

Its model (see ``lpbnn.model.UncertainModel``) defines ``outputs`` and, where needed, its own ``loss``,
``passes``, ``ood_score``, ``parameter_groups`` and the hooks ``before_epoch``, ``after_step`` and
``after_fit``. Nothing else in the project names a method. Folders added to ``lpbnn.methods.__path__`` are
searched too.
"""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from lpbnn import registry, source


def names() -> list[str]:
    """Return every method, in alphabetical order.

    Example:
        >>> "lpbnn" in names()
        True
    """
    return registry.modules(__name__)


def load(name: str) -> ModuleType:
    """Return the module of a method.

    Example:
        >>> load("mcp").__name__
        'lpbnn.methods.mcp'
    """
    return importlib.import_module(_module(name))


def _module(name: str) -> str:
    """Return the full name of a method's module; an unknown method is an error."""
    if name not in names():
        raise registry.unknown("method", name, names())
    return f"{__name__}.{name}"


def describe(name: str) -> str:
    """Return one line about a method: the first line of its file, which is not imported.

    Example:
        >>> describe("mcp")
        'MCP: the plain network; its confidence is the maximum class probability.'
    """
    return source.doc(_module(name)).splitlines()[0]


def options(name: str) -> list[source.Option]:
    """Return the options of a method: the fields of ``Config`` in its file, which is not imported.

    Example:
        >>> [option.name for option in options("mcp")]
        ['num_data', 'members']
    """
    return source.config_options(source.read(_module(name), "Config"))


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
