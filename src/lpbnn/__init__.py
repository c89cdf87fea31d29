"""lpbnn: turn any PyTorch network into one that knows what it does not know.

model = lpbnn.build(net, "lpbnn", members=4, num_data=len(train))
loss = model.loss(x, y)["loss"]
p = lpbnn.predict(model, x)
"""

from lpbnn.convert import convert
from lpbnn.export import freeze, mean_network, undo
from lpbnn.methods import build
from lpbnn.model import LossStep, Model
from lpbnn.posterior import posterior
from lpbnn.predict import Prediction, predict

__all__ = [
    "LossStep",
    "Model",
    "Prediction",
    "build",
    "convert",
    "freeze",
    "mean_network",
    "posterior",
    "predict",
    "undo",
]
