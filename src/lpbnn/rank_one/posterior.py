"""The learned posterior of an LP-BNN, layer by layer: an exact low-rank Gaussian over r^."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import LowRankMultivariateNormal

from lpbnn.model import Model
from lpbnn.rank_one.layer import FastWeight
from lpbnn.rank_one.vae import LatentFactors


@dataclass(frozen=True)
class LayerPosterior:
    r"""r^_j ~ N(mean_j, A_j A_j^T), because the decoder is linear.

    ``mean`` is (J, m), ``factor`` is (J, m, latent).
    """

    mean: Tensor
    factor: Tensor

    @property
    def covariance(self) -> Tensor:
        """(J, m, m)."""
        return self.factor @ self.factor.mT

    @property
    def std(self) -> Tensor:
        """(J, m)."""
        return self.factor.square().sum(-1).sqrt()

    @property
    def correlation(self) -> Tensor:
        """(J, m, m), ones on the diagonal."""
        unit = self.factor / self.std.unsqueeze(-1).clamp_min(torch.finfo(self.factor.dtype).tiny)
        return unit @ unit.mT

    def distribution(self, jitter: float = 1e-6) -> LowRankMultivariateNormal:
        """As a torch distribution in float64, which needs the tiny diagonal ``jitter``."""
        mean, factor = self.mean.double(), self.factor.double()
        return LowRankMultivariateNormal(mean, factor, torch.full_like(mean, jitter))


def posterior(model: nn.Module) -> dict[str, LayerPosterior]:
    """The posterior of every layer with latent factors, by path.

    Example:
        >>> import lpbnn
        >>> model = lpbnn.build(nn.Sequential(nn.Linear(6, 3)), "lpbnn", members=4, num_data=100)
        >>> layer = posterior(model)["0"]
        >>> tuple(layer.mean.shape), tuple(layer.correlation.shape)
        ((4, 6), (4, 6, 6))
    """
    net = model.net if isinstance(model, Model) else model
    found = {
        path: LayerPosterior(
            module.factors.mean()[0].detach(), module.factors.covariance_factor().detach()
        )
        for path, module in net.named_modules()
        if isinstance(module, FastWeight) and isinstance(module.factors, LatentFactors)
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer with a latent posterior; posterior takes a model "
            "that lpbnn.build(net, 'lpbnn', ...) returned."
        )
    return found
