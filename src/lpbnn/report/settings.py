"""How the runs were made: settings, environment, data, commands."""

import shlex
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from lpbnn.report.runs import (
    Group,
    Run,
    chosen,
    counted,
    described,
    essential,
    listed,
    plain,
    varying,
)
from lpbnn.training.rundir import CONFIG


def made(groups: Sequence[Group]) -> dict[str, Any]:
    """How the runs of a chapter were made.

    Returns:
        ``rows``, one for each method with its values of ``titles``; the settings that are the ``same`` for
        all; ``data`` and ``environment``; ``commands``: words, then the commands that they are about, each
        with its number of runs; and ``again``, the command that repeats a run, empty if none was trained.
    """
    runs = [run for group in groups for run in group.runs]
    different = varying([g.settings for g in groups])
    telling = [key for key in different if not _apart(key)]
    rows = [
        (
            group,
            [
                ", ".join(str(run.seed) for run in group.runs),
                listed(group.values("cost", "members")) or "–",
                described(group.settings, chosen(group.settings, group.method)) or "none",
                *(plain(group.settings.get(key)) for key in telling),
            ],
        )
        for group in groups
    ]
    same = {
        key: plain(value)
        for key, value in essential(groups[0].settings).items()
        if key not in different and not _apart(key)
    }
    started = [run.sessions[0].get("command") for run in runs if run.sessions]
    measured = [run.at("measured_again", "command") for run in runs]
    words = {"As they were started": started, "Measured again since": measured}
    typed = ((w, counted((c for c in given if c), shlex.join)) for w, given in words.items())
    return {
        "titles": ("Seeds", "Members", "Options other than the defaults", *telling),
        "rows": rows,
        "same": same,
        "data": _data(runs),
        "environment": _environment(runs),
        "commands": [(words, commands) for words, commands in typed if commands],
        "again": _again(runs),
    }


def _apart(key: str) -> bool:
    """True for settings that are told elsewhere."""
    return key in ("method", "corruptions") or key.startswith("method_options.")


def _environment(runs: Sequence[Run]) -> dict[str, str]:
    """Versions, device and commit; several values with the number of their runs."""
    last = [run.sessions[-1] for run in runs if run.sessions]
    names = dict.fromkeys(package for one in last for package in one.get("versions", {}))
    facts = {
        "device": listed(one.get("device") for one in last),
        "system": listed(one.get("platform") for one in last),
        "commit": listed(map(_commit, last)),
        "Python": listed(one.get("python") for one in last),
        **{p: listed(one.get("versions", {}).get(p) for one in last) for p in names},
        "CUDA": listed(one.get("cuda") for one in last),
        "processes": listed(one.get("processes") for one in last),
    }
    return {key: value for key, value in facts.items() if value}


def _data(runs: Sequence[Run]) -> dict[str, str]:
    """Where the examples come from, how many there are, and whose corruptions they met."""
    info = runs[0].data
    origins = (run.origin.replace("pictures frost", "the published frost pictures") for run in runs)
    facts = {
        "data set": f"{info.name}: {info.description}" if info.description else info.name,
        "source": listed(map(_source, runs)),
        "examples": ", ".join(
            f"{key.replace('ood/', 'OOD ')} {size:,}" for key, size in info.sizes.items()
        ),
        "corruptions": listed(origins),
    }
    return {key: value for key, value in facts.items() if value}


def _again(runs: Sequence[Run]) -> str:
    """The command that trains a run again, by the config in its folder."""
    trained = next((run for run in runs if not run.at("train", "joined")), None)
    if trained is None:  # by lpbnn join, of other runs: their folders hold how they were trained
        return ""
    path = trained.path.resolve()
    again = path.with_name(f"{path.name}-again")
    return shlex.join(["lpbnn", "train", "--config", _where(path / CONFIG), "--out", _where(again)])


def _where(path: Path) -> str:
    """Return a path as it is found from the working folder; an absolute one if it lies elsewhere."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _commit(session: Any) -> str | None:
    commit = session.get("commit")
    return commit and commit[:12] + " with changes" * bool(session.get("dirty"))


def _source(run: Run) -> str:
    """A path is somebody's own: its last part is enough."""
    source = str(run.results.get("source") or run.data.source)
    return source if source in ("embedded", "generated") else f"files in {PurePath(source).name}"
