r"""Temperature and vector scaling: a few numbers that make probabilities fit held-out labels.

$$
p(y|x) = \frac1S \sum_s \mathrm{softmax}(a \odot o_s(x) + b)_y, \quad
a, b = \arg\min -\sum_i \log p(y_i|x_i)
$$

A temperature is one a = 1 / T for all classes and b = 0; vector scaling has an a and a b for every class.
The outputs of every member are rescaled and the probabilities averaged afterwards, and the loss is that of
the average. The other choice, a temperature on the logarithm of the average, would leave members whose
probabilities do not average to the calibrated ones, and with them an epistemic uncertainty that may be
negative; and it could not be part of the outputs of an exported graph.

Outputs are used as logarithms of probabilities up to a constant, which is what every method here returns:
EDL's are log alpha, DUQ's log K_c (T multiplies the kernel's sigma^2), the others' are logits. The OOD
score that a method has of its own (EDL's vacuity, DUQ's kernel distance) is computed from the outputs as
they were.

Guo et al.: On calibration of modern neural networks, ICML 2017.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpbnn.calibration.held_out import CELLS_PER_EXAMPLE, Cells, collect_heads, to_cells
from lpbnn.likelihoods import Categorical, Likelihood, MultiHead, Scaling
from lpbnn.methods.mcp import MCP
from lpbnn.model import UncertainModel
from lpbnn.predict import unwrap

Kind = Literal["temperature", "vector"]
AT_ONCE = 2**21  # outputs that are scored together
LARGEST = 100.0  # a temperature above, or below its inverse, is no minimum but a flight to infinity


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    kind: Kind = "temperature",
    *,
    samples: int = 1,
    seed: int | None = 0,
    likelihood: Likelihood | None = None,
    cells_per_example: int | None = CELLS_PER_EXAMPLE,
) -> Scaling:
    """Fit a scaling on held-out batches and store it with the model.

    ``predict`` uses it from then on. It is part of the state dict, of a pickled model and of the outputs of
    a frozen one. A second call fits anew, from the outputs as they were; ``model.likelihood.scaling = None``
    removes it. Of a model with several heads, each head of classes gets a scaling of its own, and they are
    returned by name.

    Args:
        model: what ``lpbnn.build`` returned; or any network of classes, in which nothing is stored: put the
            scaling behind it, ``nn.Sequential(net, scaling)``.
        batches: held-out pairs (inputs, labels), for example a ``DataLoader``; they are moved to the
            model's device. Not the training data, on which a network is far too sure.
        kind: "temperature", one number; or "vector", a scale and a bias per class, for a thousand examples
            and more.
        samples: draws of each member; take those that predictions will take.
        seed: of the draws; every batch is predicted by the same ones.
        likelihood: of a plain network; by default ``Categorical()``.
        cells_per_example: at most this many pixels (tokens) of an example, drawn at random; None takes all.

    Example:
        >>> import lpbnn
        >>> _ = torch.manual_seed(0)
        >>> model = lpbnn.build(nn.Linear(4, 3), "ensemble", members=4)
        >>> x = torch.randn(500, 4)
        >>> y = (lpbnn.predict(model, x).probs ** 0.5).multinomial(1).squeeze(1)  # half as sure
        >>> scaling = calibrate(model, [(x, y)])
        >>> scaling is model.likelihood.scaling, scaling.temperature > 1
        (True, True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model or a network; got {type(model).__name__}.")
    holds_model = any(isinstance(module, UncertainModel) for module in model.modules())
    own = unwrap(model) if holds_model else MCP(model, likelihood)
    if holds_model and likelihood is not None:
        raise ValueError("the model has its own likelihood. Fix: leave out likelihood=.")
    cells = collect_heads(own, batches, samples, seed, cells_per_example)
    heads = own.likelihood.heads
    found = {name: fit_cells(part, kind, heads[name]) for name, part in cells.items()}
    if holds_model:
        for name, scaling in found.items():
            heads[name].scaling = scaling
    # The annotation is for the usual case, one head, as that of predict.
    return found if isinstance(own.likelihood, MultiHead) else found[""]  # type: ignore[return-value]


def fit_scaling(
    outputs: Tensor,
    labels: Tensor,
    kind: Kind = "temperature",
    likelihood: Likelihood | None = None,
) -> Scaling:
    """Fit a scaling to the outputs of members.

    Args:
        outputs: (S, B, C, ...), in the layout of the likelihood; one network has S = 1.
        labels: (B, ...).
        kind: "temperature" or "vector".
        likelihood: by default ``Categorical()``; ``Segmentation(ignore_index=255)``, for example, leaves
            pixels out.

    Example:
        >>> outputs = torch.randn(1, 500, 3)
        >>> labels = outputs[0].softmax(1).multinomial(1).squeeze(1)
        >>> scaling = fit_scaling(5 * outputs, labels)
        >>> tuple(scaling(outputs[0]).shape), scaling.temperature > 2
        ((500, 3), True)
    """
    likelihood = likelihood or Categorical()
    return fit_cells(to_cells(outputs, labels, likelihood), kind, likelihood)


def fit_cells(cells: Cells, kind: Kind, likelihood: Likelihood) -> Scaling:
    """Return the scaling that minimises the NLL of cells."""
    _check(cells, kind)
    device, width = cells.outputs.device, cells.outputs.shape[-1]
    shape = () if kind == "temperature" else (width,)
    # Optimised in float64, as a logarithm if it is a temperature, which is positive.
    scale = torch.zeros(shape, dtype=torch.float64, device=device)
    bias = torch.zeros(shape, dtype=torch.float64, device=device)
    if kind == "vector":
        scale += 1
    parameters = [scale] if kind == "temperature" else [scale, bias]
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=200,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        a = scale.exp() if kind == "temperature" else scale
        return backward_nll(cells, a, bias)

    optimizer.step(closure)
    a = (scale.exp() if kind == "temperature" else scale).detach().float()
    if kind == "temperature" and not 1 / LARGEST < a.item() < LARGEST:
        why = "all predictions are right" if a > 1 else "the outputs say nothing about the labels"
        raise ValueError(
            f"no temperature is best for the {len(cells.labels)} held-out labels: it would be "
            f"{float(1 / a):.3g}, because {why}. Fix: more held-out data; check that labels and outputs "
            "belong together."
        )
    most = max(a.abs().max().item(), bias.abs().max().item())
    if kind == "vector" and not most < LARGEST:
        raise ValueError(
            f"vector scaling separates the {len(cells.labels)} held-out labels completely (its largest "
            f"number is {most:.3g}), so it would be far too sure elsewhere. Fix: more held-out data, or "
            "kind='temperature'."
        )
    return Scaling(a, bias.detach().float(), likelihood.dim)


def backward_nll(cells: Cells, scale: Tensor, bias: Tensor) -> Tensor:
    """Return the mean NLL of the averaged probabilities, and add its gradient to scale and bias."""
    total = torch.zeros((), dtype=torch.float64, device=scale.device)
    step = max(1, AT_ONCE // (len(cells.outputs) * cells.outputs.shape[-1]))
    pairs = zip(cells.outputs.split(step, 1), cells.labels.split(step), strict=True)
    for outputs, labels in pairs:
        nll = mixture_nll(outputs.double() * scale + bias, labels).sum() / len(cells.labels)
        nll.backward(retain_graph=True)  # the graph of scale itself is shared by all parts
        total += nll.detach()
    return total


def mixture_nll(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the NLL of labels under the members' averaged probabilities, (N,).

    Args:
        outputs: (S, N, C).
        labels: integers (N,); or, for several labels, zeros and ones (N, K).

    Example:
        >>> mixture_nll(torch.zeros(4, 1, 2), torch.tensor([1]))  # log 2
        tensor([0.6931])
    """
    if labels.dim() == 2:
        given = labels.to(outputs.dtype).expand_as(outputs)
        log_p = -F.binary_cross_entropy_with_logits(outputs, given, reduction="none")
        return (math.log(len(outputs)) - log_p.logsumexp(0)).sum(-1)
    index = labels.expand(len(outputs), -1).unsqueeze(-1)
    log_p = outputs.log_softmax(-1).gather(-1, index).squeeze(-1)
    return math.log(len(outputs)) - log_p.logsumexp(0)


def _check(cells: Cells, kind: Kind) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"kind={kind!r}: choose 'temperature' or 'vector'.")
    require_finite(cells)
    if kind == "vector":
        labels, width = cells.labels, cells.outputs.shape[-1]
        if labels.dim() == 2:
            seen = (labels > 0.5).any(0) & (labels <= 0.5).any(0)
        else:
            seen = torch.bincount(labels, minlength=width) > 0
        missing = (~seen).nonzero().squeeze(1).tolist()
        if missing:
            raise ValueError(
                f"vector scaling fits two numbers per class, and the held-out labels lack "
                f"{missing[:10]}. Fix: held-out data with every class, or kind='temperature'."
            )


def require_finite(cells: Cells) -> None:
    """Refuse cells without labels, or outputs that are no numbers."""
    if not len(cells.labels):
        raise ValueError("no held-out example has a label that counts. Fix: check ignore_index.")
    if not bool(cells.outputs.isfinite().all()):
        raise ValueError(
            "the outputs are not all finite, so nothing can be fitted to them. Fix: train the model "
            "again, or leave out the inputs that cause it."
        )
