"""Names of methods, data sets, networks and experiments, and where they are.

The file is the registry: a module of the package is found by its name, and a table in it (``SETS``,
``NETS``) by its content. ``my_module:shapes`` is an entry of a table in a module outside the package, which is
imported like any other: installed, on ``PYTHONPATH``, or, with ``python -m lpbnn``, in the current folder.

A run stores the name and needs the module again. A run folder from elsewhere can name any module, so a
stored name is imported only with consent (``--trust``, ``trust=True``), never from inside the run folder.
"""

import difflib
import importlib
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lpbnn import source

T = TypeVar("T")


def modules(package: str) -> list[str]:
    """Return the public modules of an imported package, in alphabetical order.

    >>> "lpbnn" in modules("lpbnn.methods")
    True
    """
    found = {module.name for module in pkgutil.iter_modules(sys.modules[package].__path__)}
    return sorted(name for name in found if not name.startswith("_"))


def entries(package: str, table: str, mentioning: str = "") -> dict[str, Any]:
    """Return all entries of the tables ``{name: Entry(...)}`` in the modules of a package.

    Args:
        mentioning: import only modules in whose file this is a string.

    >>> entries("lpbnn.data", "SETS")["cubic"].description[:11]
    'y = x^3 + n'
    """
    found: dict[str, Any] = {}
    for name in modules(package):
        file = Path(str(source.find(f"{package}.{name}").origin))
        if mentioning and file.is_file() and f'"{mentioning}"' not in file.read_text("utf-8"):
            continue
        own = getattr(importlib.import_module(f"{package}.{name}"), table, {})
        if twice := found.keys() & own.keys():
            raise ValueError(
                f"{package.replace('.', '/')}/{name}.py declares {sorted(twice)}, which another file "
                "declares already; rename one of them."
            )
        found |= own
    return found


def entry(package: str, table: str, name: str, kind: type[T]) -> T | None:
    """Return the entry of a name, MODULE:NAME too; None if no module of the package declares it."""
    if is_outside(name):
        return find(name, table, kind)
    for mentioning in (name, ""):  # the file that declares it, as a rule
        known = entries(package, table, mentioning)
        if name in known:
            return known[name]
    return None


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return a sentence that names the nearest of the known names, or nothing.

    >>> did_you_mean("LPBN", ["mcp", "lpbnn"]), did_you_mean("x", ["mcp"])
    (" Did you mean 'lpbnn'?", '')
    """
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(given).lower(), names, n=1)
    return f" Did you mean {names[near[0]]!r}?" if near else ""


def unknown(kind: str, given: object, known: Iterable[str]) -> ValueError:
    """Return an error that repeats the name given, offers the nearest one and lists all.

    >>> print(unknown("data set", "digit", ["cubic", "digits"]))
    unknown data set 'digit'. Did you mean 'digits'? Known: cubic, digits.
    """
    known = list(known)
    guess = did_you_mean(given, known)
    return ValueError(f"unknown {kind} {given!r}.{guess} Known: {', '.join(known)}.")


def is_outside(name: str) -> bool:
    """Return True if a name contains its module.

    >>> is_outside("my_sets:shapes"), is_outside("digits")
    (True, False)
    """
    return ":" in name


def require_trust(names: Iterable[str], stored: Path, trust: bool) -> None:
    """Refuse to import what a stored config names, unless it is trusted and lies elsewhere.

    Args:
        names: the config's data set and backbone.
        stored: the run folder or config file.
        trust: True if the user has consented.
    """
    for name in filter(is_outside, names):
        module = name.partition(":")[0]
        if not trust:
            raise ValueError(
                f"the config in {stored} names {name!r}: this would import the Python module {module!r} and "
                "run its code. Fix: add --trust (trust=True) if you know where the config comes from."
            )
        try:
            spec = source.find(module)
        except (ModuleNotFoundError, ValueError):
            continue  # for ``find`` to tell
        for place in (spec.origin, *(spec.submodule_search_locations or ())):
            if stored.is_dir() and place and Path(place).resolve().is_relative_to(stored.resolve()):
                raise ValueError(
                    f"the config in {stored} names {name!r}, which is {place}, inside the run folder: code is "
                    "never imported from there. Fix: move the file elsewhere, on PYTHONPATH."
                )


def find(name: str, table: str, kind: type[T]) -> T:
    """Return the entry MODULE:NAME of a module's table.

    >>> from lpbnn.data import Entry
    >>> find("lpbnn.data.digits:digits", "SETS", Entry).description[:12]
    'scikit-learn'
    >>> find("lpbnn.data.digits:digit", "SETS", Entry)
    Traceback (most recent call last):
    ...
    ValueError: 'lpbnn.data.digits:digit': SETS of lpbnn.data.digits has no 'digit'. Did you ...
    """
    path, _, key = name.partition(":")
    if not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{name!r}: expected MODULE:NAME, such as my_package.my_module:shapes.")
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        # The file is there, but not what it imports.
        if not f"{path}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{name!r}: there is no module {error.name!r}. Fix: install it, or say where it is "
            "(PYTHONPATH=FOLDER lpbnn ...), or stand in its folder (python -m lpbnn ...)."
        ) from error
    found = getattr(module, table, None)
    if not isinstance(found, Mapping):
        raise ValueError(
            f"{name!r}: {path} has no {table}; expected a dictionary {table} = {{{key!r}: Entry(...)}}."
        )
    if key not in found:
        names = list(map(str, found))
        raise ValueError(
            f"{name!r}: {table} of {path} has no {key!r}.{did_you_mean(key, names)} It has: "
            f"{', '.join(names)}."
        )
    if not isinstance(found[key], kind):
        raise ValueError(
            f"{name!r}: {table}[{key!r}] is a {type(found[key]).__name__}; expected "
            f"{kind.__module__}.{kind.__name__}."
        )
    return found[key]
