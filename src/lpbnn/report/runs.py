"""Run folders as the report sees them: read once, seeds gathered into groups, one colour per method."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from lpbnn import methods
from lpbnn.report import results as stored
from lpbnn.report.colours import assign
from lpbnn.training.build import DataInfo, resolved
from lpbnn.training.config import MAY_DIFFER, RunConfig
from lpbnn.training.rundir import RunDir

BASELINE = "mcp"  # the plain network: what costs are relative to
WEIGHTS = "backbone_options.pretrained"

Settings = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run."""

    path: Path
    method: str
    seed: int
    settings: Settings
    """The config, flat: ``optim.lr``, ``method_options.members``."""
    results: Mapping[str, Any]
    data: DataInfo
    sessions: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, source: "str | Path | RunDir | Run") -> "Run":
        """From its folder; a ``RunError`` says what is wrong with it."""
        if isinstance(source, Run):
            return source
        folder = source if isinstance(source, RunDir) else RunDir(source)
        config, results, data, sessions = stored.read(folder)
        method, settings = config["method"], flat(config)
        usual = {k: v for k, v in _defaults(method).items() if k not in settings}
        return cls(
            path=folder.path,
            method=method,
            seed=config["seed"],
            settings={**settings, **usual, **_calibration(results)},
            results=results,
            data=data,
            sessions=sessions,
        )

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """What figures are made of; empty for a run that has none."""
        return stored.arrays(RunDir(self.path))

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.path.resolve().name

    @property
    def title(self) -> str:
        """What its row is called, settings aside."""
        return title(self.method) + variant(self.settings)

    @property
    def diverged(self) -> int | None:
        """The epoch in which the loss stopped being finite, from 1."""
        return self.results["train"]["diverged"]

    @property
    def origin(self) -> str:
        """Whose corruptions it met: "official", or "generated, procedural frost"; "" for none."""
        found = self.at("corruption")
        if not found:
            return ""
        return f"{found['origin']}, {found['frost']} frost" if found["frost"] else found["origin"]

    def at(self, *keys: str) -> Any:
        """A number of the results by its path; None where it was not measured."""
        value: Any = self.results
        for key in keys:
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one row: the same method and settings, several seeds."""

    label: str
    method: str
    runs: tuple[Run, ...]
    index: int
    """Decides its colour, marker and dashes everywhere (``report.colours``)."""
    settings: Settings

    @property
    def shown(self) -> Run:
        """The run whose single images are shown: the first that trained to its end, if any did."""
        return next((run for run in self.runs if run.diverged is None), self.runs[0])

    @property
    def diverged(self) -> list[int]:
        """The epochs in which runs of this group diverged."""
        return [run.diverged for run in self.runs if run.diverged is not None]

    def values(self, *keys: str) -> list[Any]:
        """A number of every run; None where one has it not."""
        return [run.at(*keys) for run in self.runs]

    def with_arrays(self, *names: str) -> list[Run]:
        """The runs that have all these arrays."""
        return [run for run in self.runs if all(name in run.arrays for name in names)]


def read_runs(runs: Iterable["str | Path | RunDir | Run"]) -> list[Run]:
    """All of them, or a ``ValueError`` where there are none."""
    found = list({run.path.resolve(): run for run in map(Run.read, runs)}.values())  # each run once
    if not found:
        raise ValueError("no run was given; expected the folders of one or more finished runs.")
    return found


def by_data(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of each data set: numbers compare within one only."""
    parts: dict[str, list[Run]] = {}
    for run in runs:
        parts.setdefault(run.data.name, []).append(run)
    return parts


