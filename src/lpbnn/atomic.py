"""Atomic writes: whoever reads a file sees the old one or the whole new one."""

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

_PIECE = 2**24  # bytes per write


class RunError(ValueError):
    """A file or run folder that cannot be used as asked: what is wrong with it and what to do."""


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
            "Fix: free some space or correct the permissions, then give the same command again."
        ) from error
    except BaseException:
        _remove(temporary)
        raise


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
