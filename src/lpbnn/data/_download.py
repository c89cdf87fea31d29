"""Published files: fetched by pooch, checked by md5, and read as data only.

Pickles are read by an unpickler that admits dictionaries, lists, strings, numbers and plain numpy arrays.
Arrays are rebuilt here from their bytes; numpy's own unpickling is never called.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lpbnn.atomic import write_atomic

DEFAULT_ROOT = Path("data")  # where files are looked for when no root is given


def md5(path: Path) -> str:
    """The md5 of a file, as publishers print it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (path := Path(folder, "empty")).write_bytes(b"")
    ...     md5(path)
    'd41d8cd98f00b204e9800998ecf8427e'
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def fetch(urls: Sequence[str], checksum: str, target: Path, extract: bool = False) -> Path:
    """Download `target` from the first of `urls` that answers with the file of this md5.

    A file that is already there and has the right md5 is left alone. With `extract`, files of the tar
    archive that are missing beside it are extracted, after its md5 was checked.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (path := Path(folder, "empty")).write_bytes(b"")
    ...     fetch(["http://localhost/empty"], "d41d8cd98f00b204e9800998ecf8427e", path).name
    'empty'
    """
    import pooch

    failures = []
    for url in urls:
        try:
            pooch.retrieve(url, f"md5:{checksum}", target.name, target.parent)
        except (OSError, ValueError) as error:  # no network, not found; the wrong bytes
            failures.append(f"{url}: {_reason(error)}")
        else:
            if extract:
                _extract(target)
            return target
    raise OSError(
        f"{target} could not be downloaded ({'; '.join(failures)}). Fetch it by hand, expected md5 "
        f"{checksum}, and put it there."
    )


def _extract(archive: Path) -> None:
    """Write the files of a tar archive that are missing beside it; no links, and nothing elsewhere."""
    folder = archive.parent.resolve()
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                target = folder / member.name
                if not target.resolve().is_relative_to(folder):
                    raise ValueError(
                        f"{archive} holds {member.name!r}, which leads out of {folder}. Fix: delete the "
                        "archive and get it again."
                    )
                content = tar.extractfile(member) if member.isreg() else None
                if content is not None and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    write_atomic(target, content.read())
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{archive} is damaged ({error}). Fix: delete the archive and get it again."
        ) from error


def _reason(error: BaseException) -> BaseException:
    """Return the error that others were wrapped around: a name that was not found, not all retries of it."""
    inside = getattr(error, "reason", None) or next(iter(error.args), None)
    return _reason(inside) if isinstance(inside, BaseException) else error


def unpickle(path: Path) -> dict[str, Any]:
    """The dictionary in a published pickle, with string keys; whatever is not data is refused.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "batch")
    ...     _ = path.write_bytes(pickle.dumps({b"data": np.arange(3, dtype=np.uint8)}))
    ...     unpickle(path)
    ...     _ = path.write_bytes(pickle.dumps({"data": print}))
    ...     unpickle(path)
    Traceback (most recent call last):
    ...
    ValueError: /.../batch cannot be read as published data: it asks for builtins.print. ...
    """
    try:
        with path.open("rb") as file:
            # Python 2 wrote the published files: its strings are bytes, and latin1 keeps each byte.
            content = _unwrap(_DataUnpickler(file, encoding="latin1").load())
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(
            f"{path} cannot be read as published data: {error}. It has {path.stat().st_size:,} "
            "bytes; if that is too few it was cut short: delete it and get it again."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected a dictionary.")
    return {_text(key): value for key, value in content.items()}


def _text(key: Any) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)


def _bytes(raw: Any) -> bytes:
    return raw.encode("latin1") if isinstance(raw, str) else bytes(raw)


class _Dtype:
    """Stands in for `numpy.dtype`: fixed-size numbers and nothing else."""

    def __init__(self, code: str, align: object = False, copy: object = False) -> None:
        if re.fullmatch(r"[|<>=]?(b1|[iu][1248]|f[248])", code) is None:
            raise pickle.UnpicklingError(f"it holds an array of type {code!r}, not of numbers")
        self.value = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, subarray, names, fields, *_ = state
        if (subarray, names, fields) != (None, None, None):
            raise pickle.UnpicklingError("it holds an array of records, not of numbers")
        self.value = self.value.newbyteorder(order)


class _Array:
    """Stands in for `numpy.ndarray`: bytes, a type and a shape that must agree."""

    value: np.ndarray

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        order = "F" if fortran else "C"
        self.value = np.frombuffer(_bytes(raw), dtype.value).reshape(shape, order=order)


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    if kind is not _Array:
        raise pickle.UnpicklingError(f"it holds a {kind!r} where an array was expected")
    return _Array()


def _frombuffer(raw: Any, dtype: _Dtype, shape: tuple[int, ...], order: str) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", raw))
    return array


def _encode(text: str, encoding: str) -> bytes:
    """Encode bytes as Python 3 writes them in old pickle protocols: ``_codecs.encode(text, "latin1")``."""
    return text.encode("latin1")


_ADMITTED: dict[tuple[str, str], Callable[..., object]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
    ("numpy._core.numeric", "_frombuffer"): _frombuffer,
    ("_codecs", "encode"): _encode,
}


class _DataUnpickler(pickle.Unpickler):
    """An unpickler for which every name outside `_ADMITTED` does not exist."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ADMITTED[module, name]


def _unwrap(content: Any) -> Any:
    """The same content with arrays in the place of their stand-ins."""
    if isinstance(content, dict):
        return {key: _unwrap(value) for key, value in content.items()}
    return content.value if isinstance(content, _Array) else content