def by_setting(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of one table each: the same data, network and length of training."""
    parts: dict[str, list[Run]] = {}
    for run in runs:
        name = f"{run.data.name}, {run.settings['backbone']}, {run.settings['epochs']} epochs"
        if run.settings.get("data_options.measure") == "val":  # not to be read as test numbers
            name += ", measured on held-out training images"
        parts.setdefault(name, []).append(run)
    return parts


def grouped(runs: Iterable[Run]) -> list[Group]:
    """Runs that differ in nothing but their seed together, in the order of their first ones."""
    parts: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        alike = parts.setdefault(repr(sorted(essential(run.settings).items())), {})
        # Official and generated corruptions are never averaged; a run without any joins its seeds.
        origin = run.origin or next(iter(alike), "")
        if origin and "" in alike:
            alike[origin] = alike.pop("")
        alike.setdefault(origin, []).append(run)
    found = [
        ({**runs[0].settings, "corruptions": origin}, runs)
        for alike in parts.values()
        for origin, runs in alike.items()
    ]
    groups: list[Group] = []
    for settings, members in found:
        name = members[0].title
        rivals = [other for other, theirs in found if theirs[0].title == name]
        telling = described(settings, varying(rivals))
        label = f"{name} ({telling})" if telling else name
        while label in (group.label for group in groups):  # what is shown of them may be the same
            label += "'"
        groups.append(Group(label, members[0].method, tuple(members), 0, settings))
    index = assign((group.label, group.method) for group in groups)
    return [replace(group, index=index[group.label]) for group in groups]


def title(method: str) -> str:
    """A method's name as its file writes it; the name itself where there is no such file.

    >>> title("lpbnn"), title("my-own")
    ('LP-BNN', 'my-own')
    """
    try:
        return methods.describe(method).partition(":")[0] or method
    except (ValueError, ImportError):
        return method


def variant(settings: Settings) -> str:
    """What the paper adds to a method's name for the network: group norm and standardised weights.

    >>> variant({"backbone_options.norm": "group", "backbone_options.standardise": True})
    '+GN'
    """
    norm, standardise = (settings.get(f"backbone_options.{n}") for n in ("norm", "standardise"))
    return "+GN" if norm == "group" and standardise else ""


def flat(data: Mapping[str, Any], prefix: str = "") -> Settings:
    """Nested settings with dotted names.

    >>> flat({"optim": {"lr": 0.1}, "epochs": 3})
    {'optim.lr': 0.1, 'epochs': 3}
    """
    found: Settings = {}
    for key, value in data.items():
        found |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return found


def _defaults(method: str) -> Settings:
    """Return the default of every setting of a run of this method."""
    config = RunConfig(method)
    return flat((resolved(config) if method in methods.names() else config).to_data())


def _calibration(results: Mapping[str, Any]) -> Settings:
    """Return what ``lpbnn calibrate`` fitted, which keeps such runs apart from those as trained."""
    found = results.get("calibration")
    if not found:
        return {"calibration": "none"}
    fitted = ["noise"] if found["noise_scale"] is not None else []
    fitted += [found["kind"]] if found["kind"] != "none" else []
    return {"calibration": " and ".join(fitted) or "none"}


def chosen(settings: Settings, method: str) -> list[str]:
    """Return the names of the method's options that differ from today's defaults.

    >>> chosen({"method_options.members": 8, "method_options.init_std": 0.5}, "batchensemble")
    ['method_options.members']
    """
    usual = _defaults(method)
    options = [name for name in settings if name.startswith("method_options.")]
    return [name for name in options if settings[name] != usual.get(name)]


def essential(settings: Settings) -> Settings:
    """Return what makes a run what it is, without what may differ between seeds."""
    kept: Settings = {
        key: float(value) if type(value) is int else value  # -2 and -2.0 are one setting
        for key, value in settings.items()
        if key not in MAY_DIFFER["seeds"]
    }
    if kept.get(WEIGHTS):  # where the file lies says nothing of what is in it
        kept[WEIGHTS] = PurePath(kept[WEIGHTS]).name
    return kept


def varying(settings: Sequence[Settings]) -> list[str]:
    """Return the names of the essential settings whose values differ."""
    telling = {name for one in settings for name in essential(one)}
    names = dict.fromkeys(name for one in settings for name in one if name in telling)
    return [n for n in names if any(one.get(n) != settings[0].get(n) for one in settings)]


def described(settings: Settings, names: Iterable[str]) -> str:
    """Some settings in words; an option that was not given had its default.

    >>> described(
    ...     {"optim.lr": 0.1, "method_options.members": 8}, ["optim.lr", "method_options.members"]
    ... )
    'lr=0.1, members=8'
    """
    values = {n: settings.get(n, "default") for n in names}
    return ", ".join(f"{n.rpartition('.')[2]}={plain(value)}" for n, value in values.items())


def plain(value: Any) -> str:
    """A setting as one would say it.

    >>> plain(1e-4), plain([80, 160]), plain(True), plain(1)
    ('0.0001', '80 160', 'yes', '1')
    """
    if isinstance(value, list | tuple):
        return " ".join(map(plain, value)) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def plural(number: int, word: str) -> str:
    """Return a number with its noun.

    >>> plural(1, "run"), plural(3, "run")
    ('1 run', '3 runs')
    """
    return f"{number} {word}{'s' * (number != 1)}"


def counted(values: Iterable[Any], write: Callable[[Any], str] = str) -> list[tuple[str, int]]:
    """Each different value and how often it occurs, in the order of first occurrence.

    >>> counted(["cpu", "cuda", "cpu"])
    [('cpu', 2), ('cuda', 1)]
    """
    return list(Counter(map(write, values)).items())


def listed(values: Iterable[Any]) -> str:
    """What runs have, of several values with the number of runs; nothing of those that have none.

    >>> listed(["cpu", None, "cpu"]), listed(["cpu", "cuda"])
    ('cpu', 'cpu (1 run), cuda (1 run)')
    """
    found = counted(value for value in values if value not in (None, ""))
    if len(found) == 1:
        return found[0][0]
    return ", ".join(f"{text} ({plural(n, 'run')})" for text, n in found)
