"""The ledger: finished runs kept as small JSON files, one each, that published numbers are traced to.

    keep("runs/a", Path("results/cifar10-fast"))        # results/cifar10-fast/a.json
    comparison(read_ledger(Path("results/cifar10-fast")))

A folder of the ledger is read like run folders are: every table and page takes its files.
"""

from collections.abc import Iterable
from pathlib import Path

from lpbnn.engine import RunConfig
from lpbnn.engine.build import resolved
from lpbnn.engine.files import RunError, read_json, write_atomic
from lpbnn.report.entries import content, to_text
from lpbnn.report.runs import Run, Settings, essential, flat, plain


def keep(run: str | Path, into: str | Path) -> Path:
    """Copy a finished run's numbers into a folder of the ledger; returns the file.

    The same run, measured again, replaces its file; another run never does.
    """
    entry = content(run)
    path = Path(into) / f"{entry['run']}.json"
    new = Run.of(path, entry)
    others = [other for other in _entries(Path(into)) if other.path != path]
    _check_distinct([*others, new])
    if path.exists():
        _check_same_training(Run.read(path), new.settings)
    text = to_text(entry)
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    return path


def read_ledger(folder: str | Path) -> list[Run]:
    """The runs of one folder of the ledger, in the order of their names."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder. Fix: give one that lpbnn keep has written to.")
    runs = _entries(folder)
    if not runs:
        raise RunError(
            f"{folder} holds no JSON of a run. Fix: lpbnn keep RUN... --into {folder}, or --ledger "
            f"{folder} with an experiment."
        )
    _check_distinct(runs)
    return runs


def ledger_folders(ledger: str | Path) -> list[Path]:
    """The folders, at any depth, that hold kept runs; other JSON files may lie beside them."""
    holding = {path.parent for path in Path(ledger).rglob("*.json") if _is_kept(path)}
    return sorted(holding)


def kept(folder: str | Path, name: str, config: RunConfig) -> Path | None:
    """The file of the run that ``config`` describes; None where it has yet to be made.

    A ``RunError`` tells, before anything is trained, that its file would hold another run.
    """
    wanted = flat(resolved(config).to_data())
    runs = _entries(Path(folder))
    for run in runs:
        if run.seed == config.seed and essential(run.settings) == essential(wanted):
            return run.path
    for run in runs:
        if run.name == name:
            _check_same_training(run, wanted)
    return None


def _is_kept(path: Path) -> bool:
    found = read_json(path)
    return isinstance(found, dict) and "ledger" in found


def _entries(folder: Path) -> list[Run]:
    return [Run.read(path) for path in sorted(folder.glob("*.json"))]


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


def _check_same_training(there: Run, wanted: Settings) -> None:
    """Evaluated otherwise it is the same run; trained otherwise it is another."""
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
