"""Timings that are as short as they can be."""

import pytest

from lpbnn.bench import measure


@pytest.fixture(autouse=True)
def _one_call_per_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "REPEAT_SECONDS", 1e-9)
