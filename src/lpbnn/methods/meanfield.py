r"""Mean-field BNN: a Gaussian over every weight and bias, trained by Bayes by backprop.

.. math::
    W = \mu + \sigma \odot \epsilon, \; \sigma = \log(1 + e^\rho), \quad
    L = \overline{NLL} + \tfrac{\beta}{N} \sum_{layers} KL(N(\mu, \sigma^2) \| N(0, \sigma_0^2))

The KL is summed over the entries; beta grows from 0 to 1 over ``anneal`` of training. The given weights
are the posterior mean, bit for bit; ``lpbnn.undo`` gives the mean network back.

``flipout`` (training only) gives every example its own perturbation for the price of a second pass
through each layer, and so a gradient of less variance: with signs s, t in {-1, 1} per channel,

.. math:: y = \mu x + t \odot ((\sigma \odot \epsilon)(s \odot x))

The prior's standard deviation is 1, the default of TensorFlow Probability and Bayesian-Torch;
``prior_std=None`` is the scale of He's initialiser, sqrt(2 / fan-in), that large networks use. The prior
is the weight decay of these weights: they get no other.

Blundell et al.: Weight uncertainty in neural networks, ICML 2015. Wen et al.: Flipout: efficient
pseudo-independent weight perturbations on mini-batches, ICLR 2018.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lpbnn.convert.convert import Conversion, Filter, convert
from lpbnn.convert.unconverted import unconverted
from lpbnn.convert.wrapper import Drawing, remember
from lpbnn.likelihoods import at_least_float32, check_batch
from lpbnn.methods._rank_one import annealed, check_num_data
from lpbnn.model import Model, Pass, Terms, as_call, at_least_one, batch_size, total, two_groups
from lpbnn.rank_one.factors import device_of, full_precision, kl_to_standard_normal


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of meanfield: the posterior, its prior, the KL's annealing, and which layers have them."""

    members: int = 4  # draws of the weights in one call of the model; training draws once
    num_data: int | None = None  # N, required
    std: float = 1e-3  # initial standard deviation of the posterior
    prior_std: float | None = 1.0  # None: sqrt(2 / fan-in), layer by layer
    anneal: float = 2 / 3  # share of the epochs over which the KL grows to its full weight
    flipout: bool = False
    include: Filter = None  # path globs or layer types to convert; None: all
    exclude: Filter = None

    def __post_init__(self) -> None:
        at_least_one("members", self.members)
        for name, value in (("std", self.std), ("prior_std", self.prior_std)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r}: expected a number above 0.")
        if not 0 <= self.anneal <= 1:
            raise ValueError(f"anneal={self.anneal!r}: expected a share between 0 and 1.")


class Noise(NamedTuple):
    """sigma * epsilon for the weight and the bias of a layer."""

    weight: Tensor
    bias: Tensor | None
    flip: bool = False  # with signs of its own for every example: flipout


