"""Fetching, extracting and unpickling published files; the server is this machine."""

import contextlib
import io
import pickle
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from lpbnn.data import _download


def test_python_2_strings_are_bytes(tmp_path: Path) -> None:
    """The published files hold Python 2 strings (opcode U) and numpy's old module names."""
    raw = (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01b"
        b"tR(K\x01K\x02K\x03\x86cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89U\x06\x00\x7f\x80\xfe\xff\x01tbu."
    )
    (path := tmp_path / "batch").write_bytes(raw)
    assert _download.unpickle(path)["data"].tolist() == [[0, 127, 128], [254, 255, 1]]


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('the pickle ran code')",))


@pytest.mark.parametrize(
    "content",
    [
        {b"data": Evil()},
        {b"data": np.array([Evil()], dtype=object)},
        {b"data": np.zeros(2, dtype=[("x", "u1")])},
        {b"data": np.zeros(2, dtype="U3")},
        {b"data": Path("/")},
        {b"data": {1, 2}.__class__},
        [1, 2],
    ],
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_of_anything_else_is_refused(
    tmp_path: Path, content: object, protocol: int
) -> None:
    (path := tmp_path / "batch").write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(ValueError, match=r"cannot be read as published data|holds a list"):
        _download.unpickle(path)


def test_an_array_whose_bytes_do_not_fill_its_shape_is_refused(tmp_path: Path) -> None:
    raw = pickle.dumps({"data": np.zeros((2, 3), np.uint8)}, protocol=3)
    (path := tmp_path / "batch").write_bytes(raw.replace(b"K\x02K\x03\x86", b"K\x7fK\x7f\x86"))
    with pytest.raises(ValueError, match="cannot be read as published data: cannot reshape"):
        _download.unpickle(path)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address under which this machine serves it."""
    pytest.importorskip("pooch")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    folder = tmp_path / "served"
    folder.mkdir()
    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield folder, f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    thread.join()
    http.server_close()


def test_a_file_is_fetched_once(tmp_path: Path, server: tuple[Path, str]) -> None:
    served, address = server
    (served / "file").write_bytes(b"published")
    checksum = _download.md5(served / "file")
    # The first host does not have the file: the next one is asked.
    urls = [f"{address}/gone/file", f"{address}/file"]
    path = _download.fetch(urls, checksum, tmp_path / "new" / "file")
    assert path.read_bytes() == b"published"
    (served / "file").unlink()
    assert _download.fetch(urls, checksum, path) == path


def test_a_wrong_download_is_refused(tmp_path: Path, server: tuple[Path, str]) -> None:
    served, address = server
    (served / "file").write_bytes(b"something else")
    with pytest.raises(
        OSError, match=r"could not be downloaded.*Fetch it by hand, expected md5 00"
    ):
        _download.fetch([f"{address}/file"], "00", tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_no_network_is_an_error_with_the_address(tmp_path: Path) -> None:
    pytest.importorskip("pooch")
    with pytest.raises(
        OSError, match=r"could not be downloaded \(http://127\.0\.0\.1:9/file"
    ) as told:
        _download.fetch(["http://127.0.0.1:9/file"], "00", tmp_path / "file")
    assert "refused" in str(told.value)
    assert "retries" not in str(told.value)  # which requests wraps around the reason


def test_missing_members_of_an_archive_are_extracted(
    tmp_path: Path, server: tuple[Path, str]
) -> None:
    served, address = server
    (tmp_path / "one").write_bytes(b"1")
    with tarfile.open(served / "a.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "one", "set/one")
    checksum, target = _download.md5(served / "a.tar.gz"), tmp_path / "root" / "a.tar.gz"
    for _ in range(2):  # the second time from the archive that is there
        _download.fetch([f"{address}/a.tar.gz"], checksum, target, extract=True)
        member = target.parent / "set" / "one"
        assert member.read_bytes() == b"1"
        member.unlink()


def archive(path: Path, members: list[tuple[str, bytes, str]]) -> str:
    """Write a tar archive of (name, type, target of the link), and return its md5."""
    with tarfile.open(path, "w:gz") as tar:
        for name, kind, link in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            content = b"evil" if kind == tarfile.REGTYPE else b""
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return _download.md5(path)


@pytest.mark.parametrize("name", ["../mine", "{home}/mine", "set/../../mine", "link/mine"])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_no_member_of_an_archive_is_written_elsewhere(
    tmp_path: Path, server: tuple[Path, str], name: str, kind: bytes
) -> None:
    served, address = server
    (home := tmp_path / "home").mkdir()
    (home / "mine").write_bytes(b"mine")
    link = ("link", tarfile.SYMTYPE, str(home))
    members = [link, (name.format(home=home), kind, str(home / "mine"))]
    checksum, target = archive(served / "a.tar.gz", members), home / "root" / "a.tar.gz"
    with contextlib.suppress(ValueError):
        _download.fetch([f"{address}/a.tar.gz"], checksum, target, extract=True)
    assert (home / "mine").read_bytes() == b"mine"
    assert sorted(path.name for path in home.iterdir()) == ["mine", "root"]
    assert not any(path.is_symlink() for path in home.rglob("*"))


def test_an_archive_with_another_md5_is_not_extracted(
    tmp_path: Path, server: tuple[Path, str]
) -> None:
    served, address = server
    (served / "a.tar.gz").write_bytes(b"something else")
    with pytest.raises(OSError, match="could not be downloaded"):
        _download.fetch([f"{address}/a.tar.gz"], "00", tmp_path / "r" / "a.tar.gz", extract=True)
    assert not list((tmp_path / "r").glob("*"))


@pytest.mark.parametrize("kept", [0, 9, 60])
def test_a_damaged_archive_is_refused_by_name(
    tmp_path: Path, server: tuple[Path, str], kept: int
) -> None:
    served, address = server
    archive(served / "a.tar.gz", [("one", tarfile.REGTYPE, "")])
    content = (served / "a.tar.gz").read_bytes()
    (served / "a.tar.gz").write_bytes(content[:kept])
    checksum, target = _download.md5(served / "a.tar.gz"), tmp_path / "root" / "a.tar.gz"
    with pytest.raises(ValueError, match=r"(?s)a.tar.gz is damaged .*get it again"):
        _download.fetch([f"{address}/a.tar.gz"], checksum, target, extract=True)
