r"""The factors r and s of the rank-one members, and what their posteriors have in common.

A layer with m inputs and p outputs has, for each of its J members, r_j in R^m on the input side and
s_j in R^p on the output side. A ``Factors`` module holds the parameters of one layer. A ``FactorPosterior``
is computed from the modules of all layers at once, because a network has dozens of them and each is tiny:

    posterior = Factors.posterior(modules)  # LP-BNN: all encoders, in a few batched products
    posterior.sample(samples)  # [(r, s), ...] by layer: r (samples * J, m), s (samples * J, p)
    posterior.mean()           # the same at the posterior mean

Point estimates are here; methods with a distribution over the factors have theirs in their own files. Training,
prediction and freezing all call ``sample``. A forward pass leaves nothing behind in the modules, so that
penalties can be computed at any time.
"""

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lpbnn.members.rows import expand_batch

Init = Literal["normal", "signs"]


class LayerFactors(NamedTuple):
    """The factors of one layer for M members: r (M, m) and s (M, p).

    In compiled training r has one copy per row, (rows, m), rows member-major.
    """

    r: Tensor
    s: Tensor


class SampledFactors:
    """The sampled factors of every converted layer, in the network's order.

    Args:
        layers: of each layer.
        first: the number of the first of these members, counted through all samples.
    """

    def __init__(self, layers: Sequence[LayerFactors], first: int = 0) -> None:
        self.layers, self.first = layers, first
        self.count = layers[0].s.shape[0]  # members

    @property
    def has_graph(self) -> bool:
        """True if the factors were computed from the layers' parameters, with gradients."""
        return any(f.r.grad_fn is not None for f in self.layers)

    def take(self, start: int, count: int) -> "SampledFactors":
        """Return ``count`` members, from ``start`` on."""
        if start == 0 and count >= self.count:
            return self
        part = slice(start, start + count)
        layers = [LayerFactors(r[part], s[part]) for r, s in self.layers]
        return SampledFactors(layers, self.first + start)

    def select(self, parameter: Tensor) -> Tensor:
        """Return what these members have of a parameter (J, ...) with an entry per member, (M, ...).

        All samples of a member share its entry.

        Example:
            >>> two_samples = LayerFactors(torch.ones(6, 4), torch.ones(6, 2))  # of three members
            >>> SampledFactors([two_samples]).take(2, 3).select(torch.tensor([10, 20, 30]))
            tensor([30, 10, 20])
        """
        members = len(parameter)
        start = self.first % members
        end = start + self.count
        if (start, end) == (0, members):
            return parameter
        return expand_batch(parameter, -(-end // members))[start:end]


class FactorPosterior:
    """The posterior of the factors of all layers, given their modules; here point estimates, without noise."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = layers

    def sample(
        self,
        samples: int = 1,
        noise_scale: Tensor | None = None,
        rows_per_member: int | None = None,
    ) -> list[LayerFactors]:
        """Sample r (samples * J, m) and s (samples * J, p) of every layer, sample-major.

        Args:
            samples: draws of each of the J members.
            noise_scale: a scalar that multiplies the posterior's standard deviation; None is 1.
            rows_per_member: in the pass of a loss; None if there is no loss. In a compiled loss r may have
                one copy for each of them.
        """
        return [
            LayerFactors(expand_batch(r, samples), expand_batch(s, samples)) for r, s in self.mean()
        ]

    def mean(self) -> list[LayerFactors]:
        """Return the mean of r (J, m) and of s (J, p) of every layer."""
        return [LayerFactors(layer.r, layer.s) for layer in self.layers]


class Factors(nn.Module):
    """The parameters of one layer's factors; ``posterior`` says how r and s follow from them."""

    posterior: type[FactorPosterior] = FactorPosterior  # of layers that all have such factors

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.members, self.inputs, self.outputs = members, inputs, outputs

    def extra_repr(self) -> str:
        return f"members={self.members}, inputs={self.inputs}, outputs={self.outputs}"


class PointFactors(Factors):
    r"""BatchEnsemble: r_j and s_j are plain parameters, W_j = W * (s_j r_j^T).

    Wen, Tran, Ba: BatchEnsemble, ICLR 2020.

    Example:
        >>> [(r, s)] = PointFactors.posterior(
        ...     [PointFactors(members=4, inputs=3, outputs=2)]
        ... ).sample()
        >>> tuple(r.shape), tuple(s.shape)
        ((4, 3), (4, 2))
    """

    r: Tensor
    s: Tensor

    def __init__(
        self,
        members: int,
        inputs: int,
        outputs: int,
        *,
        init_std: float = 0.5,
        init: Init = "normal",
    ) -> None:
        super().__init__(members, inputs, outputs)
        self.r = nn.Parameter(initial(members, inputs, init_std, init))
        self.s = nn.Parameter(initial(members, outputs, init_std, init))


class FixedFactors(PointFactors):
    """Factors sampled once and kept as buffers: a frozen ensemble."""

    def __init__(self, r: Tensor, s: Tensor) -> None:
        Factors.__init__(self, r.shape[0], r.shape[1], s.shape[1])
        self.register_buffer("r", r)
        self.register_buffer("s", s)


def group_layers(layers: Sequence[Any], *attributes: str) -> list[dict[int, Any]]:
    """Return groups of layers with equal attributes, in ascending order of the first of these.

    A group has its layers by their numbers in the given order.

    Example:
        >>> many = [nn.Linear(5, 1), nn.Linear(4, 1), nn.Linear(5, 1)]
        >>> [list(group) for group in group_layers(many, "in_features", "bias.dtype")]
        [[1], [0, 2]]
    """
    read, groups = attrgetter(*attributes), {}
    for i, layer in enumerate(layers):
        groups.setdefault(read(layer), {})[i] = layer
    return [groups[key] for key in sorted(groups, key=itemgetter(0))]


def initial(members: int, width: int, std: float, init: Init) -> Tensor:
    """Return factors before training: N(1, std^2), or random signs +-1 (for large data sets)."""
    # Torch's default, or float32 if that is half, which has no singular value decomposition.
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    if init == "signs":
        return torch.randint(0, 2, (members, width)).to(dtype) * 2 - 1
    return 1 + std * torch.randn(members, width, dtype=dtype)


def kl_to_standard_normal(mean: Tensor, log_variance: Tensor) -> Tensor:
    r"""Return KL(N(mean, variance) || N(0, 1)) = (mean^2 + variance - 1 - log variance) / 2, by entry."""
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
