"""One run as one JSON file: all its numbers, how it was made, and none of its weights.

- ledger: the version of this format
- run: the name of the run folder
- sessions: of each start: command, commit (and whether it was changed), device, versions
- config: the whole ``RunConfig``, method options written out; ``config.seed`` is the seed
- data: ``DataInfo``: which data, how many examples of each part
- conventions: what every number means, and the score by which strange inputs are detected
- results: ``results.json`` as the run left it: test, ood, corruption (each of the sets, means by severity,
  how many images), diversity, cost, train (seconds, images/s, memory)
- converted: only in records whose option names were changed since: by what and when

Beside the file of a first seed (0) lies NAME.npz, what the figures of the report are drawn from.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Required

import numpy as np
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from lpbnn.metric_info import METRICS
from lpbnn.report import archive
from lpbnn.training.files import RunError, printable, read_arrays
from lpbnn.training.rundir import CONFIG, DATA, LOG, PREDICTIONS, RunDir

FORMAT = 1
RESULTS_FORMAT = 1  # of results.json
FIGURES = ("examples/", "reliability/", "histogram/", "posterior/", "quantiles/", "log/", "risk/")
SCORES = "/scores"  # arrays of a run: test/scores, ood/NAME/scores; their quantiles are kept
QUANTILES = 201
LARGEST = 2**18  # bytes of one array
THUMBNAIL = 160  # pixels: the widest map of a street scene that is kept
PARTS = ("ledger", "run", "sessions", "config", "data", "conventions", "results")

Entry = dict[str, Any]
Numbers = dict[str, float | None] | None  # null stands for NaN
Parts = dict[str, Numbers] | None


class _Train(TypedDict, total=False):
    diverged: Required[int | None]
    epochs: float | None
    of: float | None
    seconds: float | None
    images_per_second: float | None
    epoch_seconds: float | None
    peak_bytes: float | None
    last: Numbers


class _Cost(TypedDict, total=False):
    parameters: float | None
    members: float | None
    samples: float | None
    predict_seconds_per_1000: float | None
    predict_peak_bytes: float | None
    memory: str | None
    device: str | None


class _Corruption(TypedDict, total=False):
    origin: Required[str]
    frost: Required[str | None]
    severities: Required[dict[str, Numbers]]
    ca: float | None
    ce: float | None
    nll: float | None
    brier: float | None


class _Conformal(TypedDict, total=False):
    level: float
    coverage: float | None
    size: float | None


class _Calibration(TypedDict, total=False):
    noise_scale: Required[float | None]
    kind: Required[str]
    before: Numbers
    conformal: _Conformal | None


class _Results(TypedDict, total=False):
    """What tables and figures read of the results."""

    train: Required[_Train]
    test: Required[Numbers]
    task: str
    source: str | None
    uncertainty: Parts
    ood: Parts
    diversity: Parts
    cost: _Cost | None
    corruption: _Corruption | None
    measured_again: dict[str, Any] | None
    calibration: _Calibration | None


class _Config(TypedDict):
    method: str
    seed: int
    method_options: dict[str, Any]


class _Entry(TypedDict):
    """What is read of an entry before it is known to be one."""

    run: str
    sessions: list[dict[str, Any]]
    config: _Config
    results: _Results


_ENTRY = TypeAdapter(_Entry)


def _printable(value: Any) -> Any:
    """Return JSON whose texts a terminal only shows."""
    if isinstance(value, dict):
        return {printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def content(path: str | Path) -> Entry:
    """What is known of a run: from its folder, where no weights are needed, or from its file."""
    path = Path(path)
    kept = is_entry(path)
    entry = _printable(_of_file(path) if kept else _of_folder(RunDir(path)))
    results = entry["results"]
    found = results.get("format") if isinstance(results, dict) else None
    if found != RESULTS_FORMAT:
        raise RunError(
            f"{path} holds results of format {found!r}; this version of lpbnn reads format "
            f"{RESULTS_FORMAT}. Fix: use the version that made it, or evaluate the run again with "
            "this one."
        )
    try:
        _ENTRY.validate_python(entry)
    except ValidationError as error:
        first = error.errors()[0]
        raise RunError(
            f"{path} does not fit this version of lpbnn: {'.'.join(map(str, first['loc']))}: "
            f"{first['msg']}. Fix: restore it from a copy, or evaluate the run again."
        ) from error
    if not kept:
        entry["conventions"] = _conventions(entry["results"], entry["config"])
    return entry


def arrays(path: Path) -> dict[str, np.ndarray]:
    """Return what figures are drawn from, ``log/COLUMN`` by epochs among it; empty if there is none."""
    if not is_entry(path):
        folder = RunDir(path)
        found = folder.arrays() if (folder / PREDICTIONS).exists() else {}
        rows = folder.log() if (folder / LOG).exists() else []
        columns = dict.fromkeys(name for row in rows for name in row)
        log = {f"log/{n}": np.array([row.get(n, np.nan) for row in rows]) for n in columns}
        with fitting([path]):
            return found | log | risk(found)
    beside = path.with_suffix(".npz")
    if not archive.exists(beside):
        return {}
    return read_arrays(archive.read_bytes(beside), str(beside), "keep the run again")


@contextmanager
def fitting(paths: Iterable[Path]) -> Iterator[None]:
    """Raise a ``RunError`` that names the runs if what is made of their arrays inside the block fails."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:  # arrays of any shape and type fail in any way at all
        raise RunError(
            f"the arrays of {', '.join(map(str, paths))} do not fit this version of lpbnn ({error!r}). Fix: "
            "evaluate the runs again, or leave out those that are not yours."
        ) from error


