"""The parts of a run folder that the report reads, checked: it may be of another version, or of anybody."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Required

import numpy as np
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from lpbnn.training.build import DataInfo
from lpbnn.training.config import OODScore, from_data, to_data
from lpbnn.training.files import RunError, printable
from lpbnn.training.rundir import CONFIG, LOG, PREDICTIONS, RESULTS, RunDir

FORMAT = 1  # of results.json
POINTS = 201  # of a risk-coverage curve

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


class _Evaluate(TypedDict, total=False):
    score: OODScore


class _Config(TypedDict):
    method: str
    seed: int
    method_options: dict[str, Any]
    evaluate: _Evaluate | None


_RESULTS, _CONFIG = TypeAdapter(_Results), TypeAdapter(_Config)


def read(
    folder: RunDir,
) -> tuple[dict[str, Any], dict[str, Any], DataInfo, list[dict[str, Any]]]:
    """Return config, results, data and sessions of a finished run.

    The config has the settings of the last evaluation. Options that no method has any more are left in it.

    Raises:
        RunError: if a file is missing or does not fit this version of lpbnn.
    """
    # First: it says what a folder lacks that is no finished run.
    results = _printable(folder.results())
    if results.get("format") != FORMAT:
        raise RunError(
            f"{folder.path} holds results of format {results.get('format')!r}; this version of lpbnn reads "
            f"format {FORMAT}. Fix: use the version that made it, or evaluate the run again with this one."
        )
    _check(_RESULTS, results, folder / RESULTS)
    config = _printable(folder.read_json(CONFIG)) | {"evaluate": results.get("evaluate")}
    _check(_CONFIG, config, folder / CONFIG)
    data = from_data(DataInfo, _printable(to_data(folder.data())))
    return config, results, data, _printable(folder.sessions())


def _check(expected: TypeAdapter[Any], found: Mapping[str, Any], path: Path) -> None:
    try:
        expected.validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise RunError(
            f"{path} does not fit this version of lpbnn: {'.'.join(map(str, first['loc']))}: "
            f"{first['msg']}. Fix: restore it from a copy, or evaluate the run again."
        ) from error


def _printable(value: Any) -> Any:
    """Return JSON whose texts a terminal only shows."""
    if isinstance(value, dict):
        return {printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def arrays(folder: RunDir) -> dict[str, np.ndarray]:
    """Return what figures are drawn from, ``log/COLUMN`` by epochs among it; empty if there is none."""
    found = folder.arrays() if (folder / PREDICTIONS).exists() else {}
    rows = folder.log() if (folder / LOG).exists() else []
    columns = dict.fromkeys(name for row in rows for name in row)
    log = {f"log/{n}": np.array([row.get(n, np.nan) for row in rows]) for n in columns}
    with fitting([folder.path]):
        return found | log | risk(found)


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
    some = np.linspace(0, len(labels) - 1, min(POINTS, len(labels))).round().astype(int)
    return {f"risk/{n}": getattr(curve, n).numpy()[some] for n in ("coverage", "risk")}
