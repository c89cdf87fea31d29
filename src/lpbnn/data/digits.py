"""Handwritten digits, 8x8 grey: real images that need no download (scikit-learn embeds them).

1,797 digits of 13 writers (Alpaydin & Kaynak, 1998; the UCI test part), values 0..16 stored as
round(255 v / 16). The split is fixed and stratified: 36 test and 18 validation images per class,
the rest trains.

Out of distribution: 800 grey 8x8 patches at full resolution from scikit-learn's two sample photos
(a Chinese temple, a flower), 400 each, from a non-overlapping grid. Flat patches (grey standard
deviation under 20 of 255: sky and petals) are left out, and each patch is stretched to 0..255.
Without either step low contrast alone gives them away: a small CNN's maximum probability separates
raw patches with AUROC .98, these with .90 to .92 (three seeds), and an MLP with .97 to .98.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lpbnn.data import NOT_A_CLASS, Dataset, Entry, Splits

TEST_PER_CLASS, VAL_PER_CLASS = 36, 18
PATCHES_PER_PHOTO, FLAT_BELOW = 400, 20.0
LUMA = (0.299, 0.587, 0.114)


def stratified(targets: Tensor, sizes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Indices of disjoint parts with `sizes[i]` examples of every class in part i, then the rest.

    >>> labels = torch.tensor([0, 1] * 5)
    >>> [labels[part].bincount().tolist() for part in stratified(labels, (1, 2))]
    [[1, 1], [2, 2], [2, 2]]
    """
    # numpy promises that a RandomState's stream never changes; torch and scikit-learn do not.
    random = np.random.RandomState(seed)
    parts: list[list[Tensor]] = [[] for _ in range(len(sizes) + 1)]
    for label in targets.unique().tolist():
        members = torch.nonzero(targets == label).flatten()
        members = members[torch.from_numpy(random.permutation(len(members)))]
        if len(members) < sum(sizes):
            raise ValueError(
                f"class {label} has {len(members)} examples, the split asks {sum(sizes)} of every "
                f"class (sizes={sizes}); ask for fewer."
            )
        chunks = members.split([*sizes, len(members) - sum(sizes)])
        for part, chunk in zip(parts, chunks, strict=True):
            part.append(chunk)
    return [torch.cat(part).sort().values for part in parts]


def photo_patches(photo: np.ndarray, count: int, seed: int) -> Tensor:
    """`count` grey 8x8 patches of an RGB photo, none flat, each stretched to 0..255: (count,1,8,8).

    p' = round(255 (p - min p) / (max p - min p)),   kept where std(p) >= 20.
    """
    grey = photo.astype(np.float64) @ np.array(LUMA)
    rows, columns = grey.shape[0] // 8, grey.shape[1] // 8
    tiles = grey[: rows * 8, : columns * 8].reshape(rows, 8, columns, 8).swapaxes(1, 2)
    tiles = tiles.reshape(-1, 8, 8)
    tiles = tiles[tiles.std(axis=(1, 2)) >= FLAT_BELOW]
    tiles = tiles[np.random.RandomState(seed).permutation(len(tiles))[:count]]
    low, high = tiles.min(axis=(1, 2), keepdims=True), tiles.max(axis=(1, 2), keepdims=True)
    stretched = np.round(255 * (tiles - low) / (high - low)).astype(np.uint8)
    return torch.from_numpy(stretched).unsqueeze(1)


def load(root: Path | None = None) -> Splits:
    """The digits and their out-of-distribution patches; nothing is read outside scikit-learn.

    >>> splits = load()
    >>> len(splits.train), len(splits.val), len(splits.test), len(splits.ood["photos"])
    (1257, 180, 360, 800)
    """
    from sklearn import datasets

    values, labels = datasets.load_digits(return_X_y=True)
    scaled = np.round(np.asarray(values, dtype=np.float64) * 255 / 16).astype(np.uint8)
    images = torch.from_numpy(scaled).view(-1, 1, 8, 8)
    targets = torch.from_numpy(np.asarray(labels, dtype=np.int64))
    test, val, train = stratified(targets, (TEST_PER_CLASS, VAL_PER_CLASS))
    photos = datasets.load_sample_images()["images"]
    patches = torch.cat([photo_patches(p, PATCHES_PER_PHOTO, i) for i, p in enumerate(photos)])
    unit = images[train].double() / 255
    return Splits(
        name="digits",
        task="classification",
        train=Dataset(images[train], targets[train]),
        val=Dataset(images[val], targets[val]),
        test=Dataset(images[test], targets[test]),
        ood={"photos": Dataset(patches, torch.full((len(patches),), NOT_A_CLASS))},
        num_classes=10,
        classes=tuple("0123456789"),
        mean=(unit.mean().item(),),
        std=(unit.std(correction=0).item(),),
        description=SETS["digits"].description,
        source="embedded",
    )


SETS = {
    "digits": Entry(
        load,
        "scikit-learn's 8x8 grey digits, 10 classes; out-of-distribution: patches of two photos",
    )
}
