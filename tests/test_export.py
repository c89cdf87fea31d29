"""ONNX files: they answer like predict, for every method and task, and say what they are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import lpbnn
from lpbnn import export, likelihoods, methods
from lpbnn.calibration import calibrate, fit_conformal
from lpbnn.export import export_onnx

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:onnxscript.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.onnx.*"),
]
QUICK = ("mcp", "mcdropout")  # the other methods are slow tests
CLASSES = ["label", "probs", "total", "epistemic", "ood_score"]
NUMBERS = ["mean", "std", "total", "epistemic", "ood_score"]


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, outputs))


def build(method: str = "lpbnn", net: nn.Module | None = None, **options: Any) -> Any:
    taken = methods.load(method).Config.__dataclass_fields__
    if "num_data" in taken:
        options["num_data"] = 10
    return lpbnn.build(net or mlp(), method, **options).eval()


def run(path: Path, *inputs: Tensor) -> dict[str, Tensor]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feed = {one.name: x.numpy() for one, x in zip(session.get_inputs(), inputs, strict=True)}
    names = [one.name for one in session.get_outputs()]
    return {
        name: torch.from_numpy(np.asarray(value))
        for name, value in zip(names, session.run(None, feed), strict=True)
    }


def properties(path: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


def test_onnxruntime_is_told_to_report_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    session = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "disable_telemetry_events", lambda: told.append("off"))
    monkeypatch.setattr(
        onnxruntime,
        "InferenceSession",
        lambda *args, **kw: told.append("made") or session(*args, **kw),
    )
    lpbnn.export_onnx(build("mcp"), torch.randn(2, 4), tmp_path / "a.onnx")
    assert told[:2] == ["off", "made"]


def check_classes(found: dict[str, Tensor], p: lpbnn.Prediction) -> None:
    assert torch.equal(found["label"], p.labels)
    for name in ("probs", "total", "epistemic", "ood_score"):
        torch.testing.assert_close(found[name], getattr(p, name), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in methods.names()
    ],
)
def test_every_method_answers_like_predict(method: str, tmp_path: Path) -> None:
    model, x = build(method), torch.randn(4, 4)
    if method == "tradi":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.loss(x, torch.tensor([0, 1, 2, 0]))["loss"].backward()
        optimizer.step()
        model.after_step(lr=0.1)
        model.after_fit([(x, torch.tensor([0, 1, 2, 0]))])
        model.zero_grad()
    before = lpbnn.predict(model, x, samples=2, seed=3)
    exported = export_onnx(model, x, tmp_path / "model.onnx", samples=2, seed=3)
    assert list(exported.outputs) == CLASSES
    assert exported.difference < 1e-5
    for size in (1, 2, 7, 30):
        new = torch.randn(size, 4)
        check_classes(run(exported.path, new), lpbnn.predict(model, new, samples=2, seed=3))
    after = lpbnn.predict(model, x, samples=2, seed=3)  # the model is as it was
    assert torch.equal(before.probs, after.probs)
    model.train().loss(x, torch.tensor([0, 1, 2, 0]))["loss"].backward()


def test_numbers_come_in_the_targets_unit_with_intervals(tmp_path: Path) -> None:
    model = build("ensemble", mlp(4), task="regression", members=2)
    x, y = torch.randn(50, 4), torch.randn(50, 2)
    conformal = fit_conformal(lpbnn.predict(model, x), y)
    options: dict[str, Any] = {"conformal": conformal, "level": 0.8}
    options |= {"target_mean": 100.0, "target_std": 10.0}
    path = export_onnx(model, x[:2], tmp_path / "model.onnx", **options).path
    found, p = run(path, x), lpbnn.predict(model, x)
    assert list(found) == [*NUMBERS, "lower", "upper"]
    low, high = p.interval(0.8, conformal)
    expected = {"mean": 10 * p.mean + 100, "std": 10 * p.std, "total": 100 * p.total}
    expected |= {"epistemic": 100 * p.epistemic, "ood_score": p.ood_score}
    expected |= {"lower": 10 * low + 100, "upper": 10 * high + 100}
    for name, right in expected.items():
        torch.testing.assert_close(found[name], right, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_prediction_sets_are_those_of_the_prediction(score: Any, tmp_path: Path) -> None:
    model = build("mcp", mlp(6))
    x, y = torch.randn(200, 4), torch.randint(0, 6, (200,))
    conformal = fit_conformal(lpbnn.predict(model, x), y, score, by_class=score == "lac")
    path = export_onnx(model, x, tmp_path / "model.onnx", conformal=conformal, level=0.7).path
    new = torch.randn(100, 4)
    found = run(path, new)["prediction_set"]
    assert found.dtype == torch.bool
    assert torch.equal(found, lpbnn.predict(model, new).sets(conformal, 0.7))
    assert 0.2 < found.float().mean() < 1
    stored = properties(path)
    assert (stored["conformal"], stored["level"]) == (score, "0.7")


def test_maps_are_answered_for_every_pixel(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 1))
    model = build("mcdropout", net, task="segmentation", members=2)
    x, y = torch.randn(2, 3, 6, 8), torch.randint(0, 5, (2, 6, 8))
    conformal = fit_conformal(lpbnn.predict(model, x, seed=0), y)
    path = export_onnx(model, x, tmp_path / "model.onnx", conformal=conformal).path
    new = torch.randn(5, 3, 6, 8)
    p = lpbnn.predict(model, new, seed=0)
    found = run(path, new)
    check_classes(found, p)
    assert found["total"].shape == (5, 6, 8)
    assert (found["prediction_set"] != p.sets(conformal)).float().mean() < 0.01


def test_a_calibrated_model_stays_calibrated(tmp_path: Path) -> None:
    model, x = build("mcp"), torch.randn(300, 4)
    plain = lpbnn.predict(model, x).probs
    y = (plain**0.3).multinomial(1).squeeze(1)
    scaling = calibrate(model, [(x, y)])
    path = export_onnx(model, x[:3], tmp_path / "model.onnx").path
    found = run(path, x)["probs"]
    torch.testing.assert_close(found, lpbnn.predict(model, x).probs, atol=1e-5, rtol=1e-4)
    assert (found - plain).abs().max() > 0.01
    assert float(properties(path)["temperature"]) == pytest.approx(scaling.temperature)


class Pair(nn.Module):
    """Two inputs and two heads; one input is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, left: Tensor, right: Tensor, unused: Any = None) -> dict[str, Tensor]:
        return {"kind": self.a(left), "size": self.b(right)}


