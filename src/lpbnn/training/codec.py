"""Frozen dataclasses to JSON and back, without loss: one check for what was typed and what was read.

``conform(hint, value, where)`` brings a value to the form its type hint asks for (a list becomes a
tuple, 1 becomes 1.0) or says what was expected. Dataclasses call ``settle(self)`` when they are
made, so a config built in Python and one read from a file obey the same rules and compare equal.
"""

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def settle(instance: Any) -> None:
    """Check and normalise every field of a frozen dataclass; for its ``__post_init__``."""
    hints = get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        value = conform(hints[field.name], getattr(instance, field.name), field.name)
        object.__setattr__(instance, field.name, value)


def to_data(value: Any) -> Any:
    """Dataclasses as dictionaries, tuples as lists: what ``json.dumps`` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_data(item) for key, item in value.items()}
    return [to_data(item) for item in value] if isinstance(value, tuple | list) else value


def from_data(cls: type[T], data: Any, where: str = "") -> T:
    """The dataclass ``cls`` from what ``to_data`` made of it; missing keys take their defaults."""
    name = where or cls.__name__
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} is {data!r}; expected a mapping of its fields.")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name} has no field {key!r}.{guess} It has: {', '.join(fields)}.")
    for field in fields.values():
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and field.name not in data:
            raise ValueError(f"{name} lacks {field.name!r}, which has no default. Fix: add it.")
    hints = get_type_hints(cls)
    prefix = f"{where}." if where else ""
    return cls(**{key: conform(hints[key], data[key], prefix + key) for key in data})


def conform(hint: Any, value: Any, where: str) -> Any:
    """``value`` as ``hint`` wants it, or a ``ValueError`` that names ``where``.

    >>> conform(tuple[int, ...], [80, 160], "milestones"), conform(float | None, 1, "clip")
    ((80, 160), 1.0)
    >>> conform(Literal["sgd", "adamw"], "adam", "optim.name")
    Traceback (most recent call last):
    ValueError: optim.name is 'adam'; expected 'sgd' or 'adamw'. Did you mean 'adamw'?
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return _plain(value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else from_data(hint, value, where)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in args):
            return value
        raise ValueError(f"{where} is {value!r}; expected {_name(hint)}.{_near(value, args)}")
    if origin in (Union, types.UnionType):
        return _first_of(args, value, where)
    if origin is tuple and isinstance(value, tuple | list):
        return tuple(conform(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {key: conform(args[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    if hint in (bool, int, float, str):
        return _scalar(hint, value, where)
    raise ValueError(f"{where} is {value!r}; expected {_name(hint)}.")


def _scalar(hint: type, value: Any, where: str) -> Any:
    if type(value) is hint and (hint is not float or math.isfinite(value)):
        return value
    if hint is float and type(value) is int:
        return float(value)
    raise ValueError(f"{where} is {value!r}; expected {_name(hint)}.")


def differences(one: Any, two: Any, where: str = "") -> list[str]:
    """What two results of ``to_data`` disagree in, as ``path: one -> two``.

    >>> differences({"optim": {"lr": 0.1, "name": "sgd"}}, {"optim": {"lr": 0.05, "name": "sgd"}})
    ['optim.lr: 0.1 -> 0.05']
    """
    if isinstance(one, dict) and isinstance(two, dict):
        found = []
        for key in {**one, **two}:
            path = f"{where}.{key}" if where else str(key)
            found += differences(one.get(key), two.get(key), path)
        return found
    return [] if one == two else [f"{where}: {one!r} -> {two!r}"]


def _first_of(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in choices:
        return None
    real = [choice for choice in choices if choice is not type(None)]
    if len(real) == 1:
        return conform(real[0], value, where)
    for choice in real:
        try:
            return conform(choice, value, where)
        except ValueError:
            continue
    raise ValueError(f"{where} is {value!r}; expected {' or '.join(map(_name, choices))}.")


def _plain(value: Any, where: str) -> Any:
    """An option whose type is its method's business: anything that JSON can hold."""
    if isinstance(value, tuple | list):
        return tuple(_plain(item, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    finite = not isinstance(value, float) or math.isfinite(value)
    if value is None or (isinstance(value, bool | int | float | str) and finite):
        return value
    raise ValueError(
        f"{where} is {value!r}, which a run folder cannot keep; expected a finite number, a string, "
        "true or false, None, or a list of these. Fix: name layers by their paths."
    )


def _near(value: Any, choices: tuple[Any, ...]) -> str:
    near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _name(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "None"
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        return f"a list, each {_name(args[0])}"
    if origin is dict:
        return "a mapping with names as keys"
    words = {float: "a finite number", int: "an integer", bool: "true or false", str: "a string"}
    return words.get(hint, str(hint))
