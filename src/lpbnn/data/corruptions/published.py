"""The published files, CIFAR-10-C and CIFAR-100-C, and folders in their layout.

One `<corruption>.npy` per corruption, uint8, (5 N, H, W, C), severity-major: rows 0..N-1 are
severity 1, the next N severity 2, and so on; `labels.npy` repeats the N labels five times.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lpbnn.data.corruptions.generate import CORRUPTIONS, SEVERITIES


class Published:
    """The corrupted sets of a folder, read one at a time; all fifteen files have to be there.

    Args:
        root: the folder.
        labels: (N,) of the images that are asked for, the first N of every severity.
    """

    def __init__(self, root: Path, labels: Tensor) -> None:
        self.root, self.count = root, len(labels)
        require_files(root)
        own = _mapped(root / "labels.npy").astype(np.int64)
        sizes = {name: len(_images(root / f"{name}.npy")) for name in CORRUPTIONS}
        if {*sizes.values()} != {len(own)}:
            raise ValueError(
                f"{root} holds files of different lengths: labels {len(own)}, {sizes}; every file must have "
                "the same: fetch the odd one again."
            )
        self.each = len(own) // len(SEVERITIES)
        if not np.array_equal(own[: self.each][: self.count], labels.cpu().numpy()):
            raise ValueError(
                f"{root} holds labels that are not those of the first {self.count} test images: it is another "
                "data set's. Fix: give the folder of this one (CIFAR-10-C or CIFAR-100-C)."
            )

    def read(self, name: str, severity: int) -> Tensor:
        """The images of one corruption at one severity, uint8 (N, C, H, W)."""
        rows = _images(self.root / f"{name}.npy")[(severity - 1) * self.each :][: self.count]
        return torch.from_numpy(np.array(rows)).permute(0, 3, 1, 2).contiguous()


def require_files(root: Path) -> None:
    """Raise a `FileNotFoundError` if one of the published files is missing.

    >>> require_files(Path("/nowhere"))
    Traceback (most recent call last):
    FileNotFoundError: /nowhere lacks gaussian_noise.npy, shot_noise.npy, ... and 14 more; ...
    """
    wanted = [f"{name}.npy" for name in CORRUPTIONS] + ["labels.npy"]
    if missing := [name for name in wanted if not (root / name).is_file()]:
        more = f", ... and {len(missing) - 2} more" if len(missing) > 2 else ""
        raise FileNotFoundError(
            f"{root} lacks {', '.join(missing[:2])}{more}; give the unpacked folder of CIFAR-10-C or "
            "CIFAR-100-C (zenodo.org/records/2535967, /3555552), or none: the sets are then generated."
        )


def _images(path: Path) -> np.ndarray:
    rows = _mapped(path)
    if rows.dtype != np.uint8 or rows.ndim != 4 or len(rows) % len(SEVERITIES):
        raise ValueError(
            f"{path} holds {rows.dtype} of shape {rows.shape}; expected uint8 (5 N, H, W, C), five "
            "severities of N images: it is not a file of CIFAR-10-C, or it is damaged."
        )
    return rows


def _mapped(path: Path) -> np.ndarray:
    """The array of a file, mapped, not read."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no complete .npy file ({error}); fetch it again.") from error
