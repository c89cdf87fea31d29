"""Segmentation from the command to the picture: every method, small, on generated scenes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streets
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file

from lpbnn import backbones, cli, data, methods
from lpbnn.experiments import table2
from lpbnn.report import comparison
from lpbnn.report.formats import markdown
from lpbnn.report.runs import Run, grouped
from lpbnn.training import RunConfig
from lpbnn.training.evaluation import largest_anomalies
from lpbnn.training.run import load_run, reevaluate, run

METHODS = [name for name in methods.names() if name != "duq"]
NET = ["--backbone", "deeplab-resnet18", "--data", "street-scenes", "--batch-size", "4"]
NET += ["--epochs", "1", "--device", "cpu", "--no-progress", "--evaluate.examples", "2"]
SCENES = ["--data.train", "4", "--data.val", "1", "--data.test", "4", "--data.size", "32", "48"]
SMALL = ["--backbone.width", "4", "--backbone.channels", "8"]


def lpbnn(*args: object) -> None:
    cli.main([str(arg) for arg in args])


def train(method: str, out: Path, *options: str) -> Path:
    own = ["--method.include", "decoder.*"] if method in ("batchensemble", "rank1", "lpbnn") else []
    own += ["--backbone.dropout", "0.1"] if method == "mcdropout" else []
    lpbnn("train", *NET, "--method", method, "-o", out, *SCENES, *SMALL, *own, *options)
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    made = {name: train(name, folder / name) for name in METHODS}
    gn = ["--backbone.norm", "group", "--backbone.standardise"]
    return {**made, "lpbnn+gn": train("lpbnn", folder / "lpbnn+gn", *gn)}


def test_every_method_trains_and_is_measured(runs: dict[str, Path]) -> None:
    assert len(runs) == len(METHODS) + 1
    for name, folder in runs.items():
        found = json.loads((folder / "results.json").read_text())
        assert found["train"]["diverged"] is None, name
        assert set(found["test"]) == {"miou", "accuracy", "nll", "brier", "ece"}
        assert set(found["ood"]) == {"pixels", "pixels_pooled"}
        for part in found["ood"].values():
            assert all(0 <= part[key] <= 1 for key in ("auroc", "aupr", "fpr95"))
        with np.load(folder / "predictions.npz") as arrays:
            assert arrays["examples/test/predicted"].dtype == np.uint8
            assert arrays["examples/test/labels"].dtype == np.uint8
            assert (arrays["examples/test/labels"] == 9).any((1, 2)).all()  # anomalies to look at


def test_the_page_lays_them_side_by_side(runs: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    lpbnn("report", *runs.values(), "-o", page)
    text = page.read_text()
    for name in ("LP-BNN+GN", "Deep Ensembles", "epistemic uncertainty", "pavement", "anomalous"):
        assert name in text
    assert text.count('alt="confidence"') == 2 * len(runs)
    groups = grouped([Run.read(runs[name]) for name in ("lpbnn", "lpbnn+gn")])
    assert [group.label for group in groups] == ["LP-BNN", "LP-BNN+GN"]


def test_table2_shows_finished_runs(runs: dict[str, Path], tmp_path: Path) -> None:
    for name in ("mcp", "lpbnn", "lpbnn+gn"):
        shutil.copytree(runs[name], tmp_path / "runs" / name)
    text = markdown(comparison([tmp_path / "runs" / name for name in ("mcp", "lpbnn", "lpbnn+gn")]))
    for said in (
        "anomalies per image AUROC ↑",
        "anomalies pooled FPR95 ↓",
        "mIoU % ↑",
        "LP-BNN+GN",
    ):
        assert said in text
    console = Console(record=True, width=200)
    page = tmp_path / "t.html"
    table2.run(table2.Config(source=tmp_path / "runs", report=page), console)
    shown = console.export_text()
    for said in ("Table 2: street-scenes", "LP-BNN+GN", "MCP"):
        assert said in shown
    assert 'alt="truth"' in page.read_text()
    only = table2.Config(source=tmp_path / "runs", report=page, methods=("lpbnn",))
    table2.run(only, console)
    ours = console.export_text()
    assert "LP-BNN" in ours
    assert "LP-BNN+GN" not in ours


@pytest.mark.parametrize("method", ["mcp", "lpbnn"])
def test_predict_draws_maps(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    picture = tmp_path / "street.png"
    Image.fromarray(np.random.RandomState(0).randint(0, 255, (64, 80, 4), np.uint8)).save(picture)
    out = tmp_path / "maps"
    lpbnn("predict", runs[method], picture, "-o", out)
    assert "street.png" in capsys.readouterr().out
    with Image.open(out / "street.png") as made:
        assert made.width > 800
    with np.load(out / "street.npz") as maps:
        assert maps["labels"].shape == (32, 40)  # the height of training, the picture's own shape
        assert (maps["labels"].dtype, len(maps["classes"])) == (np.uint8, 9)
        assert maps["confidence"].min() >= 1 / 9 - 1e-6
        assert bool(maps["epistemic"].any()) == (method == "lpbnn")
    lpbnn("predict", runs[method], picture)
    assert "For the maps give a folder" in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    same = Image.open(picture)
    same.save(tmp_path / "other" / "street.png")
    with pytest.raises(SystemExit):
        lpbnn("predict", runs[method], picture, tmp_path / "other" / "street.png", "-o", out)
    assert "would both write street.png" in " ".join(capsys.readouterr().err.split())


def small(**changes: Any) -> RunConfig:
    fields: dict[str, Any] = {
        "backbone": "deeplab-resnet18",
        "backbone_options": {"width": 4, "channels": 8},
        "data": "street-scenes",
        "data_options": {"train": 4, "val": 1, "test": 2, "size": (32, 48)},
        "batch_size": 4,
        "epochs": 1,
        "device": "cpu",
        "progress": False,
    }
    return RunConfig("mcp", **{**fields, **changes})


def test_a_run_does_not_need_the_weights_it_began_with(tmp_path: Path) -> None:
    file = tmp_path / "encoder.safetensors"
    net = backbones.build("deeplab-resnet18", 9, width=4, channels=8)
    save_file({k: v.contiguous() for k, v in net.encoder.state_dict().items()}, file)  # type: ignore[union-attr]
    options = {"width": 4, "channels": 8, "pretrained": str(file)}
    before = run(small(backbone_options=options), tmp_path / "run")
    file.unlink()
    loaded = load_run(tmp_path / "run")
    assert loaded.config.backbone_options["pretrained"] == str(
        file
    )  # how it was made is still told
    again = reevaluate(tmp_path / "run")
    assert again["test"] == before["test"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augment": {"crop": [8, 48]}}, r"cut to \(8, 48\) in training: .*output stride.*larger"),
        (
            {"augment": {"crop": [8, 48]}},
            r"output_stride=8, or choose another .*larger augment.crop\.$",
        ),
        (
            {"augment": {"crop": [4, 48]}},
            r"stride\. Fix: enlarge the pictures, or choose another back",
        ),
        ({"data_options": {"train": 4, "test": 2, "size": (16, 15 + 1)}}, ""),
        ({"optim": {"parts": {"encodr.*": 0.1}}}, r"'encodr.\*'\] matches no parameter"),
        ({"backbone": "resnet18", "backbone_options": {}}, "needs classes for every pixel"),
    ],
)
def test_what_cannot_be_trained_is_told_before_a_folder_is_made(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = RunConfig.from_data({**small().to_data(), **changes})
    if not message:  # as small as the output stride is just enough
        run(config, tmp_path / "run")
        return
    with pytest.raises(ValueError, match=message):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_network_is_tried_with_a_corner_of_a_large_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"train": 1, "val": 1, "test": 1, "size": (256, 512)}
    seen: list[tuple[int, ...]] = []
    net = backbones.deeplab.DeepLab.forward  # type: ignore[attr-defined]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        if len(seen) > 1:
            raise KeyboardInterrupt
        return net(self, x)

    monkeypatch.setattr(backbones.deeplab.DeepLab, "forward", forward)  # type: ignore[attr-defined]
    with pytest.raises((KeyboardInterrupt, RuntimeError, ValueError)):
        run(small(data_options=sizes, batch_size=1), tmp_path / "run")
    assert seen[0] == (2, 3, 64, 64)


def test_scenes_with_large_anomalies_are_chosen() -> None:
    splits = data.load("street-scenes", train=1, val=1, test=40, size=(32, 64))
    chosen = largest_anomalies(splits, 4)
    sizes = (splits.test[:][1] == 9).flatten(1).sum(1)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert sizes[chosen].float().mean() > 1.5 * sizes.float().mean()
    assert len(largest_anomalies(splits, 100)) == 40


def test_evidence_of_void_alone_is_no_loss() -> None:
    import lpbnn

    model = lpbnn.build(torch.nn.Conv2d(3, 4, 1), "edl", task="segmentation", ignore_index=255)
    terms = model.loss(torch.randn(2, 3, 5, 5), torch.full((2, 5, 5), 255))
    assert terms["loss"] == 0
    terms["loss"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# --- table 2 ---------------------------------------------------------------------------------------


def test_table2_is_the_papers_setting_and_its_variants() -> None:
    config = table2.Config(
        preset=("streethazards", "camvid-anomaly-fast"),
        data_root="d",
        pretrained="w.safetensors",
        stride_in="1x1",
        seeds=2,
    )
    found = table2.configs(config)
    assert len(found) == 2 * 2 * 8
    assert [one.seed for one in found.values()] == [0] * 16 + [1] * 16
    one = found["streethazards-deeplab-lpbnn+gn-0"]
    assert (one.epochs, one.batch_size, one.optim.lr, one.optim.weight_decay) == (25, 4, 0.1, 1e-4)
    assert (one.schedule.name, one.optim.parts) == ("poly", {"encoder.*": 0.1})
    assert one.method_options == {"include": "decoder.*"}
    assert one.backbone_options == {
        "norm": "group",
        "standardise": True,
        "pretrained": "w.safetensors",
        "stride_in": "1x1",
    }
    assert found["streethazards-deeplab-ensemble-0"].method_options == {"reinit": "decoder"}
    assert found["camvid-anomaly-fast-deeplab-mcdropout-0"].backbone_options["dropout"] == 0.1
    assert found["camvid-anomaly-fast-deeplab-mcp-0"].epochs == 60
    with pytest.raises(ValueError, match="Did you mean 'lpbnn"):
        table2.configs(table2.Config(methods=("lpbn",)))
    paper = table2.paper("bdd-anomaly")
    assert paper.rows["LP-BNN+GN"]["pixels/fpr95"] == 0.2866
    assert paper.rows["mcp"]["miou"] == pytest.approx(0.4763)


def test_table2_takes_what_the_root_holds(tmp_path: Path) -> None:
    assert table2.presets(table2.Config()) == ("street-scenes",)
    with pytest.raises(FileNotFoundError, match="holds no data set of table 2"):
        table2.presets(table2.Config(data_root=str(tmp_path)))
    streets.camvid(tmp_path)
    assert table2.presets(table2.Config(data_root=str(tmp_path))) == ("camvid-anomaly",)
    streets.bdd(tmp_path)
    streets.streethazards(tmp_path / "streethazards")
    found = table2.presets(table2.Config(data_root=str(tmp_path)))
    assert found == ("streethazards", "bdd-anomaly", "camvid-anomaly")


def test_table2_trains_and_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table2, "SMALL_OPTIONS", {"width": 4, "channels": 8})
    made = table2.settings
    scenes = {"train": 4, "val": 1, "test": 2, "size": (32, 48)}

    def tiny(*args: Any) -> RunConfig:
        return RunConfig.from_data({**made(*args).to_data(), "data_options": scenes})

    monkeypatch.setattr(table2, "settings", tiny)
    console, page = Console(record=True, width=200), tmp_path / "r.html"
    config = table2.Config(
        out=tmp_path / "runs",
        report=page,
        methods=("mcp", "lpbnn", "lpbnn+gn"),
        epochs=1,
        jobs=1,
    )
    assert table2.run(config, console) == page
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        f"street-scenes-deeplab-resnet18-{row}-0" for row in ("lpbnn+gn", "lpbnn", "mcp")
    ]
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    table2.run(config, console)  # nothing is trained again
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
