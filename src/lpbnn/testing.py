"""The tests that every method passes, for a class of your own to inherit (docs/howto/add-a-method.md).

    class TestMine(lpbnn.testing.MethodConformance):
        name = "mine"

Run them with pytest, which this module imports. One test needs safetensors, and is skipped without it.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lpbnn
from lpbnn import backbones, methods
from lpbnn.model import UncertainModel

CLASSES = 4
# The networks: options of the backbone, and the shape of an example.
BACKBONES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "mlp": ({"hidden": (16, 16), "image_size": 8}, (1, 8, 8)),
    "lenet": ({}, (1, 8, 8)),
    "small-cnn": ({}, (1, 8, 8)),
}


def batch(size: int, backbone: str = "mlp") -> tuple[Tensor, Tensor]:
    """Return images whose class can be seen, one bright quarter, and the classes.

    Example:
        >>> x, y = batch(5)
        >>> tuple(x.shape), y.tolist()
        ((5, 1, 8, 8), [0, 1, 2, 3, 0])
    """
    y = torch.arange(size) % CLASSES
    x = 0.3 * torch.randn(size, *BACKBONES[backbone][1])
    for i, label in enumerate(y.tolist()):
        row, column = 4 * (label // 2), 4 * (label % 2)
        x[i, :, row : row + 4, column : column + 4] += 1
    return x, y


def fit(model: UncertainModel, steps: int, size: int = 32, lr: float = 0.05) -> list[float]:
    """Train by the contract's loop, as any trainer of a user's own does, and return the losses.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))
        >>> len(fit(lpbnn.build(net, "mcp"), steps=3))
        3
    """
    model.train()
    groups = model.parameter_groups(weight_decay=1e-4, lr=lr)
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
    model.before_epoch(0, 1)
    x, y = batch(size)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(x, y)["loss"]
        loss.backward()
        optimizer.step()
        model.after_step(lr=lr)
        losses.append(loss.item())
    model.after_fit([(x, y)])
    return losses


# Several tests ask networks that were not trained, for which a method may have no answer yet.
@pytest.mark.filterwarnings("ignore::lpbnn.model.NotFittedWarning")
class MethodConformance:
    """Properties of every method.

    Attributes:
        name: the method, as ``lpbnn.build`` knows it.
        options: its options in these tests.
    """

    name: str
    options: dict[str, Any] = {}  # noqa: RUF012  # replaced, never changed

    @pytest.fixture
    def method(self) -> str:
        """The name of the method; a test of several overrides it."""
        return self.name

    @pytest.fixture(autouse=True)
    def _seeded(self) -> None:
        torch.manual_seed(0)

    def build(self, method: str, backbone: str = "mlp", seed: int = 0) -> UncertainModel:
        """Build the method on one of ``BACKBONES``."""
        torch.manual_seed(seed)
        options, shape = BACKBONES[backbone]
        net = backbones.build(backbone, CLASSES, in_channels=shape[0], **options)
        return lpbnn.build(net, method, num_data=10_000, **self.options)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_built_where_another_precision_is_the_default(
        self, method: str, dtype: torch.dtype
    ) -> None:
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(dtype)
            net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, CLASSES))
            model = lpbnn.build(net, method, num_data=100, **self.options)
            model.loss(torch.randn(6, 4), torch.arange(6) % CLASSES)["loss"].backward()
            assert lpbnn.predict(model, torch.randn(2, 4)).probs.isfinite().all()
        finally:
            torch.set_default_dtype(before)

    def test_the_file_keeps_the_contract(self, method: str) -> None:
        module = methods.load(method)
        assert methods.describe(method).endswith(".")
        assert len(methods.describe(method)) < 110
        config = module.Config()  # every option has a default
        assert config == module.Config()
        assert callable(module.build)
        with pytest.raises(TypeError, match="has no option 'memberz'"):
            lpbnn.build(nn.Linear(2, 2), method, memberz=3)  # type: ignore[call-overload]

    @pytest.mark.parametrize("backbone", BACKBONES)
    def test_every_parameter_learns_and_terms_add_up(self, method: str, backbone: str) -> None:
        model = self.build(method, backbone).train()
        terms = model.loss(*batch(8, backbone))
        parts = [value for name, value in terms.items() if name != "loss"]
        torch.testing.assert_close(terms["loss"], torch.stack(parts).sum())
        terms["loss"].backward()
        without = [
            name for name, p in model.named_parameters() if p.requires_grad and p.grad is None
        ]
        assert not without

    def test_the_loss_falls_and_the_classes_are_found(self, method: str) -> None:
        model = self.build(method)
        losses = fit(model, 120)
        assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
        x, y = batch(64)
        assert (lpbnn.predict(model, x, samples=2, seed=0).labels == y).float().mean() > 0.8

    @pytest.mark.parametrize("backbone", BACKBONES)
    def test_prediction_is_a_distribution_over_classes(self, method: str, backbone: str) -> None:
        model = self.build(method, backbone)
        for size in (1, 2, 3, 5):
            p = lpbnn.predict(model, batch(size, backbone)[0], samples=2)
            assert p.probs.shape == (size, CLASSES)
            assert p.members is not None
            assert p.members.shape[1:] == (size, CLASSES)
            assert p.members.shape[0] == model.members * (2 if model.stochastic else 1)
            torch.testing.assert_close(p.probs.sum(1), torch.ones(size))
            assert (p.epistemic >= 0).all()
            assert p.ood_score.shape == (size,)
            assert model(batch(size, backbone)[0]).shape[:2] == (model.members, size)

    def test_odd_batches_train(self, method: str) -> None:
        model = self.build(method).train()
        for size in (1, 2, 3, 5, 7):
            assert model.loss(*batch(size))["loss"].isfinite()

    def test_the_prediction_depends_on_the_seed_and_not_on_the_chunk(self, method: str) -> None:
        model, (x, _) = self.build(method), batch(5)
        whole = lpbnn.predict(model, x, samples=2, seed=1)
        for chunk in (1, 3, 7, 100):
            parts = lpbnn.predict(model, x, samples=2, seed=1, chunk=chunk)
            torch.testing.assert_close(parts.probs, whole.probs)
            torch.testing.assert_close(parts.ood_score, whole.ood_score)
        if model.stochastic:
            assert not torch.equal(
                lpbnn.predict(model, x, seed=2).probs, lpbnn.predict(model, x, seed=3).probs
            )

    def test_training_is_repeatable(self, method: str) -> None:
        runs = []
        for _ in range(2):
            model = self.build(method, seed=3)
            torch.manual_seed(4)
            runs.append(fit(model, 5))
        assert runs[0] == runs[1]

    def test_state_goes_through_safetensors_after_training(
        self, method: str, tmp_path: Path
    ) -> None:
        safetensors = pytest.importorskip("safetensors.torch")
        model, other, (x, _) = self.build(method), self.build(method, seed=9), batch(5)
        fit(model, 3)
        safetensors.save_model(model, str(tmp_path / "weights.safetensors"))
        safetensors.load_model(other, str(tmp_path / "weights.safetensors"))
        expected = lpbnn.predict(model, x, seed=0)
        assert torch.equal(lpbnn.predict(other, x, seed=0).probs, expected.probs)

    def test_a_copy_after_training_is_independent(self, method: str) -> None:
        model, (x, _) = self.build(method), batch(5)
        fit(model, 2)
        expected = lpbnn.predict(model, x, seed=0).probs
        clone = copy.deepcopy(model)
        fit(model, 2)
        assert torch.equal(lpbnn.predict(clone, x, seed=0).probs, expected)

    def test_float64_and_bfloat16(self, method: str) -> None:
        model, (x, y) = self.build(method).train(), batch(8)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(x, y)["loss"]
        loss.backward()
        assert loss.isfinite()
        assert lpbnn.predict(model.double(), x.double()).probs.dtype == torch.float64

    def test_compile(self, method: str) -> None:
        model, (x, _) = self.build(method).eval(), batch(5)
        compiled = torch.compile(model, backend="eager")
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(x), expected)
        torch.compiler.reset()

    def test_regression_is_done_or_refused_by_name(self, method: str) -> None:
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        try:
            model = lpbnn.build(net, method, num_data=64, task="regression", **self.options)
        except ValueError as error:
            assert method in str(error)  # noqa: PT017
            assert "regression" in str(error)  # noqa: PT017
            return
        x, y = torch.randn(16, 2), torch.randn(16, 1)
        model.train().loss(x, y)["loss"].backward()
        p = lpbnn.predict(model, x, samples=2)
        assert p.mean.shape == p.total.shape == (16, 1)
        assert (p.aleatoric > 0).all()
