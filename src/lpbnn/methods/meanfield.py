r"""Mean-field BNN: a Gaussian over every weight and bias, trained by Bayes by backprop.

Twice the parameters of the network: a mean and a standard deviation for each. A pass draws all weights.

$$W = \mu + \sigma \odot \epsilon, \quad \epsilon \sim N(0, 1), \quad \sigma = \log(1 + e^\rho)$$

$$L = \overline{NLL} + \frac{\beta}{N} \sum_{layers} KL(N(\mu, \sigma^2) \,\|\, N(0, \sigma_0^2))$$

The KL is summed over the entries of all converted layers and divided by N, the number of training examples
(``num_data``); $\beta$ grows from 0 to 1 over the first ``anneal`` of the epochs. The given weights
become the posterior mean unchanged, and ``lpbnn.undo`` returns the mean network. The prior replaces weight
decay for the converted layers.

``flipout`` (training only) gives every example its own perturbation, which lowers the variance of the
gradient and costs a second pass through every layer. With random signs s, t in {-1, 1} per example and
channel,

$$y = \mu x + t \odot ((\sigma \odot \epsilon)(s \odot x))$$

``prior_std`` is 1 by default, as in TensorFlow Probability and Bayesian-Torch; None uses the scale of He's
initialiser, sqrt(2 / fan-in), layer by layer.

Blundell et al.: Weight uncertainty in neural networks, ICML 2015. Wen et al.: Flipout: efficient
pseudo-independent weight perturbations on mini-batches, ICLR 2018.
"""

