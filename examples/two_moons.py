"""The picture of the README: where four ways to train the same network are uncertain.

    python examples/two_moons.py [two-moons.png]

Epistemic uncertainty around the two moons, after 600 steps on the same 400 points.
It takes half a minute on one core.
"""

import sys

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_moons
from torch import nn

import lpbnn
from lpbnn import plots

WAYS = {
    "plain network": ("mcp", {}),
    "Deep Ensemble of 4": ("ensemble", {"members": 4}),
    "LP-BNN, default": ("lpbnn", {"members": 4}),
    "LP-BNN, init_std=1": ("lpbnn", {"members": 4, "init_std": 1.0}),
}


def main(path: str | None = None, steps: int = 600) -> None:
    x, y = (torch.tensor(part) for part in make_moons(400, noise=0.1, random_state=0))
    x = x.float()
    figure, panels = plt.subplots(1, len(WAYS), figsize=(12, 3.1), layout="constrained")
    for axes, (name, (method, options)) in zip(panels, WAYS.items(), strict=True):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        )
        model = lpbnn.build(net, method, num_data=len(x), **options)
        optimizer = torch.optim.Adam(model.parameter_groups(weight_decay=1e-4, lr=0.01), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            model.loss(x, y)["loss"].backward()
            optimizer.step()
        correct = (lpbnn.predict(model, x, samples=8, seed=0).labels == y).float().mean()
        print(f"{name}: {correct:.1%} of the training points are right")
        plots.decision_map(axes, model, x, y, samples=8, points=150)
        axes.set(title=name, xticks=(), yticks=())
    bar = figure.colorbar(panels[0].images[0], ax=panels, pad=0.01)
    bar.set_label("epistemic uncertainty, nats")
    if path is None:
        plt.show()
    else:
        figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
