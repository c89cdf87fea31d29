"""Filters: path globs and layer types that include or exclude layers."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

Pattern = str | type[nn.Module]
Filter = Pattern | Sequence[Pattern] | None


class Candidate(NamedTuple):
    """A module that a filter can choose, with every path it has (the first one names it)."""

    paths: list[str]
    module: nn.Module  # for a projection of nn.MultiheadAttention: the attention
    size: int = 0  # numbers in its weight matrices, if it is no layer

    def matches(self, pattern: Pattern) -> bool:
        """Return True if a pattern means this module; a path also means everything below it."""
        if isinstance(pattern, str):
            return any(
                fnmatchcase(path, pattern) or path.startswith(f"{pattern}.") for path in self.paths
            )
        if isinstance(self.module, nn.MultiheadAttention) and issubclass(nn.Linear, pattern):
            return True
        return isinstance(self.module, pattern)


class Filters:
    """The two filters of a conversion."""

    def __init__(self, include: Filter = None, exclude: Filter = None) -> None:
        self.all = include is None
        self.include = [] if include is None else as_patterns(include)
        self.exclude = [] if exclude is None else as_patterns(exclude)

    def reason_to_leave(self, candidate: Candidate) -> str:
        """Return why a module is not converted; empty if it is."""
        if not self.all and not any(map(candidate.matches, self.include)):
            return "not included"
        return "excluded" if any(map(candidate.matches, self.exclude)) else ""

    def find_idle(
        self, layers: Sequence[Candidate], others: Sequence[Candidate]
    ) -> tuple[str, Pattern] | None:
        """Return the first pattern that matches nothing, after the name of its filter."""
        named = (("include", self.include, layers), ("exclude", self.exclude, [*layers, *others]))
        for name, patterns, candidates in named:
            for pattern in patterns:
                if not any(candidate.matches(pattern) for candidate in candidates):
                    return name, pattern
        return None


def as_patterns(given: Pattern | Sequence[Pattern]) -> list[Pattern]:
    """Return a filter as a list of patterns."""
    patterns: list[Pattern] = [given] if isinstance(given, str | type) else list(given)
    for pattern in patterns:
        if not isinstance(pattern, str | type):
            raise TypeError(
                f"a filter is a path glob or a layer type; got {pattern!r}. "
                "Example: include=['decoder.*', nn.Conv2d]."
            )
    return patterns


def join(path: str, name: str) -> str:
    """Return the path of a part of the module at ``path``; the network itself has the path \"\"."""
    return f"{path}.{name}" if path else name
