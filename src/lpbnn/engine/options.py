"""From what the command line says to a config: NAME=VALUE options, and what a resumed run may change."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lpbnn.engine.config import RunConfig
from lpbnn.engine.run import FREE
from lpbnn.engine.rundir import RunDir


def resumed(config: RunConfig, options: tuple[str, ...], folder: Path) -> RunConfig:
    """A stopped run's own config; only where and how fast it runs may be chosen anew."""
    before, plain = RunDir(folder).config(), RunConfig()
    given = [
        field.name
        for field in fields(config)
        if getattr(config, field.name) != getattr(plain, field.name)
    ]
    fixed = [name for name in given if name not in FREE] + (["set"] if options else [])
    if fixed:
        raise ValueError(
            f"--resume goes on with the settings of {folder}; it cannot take {', '.join(fixed)}. Fix: "
            "leave them out, or train anew with another -o."
        )
    return replace(before, **{name: getattr(config, name) for name in given})


def with_options(config: RunConfig, options: tuple[str, ...]) -> RunConfig:
    """NAME=VALUE pairs into the options of the method, the backbone or the data set.

    >>> with_options(RunConfig(), ("members=8", "backbone.dropout=0.1")).method_options
    {'members': 8}
    """
    fields = {"": "method_options", "backbone": "backbone_options", "data": "data_options"}
    chosen: dict[str, dict[str, Any]] = {
        field: dict(getattr(config, field)) for field in fields.values()
    }
    for option in options:
        name, equals, value = option.partition("=")
        prefix, _, key = name.rpartition(".")
        if not equals or prefix not in fields or not key:
            raise ValueError(
                f"--set {option!r}: expected NAME=VALUE, such as members=8, backbone.dropout=0.1 or "
                "data.val=5000."
            )
        chosen[fields[prefix]][key] = _value(value)
    return replace(config, **chosen)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text  # a word is itself: weighting=equation
