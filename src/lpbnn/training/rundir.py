"""The run folder, where the stages meet: what is in it, and how it is read and written safely.

===================  ===============================================================================
config.json          the resolved ``RunConfig``
data.json            ``DataInfo``: what of the data a model needs to be rebuilt without it
environment.json     ``{"sessions": [...]}``: versions, device, commit, command of each start
log.csv              one row per epoch
checkpoint.pt        weights, optimizer, epochs done; read with ``weights_only=True``
weights.safetensors  the final weights, once training is over
results.json         every number; its presence says that the run is finished. ``measured_again``: the
                     environment of the evaluation, where that was not part of a start
predictions.npz      the arrays behind the report's figures
tensorboard/         where asked for
===================  ===============================================================================

A joined run (``lpbnn.training.join``) was not trained, and has no log and no checkpoint.

Every file is written beside its place and renamed: a run that is killed, or meets a full disk, keeps
the previous one whole.
"""

import csv
import io
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lpbnn import methods, registry
from lpbnn.training import weights
from lpbnn.training.build import DataInfo, resolved
from lpbnn.training.config import EvalConfig, RunConfig, from_data, to_data
from lpbnn.training.files import CONFIG, RunError, read_bytes, read_json, write_atomic, write_json

DATA, ENVIRONMENT = "data.json", "environment.json"
LOG, CHECKPOINT, WEIGHTS = "log.csv", "checkpoint.pt", "weights.safetensors"
RESULTS, PREDICTIONS, TENSORBOARD = "results.json", "predictions.npz", "tensorboard"
FILES = (CONFIG, DATA, ENVIRONMENT, LOG, CHECKPOINT, WEIGHTS, RESULTS, PREDICTIONS)

KEYS = {"epochs", "diverged", "seconds", "peak_memory", "model", "optimizer", "precision"}

LEARNED_FROM = ("shape", "classes", "num_train")  # more data of other kinds may come later

State = Literal["empty", "unfinished", "finished"]
Row = dict[str, float]
T = TypeVar("T")


