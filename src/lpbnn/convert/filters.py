"""Filters: path globs and layer types that include or exclude layers."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

Pattern = str | type[nn.Module]
Filter = Pattern | Sequence[Pattern] | None


class Candidate(NamedTuple):
    """A layer that can be converted, with every path it has (the first one names it)."""

    paths: list[str]
    module: nn.Module  # for a projection of nn.MultiheadAttention: the attention


def parse_patterns(given: Filter) -> list[Pattern] | None:
    """Return a filter as a list of patterns; None stays None."""
    if given is None:
        return None
    patterns: list[Pattern] = [given] if isinstance(given, str | type) else list(given)
    for pattern in patterns:
        if not isinstance(pattern, str | type):
            raise TypeError(
                f"a filter is a path glob or a layer type; got {pattern!r}. "
                "Example: include=['decoder.*', nn.Conv2d]."
            )
    return patterns


def matches(candidate: Candidate, pattern: Pattern) -> bool:
    """Return True if a pattern means this layer; a path also means everything below it."""
    paths, module = candidate
    if isinstance(pattern, str):
        return any(fnmatchcase(path, pattern) or path.startswith(f"{pattern}.") for path in paths)
    if isinstance(module, nn.MultiheadAttention):
        return issubclass(nn.Linear, pattern) or isinstance(module, pattern)
    return isinstance(module, pattern)


def reason_to_leave(
    candidate: Candidate, include: list[Pattern] | None, exclude: list[Pattern] | None
) -> str:
    """Return why a layer is not converted; empty if it is."""
    if include is not None and not any(matches(candidate, p) for p in include):
        return "not included"
    return "excluded" if any(matches(candidate, p) for p in exclude or []) else ""
