r"""LP-BNN: the posterior of the fast weights, encoded in a small latent space per layer.

.. math::
    z_j \sim N(\mu(r_j), \sigma^2(r_j)), \quad \hat r_j = D z_j + d, \quad
    W_j = W \odot (\hat r_j s_j^T)

    L = \overline{NLL} + \frac{1}{L} \sum_{layers} \left( a \, KL(q(z|r) \| N(0, I))
        + b \, \|r - \hat r\|^2 \right)

KL and squared error are averaged over members, as the NLL is. The error is that of the mean of r^; with
``reconstruct="draws"`` it is the expectation over z, as the paper has it. That counts the noise as error
and pulls it down in every step, the more the fewer layers there are, whatever the data say. The encoder
learns; r and D are kept as they were drawn unless ``train_r`` and ``train_decoder`` let them learn,
as the paper has it: a D that learns makes the noise small again, which the KL on z does not see, and the
network sure of itself (docs/lab-notes.md). (d learns in any case.)
The three weightings (N training examples, m inputs of the layer):

============  =====  ==========  ==========================================================
weighting     a      b           what it is
============  =====  ==========  ==========================================================
``balanced``  1 / N  1 / m       the default: the KL of the bound, and a mean squared error
                                 that binds r^ to the r that was drawn: members stay apart
``equation``  1 / N  1 / N       the paper's equation to the letter, divided by N
``authors``   1      1 / m       the released code; unstable at large learning rates
============  =====  ==========  ==========================================================

The noise that r^ ends with is about what ``log_variance`` gave every layer: at 1 / N the KL is too weak,
and a training too short, for sigma to be learned. With ``kl_weight``, an a of one's own, and a larger
``pace`` it is: NLL and KL are at rest where :math:`\sigma_i^2 = a / (a + L h_i)`, h_i the curvature of a
member's NLL along z_i. Each layer gets the noise that it can bear, and the prior's where nobody minds
(docs/lab-notes.md tries ``kl_weight=0.0067, pace=5``).

Franchi et al.: Encoding the latent posterior of Bayesian neural networks for uncertainty
quantification, 2020.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lpbnn.methods._rank_one import (
    RankOneConfig,
    annealed,
    check_num_data,
    check_share,
    ensemble_options,
    wrap,
)
from lpbnn.methods._wide import WideBuffers
from lpbnn.model import Model, Terms, at_least_one
from lpbnn.rank_one.ensemble import FastWeightEnsemble
from lpbnn.rank_one.factors import device_of, initial_dtype, stacked
from lpbnn.rank_one.layer import Draw, with_biases
from lpbnn.rank_one.vae import LatentFactors, Stacks

Weighting = Literal["balanced", "equation", "authors"]
Noise = Literal["pass", "example"]
Reconstruct = Literal["draws", "mean"]
NARROW = 128  # inputs: up to here a layer's noise is as asked for, whether it goes by width or not

# (weight of the KL, weight of the squared error) from the data N and a layer's inputs m
WEIGHTINGS: dict[str, Callable[[int, int], tuple[float, float]]] = {
    "balanced": lambda data, inputs: (1 / data, 1 / inputs),
    "equation": lambda data, inputs: (1 / data, 1 / data),
    "authors": lambda data, inputs: (1.0, 1 / inputs),
}


@dataclasses.dataclass(frozen=True)
class Config(RankOneConfig):
    spread: float = 0.1  # less than BatchEnsemble's: docs/lab-notes.md
    num_data: int | None = None  # N, required
    weighting: Weighting = "balanced"
    latent: int = 32
    train_r: bool = (
        False  # r as drawn, as the released code has it; True lets r learn, as the paper writes
    )
    # D as drawn, so that only sigma sizes the noise; True lets D learn
    train_decoder: bool = dataclasses.field(default=False, metadata={"then": True})
    log_variance: float = -2.0  # of z, before training
    by_width: bool = False  # more of it in layers of more than 128 inputs
    # the error of the mean of r^, or of its "draws", as the paper has it
    reconstruct: Reconstruct = dataclasses.field(default="mean", metadata={"then": "draws"})
    noise: Noise = (
        "pass"  # the training loss draws z for every "pass", or for every "example" of it
    )
    kl_weight: float | None = None  # a; None: the weighting's
    pace: float = 1.0  # of log sigma^2: SGD moves it so much squared as quickly
    anneal: float = 0.0  # share of the epochs over which the KL grows to its full weight
    free_bits: float = 0.0  # a layer's KL in nats, per latent number, below which it is constant

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weighting not in WEIGHTINGS:
            raise ValueError(
                f"weighting={self.weighting!r} is not known; choose one of {', '.join(WEIGHTINGS)}."
            )
        if self.noise not in get_args(Noise):
            raise ValueError(f"noise={self.noise!r}: choose 'pass' or 'example'.")
        if self.reconstruct not in get_args(Reconstruct):
            raise ValueError(f"reconstruct={self.reconstruct!r}: choose 'draws' or 'mean'.")
        at_least_one("latent", self.latent)
        check_share("anneal", self.anneal)
        if self.kl_weight is not None and not 0 <= self.kl_weight < math.inf:
            raise ValueError(f"kl_weight={self.kl_weight!r}: expected a number of at least 0.")
        if not 0 < self.pace < math.inf:
            raise ValueError(f"pace={self.pace!r}: expected a number above 0.")
        if not 0 <= self.free_bits < math.inf:
            raise ValueError(f"free_bits={self.free_bits!r}: expected a number of at least 0.")

    def log_variance_of(self, inputs: int) -> float:
        r"""What the log variance of a layer's z starts from.

        ``by_width`` raises the variance to :math:`\sigma^2 \max(1, m / 128)`, but not above the prior's,
        which is 1: what many inputs have in common outlasts the noise of each. In the trials so far that
        was no better than the same noise everywhere (docs/lab-notes.md).

        >>> config = Config(num_data=1, log_variance=-2.0, by_width=True)
        >>> [round(config.log_variance_of(inputs), 2) for inputs in (16, 128, 640, 4096)]
        [-2.0, -2.0, -0.39, 0.0]
        """
        if not self.by_width:
            return self.log_variance
        more = math.log(max(1.0, inputs / NARROW))
        return max(self.log_variance, min(self.log_variance + more, 0.0))


class LatentPosterior(WideBuffers, FastWeightEnsemble):  # 1 / N of a large N is 0 in float16
    """J members whose r^ is drawn from the latent posterior in every pass."""

    penalty_weights: Tensor  # (2, L): of the KL and of the squared error, in the stacks' order
    kl_weight: Tensor  # grows to 1 where the KL is annealed
    # What a model did that was pickled before there were the options.
    reconstruct: Reconstruct = "draws"
    own_kl_weight: float | None = None

    def __init__(self, net: nn.Module, config: Config, **options: Any) -> None:
        super().__init__(net, **options)
        self.num_data = check_num_data(config.num_data, "lpbnn")
        self.weighting, self.anneal = config.weighting, config.anneal
        self.noise, self.reconstruct = config.noise, config.reconstruct
        self.own_kl_weight = config.kl_weight
        self.free_nats = config.free_bits * config.latent
        like = {"device": device_of(self.layers[0].factors), "dtype": initial_dtype()}
        self.register_buffer("penalty_weights", torch.empty(2, 0, **like), persistent=False)
        self.register_buffer("kl_weight", torch.ones((), **like), persistent=False)
        self._weighed: list[int] = []  # the inputs of the layers that the weights are for
        self.look_again()

    def _weigh(self, layers: Sequence[LatentFactors]) -> None:
        """The weights of the penalties of layers in the stacks' order."""
        inputs = [layer.inputs for layer in layers]
        # Made once: a tensor made in every step would make the GPU wait for the host.
        if inputs == self._weighed:
            return
        weights = [WEIGHTINGS[self.weighting](self.num_data, width) for width in inputs]
        if (own := self.own_kl_weight) is not None:
            weights = [(own, b) for _, b in weights]
        self.penalty_weights = self.penalty_weights.new_tensor(weights).T
        self._weighed = inputs

    def look_again(self) -> None:
        factors = self._factors()
        self._weigh([factors[i] for group in stacked(factors) for i in group])

    def shared(self) -> Stacks:
        stacks = Stacks(self._factors(), for_loss=True)
        if not torch.compiler.is_compiling():
            self._weigh(stacks.layers)  # one may have been replaced
        return stacks

    def draw(self, rows: int, shared: Stacks | None = None) -> list[Draw]:
        by_row = self.noise == "example" and self.training
        # A compiler sums the gradients of all copies of a stack in one kernel, those that it makes itself
        # of each layer's r^ in one for each layer.
        copies = rows // self.members if self.training and torch.compiler.is_compiling() else 1
        drawn = (shared or self.shared()).draw(*(rows, 1) if by_row else (None, copies))
        return with_biases(self.layers, drawn)

    def penalties(self, shared: Stacks | None = None) -> Terms:
        kl, squared_error = (shared or self.shared()).terms(self.reconstruct == "draws")
        a, b = self.penalty_weights.to(kl.dtype)
        if self.free_nats:
            kl = kl.clamp_min(self.free_nats)
        return {
            "kl": self.kl_weight.clone()
            * (a * kl).mean(),  # it may change before the backward pass
            "reconstruction": (b * squared_error).mean(),
        }

    def before_epoch(self, epoch: int, epochs: int) -> None:
        super().before_epoch(epoch, epochs)
        self.kl_weight.fill_(annealed(epoch, epochs, self.anneal))

    def phase(self) -> object:
        return super().phase()  # the weight is a buffer

    def _factors(self) -> list[LatentFactors]:
        return [layer.factors for layer in self.layers if isinstance(layer.factors, LatentFactors)]


def build(net: nn.Module, config: Config, **model_options: Any) -> Model:
    check_num_data(config.num_data, "lpbnn")

    def factors(members: int, inputs: int, outputs: int) -> LatentFactors:
        return LatentFactors(
            members,
            inputs,
            outputs,
            latent=config.latent,
            spread=config.spread,
            init=config.init,
            train_r=config.train_r,
            train_decoder=config.train_decoder,
            log_variance=config.log_variance_of(inputs),
            pace=config.pace,
        )

    return LatentPosterior(
        wrap(net, config, factors), config, **ensemble_options(config), **model_options
    )
