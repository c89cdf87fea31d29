"""Fully sharded training (FSDP): between steps every process keeps its share of the weights only.

A copy of the model is trained whose weights, gradients and optimizer state lie in shares, one on each
process (``fully_shard``). For a step the weights are gathered whole, as one unit: a method may look at all
of them at once, as the latent posterior does. So this saves the memory of gradients, optimizer and resting
weights, not that of the weights in use. The model itself stays whole, on the host, and is brought up to
date at the end of an epoch: what is measured and saved is the same as with one process.
"""

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from lpbnn.model import UncertainModel
from lpbnn.training.config import RunConfig

if TYPE_CHECKING:
    from lightning.fabric import Fabric


def is_sharded(config: RunConfig, fabric: "Fabric") -> bool:
    """Whether there is anything to share: one process trains as usual."""
    return config.strategy == "fsdp" and fabric.world_size > 1


def check_shareable(model: UncertainModel, config: RunConfig) -> None:
    """Refuse by name what looks at single weights or gradients between steps, and what was not tested."""
    if config.strategy != "fsdp":
        return
    if type(model).after_step is not UncertainModel.after_step:
        raise ValueError(
            f"strategy is 'fsdp', but {config.method!r} looks at the weights after every step, and each "
            "process has a share of them only. Fix: strategy='ddp'."
        )
    for name, value in (
        ("compile", config.compile),
        ("precision='fp16'", config.precision == "fp16"),
    ):
        if value:
            raise ValueError(
                f"strategy is 'fsdp', which does not go with {name}. Fix: strategy='ddp', or leave it out."
            )


def in_shares(model: UncertainModel, fabric: "Fabric") -> UncertainModel:
    """A copy of ``model`` on the device, its weights in shares; ``loss`` gathers them."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    trained = copy.deepcopy(model).to(fabric.device)
    fully_shard(trained, mesh=fabric.strategy.device_mesh["data_parallel"])  # type: ignore[attr-defined]
    register_fsdp_forward_method(trained, "loss")
    return trained


def whole(state: Any) -> Any:
    """A state of shares with every tensor whole and on the host; all processes have to ask."""
    from torch.distributed.tensor import DTensor

    def gathered(tensor: Tensor) -> Tensor:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.detach().cpu()

    return tree_map_only(Tensor, gathered, state)


def optimizer_shares(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer, as ``whole`` gave it, in the shares of its weights."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    shares: dict[Any, Any] = {}
    for number, values in state["state"].items():
        weight = weights[number]
        shares[number] = {
            name: distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
            if isinstance(weight, DTensor)
            and isinstance(value, Tensor)
            and value.shape == weight.shape
            else value
            for name, value in values.items()
        }
    return {**state, "state": shares}
