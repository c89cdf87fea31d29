"""Deep Ensembles: members that learn as if each were alone, from initial weights of one scale."""

import copy
from pathlib import Path

import pytest
import torch
from networks import Mlp, ResNet, Vit, settle
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import lpbnn
from lpbnn import backbones
from lpbnn.likelihoods import Categorical, Gaussian, Scaling
from lpbnn.methods.ensemble import DeepEnsemble, from_members


def build(net: nn.Module, **options: object) -> DeepEnsemble:
    model = lpbnn.build(net, "ensemble", **options)
    assert isinstance(model, DeepEnsemble)
    return model


def rms(x: Tensor) -> float:
    return x.detach().square().mean().sqrt().item()


@pytest.mark.parametrize("width", [1, 2, 3, 9])
def test_passes_of_any_width_run_every_member_once(width: int) -> None:
    model, x = build(Mlp(), members=5), torch.randn(4, 5)
    outputs = [run(x) for run in model.passes(1, width)]
    assert all(len(part) <= width for part in outputs)
    torch.testing.assert_close(torch.cat(outputs), model(x))


def test_an_ensemble_of_calibrated_runs_is_not_calibrated() -> None:
    """The temperature of one member is not that of the average."""
    first, second = (lpbnn.build(Mlp(), "mcp") for _ in range(2))
    for run in (first, second):
        run.likelihood.scaling = Scaling(torch.tensor(0.1))
    model, x = from_members([first, second]), torch.randn(4, 5)
    expected = torch.stack([first.net(x), second.net(x)]).softmax(-1).mean(0)
    torch.testing.assert_close(lpbnn.predict(model, x).probs, expected)
    assert first.likelihood.scaling is not None


def test_training_together_is_training_alone() -> None:
    """SGD with momentum and weight decay, batch norm included: the same weights to rounding."""
    model = build(ResNet(), members=3).double()
    alone = [copy.deepcopy(net) for net in model.net]
    x, y = torch.randn(8, 3, 8, 8).double(), torch.randint(0, 3, (8,))
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}
    together = torch.optim.SGD(model.parameters(), **options)
    apart = [torch.optim.SGD(net.parameters(), **options) for net in alone]
    for _ in range(4):
        together.zero_grad()
        terms = model.loss(x, y)
        terms["loss"].backward()
        together.step()
        losses = []
        for net, optimizer in zip(alone, apart, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(terms["nll"].detach(), torch.stack(losses).mean())
        assert torch.equal(terms["loss"], terms["nll"])
    for member, net in zip(model.net, alone, strict=True):
        torch.testing.assert_close(dict(member.state_dict()), dict(net.state_dict()))


def test_the_prediction_is_the_mean_of_the_members_probabilities() -> None:
    model, x = build(settle(ResNet()), members=5).eval(), torch.randn(4, 3, 8, 8)
    p = lpbnn.predict(model, x, samples=3)  # a second pass would be the same
    expected = torch.stack([net(x).softmax(1) for net in model.net])
    torch.testing.assert_close(p.members, expected)
    torch.testing.assert_close(p.probs, expected.mean(0))
    assert model.state_dict().keys() >= {"net.0.head.weight", "net.4.head.weight"}


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_the_prediction_does_not_depend_on_the_chunk(chunk: int) -> None:
    model, x = build(settle(ResNet()), members=3, check=False), torch.randn(5, 3, 8, 8)
    seen: list[int] = []
    for net in model.net:
        net.stem.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    whole = lpbnn.predict(model, x)
    seen.clear()
    torch.testing.assert_close(lpbnn.predict(model, x, chunk=chunk).members, whole.members)
    assert max(seen) <= chunk


@pytest.mark.parametrize("name", ["mlp", "lenet", "small-cnn", "resnet18"])
def test_members_start_apart_at_the_same_scale(name: str) -> None:
    net = backbones.build(name, 10)
    given = copy.deepcopy(net.state_dict())
    model = build(net, members=3)
    assert model.net[0] is net
    torch.testing.assert_close(net.state_dict(), given, rtol=0, atol=0)
    first, second, third = (dict(member.named_parameters()) for member in model.net)
    for path, weight in first.items():
        if weight.detach().unique().numel() == 1:  # a norm, or a bias at zero
            assert torch.equal(weight, second[path])
        else:
            assert not torch.equal(weight, second[path])
            assert not torch.equal(second[path], third[path])
            assert rms(second[path]) == pytest.approx(rms(weight), rel=1e-4)
            correlation = torch.corrcoef(torch.stack([weight.flatten(), second[path].flatten()]))
            assert abs(correlation[0, 1]) < 5 / weight.numel() ** 0.5


def test_everything_that_can_be_initialised_is_initialised_anew() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(8))
            self.vit = Vit()
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
            self.tied = nn.Linear(8, 8)
            self.tied.weight = self.vit.encoder.layers[0].self_attn.out_proj.weight
            self.zero = nn.Linear(8, 8)
            nn.init.zeros_(self.zero.weight)

    first, second = build(Tokens(), members=2).net
    for path in ("token", "vit.embed.weight", "normed.parametrizations.weight.original1"):
        assert not torch.equal(first.get_parameter(path), second.get_parameter(path))
    attention = "vit.encoder.layers.0.self_attn.in_proj_weight"
    assert not torch.equal(first.get_parameter(attention), second.get_parameter(attention))
    assert torch.equal(first.token.sort().values, second.token.sort().values)
    assert not second.zero.weight.any()
    assert second.tied.weight is second.vit.encoder.layers[0].self_attn.out_proj.weight
    assert second.tied.weight is not first.tied.weight


