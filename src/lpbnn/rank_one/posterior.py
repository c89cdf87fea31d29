"""The learned posterior of an LP-BNN, layer by layer: an exact low-rank Gaussian over r^."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import LowRankMultivariateNormal

from lpbnn.model import UncertainModel
from lpbnn.rank_one.layer import RankOneLayer
from lpbnn.rank_one.vae import LatentFactors, LatentPosterior


@dataclass(frozen=True)
class LayerPosterior:
    r"""r^_j ~ N(mean_j, A_j A_j^T), exact because the decoder is linear.

    Args:
        mean: (J, m).
        factor: A, (J, m, latent).
    """

    mean: Tensor
    factor: Tensor

    @property
    def covariance(self) -> Tensor:
        """A_j A_j^T, (J, m, m)."""
        return self.factor @ self.factor.mT

    @property
    def std(self) -> Tensor:
        """The standard deviation of every entry, (J, m)."""
        return self.factor.square().sum(-1).sqrt()

    @property
    def correlation(self) -> Tensor:
        """The correlation matrix, (J, m, m), with ones on the diagonal."""
        unit = self.factor / self.std.unsqueeze(-1).clamp_min(torch.finfo(self.factor.dtype).tiny)
        return unit @ unit.mT

    def distribution(self, jitter: float = 1e-6) -> LowRankMultivariateNormal:
        """Return a torch distribution in float64.

        Args:
            jitter: the small diagonal that the distribution needs.
        """
        mean, factor = self.mean.double(), self.factor.double()
        return LowRankMultivariateNormal(mean, factor, torch.full_like(mean, jitter))


def posterior(model: nn.Module) -> dict[str, LayerPosterior]:
    """Return the posterior of every layer with latent factors, by path.

    Args:
        model: what ``lpbnn.build(net, "lpbnn", ...)`` returned, or its network.

    Example:
        >>> import lpbnn
        >>> model = lpbnn.build(nn.Sequential(nn.Linear(6, 3)), "lpbnn", members=4, num_data=100)
        >>> layer = posterior(model)["0"]
        >>> tuple(layer.mean.shape), tuple(layer.correlation.shape)
        ((4, 6), (4, 6, 6))
    """
    net = model.net if isinstance(model, UncertainModel) else model
    factors = {
        path: module.factors
        for path, module in net.named_modules()
        if isinstance(module, RankOneLayer) and isinstance(module.factors, LatentFactors)
    }
    if not factors:
        raise ValueError(
            f"{type(model).__name__} has no layer with a latent posterior; posterior takes a model "
            "that lpbnn.build(net, 'lpbnn', ...) returned."
        )
    of_all = LatentPosterior(list(factors.values()))
    with torch.no_grad():
        parts = zip(factors, of_all.mean(), of_all.covariance_factors(), strict=True)
        return {path: LayerPosterior(mean, factor) for path, (mean, _), factor in parts}
