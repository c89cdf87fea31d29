r"""How the fast weights r and s come to be: all that tells the rank-one methods apart.

A layer with m inputs and p outputs has, for each of its J members, r_j in R^m on the input side and
s_j in R^p on the output side. ``draw(samples)`` gives r (samples * J, m) and s (samples * J, p),
sample-major; in training r may also be drawn for every row of the batch, (rows, m), rows member-major.
Everything here is a pure function of the parameters: no forward pass leaves a loss behind, so the terms
can be read at any time, before the first pass too.

The work is written over a stack of layers, because a network has dozens of them and each is tiny:
``draw_all`` serves those of equal width with a handful of batched products. One layer is a stack of one.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpbnn.likelihoods import at_least_float32

Init = Literal["normal", "signs"]
INITS: tuple[str, ...] = get_args(Init)


def initial(members: int, width: int, spread: float, init: Init) -> Tensor:
    """Fast weights before training: N(1, spread^2), or random signs +-1 (for large data sets)."""
    if init == "signs":
        return torch.randint(0, 2, (members, width)).to(initial_dtype()) * 2 - 1
    return 1 + spread * torch.randn(members, width, dtype=initial_dtype())


def initial_dtype() -> torch.dtype:
    """Torch's default, and float32 where that is half: there is no singular value decomposition in half."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Factors are small and multiply everything: they are computed in float32 under autocast."""
    if device.type == "meta":  # it has no autocast to be left
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


IN_ONE_KERNEL = 8  # tensors that a compiler stacks at once


def stack(many: Sequence["Factors"], name: str) -> Tensor:
    """The parameter ``name`` of every layer's factors, stacked, in float32 or better."""
    tensors = [factors.tensor(name) for factors in many]
    if torch.compiler.is_compiling() and len(tensors) > IN_ONE_KERNEL:
        # Of more tensors than this the compiler makes a kernel each; of stacks of stacks, one for all.
        parts = range(0, len(tensors), IN_ONE_KERNEL)
        return at_least_float32(
            torch.cat([torch.stack(tensors[i : i + IN_ONE_KERNEL]) for i in parts])
        )
    if len(tensors) == 1:
        return at_least_float32(tensors[0].unsqueeze(0))  # no copy
    return at_least_float32(torch.stack(tensors))


class Factors(nn.Module):
    """The contract: J vectors r and J vectors s, drawn anew or fixed."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.members, self.inputs, self.outputs = members, inputs, outputs

    def tensor(self, path: str) -> Tensor:
        """The parameter or buffer at ``path``."""
        found: Any = self
        for name in path.split("."):  # a compiler follows this faster than operator.attrgetter
            found = getattr(found, name)
        return found

    def extra_repr(self) -> str:
        return f"members={self.members}, inputs={self.inputs}, outputs={self.outputs}"

    def draw(self, samples: int = 1) -> tuple[Tensor, Tensor]:
        """r (samples * J, m) and s (samples * J, p)."""
        return type(self).draw_stack([self], samples)[0]

    @classmethod
    def draw_stack(cls, many: Sequence["Factors"], samples: int) -> list[tuple[Tensor, Tensor]]:
        """``draw`` for layers of equal ``stack_key``, together."""
        raise NotImplementedError

    def stack_key(self) -> tuple[object, ...]:
        """Layers with the same key may be drawn in one stack."""
        r: Tensor = getattr(self, self.stack_r)
        return (type(self), self.members, self.inputs, self.stack_s, r.device, r.dtype)

    stack_r = "r"  # a tensor that says where the factors lie, and in which precision

    # Only the Gaussian draws s, so only there must the outputs agree.
    @property
    def stack_s(self) -> object:
        return None

    def mean(self) -> tuple[Tensor, Tensor]:
        """The mean of r (J, m) and of s (J, p) under the posterior."""
        raise NotImplementedError


def draw_all(many: Sequence[Factors], samples: int = 1) -> list[tuple[Tensor, Tensor]]:
    """One draw of every layer, in the layers' order, computed stack by stack."""
    drawn: dict[int, tuple[Tensor, Tensor]] = {}
    for indices in stacked(many):
        members = [many[i] for i in indices]
        drawn.update(zip(indices, type(members[0]).draw_stack(members, samples), strict=True))
    return [drawn[i] for i in range(len(many))]


def stacked(many: Sequence[Factors]) -> list[list[int]]:
    """Which layers may be computed together: indices, groups in order of first appearance.

    Within a group those of equal width are neighbours.
    """
    groups: dict[object, list[int]] = {}
    for i, factors in enumerate(many):
        groups.setdefault(factors.stack_key(), []).append(i)
    return [sorted(group, key=lambda i: many[i].inputs) for group in groups.values()]


