"""The run folder: what is in it, and how it is read and written safely.

- config.json: the resolved ``RunConfig``
- data.json: ``DataInfo``: what of the data a model needs to be rebuilt without it
- environment.json: ``{"sessions": [...]}``: versions, device, commit, command of each start
- log.csv: one row per epoch
- checkpoint.pt: weights, optimizer, epochs done; read with ``weights_only=True``
- weights.safetensors: the final weights, once training is over
- results.json: every number; its presence says that the run is finished. ``measured_again``: the
  environment of the evaluation, where that was not part of a start. ``calibration``: what ``lpbnn
  calibrate`` found, which is part of the weights
- predictions.npz: the arrays behind the report's figures
- conformal.npz: the scores of held-out examples, if ``lpbnn calibrate`` was asked for sets or intervals
- manifest.json: the SHA-256 digest of each file, compared whenever the file is read
- tensorboard/: where asked for

A run made by ``ensemble_from_runs`` was not trained, and has no log and no checkpoint.

Every file is replaced as a whole, and the digest of its new content is in the manifest before that: a run
that is killed at any moment can be resumed or started again. One process at a time writes to a folder: it
holds a lock. Symlinks in the folder are never followed.
"""

import csv
import fcntl
import hashlib
import io
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn

from lpbnn import methods, registry
from lpbnn.atomic import write_atomic
from lpbnn.calibration.conformal import Conformal, IntervalScore, SetScore
from lpbnn.training import checkpoint
from lpbnn.training.build import DataInfo, resolved
from lpbnn.training.config import MAY_DIFFER, EvalConfig, RunConfig, from_data, to_data
from lpbnn.training.files import (
    CONFIG,
    RunError,
    from_json,
    is_leftover,
    read_arrays,
    read_regular,
    to_json,
)

