"""Records of runs: a JSON each, and of first seeds the arrays of its figures beside it as NPZ.

    python -m tools.records unpack runs/published       # the archive's records as run folders
    python -m tools.records keep runs/* --into kept/a   # finished runs as records, for tools.pack_records

A record holds ``sessions`` (command, commit, device and versions of each start), ``config``, ``data``,
``conventions`` (what each number means) and ``results``; of no run the weights.
"""

import argparse
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tools.columns import ARCHIVE

from benchmarks.archive import members
from lpbnn.atomic import write_atomic
from lpbnn.metric_info import METRICS
from lpbnn.report import tables
from lpbnn.report.figures import score_quantiles
from lpbnn.report.pictures import thinned
from lpbnn.report.runs import Run
from lpbnn.training import RunConfig
from lpbnn.training.files import RunError, read_arrays, to_json
from lpbnn.training.rundir import CONFIG, DATA, RunDir

FORMAT = 1
FIGURES = ("examples/", "reliability/", "histogram/", "posterior/", "log/", "risk/")
SCORES, QUANTILES = "/scores", "quantiles/"  # test/scores of a run is quantiles/test of its record
LARGEST = 2**18  # bytes of one array
THUMBNAIL = 160  # pixels: the widest map of a street scene
# Options that their method has no more, with the value that is today's behaviour.
REMOVED = {
    **{"anneal": 0.0, "by_width": False, "evidence": "exp"},
    **{"free_bits": 0.0, "noise": "pass", "pace": 1.0},
    **{"reconstruct": "mean", "repeat_last": 0.0, "train_decoder": False, "train_r": False},
}
# Records from before there was a choice have the paper's score.
CONFIDENCE = {"score": "confidence"}


def unpack(content: Mapping[str, bytes], into: Path) -> Iterator[Path]:
    """Write the runs of an archive as run folders, without weights, and yield their paths.

    Options of methods that were removed since are left out where they were off, those of the command always.
    ``lpbnn compare``, ``report`` and ``experiment --from`` take such folders.
    """
    for name in sorted(content):
        entry = json.loads(content[name]) if name.endswith(".json") else None
        if not isinstance(entry, dict) or "ledger" not in entry:
            continue
        target = RunDir(into / name.removesuffix(".json"))
        target.path.mkdir(parents=True, exist_ok=True)
        config = {k: v for k, v in entry["config"].items() if k in RunConfig.__dataclass_fields__}
        options = {k: v for k, v in config["method_options"].items() if REMOVED.get(k, ...) != v}
        measured = {**CONFIDENCE, **config["evaluate"]}
        config |= {"method_options": options, "evaluate": measured}
        target.write(CONFIG, to_json(config))
        target.write(DATA, to_json(entry["data"]))
        for session in entry["sessions"]:
            target.add_session(session)
        beside = name.removesuffix(".json") + ".npz"
        if beside in content:
            _write_arrays(target, read_arrays(content[beside], beside, "restore the archive"))
        target.write_results({**entry["results"], "evaluate": measured})
        yield target.path


def _write_arrays(target: RunDir, arrays: Mapping[str, np.ndarray]) -> None:
    log = {n.removeprefix("log/"): a for n, a in arrays.items() if n.startswith("log/")}
    if log:
        rows = (
            dict(zip(log, map(float, row), strict=True)) for row in zip(*log.values(), strict=True)
        )
        target.write_log([{k: v for k, v in row.items() if np.isfinite(v)} for row in rows])
    renamed = {
        n.removeprefix(QUANTILES) + SCORES if n.startswith(QUANTILES) else n: array
        for n, array in arrays.items()
        if not n.startswith("log/")
    }
    target.write_arrays(renamed)


def keep(run: Path, into: Path) -> Path:
    """Write a finished run as a record; a record of another run is never replaced."""
    folder, read = RunDir(run), Run.read(run)
    path = into / f"{read.name}.json"
    config = folder.config_as_measured().to_data()
    entry = {
        "ledger": FORMAT,
        "run": read.name,
        "sessions": read.sessions,
        "config": config,
        "data": folder.read_json(DATA),
        "conventions": conventions(read),
        "results": read.results,
    }
    if path.exists():
        there = json.loads(path.read_bytes())["config"]
        if {**there, "evaluate": None} != {**config, "evaluate": None}:
            raise RunError(f"{path} holds another run of this name. Fix: give another folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(
        path, (json.dumps(entry, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()
    )
    found = figures(read.arrays) if read.seed == 0 else {}  # pictures of all would make it large
    if found:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **found)  # type: ignore[arg-type]
        write_atomic(path.with_suffix(".npz"), buffer.getvalue())
    return path


def conventions(run: Run) -> dict[str, str]:
    """Return the meaning of every metric that was measured."""
    parts = [run.at("test"), run.at("corruption")]
    for several in ("ood", "diversity"):
        parts += (run.at(several) or {}).values()
    keys = {key for part in parts if part for key in part}
    found = {key: info.convention for key, info in METRICS.items() if key in keys}
    if run.at("ood"):
        own = tables.own_score(run)
        found["score"] = (
            f"the method's own: {own}" if own else tables.SCORES[tables.usual_score(run)]
        )
    return found


def figures(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the small arrays of a run: scores as quantiles, maps as small ones, nothing large."""
    found = {}
    for name, array in arrays.items():
        if name.endswith(SCORES) and array.ndim == 1 and array.size:
            found[QUANTILES + name.removesuffix(SCORES)] = score_quantiles(array)
        elif name.startswith(FIGURES):
            if name.startswith("examples/") and array.ndim > 2 and array.shape[-1] > THUMBNAIL:
                if name.endswith("/aleatoric"):
                    continue  # not drawn
                array = thinned(array, THUMBNAIL)
                # A picture has 256 colours, and steps are packed tighter.
                if array.dtype.kind == "f":
                    step = max(float(np.abs(array).max()), 1e-6) / 255
                    array = (np.round(array.astype(np.float32) / step) * step).astype(np.float16)
            if array.nbytes <= LARGEST:
                found[name] = array
    return found


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("into", type=Path)
    unpacking.add_argument("--archive", type=Path, default=ARCHIVE)
    keeping = commands.add_parser("keep")
    keeping.add_argument("runs", type=Path, nargs="+")
    keeping.add_argument("--into", type=Path, required=True)
    given = parser.parse_args(args)
    if given.command == "unpack":
        print(f"{len(list(unpack(members(given.archive), given.into)))} runs in {given.into}")
    else:
        for run in given.runs:
            print(f"kept {keep(run, given.into)}")


if __name__ == "__main__":
    main()