import copy
import dataclasses
import math
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lpbnn.convert.checks import Filter
from lpbnn.convert.convert import convert
from lpbnn.convert.wrapper import Wrapper
from lpbnn.members.call import as_call, copy_tensors
from lpbnn.members.passes import PassSlot
from lpbnn.model import (
    Outputs,
    Pass,
    Terms,
    UncertainModel,
    stack_members,
    with_loss,
)
from lpbnn.options import (
    Count,
    DataCount,
    Options,
    Positive,
    Share,
    annealed,
    require_num_data,
)
from lpbnn.precision import at_least_float32, full_precision
from lpbnn.rank_one.factors import kl_to_standard_normal


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Options of meanfield."""

    members: Count = 4  # draws of the weights in one call of the model; a training step draws once
    num_data: DataCount | None = None  # N, the number of training examples; required
    std: Positive = 1e-3  # initial standard deviation of the posterior
    prior_std: Positive | None = 1.0  # standard deviation of the prior; None: sqrt(2 / fan-in)
    anneal: Share = 2 / 3  # share of the epochs over which the KL grows to its full weight
    flipout: bool = False  # True: a perturbation of its own for every training example
    include: Filter = None  # path globs or layer types to convert; None: all supported layers
    exclude: Filter = None  # path globs or layer types to leave as they are


class Noise(NamedTuple):
    """One draw of sigma * epsilon for a layer."""

    weight: Tensor  # of the weight's shape
    bias: Tensor | None  # of the bias's shape; None without a bias
    flip: bool = False  # True: flipout


@dataclasses.dataclass(eq=False)
class Draw:
    """The state of a pass: the noise of every layer."""

    layers: list[Noise]


class GaussianLayer(Wrapper):
    """A layer whose weight and bias are the mean of a Gaussian.

    During a pass of the model the layer reads its noise from ``slot``; called alone, it draws anew.

    Args:
        layer: an ``nn.Linear`` or convolution.
        path: its path in the network.
        std: initial standard deviation of the posterior.
        prior_std: standard deviation of the prior; None is sqrt(2 / fan-in).

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
        self.slot, self.index = PassSlot(), 0  # the model replaces both
        self.prior_std = math.sqrt(2 / weight[0].numel()) if prior_std is None else prior_std
        rho = std + math.log(-math.expm1(-std))  # softplus(rho) = std
        for name in ("weight", "bias"):
            mean = layer._parameters.get(name)
            initial = None
            if mean is not None:
                initial = nn.Parameter(torch.full_like(mean, rho), mean.requires_grad)
            self.register_parameter(f"{name}_rho", initial)

    def gaussians(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the mean and the standard deviation of the weight, then those of the bias, if any."""
        for mean, rho in (
            (self.layer.weight, self.weight_rho),
            (self.layer.bias, self.bias_rho),
        ):
            if isinstance(mean, Tensor) and isinstance(rho, Tensor):
                yield at_least_float32(mean), F.softplus(at_least_float32(rho))

    def draw(self, scale: Tensor | None = None) -> Noise:
        """Draw scale * sigma * epsilon, in float32 at least; None is 1."""
        with full_precision(self.weight_rho.device):
            stds = [std for _, std in self.gaussians()]
            if scale is not None:
                stds = [std * scale.to(std) for std in stds]
            noise = [std * torch.randn_like(std) for std in stds]
        return Noise(noise[0], noise[1] if len(noise) > 1 else None)

    def kl(self) -> Tensor:
        """Return KL(q || N(0, prior_std^2)), summed over all entries of weight and bias."""
        with full_precision(self.weight_rho.device):
            parts = [
                kl_to_standard_normal(mean / self.prior_std, 2 * (std / self.prior_std).log()).sum()
                for mean, std in self.gaussians()
            ]
        return torch.stack(parts).sum()

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state: Draw | None = self.slot.get()
        noise = self.draw() if state is None else state.layers[self.index]
        weight, bias = self.layer.weight, self.layer.bias
        if noise.flip:
            mean = self.layer(input, *args, **kwargs)
            perturbed = self._call(
                noise.weight, noise.bias, input * self._signs(input), *args, **kwargs
            )
            return mean + perturbed * self._signs(perturbed)
        drawn = None if noise.bias is None else bias + noise.bias  # type: ignore[operator]
        return self._call(weight + noise.weight, drawn, input, *args, **kwargs)  # type: ignore[operator]

    def _call(self, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layer with other weights."""
        dtype: torch.dtype = self.layer.weight.dtype  # type: ignore[assignment]
        tensors = {"weight": weight.to(dtype)}
        if bias is not None:
            tensors["bias"] = bias.to(dtype)
        if torch.compiler.is_compiling():
            return functional_call(self.layer, tensors, args, kwargs)
        # functional_call would replace the layer's own tensors, which other threads may be using.
        layer = copy.copy(self.layer)
        layer._parameters = {**layer._parameters, **tensors}  # type: ignore[dict-item]
        return layer(*args, **kwargs)

    def _signs(self, x: Tensor) -> Tensor:
        """Draw one sign per example and channel; channels are last (Linear) or second."""
        shape = [x.shape[0], *(1,) * (x.dim() - 1)]
        channel = -1 if isinstance(self.layer, nn.Linear) else 1
        shape[channel] = x.shape[channel]
        return torch.randint(0, 2, shape, device=x.device).to(x.dtype) * 2 - 1


class MeanFieldBNN(UncertainModel):
    """A network with a Gaussian over every weight of its converted layers.

    A call draws the weights ``members`` times and returns the outputs of every draw. A training step draws
    them once.

    Args:
        net: a network whose layers ``convert`` has replaced by ``GaussianLayer``.
        config: the options.
        model_options: ``likelihood`` (any) and ``readout``.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = build(net, Config(members=5, num_data=100))
        >>> list(model.loss(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])))
        ['loss', 'nll', 'kl']
        >>> tuple(model(torch.randn(6, 4)).shape)
        (5, 6, 3)
    """

    kl_weight: Tensor  # beta
    noise_scale: Tensor  # multiplies sigma in every draw

    def __init__(self, net: nn.Module, config: Config, **model_options: Any) -> None:
        super().__init__(net, **model_options)
        self.num_data = require_num_data(config, "meanfield")
        self.members = config.members
        self.flipout = config.flipout
        self.anneal = config.anneal
        self.layers = [module for module in net.modules() if isinstance(module, GaussianLayer)]
        self.slot = PassSlot()
        for index, layer in enumerate(self.layers):
            layer.slot, layer.index = self.slot, index
        # Loops that never call before_epoch train with the full KL.
        device = self.layers[0].weight_rho.device
        self.register_buffer("kl_weight", torch.ones((), device=device), persistent=False)
        self.register_buffer("noise_scale", torch.ones((), device=device))

    def outputs(self, *args: Any, **kwargs: Any) -> Outputs:
        # A network may change its inputs in place: every draw gets copies.
        draws = (self.draw() for _ in range(self.members))
        return stack_members([self._run(draw, *copy_tensors((args, kwargs))) for draw in draws])

    def draw(self, flip: bool = False) -> list[Noise]:
        """Draw the weights of every layer once."""
        return [layer.draw(self.noise_scale)._replace(flip=flip) for layer in self.layers]

    def _run(self, noises: list[Noise], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs:
        """Return the outputs (B, ...) of the network with the drawn weights."""
        self.call(args, kwargs)  # compares a new kind
        return self.slot.run(Draw(noises), self.run_network, *args, **kwargs)

    def passes(self, samples: int, width: int) -> Iterator[Pass]:
        # One draw per pass, whatever the width: a draw is as large as the network.
        for _ in range(samples * self.members):
            noises = self.draw()
            yield partial(self._member, noises)

    def _member(self, noises: list[Noise], *args: Any, **kwargs: Any) -> Outputs:
        return stack_members([self._run(noises, args, kwargs)])

    def loss(self, x: Any, y: Any, weight: Tensor | None = None) -> Terms:
        """Return the terms ``nll`` and ``kl``; see ``UncertainModel.loss``.

        In training the NLL is that of one draw, in evaluation the mean over ``members`` draws.
        """
        kl = torch.stack([layer.kl().to(self.kl_weight.device) for layer in self.layers]).sum()
        kl = kl * (self.kl_weight.clone() / self.num_data)
        if not self.training:
            terms = super().loss(x, y, weight)
            del terms["loss"]
            return with_loss(**terms, kl=kl)
        self.likelihood.check_batch(x, y)
        outputs = self._run(self.draw(self.flipout), *as_call(x))
        terms = self.likelihood.nll_terms(outputs, y, weight)
        return with_loss(**terms, kl=kl.to(terms["nll"].device))

    def fast_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the posterior."""
        return [p for layer in self.layers for p in layer.parameters()]

    def before_epoch(self, epoch: int, epochs: int) -> None:
        """Set the KL's weight for the epoch."""
        self.kl_weight.fill_(annealed(epoch, epochs, self.anneal))


def build(net: nn.Module, config: Config, **model_options: Any) -> MeanFieldBNN:
    """Put a Gaussian on every weight of the chosen layers of ``net``, in place."""
    paths: dict[int, str] = {}  # of the layer that owns each parameter

    def gaussian(layer: nn.Module, path: str) -> GaussianLayer:
        for name, parameter in layer.named_parameters(recurse=False):
            if (other := paths.setdefault(id(parameter), path)) != path:
                raise ValueError(
                    f"{other!r} and {path!r} share one {name}: each would draw it for itself and count "
                    f"its KL. Fix: one module in both places, or exclude={path!r}, to use the mean there."
                )
        return GaussianLayer(layer, path, config.std, config.prior_std)

    conversion = convert(net, gaussian, config.include, config.exclude)
    if conversion.warning:
        warnings.warn(conversion.warning, stacklevel=3)  # the caller of lpbnn.build
    return MeanFieldBNN(net, config, **model_options)