def test_several_inputs_and_heads_have_their_names(tmp_path: Path) -> None:
    heads = {"kind": likelihoods.Categorical(), "size": likelihoods.Gaussian()}
    model = build("ensemble", Pair(), likelihood=heads, members=2)
    x = {"left": torch.randn(3, 4), "right": torch.randn(3, 2)}
    exported = export_onnx(model, x, tmp_path / "model.onnx")
    assert list(exported.inputs) == ["left", "right"]
    assert list(exported.outputs) == [
        *(f"kind.{name}" for name in CLASSES),
        *(f"size.{name}" for name in NUMBERS),
    ]
    p: Any = lpbnn.predict(model, x)
    found = run(exported.path, x["left"], x["right"])
    torch.testing.assert_close(found["kind.probs"], p["kind"].probs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found["size.mean"], p["size"].mean, atol=1e-5, rtol=1e-4)


def test_labels_that_do_not_exclude_each_other(tmp_path: Path) -> None:
    model, x = build("mcp", task="multilabel"), torch.randn(5, 4)
    found = run(export_onnx(model, x, tmp_path / "model.onnx").path, x)
    p = lpbnn.predict(model, x)
    assert found["label"].dtype == torch.bool
    check_classes(found, p)


def test_raw_inputs_are_prepared_inside(tmp_path: Path) -> None:
    class Scale(nn.Module):
        def forward(self, pixels: Tensor) -> Tensor:
            return pixels.float() / 255

    model, raw = build("mcp"), torch.randint(0, 256, (3, 4), dtype=torch.uint8)
    exported = export_onnx(model, raw, tmp_path / "model.onnx", prepare=Scale())
    assert exported.inputs == {"inputs": "uint8 (batch, 4)"}
    check_classes(run(exported.path, raw), lpbnn.predict(model, raw.float() / 255))


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    export_onnx(build("mcp"), torch.randn(2, 4), path, metadata={"classes": ["a", "b"], "who": "x"})
    stored = properties(path)
    assert stored["version"] == lpbnn.__version__
    assert json.loads(stored["classes"]) == ["a", "b"]
    assert (stored["who"], stored["task"], stored["members"]) == ("x", "classification", "1")


# Bad input


def test_files_are_replaced_on_request_only(tmp_path: Path) -> None:
    path, model, x = tmp_path / "model.onnx", build("mcp"), torch.randn(2, 4)
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="--force"):
        export_onnx(model, x, path)
    assert path.read_text() == "mine"
    export_onnx(model, x, path, force=True)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(IsADirectoryError, match="is a folder"):
        export_onnx(model, x, tmp_path)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        export_onnx(model, x, tmp_path / "none" / "model.onnx")


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Callable[[str], Any] = export.find_spec
    monkeypatch.setattr(export, "find_spec", lambda n: None if n == "onnxscript" else found(n))
    with pytest.raises(ImportError, match=r"needs onnxscript.*'lpbnn\[export\]'"):
        export_onnx(build("mcp"), torch.randn(2, 4), tmp_path / "model.onnx")


def test_what_onnx_cannot_express_is_refused_with_the_cause(tmp_path: Path) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum() > 0 else -self.layer(x)

    with pytest.raises(
        ValueError, match="around Branch cannot be exported.*Fix: a forward without"
    ):
        export_onnx(build("mcp", Branch()), torch.randn(2, 4), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_graph_that_disagrees_is_not_written(tmp_path: Path) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + torch.randn(4))

    with pytest.raises(ValueError, match=r"does not agree with predict.*differs by"):
        export_onnx(build("mcp", Noisy()), torch.randn(2, 4), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_an_example_is_a_batch(tmp_path: Path) -> None:
    for example in (torch.zeros(0, 4), torch.tensor(1.0), "x"):
        with pytest.raises((ValueError, TypeError), match=r"example|batch"):
            export_onnx(build("mcp"), example, tmp_path / "model.onnx")
    with pytest.raises(TypeError, match=r"lpbnn.build"):
        export_onnx(mlp(), torch.randn(2, 4), tmp_path / "model.onnx")


def test_sets_that_are_drawn_are_refused(tmp_path: Path) -> None:
    model, x = build("mcp"), torch.randn(50, 4)
    y = torch.randint(0, 3, (50,))
    conformal = fit_conformal(lpbnn.predict(model, x), y, "aps", randomised=True)
    with pytest.raises(ValueError, match="randomised=False"):
        export_onnx(model, x, tmp_path / "model.onnx", conformal=conformal)
