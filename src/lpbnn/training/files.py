"""Writing so that a reader sees the old file or the whole new one, and reading with clear errors."""

import errno
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lpbnn.training import archive

CONFIG = "config.json"  # what makes a folder that of a run
_PIECE = 2**24  # bytes per write


class RunError(ValueError):
    """A run folder that cannot be used as asked: what is wrong with it and what to do."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; its text says how to go on."""


def write_atomic(path: Path, data: bytes | memoryview) -> None:
    """Put ``data`` at ``path``: written beside it, flushed to the disk, then renamed.

    Whatever happens on the way (a kill, a full disk), what was at ``path`` before is still there.
    """
    # One fixed name: what a killed run leaves behind is overwritten, not collected.
    temporary = path.with_name(f".{path.name}.tmp")
    view = memoryview(data).cast("B")
    try:
        with temporary.open("wb") as file:
            for start in range(0, len(view), _PIECE):
                file.write(view[start : start + _PIECE])
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        _remove(temporary)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        why = "the disk is full" if full else str(error)
        kept = (
            "What was there before is untouched." if path.exists() else "Nothing was there before."
        )
        raise RunError(
            f"{path} ({len(view):,} bytes) could not be written: {why}. {kept} "
            "Fix: free some space or correct the permissions, then resume the run."
        ) from error
    except BaseException:
        _remove(temporary)
        raise


def write_json(path: Path, data: Any) -> None:
    """JSON, atomically. Numbers that JSON does not have (NaN, infinity) become null."""
    text = json.dumps(finite(data), indent=1, allow_nan=False) + "\n"
    write_atomic(path, text.encode())


def read_json(path: Path) -> Any:
    """What ``write_json`` wrote, or a ``RunError``."""
    text = read_bytes(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise RunError(
            f"{path} is damaged: it is no JSON ({error}). Fix: restore it from a copy, or start the "
            "run again with overwrite."
        ) from error


def read_bytes(path: Path) -> bytes:
    """The content of a file of a run folder, or a ``RunError`` that says what is missing.

    A path may go through an archive of records: ``records.tar.xz/cifar10-fast/a.json``.
    """
    if (found := archive.locate(path)) and found[1]:
        return _read_member(*found)
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        folder = path.parent
        if not folder.exists():
            what = f"{folder} does not exist. Fix: check the path of the run folder."
        elif not folder.is_dir():
            what = f"{folder} is a file; expected the folder of a run."
        elif not (folder / CONFIG).exists() and (among := _runs_in(folder)):
            what = (
                f"{folder} is a folder of runs, no run itself: it holds {_some_of(among)}. Fix: give one "
                f"of them, or several, as {folder}/*"
            )
        else:
            held = _some_of(sorted(p.name for p in folder.iterdir())) or "nothing"
            what = (
                f"{folder} has no {path.name}; it holds {held}. Fix: give the folder of a run, or "
                "resume it if it was not finished."
            )
        raise RunError(what) from error
    except OSError as error:
        raise RunError(f"{path} could not be read: {error}.") from error


def _read_member(file: Path, name: str) -> bytes:
    try:
        return archive.members(file)[name]
    except KeyError:
        there = sorted({name.partition("/")[0] for name in archive.members(file)})
        raise RunError(
            f"{file} has no {name}; it holds {_some_of(there)}. Fix: check the path in the archive."
        ) from None
    except ValueError as error:
        raise RunError(str(error)) from error


def _runs_in(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))


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


def _some_of(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def finite(value: Any) -> Any:
    """``value`` for JSON: numbers that it does not have (NaN, infinity) become null.

    >>> finite({"loss": [0.5, float("nan")]})
    {'loss': [0.5, None]}
    """
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sync_folder(folder: Path) -> None:
    """The rename itself reaches the disk; not every system lets a folder be opened for that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    with suppress(OSError):  # the error that brought us here is the one to tell
        path.unlink(missing_ok=True)
