"""Reading and writing files: atomic, never through a symlink, with errors that say what to do."""

import errno
import json
import math
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from lpbnn.training import archive

CONFIG = "config.json"  # what makes a folder that of a run
_PIECE = 2**24  # bytes per write
# A link is not followed, a pipe without a writer not waited for. Windows has neither flag, and needs the third.
_FLAGS = sum(getattr(os, flag, 0) for flag in ("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))


class RunError(ValueError):
    """A run folder that cannot be used as asked: what is wrong with it and what to do."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; its text says how to go on."""


def write_atomic(path: Path, data: bytes | memoryview) -> None:
    """Put ``data`` at ``path``: written to a new file beside it, flushed to the disk, then renamed.

    Whatever happens on the way (a kill, a full disk), what was at ``path`` before is still there. A symlink
    at ``path`` is replaced, not followed. The name of the new file cannot be predicted, and the file must
    not exist: nobody can have put a link to another file there.

    Raises:
        RunError: if the disk is full or the folder cannot be written to.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    view = memoryview(data).cast("B")
    try:
        with temporary.open("xb") as file:
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


def is_leftover(name: str) -> bool:
    """Return True for the temporary file of a killed process, or what a file manager drops everywhere."""
    return name in (".DS_Store", "Thumbs.db") or (name.startswith(".") and name.endswith(".tmp"))


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file; symlinks, pipes and devices are refused.

    Raises:
        RunError: if ``path`` is something else than a file, or a link.
    """
    try:
        handle = os.open(path, _FLAGS)
    except OSError as error:
        if path.is_symlink():
            raise _irregular(path) from error
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _irregular(path)
    with os.fdopen(handle, "rb") as file:
        return file.read()


def _irregular(path: Path) -> RunError:
    return RunError(
        f"{path} is a link, a pipe or a folder; a run folder holds plain files only. Fix: do not use the "
        "folder if it is not yours; otherwise put the file itself there."
    )


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically. Numbers that JSON does not have (NaN, infinity) become null."""
    write_atomic(path, to_json(data))


def to_json(data: Any) -> bytes:
    """Return indented JSON; numbers that JSON does not have become null."""
    return (json.dumps(finite(data), indent=1, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """Return what ``write_json`` wrote, or raise a ``RunError``."""
    return from_json(read_bytes(path), path)


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


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, or raise a ``RunError`` that says what is missing.

    A path may go through an archive of records: ``records.tar.xz/cifar10-fast/a.json``.
    """
    if (found := archive.locate(path)) and found[1]:
        return _read_member(*found)
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> RunError:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        return RunError(f"{path} could not be read: {error}.")
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
    return RunError(what)


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
