"""Where and with what a run was made: versions, device, commit, command, memory; nothing about the person."""

import os
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

BESIDE = "LPBNN_RUNS_BESIDE"  # how many runs share the machine: their times are not those of one
_PACKAGES = (
    "lpbnn",
    "torch",
    "lightning",
    "pytorch-lightning",
    "torchmetrics",
    "numpy",
    "scikit-learn",
)


def environment(device: torch.device | str = "cpu", processes: int = 1) -> dict[str, Any]:
    """Return what a reader needs to repeat the run, without the machine's name.

    >>> sorted(environment())
    ['beside', 'command', 'commit', 'cuda', 'device', 'dirty', 'platform', 'processes', ...]
    """
    commit, dirty = _commit(Path(__file__).parent)
    return {
        "versions": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device_name(device),
        "cuda": torch.version.cuda,
        "processes": processes,
        "beside": int(os.environ.get(BESIDE, 1)),
        "commit": commit,
        "dirty": dirty,
        "command": [_program(sys.argv[0]), *map(_shown, sys.argv[1:])] if sys.argv else [],
    }


def device_name(device: torch.device | str) -> str:
    """Return the accelerator's own name, or the processor's architecture.

    >>> device_name("cpu").startswith("CPU")
    True
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type.upper()} ({platform.machine()}, {torch.get_num_threads()} threads)"


def reset_peak_memory(device: torch.device) -> None:
    """Start counting anew; a process's resident peak cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes.

    >>> peak_memory(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_kind(device: torch.device) -> str:
    """Return what ``peak_memory`` counts, for the table's note."""
    return "CUDA memory allocated" if device.type == "cuda" else "resident set of the process"


def _program(path: str) -> str:
    """Return the program that was called; a package run by ``python -m`` has its own name.

    >>> _program("/opt/bin/lpbnn"), _program("/opt/lib/lpbnn/__main__.py")
    ('lpbnn', 'lpbnn')
    """
    called = Path(path)
    return called.parent.name if called.name == "__main__.py" else called.name


def _shown(argument: str) -> str:
    """Return an argument without this machine's folders: the last part of an absolute path."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> tuple[str | None, bool | None]:
    """Return the commit of this code and True if it was changed since; (None, None) outside git.

    A copy without its history, on a machine it was sent to, is told by the variable LPBNN_COMMIT:
    the commit, with -dirty behind it where the copy was changed.
    """
    if told := os.environ.get("LPBNN_COMMIT"):
        return told.removesuffix("-dirty"), told.endswith("-dirty")
    # An installed copy may lie inside somebody else's checkout: only a tracked file is of a commit.
    if _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None, None
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changed is None else bool(changed)


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
