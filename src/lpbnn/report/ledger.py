"""The ledger: finished runs kept as small JSON files, one each, that published numbers are traced to.

    keep("runs/a", Path("kept/cifar10-fast"))        # kept/cifar10-fast/a.json
    comparison(read_ledger(Path("kept/cifar10-fast")))

A folder of the ledger is read like run folders are: every table and page takes its files. It may be packed:
``read_ledger("results/records.tar.xz/cifar10-fast")`` reads a folder of an archive.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from lpbnn.report import archive
from lpbnn.report.entries import content, figure_bytes, to_text
from lpbnn.report.runs import Run, Settings, essential, flat, plain, read_runs
from lpbnn.training import RunConfig
from lpbnn.training.build import resolved
from lpbnn.training.files import RunError, read_bytes, write_atomic
from lpbnn.training.rundir import CONFIG, RunDir


def keep(run: str | Path, into: str | Path) -> Path:
    """Copy a finished run's numbers into a folder of the ledger; returns the file.

    The same run, measured again, replaces its file; another run never does.
    """
    if archive.locate(Path(into)) is not None:
        raise RunError(f"{into} is in an archive, which is only read. Fix: keep runs in a folder.")
    entry = content(run)
    path = Path(into) / f"{entry['run']}.json"
    new = Run.of(path, entry)
    others = [other for other in _entries(Path(into)) if other.path != path]
    _check_distinct([*others, new])
    if path.exists():
        _check_same_training(Run.read(path), new.settings)
    elif os.path.lexists(path.with_suffix(".npz")):
        raise RunError(
            f"{path.with_suffix('.npz')} is no file of a kept run: there is no {path.name} beside it. Fix: "
            "keep the run in another folder, or rename that file."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Figures show one seed, and pictures would make the ledger large.
    figures = figure_bytes(Path(run)) if new.seed == 0 else None
    _write(path, to_text(entry).encode())
    if figures is not None:  # last: without its record such a file is somebody else's
        _write(path.with_suffix(".npz"), figures)
    return path


def read_ledger(folder: str | Path) -> list[Run]:
    """The runs of one folder of the ledger, in the order of their names."""
    folder = Path(folder)
    if not archive.is_folder(folder):
        raise RunError(f"{folder} is no folder. Fix: give one that lpbnn keep has written to.")
    runs = _entries(folder)
    if not runs:
        raise RunError(
            f"{folder} holds no JSON of a run. Fix: lpbnn keep RUN... --into {folder}, or --ledger "
            f"{folder} with an experiment."
        )
    _check_distinct(runs)
    return runs


def kept_in(folder: Path) -> list[Path]:
    """The files of kept runs in a folder, which may be in an archive; none of a run folder."""
    if (folder / CONFIG).exists():
        return []
    return [path for path in archive.files(folder, ".json") if _is_kept(path)]


def found_in(folder: str | Path) -> list[Run]:
    """The runs of a folder of the ledger, the finished ones among a folder's run folders, or one run."""
    folders = [p for p in (Path(folder), *Path(folder).glob("*")) if (p / CONFIG).is_file()]
    finished = [path for path in folders if RunDir(path).state() == "finished"]
    if not folders or kept_in(Path(folder)):
        return read_ledger(folder)
    if not finished:
        raise RunError(
            f"none of the {len(folders)} runs in {folder} is finished. Fix: resume them."
        )
    return _in_order(read_runs(finished))


def kept(folder: str | Path, name: str, config: RunConfig) -> Path | None:
    """The file of the run that ``config`` describes; None where it has yet to be made.

    A ``RunError`` tells, before anything is trained, that its file would hold another run.
    """
    wanted = flat(resolved(config).to_data())
    runs = _entries(Path(folder))
    for run in runs:
        if run.seed == config.seed and essential(run.settings) == essential(_as_made(run, wanted)):
            return run.path
    for run in runs:
        if run.name == name:
            _check_same_training(run, wanted)
    return None


def _write(path: Path, content: bytes) -> None:
    """What is there already stays as it is, its date too."""
    if not path.exists() or read_bytes(path) != content:
        write_atomic(path, content)


def _is_kept(path: Path) -> bool:
    found = archive.read_json(path)
    return isinstance(found, dict) and "ledger" in found


def _entries(folder: Path) -> list[Run]:
    return _in_order(Run.read(path) for path in archive.files(folder, ".json"))


def _in_order(runs: Iterable[Run]) -> list[Run]:
    """By their names; a seed that a name ends with counts as the number that it is."""

    def place(run: Run) -> tuple[str, int]:
        return run.path.name.removesuffix(".json").removesuffix(str(run.seed)), run.seed

    return sorted(runs, key=place)


def _check_distinct(runs: Iterable[Run]) -> None:
    """Two files of one run would count it twice."""
    seen: dict[str, Run] = {}
    for run in runs:
        what = repr((run.seed, run.origin, sorted(essential(run.settings).items())))
        if what in seen:
            raise RunError(
                f"{seen[what].path} and {run.path} are the same: method {run.method}, seed "
                f"{run.seed}, every setting. Fix: remove one of them."
            )
        seen[what] = run


def _as_made(run: Run, wanted: Settings) -> Settings:
    """The settings that are asked for, without those that a joined run has no use for.

    Its members had their first weights from runs of their own, each from its seed.
    """
    reinit = "method_options.reinit"
    if run.at("train", "joined") is None or reinit not in wanted:
        return wanted
    return {**wanted, reinit: run.settings[reinit]}


def _check_same_training(there: Run, wanted: Settings) -> None:
    """Evaluated otherwise it is the same run; trained otherwise it is another."""
    wanted = _as_made(there, wanted)
    old, new = ({**essential(s), "seed": s["seed"]} for s in (there.settings, wanted))
    changed = [
        f"{key} {plain(old.get(key, 'not set'))} there, {plain(new.get(key, 'not set'))} now"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and not key.startswith("evaluate.")
    ]
    if changed:
        raise RunError(
            f"{there.path} holds another run of this name ({'; '.join(changed)}). Fix: keep this one "
            "in another folder, rename its run folder, or remove that file."
        )
