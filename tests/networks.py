"""Small networks of the kinds users have, and the ordinary network that a member must equal."""

import copy

import torch
from torch import Tensor, nn

from lpbnn.members.rows import gather
from lpbnn.rank_one.ensemble import RankOneEnsemble
from lpbnn.rank_one.factors import SampledFactors
from lpbnn.rank_one.layer import RankOneLayer


class Mlp(nn.Sequential):
    shape = (5,)

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


class ConvNet(nn.Module):
    """Groups, dilation, stride, padding modes and a transposed convolution."""

    shape = (4, 9, 9)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2, padding_mode="circular")
        self.second = nn.Conv2d(6, 6, 3, stride=2, groups=3, bias=False)
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2, output_padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(torch.relu(self.second(torch.relu(self.first(x)))))
        return self.head(torch.tanh(x).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class ResNet(nn.Module):
    shape = (3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.stage1 = Block(4, 4, 1)
        self.stage2 = Block(4, 6, 2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage2(self.stage1(torch.relu(self.stem(x)))).mean((2, 3)))


class UsersOwn(nn.Module):
    """A residual connection, a module used twice, nn.Sequential, and a forward with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.shared = nn.Linear(6, 6)
        self.again = self.shared
        self.mix = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 3)))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        x = x + torch.tanh(self.shared(x))
        x = x + torch.tanh(self.again(x))
        return self.mix(torch.cat([x, context], dim=1))


class Vit(nn.Module):
    shape = (12, 4)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=padding).mean(1))


NETWORKS = {kind.__name__: kind for kind in (Mlp, ConvNet, ResNet)}


class Counting(nn.Module):
    """Counts the rows that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows += x.shape[0]
        self.calls.append(x.shape[0])
        return x


class EncoderDecoder(nn.Module):
    """The decoder is called with two tensors, one of them a skip around the bottleneck."""

    def __init__(self, decoder: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), Counting())
        self.decoder = decoder or Decoder()

    def forward(self, x: Tensor) -> Tensor:
        low = self.encoder(x)
        return self.decoder({"low": low, "high": torch.relu(low)})


class Decoder(nn.Module):
    loop_members = True  # see lpbnn.members.partial

    def __init__(self) -> None:
        super().__init__()
        self.count = Counting()
        self.mix = nn.Conv2d(8, 4, 1)
        self.out = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 1)])

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        x = torch.relu(self.mix(self.count(torch.cat([features["low"], features["high"]], 1))))
        for layer in self.out:
            x = layer(x)
        return x


def small(classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, classes))


def settle(net: nn.Module) -> nn.Module:
    """Give batch norms statistics of their own, so that evaluation is no identity there."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.2, 0.2)
            module.running_var.uniform_(0.5, 1.5)
    return net.eval()


def restate_weight(layer: nn.Module, r: Tensor, s: Tensor) -> Tensor:
    """W * (r s^T) written out entry by entry, for grouped and transposed layers too."""
    weight = layer.weight.detach().clone()
    transposed = "Transpose" in type(layer).__name__
    groups = getattr(layer, "groups", 1)
    rows, columns = weight.shape[:2]
    for row in range(rows):
        group = row // (rows // groups)
        for column in range(columns):
            other = group * columns + column
            i, o = (row, other) if transposed else (other, row)
            weight[row, column] *= r[i] * s[o]
    return weight


def ordinary(model: RankOneEnsemble, sampled: SampledFactors, member: int) -> nn.Module:
    """The plain network that carries the member's weights and no trace of us."""
    net = copy.deepcopy(model.net)
    plain = {}
    converted = [module for module in net.modules() if isinstance(module, RankOneLayer)]
    for layer, factors in zip(converted, sampled.layers, strict=True):
        inner = layer.layer
        inner.weight = nn.Parameter(restate_weight(inner, factors.r[member], factors.s[member]))
        if layer.member_bias is not None:
            inner.bias = nn.Parameter(sampled.select(layer.member_bias)[member].detach().clone())
        plain[id(layer)] = inner
    for parent in list(net.modules()):
        parent._forward_pre_hooks.clear()
        parent._forward_hooks.clear()
        for name, child in list(parent._modules.items()):
            if id(child) in plain:
                parent._modules[name] = plain[id(child)]
    return net


def members_and_ordinary(model: RankOneEnsemble, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """(J, B, ...) twice: as rows of one batch, and network by network."""
    with torch.no_grad():
        call = model.call(inputs, {}, model.members)
        sampled = model.sample()
        together = gather(model.run_rows(sampled, call), model.members)
        alone = torch.stack([ordinary(model, sampled, j)(*inputs) for j in range(model.members)])
    return together, alone
