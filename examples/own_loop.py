"""LP-BNN on a network and a loop of one's own: no trainer, no framework.

python examples/own_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import lpbnn

torch.manual_seed(0)
pixels, digits = load_digits(return_X_y=True)
shuffled = torch.randperm(len(pixels))
images = torch.tensor(pixels, dtype=torch.float32)[shuffled] / 16
labels = torch.tensor(digits)[shuffled]
train, test = slice(0, 1400), slice(1400, None)

net = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
)
model = lpbnn.build(net, "lpbnn", members=4, num_data=1400)
optimizer = torch.optim.AdamW(model.parameter_groups(weight_decay=1e-4), lr=2e-3)

for _ in range(30):
    for batch in torch.randperm(1400).split(64):
        terms = model.loss(images[train][batch], labels[train][batch])
        optimizer.zero_grad()
        terms["loss"].backward()
        optimizer.step()

p = lpbnn.predict(model, images[test], samples=4, seed=0)
noise = lpbnn.predict(model, torch.rand(397, 64), samples=4, seed=0)
print(f"accuracy {(p.labels == labels[test]).float().mean():.3f}")
print(
    f"epistemic uncertainty: digits {p.epistemic.mean():.3f}, noise {noise.epistemic.mean():.3f} nats"
)
