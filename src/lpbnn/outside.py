"""Data sets and networks from files outside the package, by name: `my_module:shapes`.

Such a file is what a file inside would be: it declares `SETS` (see `lpbnn.data`) or `NETS` (see
`lpbnn.backbones`). The module is found as any import: installed, on ``PYTHONPATH``, or, under
``python -m lpbnn``, in the folder one is in. A run keeps the name, and needs the file again to resume, to
measure and to predict.

A run folder from somewhere else can name any module, so what a stored config names is imported only with
consent (``--trust``, ``trust=True``), never from inside the run folder, and of it only an entry of its table is
called: no other function.
"""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from lpbnn import source

T = TypeVar("T")


def is_outside(name: str) -> bool:
    """Whether a name says where its file is.

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
    """The entry of a module's table; what is missing is an error that says where it was looked for.

    >>> from lpbnn.data import Entry
    >>> find("lpbnn.data.digits:digits", "SETS", Entry).description[:12]
    'scikit-learn'
    >>> find("lpbnn.data.digits:digit", "SETS", Entry)
    Traceback (most recent call last):
    ...
    ValueError: 'lpbnn.data.digits:digit': SETS of lpbnn.data.digits has no 'digit'; did you ...
    """
    path, _, key = name.partition(":")
    if not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{name!r}: expected MODULE:NAME, such as my_package.my_module:shapes.")
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(
            f"{error.name}."
        ):  # the file is there, but not what it imports
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
        near = difflib.get_close_matches(key, map(str, found), n=1, cutoff=0.4)
        guess = f"did you mean {near[0]!r}? It has" if near else "it has"
        raise ValueError(
            f"{name!r}: {table} of {path} has no {key!r}; {guess}: {', '.join(map(str, found))}."
        )
    if not isinstance(found[key], kind):
        raise ValueError(
            f"{name!r}: {table}[{key!r}] is a {type(found[key]).__name__}; expected "
            f"{kind.__module__}.{kind.__name__}."
        )
    return found[key]
