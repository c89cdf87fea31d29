"""What was measured, as one JSON file: every repeat of every time, and how it can be made again."""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lpbnn.engine.bench.clock import Compared
from lpbnn.engine.codec import from_data, settle, to_data
from lpbnn.engine.environment import environment
from lpbnn.engine.files import RunError, read_json, write_json

Mode = Literal["eager", "graph", "compiled"]
FORMAT = 1


@dataclass(frozen=True)
class Case:
    """One configuration; ``name`` is what filters are matched with.

    >>> Case("wrn-28-10", "compiled", "lpbnn", 4).name
    'wrn-28-10/compiled/lpbnn/4'
    """

    backbone: str
    mode: Mode
    method: str
    members: int

    def __post_init__(self) -> None:
        settle(self)

    @property
    def name(self) -> str:
        return f"{self.backbone}/{self.mode}/{self.method}/{self.members}"


@dataclass(frozen=True)
class Size:
    """What a model takes whatever the clock says."""

    parameters: int
    """Trainable ones."""
    train_bytes: int | None = None
    """Peak of a training step: weights, gradients, optimizer, activations. None: not known."""
    predict_bytes: int | None = None
    """Peak of a prediction: weights, buffers, activations."""
    first_step: float | None = None
    """Seconds of the first training step: what compiling takes, where the step is compiled."""
    first_prediction: float | None = None

    def __post_init__(self) -> None:
        settle(self)


@dataclass(frozen=True)
class Row:
    """A configuration, its size and times, and those of the plain network in the same repeats."""

    case: Case
    size: Size
    reference: Size
    train: Compared | None = None
    predict: Compared | None = None

    def __post_init__(self) -> None:
        settle(self)

    def ratio(self, what: str) -> float | None:
        """How many times plain: "train", "predict", or a field of ``Size``."""
        if what in ("train", "predict"):
            compared: Compared | None = getattr(self, what)
            return None if compared is None else compared.ratio
        own, reference = getattr(self.size, what), getattr(self.reference, what)
        return own / reference if own is not None and reference else None


@dataclass(frozen=True)
class Record:
    """All rows of one call of the command."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    rows: tuple[Row, ...] = ()
    skipped: tuple[str, ...] = ()
    """Names of the cases for which no time was left."""
    failed: dict[str, str] = field(default_factory=dict)
    """Names of the cases that could not be measured, and why."""
    date: str = ""
    format: int = FORMAT

    def __post_init__(self) -> None:
        settle(self)

    @classmethod
    def new(cls, device: torch.device, settings: dict[str, Any]) -> "Record":
        return cls(environment(device), settings, date=time.strftime("%Y-%m-%d"))

    def with_row(self, row: Row) -> "Record":
        return replace(self, rows=(*self.rows, row))

    def with_skipped(self, name: str) -> "Record":
        return replace(self, skipped=(*self.skipped, name))

    def with_failure(self, name: str, why: str) -> "Record":
        return replace(self, failed={**self.failed, name: why})

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, to_data(self))

    @classmethod
    def read(cls, path: Path) -> "Record":
        """What ``write`` wrote; another kind of file is told."""
        data = read_json(path)
        if not isinstance(data, dict) or data.get("format") != FORMAT or "rows" not in data:
            raise RunError(
                f"{path} is not what lpbnn bench writes with --json (format {FORMAT}). Fix: give such a "
                "file, or measure again."
            )
        return from_data(cls, data)
