"""Run folders in the engine's format, with numbers one can check by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpbnn import methods
from lpbnn.data import Task
from lpbnn.metric_info import METRICS
from lpbnn.training import EvalConfig, OptimConfig, RunConfig
from lpbnn.training.build import DataInfo, resolved
from lpbnn.training.rundir import RunDir

Make = Callable[..., Path]
METHODS = (
    *("batchensemble", "duq", "edl", "ensemble", "lpbnn", "mcdropout", "mcp"),
    *("meanfield", "mimo", "rank1", "tradi"),
)
CORRUPTIONS = ("fog", "frost", "snow")
SESSION = {
    "versions": {"lpbnn": "0.1.0", "torch": "2.13.0", "absent": None},
    "python": "3.11.7",
    "platform": "Linux x86_64",
    "device": "CPU (x86_64, 1 threads)",
    "cuda": None,
    "processes": 1,
    "commit": "0123456789abcdef",
    "dirty": True,
    "command": ["lpbnn", "train", "--method", "a b"],
}


def info(task: Task = "classification", name: str = "digits", **changes: Any) -> DataInfo:
    features = task == "regression"
    fields: dict[str, Any] = {
        "name": name,
        "task": task,
        "shape": (1,) if features else (3, 12, 12),
        "num_classes": None if features else 10,
        "num_targets": 1,
        "num_train": 100,
        "mean": (0.0,) * (1 if features else 3),
        "std": (1.0,) * (1 if features else 3),
        "classes": () if features else tuple("0123456789"),
        "sizes": {"train": 100, "test": 40, "ood/photos": 30},
        "description": "made for the tests",
        "source": "embedded",
    }
    return DataInfo(**{**fields, **changes})


def classification(random: np.random.Generator, members: int, corrupted: bool) -> dict[str, Any]:
    numbers = {"accuracy": 0.9, "nll": 0.3, "brier": 0.15, "ece": 0.05}
    levels = {
        str(level): {key: value + 0.01 * level for key, value in numbers.items()}
        for level in (1, 3, 5)
    }
    found = {
        "ca": 0.7,
        "ce": 0.1,
        "nll": 1.0,
        "brier": 0.4,
        "origin": "generated",
        "frost": "procedural",
        "images": 20,
        "severities": levels,
        "sets": dict.fromkeys(CORRUPTIONS, levels),
    }
    diverse = dict.fromkeys(("ratio_error", "q_statistic", "correlation", "disagreement"), 0.5)
    uncertain = {"total": 0.5, "aleatoric": 0.4, "epistemic": 0.1}
    return {
        "test": {key: value + 0.01 * float(random.random()) for key, value in numbers.items()},
        "uncertainty": {"test": uncertain, "photos": uncertain},
        "ood": {"photos": {"auroc": 0.9, "aupr": 0.95, "fpr95": 0.2}},
        "diversity": {
            "test": diverse if members > 1 else None,
            "corrupted": diverse if members > 1 and corrupted else None,
        },
        "corruption": found if corrupted else None,
        "cost": {
            "parameters": 1000 * members,
            "members": members,
            "samples": 1,
            "predict_seconds_per_1000": 0.5 * members,
            "predict_peak_bytes": 500_000_000,
            "memory": "resident set of the process",
            "device": SESSION["device"],
        },
    }


def examples(random: np.random.Generator, where: str, members: int, labels: list[int]) -> Any:
    probs = random.dirichlet(np.full(10, 0.3), (members, len(labels))).astype(np.float32)
    return {
        f"{where}/images": random.integers(0, 256, (len(labels), 3, 12, 12)).astype(np.uint8),
        f"{where}/labels": np.array(labels),
        f"{where}/predicted": probs.mean(0).argmax(1),
        f"{where}/confidence": probs.mean(0).max(1),
        f"{where}/members": probs,
        f"{where}/index": np.arange(len(labels)),
    }


def arrays(random: np.random.Generator, members: int, latent: bool) -> dict[str, np.ndarray]:
    count = random.integers(0, 30, 15)
    accuracy = np.where(count > 0, random.random(15), np.nan)
    found: dict[str, np.ndarray] = {
        "histogram/edges": np.linspace(0, 1, 51),
        "histogram/test": random.integers(0, 9, 50),
        "histogram/ood/photos": random.integers(0, 9, 50),
        "reliability/edges": np.linspace(0, 1, 16),
        "reliability/confidence": np.where(count > 0, np.linspace(0.03, 0.97, 15), np.nan),
        "reliability/accuracy": accuracy,
        "reliability/count": count,
    }
    found |= examples(random, "examples/test", members, [3, 1, 4, 1])
    found |= examples(random, "examples/corrupted", members, [3, 1, 4, 1])
    found["examples/corrupted/corruption"] = np.array(["fog", "snow", "fog", "snow"])
    found["examples/corrupted/severity"] = np.full(4, 5)
    found |= examples(random, "examples/ood/photos", members, [-1] * 4)
    if latent:
        factor = random.normal(size=(members, 24, 4))
        found["posterior/layer"] = np.array("block.0.conv")
        found["posterior/correlation"] = np.corrcoef(factor[0]).astype(np.float32)
        found["posterior/mean"] = random.normal(1, 0.5, (members, 24)).astype(np.float32)
        found["posterior/std"] = np.full((members, 24), 0.1, np.float32)
    return found


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """``make("lpbnn", seed=1, test={"accuracy": 0.9})`` writes a run and returns its folder."""

    def write(
        method: str = "lpbnn",
        seed: int = 0,
        *,
        folder: str | None = None,
        data: DataInfo | None = None,
        diverged: int | None = None,
        corrupted: bool = True,
        lr: float = 0.1,
        backbone: str = "small-cnn",
        options: dict[str, Any] | None = None,
        with_arrays: dict[str, np.ndarray] | None = None,
        **results: Any,
    ) -> Path:
        random = np.random.default_rng([seed, len(method)])
        members = 1 if method in ("mcp", "edl", "duq") else 4
        known = data or info()
        config = RunConfig(
            method=method,
            method_options=options or {},
            backbone=backbone,
            data=known.name,
            seed=seed,
            optim=OptimConfig(lr=lr),
            evaluate=EvalConfig(corruptions=corrupted, score="confidence"),  # as the arrays
        )
        if method in methods.names():  # as a run writes it
            config = resolved(config)
        target = RunDir(tmp_path / (folder or f"{known.name}-{method}-{lr:g}-{seed}"))
        target.prepare(config, known)
        target.add_session(SESSION)
        if with_arrays is None:
            with_arrays = arrays(random, members, method == "lpbnn")
        target.write_arrays(with_arrays)
        train = {
            "epochs": 5,
            "of": 5,
            "diverged": diverged,
            "seconds": 10.0 * members,
            "images_per_second": 100.0,
            "epoch_seconds": 2.0 * members,
            "peak_bytes": 400_000_000,
            "last": {},
        }
        found = {
            "format": 1,
            "method": method,
            "backbone": config.backbone,
            "data": known.name,
            "task": known.task,
            "source": known.source,
            "seed": seed,
            "train": train,
            **classification(random, members, corrupted),
            "evaluate": config.to_data()["evaluate"],
        }
        target.write_results({**found, **results})
        return target.path

    return write


@pytest.fixture
def regression(make: Make) -> Make:
    """The same for a curve of one input."""

    def write(method: str, inputs: int = 1, known: DataInfo | None = None, **changes: Any) -> Path:
        random = np.random.default_rng(len(method))
        found: dict[str, np.ndarray] = {}
        for where in ("test", "ood/outside"):
            x = random.uniform(-4, 4, (30, inputs)) * (1 if where == "test" else 1.5)
            y = x[:, :1] ** 3
            parts = (x, y, y + 1, np.full_like(y, 3.0), np.full_like(y, 1.0))
            names = ("inputs", "targets", "mean", "aleatoric_std", "epistemic_std")
            found |= {
                f"{where}/{name}": part.astype(np.float32)
                for name, part in zip(names, parts, strict=True)
            }
        known = known or info(
            "regression", "cubic", shape=(inputs,), mean=(0.0,) * inputs, std=(1.0,) * inputs
        )
        numbers = {
            "test": {"nll": 2.5, "rmse": 1.0, "coverage": 0.93},
            "ood": {"outside": {"auroc": 0.9, "aupr": 0.95, "fpr95": 0.2}},
            "uncertainty": {},
            "diversity": {"test": None, "corrupted": None},
        }
        changes = {"with_arrays": found, **numbers, **changes}
        return make(method, data=known, corrupted=False, **changes)

    return write


def shown(key: str, value: float) -> str:
    """A number as the tables print it."""
    return METRICS[key].format(value)
