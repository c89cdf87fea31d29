"""Read descriptions, tables and options from source files, without importing what they import.

``lpbnn --help`` and ``lpbnn ls`` show text that lives in the files of methods, backbones, data sets and
experiments. Importing these files would import torch, which takes seconds.
"""

import ast
import importlib
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import NamedTuple

# Comments for tools, in front of or instead of those for readers.
_FOR_TOOLS = re.compile(r"#\s*(type:|pyright:|noqa|fmt:)[^#]*")


class Option(NamedTuple):
    """One field of a ``Config``: its name, its default as it is written, and one line about it."""

    name: str
    default: str
    description: str


def doc(module: str) -> str:
    """Return the docstring of a module; its parent packages are imported, the module is not.

    Example:
        >>> doc("lpbnn.source").splitlines()[0]
        'Read descriptions, tables and options from source files, without importing what they import.'
    """
    return ast.get_docstring(_parsed(_file(module))) or ""


def descriptions(package: str, table: str) -> dict[str, str]:
    """Return ``{name: description}`` of the tables ``{name: Entry(...)}`` in a package's files.

    A table that is computed rather than written out is imported instead.

    Args:
        package: the package whose files have tables; it is not imported.
        table: what the tables are called; a file may have none.

    Example:
        >>> descriptions("lpbnn.backbones", "NETS")["wrn-28-10"]
        "Wide ResNet of the paper's CIFAR tables, 36.5 M parameters"
    """
    found: dict[str, str] = {}
    for name, path in sorted(_files(package)):
        written = _assigned(_parsed(path), table)
        if written is None:
            continue
        read = _entries(written)
        if read is None:
            entries = getattr(importlib.import_module(f"{package}.{name}"), table)
            read = {key: entry.description for key, entry in entries.items()}
        found |= read
    return found


def options(module: str, config: str = "Config") -> list[Option]:
    """Return the fields of a dataclass and of its bases, in the order of the dataclass.

    The description of a field is the comment on its line, else the comment above it, else its entry in
    the ``Args`` of the class. A field that has none of these keeps the description in the base class.

    Example:
        >>> options("lpbnn.methods.duq")[2]
        Option(name='sigma', default='0.1', description='length scale of the kernel')
    """
    return list(_options(_file(module), config).values())


def _options(path: Path, config: str) -> dict[str, Option]:
    text = path.read_text("utf-8")
    tree, comments = ast.parse(text), _comments(text)
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == config)
    found: dict[str, Option] = {}
    for base in reversed(node.bases):  # as dataclasses does: what comes first in the MRO wins
        if isinstance(base, ast.Name):
            found |= _base_options(path, tree, base.id)
    described = _arguments(ast.get_docstring(node) or "")
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name = field.target.id
        default = "" if field.value is None else ast.unparse(field.value)
        beside = _beside(comments, field)
        inherited = found[name].description if name in found else ""
        found[name] = Option(name, default, beside or described.get(name) or inherited)
    return found


def _base_options(path: Path, tree: ast.Module, base: str) -> dict[str, Option]:
    """Options of a base class, from this file or from the one that it is imported from."""
    if any(isinstance(n, ast.ClassDef) and n.name == base for n in tree.body):
        return _options(path, base)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == base:
                    return _options(_file(node.module), alias.name)
    return {}


class _Comments(NamedTuple):
    trailing: Mapping[int, str]  # by line
    standing: Mapping[int, str]  # alone on their line


def _comments(text: str) -> _Comments:
    found = _Comments({}, {})
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            said = _FOR_TOOLS.sub("", token.string).lstrip("# ").strip()
            (found.standing if alone else found.trailing)[token.start[0]] = said  # type: ignore[index]
    return found


def _beside(comments: _Comments, field: ast.AnnAssign) -> str:
    """The comments on the lines of a field, or those right above it."""
    lines = range(field.lineno, (field.end_lineno or field.lineno) + 1)
    if said := [comments.trailing[line] for line in lines if comments.trailing.get(line)]:
        return " ".join(said)
    above: list[str] = []
    line = field.lineno - 1
    while line in comments.standing:
        above.insert(0, comments.standing[line])
        line -= 1
    return " ".join(above)


def _arguments(docstring: str) -> dict[str, str]:
    """The entries of a docstring's ``Args``, each on one line.

    >>> _arguments(
    ...     "Options.\\n\\nArgs:\\n    members: J, the\\n        networks.\\n    seed: of it."
    ... )
    {'members': 'J, the networks.', 'seed': 'of it.'}
    """
    found: dict[str, str] = {}
    name = ""
    _, _, listed = docstring.partition("Args:\n")
    for line in listed.splitlines():
        if line and not line.startswith(" "):
            break
        if entry := re.match(r" {4}(\w+): (.*)", line):
            name = entry[1]
            found[name] = entry[2]
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return found


def _entries(written: ast.expr) -> dict[str, str] | None:
    """The descriptions in ``{"name": Entry(...)}``; None where they are not literals."""
    if not isinstance(written, ast.Dict):
        return None
    found: dict[str, str] = {}
    for key, value in _items(written):
        if not isinstance(key, ast.Constant) or not isinstance(value, ast.Call):
            return None
        named = [word.value for word in value.keywords if word.arg == "description"]
        texts = [
            node.value
            for node in (named or value.args)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        if len(texts) != 1:
            return None
        found[str(key.value)] = texts[0]
    return found


def _items(written: ast.Dict) -> Iterator[tuple[ast.expr, ast.expr]]:
    for key, value in zip(written.keys, written.values, strict=True):
        # {**others} has no key; a constant that is no string stands for it.
        yield (ast.Name("**") if key is None else key), value


def _assigned(tree: ast.Module, name: str) -> ast.expr | None:
    """Return the expression that a module assigns to a name."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node.value
    return None


def _file(module: str) -> Path:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"there is no module {module!r}.", name=module)
    return Path(spec.origin)


def _files(package: str) -> Iterator[tuple[str, Path]]:
    """The files of a package, which itself is not imported; folders added to its path count."""
    if package in sys.modules:
        folders = list(sys.modules[package].__path__)
    else:
        spec = find_spec(package)
        folders = list((spec and spec.submodule_search_locations) or ())
    for module in iter_modules(folders):
        found = module.module_finder.find_spec(module.name, None)
        if found is not None and found.origin is not None:
            yield module.name, Path(found.origin)


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))
