"""From the command line to a config: typed options of method, backbone and data set, files, resuming.

Nothing here imports torch, for ``--help``.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import arg

from lpbnn import methods, registry, source
from lpbnn.source import Option
from lpbnn.training.config import (
    MAY_DIFFER,
    RunConfig,
    differences,
    from_data,
    to_data,
    validate,
)

KINDS = ("method", "backbone", "data")
Options = dict[str, Any]  # by kind: an instance of its option type


@dataclass(frozen=True)
class Start:
    """What the options that were not typed are: those of a run, of a file, or the defaults."""

    config: RunConfig
    options: Options

    @classmethod
    def of(cls, args: Sequence[str]) -> "Start":
        """Read the arguments that decide which other options there are."""
        # What else is there is for the command itself to read, and to complain about.
        how: dict[str, Any] = {"add_help": False, "return_unknown_args": True}
        first: _First = tyro.cli(_First, args=list(args), prog="lpbnn train", **how)[0]
        config = RunConfig()
        if first.resume is not None and not {"-h", "--help"} & set(args):
            config = resumable(first.resume, first.trust)
        elif first.config is not None:
            config = read_config(first.config)
            named = [getattr(config, kind) for kind in KINDS if getattr(first, kind) is None]
            registry.require_trust(named, first.config, first.trust)
        for kind in KINDS:  # options in a file are those of the method that it names
            name = getattr(first, kind)
            if name not in (None, getattr(config, kind)) and first.resume is None:
                config = replace(config, **{kind: name, f"{kind}_options": {}})
        options: Options = {}
        for kind in KINDS:
            given = {k: v for k, v in getattr(config, f"{kind}_options").items() if k != "num_data"}
            options[kind] = from_data(option_type(kind, getattr(config, kind)), given, kind)
        return cls(config, options)


@dataclass(frozen=True)
class _First:
    method: str | None = None
    backbone: str | None = None
    data: str | None = None
    config: Path | None = None
    resume: Path | None = None
    trust: bool = False


def with_options(config: RunConfig, options: Options) -> RunConfig:
    """Return the config with those of the options that are not the defaults."""
    return replace(config, **{f"{kind}_options": _chosen(options[kind]) for kind in KINDS})


def all_options(config: RunConfig, options: Options) -> RunConfig:
    """Return the config with all of the options, for a file that is to be edited."""
    return replace(config, **{f"{kind}_options": to_data(options[kind]) for kind in KINDS})


def _chosen(options: Any) -> dict[str, Any]:
    values = {f: getattr(options, f.name) for f in dataclasses.fields(options)}
    return {f.name: value for f, value in values.items() if value != f.default}


def option_type(kind: str, name: str) -> type:
    """Return a dataclass of the options of a method, a backbone or a data set.

    >>> option_type("backbone", "mlp")(hidden=[8])
    backbone(hidden=(8,), dropout=0.0, image_size=None)
    >>> option_type("method", "lpbnn")(members=2.5)
    Traceback (most recent call last):
    ValueError: method.members is 2.5; expected a valid integer.
    """
    fields: list[Any] = []
    for option in _options(kind, name):
        hint = option.hint
        default = tuple(option.default) if isinstance(option.default, list) else option.default
        if hint is not None and option.name != "num_data":  # which the data decides
            typed = Annotated[hint, arg(help=option.description or None)]
            required = default in (inspect.Parameter.empty, dataclasses.MISSING)
            fields.append((option.name, typed) if required else (option.name, typed, default))
    check: dict[str, Callable[[Any], None]] = {"__post_init__": lambda self: validate(self, kind)}
    return dataclasses.make_dataclass(kind, fields, namespace=check, frozen=True, kw_only=True)


def _options(kind: str, name: str) -> list[Option]:
    if kind == "method":
        return methods.options(name)
    if (known := source.stored(kind, name)) is not None:
        return known
    # One of a family (wrn-40-2), MODULE:NAME, or unknown, which is an error.
    if kind == "backbone":
        from lpbnn import backbones

        return source.call_options(backbones.load(name).build, 2)
    from lpbnn import data

    return source.call_options(data.entry(name).load, 1)


def read_config(path: Path) -> RunConfig:
    """Read a config from a file that ``--print-config`` wrote, or of a run folder."""
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.2's numbers: 1e-4 is one, too."""

    number = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return from_data(RunConfig, yaml.load(path.read_bytes(), Loader) or {})
    except OSError as error:
        raise ValueError(
            f"{path} could not be read: {error.strerror}. Fix: check the path; lpbnn train --print-config "
            "prints such a file."
        ) from error
    except Exception as error:  # bytes that are no config can fail in any way at all
        why = error if isinstance(error, ValueError | TypeError | yaml.YAMLError) else repr(error)
        raise ValueError(f"{path} is no config: {why}") from error


def write_config(config: RunConfig) -> str:
    """Return the YAML that ``read_config`` reads.

    >>> print(write_config(RunConfig("mcp")).splitlines()[:2])
    ['method: mcp', 'method_options: {}']
    """
    import yaml

    return yaml.safe_dump(to_data(config), sort_keys=False)


def resumable(folder: Path, trust: bool = False) -> RunConfig:
    """Return a run's config for the command line to change.

    Without ``optim.parts``, each of which would become an option of the command.
    """
    from lpbnn.training.rundir import RunDir  # imports torch: not for --help

    run = RunDir(folder)
    run.require_trust(trust)
    config = run.config_as_measured()
    return replace(config, optim=replace(config.optim, parts={}))


def resumed(start: RunConfig, typed: RunConfig, folder: Path, others: Sequence[str]) -> RunConfig:
    """Return a stopped run's own config, changed in where and how fast it runs and what is measured.

    Args:
        start: ``resumable(folder)``.
        typed: the same with what the command line says.
        others: what it says beside the config, and none of it can be taken.
    """
    from lpbnn.training.rundir import RunDir  # imports torch: not for --help

    changes = differences(to_data(start), to_data(typed))
    names = [change.partition(":")[0].replace("_options", "") for change in changes]
    free = MAY_DIFFER["resume"]
    fixed = [name for name in names if name.partition(".")[0] not in free] + list(others)
    if fixed:
        raise ValueError(
            f"--resume goes on with the settings of {folder}; it cannot take {', '.join(fixed)}. Fix: "
            "leave them out, or train anew with another -o."
        )
    own = RunDir(folder).config_as_measured()
    return replace(own, **{name: getattr(typed, name) for name in free})
