r"""DUQ: one pass; how sure it is depends on how near the features are to a class's centroid.

.. math::
    K_c(x) = \exp\left(-\frac{\|W_c f(x) - e_c\|^2 / n}{2 \sigma^2}\right), \quad
    \text{score} = 1 - \max_c K_c

    L = \overline{-w \sum_c y_c \log K_c + (1 - y_c) \log(1 - K_c)}
        + \lambda \, \overline{\left(\left\|\nabla_x \sum_c K_c\right\| - 1\right)^2}

    N_c \leftarrow \gamma N_c + (1 - \gamma) n_c, \quad
    m_c \leftarrow \gamma m_c + (1 - \gamma) \sum_{i: y_i = c} W_c f(x_i), \quad e_c = m_c / N_c

w is 1 / C, as in the released code, up to ten classes; of more it is 1, as the paper writes (``bce``): with
1 / 100 nothing is learned. n numbers make a centroid; the n_c examples of class c are those of the last
batch, seen in evaluation mode after the step (``after_step``). The two-sided penalty keeps distances of
inputs visible in the features; differentiated twice, it makes WRN-16-4's epochs 2.6 times as long (H200).

The network's last ``nn.Linear`` is taken out (it says how many classes there are) and f is what it was
given; ``lpbnn.undo`` puts it back with the weights that it had. Outputs are log K_c. The K_c are no
distribution: where probabilities are asked for, as by NLL and ECE, they are K_c / sum K, which is the
softmax of the outputs. Only K_c itself knows of distance, so it alone is the score.

The paper trains with a learning rate of 0.05 and weight decay 5e-4, on everything; larger rates diverge.

van Amersfoort, Smith, Teh, Gal: Uncertainty estimation using a single deep deterministic neural network,
ICML 2020.
"""

import dataclasses
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_leaves, tree_map_only

from lpbnn.kernels.double_backward import rewrite
from lpbnn.likelihoods import check_targets
from lpbnn.methods._head import find_head, take_out
from lpbnn.methods._wide import WideBuffers
from lpbnn.model import Model, Terms, as_call, batch_size, total
from lpbnn.predict import evaluating
from lpbnn.rank_one.factors import at_least_float32, full_precision

