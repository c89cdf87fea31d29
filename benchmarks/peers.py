"""BatchEnsemble and LP-BNN by the layers of torch_uncertainty, where it can be imported.

They are trained on a split batch as ours are, with the latent loss divided by the training examples.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lpbnn.convert.convert import convert
from lpbnn.members.rows import expand_batch, gather
from lpbnn.model import Terms, UncertainModel, as_call, total

NUM_DATA = 50_000
BATCHENSEMBLE, LPBNN = "torch-uncertainty-batchensemble", "torch-uncertainty-lpbnn"
NAMES = (BATCHENSEMBLE, LPBNN)
_MODULES = {
    BATCHENSEMBLE: ("torch_uncertainty.layers.batch_ensemble", "BatchConv2d", "BatchLinear"),
    LPBNN: ("torch_uncertainty.layers.bayesian.lpbnn", "LPBNNConv2d", "LPBNNLinear"),
}


def available() -> list[str]:
    """Return the names of the peers whose library can be imported here."""
    return [name for name in NAMES if _classes(name) is not None]


def build(name: str, plain: UncertainModel, members: int) -> UncertainModel:
    """Build the network of a plain model with every layer replaced by the peer's."""
    classes = _classes(name)
    if classes is None:
        raise ValueError(f"{name} needs torch_uncertainty. Fix: pip install torch-uncertainty.")
    convert(plain.net, _replacement(*classes, members))
    return Peer(plain.net, members, likelihood=plain.likelihood)


class Peer(UncertainModel):
    """A network of a peer's layers; its rows are ordered by member."""

    def __init__(self, net: nn.Module, members: int, **options: Any) -> None:
        super().__init__(net, **options)
        self.members = members

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        rows = self.net(expand_batch(args[0], self.members), *args[1:], **kwargs)
        return gather(self.readout(rows), self.members)

    def loss(self, x: Any, y: Tensor, weight: Tensor | None = None) -> Terms:
        args, kwargs = as_call(x)
        outputs = self.readout(self.net(*args, **kwargs))
        nll = self.likelihood.mean_nll(outputs, y, weight)
        found = [self._take(layer) for layer in self.net.modules()]
        latent = [term for term in found if isinstance(term, Tensor)]
        if not latent:
            return total(nll=nll)
        return total(nll=nll, latent=torch.stack(latent).sum() / NUM_DATA)

    @staticmethod
    def _take(layer: nn.Module) -> Any:
        """Remove and return the loss that a pass left in a layer: with it the layer cannot be copied."""
        term = getattr(layer, "log_variational_posterior", None)
        if term is not None:
            layer.log_variational_posterior = None  # type: ignore[assignment]
        return term


def _classes(name: str) -> tuple[Any, Any] | None:
    module, *wanted = _MODULES[name]
    try:
        found = importlib.import_module(module)
        return getattr(found, wanted[0]), getattr(found, wanted[1])
    except Exception:  # not installed, or not for this torch
        return None


def _replacement(conv: Any, linear: Any, members: int) -> Callable[[nn.Module, str], nn.Module]:
    def replacement(layer: nn.Module, path: str) -> nn.Module:
        bias = layer.bias is not None
        if isinstance(layer, nn.Linear):
            return linear(layer.in_features, layer.out_features, num_estimators=members, bias=bias)
        if not isinstance(layer, nn.Conv2d):
            raise ValueError(
                f"{path} is a {type(layer).__name__}; the peers have Conv2d and Linear."
            )
        geometry: dict[str, Any] = {"stride": layer.stride, "padding": layer.padding}
        if layer.dilation != (1, 1):  # not every version takes it
            geometry["dilation"] = layer.dilation
        return conv(
            layer.in_channels,
            layer.out_channels,
            kernel_size=layer.kernel_size,
            num_estimators=members,
            groups=layer.groups,
            bias=bias,
            **geometry,
        )

    return replacement
