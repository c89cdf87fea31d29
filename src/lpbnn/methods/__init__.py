"""The contract of a method: one file here, found by its name.

A method file has, in this order,

- a docstring whose first line is its claim, then the equation and the paper;
- ``Config``: a frozen dataclass with a default for every option of the method;
- ``build(net, config, **model_options) -> UncertainModel``: wraps the network. The model options are
  ``likelihood`` and ``readout``.

Its model (see ``lpbnn.model.UncertainModel``) defines ``outputs`` and, where needed, its own ``loss``,
``passes``, ``ood_score``, ``parameter_groups`` and the hooks ``before_epoch``, ``after_step`` and
``after_fit``. Nothing else in the project names a method. Folders added to ``lpbnn.methods.__path__`` are
searched too.
"""

import dataclasses
import difflib
import importlib
import math
import numbers
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from lpbnn import source


def names() -> list[str]:
    """Return every method, in alphabetical order.

    Example:
        >>> "lpbnn" in names()
        True
    """
    found = {module.name for module in pkgutil.iter_modules(__path__)}
    return sorted(name for name in found if not name.startswith("_"))


def load(name: str) -> ModuleType:
    """Return the module of a method."""
    _require_known(name)
    return importlib.import_module(f"{__name__}.{name}")


def _require_known(name: str) -> None:
    if name not in names():
        close = difflib.get_close_matches(str(name), names(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown method {name!r}.{hint} The methods are: {', '.join(names())}.")


def describe(name: str) -> str:
    """Return one line about a method: the first line of its file, which is not imported."""
    _require_known(name)
    return source.doc(f"{__name__}.{name}").splitlines()[0]


def options(name: str) -> list[source.Option]:
    """Return the options of a method: the fields of ``Config`` in its file, which is not imported.

    Example:
        >>> [option.name for option in options("mcp")]
        ['num_data', 'members']
    """
    _require_known(name)
    return source.config_options(source.read(f"{__name__}.{name}", "Config"))


def configure(module: ModuleType, options: Mapping[str, Any]) -> Any:
    """Return the method's ``Config`` from keyword options; an unknown option names the right one."""
    fields = {field.name: field for field in dataclasses.fields(module.Config)}
    method = module.__name__.rpartition(".")[2]
    for name in options:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(
                f"{method} has no option {name!r}.{hint} Its options are: {', '.join(fields) or 'none'}."
            )
    return module.Config(**{name: _checked(fields[name], value) for name, value in options.items()})


def _checked(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Return an option's value; a switch must be True or False, a number finite."""
    if field.type in (bool, "bool") and not isinstance(value, bool):
        raise ValueError(f"{field.name}={value!r}: expected true or false.")
    optional = field.type in (float | None, "float | None")
    if (optional and value is None) or not (optional or field.type in (float, "float")):
        return value
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise ValueError(f"{field.name}={value!r}: expected a finite number.")
    return value if isinstance(value, int) else float(value)  # numpy's are not torch's
