"""Records in one archive, read in memory: ``records.tar.xz/cifar10-fast/a.json`` names a file in it.

An archive is used like the folder that was packed: a path goes through the archive's name.
"""

import io
import lzma
import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from lpbnn.training import files as plain
from lpbnn.training.files import RunError

SUFFIX = ".tar.xz"
MOST = 2**28  # bytes of an unpacked archive


def locate(path: Path) -> tuple[Path, str] | None:
    """Return the archive that a path goes through and the name in it; None if there is none.

    >>> locate(Path("results/cifar10-fast"))
    """
    for outer in (path, *path.parents):
        if outer.name.endswith(SUFFIX) and outer.is_file():
            inner = path.relative_to(outer).as_posix()
            return outer, "" if inner == "." else inner
    return None


def members(archive: Path) -> dict[str, bytes]:
    """Return the content of every file of an archive by its name.

    Raises:
        ValueError: if the archive is damaged.
    """
    status = archive.stat()
    return _members(archive.resolve(), status.st_mtime_ns, status.st_size)


def is_folder(path: Path) -> bool:
    """Return True for a folder, on the disk or in an archive."""
    return path.is_dir() or bool(files(path))


def files(folder: Path, suffix: str = "", deep: bool = False) -> list[Path]:
    """Return the files of a folder, on the disk or in an archive, in the order of their names.

    Args:
        folder: a folder, ``NAME.tar.xz`` or ``NAME.tar.xz/FOLDER``.
        suffix: only files with this one, such as ``.json``.
        deep: include the folders in it.
    """
    if (found := locate(folder)) is None:
        inside = folder.rglob(f"*{suffix}") if deep else folder.glob(f"*{suffix}")
        return sorted(path for path in inside if path.is_file())
    archive, inner = found
    paths = [archive / name for name in members(archive)]
    top = archive / inner
    return sorted(
        path
        for path in paths
        if (top in path.parents if deep else path.parent == top) and path.name.endswith(suffix)
    )


def exists(path: Path) -> bool:
    """Return True if a file is there, on the disk or in an archive."""
    found = locate(path)
    return path.exists() if found is None else not found[1] or found[1] in members(found[0])


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, on the disk or in an archive.

    Raises:
        RunError: if there is no such file; the message says what is there.
    """
    found = locate(path)
    if found is None or not found[1]:
        return plain.read_bytes(path)
    file, name = found
    try:
        return members(file)[name]
    except KeyError:
        there = sorted({name.partition("/")[0] for name in members(file)})
        raise RunError(
            f"{file} has no {name}; it holds {plain.some_of(there)}. Fix: check the path in the archive."
        ) from None
    except ValueError as error:
        raise RunError(str(error)) from error


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, on the disk or in an archive, or raise a ``RunError``."""
    return plain.from_json(read_bytes(path), path)


# An xz stream is read from its start, so the second file would cost as much as all of them.
@lru_cache(maxsize=2)
def _members(archive: Path, modified: int, size: int) -> dict[str, bytes]:
    del modified, size  # in the key: a rewritten archive is read again
    try:
        with lzma.open(archive) as packed:
            unpacked = packed.read(MOST + 1)
        if len(unpacked) > MOST:  # a megabyte of zeros, packed, may stand for gigabytes
            raise ValueError(f"it unpacks to more than {MOST:,} bytes")
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as tar:
            # Links may lead anywhere or in a circle, and a sparse file may be of any size.
            regular = [member for member in tar if member.isreg() and not member.issparse()]
            return {member.name: tar.extractfile(member).read() for member in regular}  # type: ignore[union-attr]
    except Exception as error:  # bytes that are no archive can fail in any way at all
        raise ValueError(
            f"{archive} is damaged ({error}). Fix: restore it from a copy (git checkout)."
        ) from error