Score = Literal["kernel", "confidence"]
Over = Literal["mean", "sum"]
FEW = (
    10  # classes: the penalty's usual weights were found with so many, and with the mean over them
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of duq: its kernels, centroids and gradient penalty; the file's head has the equations."""

    num_data: int | None = None  # not needed: taken so that methods can be swapped
    members: int = 1
    sigma: float = 0.1  # length scale of the kernel
    gamma: float = 0.999  # of the moving averages
    gradient_penalty: float = 0.5  # lambda; the paper has 0.5 to 0.75 for CIFAR-10. 0: none
    bce: Over | None = None  # over the classes; None: "mean" up to ten of them, "sum" of more
    embedding: int | None = None  # n, numbers in a centroid; None: as many as features
    count: float = 13.0  # N_c before training: the examples of a class in a batch (128 / 10)
    head: str | None = None  # path of the nn.Linear to take out; None: "head", else the last one
    score: Score = "kernel"  # 1 - max K_c; "confidence": 1 - max p, as for the other methods

    def __post_init__(self) -> None:
        if self.members != 1:
            raise ValueError(
                f"members={self.members!r}: duq is one network; use 'ensemble' for more."
            )
        for name in ("sigma", "count"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number above 0.")
        if not 0 <= self.gamma < 1:
            raise ValueError(f"gamma={self.gamma!r}: expected a number with 0 <= gamma < 1.")
        if self.gradient_penalty < 0:
            raise ValueError(
                f"gradient_penalty={self.gradient_penalty!r}: expected a number of at least 0."
            )
        if self.embedding is not None and self.embedding < 1:
            raise ValueError(f"embedding={self.embedding!r}: expected an integer of at least 1.")
        if self.bce is not None and self.bce not in get_args(Over):
            raise ValueError(f"bce={self.bce!r}: choose 'mean' or 'sum' over the classes, or None.")
        if self.score not in get_args(Score):
            raise ValueError(f"score={self.score!r} is not known; choose 'kernel' or 'confidence'.")


class RadialBasis(WideBuffers, Model):
    """Features, one matrix W_c and one centroid per class.

    Args:
        net: gives the features (batch, F); its head has been taken out.
        features: F.
        classes: how many.
        like: W gets its precision and device; the averages its device, and float32 at least.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        >>> model = RadialBasis(net, Config(), features=8, classes=3)
        >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
        >>> list(model.loss(x, y))
        ['loss', 'bce', 'gradient_penalty']
        >>> model.after_step()  # after the optimizer's: moves the centroids
        >>> tuple(model.centroids.shape), tuple(model.strangeness(model(x)).shape)
        ((8, 3), (1, 5))
    """

    stochastic = False
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
        **options: Any,
    ) -> None:
        super().__init__(net, **options)
        self.config = config
        width = config.embedding or features
        W = nn.init.kaiming_normal_(torch.empty(width, classes, features), nonlinearity="relu")
        self.W = nn.Parameter(W if like is None else W.to(like))
        wide = at_least_float32(self.W.detach())
        self.register_buffer("N", torch.full((classes,), config.count).to(wide))
        self.register_buffer("m", (0.05 * torch.randn(width, classes) * config.count).to(wide))
        self._last: tuple[Any, Tensor] | None = None  # the batch, from the loss to after_step

    @property
    def centroids(self) -> Tensor:
        """e_c, (n, C)."""
        return self.m / self.N

    def outputs(self, *args: Any, **kwargs: Any) -> Tensor:
        distance = (self.embed(args, kwargs) - self.centroids).square().mean(1)
        return (distance / (-2 * self.config.sigma**2)).unsqueeze(0)

    def embed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """W_c f(x) for every class, (B, n, C)."""
        batch_size(args, kwargs)
        features = self.readout(self.net(*args, **kwargs))
        if features.dim() != 2 or features.shape[1] != self.W.shape[2]:
            raise ValueError(
                f"duq took out a head with {self.W.shape[2]} inputs, but the network now gives "
                f"features of shape {tuple(features.shape)}; expected (batch, {self.W.shape[2]}). "
                "Fix: build(..., head='path of the nn.Linear that the network ends with')."
            )
        # Distances are magnified 1 / (2 sigma^2) = 50 times: bfloat16 would leave one digit.
        with full_precision(features.device):
            weight = at_least_float32(self.W)
            return torch.einsum("bf,ncf->bnc", features.to(weight.dtype), weight)

    def loss(self, x: Any, y: Tensor) -> Terms:
        learning = self.training and torch.is_grad_enabled()
        if learning:
            self._last = (tree_map_only(Tensor, Tensor.detach, x), y)
        if learning and self.config.gradient_penalty > 0:
            penalised = self._in_one_graph if torch.compiler.is_compiling() else self._penalised
            return penalised(x, y)
        args, kwargs = as_call(x)
        log_k = self(*args, **kwargs).squeeze(0)
        return total(bce=self.bce(log_k, y), gradient_penalty=log_k.new_zeros(()))

    def _in_one_graph(self, x: Any, y: Tensor) -> Terms:
        """``_penalised`` inside one compiled graph; outside the compiler where it would take several.

        A compiled graph cannot be differentiated twice, but it can hold the first of the gradients: it is
        written out as a part of the forward pass, and that as a whole is differentiated once.
        """
        try:  # Of a function with a try block a compiler takes all or nothing, no part of the network.
            if torch.compiler.is_compiling():
                from torch._dynamo.comptime import comptime

                comptime(_hold_gradients)
                terms = self._penalised(x, y)
                comptime(_refuse_parts)
                comptime(_differentiate_quickly)
                return terms
        finally:
            pass
        return torch.compiler.disable(self._penalised)(x, y)  # type: ignore[call-arg]

    def _penalised(self, x: Any, y: Tensor) -> Terms:
        x, inputs = _watched(x)
        args, kwargs = as_call(x)
        log_k = self.outputs(*args, **kwargs).squeeze(0)  # not self(...), which may be compiled
        penalty = self.config.gradient_penalty * input_penalty(log_k.exp().sum(), inputs)
        return total(bce=self.bce(log_k, y), gradient_penalty=penalty)

    def bce(self, log_k: Tensor, y: Tensor) -> Tensor:
        """Binary cross-entropy of every K_c, mean or sum over classes, mean over examples."""
        check_targets(log_k, y, self.task)
        counted = y != self.ignore_index
        labels = y.where(counted, 0)
        weights = counted.to(log_k.dtype)
        if self.class_weights is not None:
            class_weights: Tensor = self.class_weights  # type: ignore[assignment]
            weights = weights * class_weights.to(log_k)[labels]
        # In logarithms, so that K = 0 and K = 1 cost no precision and no infinity.
        others = torch.log(-torch.expm1(log_k.clamp_max(-1e-6)))
        each = -others.scatter(1, labels.unsqueeze(1), log_k.gather(1, labels.unsqueeze(1)))
        over = self.config.bce or ("mean" if log_k.shape[1] <= FEW else "sum")
        rows = each.mean(1) if over == "mean" else each.sum(1)
        # A batch without one label that counts says nothing: 0, where a mean over nothing would be NaN.
        return (rows * weights).sum() / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)

    @torch.no_grad()
    def after_step(self, lr: float | Tensor = 0.0) -> None:
        if self._last is None:
            return
        (x, y), self._last = self._last, None  # released: a model is copied without its data
        args, kwargs = as_call(x)
        with evaluating(self):
            embedded = self.embed(args, kwargs)
        counted = y != self.ignore_index
        classes = torch.arange(len(self.N), device=y.device)
        ours = ((y.unsqueeze(1) == classes) & counted.unsqueeze(1)).to(embedded.dtype)  # (B, C)
        gamma = self.config.gamma
        self.N.mul_(gamma).add_(ours.sum(0), alpha=1 - gamma)
        self.m.mul_(gamma).add_(torch.einsum("bnc,bc->nc", embedded, ours), alpha=1 - gamma)

    def strangeness(self, outputs: Tensor) -> Tensor | None:
        """1 - max K_c of member outputs, (S, B); None where confidence is to be the score."""
        return None if self.config.score == "confidence" else -torch.expm1(outputs.amax(2))


