"""lpbnn: turn any PyTorch network into one that reports calibrated uncertainty.

model = lpbnn.build(net, "lpbnn", members=4, num_data=len(train))
loss = model.loss(x, y)["loss"]
p = lpbnn.predict(model, x)
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import TYPE_CHECKING

from lpbnn import likelihoods
from lpbnn.build import build
from lpbnn.check import CheckReport, check
from lpbnn.convert import convert
from lpbnn.model import LossStep, UncertainModel
from lpbnn.predict import Prediction, predict
from lpbnn.rank_one.export import freeze, mean_network, undo
from lpbnn.rank_one.posterior import posterior

if TYPE_CHECKING:
    from lpbnn import metrics as metrics

try:
    __version__ = version("lpbnn")
except PackageNotFoundError:  # run from a folder that is not installed
    __version__ = "unknown"

__all__ = [
    "CheckReport",
    "LossStep",
    "Prediction",
    "UncertainModel",
    "build",
    "check",
    "convert",
    "freeze",
    "likelihoods",
    "mean_network",
    "metrics",
    "posterior",
    "predict",
    "undo",
]


def __getattr__(name: str) -> ModuleType:
    """Import ``lpbnn.metrics`` when it is asked for: torchmetrics takes seconds to import."""
    if name == "metrics":
        return importlib.import_module("lpbnn.metrics")
    raise AttributeError(f"module 'lpbnn' has no attribute {name!r}")
