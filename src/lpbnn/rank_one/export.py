"""Freezing: from a distribution over networks to fixed ones that answer the same way twice."""

import copy
from typing import Any

import torch
from torch import nn

from lpbnn.convert.convert import undo as undo_conversion
from lpbnn.model import Model, at_least_one
from lpbnn.predict import seeded
from lpbnn.rank_one.ensemble import FastWeightEnsemble
from lpbnn.rank_one.factors import FixedFactors
from lpbnn.rank_one.layer import FastWeight, draw_layers, member_weights
from lpbnn.rank_one.norms import sum_by_rows
from lpbnn.rank_one.stages import remove_hooks


class FrozenEnsemble(FastWeightEnsemble):
    """Members drawn once: deterministic, exportable, and a model like any other for ``predict``."""

    stochastic = False


def freeze(model: nn.Module, *, samples: int = 1, seed: int = 0) -> FrozenEnsemble:
    """Draw ``samples`` times J members and keep them; the given model is left as it is.

    The members are those, and in the order, that ``predict(model, x, samples=samples, seed=seed)``
    would use. ``torch.export`` and ONNX take the result.

    Example:
        >>> import lpbnn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = lpbnn.build(net, "lpbnn", members=4, num_data=100)
        >>> frozen, x = freeze(model, samples=2, seed=0), torch.randn(5, 4)
        >>> torch.equal(frozen(x), frozen(x)), tuple(frozen(x).shape)
        (True, (8, 5, 3))
    """
    ensemble = _check(model)
    samples = at_least_one("samples", samples) if ensemble.stochastic else 1
    net = _copy(ensemble.net)
    remove_hooks(net)
    with seeded(seed, None, ensemble), torch.no_grad():
        draws = draw_layers(ensemble.layers, samples)
    fixed = [module for module in net.modules() if isinstance(module, FastWeight)]
    for layer, draw in zip(fixed, draws, strict=True):
        layer.factors = FixedFactors(draw.r.detach().clone(), draw.s.detach().clone())
        if draw.bias is not None:
            layer.member_bias = nn.Parameter(draw.bias.detach().clone())
    frozen = FrozenEnsemble(net, spread_at=ensemble.stages, **_options(ensemble))
    return frozen.requires_grad_(False).eval()


def mean_network(model: nn.Module) -> nn.Module:
    r"""The single network with the mean weights, :math:`\bar W = W \odot \frac1J \sum_j s_j \bar r_j^T`.

    The cheapest deployment: a plain network of the original layers. It stands for the ensemble to
    second order in the members' spread (supplementary A.2 of the paper), so compare before use.

    Example:
        >>> import lpbnn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> mean_network(lpbnn.build(net, "lpbnn", members=4, num_data=100))
        Sequential(
          (0): Linear(in_features=4, out_features=8, bias=True)
          (1): ReLU()
          (2): Linear(in_features=8, out_features=3, bias=True)
        )
    """
    net = _copy(_check(model).net)
    with torch.no_grad():
        for layer in [module for module in net.modules() if isinstance(module, FastWeight)]:
            if not layer.known:
                raise ValueError(
                    f"{layer.path!r} computes its weight itself (parametrised, or of a type of its "
                    "own), so no mean weight can be put there. Use lpbnn.freeze, which keeps the layer."
                )
            # A new parameter: the old one may be tied to another layer's.
            mean = member_weights(layer.layer, layer.mean()).mean(0)
            layer.layer.weight = nn.Parameter(mean)
    return undo(net)


def undo(model: nn.Module) -> nn.Module:
    """The plain network back, in place: out of its model, or converted by ``lpbnn.convert``.

    Weights are the shared ones as they are now; a bias is the mean of the members' biases. A network
    that was built and not trained comes back bit for bit; not with 'mimo', whose first layer was changed
    when it was built: that gives the network of the first subnetwork, where all inputs are equal. The
    head that 'duq' took out comes back with the weights it had then.

    Example:
        >>> import lpbnn
        >>> net = nn.Sequential(nn.Linear(4, 3))
        >>> undo(lpbnn.build(net, "batchensemble")) is net
        True
    """
    net = (
        model.networks[0] if isinstance(model, Model) else model
    )  # an ensemble's first is the given
    remove_hooks(net)
    sum_by_rows(net, False)
    return undo_conversion(net)


def _copy(net: nn.Module) -> nn.Module:
    """A deep copy; tensors that a forward left behind (old-style weight norm) are cut from their graph."""
    for module in net.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                setattr(module, name, value.detach())
    return copy.deepcopy(net)


def _check(model: nn.Module) -> FastWeightEnsemble:
    if not isinstance(model, FastWeightEnsemble):
        raise TypeError(
            f"expected a model built with 'lpbnn', 'batchensemble' or 'rank1'; got "
            f"{type(model).__name__}."
        )
    return model


def _options(ensemble: FastWeightEnsemble) -> dict[str, Any]:
    return {
        "task": ensemble.task,
        "readout": ensemble.readout,
        "ignore_index": ensemble.ignore_index,
        "class_weights": ensemble.class_weights,
    }
