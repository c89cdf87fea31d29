"""Freezing: from a distribution over networks to fixed ones that answer the same way twice."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lpbnn.convert.convert import undo as undo_conversion
from lpbnn.draws import PrivateDraws
from lpbnn.kernels.row_norm import restore_batch_norms
from lpbnn.likelihoods import Scaling, take_scalings
from lpbnn.members.partial import remove_expansion_hooks
from lpbnn.model import Readout, UncertainModel, at_least_one
from lpbnn.predict import unwrap
from lpbnn.rank_one.ensemble import RankOneConfig, RankOneEnsemble
from lpbnn.rank_one.factors import FixedFactors
from lpbnn.rank_one.layer import RankOneLayer, member_weights


class CalibratedReadout(nn.Module):
    """A readout that rescales the outputs, so that those of an exported graph are calibrated.

    Args:
        readout: the model's own.
        scalings: by head; "" for the only one.
    """

    def __init__(self, readout: Readout, scalings: Mapping[str, Scaling]) -> None:
        super().__init__()
        self.readout = readout
        self.names = tuple(scalings)
        self.scalings = nn.ModuleList(scalings.values())

    def forward(self, output: Any) -> Any:
        outputs = self.readout(output)
        for name, scaling in zip(self.names, self.scalings, strict=True):
            if not name:
                return scaling(outputs)
            outputs = {**outputs, name: scaling(outputs[name])}
        return outputs


class FrozenEnsemble(RankOneEnsemble):
    """Members sampled once: deterministic, exportable, and a model like any other for ``predict``."""

    stochastic = False


def freeze(model: nn.Module, *, samples: int = 1, seed: int = 0) -> FrozenEnsemble:
    """Sample ``samples`` times J members and keep them; the given model is left as it is.

    The members are those, and in the order, that ``predict(model, x, samples=samples, seed=seed)``
    would use. ``torch.export`` and ONNX take the result. If the model was calibrated
    (``lpbnn.calibration``), the outputs of the frozen one are the rescaled ones.

    Args:
        model: built with 'lpbnn', 'batchensemble' or 'rank1'.
        samples: draws of each member; a deterministic model has one.
        seed: of the draws.

    Example:
        >>> import lpbnn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = lpbnn.build(net, "lpbnn", members=4, num_data=100)
        >>> frozen, x = freeze(model, samples=2, seed=0), torch.randn(5, 4)
        >>> torch.equal(frozen(x), frozen(x)), tuple(frozen(x).shape)
        (True, (8, 5, 3))
    """
    ensemble = _require_rank_one(model)
    samples = at_least_one("samples", samples) if ensemble.stochastic else 1
    with PrivateDraws(seed), torch.no_grad():
        sampled = ensemble.sample(samples)
    net = _copy(ensemble.net)
    layers = [module for module in net.modules() if isinstance(module, RankOneLayer)]
    for layer, factors in zip(layers, sampled.layers, strict=True):
        layer.factors = FixedFactors(factors.r.detach().clone(), factors.s.detach().clone())
        if layer.member_bias is not None:
            layer.member_bias = nn.Parameter(sampled.select(layer.member_bias).detach().clone())
    likelihood = copy.deepcopy(ensemble.likelihood)
    readout, scalings = ensemble.readout, take_scalings(likelihood)
    if scalings:
        readout = CalibratedReadout(readout, scalings)
    config = RankOneConfig(expand_at=ensemble.expand_at)
    frozen = FrozenEnsemble(net, config, likelihood=likelihood, readout=readout)
    frozen.check_first_batch = ensemble.check_first_batch
    frozen.checks = dict(ensemble.checks)
    return frozen.requires_grad_(False).eval()


def mean_network(model: nn.Module) -> nn.Module:
    r"""Return the network with the mean weights, $\bar W = W \odot \frac1J \sum_j s_j \bar r_j^T$.

    The cheapest deployment: a plain network of the original layers. It stands for the ensemble to
    second order in the members' differences (supplementary A.2 of the paper), so compare before use.

    Args:
        model: built with 'lpbnn', 'batchensemble' or 'rank1'.

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
    ensemble = _require_rank_one(model)
    net = _copy(ensemble.net)
    layers = [module for module in net.modules() if isinstance(module, RankOneLayer)]
    with torch.no_grad():
        for layer, mean in zip(layers, ensemble.posterior().mean(), strict=True):
            if not layer.is_standard:
                raise ValueError(
                    f"{layer.path!r} computes its weight itself (parametrised, or of a type of its "
                    "own), so no mean weight can be put there. Use lpbnn.freeze, which keeps the layer."
                )
            # A new parameter: the old one may be tied to another layer's.
            layer.layer.weight = nn.Parameter(member_weights(layer.layer, mean).mean(0))
    return undo(net)


def undo(model: nn.Module) -> nn.Module:
    """Return the plain network, in place: out of its model, or converted by ``lpbnn.convert``.

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
    holds_model = any(isinstance(module, UncertainModel) for module in model.modules())
    # The first network of a Deep Ensemble is the one that was given.
    net = unwrap(model).networks[0] if holds_model else model
    remove_expansion_hooks(net)
    restore_batch_norms(net)
    return undo_conversion(net)


def _copy(net: nn.Module) -> nn.Module:
    """Return a deep copy without our hooks; tensors that a forward left behind are cut from their graph."""
    for module in net.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:  # old-style weight norm
                setattr(module, name, value.detach())
    copied = copy.deepcopy(net)
    remove_expansion_hooks(copied)
    return copied


def _require_rank_one(model: nn.Module) -> RankOneEnsemble:
    if not isinstance(model, RankOneEnsemble):
        raise TypeError(
            f"expected a model built with 'lpbnn', 'batchensemble' or 'rank1'; got "
            f"{type(model).__name__}."
        )
    return model
