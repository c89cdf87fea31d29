r"""Deep Ensembles: J independent networks from J initial weights; their probabilities are averaged.

$$p(y|x) = \tfrac1J \sum_j p(y|x, W_j), \quad W_j = \arg\min \overline{NLL}(W_j)$$

The members are trained together and stay independent: **the gradient of every member is the one it
would have alone**, so learning rate, weight decay and schedule are those of a single network. The
reported ``nll`` is the mean over members, comparable with other methods; its gradient is that of the sum.
(Only clipping by a global norm couples the members: it uses the norm over all of them.)

All members see the same batches in the same order; they differ by their initial weights. For a data order
per member, train separate runs and make an ensemble of them: ``from_members``.

The first member is the given network, the others are copies with initial weights of their own.

Lakshminarayanan, Pritzel, Blundell: Simple and scalable predictive uncertainty estimation using deep
ensembles, NeurIPS 2017.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lpbnn.likelihoods import as_likelihood, take_scalings
from lpbnn.members.call import as_call, batch_size, copy_tensors
from lpbnn.methods.mcp import MCP
from lpbnn.model import Outputs, Pass, Terms, UncertainModel, stack_members, with_loss
from lpbnn.options import Count, Options


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Options of ensemble.

    Args:
        members: J, the number of networks.
        reinit: what is initialised anew in every member but the first: "all", "none" (for weights that are
            loaded afterwards), or path globs ("head", ["decoder.*", "head"]) for a pretrained network.
    """

    members: Count = 4
    reinit: str | Sequence[str] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        globs = [self.reinit] if isinstance(self.reinit, str) else self.reinit
        if not isinstance(globs, Sequence) or not all(isinstance(glob, str) for glob in globs):
            raise ValueError(
                f"reinit={self.reinit!r}: expected 'all', or path globs such as 'head' or "
                "['decoder.*', 'head']; 'none', or an empty list, keeps all members as given."
            )


