"""Which layers are meant: paths, globs of them and types, included or excluded."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

Pattern = str | type[nn.Module]
Filter = Pattern | Sequence[Pattern] | None


class Candidate(NamedTuple):
    """A layer that can be chosen, under every path it is known by (the first one names it)."""

    paths: list[str]
    module: nn.Module  # for a projection of nn.MultiheadAttention: the attention


def patterns(given: Filter) -> list[Pattern] | None:
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
    paths, module = candidate
    if isinstance(pattern, str):
        return any(fnmatchcase(path, pattern) or path.startswith(f"{pattern}.") for path in paths)
    if isinstance(module, nn.MultiheadAttention):
        return issubclass(nn.Linear, pattern) or isinstance(module, pattern)
    return isinstance(module, pattern)


def reason_to_leave(
    candidate: Candidate, include: list[Pattern] | None, exclude: list[Pattern] | None
) -> str:
    if include is not None and not any(matches(candidate, p) for p in include):
        return "not included"
    return "excluded" if any(matches(candidate, p) for p in exclude or []) else ""
