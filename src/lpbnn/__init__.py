"""lpbnn: turn any PyTorch network into one that reports calibrated uncertainty.

model = lpbnn.build(net, "lpbnn", members=4, num_data=len(train))
loss = model.loss(x, y)["loss"]
p = lpbnn.predict(model, x)
"""

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lpbnn import likelihoods as likelihoods
    from lpbnn import metrics as metrics
    from lpbnn import plots as plots
    from lpbnn.build import build
    from lpbnn.check import CheckReport, check
    from lpbnn.convert import convert, split_recurrent
    from lpbnn.estimators import LPBNNClassifier, LPBNNRegressor
    from lpbnn.export import export_onnx
    from lpbnn.methods import register
    from lpbnn.methods.lpbnn import posterior
    from lpbnn.model import LossStep, UncertainModel
    from lpbnn.predict import Prediction, predict
    from lpbnn.rank_one.freeze import freeze, mean_network, undo

try:
    __version__ = version("lpbnn")
except PackageNotFoundError:  # run from a folder that is not installed
    __version__ = "unknown"

__all__ = [
    "CheckReport",
    "LPBNNClassifier",
    "LPBNNRegressor",
    "LossStep",
    "Prediction",
    "UncertainModel",
    "build",
    "check",
    "convert",
    "export_onnx",
    "freeze",
    "likelihoods",
    "mean_network",
    "metrics",
    "plots",
    "posterior",
    "predict",
    "register",
    "split_recurrent",
    "undo",
]

# The module of each public name that is not a module itself.
_HOMES = {
    "CheckReport": "check",
    "LPBNNClassifier": "estimators",
    "LPBNNRegressor": "estimators",
    "LossStep": "model",
    "Prediction": "predict",
    "UncertainModel": "model",
    "build": "build",
    "check": "check",
    "convert": "convert",
    "export_onnx": "export",
    "freeze": "rank_one.freeze",
    "mean_network": "rank_one.freeze",
    "posterior": "methods.lpbnn",
    "predict": "predict",
    "register": "methods",
    "split_recurrent": "convert.recurrent",
    "undo": "rank_one.freeze",
}


class _Package(ModuleType):
    """The package's own type, which keeps functions in the place of modules of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing the module lpbnn.predict sets this attribute to the module.
        if _HOMES.get(name) == name and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import a public name or a module of the package on first use.

    Torch takes a second to import and torchmetrics two: ``lpbnn --help`` needs neither.
    """
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        setattr(sys.modules[__name__], name, value)
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
