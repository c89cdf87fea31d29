"""Street View House Numbers (Netzer et al., 2011): images that networks trained on CIFAR should not know.

The images of the published ``svhn/test_32x32.mat``: ``X`` uint8 (32, 32, 3, N), cropped digits. Which digits
they show does not matter here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

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
    """Return True if the file is the published one; copies are read too and labelled as such."""
    return md5(path_of(root)) == MD5


def read(root: Path | None = None, *, download: bool = False) -> Tensor:
    """Return the images as uint8 (N, 3, 32, 32), contiguous."""
    from scipy.io import loadmat

    path = path_of(root)
    if download and not path.is_file():
        fetch([URL], MD5, path)
    try:
        images = np.asarray(loadmat(path, variable_names=["X"])["X"])
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(
            f"{path} cannot be read as a MATLAB file with X: {error!r}. It has {path.stat().st_size:,} "
            "bytes; if that is too few it was cut short: delete it and get it again."
        ) from error
    if images.shape != (32, 32, 3, ROWS) or images.dtype != np.uint8:
        raise ValueError(
            f"{path} has X of shape {images.shape} and type {images.dtype}; expected (32, 32, 3, {ROWS}) "
            "and uint8: the cropped digits of SVHN (format 2)."
        )
    return torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1)))
