"""Properties of every method; a new method file is tested without being named here."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import lpbnn
from lpbnn import backbones, methods

NAMES = methods.names()
BACKBONES = {
    "mlp": ({"hidden": (16, 16), "image_size": 8}, (1, 8, 8)),
    "lenet": ({}, (1, 8, 8)),
    "small-cnn": ({}, (1, 8, 8)),
}
CLASSES = 4
# Several tests here ask networks that were not trained; tradi says what it then cannot answer.
pytestmark = pytest.mark.filterwarnings("ignore::lpbnn.model.NotFittedWarning")


def build(method: str, backbone: str = "mlp", seed: int = 0) -> lpbnn.UncertainModel:
    torch.manual_seed(seed)
    options, shape = BACKBONES[backbone]
    net = backbones.build(backbone, CLASSES, in_channels=shape[0], **options)
    return lpbnn.build(net, method, num_data=10_000)


def batch(size: int, backbone: str = "mlp") -> tuple[Tensor, Tensor]:
    """Images whose class can be seen: one bright quarter."""
    y = torch.arange(size) % CLASSES
    x = 0.3 * torch.randn(size, *BACKBONES[backbone][1])
    for i, label in enumerate(y.tolist()):
        row, column = 4 * (label // 2), 4 * (label % 2)
        x[i, :, row : row + 4, column : column + 4] += 1
    return x, y


def fit(model: lpbnn.UncertainModel, steps: int, size: int = 32, lr: float = 0.05) -> list[float]:
    """The contract's loop: what any trainer of a user's own does."""
    model.train()
    optimizer = torch.optim.SGD(
        model.parameter_groups(weight_decay=1e-4, lr=lr), lr=lr, momentum=0.9
    )
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", NAMES)
def test_built_where_another_precision_is_the_default(method: str, dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        signs = [{"init": "signs"}] if method in ("lpbnn", "batchensemble", "rank1") else []
        for options in ({}, *signs):
            net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, CLASSES))
            model = lpbnn.build(net, method, num_data=100, **options)
            model.loss(torch.randn(6, 4), torch.arange(6) % CLASSES)["loss"].backward()
            assert lpbnn.predict(model, torch.randn(2, 4)).probs.isfinite().all()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("method", NAMES)
def test_the_file_keeps_the_contract(method: str) -> None:
    module = methods.load(method)
    assert methods.describe(method).endswith(".")
    assert len(methods.describe(method)) < 110
    config = module.Config()  # every option has a default
    assert config == module.Config()
    assert callable(module.build)
    with pytest.raises(TypeError, match="has no option 'memberz'"):
        lpbnn.build(nn.Linear(2, 2), method, memberz=3)


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_parameter_learns_and_terms_add_up(method: str, backbone: str) -> None:
    model = build(method, backbone).train()
    terms = model.loss(*batch(8, backbone))
    parts = [value for name, value in terms.items() if name != "loss"]
    torch.testing.assert_close(terms["loss"], torch.stack(parts).sum())
    terms["loss"].backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without


@pytest.mark.parametrize("method", NAMES)
def test_the_loss_falls_and_the_classes_are_found(method: str) -> None:
    model = build(method)
    losses = fit(model, 120)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    x, y = batch(64)
    assert (lpbnn.predict(model, x, samples=2, seed=0).labels == y).float().mean() > 0.8


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_prediction_is_a_distribution_over_classes(method: str, backbone: str) -> None:
    model = build(method, backbone)
    for size in (1, 2, 3, 5):
        p = lpbnn.predict(model, batch(size, backbone)[0], samples=2)
        assert p.probs.shape == (size, CLASSES)
        assert p.members.shape[1:] == (size, CLASSES)
        assert p.members.shape[0] == model.members * (2 if model.stochastic else 1)
        torch.testing.assert_close(p.probs.sum(1), torch.ones(size))
        assert (p.epistemic >= 0).all()
        assert p.ood_score.shape == (size,)
        assert model(batch(size, backbone)[0]).shape[:2] == (model.members, size)


@pytest.mark.parametrize("method", NAMES)
def test_odd_batches_train(method: str) -> None:
    model = build(method).train()
    for size in (1, 2, 3, 5, 7):
        assert model.loss(*batch(size))["loss"].isfinite()


@pytest.mark.parametrize("method", NAMES)
def test_the_prediction_depends_on_the_seed_and_not_on_the_chunk(method: str) -> None:
    model, (x, _) = build(method), batch(5)
    whole = lpbnn.predict(model, x, samples=2, seed=1)
    for chunk in (1, 3, 7, 100):
        parts = lpbnn.predict(model, x, samples=2, seed=1, chunk=chunk)
        torch.testing.assert_close(parts.probs, whole.probs)
        torch.testing.assert_close(parts.ood_score, whole.ood_score)
    if model.stochastic:
        assert not torch.equal(
            lpbnn.predict(model, x, seed=2).probs, lpbnn.predict(model, x, seed=3).probs
        )


@pytest.mark.parametrize("method", NAMES)
def test_training_is_repeatable(method: str) -> None:
    runs = []
    for _ in range(2):
        model = build(method, seed=3)
        torch.manual_seed(4)
        runs.append(fit(model, 5))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("method", NAMES)
def test_state_goes_through_safetensors_after_training(method: str, tmp_path: Path) -> None:
    model, other, (x, _) = build(method), build(method, seed=9), batch(5)
    fit(model, 3)
    save_model(model, str(tmp_path / "weights.safetensors"))
    load_model(other, str(tmp_path / "weights.safetensors"))
    expected = lpbnn.predict(model, x, seed=0)
    assert torch.equal(lpbnn.predict(other, x, seed=0).probs, expected.probs)


@pytest.mark.parametrize("method", NAMES)
def test_a_copy_after_training_is_independent(method: str) -> None:
    model, (x, _) = build(method), batch(5)
    fit(model, 2)
    expected = lpbnn.predict(model, x, seed=0).probs
    clone = copy.deepcopy(model)
    fit(model, 2)
    assert torch.equal(lpbnn.predict(clone, x, seed=0).probs, expected)


@pytest.mark.parametrize("method", NAMES)
def test_float64_and_bfloat16(method: str) -> None:
    model, (x, y) = build(method).train(), batch(8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(x, y)["loss"]
    loss.backward()
    assert loss.isfinite()
    assert lpbnn.predict(model.double(), x.double()).probs.dtype == torch.float64


@pytest.mark.parametrize("method", NAMES)
def test_compile(method: str) -> None:
    model, (x, _) = build(method).eval(), batch(5)
    compiled = torch.compile(model, backend="eager")
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(x), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("method", NAMES)
def test_regression_is_done_or_refused_by_name(method: str) -> None:
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    try:
        model = lpbnn.build(net, method, num_data=64, task="regression")
    except ValueError as error:
        assert method in str(error)  # noqa: PT017
        assert "regression" in str(error)  # noqa: PT017
        return
    x, y = torch.randn(16, 2), torch.randn(16, 1)
    model.train().loss(x, y)["loss"].backward()
    p = lpbnn.predict(model, x, samples=2)
    assert p.mean.shape == p.total.shape == (16, 1)
    assert (p.aleatoric > 0).all()