class DeepEnsemble(UncertainModel):
    """J networks in an ``nn.ModuleList``.

    Args:
        nets: the networks.
        options: ``likelihood`` and ``readout`` of ``UncertainModel``.

    Example:
        >>> model = DeepEnsemble([nn.Linear(4, 3), nn.Linear(4, 3)])
        >>> tuple(model(torch.randn(5, 4)).shape)  # (members, batch, classes)
        (2, 5, 3)
    """

    stochastic = False
    net: nn.ModuleList

    def __init__(self, nets: Sequence[nn.Module], **options: Any) -> None:
        super().__init__(nn.ModuleList(nets), **options)
        self.members = len(nets)

    @property
    def networks(self) -> list[nn.Module]:
        return list(self.net)

    def outputs(self, *args: Any, **kwargs: Any) -> Outputs:
        return self._outputs_of(slice(None), *args, **kwargs)

    def _outputs_of(self, members: slice, *args: Any, **kwargs: Any) -> Outputs:
        batch_size(args, kwargs)
        return stack_members([self._run(net, args, kwargs) for net in self.net[members]])

    def _run(self, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs:
        """Return the outputs of one network, which may change its inputs in place: it gets copies."""
        args, kwargs = copy_tensors((args, kwargs))
        return self.readout(net(*args, **kwargs))

    def passes(self, samples: int, width: int) -> Iterator[Pass]:
        for start in range(0, self.members, width):
            yield partial(self._outputs_of, slice(start, start + width))

    def loss(self, x: Any, y: Any, weight: Tensor | None = None) -> Terms:
        self.likelihood.check_batch(x, y)
        args, kwargs = as_call(x)
        batch_size(args, kwargs)
        each = [
            self.likelihood.nll_terms(self._run(net, args, kwargs), y, weight) for net in self.net
        ]
        means = {name: torch.stack([terms[name] for terms in each]).mean() for name in each[0]}
        # The value of the mean with the gradient of the sum: see the top of the file.
        others = self.members - 1
        return with_loss(**{k: mean + others * (mean - mean.detach()) for k, mean in means.items()})


def build(net: nn.Module, config: Config, **model_options: Any) -> DeepEnsemble:
    """Make an ensemble of a network and copies of it with initial weights of their own."""
    chosen = _chosen(net, config.reinit)
    nets = [net, *(copy.deepcopy(net) for _ in range(config.members - 1))]
    for member in nets[1:]:
        redraw(member, chosen)
    return DeepEnsemble(nets, **model_options)


def from_members(
    nets: Sequence[nn.Module], *, likelihood: Any = None, readout: Any = None
) -> DeepEnsemble:
    """Make an ensemble of finished networks, or of models built with "mcp".

    Args:
        nets: the members.
        likelihood: what ``build`` takes; by default that of the first model, or classification.
        readout: the same.

    Example:
        >>> import lpbnn
        >>> runs = [lpbnn.build(nn.Linear(4, 3), "mcp") for _ in range(5)]
        >>> lpbnn.predict(from_members(runs), torch.randn(2, 4)).members.shape
        torch.Size([5, 2, 3])
    """
    if not nets:
        raise ValueError("an ensemble needs at least one network; got an empty list.")
    if len({id(net) for net in nets}) < len(nets):
        raise ValueError("the same network is given twice: it would count double. Give copies.")
    first = nets[0]
    if isinstance(first, MCP) and likelihood is None:
        likelihood, readout = copy.deepcopy(first.likelihood), readout or first.readout
        take_scalings(likelihood)  # they were fitted to one member
    return DeepEnsemble(
        [_single(net) for net in nets], likelihood=as_likelihood(likelihood), readout=readout
    )


def _single(net: nn.Module) -> nn.Module:
    if not isinstance(net, UncertainModel):
        return net
    if not isinstance(net, MCP):
        raise TypeError(
            f"a member is one deterministic network; got {type(net).__name__}. Fix: give plain "
            "networks, or models built with 'mcp'."
        )
    return net.net


def redraw(net: nn.Module, chosen: set[str]) -> None:
    """Initialise the own parameters of the chosen modules anew, at the scale that they have now.

    ``reset_parameters`` alone would undo what the network's author chose (He's gain, a last layer at
    zero, ...), and the members would not be networks of one kind. So a new value is rescaled to the root
    mean square of the one it replaces, and a constant stays. Parameters of modules that cannot reset
    themselves (class tokens, parametrised weights) are shuffled. Frozen parameters stay: they cannot learn.

    Args:
        net: changed in place.
        chosen: paths of modules.
    """
    given = {
        name: parameter.detach().clone()
        for name, parameter in net.named_parameters(remove_duplicate=False)
    }
    modules = {path: m for path, m in net.named_modules() if path in chosen and _learns(m)}
    resets = {path: _reset(module) for path, module in modules.items()}
    for reset in filter(None, resets.values()):
        reset()
    with torch.no_grad():
        for path, module in modules.items():
            for name, drawn in module.named_parameters(path, recurse=False):
                if not drawn.requires_grad:
                    drawn.copy_(given[name])
                elif resets[path] is not None:
                    _rescale(drawn, given[name])
                else:
                    order = torch.randperm(drawn.numel()).to(drawn.device)
                    drawn.copy_(given[name].flatten()[order].view_as(drawn))


def _learns(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _reset(module: nn.Module) -> Callable[[], None] | None:
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def _rescale(drawn: Tensor, given: Tensor) -> None:
    if given.numel() > 1 and bool((given == given.flatten()[0]).all()):
        drawn.copy_(given)
    elif drawn.numel() == 1 or bool((drawn != drawn.flatten()[0]).any()):  # a norm resets to 1
        drawn.mul_(given.square().mean().sqrt() / drawn.square().mean().sqrt().clamp_min(1e-12))


def _chosen(net: nn.Module, reinit: str | Sequence[str]) -> set[str]:
    """Return the paths of the modules to initialise anew."""
    paths = {path for path, _ in net.named_modules()}
    if reinit == "all":
        return paths
    if reinit == "none":
        return set()
    chosen = set()
    for pattern in [reinit] if isinstance(reinit, str) else reinit:
        found = {p for p in paths if fnmatchcase(p, pattern) or p.startswith(f"{pattern}.")}
        if not found:
            top = ", ".join(name for name, _ in net.named_children())
            raise ValueError(
                f"reinit={pattern!r} matches no module; expected 'all', 'none' or path globs. "
                f"The network's parts are: {top}."
            )
        chosen |= found
    return chosen
