"""The same in Lightning: ``loss`` is returned from ``training_step`` as it is.

python examples/lightning_module.py
"""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lpbnn


class Uncertain(lightning.LightningModule):
    def __init__(self, num_data: int) -> None:
        super().__init__()
        net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
        self.model = lpbnn.build(net, "lpbnn", members=4, num_data=num_data)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        terms = self.model.loss(*batch)
        self.log_dict({name: term.detach() for name, term in terms.items()}, prog_bar=True)
        return terms

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameter_groups(weight_decay=1e-4), lr=1e-2)


x = torch.randn(512, 2)
y = (x[:, 0] * x[:, 1] > 0).long()
module = Uncertain(num_data=len(x))
trainer = lightning.Trainer(
    max_epochs=20,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True))
p = lpbnn.predict(module.model, torch.tensor([[1.0, 1.0], [20.0, -20.0]]), samples=8, seed=0)
print("labels", p.labels.tolist(), "confidence", [round(c, 3) for c in p.confidence.tolist()])
