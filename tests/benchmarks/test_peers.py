"""The comparison with torch-uncertainty's layers: what is replaced, and what counts as their loss."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import peers


class Theirs(nn.Module):
    """A layer that keeps its arguments, as torch-uncertainty's do, and leaves a penalty."""

    def __init__(self, inputs: int, outputs: int, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.given = (inputs, outputs, *args, kwargs)
        self.log_variational_posterior = torch.tensor(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_every_layer_is_replaced_by_one_of_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = SimpleNamespace(LPBNNLinear=Theirs, LPBNNConv2d=Theirs)
    monkeypatch.setattr(peers, "layers_file", lambda name: layers)
    convolution = nn.Conv2d(3, 8, (3, 5), stride=2, padding=1, bias=False)
    net = nn.Sequential(convolution, nn.ReLU(), nn.Linear(8, 2))
    first, _, last = peers.with_their_layers(net, "lpbnn")
    expected = {"kernel_size": (3, 5), "num_estimators": 4, "stride": (2, 2), "padding": (1, 1)}
    assert first.given == (3, 8, {**expected, "bias": False})
    assert last.given == (8, 2, 4, {})


def test_their_loss_has_the_penalty_of_every_layer_once() -> None:
    net, x, y = (
        nn.Sequential(Theirs(2, 2), Theirs(2, 2)),
        torch.randn(4, 2),
        torch.tensor([0, 1, 1, 0]),
    )
    torch.testing.assert_close(
        peers.their_loss(net, x, y, num_data=10), F.cross_entropy(x, y) + 2 * 3.0 / 10
    )


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install torch-uncertainty einops"):
        peers.layers_file("bayesian/lpbnn.py")


def test_a_file_of_layers_is_loaded_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch_uncertainty"
    (package / "layers").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imports torchvision')")
    (package / "layers" / "batch_ensemble.py").write_text("BatchLinear = 7")
    monkeypatch.syspath_prepend(tmp_path)
    assert peers.layers_file("batch_ensemble.py").BatchLinear == 7
