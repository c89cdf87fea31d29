r"""DUQ: one pass; confidence is the distance of the features to the nearest class centroid.

$$
K_c(x) = \exp\left(-\frac{\|W_c f(x) - e_c\|^2 / n}{2 \sigma^2}\right), \quad
\text{OOD score} = 1 - \max_c K_c
$$

$$
L = \overline{-w \sum_c y_c \log K_c + (1 - y_c) \log(1 - K_c)}
+ \lambda \, \overline{\left(\left\|\nabla_x \sum_c K_c\right\| - 1\right)^2}
$$

$$
N_c \leftarrow \gamma N_c + (1 - \gamma) n_c, \quad
m_c \leftarrow \gamma m_c + (1 - \gamma) \sum_{i: y_i = c} W_c f(x_i), \quad e_c = m_c / N_c
$$

f are the features before the network's last ``nn.Linear``, which is removed (``lpbnn.undo`` puts it back).
n is the size of a centroid, and n_c the number of examples of class c in the batch. ``after_step`` updates
the centroids with the features of the last batch, computed after the optimizer step and in evaluation mode.
The two-sided gradient penalty keeps distances between inputs visible in the features. It is differentiated
twice, which makes an epoch of a WRN-16-4 2.6 times as long (H200). Attention runs with torch's reference
implementation in the penalised loss, because fused attention has no second derivative. Under
``torch.compile`` the penalised loss is one graph if possible and otherwise runs outside the compiler
(``lpbnn.kernels.double_backward``).

The model's outputs are $\log K_c$, bounded below by -1e30. The K_c are not a distribution; the
probabilities of a prediction are $K_c / \sum K$, the softmax of the outputs, which do not contain the
distance. The paper trains with a learning rate of 0.05 and weight decay 5e-4; larger rates diverge.

Differences from the paper:
    The weight w is 1 / C as in the released code for up to ten classes, and 1 as in the paper for more
    (``bce``): with 1 / 100 nothing is learned.

van Amersfoort, Smith, Teh, Gal: Uncertainty estimation using a single deep deterministic neural network,
ICML 2020.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from lpbnn.convert.convert import replace_modules
from lpbnn.convert.wrapper import Wrapper
from lpbnn.kernels.double_backward import as_leaf, gradient_norms, run_in_one_graph
from lpbnn.likelihoods import Categorical, require_categorical, require_row_weights, weighted_mean
from lpbnn.members.call import as_call, batch_size
from lpbnn.members.rows import map_tensors
from lpbnn.model import Terms, UncertainModel, with_loss
from lpbnn.options import (
    BELOW_1,
    Count,
    NonNegative,
    OneNetwork,
    Options,
    Positive,
    Range,
)
from lpbnn.precision import at_least_float32, full_precision

Score = Literal["kernel", "entropy"]
Momentum = Annotated[float, Range("a number with 0 <= gamma < 1", 0, BELOW_1)]
Reduction = Literal["mean", "sum"]
# Up to here the mean over classes learns, and the penalty's weights were tuned for it.
FEW_CLASSES = 10
LOWEST = -1e30  # log K of an input at any distance: the sum over a batch stays finite
LARGEST = 1e15  # a feature beyond it would overflow in a distance, and NaN is no distance


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Options of duq."""

    members: OneNetwork = 1  # duq is one network
    sigma: Positive = 0.1  # length scale of the kernel
    gamma: Momentum = 0.999  # momentum of the centroids' running averages
    gradient_penalty: NonNegative = 0.5  # lambda; the paper has 0.5 to 0.75 for CIFAR-10; 0: none
    bce: Reduction | None = None  # over the classes; None: "mean" for up to ten, "sum" for more
    embedding: Count | None = None  # n, the size of a centroid; None: the number of features
    count: Positive = 13.0  # N_c before training: examples of a class in a batch (128 / 10)
    head: str | None = None  # path of the nn.Linear to remove; None: "head", else the last one
    score: Score = "kernel"  # OOD score: 1 - max K_c, or "entropy": that of the likelihood


