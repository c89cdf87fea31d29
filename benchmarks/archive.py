"""Records in one archive, read in memory: ``results/records.tar.xz/bench/a.json`` names a file in it."""

import io
import lzma
import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from lpbnn.atomic import RunError, write_atomic
from lpbnn.training.files import from_json, to_json

SUFFIX = ".tar.xz"


# An xz stream is read from its start: the second file would cost as much as all.
@lru_cache(maxsize=1)
def members(archive: Path) -> dict[str, bytes]:
    """Return the content of every file of an archive by its name; links are left out."""
    with lzma.open(archive) as packed, tarfile.open(fileobj=io.BytesIO(packed.read())) as tar:
        regular = [member for member in tar if member.isreg()]
        return {member.name: tar.extractfile(member).read() for member in regular}  # type: ignore[union-attr]


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, on the disk or in an archive, or raise a ``RunError``."""
    archive = next((p for p in path.parents if p.name.endswith(SUFFIX) and p.is_file()), None)
    if archive is None:
        return from_json(path.read_bytes(), path)
    name = path.relative_to(archive).as_posix()
    if name not in members(archive):
        raise RunError(f"{archive} has no {name}. Fix: tar -tJf {archive} lists its files.")
    return from_json(members(archive)[name], path)


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically. Numbers that JSON does not have (NaN, infinity) become null."""
    write_atomic(path, to_json(data))
