"""The pictures that open the page of ``lpbnn demo``: small networks, trained here in seconds.

Each function trains the networks of one picture, draws it and says what it shows, with the numbers
of this run. They share nothing, so they can run in processes of their own.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lpbnn
from lpbnn import data, metrics, plots
from lpbnn.bench import Bench, Setup, ratio
from lpbnn.model import UncertainModel
from lpbnn.report.page import Picture
from lpbnn.report.svg import colour, drawing

WIDTH = 1160  # of a picture, pixels
NAMES = {"mcp": "plain network", "ensemble": "Deep Ensemble", "batchensemble": "BatchEnsemble"}
PREDICTIONS = 16  # averaged in a picture: draws times members
STD = "init_std=1"


def _name(method: str, options: Mapping[str, Any]) -> str:
    name = NAMES.get(method, "LP-BNN")
    return f"{name}, {STD}" if "init_std" in options else name


def _mlp(inputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


def _train(
    model: UncertainModel,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> UncertainModel:
    for x, y in batches:
        optimizer.zero_grad()
        model.loss(x, y)["loss"].backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return model.eval()


def _predict(model: UncertainModel, x: Tensor) -> lpbnn.Prediction:
    return lpbnn.predict(model, x, samples=PREDICTIONS // 4, seed=0)


def two_moons(steps: int = 600) -> Picture:
    """Draw where four methods are ignorant around two classes of points in the plane."""
    from sklearn.datasets import make_moons

    x, y = (torch.tensor(part) for part in make_moons(400, noise=0.1, random_state=0))
    x = x.float()
    ways: Sequence[tuple[str, dict[str, Any]]] = (
        ("mcp", {}),
        ("ensemble", {"members": 4}),
        ("batchensemble", {"members": 4}),
        ("lpbnn", {"members": 4}),
        ("lpbnn", {"members": 4, "init_std": 1.0}),
    )
    angle = torch.linspace(0, 2 * torch.pi, 100)[:, None]
    far = x.mean(0) + 6 * torch.cat([angle.cos(), angle.sin()], 1)
    told = []
    with drawing(WIDTH, 262, "Epistemic uncertainty around two moons") as made:
        for number, (method, options) in enumerate(ways):
            torch.manual_seed(0)
            model = lpbnn.build(_mlp(2), method, num_data=len(x), **options)
            groups = model.parameter_groups(weight_decay=1e-4, lr=0.01)
            _train(model, torch.optim.Adam(groups, lr=0.01), repeat((x, y), steps))
            near, away = (_predict(model, points).epistemic.mean() for points in (x, far))
            axes = made.axes(number * 234, 22, 222, 222)
            plots.decision_map(axes, model, x, y, samples=4, margin=2.0)
            axes.set(xticks=(), yticks=())
            axes.set_title(_name(method, options), fontsize=11, loc="left")
            told.append(f"{_name(method, options)} {near:.2f} and {away:.2f}")
    return Picture(
        "moons",
        "Two moons: where the members disagree",
        (
            "The same network and the same 400 points in every map; dark is epistemic uncertainty. "
            "It ought to be low where points are, and high where there are none. The plain network "
            "has none. In the Deep Ensemble, BatchEnsemble and default LP-BNN it follows the boundary "
            "between the classes and widens along it. With members that start far apart "
            f"({STD}) LP-BNN's covers far more of the region without points.",
            f"Mean epistemic uncertainty in nats, at the points and on a circle of radius 6: "
            f"{'; '.join(told)}.",
            f"Adam, rate 0.01, {steps} steps on all points. For maps like these take {STD}; for "
            "accuracy and calibration on test data like the training data keep the default, 0.1.",
        ),
        made.svg,
    )


def regression(steps: int = 1500) -> Picture:
    """Draw the bands of three methods through twenty noisy points of a cubic curve."""
    splits = data.load("cubic")
    train, test, outside = (p[:] for p in (splits.train, splits.test, splits.ood["outside"]))
    x, y = splits.normalise(train[0]), splits.normalise_targets(train[1])
    grid = torch.linspace(-6, 6, 241)[:, None]
    told = []
    with drawing(WIDTH, 280, "Regression bands on a cubic curve") as made:
        for number, method in enumerate(("mcp", "ensemble", "lpbnn")):
            torch.manual_seed(0)
            options: dict[str, Any] = {} if method == "mcp" else {"members": 4}
            model = lpbnn.build(_mlp(1), method, task="regression", num_data=len(x), **options)
            groups = model.parameter_groups(weight_decay=0.01, lr=0.01)
            optimizer = torch.optim.AdamW(groups, lr=0.01)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            _train(model, optimizer, repeat((x, y), steps), schedule)

            def predicted(
                inputs: Tensor, model: UncertainModel = model
            ) -> tuple[lpbnn.Prediction, Tensor, Tensor]:
                p = _predict(model, splits.normalise(inputs))
                assert p.members is not None
                assert p.member_variances is not None
                means = p.members * splits.target_std + splits.target_mean
                return p, means, p.member_variances * splits.target_std**2

            p, means, variances = predicted(grid)
            mean, epistemic = means.mean(0), p.epistemic.sqrt() * splits.target_std
            axes = made.axes(number * 390 + 34, 22, 344, 230)
            plots.regression_band(
                axes, grid, mean, p.std * splits.target_std, epistemic,
                train=train, color=colour(0),
            )  # fmt: skip
            axes.set_ylim(-220, 220)
            axes.set_title(_name(method, {}), fontsize=11, loc="left")
            inside, means, variances = predicted(test[0])
            nll = metrics.mixture_nll(means, variances, test[1])
            coverage = metrics.coverage(means, variances, test[1], level=0.95)
            strange = predicted(outside[0])[0]
            scores = torch.cat([inside.ood_score.flatten(), strange.ood_score.flatten()])
            auroc = metrics.auroc(scores, torch.arange(len(scores)) >= len(test[0]))
            told.append(
                f"{_name(method, {})}: NLL {nll:.3g}, coverage {coverage:.2f}, AUROC {auroc:.2f}"
            )
    return Picture(
        "regression",
        "Regression: a band that knows where the data end",
        (
            "Twenty noisy points of a cubic curve between -4 and 4, where a band should hold 95 % of "
            "new points, and should open outside. The dark part of a band is epistemic. The plain "
            "network memorises the noise: its band is too narrow, and no wider outside. That of "
            "LP-BNN opens; the price is a mean that bends less than the curve does.",
            f"{'; '.join(told)}. (NLL and coverage of the 95 % band on 200 test points; AUROC of "
            "telling points outside from points inside by the predicted variance.)",
            f"AdamW, rate 0.01 falling to 0 along a cosine, {steps:,} steps on all points, the "
            "default noise: settings for small sets.",
        ),
        made.svg,
    )


class _Segmenter(nn.Module):
    """An encoder that runs once for each picture, and a decoder that gets members."""

    def __init__(self, classes: int, width: int = 24) -> None:
        super().__init__()
        wide = 2 * width
        self.encoder = nn.Sequential(
            self.block(3, width, 2), self.block(width, width), self.block(width, wide, 2),
            self.block(wide, wide), self.block(wide, wide, 1, 2), self.block(wide, wide, 1, 4),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            self.block(wide, wide), self.block(wide, wide), nn.Conv2d(wide, classes, 1)
        )

    @staticmethod
    def block(inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> nn.Module:
        conv = nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.decoder(self.encoder(x)), size=x.shape[-2:], mode="bilinear")


def street_scene(epochs: int = 12) -> Picture:
    """Draw a street with an object that no class fits, and three maps of uncertainty."""
    scenes = data.load("street-scenes", train=100, val=10, test=20)
    (inputs, y), (pictures, truth) = scenes.train[:], scenes.test[:]
    x, test_x = scenes.normalise(inputs), scenes.normalise(pictures)
    unknown, void = truth == scenes.ood_index, truth == scenes.ignore_index
    assert scenes.num_classes is not None
    assert scenes.ignore_index is not None

    def auroc(values: Tensor, scene: Any = slice(None)) -> float:
        keep = ~void[scene]
        return metrics.auroc(values[scene][keep], unknown[scene][keep])

    decoder: dict[str, Any] = {"members": 4, "include": "decoder.*"}
    ways: Sequence[tuple[str, dict[str, Any]]] = (
        ("mcp", {}),
        ("lpbnn", decoder),
        ("lpbnn", {**decoder, "init_std": 1.0}),
    )
    found: dict[str, lpbnn.Prediction] = {}
    told = []
    for method, options in ways:
        torch.manual_seed(0)
        model = lpbnn.build(
            _Segmenter(scenes.num_classes), method, task="segmentation",
            ignore_index=scenes.ignore_index, num_data=len(x), **options,
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameter_groups(weight_decay=1e-3, lr=3e-3), lr=3e-3)
        batches = [part for _ in range(epochs) for part in torch.randperm(len(x)).split(8)]
        rates = [group["lr"] for group in optimizer.param_groups]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=len(batches))
        _train(model, optimizer, ((x[rows], y[rows]) for rows in batches), schedule)
        name = _name(method, options)
        p = found[name] = _predict(model, test_x)
        right = (p.labels == truth)[~unknown & ~void].float().mean()
        epistemic = f", epistemic {auroc(p.epistemic):.2f}" if options else ""
        told.append(f"{name}: {right:.1%} right, AUROC total {auroc(p.total):.2f}{epistemic}")
    plain, default, wide = found.values()
    each = [auroc(wide.total, scene) for scene in range(len(truth))]
    shown = sorted(range(len(each)), key=each.__getitem__)[len(each) // 2]
    maps = (
        ("plain network: total", plain.total),
        ("LP-BNN: epistemic", default.epistemic),
        (f"LP-BNN, {STD}: total", wide.total),
    )
    with drawing(WIDTH, 165, "A street with an unknown object, and maps of uncertainty") as made:
        panels = [made.axes(number * 290, 22, 278, 139) for number in range(4)]
        plots.picture(panels[0], pictures[shown].permute(1, 2, 0), "a street")
        panels[0].contour(unknown[shown].float(), levels=[0.5], colors=["#00e5ff"], linewidths=1.5)
        for axes, (title, values) in zip(panels[1:], maps, strict=True):
            top = float(values[shown].quantile(0.995))
            plots.picture(axes, plots.value_pixels(values[shown], top, plots.UNSURE), title)
    return Picture(
        "street",
        "A street with an unknown object",
        (
            f"{len(x)} drawn streets to learn from; in the test something stands there that is none of "
            "the classes (outlined). Dark is unsure, each map on its own scale. Every map is dark along "
            "borders between classes; an unknown object has to be darker than they are to be found.",
            f"{'; '.join(told)}. (Right: share of the pixels of known classes. AUROC: telling unknown "
            f"pixels from known ones in {len(truth)} streets; the one above is the median of them.)",
            f"AdamW, rate 0.003 by a one-cycle schedule, {epochs} epochs in batches of 8; the decoder "
            "alone has members, with the default noise.",
        ),
        made.svg,
    )


def cost(threads: int = 1, repeats: int = 5) -> tuple[Picture, str]:
    """Time a residual network of a usual size by three methods; return the picture and a sentence."""
    own: dict[str, Any] = {"mode": "eager", "device": "cpu"}
    setup = Setup("wrn-16-4", batch=16, repeats=repeats, threads=threads, **own)
    ways = {"LP-BNN": "lpbnn", "Deep Ensemble": "ensemble"}
    with Bench(setup) as bench:
        rows = {name: bench.measure(method, 4) for name, method in ways.items()}
    times, size = (
        {name: [ratio(row, what) or 0.0 for what in keys] for name, row in rows.items()}
        for keys in (("train", "predict"), ("parameters",))
    )
    with drawing(560, 150, "Cost of four members relative to the plain network") as made:
        for number, title in enumerate(("training step", "prediction")):
            axes = made.axes(number * 290 + 90, 24, 180, 90)
            values = [times[name][number] for name in ways]
            axes.barh(list(ways), values, color=[colour(0), colour(4)], height=0.6)
            axes.axvline(1, color=colour(1), linewidth=1.2)
            axes.set_title(f"{title}, times the plain network's", fontsize=10, loc="left")
            axes.set_xlim(0, max(5.0, *values))
    parts = "; ".join(
        f"{name} takes ×{train:.2f} to train and ×{predict:.2f} to predict"
        for name, (train, predict) in times.items()
    )
    sentence = f"With four members each, on a residual network (wrn-16-4), {parts}"
    return (
        Picture(
            "price",
            "What four members cost",
            (
                f"A residual network with 2.7 million weights (wrn-16-4), batches of {setup.batch}, "
                f"here and now: times the plain network's time. {parts}. LP-BNN stores "
                f"×{size['LP-BNN'][0]:.2f} the weights, the Deep Ensemble ×{size['Deep Ensemble'][0]:.2f}.",
                "The digits below use a network of a few thousand weights, where the work around the "
                "layers costs as much as the layers: its ratios are larger, and say little about "
                "networks of a usual size.",
            ),
            made.svg,
        ),
        f"{sentence} (× the time of the plain network)",
    )
