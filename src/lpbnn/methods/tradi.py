r"""TRADI: a Gaussian over every weight, tracked along the training of one network.

A Gaussian for every weight is estimated from the weights that an ordinary training passes through.
Two scalar Kalman filters per trainable weight w, one for its mean and one for its variance, are updated
after every optimizer step t (learning rate $\eta$, gradient g):

$$
\text{state:} \quad \mu_t = \mu_{t-1} - \eta g_t + \epsilon_\mu, \quad
\sigma^2_t = \sigma^2_{t-1} + (\eta g_t)^2 + \epsilon_\sigma
\qquad \text{measured:} \quad w_t, \quad (w_t - \mu_t)^2
$$

$$
\mu_t = (1 - K_t)(\mu_{t-1} - \eta g_t) + K_t w_t, \quad
\sigma^2_t = (1 - K'_t)(\sigma^2_{t-1} + (\eta g_t)^2) + K'_t (w_t - \mu_t)^2
$$

$$K_t = 1 / n_t, \quad n_t = 1 + \frac{n_{t-1}}{1 + n_{t-1} Q / R}, \quad n_0 = 0$$

Q is the noise of the state (1e-4 for the mean, 5e-5 for the variance), R = 10 that of a measurement, and n
the number of steps that the filter remembers (the Riccati equation with P = R / n). K_1 = 1, so the filter
starts as the plain average over the steps and ends as a moving average over the last 317 (mean) and 448
(variance) steps. If ``after_step`` is called without the learning rate, the state is a random walk that
follows the measurements alone. Under momentum or Adam, whose steps are far from $\eta g$, that changes little.

``after_fit`` draws J networks. Weights of one tensor are correlated by a Gaussian kernel of their means,
$\Sigma_{ik} = \sigma_i \sigma_k \exp(-\ell^2 (\mu_i - \mu_k)^2 / 2)$, through D random Fourier
features, so that no covariance matrix is formed:

$$
w_i = \mu_i + \sigma_i \sqrt{2 / D} \sum_d \cos(\theta_d \mu_i + b_d) \, z_d, \quad
\theta_d \sim N(0, \ell^2), \; b_d \sim U(0, 2\pi), \; z_d \sim N(0, 1)
$$

with one phase b_d per feature for all weights. Every drawn network gets its own batch norm statistics from
the training data.

Differences from the released code:
    It starts the filters from the prior of the weights and needs 1,000 steps to leave it. It draws a phase per
    weight, which makes the weights independent.

Franchi, Bursuc, Aldea, Dubuisson, Bloch: TRADI: tracking deep neural network weight distributions, ECCV
2020.
"""

import dataclasses
import math
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from lpbnn.members.call import as_call, batch_size, copy_tensors
from lpbnn.model import NotFittedWarning, Outputs, Pass, UncertainModel, stack_members
from lpbnn.options import Count, NonNegative, Options, Positive
from lpbnn.precision import WideBuffers, at_least_float32
from lpbnn.predict import inputs_of

ONE_THREAD = threading.RLock()  # functional_call replaces the network's tensors while it runs
UNTRACKED = (
    "tradi has tracked no training step, so one network predicts, without epistemic uncertainty. Fix: "
    "call model.after_step(lr) after every optimizer step and model.after_fit(batches) at the end."
)
UNDRAWN = (
    "tradi has tracked a training but drawn no networks, so one network predicts, without epistemic "
    "uncertainty. Fix: call model.after_fit(batches) at the end of the training. A loop that validates "
    "before that may call model.before_epoch(epoch, epochs), or ignore lpbnn.model.NotFittedWarning."
)


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Options of tradi."""

    members: Count = 4  # J, networks drawn after training
    features: Count = 10  # D, random Fourier features
    # l; the larger, the less weights of different means are correlated
    frequency: NonNegative = 1.0
    mean_noise: NonNegative = 1e-4  # Q of the mean
    variance_noise: NonNegative = 5e-5  # Q of the variance
    measurement_noise: Positive = 10.0  # R of both


class NamedTensors(nn.Module):
    """Tensors under the names of a network's parameters, as buffers: moved, copied and saved with it.

    Example:
        >>> list(NamedTensors({"layer.weight": torch.zeros(2)}).by_name())
        ['layer.weight']
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(buffer_name(name), tensor)

    def by_name(self) -> dict[str, Tensor]:
        """Return the tensors under the names that they were given with."""
        return {name.replace("/", "."): tensor for name, tensor in self.named_buffers()}


class Moments(WideBuffers, NamedTensors):
    """Tracked means or variances: single updates are too small for half precision."""


