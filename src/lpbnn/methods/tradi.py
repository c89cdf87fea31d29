r"""TRADI: a Gaussian over every weight, tracked along the training of one network.

Two scalar Kalman filters per trainable weight w (batch norm's too), one for its mean and one for its
variance, both fed after every optimizer step t (learning rate :math:`\eta`, gradient g):

.. math::
    \text{state:} \quad \mu_t = \mu_{t-1} - \eta g_t + \epsilon_\mu, \quad
        \sigma^2_t = \sigma^2_{t-1} + (\eta g_t)^2 + \epsilon_\sigma
    \qquad \text{measured:} \quad w_t, \quad (w_t - \mu_t)^2

    \mu_t = (1 - K_t)(\mu_{t-1} - \eta g_t) + K_t w_t, \quad
    \sigma^2_t = (1 - K'_t)(\sigma^2_{t-1} + (\eta g_t)^2) + K'_t (w_t - \mu_t)^2

    K_t = 1 / n_t, \quad n_t = 1 + \frac{n_{t-1}}{1 + n_{t-1} Q / R}, \quad n_0 = 0

Q is the noise of the state (1e-4 for the mean, 5e-5 for the variance), R = 10 that of a measurement, n
the steps that the filter remembers (the Riccati equation, with P = R / n). Nothing is known before the
first measurement, so K_1 = 1: the filter starts as the plain average over the steps and ends as a moving
one over the last n = 317 (mean) and 448 (variance) of them.
(The released code starts from the weights' prior instead and takes 1,000 steps to leave it.)

:math:`\eta` is known where it is given, ``after_step(lr)``. Without it the state is a random walk, and the
measurements alone lead the filter, as they nearly do under momentum or Adam, whose steps are far from
:math:`\eta g`.

After training (``after_fit``), J networks are drawn. Weights of one tensor are correlated by a Gaussian
kernel of their means, :math:`\Sigma_{ik} = \sigma_i \sigma_k \exp(-\ell^2 (\mu_i - \mu_k)^2 / 2)`,
through D random Fourier features, so that no covariance matrix is ever formed:

.. math::
    w_i = \mu_i + \sigma_i \sqrt{2 / D} \sum_d \cos(\theta_d \mu_i + b_d) \, z_d, \quad
    \theta_d \sim N(0, \ell^2), \; b_d \sim U(0, 2\pi), \; z_d \sim N(0, 1)

with one phase b_d per feature for all weights (one per weight, as in the released code, would make them
independent). Each drawn network gets batch norm statistics of its own from the training data, and
predictions are averaged over the J.

Franchi, Bursuc, Aldea, Dubuisson, Bloch: TRADI: tracking deep neural network weight distributions, ECCV
2020.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from lpbnn.methods._wide import Moments, Tensors, WideBuffers
from lpbnn.model import Model, Pass, as_call, at_least_one, batch_size
from lpbnn.predict import evaluating
from lpbnn.rank_one.factors import at_least_float32

UNTRACKED = (
    "tradi has tracked no step of a training, so one network answers, without epistemic uncertainty. Fix: "
    "call model.after_step(lr) after every optimizer step and model.after_fit(batches) at the end."
)
UNDRAWN = (
    "tradi has tracked a training and drawn no networks from it, so one network answers, without epistemic "
    "uncertainty. Fix: call model.after_fit(batches) at the end of the training. (In a validation before "
    "it that is as it should be; model.before_epoch(epoch, epochs) tells that there is more to come.)"
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of tradi: the filters that track the weights, and the networks drawn from what they found."""

    num_data: int | None = None  # not needed: taken so that methods can be swapped
    members: int = 4  # J, networks drawn after training
    features: int = 10  # D, random Fourier features
    frequency: float = 1.0  # l: the larger, the sooner weights of different means are independent
    mean_noise: float = 1e-4  # Q of the mean
    variance_noise: float = 5e-5  # Q of the variance
    measurement_noise: float = 10.0  # R of both

    def __post_init__(self) -> None:
        for name in ("members", "features"):
            at_least_one(name, getattr(self, name))
        for name in ("frequency", "mean_noise", "variance_noise"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: expected a number of at least 0."
                )
        if not self.measurement_noise > 0:
            raise ValueError(f"measurement_noise={self.measurement_noise!r}: expected above 0.")


