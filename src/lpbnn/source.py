"""Read names from modules without importing torch, for ``lpbnn --help`` and ``lpbnn ls``.

Methods, networks and data sets are declared in files that import torch, which takes seconds. Here the
top-level statements of such a file are executed one by one, each when a name that it defines is needed, and
libraries are replaced by a placeholder. A table of entries or the options of a method need nothing else.
"""

import __future__

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from itertools import takewhile
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple


class Option(NamedTuple):
    """An option of a method, a network or a data set."""

    name: str
    hint: Any
    default: Any
    description: str


def doc(module: str) -> str:
    """Return the docstring of a module, which is not imported.

    Example:
        >>> doc("lpbnn.source").splitlines()[0]
        'Read names from modules without importing torch, for ``lpbnn --help`` and ``lpbnn ls``.'
    """
    text = _text(module)
    # Without parsing the whole file: ls shows the first lines of twenty.
    start = re.match(r'\s*r?"""(.*?)"""', text, re.DOTALL)
    return inspect.cleandoc(start[1]) if start else ast.get_docstring(ast.parse(text)) or ""


def read(module: str, name: str) -> Any:
    """Return what a module calls ``name``, or None; the module is imported only if nothing else helps."""
    if module not in sys.modules:
        names = _names(module)
        if name not in names.nodes:
            return None
        try:
            return names[name]
        except Exception:  # a statement that really needs a library
            importlib.import_module(module)
    return getattr(sys.modules[module], name, None)


def entries(package: str, table: str, name: str = "") -> dict[str, Any]:
    """Return all entries of the tables ``{name: Entry(...)}`` in a package's files.

    Args:
        name: read the files that mention this name alone; others are not parsed.

    Example:
        >>> entries("lpbnn.backbones", "NETS")["wrn-28-10"].description
        "Wide ResNet of the paper's CIFAR tables, 36.5 M parameters"
    """
    folders = getattr(sys.modules.get(package), "__path__", None)
    files = iter_modules(folders or find(package).submodule_search_locations)
    modules = [f"{package}.{file}" for file in sorted(file.name for file in files)]
    tables = (read(module, table) for module in modules if name in _text(module))
    return {key: entry for found in tables for key, entry in (found or {}).items()}


def config_options(config: type) -> list[Option]:
    """Return the fields of a method's ``Config``.

    The description of a field is the comment on its line, else the comment above it, else its entry in
    the ``Args`` of the class. A field that has none of these keeps the description in the base class.

    Example:
        >>> option = config_options(read("lpbnn.methods.duq", "Config"))[2]
        >>> option.name, option.default, option.description
        ('sigma', 0.1, 'length scale of the kernel')
    """
    hints: dict[str, Any] = {}
    descriptions: dict[str, str] = {}
    for base in reversed(config.__mro__[:-1]):
        names = _names(base.__module__)
        own = inspect.get_annotations(base)
        # A class that was imported has types, one that was read here has their text.
        hints |= {k: eval(v, names) if isinstance(v, str) else v for k, v in own.items()}
        descriptions |= _arguments(base) | names.comments(base.__name__)
    return [
        Option(f.name, hints[f.name], f.default, descriptions.get(f.name, ""))
        for f in dataclasses.fields(config)
    ]


def call_options(function: Callable[..., Any], skip: int) -> list[Option]:
    """Return the parameters of a function or class after the first ``skip``, without keyword-only ones.

    Example:
        >>> lenet = entries("lpbnn.backbones", "NETS")["lenet"].build
        >>> [(option.name, option.default) for option in call_options(lenet, skip=2)]
        [('dropout', 0.0)]
    """
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())[skip:]
    whole = function.func if isinstance(function, partial) else function
    descriptions = _arguments(whole)
    return [
        Option(p.name, p.annotation, p.default, descriptions.get(p.name, ""))
        for p in parameters
        if p.kind is not p.KEYWORD_ONLY
    ]


