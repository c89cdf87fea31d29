"""Segmentation through the engine: crops, class weights, files, slices of one, bounded memory."""

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import streets
import torch
from memory import PeakMemory
from torch import Tensor, nn

import lpbnn
import lpbnn.training.evaluation as evaluation
from lpbnn import data, likelihoods
from lpbnn.data import Dataset, Splits, files
from lpbnn.data.augment import Transform, batch_indices, epoch_generator
from lpbnn.training import AugmentConfig, EvalConfig, RunConfig, ScheduleConfig
from lpbnn.training.build import DataInfo, build_model
from lpbnn.training.dataloading import AUGMENTATION, ORDER, TrainLoader
from lpbnn.training.evaluator import NotFinite, Predictor
from lpbnn.training.loop import fit
from lpbnn.training.preflight import check_training
from lpbnn.training.run import load_run, run

Make = Callable[..., RunConfig]
TINY: dict[str, Any] = {
    "backbone": "deeplab-resnet18",
    "backbone_options": {"width": 4, "channels": 8},
    "data": "street-scenes",
    "batch_size": 4,
    "epochs": 1,
}
WINDOW = AugmentConfig(scale=(0.5, 2.0), crop=(32, 32), colour=0.2, cutout=8)


@pytest.fixture(scope="module")
def scenes() -> Splits:
    return data.load("street-scenes", train=10, val=2, test=4, size=(32, 48))


@pytest.fixture
def camvid(tmp_path: Path) -> Path:
    counts = {"train": 6, "val": 2, "test": 4}
    return streets.camvid(tmp_path, size=(24, 32), counts=counts)


# --- the feed --------------------------------------------------------------------------------------


def test_a_step_is_the_transformed_batch_of_its_epoch(make: Make, scenes: Splits) -> None:
    config = make(augment=WINDOW, **TINY)
    feed = TrainLoader(scenes, config)
    augment = WINDOW.over(scenes.augment)
    assert augment.flip  # the set's own hint
    transform = Transform(scenes.mean, scenes.std, augment, void=255)
    chance = epoch_generator(config.seed, 2, stream=AUGMENTATION)
    order = batch_indices(10, 4, epoch_generator(config.seed, 2, stream=ORDER))
    found = list(feed.epoch(2))
    assert [tuple(x.shape) for x, _ in found] == [(4, 3, 32, 32)] * 2 + [(2, 3, 32, 32)]
    for rows, (x, y) in zip(order, found, strict=True):
        images, labels = scenes.train[rows]
        x_again, y_again = transform(images, labels, transform.draw(images, chance))
        assert y_again is not None
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)
        assert y.dtype == torch.int64


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_batches_of_one(make: Make, scenes: Splits, world: int) -> None:
    config = make(augment=WINDOW, **TINY)
    one = list(TrainLoader(scenes, config).epoch(1))
    shares = [list(TrainLoader(scenes, config, rank=r, world=world).epoch(1)) for r in range(world)]
    for step, whole in enumerate(one[:2]):
        for part in (0, 1):
            assert torch.equal(torch.cat([share[step][part] for share in shares]), whole[part])


