"""Pack records into results/records.tar.xz, byte for byte, the same archive for the same files.

    python -m tools.pack_records FOLDER [--archive results/records.tar.xz]

FOLDER holds folders of records, as ``python -m tools.records keep`` and benchmarks write them. They are
added to those in the archive; a file of the same name must be the same, because records are immutable. Run
``python -m tools.make_tables`` and ``python -m tools.make_results`` afterwards.
"""

import argparse
import io
import lzma
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tools.columns import ARCHIVE

from benchmarks.archive import members
from lpbnn.atomic import write_atomic


def tar_bytes(content: Mapping[str, bytes]) -> bytes:
    """Return a tar of these files: names sorted, no dates, no owners.

    >>> tar_bytes({"b": b"2", "a": b"1"}) == tar_bytes({"a": b"1", "b": b"2"})
    True
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(content):
            member = tarfile.TarInfo(name)  # mtime 0, owner 0, mode 644
            member.size = len(content[name])
            tar.addfile(member, io.BytesIO(content[name]))
    return buffer.getvalue()


def pack(content: Mapping[str, bytes]) -> bytes:
    """Return the archive of these files."""
    return lzma.compress(tar_bytes(content), preset=9 | lzma.PRESET_EXTREME)


def added(before: Mapping[str, bytes], folder: Path) -> dict[str, bytes]:
    """Return the files of an archive and those of a folder; a changed record is an error."""
    new = {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
    changed = sorted(name for name in new if before.get(name, new[name]) != new[name])
    if changed:
        raise ValueError(
            f"{', '.join(changed)} differ from the archive's. Records are immutable. Fix: give new "
            "measurements another name."
        )
    return {**before, **new}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--archive", type=Path, default=ARCHIVE)
    given = parser.parse_args()
    before = members(given.archive) if given.archive.exists() else {}
    content = added(before, given.folder)
    write_atomic(given.archive, pack(content))
    size = given.archive.stat().st_size
    print(
        f"{given.archive}: {len(content)} files, {len(content) - len(before)} new, {size:,} bytes"
    )


if __name__ == "__main__":
    main()