class PointFactors(Factors):
    r"""BatchEnsemble: r_j and s_j are plain parameters, W_j = W * (r_j s_j^T).

    Wen, Tran, Ba: BatchEnsemble, ICLR 2020.

    Example:
        >>> r, s = PointFactors(members=4, inputs=3, outputs=2).draw()
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
        spread: float = 0.5,
        init: Init = "normal",
    ) -> None:
        super().__init__(members, inputs, outputs)
        self.r = nn.Parameter(initial(members, inputs, spread, init))
        self.s = nn.Parameter(initial(members, outputs, spread, init))

    @classmethod
    def draw_stack(cls, many: Sequence[Factors], samples: int) -> list[tuple[Tensor, Tensor]]:
        return [(repeat(f.r, samples), repeat(f.s, samples)) for f in many]  # type: ignore[arg-type]

    def mean(self) -> tuple[Tensor, Tensor]:
        return self.r, self.s


class FixedFactors(PointFactors):
    """Factors drawn once and kept as buffers: a frozen ensemble."""

    def __init__(self, r: Tensor, s: Tensor) -> None:
        Factors.__init__(self, r.shape[0], r.shape[1], s.shape[1])
        self.register_buffer("r", r)
        self.register_buffer("s", s)


class GaussianFactors(Factors):
    r"""Rank-1 BNN: r_j ~ N(mu, sigma^2) and s_j ~ N(mu, sigma^2), sigma = softplus(rho).

    Dusenberry et al.: Efficient and scalable Bayesian neural nets with rank-1 factors, ICML 2020.
    ``kl`` is KL(q || N(1, prior_std^2)), summed over the entries of r and s, averaged over members.

    Example:
        >>> factors = GaussianFactors(members=4, inputs=3, outputs=2)
        >>> bool((factors.draw()[0] != factors.draw()[0]).all())
        True
    """

    def __init__(
        self,
        members: int,
        inputs: int,
        outputs: int,
        *,
        spread: float = 0.5,
        init: Init = "normal",
        std: float = 0.1,
        prior_std: float = 0.1,
    ) -> None:
        super().__init__(members, inputs, outputs)
        rho = torch.tensor(std).expm1().log().item()  # softplus(rho) = std
        self.prior_std = prior_std
        self.r_mean = nn.Parameter(initial(members, inputs, spread, init))
        self.s_mean = nn.Parameter(initial(members, outputs, spread, init))
        self.r_rho = nn.Parameter(torch.full((members, inputs), rho))
        self.s_rho = nn.Parameter(torch.full((members, outputs), rho))

    stack_r = "r_mean"

    @property
    def stack_s(self) -> object:
        return self.outputs

    @classmethod
    def draw_stack(cls, many: Sequence[Factors], samples: int) -> list[tuple[Tensor, Tensor]]:
        with full_precision(device_of(many[0])):
            r, s = (
                gaussian(
                    stack(many, f"{side}_mean"), F.softplus(stack(many, f"{side}_rho")), samples
                )
                for side in "rs"
            )
        return list(zip(r.flatten(1, 2), s.flatten(1, 2), strict=True))

    def mean(self) -> tuple[Tensor, Tensor]:
        return self.r_mean, self.s_mean

    def kl(self) -> Tensor:
        with full_precision(device_of(self)):
            total = torch.zeros((), device=self.r_mean.device)
            for mean, rho in ((self.r_mean, self.r_rho), (self.s_mean, self.s_rho)):
                std = F.softplus(at_least_float32(rho)) / self.prior_std
                shift = (at_least_float32(mean) - 1) / self.prior_std
                total = total + kl_to_standard_normal(shift, 2 * std.log()).sum(-1).mean()
            return total


def kl_to_standard_normal(mean: Tensor, log_variance: Tensor) -> Tensor:
    r"""KL(N(mean, variance) || N(0, 1)) = (mean^2 + variance - 1 - log variance) / 2, by entry."""
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)


def gaussian(mean: Tensor, std: Tensor, samples: int) -> Tensor:
    """mean + std * noise: (L, J, d) to (L, samples, J, d), all noise in one draw."""
    layers, members, width = mean.shape
    noise = torch.randn(layers, samples, members, width, device=mean.device, dtype=mean.dtype)
    return torch.addcmul(mean.unsqueeze(1), std.unsqueeze(1), noise)


def repeat(factor: Tensor, samples: int) -> Tensor:
    """(J, d) to (samples * J, d), sample-major."""
    return factor if samples == 1 else factor.repeat(samples, 1)


def device_of(module: nn.Module) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")