def test_pretrained_networks_keep_what_is_not_named() -> None:
    first, second = build(settle(ResNet()), members=2, reinit="head").net
    for path, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[path]) == (not path.startswith("head"))
    first, second = build(ResNet(), members=2, reinit=["stage*", "head"]).net
    assert torch.equal(first.stem.weight, second.stem.weight)
    assert not torch.equal(first.stage1.body[0].weight, second.stage1.body[0].weight)
    for nothing in ("none", ()):
        first, second = build(ResNet(), members=2, reinit=nothing).net
        assert torch.equal(first.head.weight, second.head.weight)
        assert first.head.weight is not second.head.weight


def test_frozen_weights_stay() -> None:
    net = settle(ResNet())
    net.stage1.requires_grad_(False)
    net.head.bias.requires_grad_(False)
    first, second = (member.state_dict() for member in build(net, members=2).net)
    for path, value in first.items():
        if path.startswith("stage1") or path == "head.bias":
            assert torch.equal(value, second[path])
    assert not torch.equal(first["head.weight"], second["head.weight"])


def test_constants_stay_where_a_layer_alone_would_be_drawn_anew() -> None:
    """A bias at the logarithm of rare classes, a norm that starts small: no scale for random numbers."""
    net = ResNet()
    nn.init.constant_(net.head.bias, -4.6)
    nn.init.constant_(net.stage1.body[1].weight, 0.2)
    for member in build(net, members=3).net:
        assert torch.equal(member.head.bias, torch.full_like(member.head.bias, -4.6))
        assert torch.equal(member.stage1.body[1].weight, torch.full((4,), 0.2))


def test_a_trained_norm_starts_again() -> None:
    net = settle(ResNet())
    nn.init.uniform_(net.stage1.body[1].weight)
    first, second = build(net, members=2).net
    assert torch.equal(second.stage1.body[1].weight, torch.ones(4))
    assert not second.stage1.body[1].running_mean.any()
    assert first.stage1.body[1].running_mean.any()


def test_the_same_seed_gives_the_same_members() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(build(Mlp()))
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)


def test_finished_networks_become_members() -> None:
    x, nets = torch.randn(4, 5), [Mlp() for _ in range(3)]
    model = from_members(nets)
    assert model.members == 3
    assert model.task == "classification"
    torch.testing.assert_close(model(x), torch.stack([net(x) for net in nets]))


def test_finished_models_become_members_with_their_likelihood_and_readout() -> None:
    def readout(output: Tensor) -> Tensor:
        return 2 * output

    x, nets = torch.randn(4, 5), [Mlp() for _ in range(3)]
    options = {"task": "segmentation", "ignore_index": 255, "readout": readout}
    model = from_members([lpbnn.build(net, "mcp", **options) for net in nets])
    assert model.task == "segmentation"
    assert model.likelihood.ignore_index == 255
    torch.testing.assert_close(model(x), torch.stack([2 * net(x) for net in nets]))


def test_finished_models_may_get_another_likelihood() -> None:
    model = from_members([lpbnn.build(Mlp(), "mcp")], likelihood=Gaussian(variance=1.0))
    assert model.task == "regression"


TARGETS = {
    "classification": (5, torch.tensor([0, 1, 2, 3])),
    "soft labels": (5, torch.full((4, 5), 0.2)),
    "regression": (6, torch.randn(4, 3)),
    "multilabel": (3, torch.ones(4, 3)),
}


