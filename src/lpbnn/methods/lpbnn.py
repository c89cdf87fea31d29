r"""LP-BNN: the posterior of the factors r, encoded in a small latent space per layer.

Every layer has one weight W, and every member j its own factors r_j and s_j, which scale the layer's inputs
and outputs. A small autoencoder per layer, shared by the members, maps r_j to a Gaussian over a few latent
numbers z; a draw of z, decoded, is the factor that the layer uses. So the posterior costs a few small
matrices per layer, and the entries of r are correlated.

$$
z_j \sim N(\mu(r_j), \sigma^2(r_j)), \quad \hat r_j = D z_j + d, \quad
W_j = W \odot (s_j \hat r_j^T)
$$

$$
\mathcal{L} = \overline{NLL} + \frac{1}{L} \sum_{\text{L layers}} \left( a \, KL(q(z|r) \| N(0, I))
+ b \, \|r - \hat r\|^2 \right)
$$

The encoder gives $\mu$ and $\log \sigma^2$; D and d are the decoder. KL and squared error are averaged over
members, as the NLL is. The weightings (N training examples, m inputs of the layer):

| weighting | a | b | meaning |
| --- | --- | --- | --- |
| ``balanced`` | 1 / N | 1 / m | the KL of the bound; a mean squared error that keeps r^ at the drawn r |
| ``equation`` | 1 / N | 1 / N | the paper's equation to the letter, divided by N |
| ``authors`` | 1 | 1 / m | the released code; unstable at large learning rates |

The noise that r^ ends with is about what ``log_variance`` gave every layer: at 1 / N the KL is too weak,
and a training too short, for sigma to be learned. ``kl_weight`` sets another a: NLL and KL balance where
$\sigma_i^2 = a / (a + L h_i)$, h_i the curvature of a member's NLL along z_i.

There are two variants:

| | ``variant="default"`` | ``variant="paper"`` |
| --- | --- | --- |
| learned | encoder, d, s, W | r, encoder, D, d, s, W |
| reconstruction | of the posterior mean of r^ | of the sampled r^ (its exact expectation over z) |
| weighting | "balanced" | "equation" |
| ``init_std`` | 0.1 | 0.5 |

Differences from the paper:
    ``variant="paper"`` is the paper to the letter. The default was found by measurement (lab notes).
    Reconstructing the sampled r^ counts noise as error and shrinks it in every step, whatever the data say; a
    learned D makes the noise small whatever sigma is, which the KL does not see; a learned r lets the members
    drift together. In all three cases the network becomes overconfident.

Franchi, Bursuc, Aldea, Dubuisson, Bloch: Encoding the latent posterior of Bayesian neural networks for
uncertainty quantification, IEEE TPAMI 46(4), 2024.
"""

import dataclasses
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lpbnn.model import Terms
from lpbnn.options import Count, DataCount, NonNegative, require_num_data
from lpbnn.rank_one.ensemble import RankOneConfig, RankOneEnsemble, convert_layers
from lpbnn.rank_one.vae import LatentFactors, LatentPosterior

Variant = Literal["default", "paper"]
Weighting = Literal["balanced", "equation", "authors"]


@dataclasses.dataclass(frozen=True)
class Config(RankOneConfig):
    """Options of lpbnn."""

    init_std: NonNegative | None = None  # type: ignore[assignment]  # std of r and s; None: 0.1, paper 0.5
    num_data: DataCount | None = None  # N, the number of training examples; required
    # "paper": other learned parts, reconstruction and weighting (see the page of LP-BNN)
    variant: Variant = "default"
    weighting: Weighting | None = None  # weights of KL and squared error; None: the variant's
    latent: Count = 32  # k, the size of z
    log_variance: float = -2.0  # initial log variance of z: the size of the noise
    kl_weight: NonNegative | None = None  # a, the weight of the KL; None: as weighting says

    def __post_init__(self) -> None:
        super().__post_init__()
        paper = self.variant == "paper"
        if self.init_std is None:
            object.__setattr__(self, "init_std", 0.5 if paper else 0.1)
        if self.weighting is None:
            object.__setattr__(self, "weighting", "equation" if paper else "balanced")


class LPBNN(RankOneEnsemble):
    """J members whose r^ is sampled from the latent posterior in every pass.

    Args:
        net: the converted network.
        config: the options.
        **model_options: ``likelihood`` and ``readout``.

    Example:
        >>> model = build(nn.Sequential(nn.Linear(4, 3)), Config(members=2, num_data=100))
        >>> list(model.loss(torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])))
        ['loss', 'nll', 'kl', 'reconstruction']
    """

    config: Config
    inverse_inputs: Tensor  # 1 / m of every layer, in the order of the posterior: by width

    def __init__(self, net: nn.Module, config: Config, **model_options: Any) -> None:
        super().__init__(net, config, **model_options)
        self.num_data = require_num_data(config, "lpbnn")

    def refresh(self) -> None:
        super().refresh()
        inverse = sorted((1 / layer.factors.inputs for layer in self.layers), reverse=True)
        weight: Any = self.layers[0].layer.weight
        # A tensor that is made once: a GPU would wait for it in every step.
        made = torch.tensor(inverse, device=weight.device, dtype=torch.float32)
        self.register_buffer("inverse_inputs", made, persistent=False)

    def penalties(self, posterior: LatentPosterior) -> Terms:
        """Return the terms ``kl`` and ``reconstruction``, by the weights a and b of the table above."""
        weighting, a = self.config.weighting, self.config.kl_weight
        if a is None:
            a = 1.0 if weighting == "authors" else 1 / self.num_data
        b = 1 / self.num_data if weighting == "equation" else self.inverse_inputs
        squared_error = posterior.squared_error(of_samples=self.config.variant == "paper")
        return {
            "kl": (a * posterior.kl()).mean(),
            "reconstruction": (b * squared_error).mean(),
        }


def build(net: nn.Module, config: Config, **model_options: Any) -> LPBNN:
    """Give every chosen layer of ``net`` the latent factors of J members, in place."""
    paper = config.variant == "paper"
    factors = partial(
        LatentFactors,
        config.members,
        latent=config.latent,
        init_std=float(config.init_std or 0.0),
        train_r=paper,
        train_decoder=paper,
        log_variance=config.log_variance,
    )
    convert_layers(net, config, factors)
    return LPBNN(net, config, **model_options)
