"""Timings that are as short as they can be."""

import pytest

from lpbnn import bench


@pytest.fixture(autouse=True)
def _one_call_per_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REPEAT_SECONDS", 1e-9)