def find(module: str) -> ModuleSpec:
    """Return where a module is, without importing it or the packages that it is in."""
    parent = module.rpartition(".")[0]
    folders: Iterable[str] | None = getattr(sys.modules.get(parent), "__path__", None)
    if parent and folders is None:
        folders = find(parent).submodule_search_locations or ()
    try:
        spec = PathFinder.find_spec(module, None if folders is None else list(folders))
    except (
        KeyError
    ):  # a folder without __init__.py in another one, for which Python imports the parent
        spec = ModuleSpec(module, None, is_package=True)
        inside = (Path(folder, module.rpartition(".")[2]) for folder in folders or ())
        spec.submodule_search_locations = [str(path) for path in inside]
    if spec is None:  # an editable install may have a finder of its own
        spec = importlib.util.find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(f"there is no module {module!r}.", name=module)
    return spec


def _text(module: str) -> str:
    return Path(str(find(module).origin)).read_text("utf-8")


class _Placeholders(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Placeholder(metaclass=_Placeholders):
    """Any name of a library: may be subclassed and called, and has any attribute."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...


class _Names(dict[str, Any]):
    """The names of a module; each is defined when it is first looked up."""

    def __init__(self, module: str) -> None:
        super().__init__(__name__=__name__)  # dataclasses look for the module of a class
        self.module = module
        self.path = str(find(module).origin)
        text = _text(module)
        self.lines, self.tree = text.splitlines(), ast.parse(text)
        self.nodes = {name: node for node in self.tree.body for name in _defined(node)}

    def __missing__(self, name: str) -> Any:
        node = self.nodes[name]  # a KeyError sends Python on to its builtins
        source = node.module if isinstance(node, ast.ImportFrom) else None
        imports = isinstance(node, ast.Import | ast.ImportFrom)
        root = (source or name).partition(".")[0]
        if source is not None and root == "lpbnn":
            assert isinstance(node, ast.ImportFrom)
            original = next(a.name for a in node.names if name in (a.name, a.asname))
            found = read(source, original)
            self[name] = _names(f"{source}.{original}") if found is None else found
        elif imports and root not in sys.stdlib_module_names:
            self[name] = _Placeholder
        else:
            for used in _used_by_class(node):  # a class body looks past __missing__
                if used in self.nodes:
                    self[used]
            # Annotations stay text: a method may return the class that is being defined.
            flag = __future__.annotations.compiler_flag
            exec(compile(ast.Module([node], []), self.path, "exec", flag, True), self)
            if isinstance(node, ast.ClassDef):
                self[name].__module__ = self.module
        return self[name]

    def __getattr__(self, name: str) -> Any:
        if name in self.nodes:  # of a module that another one imports whole
            return self[name]
        raise AttributeError(name)

    def comments(self, cls: str) -> dict[str, str]:
        """Return the comments beside or above the fields of a class."""
        found: dict[str, str] = {}
        for field in getattr(self.nodes[cls], "body", ()):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                own = self.lines[field.lineno - 1 : field.end_lineno]
                said = [line.rpartition("  # ")[2] for line in own if "  # " in line]
                above = reversed(self.lines[: field.lineno - 1])
                said = (
                    said or list(takewhile(lambda line: line.strip().startswith("#"), above))[::-1]
                )
                if said:
                    found[field.target.id] = " ".join(line.strip("# ") for line in said)
        return found


_names = cache(_Names)


def _defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _used_by_class(node: ast.stmt) -> list[str]:
    """Return the names that the body of a class uses when it is defined."""
    parts: list[Any] = []
    for part in node.body if isinstance(node, ast.ClassDef) else ():
        parts += [part.value] if isinstance(part, ast.Assign | ast.AnnAssign) else []
        if isinstance(part, ast.FunctionDef):
            parts += [*part.decorator_list, *part.args.defaults, *part.args.kw_defaults]
    names = (name for part in parts if part is not None for name in ast.walk(part))
    return [name.id for name in names if isinstance(name, ast.Name)]


def _arguments(documented: Any) -> dict[str, str]:
    """Return the entries of a docstring's ``Args``, each on one line."""
    import docstring_parser  # a dependency of tyro

    entries = docstring_parser.parse(documented.__doc__ or "").params
    return {
        name.strip(): " ".join((entry.description or "").split())
        for entry in entries
        for name in entry.arg_name.split(",")
    }
