"""Records of benchmarks: JSON with the command, commit, device, versions and settings."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import set_torch_threads

from lpbnn.training.environment import environment
from lpbnn.training.files import RunError, read_json, write_json

Record = dict[str, Any]
FORMAT = 1


def new(device: torch.device, settings: Any) -> Record:
    """Return a record without rows; ``settings`` is a dataclass with ``threads``."""
    with set_torch_threads(settings.threads):  # part of a CPU's name
        made = environment(device)
    date = time.strftime("%Y-%m-%d")
    return {
        "format": FORMAT,
        "date": date,
        "environment": made,
        "settings": asdict(settings),
        "rows": [],
    }


def write(record: Record, path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record)


def read(path: Path) -> Record:
    """Read a record of networks; another kind of file is an error."""
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT or "rows" not in data:
        raise RunError(
            f"{path} is not a record of python -m benchmarks networks (format {FORMAT}). Fix: give such "
            "a file, or measure again with --json."
        )
    return data
