r"""ABNN: Gaussian noise on the scales of the norms makes a trained network Bayesian in a few epochs.

$$
h = \gamma_j (1 + \sigma \epsilon) \odot \frac{u - \mathrm{mean}(u)}{\mathrm{std}(u)} + \beta_j, \quad
\epsilon \sim N(0, I), \quad p(y|x) = \tfrac1J \sum_j p(y|x, W, \gamma_j, \beta_j, \epsilon_j)
$$

$$L = \tfrac1J \sum_j \overline{- \eta_{j, y} \log p(y|x, W, \gamma_j, \beta_j, \epsilon_j)}$$

for every batch, layer, group, instance and RMS norm of the network that has a scale. $\eta_{j, c}$ is
``class_weight`` for $\lfloor \sqrt K \rfloor$ of the K classes, drawn for each member when the model
is built, and 1 for the others: it leads the members to different modes. Build the model from a trained
network, train it for a few epochs at a small learning rate, and predict with several draws.

A likelihood without classes has no $\eta$. A network without norms has noise on the outputs of its layers,
$\gamma_j (1 + \sigma \epsilon) \odot W u + b_j$ with $\gamma_j = 1$ before training.

Differences from the paper:
    The released code (torch-uncertainty) fine-tunes J whole networks and draws $\epsilon$ for every activation.
    Here the members share all weights but $\gamma_j$ and $\beta_j$, and run as rows of one batch; a member of
    a prediction is one network, with one $\epsilon$ per channel; every norm is taken, not batch norm alone; and
    the network as it was given is no additional member.

Franchi, Laurent, Leguery, Bursuc, Pilzer, Yao: Make me a BNN: a simple strategy for estimating Bayesian
uncertainty from pre-trained models, CVPR 2024.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lpbnn.convert.checks import RUNNING_NORMS, TRANSPOSED, inspect_network, widths
from lpbnn.convert.convert import convert, replace_modules
from lpbnn.convert.wrapper import Guarded, Wrapper, mean_of_copies
from lpbnn.likelihoods import Categorical, weighted_mean
from lpbnn.members.ensemble import MemberEnsemble
from lpbnn.members.passes import MemberPass, PassSlot, require_member_rows
from lpbnn.members.rows import BatchMode, expand_batch, gather
from lpbnn.model import Terms, UncertainModel, with_loss
from lpbnn.options import Count, NonNegative, Options, Positive

NORMS = (*RUNNING_NORMS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
CHANNELS_LAST = (nn.LayerNorm, nn.RMSNorm, nn.Linear)
MAX_CLASSES = 4096  # for which classes to emphasise are drawn; later ones are not emphasised


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Options of abnn."""

    members: Count = 4  # J, copies of the norms' scales and shifts
    std: NonNegative = 0.1  # sigma, of the noise
    class_weight: Positive = 2.0  # eta of the classes that a member emphasises; 1: none
    batch_mode: BatchMode = "split"  # in training: "split" the batch among members, or "repeat" it


@dataclasses.dataclass(frozen=True)
class Affines:
    """The scales and shifts of every norm for M members, with noise: (M, ...) each."""

    scales: list[Tensor]
    shifts: list[Tensor | None]

    @property
    def count(self) -> int:
        return len(self.scales[0])

    def take(self, start: int, count: int) -> "Affines":
        """Return ``count`` members, from ``start`` on."""
        part = slice(start, start + count)
        shifts = [None if shift is None else shift[part] for shift in self.shifts]
        return Affines([scale[part] for scale in self.scales], shifts)


