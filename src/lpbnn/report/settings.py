"""How the runs were made: settings, environment, data, commands."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

from lpbnn.report.entries import is_entry
from lpbnn.report.html import definitions, esc, name, scroll
from lpbnn.report.runs import Group, Run, chosen, counted, described, essential, plain, varying

OPTIONS = "method_options."
PYTHON = """\
from lpbnn.training.run import run
from lpbnn.training.rundir import RunDir

run(RunDir({folder!r}).config(), {again!r})"""
KEPT = """\
from lpbnn.training import RunConfig
from lpbnn.training.run import run
from lpbnn.report.entries import content

run(RunConfig.from_data(content({folder!r})["config"]), {again!r})"""


def differences(groups: Sequence[Group]) -> str:
    """What each row was trained with: its options, and whatever else is not the same for all."""
    telling = [
        key
        for key in varying([g.settings for g in groups])
        if key not in ("method", "corruptions") and not key.startswith(OPTIONS)
    ]
    titles = ("Method", "Seeds", "Members", "Options other than the defaults", *telling)
    heads = "".join(f'<th scope="col" class="text">{esc(text)}</th>' for text in titles)
    rows = ""
    for group in groups:
        cells = [
            ", ".join(str(run.seed) for run in group.runs),
            _counted(group.values("cost", "members")) or "–",
            described(group.settings, chosen(group.settings, group.method)) or "none",
            *(plain(group.settings.get(key)) for key in telling),
        ]
        texts = "".join(f'<td class="text">{esc(text)}</td>' for text in cells)
        first = name(group.label, group.index)
        rows += f'<tr><th scope="row" class="first">{first}</th>{texts}</tr>'
    made = f"<table class='sortable'><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return scroll(made, "Settings of each method")


def shared(groups: Sequence[Group]) -> str:
    """What is the same for all, folded away."""
    different = varying([g.settings for g in groups])
    same = {
        key: value
        for key, value in essential(groups[0].settings).items()
        if key not in different
        and not key.startswith(OPTIONS)
        and key not in ("method", "corruptions")
    }
    pairs = [(esc(key), esc(plain(value))) for key, value in same.items()]
    return f"<details><summary>The same for all</summary>{definitions(pairs, 'facts')}</details>"


def environment(runs: Sequence[Run]) -> str:
    """Versions, device and commit; several values with the number of their runs."""
    last = [run.sessions[-1] for run in runs if run.sessions]
    if not last:
        return ""
    names = dict.fromkeys(package for one in last for package in one.get("versions", {}))
    facts: list[tuple[str, str]] = [
        ("device", _counted(_of(last, "device"))),
        ("system", _counted(_of(last, "platform"))),
        ("commit", _counted(map(_commit, last))),
        ("Python", _counted(_of(last, "python"))),
        *(
            (package, _counted(one.get("versions", {}).get(package) for one in last))
            for package in names
        ),
        ("CUDA", _counted(_of(last, "cuda"))),
        ("processes", _counted(_of(last, "processes"))),
    ]
    return definitions([(esc(key), esc(value)) for key, value in facts if value], "facts")


def data(runs: Sequence[Run]) -> str:
    """Where the examples come from, how many there are, and whose corruptions they met."""
    info = runs[0].data
    sizes = ", ".join(f"{key.replace('ood/', 'OOD ')} {size:,}" for key, size in info.sizes.items())
    origin = _counted(
        run.origin.replace("pictures frost", "the published frost pictures")
        for run in runs
        if run.origin
    )
    facts = [
        ("data set", f"{info.name}: {info.description}" if info.description else info.name),
        ("source", _counted(map(_source, runs))),
        ("examples", sizes),
        ("corruptions", origin),
    ]
    return definitions([(esc(key), esc(value)) for key, value in facts if value], "facts")


def commands(runs: Sequence[Run]) -> str:
    """What was typed, and how to repeat any run from its folder."""
    started = [run.sessions[0].get("command") for run in runs if run.sessions]
    said = _typed("As they were started", started)
    said += _typed("Measured again since", [run.at("measured_again", "command") for run in runs])
    trained = next((run for run in runs if not run.at("train", "joined")), None)
    if trained is None:  # by lpbnn join, of other runs: their folders hold how they were trained
        return said
    kept = is_entry(trained.path)
    path = trained.path.resolve()
    folder, again = _where(path), _where(path.with_name(f"{trained.name}-again"))
    text = esc((KEPT if kept else PYTHON).format(folder=folder, again=again))
    where = "The file of every kept run" if kept else "Every run folder"
    return (
        f"{said}<p>{where} holds its whole config; this trains one again, to the same weights on the same "
        f"machine:</p><pre>{text}</pre>"
    )


def _where(path: Path) -> str:
    """Return a path as it is found from the working folder; an absolute one if it lies elsewhere."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _typed(words: str, commands: Iterable[Sequence[str] | None]) -> str:
    typed = counted((command or () for command in commands), shlex.join)
    lines = [f"{esc(text)}{f'  <i># {n} runs</i>' if n > 1 else ''}" for text, n in typed if text]
    return f"<p>{words}:</p><pre>{chr(10).join(lines)}</pre>" if lines else ""


def _of(sessions: Iterable[Any], key: str) -> list[Any]:
    return [session.get(key) for session in sessions]


def _commit(session: Any) -> str | None:
    commit = session.get("commit")
    return commit and commit[:12] + " with changes" * bool(session.get("dirty"))


def _source(run: Run) -> str:
    """A path is somebody's own: its last part is enough."""
    source = str(run.results.get("source") or run.data.source)
    return source if source in ("embedded", "generated") else f"files in {PurePath(source).name}"


def _counted(values: Iterable[Any], write: Callable[[Any], str] = str) -> str:
    found = counted((value for value in values if value not in (None, "")), write)
    if len(found) == 1:
        return found[0][0]
    return ", ".join(f"{text} ({n} runs)" for text, n in found)
