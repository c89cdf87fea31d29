"""Natural images for every test of a corruption, from what scikit-learn embeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def photos() -> Tensor:
    """48 natural 32x32 colour images: pieces of scikit-learn's two photos at half resolution."""
    from sklearn.datasets import load_sample_images

    random = np.random.RandomState(0)
    pieces = []
    for photo in load_sample_images()["images"]:
        for _ in range(24):
            y, x = random.randint(0, 427 - 64), random.randint(0, 640 - 64)
            piece = photo[y : y + 64, x : x + 64].reshape(32, 2, 32, 2, 3).mean((1, 3))
            pieces.append(torch.from_numpy(piece.round().astype(np.uint8)).permute(2, 0, 1))
    return torch.stack(pieces)
