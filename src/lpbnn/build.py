"""Entry point: build turns a network into an UncertainModel by the named method."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lpbnn.convert.checks import SUPPORTED
from lpbnn.convert.convert import refuse_converted
from lpbnn.likelihoods import Likelihood, Task, UserLikelihood, as_likelihood
from lpbnn.methods import configure, load
from lpbnn.model import Readout, UncertainModel
from lpbnn.rank_one.freeze import undo


def build(
    net: nn.Module,
    method: str = "lpbnn",
    *,
    task: Task = "classification",
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = None,
    readout: Readout | None = None,
    ignore_index: int = -100,
    class_weights: Tensor | Sequence[float] | None = None,
    check: bool = True,
    **options: Any,
) -> UncertainModel:
    """Turn a network into one that reports its uncertainty, by the named method.

    The network is wrapped in place and keeps its weights; ``lpbnn.undo`` gives it back. (A lone layer is put
    into an ``nn.Sequential`` first.)

    Args:
        net: any module.
        method: for example "lpbnn", "batchensemble", "mcdropout"; ``lpbnn.methods.names()`` lists them.
        task: a shorthand for a likelihood: "classification", "segmentation", "regression" or "multilabel".
        likelihood: a likelihood of ``lpbnn.likelihoods``, a mapping of them for a network with several
            heads, or an object of your own with ``nll(outputs, targets)`` and ``summary(outputs)``. It counts
            in place of the task.
        readout: picks the output tensor from what the network returns, if that is not a tensor.
        ignore_index: the label that does not count, with a ``task`` of classes.
        class_weights: one weight per class, with a ``task`` of classes.
        check: compare the fast path with the reference at the first batch (``lpbnn.check``).
        **options: the method's own, for example ``members=4, num_data=len(train)`` ("Options of the methods" in
            the documentation, or ``lpbnn ls METHOD``).

    Returns:
        A model: ``model.loss(x, y)["loss"]`` to train, ``lpbnn.predict(model, x)`` to predict.

    Raises:
        ValueError: a layer cannot be converted, or an option has a wrong value.
        TypeError: the method has no such option.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = build(net, "lpbnn", members=4, num_data=100)
        >>> tuple(model(torch.randn(5, 4)).shape)  # (members, batch, classes)
        (4, 5, 3)
    """
    module = load(method)
    if not isinstance(net, nn.Module):
        raise TypeError(f"build wraps an nn.Module; got {type(net).__name__}.")
    if isinstance(net, UncertainModel):
        raise TypeError(
            f"the network is a {type(net).__name__} already. Pass its .net, after lpbnn.undo."
        )
    resolved = as_likelihood(likelihood, task, ignore_index, class_weights)
    config = configure(module, options)
    if isinstance(net, SUPPORTED):  # a lone layer has no parent in which it could be replaced
        net = nn.Sequential(net)
    refuse_converted(net)
    try:
        model = module.build(net, config, likelihood=resolved, readout=readout)
    except BaseException:
        undo(net)  # leave the network as it was given
        raise
    model.check_first_batch = check
    return model