class Tracked(WideBuffers, Model):
    """One network in training, J networks once ``after_fit`` has drawn them.

    Until then, and in training mode, a pass is that of the network itself (``members`` is 1). The
    tracked moments are two further copies of the trainable weights, the drawn networks J; both are in
    the state dict, and a model just built takes either kind of state dict.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = Tracked(net, Config(members=5))
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
    in_rows = False
    memory: Tensor
    ratios: Tensor
    _looked = False  # whether a prediction has looked for tracked steps, since the last of them
    _told = ""  # what a prediction last said to be missing
    _more_epochs = False  # whether the training loop has said that this is not the last one

    def __init__(self, net: nn.Module, config: Config, **options: Any) -> None:
        super().__init__(net, **options)
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
        self.drawn = Tensors({})  # (J, ...) each: weights and batch norm statistics

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        batch_size(args, kwargs)
        if self.training or not self.is_drawn:
            return self.readout(self.net(*args, **kwargs)).unsqueeze(0)
        return self.of_members(range(self.members), *args, **kwargs)

    def of_members(self, which: Iterable[int], *args: Any, **kwargs: Any) -> Tensor:
        """Outputs of the drawn networks ``which``, one after the other: memory of one."""
        drawn = self.drawn.by_name()
        outputs = []
        for j in which:
            tensors = {name: of_all[j] for name, of_all in drawn.items()}
            outputs.append(self.readout(functional_call(self.net, tensors, args, kwargs)))
        return torch.stack(outputs)

    @property
    def is_drawn(self) -> bool:
        return len(self.drawn._buffers) > 0

    def passes(self, samples: int, width: int) -> Iterator[Pass]:
        if not self.is_drawn:
            self._tell_what_is_missing()
            yield self
            return
        for start in range(0, self.members, width):
            yield partial(self.of_members, range(start, min(start + width, self.members)))

    def _tell_what_is_missing(self) -> None:
        if self._looked or self.calls_all_hooks:  # not at every prediction: on a GPU a look waits
            return
        self._looked = True
        missing = UNDRAWN if self.memory.any() else UNTRACKED
        if missing != self._told and not (missing == UNDRAWN and self._more_epochs):
            self._told = missing
            warnings.warn(missing, UserWarning, stacklevel=4)  # the caller of predict

    def before_epoch(self, epoch: int, epochs: int) -> None:
        self._more_epochs = epoch + 1 < epochs

    def phase(self) -> object:
        return None  # no step reads what an epoch sets

    @torch.no_grad()
    def after_step(self, lr: float | Tensor = 0.0) -> None:
        """One step of both filters; with ``lr``, the gradients of the step must still be there."""
        weights = dict(self.net.named_parameters())
        means, variances = self.mean.by_name(), self.variance.by_name()
        known = isinstance(lr, Tensor) or lr != 0  # a tensor is not read: it may be on a GPU
        gradients = [g for name in means if known and (g := weights[name].grad) is not None]
        if known and not gradients:
            raise RuntimeError(
                f"after_step(lr={lr!r}) reads the gradients of the step, and there are none. Fix: call "
                "it between optimizer.step() and zero_grad(), or without lr."
            )
        self._looked = False
        # A step with infinite gradients was none: a GradScaler left it out.
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
    def after_fit(self, batches: Iterable[tuple[Any, Tensor]]) -> None:
        """Draw the J networks and measure batch norm's statistics of each, in one pass over the data."""
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
        self._keep(drawn)
        if norms and not self._measure(list(norms.values()), batches):
            self._keep({})
            raise ValueError(
                "after_fit was given no batches, and batch norm needs the training data for the drawn "
                "networks. Fix: model.after_fit(train_batches)."
            )

    def _draw(self, mean: Tensor, variance: Tensor) -> Tensor:
        count = self.config.features
        # A few numbers, from the generator of the CPU: the same networks on every device.
        theta = (self.config.frequency * torch.randn(count, device="cpu")).tolist()
        phase = (2 * math.pi * torch.rand(count, device="cpu")).tolist()
        wave = torch.zeros_like(mean)
        heights = torch.randn(count, device="cpu").tolist()
        for d, z in enumerate(heights):  # one by one: memory of one, not of D
            wave.add_(torch.cos(theta[d] * mean + phase[d]), alpha=z)
        return mean + (variance * (2 / count)).sqrt() * wave

    def _measure(self, norms: list[_BatchNorm], batches: Iterable[tuple[Any, Tensor]]) -> int:
        """Cumulative averages of the batch statistics, and over how many examples."""
        momenta, seen = [norm.momentum for norm in norms], 0
        try:
            with evaluating(self):
                for norm in norms:
                    norm.train()
                for x, _ in batches:
                    args, kwargs = as_call(x)
                    examples = batch_size(args, kwargs)
                    seen += examples
                    for norm in norms:
                        norm.momentum = examples / seen  # every example has the same weight
                    self.of_members(range(self.members), *args, **kwargs)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        return seen

    def _keep(self, drawn: dict[str, Tensor]) -> None:
        self.drawn = Tensors(drawn)
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
        """Makes room for the drawn networks of the state dict: as many as it has, or none."""
        drawn = {}
        for name, own in (*self.net.named_parameters(), *self.net.named_buffers()):
            saved = state_dict.get(f"{prefix}drawn.{name.replace('.', '/')}")
            if saved is not None:
                drawn[name] = torch.empty(saved.shape, dtype=own.dtype, device=own.device)
        self._keep(drawn)
        self._looked = False
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def build(net: nn.Module, config: Config, **model_options: Any) -> Model:
    return Tracked(net, config, **model_options)
