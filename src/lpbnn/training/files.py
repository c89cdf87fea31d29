"""Reading and writing files: atomic, never through a symlink, with errors that say what to do."""

import io
import json
import math
import os
import stat
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpbnn.atomic import RunError

if TYPE_CHECKING:
    import numpy as np

CONFIG = "config.json"  # what makes a folder that of a run
MOST_ARRAYS = 2**30  # bytes of the arrays of one file
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe without a writer is not waited for


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; its text says how to go on."""


def is_leftover(name: str) -> bool:
    """Return True for the temporary file of a killed process, or what a file manager drops everywhere."""
    return name in (".DS_Store", "Thumbs.db") or (name.startswith(".") and name.endswith(".tmp"))


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file; symlinks, pipes and devices are refused.

    Raises:
        RunError: if ``path`` is something else than a file, or a link.
    """
    refused = RunError(
        f"{path} is a link, a pipe or a folder; a run folder holds plain files only. Fix: do not use the "
        "folder if it is not yours; otherwise put the file itself there."
    )
    try:
        handle = os.open(path, _FLAGS)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise refused
        with os.fdopen(handle, "rb") as file:
            return file.read()
    except OSError as error:
        raise refused if path.is_symlink() else _unreadable(path, error) from error


def to_json(data: Any) -> bytes:
    """Return indented JSON; numbers that JSON does not have become null."""
    return (json.dumps(finite(data), indent=1, allow_nan=False) + "\n").encode()


def from_json(text: bytes, path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        RunError: if it is no JSON; the message names ``path``.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(
            f"{path} is damaged: it is no JSON ({error}). Fix: restore it from a copy, or start the "
            "run again with overwrite."
        ) from error


def read_arrays(content: bytes, where: str, fix: str) -> "dict[str, np.ndarray]":
    """Return the arrays of an ``.npz`` file, in bounded memory; nothing is unpickled.

    Args:
        content: of the file.
        where: its name, for errors.
        fix: what to do if it is damaged.

    Raises:
        RunError: if it is damaged, or says that it is larger than ``MOST_ARRAYS``.
    """
    import numpy as np  # not for lpbnn --help

    found: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as stored:
            total = sum(part.file_size for part in stored.infolist())
            if total > MOST_ARRAYS:  # 3 MB of zeros, packed, may stand for gigabytes
                raise ValueError(f"{total:,} bytes when unpacked, expected at most {MOST_ARRAYS:,}")
            for name in stored.namelist():
                with stored.open(name) as part:
                    array = np.lib.format.read_array(part, allow_pickle=False)
                found[name.removesuffix(".npy")] = array
    except Exception as error:  # bytes that are no archive can fail in any way at all
        raise RunError(f"{where} is damaged ({error!r}). Fix: {fix}.") from error
    return found


def _unreadable(path: Path, error: OSError) -> RunError:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        return RunError(f"{path} could not be read: {error}.")
    folder = path.parent
    if not folder.exists():
        what = f"{folder} does not exist. Fix: check the path of the run folder."
    elif not folder.is_dir():
        what = f"{folder} is a file; expected the folder of a run."
    elif not (folder / CONFIG).exists() and (among := runs_under(folder)):
        names = some_of([str(run.relative_to(folder)) for run in among])
        what = (
            f"{folder} is a folder of runs, no run itself: it holds {names}. Fix: give one "
            f"of them, or several, as {folder}/*"
        )
    else:
        held = some_of(sorted(p.name for p in folder.iterdir())) or "nothing"
        what = (
            f"{folder} has no {path.name}; it holds {held}. Fix: give the folder of a run, or "
            "resume it if it was not finished."
        )
    return RunError(what)


def runs_under(folder: Path) -> list[Path]:
    """Return the run folders in a folder that is none itself, at any depth, in the order of names."""
    if not folder.is_dir() or (folder / CONFIG).exists():
        return []
    found: list[Path] = []
    for path in sorted(folder.iterdir()):
        if (path / CONFIG).exists():
            found.append(path)
        elif not path.is_symlink():  # which may lead back here
            found += runs_under(path)
    return found


def some_of(names: list[str]) -> str:
    """Return the first eight of many names."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def printable(text: str) -> str:
    r"""Return text that a terminal only shows: control characters and broken names as escapes.

    >>> printable("a\x1b[2J\u202eb")
    'a\\x1b[2J\\u202eb'
    """
    kept = (
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
    return "".join(kept)


def finite(value: Any) -> Any:
    """Return ``value`` for JSON: numbers that it does not have (NaN, infinity) become null.

    >>> finite({"loss": [0.5, float("nan")]})
    {'loss': [0.5, None]}
    """
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
