# Written by tools/make_stub.py from the options of the methods: do not edit.
from collections.abc import Mapping, Sequence
from typing import Literal, overload

from torch import Tensor, nn

from lpbnn.likelihoods import Likelihood, Task, UserLikelihood
from lpbnn.methods.batchensemble import BatchEnsemble
from lpbnn.methods.duq import DUQ
from lpbnn.methods.edl import EDL
from lpbnn.methods.ensemble import DeepEnsemble
from lpbnn.methods.lpbnn import LPBNN
from lpbnn.methods.mcdropout import MCDropout
from lpbnn.methods.mcp import MCP
from lpbnn.methods.meanfield import MeanFieldBNN
from lpbnn.methods.mimo import MIMO
from lpbnn.methods.rank1 import Rank1BNN
from lpbnn.methods.tradi import TRADI
from lpbnn.model import Readout, UncertainModel

@overload
def build(
    net: nn.Module,
    method: Literal["lpbnn"] = ...,
    *,
    task: Task = ...,
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = ...,
    readout: Readout | None = ...,
    ignore_index: int = ...,
    class_weights: Tensor | Sequence[float] | None = ...,
    check: bool = ...,
    num_data: int | None = ...,
    members: int = ...,
    batch_mode: Literal["repeat", "split"] = ...,
    batch_norm: Literal["member", "shared"] = ...,
    init_std: float | None = ...,
    init: Literal["normal", "signs"] = ...,
    first_init: Literal["normal", "signs"] | None = ...,
    fast_lr: float = ...,
    include: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = ...,
    exclude: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = ...,
    unshared: str | Sequence[str] | None = ...,
    expand_at: str | Sequence[str] | None = ...,
    variant: Literal["default", "paper"] = ...,
    weighting: Literal["authors", "balanced", "equation"] | None = ...,
    latent: int = ...,
    log_variance: float = ...,
    kl_weight: float | None = ...,
) -> LPBNN: ...
@overload
def build(
    net: nn.Module,
    method: Literal["abnn"],
    *,
    task: Task = ...,
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = ...,
    readout: Readout | None = ...,
    ignore_index: int = ...,
    class_weights: Tensor | Sequence[float] | None = ...,
    check: bool = ...,
    num_data: int | None = ...,
    members: int = ...,
    std: float = ...,
    class_weight: float = ...,
    batch_mode: Literal["repeat", "split"] = ...,
) -> UncertainModel: ...
@overload
def build(
    net: nn.Module,
    method: Literal["batchensemble"],
    *,
    task: Task = ...,
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = ...,
    readout: Readout | None = ...,
    ignore_index: int = ...,
    class_weights: Tensor | Sequence[float] | None = ...,
    check: bool = ...,
    num_data: int | None = ...,
    members: int = ...,
    batch_mode: Literal["repeat", "split"] = ...,
    batch_norm: Literal["member", "shared"] = ...,
    init_std: float = ...,
    init: Literal["normal", "signs"] = ...,
    first_init: Literal["normal", "signs"] | None = ...,
    fast_lr: float = ...,
    include: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = ...,
    exclude: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = ...,
    unshared: str | Sequence[str] | None = ...,
    expand_at: str | Sequence[str] | None = ...,
) -> BatchEnsemble: ...
@overload
def build(
    net: nn.Module,
    method: Literal["duq"],
    *,
    task: Task = ...,
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = ...,
    readout: Readout | None = ...,
    ignore_index: int = ...,
    class_weights: Tensor | Sequence[float] | None = ...,
    check: bool = ...,
    num_data: int | None = ...,
    members: int = ...,
    sigma: float = ...,
    gamma: float = ...,
    gradient_penalty: float = ...,
    bce: Literal["mean", "sum"] | None = ...,
    embedding: int | None = ...,
    count: float = ...,
    head: str | None = ...,
    score: Literal["entropy", "kernel"] = ...,
) -> DUQ: ...
@overload
def build(
    net: nn.Module,
    method: Literal["edl"],
    *,
    task: Task = ...,
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = ...,
    readout: Readout | None = ...,
    ignore_index: int = ...,
    class_weights: Tensor | Sequence[float] | None = ...,
    check: bool = ...,
    num_data: int | None = ...,
    members: int = ...,
    risk: Literal["digamma", "log_marginal", "squared"] = ...,
    anneal: float = ...,
    full_kl: float | None = ...,
    score: Literal["entropy", "vacuity"] = ...,
) -> EDL: ...
@overload
def build(
    net: nn.Module,
    method: Literal["ensemble"],
    *,
    task: Task = ...,
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = ...,
    readout: Readout | None = ...,
    ignore_index: int = ...,
    class_weights: Tensor | Sequence[float] | None = ...,
    check: bool = ...,
    num_data: int | None = ...,
    members: int = ...,
    reinit: str | Sequence[str] = ...,
) -> DeepEnsemble: ...
@overload
def build(
    net: nn.Module,
    method: Literal["mcdropout"],
    *,
    task: Task = ...,
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = ...,
    readout: Readout | None = ...,
    ignore_index: int = ...,
    class_weights: Tensor | Sequence[float] | None = ...,
    check: bool = ...,
    num_data: int | None = ...,
    members: int = ...,
    rate: float | None = ...,
    include: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = ...,
    exclude: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = ...,
    expand_at: str | None = ...,
) -> MCDropout: ...
@overload
def build(
    net: nn.Module,
    method: Literal["mcp"],
    *,
    task: Task = ...,
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = ...,
    readout: Readout | None = ...,
    ignore_index: int = ...,
    class_weights: Tensor | Sequence[float] | None = ...,
    check: bool = ...,
    num_data: int | None = ...,
    members: int = ...,
) -> MCP: ...
@overload
def build(
    net: nn.Module,
    method: Literal["meanfield"],
    *,
    task: Task = ...,
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = ...,
    readout: Readout | None = ...,
    ignore_index: int = ...,
    class_weights: Tensor | Sequence[float] | None = ...,
    check: bool = ...,
    num_data: int | None = ...,
    members: int = ...,
    std: float = ...,
    prior_std: float | None = ...,
    anneal: float = ...,
    flipout: bool = ...,
    include: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = ...,
    exclude: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = ...,
) -> MeanFieldBNN: ...
@overload
def build(
    net: nn.Module,
    method: Literal["mimo"],
    *,
    task: Task = ...,
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = ...,
    readout: Readout | None = ...,
    ignore_index: int = ...,
    class_weights: Tensor | Sequence[float] | None = ...,
    check: bool = ...,
    num_data: int | None = ...,
    members: int = ...,
    batch_repetitions: int = ...,
    input_repetition: float = ...,
    first: str | None = ...,
    last: str | Sequence[str] | None = ...,
) -> MIMO: ...
@overload
def build(
    net: nn.Module,
    method: Literal["rank1"],
    *,
    task: Task = ...,
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = ...,
    readout: Readout | None = ...,
    ignore_index: int = ...,
    class_weights: Tensor | Sequence[float] | None = ...,
    check: bool = ...,
    num_data: int | None = ...,
    members: int = ...,
    batch_mode: Literal["repeat", "split"] = ...,
    batch_norm: Literal["member", "shared"] = ...,
    init_std: float = ...,
    init: Literal["normal", "signs"] = ...,
    first_init: Literal["normal", "signs"] | None = ...,
    fast_lr: float = ...,
    include: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = ...,
    exclude: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = ...,
    unshared: str | Sequence[str] | None = ...,
    expand_at: str | Sequence[str] | None = ...,
    std: float = ...,
    prior_std: float = ...,
    anneal: float = ...,
) -> Rank1BNN: ...
@overload
def build(
    net: nn.Module,
    method: Literal["tradi"],
    *,
    task: Task = ...,
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = ...,
    readout: Readout | None = ...,
    ignore_index: int = ...,
    class_weights: Tensor | Sequence[float] | None = ...,
    check: bool = ...,
    num_data: int | None = ...,
    members: int = ...,
    features: int = ...,
    frequency: float = ...,
    mean_noise: float = ...,
    variance_noise: float = ...,
    measurement_noise: float = ...,
) -> TRADI: ...
@overload
def build(
    net: nn.Module,
    method: str,
    *,
    task: Task = ...,
    likelihood: Likelihood
    | UserLikelihood
    | Mapping[str, Likelihood | UserLikelihood]
    | None = ...,
    readout: Readout | None = ...,
    ignore_index: int = ...,
    class_weights: Tensor | Sequence[float] | None = ...,
    check: bool = ...,
    num_data: int | None = ...,
    members: int = ...,
) -> UncertainModel: ...
