"""Checkpoints and weights as bytes, and a model's state restored from them; no bytes can run code."""

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from lpbnn.training.files import RunError

KEYS = {"epochs", "diverged", "seconds", "peak_memory", "model", "optimizer", "precision"}
# torch's name for what a module keeps besides tensors; its length may differ
EXTRA = "_extra_state"
_SHOWN = 3  # mismatches that an error lists


def to_bytes(state: Mapping[str, Any]) -> memoryview:
    """Return a checkpoint, plain containers and tensors only, as the bytes of a file."""
    # Through memory: torch.save to a file on a full disk leaves no exception one can rely on.
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getbuffer()


def from_bytes(content: bytes, device: torch.device | str, where: str) -> dict[str, Any]:
    """Return the checkpoint in the bytes of a file.

    Args:
        device: of the tensors.
        where: the file's name, for errors.

    Raises:
        RunError: if it is damaged or no checkpoint of a run.
    """
    try:
        _require_stored(content)
        state = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
        if missing := KEYS - set(state):
            raise KeyError(f"it lacks {', '.join(sorted(missing))}")
    except Exception as error:  # bytes that are no checkpoint can fail in any way at all
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise RunError(
            f"{where} is damaged or cut short ({reason}). Fix: restore it from a copy, or delete "
            "it and resume: the run then starts from the first epoch."
        ) from error
    return state


def _require_stored(content: bytes) -> None:
    """Refuse an archive whose parts take more room than the archive; ``torch.save`` packs nothing."""
    with zipfile.ZipFile(io.BytesIO(content)) as stored:
        total = sum(part.file_size for part in stored.infolist())
    if total > len(content):  # a megabyte of zeros, packed, may stand for gigabytes
        raise ValueError(f"{total:,} bytes when unpacked, and the file has {len(content):,}")


def to_safetensors(state: Mapping[str, Tensor]) -> bytes:
    """Return the safetensors file of a state dictionary, in which shared tensors are kept once.

    >>> shared = torch.ones(2)
    >>> content = to_safetensors({"a": shared, "b": shared, "c": torch.zeros(3)})
    >>> restored = from_safetensors(content, "weights")
    >>> sorted(restored), restored["a"].data_ptr() == restored["b"].data_ptr()
    (['a', 'b', 'c'], True)
    """
    # safetensors' own save_model writes to a path; a run folder needs the bytes for their digest.
    kept: dict[str, Tensor] = {}
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and same in first:
            aliases[name] = first[same]
        else:  # views into one storage that differ in shape are no aliases, and are kept apart
            first[same] = name
            kept[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return save_tensors(kept, {"aliases": json.dumps(aliases)})


def from_safetensors(data: bytes, where: str) -> dict[str, Tensor]:
    """Return the state dictionary of a safetensors file; names that shared a tensor share it again.

    Args:
        where: the file's name, for errors.

    Raises:
        RunError: if it is cut short or no safetensors file.
    """
    try:
        tensors = load_tensors(data)
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
        for name, of in json.loads(metadata.get("aliases", "{}")).items():
            tensors[name] = tensors[of]
    except Exception as error:  # bytes that are no weights can fail in any way at all
        raise RunError(
            f"{where} ({len(data):,} bytes) is damaged or cut short: {error!r}. Fix: resume the run "
            "if it still has its checkpoint, or train it again."
        ) from error
    return tensors


def restore(model: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Load a state into a model, or say which keys and shapes do not fit."""
    own = model.state_dict()
    try:
        model.load_state_dict(dict(state))  # a model may make room for what it is given: try first
        return
    except Exception as error:  # what a model keeps besides tensors can fail in any way
        cause = error
    faults = [
        f"{name}: {tuple(state[name].shape)} there, {tuple(tensor.shape)} here"
        for name, tensor in own.items()
        if name in state and state[name].shape != tensor.shape and not name.endswith(EXTRA)
    ]
    faults += [f"{name}: missing there" for name in own if name not in state]
    faults += [f"{name}: unknown here" for name in state if name not in own]
    if not faults:
        raise RunError(f"{where} is damaged ({cause!r}). Fix: restore it from a copy.") from cause
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    raise RunError(
        f"{where} holds the weights of another architecture; {len(faults)} entries do not fit: "
        f"{'; '.join(faults[:_SHOWN])}{more}. Fix: build the model that the folder's config.json "
        "describes (load_run does)."
    ) from cause


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a model's state, on its device."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def channels_last(model: nn.Module) -> None:
    """Put the channels of every convolution's weight last in memory, in place.

    ``model.to(memory_format=...)`` would refuse a model that keeps a stack of such weights (tradi).
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


def not_finite(model: nn.Module) -> set[str]:
    """Return the names of the parameters and statistics that hold NaN or infinity; waits for the device once.

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
