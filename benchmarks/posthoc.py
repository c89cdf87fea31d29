"""Ways from a trained network to calibrated uncertainty: what each costs and gives, on scikit-learn's digits.

    python -m benchmarks.posthoc run results/posthoc.csv   # appends the seeds that the file lacks
    python -m benchmarks.posthoc show results/posthoc.csv  # the table of docs/howto/calibration.md

A small residual network is trained on 600 images, once per seed. Every way starts from a copy of it;
temperatures (T) are fitted on 837 others, which nothing else sees: on 180 all predictions may be right, and
then no temperature is best. Seconds are what the way adds to that training, on one thread: its own training,
and the fit of T.
"""

import copy
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

import lpbnn
from benchmarks.rows import MADE, append, command, made, markdown, read, timed
from lpbnn import backbones, data, metrics
from lpbnn.calibration import calibrate
from lpbnn.methods.ensemble import from_members

SEEDS = 5
TRAIN = 600  # images that are trained on
EPOCHS, FEW = 12, 3  # of the network, and of fine-tuning
LR, SMALL_LR = 0.05, 0.01
SAMPLES = 4  # draws of each of four members
METRICS = ("accuracy", "nll", "ece", "photos")
FIELDS = ("seed", "way", "temperature", *METRICS, "seconds", *MADE)
Pair = tuple[Tensor, Tensor]


def train(model: lpbnn.UncertainModel, pair: Pair, epochs: int, lr: float) -> lpbnn.UncertainModel:
    """Train by the contract's loop: SGD with momentum, batches of 64, a cosine schedule."""
    x, y = pair
    steps = epochs * -(-len(x) // 64)
    groups = model.parameter_groups(weight_decay=5e-4, lr=lr)
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(epochs):
        model.train().before_epoch(epoch, epochs)
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            model.loss(x[rows], y[rows])["loss"].backward()
            optimizer.step()
            model.after_step(lr)
            schedule.step()
    model.after_fit([pair])
    return model.eval()


def plain() -> nn.Module:
    """Return an untrained network."""
    return backbones.build("small-cnn", 10, in_channels=1)


def ways(net: nn.Module, pair: Pair) -> dict[str, Any]:
    """Return functions that make a model of a copy of the trained network."""

    def build(method: str, **options: Any) -> lpbnn.UncertainModel:
        return lpbnn.build(copy.deepcopy(net), method, num_data=len(pair[0]), **options).eval()

    def more() -> lpbnn.UncertainModel:
        others = [train(lpbnn.build(plain(), "mcp"), pair, EPOCHS, LR) for _ in range(3)]
        return from_members([build("mcp"), *others])

    return {
        "as it is": lambda: build("mcp"),
        "MC dropout, not trained": lambda: build("mcdropout"),
        "ABNN, not trained": lambda: build("abnn"),
        f"ABNN, {FEW} epochs": lambda: train(build("abnn"), pair, FEW, SMALL_LR),
        f"LP-BNN, {FEW} epochs": lambda: train(build("lpbnn"), pair, FEW, SMALL_LR),
        "Deep Ensemble, 3 more networks": more,
    }


def run(path: Path) -> None:
    """Measure the seeds that the file lacks, and append a row for every way, without and with a temperature."""
    done, here = {row["seed"] for row in read(path)}, made()
    splits = data.load("digits")
    parts = [part[:] for part in (splits.train, splits.val, splits.test, splits.ood["photos"])]
    sets = [(splits.normalise(inputs), labels) for inputs, labels in parts]
    (train_x, train_y), (val_x, val_y), (x, y), (photos, _) = sets
    order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(0))
    train_x, train_y = train_x[order], train_y[order]
    pair = train_x[:TRAIN], train_y[:TRAIN]
    val = torch.cat([val_x, train_x[TRAIN:]]), torch.cat([val_y, train_y[TRAIN:]])
    for seed in range(SEEDS):
        if str(seed) in done:
            continue
        torch.manual_seed(seed)
        net = train(lpbnn.build(plain(), "mcp"), pair, EPOCHS, LR).net
        rows = []
        for way, make in ways(net, pair).items():
            seconds, model = timed(make)
            for temperature in ("no", "yes"):
                if temperature == "yes":
                    seconds += timed(lambda m=model: calibrate(m, [val], samples=SAMPLES))[0]
                p, q = (lpbnn.predict(model, part, samples=SAMPLES, seed=0) for part in (x, photos))
                scores = torch.cat([1 - p.confidence, 1 - q.confidence])
                is_ood = torch.arange(len(scores)) >= len(x)
                found = (
                    metrics.accuracy(p.probs, y),
                    metrics.nll(p.probs, y),
                    metrics.ece(p.probs, y),
                    metrics.auroc(scores, is_ood),
                )
                row = {"seed": seed, "way": way, "temperature": temperature, "seconds": seconds}
                rows.append({**row, **dict(zip(METRICS, found, strict=True)), **here})
                print(rows[-1], flush=True)
        append(path, FIELDS, rows)


def show(path: Path) -> str:
    """Return the table of a file as Markdown: mean and standard deviation over the seeds."""
    rows = read(path)
    lines = []
    for way, temperature in dict.fromkeys((row["way"], row["temperature"]) for row in rows):
        mine = [row for row in rows if (row["way"], row["temperature"]) == (way, temperature)]
        cells = [way, temperature, f"{fmean(float(row['seconds']) for row in mine):.1f}"]
        for name in METRICS:
            values = [float(row[name]) * (100 if name == "accuracy" else 1) for row in mine]
            digits = 1 if name == "accuracy" else 3
            std = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
            cells.append(f"{fmean(values):.{digits}f}{std}")
        lines.append(cells)
    head = ("way", "T", "seconds", "accuracy %", "NLL", "ECE", "AUROC of photos")
    return markdown(head, lines, 2)


if __name__ == "__main__":
    command("benchmarks.posthoc", __doc__, run, show)
