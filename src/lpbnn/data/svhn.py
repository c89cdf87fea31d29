"""Street View House Numbers (Netzer et al., 2011), cropped digits: 32x32 colour, 10 classes.

Read from the published ``svhn/test_32x32.mat`` (``X`` uint8 (32, 32, 3, N), ``y`` (N, 1) where 10
stands for the digit 0). It is what networks trained on CIFAR are asked to recognise as unknown.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from lpbnn.data import Dataset
from lpbnn.data._download import DEFAULT_ROOT, fetch, md5

URL = "http://ufldl.stanford.edu/housenumbers/test_32x32.mat"
MD5 = "eb5a983be6a315427106f1b164d9cef3"
ROWS = 26_032


def path_of(root: Path | None) -> Path:
    """Return the path of the file.

    >>> path_of(Path("/data")).as_posix()
    '/data/svhn/test_32x32.mat'
    """
    return (root or DEFAULT_ROOT) / "svhn" / "test_32x32.mat"


def is_published(root: Path | None) -> bool:
    """Return True if the file is the published one; copies are read too and labelled as such.

    >>> is_published(Path("/nowhere"))
    False
    """
    path = path_of(root)
    return path.is_file() and md5(path) == MD5


def read(root: Path | None = None, *, download: bool = False) -> Dataset:
    """The digits as uint8 (N, 3, 32, 32), targets 0..9.

    >>> read(Path("/nowhere"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: /nowhere/svhn/test_32x32.mat is missing. Give the folder that contains ...
    """
    path = path_of(root)
    if not path.is_file():
        if not download:
            raise FileNotFoundError(
                f"{path} is missing. Give the folder that contains svhn/ as root, pass "
                f"download=True, or fetch {URL} there by hand."
            )
        fetch([URL], MD5, path)
    images, labels = _matrices(path)
    if len(images) != ROWS or labels.shape != (ROWS,):
        raise ValueError(
            f"{path} holds {len(images):,} images and {labels.size:,} labels; expected "
            f"{ROWS:,} of each. Delete it and download it again."
        )
    if labels.min(initial=1) < 1 or labels.max(initial=1) > 10:
        raise ValueError(
            f"{path} has labels from {labels.min()} to {labels.max()}; expected 1 to 10, where 10 "
            "is the digit 0. Delete it and download it again."
        )
    return Dataset(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64) % 10))


def _matrices(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """`X` as contiguous (N, 3, 32, 32) and `y` as (N,)."""
    from scipy.io import loadmat

    try:
        content = loadmat(path, variable_names=["X", "y"])
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(
            f"{path} cannot be read as a MATLAB file: {error}. It has {path.stat().st_size:,} "
            "bytes; if that is too few it was cut short: delete it and get it again."
        ) from error
    if not {"X", "y"} <= content.keys():
        raise ValueError(
            f"{path} lacks X or y; expected both: the cropped digits of SVHN (format 2)."
        )
    images, labels = np.asarray(content["X"]), np.asarray(content["y"])
    if images.shape[:3] != (32, 32, 3) or images.ndim != 4 or images.dtype != np.uint8:
        raise ValueError(
            f"{path} has X of shape {images.shape} and type {images.dtype}; expected (32, 32, 3, N) "
            "and uint8: the cropped digits of SVHN (format 2)."
        )
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{path} has y of type {labels.dtype}; expected integers, one per image.")
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.reshape(-1)