def test_a_process_reads_no_file_of_another(
    make: Make, camvid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = data.load("camvid", camvid, memory=0)
    read: list[int] = []
    original = files.FileDataset.read_into

    def noted(self: files.FileDataset, place: int, x: Tensor, y: Tensor) -> None:
        read.append(place)
        original(self, place, x, y)

    monkeypatch.setattr(files.FileDataset, "read_into", noted)
    config = make(**TINY | {"batch_size": 2})
    for rank in (0, 1):
        list(TrainLoader(splits, config, rank=rank, world=2).epoch(0))
    assert sorted(read) == list(range(6))


def test_files_and_memory_train_alike(make: Make, camvid: Path) -> None:
    config = make("lpbnn", **TINY, method_options={"include": "decoder.*"}, augment=WINDOW)
    weights = []
    for memory in (0, 2):
        splits = data.load("camvid-anomaly", camvid, memory=memory)
        model = build_model(config, DataInfo.of(splits))
        fit(model, splits, config)
        weights.append(model.state_dict())
        found = evaluation.evaluate(model, splits, config).results
        weights[-1]["miou"] = torch.tensor(found["test"]["miou"])
        weights[-1]["auroc"] = torch.tensor(found["ood"]["pixels"]["auroc"])
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_a_border_without_a_label_is_refused(make: Make, scenes: Splits) -> None:
    x, y = scenes.train[:]
    nameless = replace(
        scenes, train=Dataset(x, y.clamp(0, 8)), ignore_index=None, augment=data.Augment()
    )
    for bad in (
        AugmentConfig(scale=(0.5, 1.0)),
        AugmentConfig(crop=(64, 32)),
        AugmentConfig(pad=1),
    ):
        with pytest.raises(ValueError, match="'street-scenes' has no ignore_index"):
            check_training(make(augment=bad, **TINY), nameless)
    check_training(make(augment=AugmentConfig(scale=(1.0, 2.0), crop=(16, 16)), **TINY), nameless)


def test_labels_without_a_class_are_told_before_training(make: Make, scenes: Splits) -> None:
    labels = scenes.train[:][1].clone()
    labels[0, 0, :3] = 9  # the anomaly, which has no output
    wrong = replace(scenes, train=Dataset(scenes.train[:][0], labels))
    with pytest.raises(ValueError, match=r"3 training labels are outside 0..8 and are not ignore"):
        check_training(make(**TINY), wrong)


def test_void_may_be_the_number_of_a_class(make: Make, scenes: Splits) -> None:
    """Sets whose void is 0, say; other labels without a class are still counted, and rightly."""
    inputs, labels = scenes.train[:]
    labels = labels.where(labels != 255, 0)
    within = replace(scenes, train=Dataset(inputs, labels), ignore_index=0)
    check_training(make(**TINY), within)
    labels = labels.clone()
    labels[0, 0, :3] = 9
    with pytest.raises(ValueError, match=r": 3 training labels are outside 0..8 and are not ignor"):
        check_training(make(**TINY), replace(within, train=Dataset(inputs, labels)))


def test_classification_may_be_resized_and_coloured_but_not_cropped(
    make: Make, splits: Splits
) -> None:
    feed = TrainLoader(splits, make(augment=AugmentConfig(scale=(0.8, 1.2), colour=0.3)))
    x, y = next(iter(feed.epoch(0)))
    assert x.shape == (64, 1, 8, 8)
    assert y.shape == (64,)
    with pytest.raises(ValueError, match=r"augment.crop is \(4, 4\), but 'digits' is no segm"):
        check_training(make(augment=AugmentConfig(crop=(4, 4))), splits)


# --- class weights ---------------------------------------------------------------------------------


def test_class_weights_follow_their_formulas() -> None:
    counts = [700, 200, 0, 100]
    median = likelihoods.class_weights(counts, "median")
    assert median == pytest.approx([0.2 / 0.7, 1.0, 0.0, 2.0])
    log = likelihoods.class_weights(counts, "log")
    expected = [1 / torch.log(torch.tensor(1.02 + n / 1000)).item() for n in counts]
    assert log == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="need labels to count; got counts"):
        likelihoods.class_weights([0, 0], "median")


@pytest.mark.parametrize(
    "method", ["mcp", "batchensemble", "lpbnn", "mcdropout", "rank1", "ensemble"]
)
def test_weights_are_in_the_training_loss(make: Make, scenes: Splits, method: str) -> None:
    """Against the mean over pixels, each counted with the weight of its class."""
    info = DataInfo.of(scenes)
    model = build_model(make(method, class_weights="log", **TINY), info)
    assert isinstance(model.likelihood.class_weights, Tensor)
    weights = torch.tensor(likelihoods.class_weights(scenes.class_counts, "log"))
    assert torch.allclose(model.likelihood.class_weights, weights)
    outputs, labels = torch.randn(3, 9, 5, 4), torch.randint(0, 9, (3, 5, 4))
    labels[0, :2] = 255
    top = bottom = 0.0
    for row in range(3):
        for i in range(5):
            for j in range(4):
                if labels[row, i, j] != 255:
                    k = int(labels[row, i, j])
                    top -= weights[k] * outputs[row, :, i, j].log_softmax(0)[k]
                    bottom += weights[k]
    assert torch.allclose(
        model.likelihood.mean_nll(outputs, labels), torch.as_tensor(top / bottom), rtol=1e-5
    )