def buffer_name(name: str) -> str:
    """Return the name of the buffer for a parameter: torch allows no dots in names of buffers."""
    return name.replace(".", "/")


class TRADI(UncertainModel):
    """One network in training, J networks after ``after_fit`` has drawn them.

    Before that, and in training mode, a pass is that of the network itself (``members`` is 1). The tracked
    moments are two more copies of the trainable weights, the drawn networks J more. Both are in the state
    dict, and a new model loads a state dict with or without drawn networks.

    Without drawn networks, ``predict`` warns once (``NotFittedWarning``), except between the first call of
    ``before_epoch(epoch, epochs)`` and the last epoch. A training loop that validates after its last epoch
    and before ``after_fit`` ignores the category with Python's ``warnings``.

    Args:
        net: any network with trainable weights.
        config: the options.
        model_options: ``likelihood`` (any) and ``readout``.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = TRADI(net, Config(members=5))
        >>> x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for _ in range(3):
        ...     sgd.zero_grad()
        ...     model.loss(x, y)["loss"].backward()
        ...     sgd.step()
        ...     model.after_step(lr=0.1)
        >>> model.after_fit([(x, y)])
        >>> tuple(model.eval()(x).shape)
        (5, 6, 3)
    """

    stochastic = False
    memory: Tensor
    ratios: Tensor
    _epochs_left = 0  # after the current one, as before_epoch said; no step reads it
    _warned = ""  # the last warning

    def __init__(self, net: nn.Module, config: Config, **model_options: Any) -> None:
        super().__init__(net, **model_options)
        weights = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
        if not weights:
            raise ValueError(
                "tradi tracks the trainable weights, and the network has none. Fix: "
                "net.requires_grad_(True), at least for a part."
            )
        self.config = config
        means = {name: at_least_float32(w).clone() for name, w in weights.items()}
        self.mean = Moments(means)
        self.variance = Moments({name: torch.zeros_like(mean) for name, mean in means.items()})
        noises = (config.mean_noise, config.variance_noise)
        ratios = at_least_float32(next(iter(weights.values())).new_tensor(noises))
        self.register_buffer("ratios", ratios / config.measurement_noise, persistent=False)  # Q / R
        self.register_buffer("memory", torch.zeros_like(ratios))  # n of the mean, of the variance
        self.drawn = NamedTensors({})  # (J, ...) each: weights and batch norm statistics

    @property
    def is_drawn(self) -> bool:
        """True if ``after_fit`` has drawn networks, or a state dict with them was loaded."""
        return len(self.drawn._buffers) > 0

    def outputs(self, *args: Any, **kwargs: Any) -> Outputs:
        if self.training or not self.is_drawn:
            return stack_members([self.run_network(*args, **kwargs)])
        return self.member_outputs(range(self.members), *args, **kwargs)

    def member_outputs(self, members: Iterable[int], *args: Any, **kwargs: Any) -> Outputs:
        """Return the outputs of drawn networks, (members, B, ...).

        They run one after another, to save memory, and in one thread at a time.
        """
        batch_size(args, kwargs)
        drawn = self.drawn.by_name()
        outputs = []
        with nullcontext() if torch.compiler.is_compiling() else ONE_THREAD:
            for j in members:
                tensors = {name: stacked[j] for name, stacked in drawn.items()}
                # A network may change its inputs in place: every member gets copies.
                own = copy_tensors((args, kwargs))
                outputs.append(self.readout(functional_call(self.net, tensors, *own)))
        return stack_members(outputs)

    def passes(self, samples: int, width: int) -> Iterator[Pass]:
        if not self.is_drawn:
            self._warn_that_nothing_is_drawn()
            yield self
            return
        for start in range(0, self.members, width):
            members = range(start, min(start + width, self.members))
            yield partial(self.member_outputs, members)

    def _warn_that_nothing_is_drawn(self) -> None:
        if self._epochs_left or self._warned == UNDRAWN:
            return
        missing = UNDRAWN if self.memory.any() else UNTRACKED
        if missing != self._warned:
            self._warned = missing
            warnings.warn(missing, NotFittedWarning, stacklevel=5)  # the caller of predict

    def before_epoch(self, epoch: int, epochs: int) -> None:
        """Remember whether more epochs follow, in which a prediction is a validation."""
        self._epochs_left = epochs - epoch - 1

    @torch.no_grad()
    def after_step(self, lr: float | Tensor = 0.0) -> None:
        """Update both filters; with ``lr``, the gradients of the step must still be there."""
        weights = dict(self.net.named_parameters())
        means, variances = self.mean.by_name(), self.variance.by_name()
        known = isinstance(lr, Tensor) or lr != 0  # a tensor is not read: it may be on a GPU
        gradients = [g for name in means if known and (g := weights[name].grad) is not None]
        if known and not gradients:
            raise RuntimeError(
                f"after_step(lr={lr!r}) reads the gradients of the step, and there are none. Fix: call "
                "it between optimizer.step() and zero_grad(), or without lr."
            )
        # A GradScaler skips a step with infinite gradients.
        taken = nn.utils.get_total_norm(gradients, math.inf).isfinite()
        self.memory.copy_(1 + self.memory / (1 + self.memory * self.ratios))
        for name, mean in means.items():
            weight, variance = weights[name], variances[name]
            gain_mean, gain_variance = self.memory.to(mean).reciprocal()
            if known and weight.grad is not None:
                step = (weight.grad.to(mean.dtype) * lr).where(taken.to(mean.device), 0.0)
                mean.sub_(step)
                variance.addcmul_(step, step)
            mean.lerp_(weight.to(mean.dtype), gain_mean)
            variance.lerp_((weight - mean).square(), gain_variance)

    @torch.no_grad()
    def after_fit(self, batches: Iterable[Any]) -> None:
        """Draw the J networks, and compute batch norm statistics for each in one pass over the data.

        Args:
            batches: the training data; read only if the network has batch norm. As for ``predict``, every
                batch is the inputs, or a pair (inputs, targets); several inputs are a tuple or mapping of
                their own, ((a, b), y) or {"a": a, "b": b}.
        """
        if not self.memory.any():
            raise RuntimeError(
                "tradi has tracked no weights. Fix: call model.after_step() after every optimizer "
                "step, then model.after_fit(batches)."
            )
        count, variances = self.config.members, self.variance.by_name()
        weights = dict(self.net.named_parameters())
        drawn = {
            name: torch.stack(
                [self._draw(mean, variances[name]).to(weights[name].dtype) for _ in range(count)]
            )
            for name, mean in self.mean.by_name().items()
        }
        norms = {
            path: module
            for path, module in self.net.named_modules()
            if isinstance(module, _BatchNorm) and module.running_mean is not None
        }
        for path, norm in norms.items():
            for name, buffer in norm.named_buffers(path):
                drawn[name] = torch.stack([buffer] * count)
        self._set_drawn(drawn)
        try:
            if norms and not self._measure_statistics(list(norms.values()), batches):
                raise ValueError(
                    "after_fit was given no batches, and batch norm needs the training data for the "
                    "drawn networks. Fix: model.after_fit(train_batches)."
                )
        except BaseException:
            self._set_drawn({})
            raise

    def _draw(self, mean: Tensor, variance: Tensor) -> Tensor:
        count = self.config.features
        # Few numbers, from the CPU's generator: the same networks on every device.
        theta = (self.config.frequency * torch.randn(count, device="cpu")).tolist()
        phase = (2 * math.pi * torch.rand(count, device="cpu")).tolist()
        heights = torch.randn(count, device="cpu").tolist()
        wave = torch.zeros_like(mean)
        for d, z in enumerate(heights):  # one after another: memory of one, not of D
            wave.add_(torch.cos(theta[d] * mean + phase[d]), alpha=z)
        return mean + (variance * (2 / count)).sqrt() * wave

    def _measure_statistics(self, norms: list[_BatchNorm], batches: Iterable[Any]) -> int:
        """Set the drawn running statistics to averages over all examples; return their number."""
        momenta, seen = [norm.momentum for norm in norms], 0
        try:
            with self.evaluating():
                for norm in norms:
                    norm.train()
                for batch in batches:
                    args, kwargs = as_call(inputs_of(batch))
                    examples = batch_size(args, kwargs)
                    seen += examples
                    for norm in norms:
                        norm.momentum = examples / seen  # every example has the same weight
                    self.member_outputs(range(self.members), *args, **kwargs)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        return seen

    def _set_drawn(self, drawn: dict[str, Tensor]) -> None:
        self.drawn = NamedTensors(drawn)
        self.members = len(next(iter(drawn.values()))) if drawn else 1

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Allocate as many drawn networks as the state dict has."""
        drawn = {}
        for name, own in (*self.net.named_parameters(), *self.net.named_buffers()):
            saved = state_dict.get(f"{prefix}drawn.{buffer_name(name)}")
            if saved is not None:
                drawn[name] = torch.empty(saved.shape, dtype=own.dtype, device=own.device)
        self._set_drawn(drawn)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def build(net: nn.Module, config: Config, **model_options: Any) -> TRADI:
    """Track the trainable weights of ``net``."""
    return TRADI(net, config, **model_options)
