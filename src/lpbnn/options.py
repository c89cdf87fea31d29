"""Options of a method: a frozen dataclass whose values are checked against its annotations."""

import dataclasses
import math
import numbers
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


class Range(NamedTuple):
    """The values that a number may have, for ``Annotated``.

    Args:
        expected: the range in words, for the error message.
        low: the smallest value.
        high: the largest value.
    """

    expected: str
    low: float
    high: float = math.inf


ABOVE_0 = math.nextafter(0, 1)
BELOW_1 = math.nextafter(1, 0)
INTEGER = Range("an integer", -math.inf)
NUMBER = Range("a finite number", -math.inf)
Count = Annotated[int, Range("an integer of at least 1", 1)]
DataCount = Annotated[int, Range("the number of training examples, an integer of at least 1", 1)]
OneNetwork = Annotated[int, Range("1, this method is one network; use 'ensemble' for more", 1, 1)]
Positive = Annotated[float, Range("a number above 0", ABOVE_0)]
NonNegative = Annotated[float, Range("a number of at least 0", 0)]
Share = Annotated[float, Range("a share between 0 and 1", 0, 1)]


@dataclasses.dataclass(frozen=True)
class Options:
    """Base class of every method's ``Config``.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Config(Options):
        ...     members: Count = 4
        >>> Config(members=0)
        Traceback (most recent call last):
        ValueError: members=0: expected an integer of at least 1.
    """

    num_data: DataCount | None = None  # N, training examples; unused where the loss has no KL

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), hint))


def checked(name: str, value: Any, hint: Any) -> Any:
    """Return an option's value, a number as Python's own type; refuse one that its annotation excludes.

    Args:
        name: the option, for the error message.
        value: its value.
        hint: ``bool``, ``Literal``, ``int`` or ``float``, these two perhaps with a ``Range``, or one of
            them ``| None``. Values of other types are the method's to check.

    Example:
        >>> checked("std", 0.1, Positive), checked("std", None, Positive | None)
        (0.1, None)
    """
    or_none = ""
    if get_origin(hint) in (Union, UnionType):
        if value is None:
            return None
        or_none = ", or None" if NoneType in get_args(hint) else ""
        hint = get_args(hint)[0]
    limits = INTEGER if hint is int else NUMBER
    if get_origin(hint) is Annotated:
        hint, limits = get_args(hint)
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if value not in choices:
            listed = " or ".join([", ".join(map(repr, choices[:-1])), repr(choices[-1])])
            raise ValueError(f"{name}={value!r}: choose {listed}{or_none}.")
    elif hint is bool and not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: expected true or false.")
    elif hint in (int, float):
        kind: Any = numbers.Integral if hint is int else numbers.Real
        number = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not limits.low <= value <= limits.high:
            raise ValueError(f"{name}={value!r}: expected {limits.expected}{or_none}.")
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value


def require_num_data(config: Options, method: str) -> int:
    """Return num_data; the KL is divided by it, so it must be given, never guessed."""
    if config.num_data is None:
        raise ValueError(
            f"{method} needs num_data, the number of training examples that its KL term is divided "
            "by. Fix: build(..., num_data=len(train))."
        )
    return config.num_data


def annealed(epoch: int, epochs: int, share: float) -> float:
    """Return the KL's weight in an epoch (from 0): it grows in equal steps to 1 over a share of them.

    Example:
        >>> [annealed(epoch, 4, share=0.5) for epoch in range(4)]
        [0.5, 1.0, 1.0, 1.0]
    """
    return min(1.0, (epoch + 1) / max(1.0, share * epochs))
