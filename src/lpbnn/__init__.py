"""lpbnn: turn any PyTorch network into one that knows what it does not know.

model = lpbnn.build(net, "lpbnn", members=4, num_data=len(train))
loss = model.loss(x, y)["loss"]
p = lpbnn.predict(model, x)
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from lpbnn.convert import convert
from lpbnn.methods import build
from lpbnn.model import LossStep, Model
from lpbnn.predict import Prediction, predict
from lpbnn.rank_one.export import freeze, mean_network, undo
from lpbnn.rank_one.posterior import posterior

if TYPE_CHECKING:
    from lpbnn import metrics as metrics

__all__ = [
    "LossStep",
    "Model",
    "Prediction",
    "build",
    "convert",
    "freeze",
    "mean_network",
    "metrics",
    "posterior",
    "predict",
    "undo",
]


def __getattr__(name: str) -> ModuleType:
    """``lpbnn.metrics`` when it is asked for: torchmetrics takes seconds to import."""
    if name == "metrics":
        return importlib.import_module("lpbnn.metrics")
    raise AttributeError(f"module 'lpbnn' has no attribute {name!r}")