class DUQ(UncertainModel):
    """Features, and one matrix W_c and one centroid per class.

    Args:
        net: returns the features (B, F); its head has been removed.
        config: the options.
        features: F.
        classes: C.
        like: W gets its dtype and device; the running averages its device, and float32 at least.
        model_options: ``likelihood`` (``Categorical``) and ``readout``.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        >>> model = DUQ(net, Config(), features=8, classes=3)
        >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
        >>> list(model.loss(x, y))
        ['loss', 'bce', 'gradient_penalty']
        >>> model.after_step()  # after the optimizer's step: moves the centroids
        >>> tuple(model.centroids.shape), tuple(model.ood_score(model(x)).shape)
        ((8, 3), (1, 5))
    """

    stochastic = False
    likelihood: Categorical
    N: Tensor
    m: Tensor

    def __init__(
        self,
        net: nn.Module,
        config: Config,
        *,
        features: int,
        classes: int,
        like: Tensor | None = None,
        **model_options: Any,
    ) -> None:
        super().__init__(net, **model_options)
        self.config = config
        width = config.embedding or features
        W = nn.init.kaiming_normal_(torch.empty(width, classes, features), nonlinearity="relu")
        self.W = nn.Parameter(W if like is None else W.to(like))
        wide = at_least_float32(self.W.detach())
        self.register_buffer("N", torch.full((classes,), config.count).to(wide))
        self.register_buffer("m", (0.05 * torch.randn(width, classes) * config.count).to(wide))
        self._batch: tuple[Any, Tensor, Tensor | None] | None = None  # from loss to after_step

    @property
    def centroids(self) -> Tensor:
        """The centroids e_c, (n, C)."""
        return self.m / self.N

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return log K_c, (1, B, C)."""
        distance = (self.embed(*args, **kwargs) - self.centroids).square().mean(1)
        return (distance / (-2 * self.config.sigma**2)).clamp_min(LOWEST).unsqueeze(0)

    def embed(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return W_c f(x) for every class, (B, n, C)."""
        features = self.run_network(*args, **kwargs)
        if features.dim() != 2 or features.shape[1] != self.W.shape[2]:
            raise ValueError(
                f"duq removed a head with {self.W.shape[2]} inputs, but the network now returns "
                f"features of shape {tuple(features.shape)}; expected (batch, {self.W.shape[2]}). "
                "Fix: build(..., head='path of the nn.Linear that the network ends with')."
            )
        # Distances are multiplied by 1 / (2 sigma^2) = 50: bfloat16 would leave one digit.
        with full_precision(features.device):
            weight = at_least_float32(self.W)
            features = features.to(weight.dtype).clamp(-LARGEST, LARGEST)
            return torch.einsum("bf,ncf->bnc", features, weight)

    def loss(self, x: Any, y: Any, weight: Tensor | None = None) -> Terms:
        """Return the terms ``bce`` and ``gradient_penalty``; see ``UncertainModel.loss``.

        The penalty is 0 in evaluation mode and without gradients. The batch is kept until ``after_step``.
        """
        self.likelihood.check_batch(x, y)
        batch = batch_size(*as_call(x))
        if weight is not None:
            require_row_weights(weight, batch)
        training = self.training and torch.is_grad_enabled()
        if training:
            self._batch = (map_tensors(Tensor.detach, x), y, weight)
        if training and self.config.gradient_penalty > 0:
            return run_in_one_graph(self._penalised_loss, x, y, weight)
        args, kwargs = as_call(x)
        log_k = self.outputs(*args, **kwargs).squeeze(0)
        return with_loss(bce=self.bce(log_k, y, weight), gradient_penalty=log_k.new_zeros(()))

    def _penalised_loss(self, x: Any, y: Tensor, weight: Tensor | None) -> Terms:
        x = map_tensors(lambda t: as_leaf(t) if t.is_floating_point() else t, x)
        inputs = [t for t in tree_leaves(x) if isinstance(t, Tensor) and t.is_floating_point()]
        if not inputs:
            raise TypeError(
                "duq's gradient penalty is on the gradient by the inputs, and none of them is of "
                "floating point. Fix: build(..., gradient_penalty=0)."
            )
        args, kwargs = as_call(x)
        with sdpa_kernel(SDPBackend.MATH):
            log_k = self.outputs(*args, **kwargs).squeeze(0)
        penalty = self.config.gradient_penalty * input_penalty(log_k.exp().sum(), inputs, weight)
        return with_loss(bce=self.bce(log_k, y, weight), gradient_penalty=penalty)

    def bce(self, log_k: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the binary cross-entropy of every K_c: mean or sum over classes, mean over examples.

        Args:
            log_k: (B, C).
            y: labels (B,), or probabilities (B, C).
            weight: (B,), or None.
        """
        labels, weights = self.likelihood.labels_and_weights(log_k, y, weight)
        # In logarithms, so that K = 0 and K = 1 lose no precision and give no infinity.
        log_not_k = torch.log(-torch.expm1(log_k.clamp_max(-1e-6)))
        if labels.is_floating_point():
            each = -(labels * log_k + (1 - labels) * log_not_k)
        else:
            each = -log_not_k.scatter(1, labels, log_k.gather(1, labels))
        few = log_k.shape[1] <= FEW_CLASSES
        reduction = self.config.bce or ("mean" if few else "sum")
        rows = each.mean(1) if reduction == "mean" else each.sum(1)
        return weighted_mean((rows * weights).sum(), weights.sum())

    @torch.no_grad()
    def after_step(self, lr: float | Tensor = 0.0) -> None:
        """Move the centroids towards the batch of the last training loss; without one, do nothing."""
        if self._batch is None:
            return
        (x, y, weight), self._batch = self._batch, None  # a copy of the model has no data
        args, kwargs = as_call(x)
        with self.evaluating():
            embedded = self.embed(*args, **kwargs)
        if y.is_floating_point():
            members = y.to(embedded.dtype)
        else:
            classes = torch.arange(len(self.N), device=y.device)
            counted = (y != self.likelihood.ignore_index).unsqueeze(1)
            members = ((y.unsqueeze(1) == classes) & counted).to(embedded.dtype)  # (B, C)
        if weight is not None:
            members = members * weight.to(members).unsqueeze(1)
        gamma = self.config.gamma
        self.N.mul_(gamma).add_(members.sum(0), alpha=1 - gamma)
        self.m.mul_(gamma).add_(torch.einsum("bnc,bc->nc", embedded, members), alpha=1 - gamma)

    def ood_score(self, outputs: Tensor) -> Tensor | None:
        """Return 1 - max K_c of member outputs log K_c, (S, B); None for "entropy"."""
        return None if self.config.score == "entropy" else -torch.expm1(outputs.amax(2))


def input_penalty(output: Tensor, inputs: list[Tensor], weight: Tensor | None = None) -> Tensor:
    r"""Return the mean over the examples of $(\|\nabla_x output\| - 1)^2$.

    Args:
        output: a scalar.
        inputs: tensors (B, ...) that require a gradient; the gradient of an example is that by all of them.
        weight: (B,), how much each example counts; None counts all equally.

    Example:
        >>> x = torch.randn(4, 2, requires_grad=True)
        >>> input_penalty((x @ torch.tensor([3.0, 4.0])).sum(), [x])  # (5 - 1)^2
        tensor(16.)
    """
    squares = (gradient_norms(output, inputs) - 1).square()
    if weight is None:
        return squares.mean()
    weight = weight.to(squares.dtype)
    return weighted_mean((squares * weight).sum(), weight.sum())


def build(net: nn.Module, config: Config, **model_options: Any) -> DUQ:
    """Remove the head of ``net``, in place, and add centroids for its classes."""
    require_categorical(
        model_options.get("likelihood"),
        "duq",
        ("classification",),
        "its centroids are those of the classes of whole inputs.",
    )
    path, head = find_head(net, config.head)
    sizes = {"features": head.in_features, "classes": head.out_features}
    model = DUQ(net, config, **sizes, like=head.weight, **model_options)
    replace_modules(net, {id(head): RemovedHead(head, path)})
    return model


def find_head(net: nn.Module, path: str | None = None) -> tuple[str, nn.Linear]:
    """Return the path of the layer that gives the network's outputs, and the layer.

    Args:
        net: the network.
        path: the path that the user gave; None takes the linear layer called "head", else the last one.
    """
    linear = {p: m for p, m in net.named_modules() if isinstance(m, nn.Linear) and p}
    if path is None and not linear:
        raise ValueError(
            f"duq replaces the nn.Linear that the network ends with, and {type(net).__name__} has "
            "none. Fix: end the network with nn.Flatten() and nn.Linear(features, classes)."
        )
    if path is None:
        path = "head" if "head" in linear else next(reversed(linear))
    if path not in linear:
        raise ValueError(
            f"head={path!r} is no nn.Linear of the network. Linear layers found: "
            f"{', '.join(linear) or 'none'}."
        )
    return path, linear[path]


class RemovedHead(Wrapper, nn.Identity):
    """An identity in place of a head; ``restore`` returns the head.

    The removed head is no submodule, so the network's parameters and state dict do not contain it. It
    follows the network to other devices and dtypes.

    Example:
        >>> head = nn.Linear(3, 2)
        >>> removed = RemovedHead(head)
        >>> len(list(removed.parameters())), removed.restore() is head
        (0, True)
    """

    guarded = ()

    def __init__(self, layer: nn.Module, path: str = "") -> None:
        super().__init__(layer, path)
        self.__dict__["layer"] = self._modules.pop("layer")
        self.train(layer.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.layer._apply(fn, recurse)
        return self

    def restore(self) -> nn.Module:
        self.layer.train(self.training)
        return super().restore()