DATA, ENVIRONMENT = "data.json", "environment.json"
LOG, CHECKPOINT, WEIGHTS = "log.csv", "checkpoint.pt", "weights.safetensors"
RESULTS, PREDICTIONS, TENSORBOARD = "results.json", "predictions.npz", "tensorboard"
MANIFEST, CONFORMAL = "manifest.json", "conformal.npz"
FILES = (
    *(MANIFEST, CONFIG, DATA, ENVIRONMENT, LOG, CHECKPOINT),
    *(WEIGHTS, CONFORMAL, RESULTS, PREDICTIONS),
)
MEASURED = (WEIGHTS, CONFORMAL)  # what the results are of, and ``lpbnn calibrate`` replaces
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
        """Return "empty" (or not there), "unfinished" or "finished"; anything else is no run folder."""
        try:
            found = {p.name for p in self.path.iterdir() if not is_leftover(p.name)}
        except FileNotFoundError:
            return "empty"
        except NotADirectoryError as error:
            raise RunError(
                f"{self.path} is a file; expected a folder. Fix: give another path."
            ) from error
        if CONFIG in found:
            return "finished" if RESULTS in found else "unfinished"
        # A run that was killed before its config was written leaves what the manifest lists.
        if found <= set(FILES) and found - {MANIFEST} <= self.digests().keys():
            return "empty"
        held = ", ".join(sorted(found)[:8])
        raise RunError(
            f"{self.path} is not empty and no run folder: it holds {held} and no {CONFIG}. "
            "Fix: give a new or empty folder."
        )

    def is_stopped(self) -> bool:
        """Return True if it holds a run that was begun and is not finished."""
        return (self / CONFIG).is_file() and not (self / RESULTS).exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and lock it inside the block, or for as long as the process lives.

        Folders that were made for it and are still empty at the end are removed.

        Raises:
            RunError: if another process has the lock, or it is no run folder and cannot become one.
        """
        self.state()  # a file, or a folder with something else in it
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        handle = self._open_locked()
        try:
            for name in FILES:  # of a process that was killed
                for leftover in self.path.glob(f".{name}.*.tmp"):
                    leftover.unlink(missing_ok=True)
            yield
        finally:
            with suppress(OSError):  # not empty
                for folder in made:
                    folder.rmdir()
            os.close(handle)

    def _open_locked(self) -> int:
        """Make the folder and return a handle that has its lock."""
        for _ in range(100):
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                handle = os.open(self.path, os.O_RDONLY)
            except OSError as error:
                raise RunError(f"{self.path} could not be made: {error}.") from error
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(handle)  # the folder is the other one's: it stays, empty or not
                raise RunError(
                    f"another process is writing to {self.path}: a run that goes on. Fix: wait for its "
                    "end, stop it, or give another folder."
                ) from error
            except OSError as error:  # some network file systems have no locks
                warnings.warn(f"{self.path} cannot be locked ({error}).", stacklevel=4)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), self.path.stat()):
                    return handle
            os.close(handle)  # whoever had the lock removed the folder: lock a new one
        raise RunError(
            f"{self.path} was removed as often as it was made. Fix: give another folder."
        )

    def digests(self) -> dict[str, list[str]]:
        """Return the SHA-256 digests that each file may have: two while it is being replaced."""
        if not os.path.lexists(self / MANIFEST):
            return {}
        manifest = from_json(read_regular(self / MANIFEST), self / MANIFEST)
        files = manifest.get("files") if isinstance(manifest, dict) else None
        if not isinstance(files, dict) or not all(isinstance(one, list) for one in files.values()):
            raise RunError(f"{self / MANIFEST} is damaged. Fix: restore it from a copy.")
        return files

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Replace a file of the run; its digest is in the manifest before the file is there."""
        digests, new = self.digests(), hashlib.sha256(content).hexdigest()
        before = digests.get(name, [])
        if before != [new]:
            self._write_digests({**digests, name: [*before, new]})
        write_atomic(self / name, content)
        if before and before != [new]:
            self._write_digests({**digests, name: [new]})

    def _write_digests(self, digests: Mapping[str, list[str]]) -> None:
        write_atomic(self / MANIFEST, to_json({"sha256 of": "the files", "files": digests}))

    def read(self, name: str) -> bytes:
        """Return the content of a file of the run.

        Raises:
            RunError: if it is not there, a symlink, or not what was written.
        """
        before = self.digests()
        content = read_regular(self / name)
        digest = hashlib.sha256(content).hexdigest()
        # Another process may have replaced the file meanwhile.
        known = before.get(name, [digest])
        if digest not in known and digest not in self.digests().get(name, []):
            raise RunError(
                f"{self / name} ({len(content):,} bytes) is damaged or was changed: its digest is not the one "
                f"in {MANIFEST}. Fix: restore it from a copy, or train again with overwrite."
            )
        return content

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file of the run: each holds one object."""
        found = from_json(self.read(name), self / name)
        if not isinstance(found, dict):
            raise RunError(
                f"{self / name} does not fit this version of lpbnn: it holds a {type(found).__name__}, "
                "expected an object. Fix: restore it from a copy, or train again with overwrite."
            )
        return found

    def prepare(self, config: RunConfig, data: DataInfo) -> None:
        """Write what is known before training; the config last, with which the folder is a run."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.write(DATA, to_json(to_data(data)))
        self.write(CONFIG, to_json(config.to_data()))

    def clear(self) -> None:
        """Remove the run, and only what a run writes."""
        # The manifest goes last: a folder without it and without a config counts as foreign.
        for name in reversed(FILES):
            (self / name).unlink(missing_ok=True)
        board = self / TENSORBOARD
        if board.is_dir() and not board.is_symlink():  # rmtree would wait for the writer of a pipe
            shutil.rmtree(board, ignore_errors=True)

    def config(self) -> RunConfig:
        """Return the config the run was started with."""

        def read(stored: Any) -> RunConfig:
            config = from_data(RunConfig, stored)
            # The file of somebody's own method may not be at hand.
            return resolved(config) if config.method in methods.names() else config

        return self._fitting(CONFIG, read)

    def config_as_measured(self) -> RunConfig:
        """Return the config; measured again, a run is what it was measured with last."""
        config = self.config()

        def measured(results: Any) -> RunConfig:
            return replace(config, evaluate=from_data(EvalConfig, results["evaluate"], "evaluate"))

        return self._fitting(RESULTS, measured) if (self / RESULTS).exists() else config

    def require_trust(self, trust: bool) -> None:
        """Raise a ``RunError`` if the config names modules to import and ``trust`` is False."""
        config = self.read_json(CONFIG)
        names = [str(config.get(key, "")) for key in ("data", "backbone")]
        try:
            registry.require_trust(names, self.path, trust)
        except ValueError as error:
            raise RunError(str(error)) from error

    def data(self) -> DataInfo:
        """Return what of its data the run's model depends on."""
        return self._fitting(DATA, lambda stored: from_data(DataInfo, stored))

    def require_data(self, now: DataInfo) -> None:
        """Raise a ``RunError`` if the data at hand is not what this run learned from.

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
        stored = self.read_json(name)
        try:
            return read(stored)
        except Exception as error:  # what is stored can be of any type and size
            why = error if isinstance(error, ValueError | TypeError) else repr(error)
            raise RunError(f"{self / name} does not fit this version of lpbnn: {why}") from error

    def add_session(self, environment: dict[str, Any]) -> None:
        """Record one more start of this run."""
        self.write(ENVIRONMENT, to_json({"sessions": [*self.sessions(), environment]}))

    def sessions(self) -> list[dict[str, Any]]:
        """Return the environment of each start of this run."""
        there = (self / ENVIRONMENT).exists()
        return self._fitting(ENVIRONMENT, _sessions) if there else []

    def write_log(self, rows: list[Row]) -> None:
        """Write the whole log, again: a few hundred rows, and never half a row."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        # The loss may gain a term along the way; the timings stay at the end for the eye.
        last = [name for name in ("images_per_second", "seconds") if name in columns]
        columns = [name for name in columns if name not in last] + last
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self.write(LOG, text.getvalue().encode())

    def log(self, epochs: int | None = None) -> list[Row]:
        """Return the rows of the log, or those of the first ``epochs`` epochs."""
        try:
            lines = csv.DictReader(io.StringIO(self.read(LOG).decode()))
            rows = [{key: float(value) for key, value in row.items() if value} for row in lines]
            for row in rows:
                row["epoch"] = int(row["epoch"])
        except RunError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self / LOG} is damaged: {error!r}. Fix: restore a copy.") from error
        return [row for row in rows if epochs is None or row["epoch"] <= epochs]

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write everything that is needed to go on."""
        self.write(CHECKPOINT, checkpoint.to_bytes(state))

    def checkpoint(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """Return the last checkpoint; None if the run was stopped before its first one."""
        path = self / CHECKPOINT
        if not path.exists():
            return None
        return checkpoint.from_bytes(self.read(CHECKPOINT), device, str(path))

    def save_weights(self, model: nn.Module) -> None:
        """Write the model's state."""
        self.write(WEIGHTS, checkpoint.to_safetensors(model.state_dict()))

    def load_weights(self, model: nn.Module) -> None:
        """Put the run's weights into a model of the same architecture."""
        checkpoint.restore(model, self.state_dict(), str(self / WEIGHTS))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights by name, on the CPU."""
        return checkpoint.from_safetensors(self.read(WEIGHTS), str(self / WEIGHTS))

    def tensorboard(self) -> Path:
        """Return the folder of TensorBoard's files."""
        path = self / TENSORBOARD
        if path.is_symlink():
            raise RunError(f"{path} is a link, through which nothing is written. Fix: remove it.")
        return path

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write the numbers, and of which config they are; from now on the run is finished."""
        own = {"config_digest": self.config_digest()} if (self / CONFIG).exists() else {}
        own |= {"digests": {name: self.digest(name) for name in MEASURED}}
        self.write(RESULTS, to_json({**results, **own}))

    def digest(self, name: str) -> str | None:
        """Return the SHA-256 digest of a file of the run; None if there is no such file."""
        if not os.path.lexists(self / name):
            return None
        known = self.digests().get(name, [])
        if len(known) == 1:  # compared when the file is read
            return known[0]
        return hashlib.sha256(read_regular(self / name)).hexdigest()

    def config_digest(self) -> str:
        """Return the digest of what decides the training in the stored config."""
        config = self.read_json(CONFIG)
        decisive = {k: v for k, v in config.items() if k not in MAY_DIFFER["resume"]}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    def results(self, calibrating: bool = False) -> dict[str, Any]:
        """Return the numbers of a finished run.

        Args:
            calibrating: True if they may be of weights as they were before a calibration that was stopped.

        Raises:
            RunError: if the run is not finished, or they are another run's or of other weights.
        """
        if self.is_stopped():
            raise RunError(
                f"the run in {self.path} is not finished: it has no {RESULTS}. Fix: resume it."
            )
        results = self.read_json(RESULTS)
        if (self / CONFIG).exists():
            config = {**self.read_json(CONFIG), "config_digest": self.config_digest()}
            for key in ("method", "seed", "config_digest"):
                if key in results and config.get(key) != results[key]:
                    raise RunError(
                        f"{self / RESULTS} is of {key} {results[key]!r}, {CONFIG} beside it of "
                        f"{config.get(key)!r}: two runs were mixed. Fix: train again with overwrite."
                    )
        measured = results.get("digests")
        if calibrating or not isinstance(measured, Mapping):
            return results
        for name in MEASURED:
            if self.digest(name) not in (None, measured.get(name)):  # tables need no weights
                raise RunError(
                    f"{self / RESULTS} is not of the {name} beside it: a calibration was stopped. Fix: lpbnn "
                    f"calibrate {self.path}, with the options that it had."
                )
        return results

    def write_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the arrays of the report, compressed."""
        objects = [name for name, array in arrays.items() if array.dtype == object]
        if objects:  # numpy would pickle them, and nothing here is ever unpickled
            raise TypeError(f"{', '.join(objects)}: expected numbers or strings, got objects.")
        self._write_npz(PREDICTIONS, arrays)

    def _write_npz(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        self.write(name, buffer.getbuffer())

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of the report; none are unpickled."""
        content = self.read(PREDICTIONS)
        return read_arrays(content, str(self / PREDICTIONS), "evaluate the run again")

    def write_conformal(self, conformal: tuple[Conformal, float] | None) -> None:
        """Write conformal scores and their level; None removes those that are there."""
        if conformal is None:
            (self / CONFORMAL).unlink(missing_ok=True)
            return
        own, level = conformal
        options = {"method": own.method, "penalty": own.penalty, "free_classes": own.free_classes}
        options |= {"level": level, "groups": len(own.scores)}
        arrays = {name: np.array(value) for name, value in options.items()}
        arrays |= {f"scores/{i}": scores.cpu().numpy() for i, scores in enumerate(own.scores)}
        self._write_npz(CONFORMAL, arrays)

    def conformal(self) -> tuple[Conformal, float] | None:
        """Return the run's conformal scores and their level; None if it has none."""
        if not os.path.lexists(self / CONFORMAL):
            return None
        fix = "calibrate the run again"
        stored = read_arrays(self.read(CONFORMAL), str(self / CONFORMAL), fix)
        try:
            scores = [torch.from_numpy(stored[f"scores/{i}"]) for i in range(int(stored["groups"]))]
            found = Conformal(
                str(stored["method"]),
                tuple(scores),
                float(stored["penalty"]),
                int(stored["free_classes"]),
            )
            level = float(stored["level"])
            if found.method not in get_args(SetScore) + get_args(IntervalScore):
                raise ValueError(f"unknown score {found.method!r}")
            if not scores or not all(
                s.dtype == torch.float64 and s.dim() in (1, 2) for s in scores
            ):
                raise ValueError("its scores are no numbers")
            if not all(bool((s[:-1] <= s[1:]).all() and s.isfinite().all()) for s in scores):
                raise ValueError("its scores are not sorted, or not finite")
            if not 0 <= found.penalty < math.inf or found.free_classes < 0:
                raise ValueError("its penalty is no finite number of at least 0")
            found.thresholds(level)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise RunError(f"{self / CONFORMAL} is damaged: {error!r}. Fix: {fix}.") from error
        return found, level


def _sessions(stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = stored["sessions"]
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError("sessions: expected a list of objects.")
    return found
