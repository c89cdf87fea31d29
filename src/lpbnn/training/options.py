"""From what the command line says to a config: NAME=VALUE options, and what a resumed run may change."""

import ast
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg

from lpbnn.training.config import FREE, EvalConfig, RunConfig, differences

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


def named_run(args: list[str]) -> Path | None:
    """The run whose settings a command begins with: ``train --resume RUN`` and ``eval RUN``.

    >>> str(named_run(["train", "--epochs", "3", "--resume", "runs/a"]))
    'runs/a'
    >>> str(named_run(["eval", "--samples", "8", "runs/a", "--no-ood"]))
    'runs/a'
    """
    look = {"train": _resumed_run, "eval": _measured_run}.get(args[0] if args else "")
    if look is None or {"-h", "--help"} & set(args):
        return None
    # What else is there is for the command itself to read, and to complain about.
    how: dict[str, Any] = {"add_help": False, "return_unknown_args": True}
    return tyro.cli(look, args=args[1:], prog=f"lpbnn {args[0]}", **how)[0]


def _resumed_run(resume: Path | None = None) -> Path | None:
    return resume


def _measured_run(
    settings: Annotated[EvalConfig, arg(name="")],  # so that its values are not taken for the run
    data_root: str | None = None,
    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")] = (),
) -> Path | None:
    return runs[0] if len(runs) == 1 else None


def resumable(folder: Path) -> RunConfig:
    """A run's config for the command line to change.

    Without what has names of its own, such as the method's options: each would become an option of the
    command, and ``resumed`` takes them from the run.
    """
    from lpbnn.training.rundir import RunDir  # imports torch: not for --help

    config = RunDir(folder).config_as_measured()
    empty: dict[str, Any] = {name: {} for name in OPTIONS.values()}
    return replace(config, optim=replace(config.optim, parts={}), **empty)


def resumed(typed: RunConfig, folder: Path, others: Sequence[str] = ()) -> RunConfig:
    """A stopped run's own config; only where and how fast it runs, and what is measured, may change.

    Args:
        typed: ``resumable(folder)`` with what the command line says.
        others: what it says beside the config, and none of it can be taken.
    """
    from lpbnn.training.rundir import RunDir  # imports torch: not for --help

    changes = differences(resumable(folder).to_data(), typed.to_data())
    names = [change.partition(":")[0] for change in changes]
    fixed = [name for name in names if name.partition(".")[0] not in FREE] + list(others)
    if fixed:
        raise ValueError(
            f"--resume goes on with the settings of {folder}; it cannot take {', '.join(fixed)}. Fix: "
            "leave them out, or train anew with another -o."
        )
    own = RunDir(folder).config_as_measured()
    return replace(own, **{name: getattr(typed, name) for name in FREE})


def _value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):  # false as in JSON, False as in Python
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text  # a word is itself: weighting=equation
