"""Published weights for a network, or a part of one: read as data only, with a report of what matched."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lpbnn.extras import missing

_NESTED = ("state_dict", "model", "model_state_dict")  # where checkpoints keep the weights
_COUNTER = "num_batches_tracked"  # of batch norm: no weight, and older files lack it
_LISTED = 8  # names of each kind in the report
_FIX = "Fix: give a .safetensors file, or what torch.save(net.state_dict(), path) wrote"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Loaded:
    """Outcome of loading: the tensors of the file and of the network.

    >>> print(Loaded("w.safetensors", ("conv.weight",), ("head.bias",), ("fc.bias",)))
    w.safetensors: 1 of 2 tensors matched
      missing in the file, so kept as they were (1): head.bias
      left over in the file, so not used (1): fc.bias
    """

    path: str
    matched: tuple[str, ...]
    missing: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()
    mismatched: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)  # there, here
    about: dict[str, str] = field(default_factory=dict)  # what a safetensors file says of itself

    @property
    def complete(self) -> bool:
        """True if every tensor of the network came from the file."""
        return not self.missing and not self.mismatched

    def __str__(self) -> str:
        total = len(self.matched) + len(self.missing) + len(self.mismatched)
        share = f"all {total}" if self.complete else f"{len(self.matched)} of {total}"
        shapes = [
            f"{name} is {there} in the file and {here} here"
            for name, (there, here) in self.mismatched.items()
        ]
        lines = [f"{Path(self.path).name}: {share} tensors matched"]
        for what, names in (
            ("of another shape, so not used", shapes),
            ("missing in the file, so kept as they were", self.missing),
            ("left over in the file, so not used", self.left_over),
        ):
            lines += [f"  {what} ({len(names)}): {_listed(names)}"] if names else []
        return "\n".join(lines + [f"  {key}: {text}" for key, text in self.about.items()])


def load_weights(net: nn.Module, path: str | Path) -> Loaded:
    """Copy the tensors of a safetensors or torch file into the network's of the same name and shape.

    A common prefix of the file's names ("module.", "backbone.") is found by itself; half precision
    becomes the network's own. Nothing that a file holds can run code. Names and shapes do not show where a
    bottleneck of a ResNet has its stride: the network's ``stride_in`` must be that of the weights.

    Raises:
        ValueError: there is no such file, it is no file of weights, or nothing in it matches.

    Warns:
        UserWarning: with the report, if not every tensor of the network was found.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(3, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save(nn.Linear(3, 2).state_dict(), f"{folder}/w.pth")
    ...     print(load_weights(net[0], f"{folder}/w.pth"))
    w.pth: all 2 tensors matched
    """
    if not isinstance(path, str | Path):
        raise ValueError(f"pretrained is {path!r}; expected the path of a file of weights. {_FIX}.")
    tensors, about = _read(Path(path))
    own = net.state_dict()
    prefix = _prefix(tensors, own)
    given = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
    shared = [name for name in own if name in given]
    matched = [name for name in shared if given[name].shape == own[name].shape]
    if not any(own[name].is_floating_point() for name in matched):
        raise ValueError(
            f"{path}: none of its {len(tensors)} tensors matches {type(net).__name__}. It holds "
            f"{_listed(tensors)}; expected {_listed(own)}. Fix: give weights of this network."
        )
    for name in matched:
        if not given[name].isfinite().all():
            raise ValueError(
                f"{path}: {prefix}{name} holds NaN or infinity. Fix: give finite weights."
            )
    with torch.no_grad():
        for name in matched:
            own[name].copy_(given[name])
    report = Loaded(
        path=str(path),
        matched=_weights(matched),
        missing=_weights(name for name in own if name not in given),
        left_over=tuple(key for key in tensors if key.removeprefix(prefix) not in own),
        mismatched={
            name: (tuple(given[name].shape), tuple(own[name].shape))
            for name in shared
            if name not in matched
        },
        about=about,
    )
    if not report.complete:
        warnings.warn(str(report), stacklevel=2)
    return report


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file by name, and what it says of itself; its first bytes tell the format."""
    if not path.is_file():
        raise ValueError(f"there is no file of weights at {path}. {_FIX}.")
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as error:
        raise missing(error) from error
    with path.open("rb") as file:
        safetensors = file.read(9)[8:] == b"{"  # a length of eight bytes, then JSON
    try:
        if safetensors:
            with safe_open(path, "pt") as opened:
                tensors: Any = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
                return tensors, dict(sorted((opened.metadata() or {}).items()))
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file makes torch raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} cannot be read as weights ({reason}). {_FIX}.") from error
    for key in _NESTED:
        if isinstance(tensors, Mapping) and isinstance(tensors.get(key), Mapping):
            tensors = tensors[key]
    if not isinstance(tensors, Mapping) or not all(isinstance(key, str) for key in tensors):
        raise ValueError(f"{path} holds a {type(tensors).__name__} and no named tensors. {_FIX}.")
    return {key: value for key, value in tensors.items() if isinstance(value, Tensor)}, {}


def _prefix(given: Iterable[str], own: Iterable[str]) -> str:
    """Return the prefix of the network's names in the file that makes most of them match."""
    keys, names = set(given), list(own)
    ends = {"." + name for name in names}
    found = {""} | {
        key[: start + 1]
        for key in keys
        for start in range(len(key))
        if key[start] == "." and key[start:] in ends
    }
    return max(found, key=lambda prefix: (sum(prefix + n in keys for n in names), -len(prefix)))


def _weights(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not name.endswith(_COUNTER))


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
