"""A model's state as safetensors: tensors shared by several names are kept once, none can run code."""

import json
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from lpbnn.training.files import RunError

EXTRA = (
    "_extra_state"  # torch's name for what a module keeps besides tensors; its length may differ
)
_SHOWN = 3  # mismatches that an error lists


def to_bytes(state: Mapping[str, Tensor]) -> bytes:
    """The safetensors file of a state dictionary.

    >>> shared = torch.ones(2)
    >>> restored = from_bytes(to_bytes({"a": shared, "b": shared, "c": torch.zeros(3)}))
    >>> sorted(restored), restored["a"].data_ptr() == restored["b"].data_ptr()
    (['a', 'b', 'c'], True)
    """
    kept: dict[str, Tensor] = {}
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and same in first:
            aliases[name] = first[same]
            continue
        first[same] = name
        kept[name] = tensor.detach().cpu().contiguous()
    # Views into one storage that differ in shape are no aliases; safetensors wants them apart.
    seen: set[int] = set()
    for name, tensor in kept.items():
        storage = tensor.untyped_storage().data_ptr()
        kept[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return save_tensors(kept, {"aliases": json.dumps(aliases)})


def from_bytes(data: bytes) -> dict[str, Tensor]:
    """The state dictionary of a safetensors file; names that shared a tensor share it again."""
    tensors = load_tensors(data)
    size = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    for name, of in json.loads(metadata.get("aliases", "{}")).items():
        tensors[name] = tensors[of]
    return tensors


def read(data: bytes, where: str) -> dict[str, Tensor]:
    """``from_bytes``, or a ``RunError`` for a file that is cut short or no safetensors file."""
    try:
        return from_bytes(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise RunError(
            f"{where} ({len(data):,} bytes) is damaged or cut short: {error}. Fix: resume the run "
            "if it still has its checkpoint, or train it again."
        ) from error


def restore(model: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Load a state into a model, or say which keys and shapes do not fit."""
    own = model.state_dict()
    try:
        model.load_state_dict(dict(state))  # a model may make room for what it is given: try first
        return
    except RuntimeError as error:
        cause = error
    faults = [
        f"{name}: {tuple(state[name].shape)} there, {tuple(tensor.shape)} here"
        for name, tensor in own.items()
        if name in state and state[name].shape != tensor.shape and not name.endswith(EXTRA)
    ]
    faults += [f"{name}: missing there" for name in own if name not in state]
    faults += [f"{name}: unknown here" for name in state if name not in own]
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    raise RunError(
        f"{where} holds the weights of another architecture; {len(faults)} entries do not fit: "
        f"{'; '.join(faults[:_SHOWN])}{more}. Fix: build the model that the folder's config.json "
        "describes (load_run does)."
    ) from cause


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's state, on its device."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def channels_last(model: nn.Module) -> None:
    """Put the channels of every convolution's weight last in memory, in place.

    ``model.to(memory_format=...)`` would refuse a model that keeps a stack of such weights (tradi).
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


def not_finite(model: nn.Module) -> set[str]:
    """The parameters and statistics that hold NaN or infinity, by name; waits for the device once.

    >>> layer = nn.Linear(2, 1)
    >>> layer.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    >>> not_finite(layer)
    {'mask'}
    """
    named = (*model.named_parameters(), *model.named_buffers())
    tensors = {name: tensor.detach() for name, tensor in named if tensor.is_floating_point()}
    if not tensors:
        return set()
    finite = torch.stack([tensor.isfinite().all() for tensor in tensors.values()]).tolist()
    return {name for name, fine in zip(tensors, finite, strict=True) if not fine}
