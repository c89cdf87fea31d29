"""The figure of docs/concepts/latent-posterior.md: what LP-BNN learns about the factors of a layer.

    python -m tools.posterior_figure docs/figures/latent-posterior.png

Two small networks learn scikit-learn's digits, one by each variant of LP-BNN. The inputs of the first layer are
the 64 pixels, so the standard deviations of its factors are a picture. It takes a minute on one core.
"""

import sys

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lpbnn
from lpbnn import plots
from lpbnn.methods.lpbnn import LayerPosterior

VARIANTS = ("default", "paper")
EPOCHS, BATCH, RATE = 100, 128, 3e-3
PIXELS = slice(26, 38)  # of the middle rows
TOP = 0.25  # end of the colour scale of standard deviations


def learn(
    variant: str, x: Tensor, y: Tensor
) -> tuple[lpbnn.UncertainModel, dict[str, LayerPosterior]]:
    """Return a trained model, and its posterior before the training."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    model = lpbnn.build(net, "lpbnn", num_data=len(x), variant=variant)
    before = lpbnn.posterior(model)
    optimizer = torch.optim.Adam(model.parameter_groups(weight_decay=1e-4, lr=RATE), lr=RATE)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            model.loss(x[batch], y[batch])["loss"].backward()
            optimizer.step()
    return model.eval(), before


def describe(layers: dict[str, LayerPosterior]) -> str:
    """Return the numbers of the page for every layer: noise, distance of the members, directions."""
    lines = []
    for path, layer in layers.items():
        spectrum = torch.linalg.svdvals(layer.factor).square()
        directions = (spectrum.sum(1).square() / spectrum.square().sum(1)).mean()
        lines.append(
            f"  layer {path}: std of r^ {layer.std.mean():.3f}, std of the members' means "
            f"{layer.mean.std(0).mean():.3f}, effective rank {directions:.1f}"
        )
    return "\n".join(lines)


def main(path: str) -> None:
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    trained_on = torch.arange(len(x)) % 4 != 0
    shape = {"width_ratios": (1.5, 1, 1, 1)}
    figure, panels = plt.subplots(2, 4, figsize=(12, 6.4), layout="constrained", gridspec_kw=shape)
    for row, variant in zip(panels, VARIANTS, strict=True):
        model, before = learn(variant, x[trained_on], y[trained_on])
        p = lpbnn.predict(model, x[~trained_on], samples=4, seed=0)
        right = (p.labels == y[~trained_on]).float().mean()
        after = lpbnn.posterior(model)
        print(f"{variant}: {right:.1%} of the test digits are right")
        print(f" before training\n{describe(before)}\n after training\n{describe(after)}")
        first = after["0"]
        plots.posterior_factors(row[0], first.mean[:, PIXELS], first.std[:, PIXELS])
        row[0].set_title(f"{variant}: members and noise", pad=18)
        maps = {"before": before["0"].std, "after": first.std}
        for axes, (moment, std) in zip(row[1:3], maps.items(), strict=True):
            shown = axes.imshow(std.mean(0).view(8, 8), cmap="viridis", vmin=0, vmax=TOP)
            axes.set(title=f"std of r̂ {moment}", xticks=(), yticks=())
        figure.colorbar(shown, ax=list(row[1:3]), shrink=0.7)
        plots.posterior_correlation(row[3], first.correlation[0])
        row[3].set_title("correlation of r̂ after")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(sys.argv[1])
