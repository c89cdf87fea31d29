"""RankOneEnsemble: a network of rank-one layers as J members; what LP-BNN and its relatives share."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lpbnn.convert.convert import replace_modules
from lpbnn.convert.wrapper import Wrapper
from lpbnn.members.ensemble import MemberEnsemble
from lpbnn.members.rows import BatchMode
from lpbnn.model import Terms, total
from lpbnn.rank_one.factors import FactorPosterior, LayerFactors, SampledFactors, device_of
from lpbnn.rank_one.layer import RankOneLayer, with_biases
from lpbnn.rank_one.norms import BATCH_NORMS, MemberNorm

BatchNormMode = Literal["shared", "member"]


class RankOneEnsemble(MemberEnsemble):
    """Any network that holds ``RankOneLayer`` modules, as J members (see ``lpbnn.convert``).

    The path of one loss: compute the posterior of all layers' factors, sample them, expand the batch, run
    the network, score the rows by the likelihood, and add the method's penalties.

    Args:
        net: the converted network.
        batch_mode: in training, "split" gives every member a slice of the batch (the price of one
            network), "repeat" gives every member all of it (J times the compute).
        batch_norm: "shared" by the members (each sees the statistics of all), or one per "member".
        fast_lr: learning rate of the factors and biases, as a multiple of the network's.
        **options: of ``MemberEnsemble``.
    """

    noise_scale: Tensor  # multiplies the posterior's standard deviation in every sample

    def __init__(
        self,
        net: nn.Module,
        *,
        batch_mode: BatchMode = "split",
        batch_norm: BatchNormMode = "shared",
        fast_lr: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(net, **options)
        self.batch_mode: BatchMode = batch_mode
        self.fast_lr = fast_lr
        self.layers: list[RankOneLayer] = []
        self.refresh()
        if batch_norm == "member":
            self._split_batch_norms()
        noise_scale = torch.ones((), device=device_of(self.layers[0].factors))
        self.register_buffer("noise_scale", noise_scale)

    def refresh(self) -> None:
        """Find the converted layers and norms again, after the user replaced some of them."""
        found = [m for m in self.net.modules() if isinstance(m, Wrapper) and m.in_place]
        self.layers = [module for module in found if isinstance(module, RankOneLayer)]
        if not self.layers:
            raise RuntimeError("the network has no converted layer. Build a model again.")
        counts = {layer.factors.members for layer in self.layers}
        if len(counts) != 1:
            raise ValueError(
                f"the layers have {sorted(counts)} members; one ensemble has one number."
            )
        self.members = counts.pop()
        for index, layer in enumerate(self.layers):
            layer.slot, layer.index, layer.expands_batch = self.slot, index, False
        for module in self.net.modules():
            if getattr(module, "expand_in_layers", False):
                for layer in module.modules():
                    if isinstance(layer, RankOneLayer):
                        layer.expands_batch = True
        for norm in found:
            if isinstance(norm, MemberNorm):
                norm.slot = self.slot

    def _split_batch_norms(self) -> None:
        """Give every member its own batch norm, wherever the batch may be expanded."""
        made = {
            id(module): MemberNorm(module, self.members, path, self.slot)
            for point in self.expand_at
            for path, module in self.net.get_submodule(point).named_modules(prefix=point)
            if type(module) in BATCH_NORMS
        }
        replace_modules(self.net, made)
        # Points inside of the present ones would leave a member's norm in front of the expanded batch.
        safe = self.expand_at
        self.expansion_choices = [safe] if safe == [""] else [safe, [""]]

    def is_converted(self, module: nn.Module) -> bool:
        return isinstance(module, RankOneLayer)

    def posterior(self) -> FactorPosterior:
        """Return the posterior of the factors of all layers."""
        if not self.layers[0].in_place:
            raise RuntimeError("the network was converted back. Build a model again.")
        factors = [layer.factors for layer in self.layers]
        return type(factors[0]).posterior(factors)

    def sample(self, samples: int = 1) -> SampledFactors:
        """Sample the factors of every layer for ``samples`` draws of every member."""
        return with_biases(self.layers, self.posterior().sample(samples, self.noise_scale))

    def probe(self, count: int) -> SampledFactors:
        generator, factors = torch.Generator().manual_seed(0), []
        for layer in self.layers:
            weight: Any = layer.layer.weight
            r, s = (
                (0.75 + 0.5 * torch.rand(count, width, generator=generator)).to(weight)
                for width in (layer.factors.inputs, layer.factors.outputs)
            )
            bias = layer.member_bias
            if bias is not None:  # fewer members than asked for: from the first again
                bias = bias[[i % len(bias) for i in range(count)]]
            factors.append(LayerFactors(r, s, bias))
        return SampledFactors(factors)

    def loss(self, x: Any, y: Any, weight: Tensor | None = None) -> Terms:
        training = self.training_call(x, y, weight, self.batch_mode)
        posterior = self.posterior()
        sampled = with_biases(self.layers, posterior.sample(1, self.noise_scale, training.rows))
        outputs = self.run(sampled, training.call, training.mode)
        terms = self.likelihood.nll_terms(outputs, training.targets, training.weights)
        for name, term in self.penalties(posterior).items():
            terms[name] = term.to(terms["nll"].device)  # layers may be on several devices
        return total(**terms)

    def penalties(self, posterior: Any) -> Terms:
        """Return what the method adds to the NLL, weighted, by name."""
        return {}

    def _advice(self, error: Exception, batch: int) -> str:
        has_norms = any(isinstance(module, MemberNorm) for module in self.net.modules())
        if "more than 1 value per channel" in str(error) and has_norms:
            return (
                f"{self.members} members share a batch of {batch}, and each normalises its own part of "
                "it. Fix: larger batches (drop_last=True where only the last one is small), "
                "batch_mode='repeat', or batch_norm='shared'."
            )
        return super()._advice(error, batch)

    def fast_parameters(self) -> list[nn.Parameter]:
        """Return the factors and the members' biases."""
        fast = [p for layer in self.layers for p in layer.factors.parameters()]
        return fast + [b for b in (layer.member_bias for layer in self.layers) if b is not None]