class RunDir:
    """One run folder. Reading raises ``RunError`` with the reason; writing is atomic."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def state(self) -> State:
        """ "empty" (or not there), "unfinished" or "finished"; anything else is no run folder."""
        if not self.path.exists():
            return "empty"
        if not self.path.is_dir():
            raise RunError(f"{self.path} is a file; expected a folder. Fix: give another path.")
        found = {p.name for p in self.path.iterdir() if not _is_leftover(p.name)}
        if not found:
            return "empty"
        if CONFIG not in found:
            held = ", ".join(sorted(found)[:8])
            raise RunError(
                f"{self.path} is not empty and no run folder: it holds {held} and no {CONFIG}. "
                "Fix: give a new or empty folder."
            )
        return "finished" if RESULTS in found else "unfinished"

    def is_stopped(self) -> bool:
        """Whether it holds a run that was begun and is not finished."""
        return (self / CONFIG).is_file() and not (self / RESULTS).exists()

    def make(self) -> None:
        """The folder itself, where it is not there yet."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.path} could not be made: {error}.") from error

    def prepare(self, config: RunConfig, data: DataInfo) -> None:
        """Make the folder and write what is known before training."""
        self.make()
        write_json(self / DATA, to_data(data))
        write_json(self / CONFIG, config.to_data())

    def clear(self) -> None:
        """Remove the run, and only what a run writes."""
        # The config goes last: a folder without it counts as foreign.
        for name in reversed(FILES):
            (self / name).unlink(missing_ok=True)
            (self / f".{name}.tmp").unlink(missing_ok=True)
        shutil.rmtree(self / TENSORBOARD, ignore_errors=True)

    def config(self) -> RunConfig:
        """The config the run was started with."""

        def read(stored: Any) -> RunConfig:
            config = from_data(RunConfig, stored)
            # The file of somebody's own method may not be at hand.
            return resolved(config) if config.method in methods.names() else config

        return self._fitting(CONFIG, read)

    def config_as_measured(self) -> RunConfig:
        """The config; measured again, a run is what it was measured with last."""
        config = self.config()

        def measured(results: Any) -> RunConfig:
            return replace(config, evaluate=from_data(EvalConfig, results["evaluate"], "evaluate"))

        return self._fitting(RESULTS, measured) if (self / RESULTS).exists() else config

    def require_trust(self, trust: bool) -> None:
        """A ``RunError`` where the config names modules to import and ``trust`` is False."""
        config = read_json(self / CONFIG)
        names = [str(config.get(key, "")) for key in ("data", "backbone")]
        try:
            registry.require_trust(names, self.path, trust)
        except ValueError as error:
            raise RunError(str(error)) from error

    def data(self) -> DataInfo:
        """What of its data the run's model depends on."""
        return self._fitting(DATA, lambda stored: from_data(DataInfo, stored))

    def require_data(self, now: DataInfo) -> None:
        """A ``RunError`` where the data at hand is not what this run learned from.

        Among the test pictures of other data may be some that it was trained on.
        """
        then = self.data()
        who = "fingerprint" if then.fingerprint and now.fingerprint else "name"
        for what in (who, *LEARNED_FROM):
            if getattr(then, what) != getattr(now, what):
                raise RunError(
                    f"the data has changed since the run in {self.path} was trained: its {what} was "
                    f"{getattr(then, what)!r} and is {getattr(now, what)!r} now. Fix: give the data as it "
                    "was (data_root), or train anew."
                )

    def _fitting(self, name: str, read: Callable[[Any], T]) -> T:
        stored = read_json(self / name)
        try:
            return read(stored)
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(f"{self / name} does not fit this version of lpbnn: {error}") from error

    def add_session(self, environment: dict[str, Any]) -> None:
        """Record one more start of this run."""
        write_json(self / ENVIRONMENT, {"sessions": [*self.sessions(), environment]})

    def sessions(self) -> list[dict[str, Any]]:
        """The environment of each start of this run."""
        return read_json(self / ENVIRONMENT)["sessions"] if (self / ENVIRONMENT).exists() else []

    def write_log(self, rows: list[Row]) -> None:
        """The whole log, again: a few hundred rows, and never half a row."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        # The loss may gain a term along the way; the timings stay at the end for the eye.
        last = [name for name in ("images_per_second", "seconds") if name in columns]
        columns = [name for name in columns if name not in last] + last
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomic(self / LOG, text.getvalue().encode())

    def log(self, epochs: int | None = None) -> list[Row]:
        """The rows of the log, of the first ``epochs`` epochs."""
        lines = csv.DictReader(io.StringIO(read_bytes(self / LOG).decode()))
        try:
            rows = [{key: float(value) for key, value in row.items() if value} for row in lines]
            for row in rows:
                row["epoch"] = int(row["epoch"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self / LOG} is damaged: {error!r}. Fix: restore a copy.") from error
        return [row for row in rows if epochs is None or row["epoch"] <= epochs]

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Everything that is needed to go on; plain containers and tensors only."""
        # Through memory: torch.save to a file on a full disk leaves no exception one can rely on.
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        write_atomic(self / CHECKPOINT, buffer.getbuffer())

    def checkpoint(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """The last checkpoint; None where the run was stopped before its first one."""
        path = self / CHECKPOINT
        if not path.exists():
            return None
        content = read_bytes(path)
        try:
            state = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
            if missing := KEYS - set(state):
                raise KeyError(f"it lacks {', '.join(sorted(missing))}")
        except Exception as error:  # bytes that are no checkpoint can fail in any way at all
            reason = str(error).splitlines()[0] if str(error) else repr(error)
            raise RunError(
                f"{path} is damaged or cut short ({reason}). Fix: restore it from a copy, or delete "
                "it and resume: the run then starts from the first epoch."
            ) from error
        return state

    def save_weights(self, model: nn.Module) -> None:
        """The model's state."""
        write_atomic(self / WEIGHTS, weights.to_bytes(model.state_dict()))

    def load_weights(self, model: nn.Module) -> None:
        """Put the run's weights into a model of the same architecture."""
        path = self / WEIGHTS
        weights.restore(model, weights.read(read_bytes(path), str(path)), str(path))

    def state_dict(self) -> dict[str, Tensor]:
        """The weights by name, on the CPU."""
        return weights.read(read_bytes(self / WEIGHTS), str(self / WEIGHTS))

    def write_results(self, results: Mapping[str, Any]) -> None:
        """The numbers; from now on the run is finished."""
        write_json(self / RESULTS, dict(results))

    def results(self) -> dict[str, Any]:
        """The numbers of a finished run."""
        if self.is_stopped():
            raise RunError(
                f"the run in {self.path} is not finished: it has no {RESULTS}. Fix: resume it."
            )
        return read_json(self / RESULTS)

    def write_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """The arrays of the report, compressed."""
        buffer = io.BytesIO()
        objects = [name for name, array in arrays.items() if array.dtype == object]
        if objects:  # numpy would pickle them, and nothing here is ever unpickled
            raise TypeError(f"{', '.join(objects)}: expected numbers or strings, got objects.")
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        write_atomic(self / PREDICTIONS, buffer.getbuffer())

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the report; none are unpickled."""
        path = self / PREDICTIONS
        try:
            with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            if isinstance(error, RunError):
                raise
            raise RunError(f"{path} is damaged ({error}). Fix: evaluate the run again.") from error


def _is_leftover(name: str) -> bool:
    """A half-written file of a killed run, or what a file manager drops everywhere."""
    return name in (".DS_Store", "Thumbs.db") or (name.startswith(".") and name.endswith(".tmp"))