def _watched(x: Any) -> tuple[Any, list[Tensor]]:
    """The batch with its floating-point tensors as leaves to differentiate by, and these."""
    x = tree_map_only(Tensor, lambda t: _leaf(t) if t.is_floating_point() else t, x)
    inputs = [t for t in tree_leaves(x) if isinstance(t, Tensor) and t.is_floating_point()]
    if not inputs:
        raise TypeError(
            "duq's gradient penalty is on the gradient by the inputs, and none of them is of floating "
            "point. Fix: build(..., gradient_penalty=0)."
        )
    return x, inputs


def _leaf(x: Tensor) -> Tensor:
    """x, to differentiate by; the graph that it came from ends here."""
    return x.detach().requires_grad_()


def input_penalty(output: Tensor, inputs: list[Tensor]) -> Tensor:
    r"""Two-sided: mean over the examples of :math:`(\|\nabla_x output\| - 1)^2`.

    Example:
        >>> x = torch.randn(4, 2, requires_grad=True)
        >>> input_penalty((x @ torch.tensor([3.0, 4.0])).sum(), [x])  # (5 - 1)^2
        tensor(16.)
    """
    gradients = torch.autograd.grad(output, inputs, create_graph=True, allow_unused=True)
    used = [at_least_float32(g).reshape(g.shape[0], -1) for g in gradients if g is not None]
    if not used:
        raise ValueError(
            "duq's gradient penalty: the outputs do not depend on the inputs, or the network detaches "
            "them. Fix: build it with gradient_penalty=0."
        )
    norm = torch.cat(used, 1).norm(dim=1)
    return (norm - 1).square().mean()


def _hold_gradients(_: Any) -> None:
    """For a compiler, as it traces: these go into its graph as they are, with the gradient in them."""
    torch.compiler.allow_in_graph([_leaf, input_penalty])


def _refuse_parts(trace: Any) -> None:
    """For a compiler, as it traces: no graph that is made of graphs, or will be cut into some.

    What an ``autograd.Function`` saved, and what the part of a graph before a cut of DDP's optimizer gave,
    are constants to the inner gradient: it would be wrong without a word.
    """
    if any(isinstance(node.target, HigherOrderOperator) for node in trace.graph().nodes):
        trace.graph_break("duq differentiates twice; not an autograd.Function or a checkpoint here")
    ddp = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if ddp is not None and torch._dynamo.config.optimize_ddp:
        trace.graph_break("duq's inner gradient is of the whole network, which optimize_ddp cuts")


def _differentiate_quickly(trace: Any) -> None:
    """For a compiler, when it has traced the network."""
    rewrite(trace.graph())


def build(net: nn.Module, config: Config, **model_options: Any) -> Model:
    if (task := model_options.get("task", "classification")) != "classification":
        raise ValueError(
            f"duq has no task={task!r}: its centroids are those of the classes of whole inputs. It has "
            "'classification'. Fix: choose another method, such as 'lpbnn'."
        )
    path, head = find_head(net, config.head)
    sizes = {"features": head.in_features, "classes": head.out_features}
    model = RadialBasis(net, config, **sizes, like=head.weight, **model_options)
    take_out(net, path)
    return model