class GaussianLayer(Drawing[Noise]):
    """A layer whose weight and bias are the mean of a Gaussian, drawn anew in every call.

    Example:
        >>> layer = GaussianLayer(nn.Linear(3, 2), std=0.1)
        >>> x = torch.randn(1, 3)
        >>> bool((layer(x) != layer(x)).all())
        True
    """

    added = "the posterior"
    bias_rho: nn.Parameter | None

    def __init__(
        self,
        layer: nn.Module,
        path: str = "",
        std: float = 1e-3,
        prior_std: float | None = 1.0,
    ) -> None:
        weight = layer._parameters.get("weight")
        if weight is None:
            raise ValueError(
                f"{path or type(layer).__name__!r} computes its weight itself (parametrised, or with "
                f"weight or spectral norm), so there is none to put a posterior on. Leave it out with "
                f"exclude={path or '...'!r}."
            )
        super().__init__(layer, path)
        self.prior_std = math.sqrt(2 / weight[0].numel()) if prior_std is None else prior_std
        rho = std + math.log(-math.expm1(-std))  # softplus(rho) = std
        for name in ("weight", "bias"):
            mean = layer._parameters.get(name)
            like = None if mean is None else torch.full_like(mean, rho)
            made = None if mean is None or like is None else nn.Parameter(like, mean.requires_grad)
            self.register_parameter(f"{name}_rho", made)

    def gaussians(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Mean and standard deviation of the weight and, where there is one, of the bias."""
        for mean, rho in (
            (self.layer.weight, self.weight_rho),
            (self.layer.bias, self.bias_rho),
        ):
            if isinstance(mean, Tensor) and isinstance(rho, Tensor):
                yield at_least_float32(mean), F.softplus(at_least_float32(rho))

    def draw(self) -> Noise:
        with full_precision(self.weight_rho.device):
            noise = [std * torch.randn_like(std) for _, std in self.gaussians()]
        return Noise(noise[0], noise[1] if len(noise) > 1 else None)

    def kl(self) -> Tensor:
        """KL(q || N(0, prior_std^2)), summed over all entries."""
        with full_precision(self.weight_rho.device):
            parts = [
                kl_to_standard_normal(mean / self.prior_std, 2 * (std / self.prior_std).log()).sum()
                for mean, std in self.gaussians()
            ]
        return torch.stack(parts).sum()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        noise = self._current()
        weight, bias = self.layer.weight, self.layer.bias
        if noise.flip:
            mean = self.layer(x, *args, **kwargs)
            perturbed = self._call(noise.weight, noise.bias, x * self._signs(x), *args, **kwargs)
            return mean + perturbed * self._signs(perturbed)
        drawn = None if noise.bias is None else bias + noise.bias  # type: ignore[operator]
        return self._call(weight + noise.weight, drawn, x, *args, **kwargs)  # type: ignore[operator]

    def _call(self, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's own computation with other weights."""
        dtype: torch.dtype = self.layer.weight.dtype  # type: ignore[assignment]
        tensors = {"weight": weight.to(dtype)}
        if bias is not None:
            tensors["bias"] = bias.to(dtype)
        return functional_call(self.layer, tensors, args, kwargs)

    def _signs(self, x: Tensor) -> Tensor:
        """One random sign per example and channel; channels are last (Linear) or second."""
        shape = [x.shape[0], *(1,) * (x.dim() - 1)]
        channel = -1 if isinstance(self.layer, nn.Linear) else 1
        shape[channel] = x.shape[channel]
        return torch.randint(0, 2, shape, device=x.device).to(x.dtype) * 2 - 1


@contextmanager
def held(layers: Sequence[GaussianLayer], noises: Sequence[Noise]) -> Iterator[None]:
    """Within this block every layer uses its given noise: one network, any number of calls."""
    for layer, noise in zip(layers, noises, strict=True):
        layer._held = noise
        layer._last = None  # as large as the network: not kept beside that of the next pass
    try:
        yield
    finally:
        for layer in layers:
            layer._held = None


class MeanField(Model):
    """One network with a Gaussian over every weight of its converted layers (``conversion``)."""

    in_rows = False
    kl_weight: Tensor

    def __init__(
        self, net: nn.Module, config: Config, conversion: Conversion, **options: Any
    ) -> None:
        super().__init__(net, **options)
        self.num_data = check_num_data(config.num_data, "meanfield")
        self.members = config.members
        self.flipout = config.flipout
        self.anneal = config.anneal
        self.conversion = conversion
        self.layers = [module for module in net.modules() if isinstance(module, GaussianLayer)]
        # In a loop that never calls before_epoch: the full KL.
        device = device_of(self.layers[0])
        self.register_buffer("kl_weight", torch.ones((), device=device), persistent=False)

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        runs = [self._with(self.draw(), *args, **kwargs) for _ in range(self.members)]
        return torch.cat(runs)

    def draw(self, flip: bool = False) -> list[Noise]:
        """One draw of the weights of every layer."""
        return [layer.draw()._replace(flip=flip) for layer in self.layers]

    def _with(self, noises: list[Noise], *args: Any, **kwargs: Any) -> Tensor:
        batch_size(args, kwargs)
        with held(self.layers, noises):
            outputs = self.readout(self.net(*args, **kwargs))
        remember(outputs, self.layers, noises)
        return outputs.unsqueeze(0)

    def passes(self, samples: int, width: int) -> Iterator[Pass]:
        # One draw at a time, whatever the width: a draw is as large as the network.
        for _ in range(samples * self.members):
            yield partial(self._with, self.draw())

    def loss(self, x: Any, y: Tensor) -> Terms:
        kl = torch.stack([layer.kl().to(self.kl_weight.device) for layer in self.layers]).sum()
        kl = kl * (at_least_float32(self.kl_weight).clone() / self.num_data)
        if not self.training:
            return total(nll=super().loss(x, y)["nll"], kl=kl)
        check_batch(x, y, self.task)
        args, kwargs = as_call(x)
        outputs = self._with(self.draw(self.flipout), *args, **kwargs)
        nll = self.nll(outputs[0], y)
        return total(nll=nll, kl=kl.to(nll.device))

    def parameter_groups(
        self, weight_decay: float = 0.0, lr: float | None = None
    ) -> list[dict[str, Any]]:
        posterior = {id(p): p for layer in self.layers for p in layer.parameters()}
        slow = [p for p in self.parameters() if id(p) not in posterior]
        return two_groups(slow, list(posterior.values()), weight_decay, lr, 1.0)

    def before_epoch(self, epoch: int, epochs: int) -> None:
        self.kl_weight.fill_(annealed(epoch, epochs, self.anneal))

    def phase(self) -> object:
        return None


def build(net: nn.Module, config: Config, **model_options: Any) -> Model:
    check_num_data(config.num_data, "meanfield")

    users: dict[int, str] = {}

    def gaussian(layer: nn.Module, path: str) -> GaussianLayer:
        for name, parameter in layer.named_parameters(recurse=False):
            if (other := users.setdefault(id(parameter), path)) != path:
                raise ValueError(
                    f"{other!r} and {path!r} share one {name}: each would draw it for itself and count "
                    f"its KL. Fix: one module in both places, or exclude={path!r}, to use the mean there."
                )
        return GaussianLayer(layer, path, config.std, config.prior_std)

    left_behind = unconverted(net, config.include, config.exclude)
    conversion = convert(net, gaussian, config.include, config.exclude)
    if left_behind:
        warnings.warn(left_behind, stacklevel=3)  # of lpbnn.build's caller
    return MeanField(net, config, conversion, **model_options)
