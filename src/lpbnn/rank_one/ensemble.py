"""RankOneEnsemble: a network of rank-one layers as J members; what LP-BNN and its relatives share."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lpbnn.convert.checks import Filter, widths
from lpbnn.convert.convert import convert, replace_modules
from lpbnn.convert.wrapper import Wrapper
from lpbnn.members.ensemble import MemberEnsemble
from lpbnn.members.rows import BatchMode
from lpbnn.model import Terms, with_loss
from lpbnn.options import Count, NonNegative, Options
from lpbnn.rank_one.factors import (
    FactorPosterior,
    Factors,
    Init,
    LayerFactors,
    SampledFactors,
)
from lpbnn.rank_one.layer import RankOneLayer
from lpbnn.rank_one.norms import BATCH_NORMS, MemberNorm
from lpbnn.rank_one.unshared import MemberLinear

BatchNormMode = Literal["shared", "member"]


@dataclasses.dataclass(frozen=True)
class RankOneConfig(Options):
    """Options of all rank-one methods."""

    members: Count = 4  # J, the number of members
    batch_mode: BatchMode = "split"  # in training: "split" the batch among members, or "repeat" it
    batch_norm: BatchNormMode = "shared"  # or one for each "member"
    init_std: NonNegative = 0.5  # standard deviation of the initial r and s around 1
    init: Init = "normal"  # how r and s start; "signs": random +-1
    first_init: Init | None = None  # init of the first layer alone; None: as the others
    fast_lr: NonNegative = 1.0  # learning rate of the factors, as a multiple of the network's
    include: Filter = None  # path globs or layer types to convert; None: all
    exclude: Filter = None  # path globs or layer types to leave as they are
    # paths of Linear layers that are not shared: each member has one with new weights
    unshared: str | Sequence[str] | None = None
    # module paths where the batch is expanded to members; None: found automatically
    expand_at: str | Sequence[str] | None = None


def convert_layers(
    net: nn.Module, config: RankOneConfig, make_factors: Callable[..., Factors]
) -> None:
    """Convert the chosen layers of a network to ``RankOneLayer`` or ``MemberLinear``, in place.

    Args:
        net: the network.
        config: the options.
        make_factors: makes the factors of a layer from its numbers of inputs and outputs, and ``init``.
    """
    first_init = iter([config.first_init or config.init])
    given = config.unshared or ()
    unshared = {given} if isinstance(given, str) else set(given)

    def make_layer(layer: nn.Module, path: str) -> RankOneLayer | MemberLinear:
        if path in unshared:
            return MemberLinear(layer, config.members, path)
        weight: Any = layer.weight
        init = next(first_init, config.init)
        factors = make_factors(*widths(layer), init=init).to(weight.device, weight.dtype)
        return RankOneLayer(layer, factors, path)

    conversion = convert(net, make_layer, config.include, config.exclude)
    if not unshared < set(conversion.converted):
        raise ValueError(
            f"unshared={config.unshared!r}: expected paths of converted layers, and not of all. They are "
            f"{', '.join(conversion.converted)}."
        )
    if conversion.warning:
        warnings.warn(conversion.warning, stacklevel=4)  # at lpbnn.build's caller


class RankOneEnsemble(MemberEnsemble):
    """Any network that holds ``RankOneLayer`` modules, as J members (see ``lpbnn.convert``).

    The path of one loss: compute the posterior of all layers' factors, sample them, expand the batch, run
    the network, score the rows by the likelihood, and add the method's penalties.

    In training, ``batch_mode`` "split" gives every member a slice of the batch (the price of one network),
    and "repeat" gives every member all of it (J times the compute). A "shared" batch norm sees the
    statistics of all members.

    Args:
        net: the converted network.
        config: the options; those of the conversion are not read again.
        **model_options: ``likelihood`` and ``readout``.
    """

    member_layer = Wrapper
    layers: list[RankOneLayer]
    noise_scale: Tensor  # multiplies the posterior's standard deviation in every sample

    def __init__(
        self,
        net: nn.Module,
        config: RankOneConfig,
        **model_options: Any,
    ) -> None:
        super().__init__(net, expand_at=config.expand_at, **model_options)
        self.config = config
        self.batch_mode: BatchMode = config.batch_mode
        self.fast_lr = config.fast_lr
        if config.batch_norm == "member":
            self._split_batch_norms()
            self.refresh()  # the norms need the slot
        weight: Any = self.layers[0].layer.weight
        self.register_buffer("noise_scale", torch.ones((), device=weight.device))

    def refresh(self) -> None:
        super().refresh()
        expanding: set[nn.Module] = set()  # modules inside of one with ``expand_in_layers``
        for module in self.net.modules():
            if getattr(module, "expand_in_layers", False):
                expanding.update(module.modules())
        found: list[Any] = self.layers
        for layer in found:
            layer.expands_batch = layer in expanding
        # Layers and norms of which every member has its own read the slot, but have no factors.
        self.layers = [layer for layer in found if isinstance(layer, RankOneLayer)]
        for index, layer in enumerate(self.layers):
            layer.index = index
        counts = {layer.factors.members for layer in self.layers}
        if len(counts) != 1:
            raise ValueError(
                f"the layers have {sorted(counts)} members; one ensemble has one number."
            )
        self.members = counts.pop()

    def _split_batch_norms(self) -> None:
        """Give every member its own batch norm, wherever the batch may be expanded."""
        made = {
            id(module): MemberNorm(module, self.config.members, path)
            for point in self.expand_at
            for path, module in self.net.get_submodule(point).named_modules(prefix=point)
            if type(module) in BATCH_NORMS
        }
        replace_modules(self.net, made)
        # Points inside of the present ones would leave a member's norm in front of the expanded batch.
        safe = self.expand_at
        self.expansion_choices = [safe] if safe == [""] else [safe, [""]]

    def posterior(self) -> FactorPosterior:
        """Return the posterior of the factors of all layers."""
        if not self.layers[0].in_place:
            raise RuntimeError("the network was converted back. Build a model again.")
        factors = [layer.factors for layer in self.layers]
        return type(factors[0]).posterior(factors)

    def sample(self, samples: int = 1) -> SampledFactors:
        """Sample the factors of every layer for ``samples`` draws of every member."""
        return SampledFactors(self.posterior().sample(samples, self.noise_scale))

    def probe(self, count: int) -> SampledFactors:
        generator, factors = torch.Generator().manual_seed(0), []
        for layer in self.layers:
            weight: Any = layer.layer.weight
            r, s = (
                (0.75 + 0.5 * torch.rand(count, width, generator=generator)).to(weight)
                for width in (layer.factors.inputs, layer.factors.outputs)
            )
            factors.append(LayerFactors(r, s))
        return SampledFactors(factors)

    def loss(self, x: Any, y: Any, weight: Tensor | None = None) -> Terms:
        batch = self.loss_batch(x, y, weight, self.batch_mode)
        posterior = self.posterior()
        sampled = SampledFactors(posterior.sample(1, self.noise_scale, batch.rows_per_member))
        outputs = self.run(sampled, batch.call, batch.mode)
        terms = self.likelihood.nll_terms(outputs, batch.targets, batch.weights)
        for name, term in self.penalties(posterior).items():
            terms[name] = term.to(terms["nll"].device)  # layers may be on several devices
        return with_loss(**terms)

    def penalties(self, posterior: Any) -> Terms:
        """Return what the method adds to the NLL, weighted, by name."""
        return {}

    def fast_parameters(self) -> list[nn.Parameter]:
        """Return the factors and the members' biases."""
        fast = [p for layer in self.layers for p in layer.factors.parameters()]
        return fast + [b for b in (layer.member_bias for layer in self.layers) if b is not None]