@pytest.mark.parametrize("case", TARGETS)
@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, 2.0, 0.0, 1.0])])
def test_the_loss_is_the_mean_of_the_members_for_every_task(
    case: str, weight: Tensor | None
) -> None:
    width, y = TARGETS[case]
    task = "classification" if case == "soft labels" else case
    model, x = build(nn.Linear(5, width), task=task, members=3), torch.randn(4, 5)
    alone = [lpbnn.build(net, "mcp", task=task).loss(x, y, weight)["loss"] for net in model.net]
    torch.testing.assert_close(model.loss(x, y, weight)["loss"], torch.stack(alone).mean())


def test_every_member_gets_the_gradient_it_would_have_alone_with_weights() -> None:
    model, x, y = build(Mlp(), members=3), torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    weight = torch.tensor([0.5, 2.0, 0.0, 1.0])
    model.loss(x, y, weight)["loss"].backward()
    for net in model.net:
        together = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        each = nn.functional.cross_entropy(net(x), y, reduction="none")
        ((each * weight).sum() / weight.sum()).backward()
        torch.testing.assert_close(together, [p.grad for p in net.parameters()])


def test_void_pixels_do_not_count() -> None:
    model = build(nn.Conv2d(3, 2, 1), task="segmentation", ignore_index=255, members=1)
    x, y = torch.randn(2, 3, 4, 4), torch.full((2, 4, 4), 255)
    y[:, :2] = 1
    expected = nn.functional.cross_entropy(model(x)[0], y, ignore_index=255)
    torch.testing.assert_close(model.loss(x, y)["loss"], expected)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.size = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"kind": self.kind(x), "size": self.size(x)}


def test_several_heads_train_and_predict() -> None:
    model = build(Heads(), members=2, likelihood={"kind": Categorical(), "size": Gaussian()})
    x, y = torch.randn(4, 5), {"kind": torch.tensor([0, 1, 2, 0]), "size": torch.randn(4)}
    terms = model.loss(x, y, torch.ones(4))
    terms["loss"].backward()
    assert all(p.grad.any() for p in model.parameters())
    torch.testing.assert_close(terms["loss"], terms["nll/kind"] + terms["nll/size"])
    outputs = model(x)
    assert outputs["kind"].shape == (2, 4, 3)
    found = lpbnn.predict(model, x, chunk=3)
    torch.testing.assert_close(found["kind"].members, outputs["kind"].softmax(2))


def test_a_users_likelihood_trains_and_predicts() -> None:
    class Laplace:
        def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return (outputs - targets).abs().sum(1)

        def summary(self, outputs: Tensor) -> Tensor:
            return outputs

    model, x = build(nn.Linear(5, 2), members=3, likelihood=Laplace()), torch.randn(4, 5)
    model.loss(x, torch.randn(4, 2))["loss"].backward()
    p = lpbnn.predict(model, x)
    torch.testing.assert_close(p.values, model(x).mean(0))
    torch.testing.assert_close(p.epistemic, model(x).var(0, unbiased=False))


def test_saves_copies_compiles_and_mixes_precision(tmp_path: Path) -> None:
    model, x, y = build(ResNet()), torch.randn(5, 3, 8, 8), torch.randint(0, 3, (5,))
    model.loss(x, y)["loss"].backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    expected = lpbnn.predict(model, x).probs
    assert torch.equal(lpbnn.predict(copy.deepcopy(model), x).probs, expected)
    save_model(model, tmp_path / "model.safetensors")
    other = build(ResNet())
    load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(lpbnn.predict(other, x).probs, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model.loss(x, y)["loss"])
        assert lpbnn.predict(model, x).probs.dtype == torch.float32
    compiled = torch.compile(build(Mlp()).loss, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(3, 5), torch.tensor([0, 1, 2]))["loss"].backward()


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="members=0: expected an integer"):
        build(Mlp(), members=0)
    with pytest.raises(ValueError, match=r"reinit='haed' matches no module.*stem, stage1"):
        build(ResNet(), reinit="haed")
    for wrong in (False, None, 3, ["head", 4]):
        with pytest.raises(
            ValueError, match=r"reinit=.*: expected 'all', or .*'none', or an empty"
        ):
            build(ResNet(), reinit=wrong)
    with pytest.raises(ValueError, match="at least one network"):
        from_members([])
    net = Mlp()
    with pytest.raises(ValueError, match="given twice"):
        from_members([net, net])
    with pytest.raises(TypeError, match=r"one deterministic network.*got DeepEnsemble"):
        from_members([build(Mlp())])


def test_a_weight_of_one_number_is_drawn_anew_and_keeps_its_size() -> None:
    net = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.constant_(net[0].weight, 2.0)
    model = lpbnn.build(net, "ensemble", members=20)
    weights = {round(own[0].weight.item(), 4) for own in model.networks}
    assert weights == {-2.0, 2.0}