def test_weights_change_training_and_not_the_metrics(make: Make, scenes: Splits) -> None:
    info = DataInfo.of(scenes)
    plain = build_model(make(**TINY), info)
    weighted = build_model(make(class_weights="median", **TINY), info)
    assert plain.likelihood.class_weights is None
    x, y = scenes.normalise(scenes.train[:4][0]), scenes.train[:4][1]
    assert not torch.isclose(plain.loss(x, y)["nll"], weighted.loss(x, y)["nll"])
    found = [
        evaluation.evaluate(m, scenes, make(**TINY)).results["test"]["nll"]
        for m in (plain, weighted)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_weights_need_classes_and_survive_the_run_folder(
    make: Make, scenes: Splits, tmp_path: Path
) -> None:
    table = data.load("cubic")
    config = make(data="cubic", class_weights="log")
    with pytest.raises(ValueError, match="class_weights is 'log', but 'cubic' is a regression set"):
        build_model(config, DataInfo.of(table))
    config = make(class_weights="median", augment=WINDOW, **TINY)
    run(config, tmp_path, splits=scenes)
    loaded = load_run(tmp_path)
    assert loaded.data.class_counts == scenes.class_counts
    assert isinstance(loaded.model.likelihood.class_weights, Tensor)


# --- training and evaluation -----------------------------------------------------------------------


class Net(nn.Module):
    """Fully convolutional and small: what it sees of a batch can be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 9, 1)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


@pytest.mark.parametrize("method", ["batchensemble", "lpbnn", "rank1"])
@pytest.mark.parametrize("batch", [1, 3, 4, 6])
def test_a_batch_of_four_is_a_slice_of_one_for_each_member(method: str, batch: int) -> None:
    model = lpbnn.build(
        Net(),
        method,
        members=4,
        num_data=10,
        batch_mode="split",
        task="segmentation",
        ignore_index=255,
    )
    x, y = torch.randn(batch, 3, 8, 12), torch.randint(0, 9, (batch, 8, 12))
    y[:, :2] = 255
    lpbnn.check(model, x)  # it runs the network a few times
    rows: list[int] = []
    hook = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    hook.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    terms = model.loss(x, y)
    assert terms["loss"].isfinite()
    terms["loss"].backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    if batch == 4:
        assert rows == [4]  # one example for each member, not each example for every member


def test_a_batch_without_one_valid_pixel_does_no_harm() -> None:
    model = lpbnn.build(Net(), "lpbnn", num_data=10, task="segmentation", ignore_index=255)
    terms = model.loss(torch.randn(4, 3, 8, 8), torch.full((4, 8, 8), 255))
    assert terms["nll"] == 0
    terms["loss"].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("method", ["mcp", "lpbnn"])
def test_a_whole_run(make: Make, scenes: Splits, tmp_path: Path, method: str) -> None:
    """Batch 4, polynomial schedule, crops, class weights; resumed, it gives its results."""
    options = {"include": "decoder.*", "batch_mode": "split"} if method == "lpbnn" else {}
    config = make(
        method,
        method_options=options,
        schedule=ScheduleConfig("poly"),
        class_weights="log",
        augment=WINDOW,
        **TINY | {"epochs": 2},
    )
    results = run(config, tmp_path / "run", splits=scenes)
    assert results["task"] == "segmentation"
    assert 0 <= results["test"]["miou"] <= results["test"]["accuracy"] <= 1
    assert {"pixels", "pixels_pooled"} == set(results["ood"])
    assert results["train"]["last"]["val_miou"] >= 0
    assert run(None, tmp_path / "run", resume=True) == results


def test_the_loss_falls_on_the_generated_streets(make: Make, scenes: Splits) -> None:
    config = make("lpbnn", method_options={"include": "decoder.*"}, **TINY | {"epochs": 6})
    training = fit(build_model(config, DataInfo.of(scenes)), scenes, config)
    assert training.rows[-1]["nll"] < 0.8 * training.rows[0]["nll"]


@pytest.mark.slow
def test_evaluation_needs_no_more_memory_for_more_frames(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors need exactly as much; decoding needs as much within the noise of the interpreter."""
    monkeypatch.setattr(evaluation, "TIMED_PIXELS", 4 * 48 * 64)
    peaks: list[int] = []
    decoded: list[int] = []
    for number, count in enumerate((10, 10, 210)):  # the first one imports what is imported late
        # Every second frame has an anomaly and is in the test part.
        counts = {"train": 2, "val": 2, "test": 2 * count}
        root = streets.camvid(tmp_path / str(number), size=(48, 64), counts=counts)
        splits = data.load("camvid-anomaly", root, memory=0)
        assert len(splits.test) == count
        config = make(**TINY | {"data": "camvid"}, evaluate=EvalConfig(batch_size=2, examples=2))
        model = build_model(config, DataInfo.of(splits)).eval()
        gc.collect()
        tracemalloc.start()
        with PeakMemory() as memory:
            assert evaluation.evaluate(model, splits, config).results["ood"]["pixels"]["auroc"] > 0
        decoded.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        peaks.append(memory.peak)
    assert peaks[2] <= 1.01 * peaks[1]
    # 200 more frames are 2.4 MB, decoded; a table of the interpreter that grows meanwhile is up to 0.6 MB.
    assert decoded[2] < decoded[1] + 1_000_000


def predictor_for(info: DataInfo, make: Make, shape: tuple[int, ...], size: int = 256) -> Predictor:
    model = lpbnn.build(Net(), "mcp", task="segmentation")
    config = make(evaluate=EvalConfig(batch_size=size))
    return Predictor(model, replace(info, shape=shape), config)


@pytest.mark.parametrize(
    ("shape", "size", "batch", "timed"),
    [
        ((3, 720, 1280), 256, 1, 9),
        ((3, 2000, 2000), 256, 1, 2),
        ((3, 5000, 5000), 256, 1, 1),
        ((3, 360, 480), 256, 6, 48),
        ((3, 360, 480), 2, 2, 48),
        ((3, 32, 32), 256, 256, 256),
        ((3, 32, 32), 100, 100, 200),
        ((10,), 256, 256, 256),
    ],
)
def test_large_pictures_are_predicted_and_timed_a_few_at_a_time(
    make: Make, scenes: Splits, shape: tuple[int, ...], size: int, batch: int, timed: int
) -> None:
    predictor = predictor_for(DataInfo.of(scenes), make, shape, size)
    assert predictor.batch_size == batch
    assert evaluation._timed(1500, predictor) == timed
    assert evaluation._timed(1, predictor) == 1


class NanForBright(nn.Module):
    """A network whose maps for bright scenes are no numbers."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = nn.Parameter(torch.randn(classes, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        bright = (x.mean((1, 2, 3)) > 1)[:, None, None, None]
        maps = self.classes.expand(len(x), -1, *x.shape[2:])
        return torch.where(bright, torch.nan, maps)


def test_maps_of_other_scenes_that_are_no_numbers_are_told(make: Make, scenes: Splits) -> None:
    white = Dataset(torch.full_like(scenes.test[:][0], 255), scenes.test[:][1])
    model = lpbnn.build(NanForBright(scenes.num_classes or 0), "mcp", task="segmentation")
    with pytest.raises(NotFinite, match="are NaN or infinite: the model has diverged"):
        evaluation.evaluate(model, replace(scenes, ood={"white": white}), make(**TINY))
