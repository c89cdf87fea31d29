"""Options of methods, networks and data sets, for ``lpbnn ls``, ``--help`` and the command line.

They are declared in files that import torch, which takes seconds. Those of the package are therefore also in
a table, ``options.json``, which tools/make_stub.py writes and a test compares with the files. Options of other
packages are read from the imported module.
"""

import ast
import dataclasses
import importlib.util
import inspect
import json
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

TABLE = Path(__file__).with_name("options.json")


class Option(NamedTuple):
    """An option of a method, a network or a data set."""

    name: str
    hint: Any
    """The part of its type that can be typed on a command line; None if nothing is left."""
    default: Any
    description: str


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return the table: kind, name, then what the name is and its options.

    Example:
        >>> table()["backbone"]["wrn-28-10"]["about"]
        "Wide ResNet of the paper's CIFAR tables, 36.5 M parameters"
    """
    return json.loads(TABLE.read_bytes())


def stored(kind: str, name: str) -> list[Option] | None:
    """Return the options of a method, a backbone or a data set of the package; None if it has no such name.

    Example:
        >>> option = stored("method", "duq")[2]
        >>> option.name, option.hint, option.default, option.description
        ('sigma', <class 'float'>, 0.1, 'length scale of the kernel')
    """
    entry = table()[kind].get(name)
    if entry is None:
        return None
    return [
        Option(
            one["name"],
            eval(one["type"], {"typing": typing, "NoneType": NoneType}),
            as_tuples(one["default"]) if "default" in one else inspect.Parameter.empty,
            one["help"],
        )
        for one in entry["options"]
    ]


def to_data(options: Iterable[Option]) -> list[dict[str, Any]]:
    """Return options as the table has them; ``stored`` reads them back."""
    found = []
    for option in options:
        plain = isinstance(option.hint, type) and not get_args(option.hint)
        kind = option.hint.__name__ if plain else repr(option.hint)
        default = {} if _is_required(option) else {"default": option.default}
        found.append({"name": option.name, "type": kind, **default, "help": option.description})
    return found


def _is_required(option: Option) -> bool:
    return option.default in (inspect.Parameter.empty, dataclasses.MISSING)


def as_tuples(value: Any) -> Any:
    """Return a value with tuples in place of its lists, to any depth.

    Example:
        >>> as_tuples([1, [2, 3]])
        (1, (2, 3))
    """
    return tuple(map(as_tuples, value)) if isinstance(value, list | tuple) else value


def config_options(config: type) -> list[Option]:
    """Return the fields of a method's ``Config``.

    The description of a field is the comment on its line, else the comment above it, else its entry in
    the ``Args`` of the class. A field that has none of these keeps the description in the base class.
    """
    descriptions: dict[str, str] = {}
    for base in reversed(config.__mro__[:-1]):
        descriptions |= _arguments(base) | _comments(base)
    hints = typing.get_type_hints(config, include_extras=True)
    return [
        Option(f.name, typed(hints[f.name]), f.default, descriptions.get(f.name, ""))
        for f in dataclasses.fields(config)
    ]


def call_options(function: Callable[..., Any], skip: int) -> list[Option]:
    """Return the parameters of a function or class after the first ``skip``, without keyword-only ones."""
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())[skip:]
    descriptions = _arguments(function.func if isinstance(function, partial) else function)
    return [
        Option(
            p.name,
            type(p.default) if p.annotation is p.empty else typed(p.annotation),
            p.default,
            descriptions.get(p.name, ""),
        )
        for p in parameters
        if p.kind is not p.KEYWORD_ONLY
    ]


def typed(hint: Any) -> Any:
    """Return the part of a type that can be typed: no classes and no functions; None if nothing is left."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return typed(args[0])
    if hint in (bool, int, float, str, NoneType) or origin is Literal:
        return hint
    if origin in (Union, UnionType):
        kept = [part for part in map(typed, args) if part is not None]
        return Union[tuple(kept)] if set(kept) - {NoneType} else None  # noqa: UP007
    if isinstance(origin, type) and issubclass(origin, Sequence):
        item = typed(args[0])
        return None if item is None else tuple[item, ...]
    return None


def _comments(cls: type) -> dict[str, str]:
    """Return the comments beside or above the fields of a class."""
    text = textwrap.dedent(inspect.getsource(cls))
    lines, found = text.splitlines(), {}
    for field in ast.parse(text).body[0].body:  # type: ignore[attr-defined]
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            own = lines[field.lineno - 1 : field.end_lineno]
            said = [line.rpartition("  # ")[2] for line in own if "  # " in line]
            above = reversed(lines[: field.lineno - 1])
            said = said or list(takewhile(lambda line: line.strip().startswith("#"), above))[::-1]
            if said:
                found[field.target.id] = " ".join(line.strip("# ") for line in said)
    return found


def _arguments(documented: Any) -> dict[str, str]:
    """Return the entries of a docstring's ``Args``, each on one line."""
    import docstring_parser  # a dependency of tyro

    entries = docstring_parser.parse(documented.__doc__ or "").params
    return {
        name.strip(): " ".join((entry.description or "").split())
        for entry in entries
        for name in entry.arg_name.split(",")
    }


def doc(module: str) -> str:
    """Return the docstring of a module, which is not imported.

    Example:
        >>> doc("lpbnn.registry").splitlines()[0]
        'Names of methods, data sets, networks and experiments, and where they are.'
    """
    text = Path(str(find(module).origin)).read_text("utf-8")
    # Without parsing the whole file: ls shows the first lines of twenty.
    start = re.match(r'\s*r?"""(.*?)"""', text, re.DOTALL)
    return inspect.cleandoc(start[1]) if start else ast.get_docstring(ast.parse(text)) or ""


def find(module: str) -> ModuleSpec:
    """Return where a module is, without importing it or the packages that it is in."""
    parent = module.rpartition(".")[0]
    folders: Iterable[str] | None = getattr(sys.modules.get(parent), "__path__", None)
    if parent and folders is None:
        folders = find(parent).submodule_search_locations or ()
    try:
        spec = PathFinder.find_spec(module, None if folders is None else list(folders))
    except KeyError:
        # A folder without __init__.py in another one, for which Python imports the parent.
        spec = ModuleSpec(module, None, is_package=True)
        inside = (Path(folder, module.rpartition(".")[2]) for folder in folders or ())
        spec.submodule_search_locations = [str(path) for path in inside]
    if spec is None:  # an editable install may have a finder of its own
        spec = importlib.util.find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(f"there is no module {module!r}.", name=module)
    return spec
