"""From what the command line says to a config: NAME=VALUE options, and what a resumed run may change."""

import ast
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from lpbnn.engine.config import EvalConfig, RunConfig
from lpbnn.engine.run import FREE
from lpbnn.engine.rundir import RunDir

ConfigT = TypeVar("ConfigT", RunConfig, EvalConfig)
OPTIONS = {"": "method_options", "backbone": "backbone_options", "data": "data_options"}


def with_options(config: RunConfig, options: tuple[str, ...]) -> RunConfig:
    """NAME=VALUE pairs into the options of the method, the backbone or the data set.

    >>> with_options(RunConfig(), ("members=8", "backbone.dropout=0.1")).method_options
    {'members': 8}
    """
    chosen = {field: dict(getattr(config, field)) for field in OPTIONS.values()}
    for option in options:
        name, equals, value = option.partition("=")
        prefix, _, key = name.rpartition(".")
        if not equals or prefix not in OPTIONS or not key:
            raise ValueError(
                f"--set {option!r}: expected NAME=VALUE, such as members=8, backbone.dropout=0.1 or "
                "data.val=5000."
            )
        chosen[OPTIONS[prefix]][key] = _value(value)
    return replace(config, **chosen)


def resumed(config: RunConfig, options: tuple[str, ...], folder: Path) -> RunConfig:
    """A stopped run's own config; only where and how fast it runs may be chosen anew."""
    fixed = [name for name in _given(config) if name not in FREE] + (["set"] if options else [])
    if fixed:
        raise ValueError(
            f"--resume goes on with the settings of {folder}; it cannot take {', '.join(fixed)}. Fix: "
            "leave them out, or train anew with another -o."
        )
    return changed(config, RunDir(folder).config())


def changed(given: ConfigT, before: ConfigT) -> ConfigT:
    """``before`` with what was given on the command line, that is, what is not a default.

    >>> changed(EvalConfig(samples=2), EvalConfig(samples=8, corruptions=True)).samples
    2
    >>> changed(EvalConfig(), EvalConfig(samples=8)).samples
    8
    """
    return replace(before, **{name: getattr(given, name) for name in _given(given)})


def _given(config: RunConfig | EvalConfig) -> list[str]:
    plain = type(config)()
    names = [field.name for field in fields(config)]
    return [name for name in names if getattr(config, name) != getattr(plain, name)]


def _value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):  # false as in JSON, False as in Python
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text  # a word is itself: weighting=equation