class NoisyScale(Wrapper):
    """A norm whose scale and shift are a member's own, the scale with noise; rows are member-major.

    The wrapped norm keeps its statistics; its scale and shift move here, once per member. A layer in a norm's
    place keeps its weight; its shift is its bias, and its scale starts at 1.

    Args:
        layer: a norm with a scale, or a Linear or (transposed) convolution.
        members: J.
        std: standard deviation of the noise, relative to the scale.
        path: the norm's path in the network.

    Example:
        >>> norm = NoisyScale(nn.LayerNorm(3), members=2, std=0.1)
        >>> tuple(norm(torch.randn(10, 3)).shape)  # five examples for each of the two members
        (10, 3)
    """

    added = "the noise"
    member_scale: nn.Parameter
    member_shift: nn.Parameter | None

    def __init__(self, layer: nn.Module, members: int, std: float, path: str = "") -> None:
        super().__init__(layer, path)
        self.members, self.std = members, std
        self.channels_last = isinstance(layer, CHANNELS_LAST)
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        if weight is None:
            raise ValueError(
                f"{path or type(layer).__name__!r} computes its weight itself (parametrised, or with weight or "
                "spectral norm), so no scale can be merged into it. Fix: a network with norms."
            )
        self.is_norm = isinstance(layer, NORMS)
        scale = weight.detach()
        if self.is_norm:
            layer._parameters["weight"] = None
        else:
            scale = scale.new_ones(widths(layer)[1])
        self.member_scale = nn.Parameter(torch.stack([scale] * members), weight.requires_grad)
        self.register_parameter("member_shift", None)
        if bias is not None:
            self.member_shift = nn.Parameter(
                torch.stack([bias.detach()] * members), bias.requires_grad
            )
            layer._parameters["bias"] = None
        self.slot, self.index = PassSlot(), 0  # the model replaces both

    def __getattr__(self, name: str) -> Any:
        moved = {"weight": "member_scale", "bias": "member_shift"}
        if name in moved and self.__dict__.get("_modules", {}).get("layer") is not None:
            copies = self._parameters.get(moved[name])
            if copies is not None and getattr(self.layer, name) is None:
                return Guarded(copies[0], self._refusal(name))
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        return f"members={self.members}, std={self.std}"

    def sample(
        self, samples: int, noise_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Sample the scale and return it with the shift, (samples * J, ...), sample-major."""
        scale, shift = self.member_scale, self.member_shift
        scale = expand_batch(scale, samples)
        shift = None if shift is None else expand_batch(shift, samples)
        noise = self.std * torch.randn_like(scale)
        if noise_scale is not None:
            noise = noise * noise_scale.to(noise)
        return scale * (1 + noise), shift

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state: MemberPass | None = self.slot.get()
        if state is None:
            scale, shift = self.sample(1)
        else:
            scale, shift = state.sampled.scales[self.index], state.sampled.shifts[self.index]
        count = len(scale)
        require_member_rows(input.shape[0], count, state, self.path)
        rows = gather(self.layer(input, *args, **kwargs), count)
        shape = [count, *(1,) * (rows.dim() - 1)]
        if self.channels_last:
            shape[-(scale.dim() - 1) :] = scale.shape[1:]
        else:
            shape[2] = scale.shape[1]
        rows = rows * scale.view(shape).to(rows.dtype)
        if shift is not None:
            rows = rows + shift.view(shape).to(rows.dtype)
        return rows.flatten(0, 1)

    def restore(self) -> nn.Module:
        """Return the layer with the mean of the members' scales and shifts."""
        scale = mean_of_copies(self.member_scale)
        if self.is_norm:
            self.layer.weight = scale
        elif bool((scale != 1).any()):  # a tied weight stays tied where nothing was learned
            weight: Any = self.layer.weight
            groups = self.layer.groups if isinstance(self.layer, TRANSPOSED) else None
            if groups is None:
                merged = weight * scale.view(-1, *(1,) * (weight.dim() - 1))
            else:  # (inputs, outputs of a group, ...)
                by_group = weight.unflatten(0, (groups, -1))
                factor = scale.view(groups, 1, -1, *(1,) * (weight.dim() - 2))
                merged = (by_group * factor).flatten(0, 1)
            self.layer.weight = nn.Parameter(merged.detach(), weight.requires_grad)
        if self.member_shift is not None:
            self.layer.bias = mean_of_copies(self.member_shift)
        return super().restore()


class ABNN(MemberEnsemble):
    """J members that share a network except for the scales and shifts of its norms.

    Args:
        net: a network whose norms, or layers, are ``NoisyScale``.
        config: the options.
        model_options: ``likelihood`` (any) and ``readout``.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = build(net, Config())
        >>> sorted(model.loss(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])))
        ['loss', 'nll']
        >>> tuple(model(torch.randn(5, 4)).shape)  # (members, batch, classes)
        (4, 5, 3)
    """

    member_layer = NoisyScale
    layers: list[NoisyScale]
    noise_scale: Tensor  # multiplies sigma in every draw
    class_order: Tensor  # (J, MAX_CLASSES): the lowest numbers are of the classes to emphasise

    def __init__(self, net: nn.Module, config: Config, **model_options: Any) -> None:
        super().__init__(net, **model_options)
        self.config, self.members = config, config.members
        device = self.layers[0].member_scale.device
        self.register_buffer("noise_scale", torch.ones((), device=device))
        order = torch.stack([torch.randperm(MAX_CLASSES) for _ in range(self.members)])
        self.register_buffer("class_order", order.to(device))

    def sample(self, samples: int = 1) -> Affines:
        """Sample the scales of every norm for ``samples`` draws of every member."""
        drawn = [norm.sample(samples, self.noise_scale) for norm in self.layers]
        return Affines([scale for scale, _ in drawn], [shift for _, shift in drawn])

    def probe(self, count: int) -> Affines:
        generator = torch.Generator().manual_seed(0)

        def near_one(like: Tensor) -> Tensor:
            values = 0.75 + 0.5 * torch.rand(count, *like.shape[1:], generator=generator)
            return values.to(like)

        shifts = [norm.member_shift for norm in self.layers]
        return Affines(
            [near_one(norm.member_scale) for norm in self.layers],
            [None if shift is None else near_one(shift) - 1 for shift in shifts],
        )

    def loss(self, x: Any, y: Any, weight: Tensor | None = None) -> Terms:
        call, mode, targets, weights, _ = self.loss_batch(x, y, weight, self.config.batch_mode)
        outputs, likelihood = self.run(self.sample(), call, mode), self.likelihood
        soft = tree_leaves(targets)[0].is_floating_point()
        if soft or not isinstance(likelihood, Categorical) or not self.training:
            return with_loss(**likelihood.nll_terms(outputs, targets, weights))
        cells, counts = likelihood.nll(outputs, targets), likelihood.weights(targets)
        emphasis = self.emphasis(targets, outputs.shape[likelihood.dim]).to(cells.dtype)
        if weights is not None:
            emphasis = emphasis * weights.to(cells.dtype).view(-1, *(1,) * (cells.dim() - 1))
        return with_loss(nll=weighted_mean((cells * emphasis).sum(), (counts * emphasis).sum()))

    def emphasis(self, labels: Tensor, classes: int) -> Tensor:
        """Return eta for the labels of all rows, (rows, ...), member-major."""
        order = self.class_order[:, :classes]
        chosen = order.argsort(1)[:, : math.isqrt(classes)]
        eta = torch.ones(self.members, classes, device=labels.device)
        eta.scatter_(1, chosen, self.config.class_weight)
        rows = labels.long().clamp(0, classes - 1).view(self.members, -1)  # ignored labels count 0
        return eta.gather(1, rows).view(labels.shape)

    def fast_parameters(self) -> list[nn.Parameter]:
        """Return the scales and shifts of the members."""
        found = [p for norm in self.layers for p in (norm.member_scale, norm.member_shift)]
        return [p for p in found if p is not None]


def build(net: nn.Module, config: Config, **model_options: Any) -> UncertainModel:
    """Put noise on the norms of ``net``, in place; on its layers, if it has no norms."""
    found = {
        path: module
        for path, module in net.named_modules()
        if path and isinstance(module, NORMS) and module._parameters.get("weight") is not None
    }
    if not found:
        convert(net, lambda layer, path: NoisyScale(layer, config.members, config.std, path))
        return ABNN(net, config, **model_options)
    hidden = inspect_network(net).hidden
    for path, module in found.items():
        if id(module) in hidden:
            raise ValueError(
                f"{path!r} is also kept in the plain attribute {hidden[id(module)]!r}, where it cannot be "
                "replaced. Use nn.ModuleList or nn.ModuleDict there."
            )
    made = {
        id(module): NoisyScale(module, config.members, config.std, path)
        for path, module in found.items()
    }
    replace_modules(net, made)
    return ABNN(net, config, **model_options)