def figure_bytes(path: Path) -> bytes | None:
    """The small arrays of a run, as a file; None where it has none."""
    stored = arrays(path)
    with fitting([path]):
        found = {
            name: kept
            for name, array in stored.items()
            if name.startswith(FIGURES) and (kept := _thumbnail(name, array)) is not None
        }
        found |= {
            f"quantiles/{name.removesuffix(SCORES)}": score_quantiles(array)
            for name, array in stored.items()
            if name.endswith(SCORES) and array.ndim == 1 and array.size
        }
    if not found:
        return None
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **found)  # type: ignore[arg-type]
    return buffer.getvalue()


def risk(stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return coverage and risk of the test set, of the probabilities if they are stored.

    >>> probs = np.array([[0.9, 0.1], [0.4, 0.6]])
    >>> risk({"test/probs": probs, "test/labels": np.array([0, 0])})["risk/risk"].tolist()
    [0.0, 0.5]
    """
    import torch

    from lpbnn.metrics import risk_coverage  # imports torchmetrics: not for a table

    probs, labels = stored.get("test/probs"), stored.get("test/labels")
    if probs is None or labels is None or not np.isfinite(probs).all():
        return {}
    doubt, wrong = 1 - probs.max(1), probs.argmax(1) != labels
    curve = risk_coverage(torch.from_numpy(doubt), torch.from_numpy(wrong))
    some = np.linspace(0, len(labels) - 1, min(QUANTILES, len(labels))).round().astype(int)
    return {f"risk/{n}": getattr(curve, n).numpy()[some] for n in ("coverage", "risk")}


def _thumbnail(name: str, array: np.ndarray) -> np.ndarray | None:
    """A figure's array as it is, of maps a small one; None for what is too large for a ledger.

    >>> maps = np.random.rand(4, 360, 480).astype(np.float32)
    >>> small = _thumbnail("examples/test/confidence", maps)
    >>> small.shape, small.dtype, float(abs(small - maps[:, ::3, ::3]).max()) < 0.003
    ((4, 120, 160), dtype('float16'), True)
    """
    from lpbnn.report import pictures  # imports matplotlib: not for a table

    if name.startswith("examples/") and array.ndim > 2 and array.shape[-1] > THUMBNAIL:
        if name.endswith("/aleatoric"):
            return None  # not drawn
        array = pictures.thinned(array, THUMBNAIL)
        if array.dtype.kind == "f":  # a picture has 256 colours, and steps are packed tighter
            step = max(float(np.abs(array).max()), 1e-6) / 255
            array = (np.round(array.astype(np.float32) / step) * step).astype(np.float16)
    return array if array.nbytes <= LARGEST else None


def score_meaning(task: str, own: str) -> str:
    """Return what the out-of-distribution score is, by the task and the method's option ``score``.

    >>> score_meaning("regression", "confidence"), score_meaning("classification", "kernel")
    ('the predicted variance', "the method's own: kernel")
    """
    if task == "regression":
        return "the predicted variance"
    usual = "1 - the largest probability of the mean prediction"
    return usual if own == "confidence" else f"the method's own: {own}"


def score_quantiles(scores: np.ndarray) -> np.ndarray:
    """Return ``QUANTILES`` evenly spaced quantiles, from the least to the largest score.

    >>> score_quantiles(np.arange(1001.0))[[0, 100, 200]].tolist()
    [0.0, 500.0, 1000.0]
    """
    return np.quantile(scores.astype(np.float64), np.linspace(0, 1, QUANTILES)).astype(np.float32)


def is_entry(path: Path) -> bool:
    """Whether a path is meant as a file of a ledger rather than as a run folder."""
    return path.suffix == ".json" and not path.is_dir()


def to_text(entry: Entry) -> str:
    """Return the content of an entry's file."""
    return json.dumps(entry, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _of_folder(folder: RunDir) -> Entry:
    results = folder.results()  # first: it says what a folder lacks that is no finished run
    config = folder.config_as_measured().to_data()
    folder.data()  # the same check as the report's own
    return {
        "ledger": FORMAT,
        "run": folder.path.resolve().name,
        "sessions": folder.sessions(),
        "config": config,
        "data": folder.read_json(DATA),
        "conventions": {},  # once the results are known to be some
        "results": results,
    }


def _of_file(path: Path) -> Entry:
    entry = archive.read_json(path)
    lacking = [part for part in PARTS if not isinstance(entry, dict) or part not in entry]
    if lacking:
        raise RunError(
            f"{path} is no file of a ledger: it lacks {', '.join(lacking)}. Fix: give a run folder "
            f"(with its {CONFIG}), or a file that lpbnn keep wrote."
        )
    if entry["ledger"] != FORMAT:
        raise RunError(
            f"{path} is of ledger format {entry['ledger']!r}; this version of lpbnn reads {FORMAT}. "
            "Fix: use the version that wrote it, or keep the run again."
        )
    require_name(entry["run"], path)
    return entry


def require_name(name: Any, where: Path) -> str:
    """Return a name that a file gives, if it can be that of a file in a folder and of no other.

    >>> require_name("../../x", Path("a.json"))
    Traceback (most recent call last):
    ...
    lpbnn.atomic.RunError: a.json names a run '../../x', which is no name of a file. Fix: ...
    """
    plain = isinstance(name, str) and name == printable(name) and len(name.encode()) <= 200
    if not plain or not name or name.startswith(".") or set(name) & set('/\\:*?"<>|'):
        raise RunError(
            f"{where} names a run {printable(repr(name)[:80])}, which is no name of a file. Fix: rename "
            "it there."
        )
    return name


def _conventions(results: Entry, config: Mapping[str, Any]) -> dict[str, str]:
    """The meaning of every metric that was measured."""
    parts = [results.get("test"), results.get("corruption")]
    for several in ("ood", "diversity"):
        parts += (results.get(several) or {}).values()
    keys = {key for part in parts if part for key in part}
    found = {key: info.convention for key, info in METRICS.items() if key in keys}
    if results.get("ood"):
        found["score"] = score_meaning(
            str(results.get("task")), config["method_options"].get("score", "confidence")
        )
    return found
