"""RankOneLayer computes s * W(r * x) + b for every layer type, in each of its ways."""

import copy

import pytest
import torch
from networks import restate_weight
from torch import nn
from torch.nn.utils import parametrizations

import lpbnn
from lpbnn.members.rows import spread
from lpbnn.rank_one.factors import FixedFactors, GaussianFactors, PointFactors, draw_all
from lpbnn.rank_one.layer import RankOneLayer, widths
from lpbnn.rank_one.vae import LatentFactors

LAYERS = {
    "linear": (lambda: nn.Linear(4, 6), (4,)),
    "linear-tokens": (lambda: nn.Linear(4, 6, bias=False), (3, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"), (4, 7, 7)),
    "conv2d-grouped": (lambda: nn.Conv2d(4, 6, 3, dilation=2, groups=2, bias=False), (4, 7, 7)),
    "conv2d-depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (4, 7, 7)),
    "conv3d": (lambda: nn.Conv3d(4, 6, (1, 3, 3), padding=(0, 1, 1)), (4, 3, 5, 5)),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1), (4, 5)),
    "transposed2d": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, output_padding=1, groups=2), (4, 5, 5)),
    "transposed3d": (lambda: nn.ConvTranspose3d(4, 6, 2, stride=2, bias=False), (4, 3, 3, 3)),
}
FACTORS = {"point": PointFactors, "gaussian": GaussianFactors, "latent": LatentFactors}


def build(kind: str, members: int = 3, factors: str = "point") -> tuple[RankOneLayer, torch.Tensor]:
    make, shape = LAYERS[kind]
    layer = make()
    fast = RankOneLayer(layer, FACTORS[factors](members, *widths(layer)), kind).double()
    if fast.member_bias is not None:
        nn.init.normal_(fast.member_bias)
    return fast, torch.randn(2 * members, *shape, dtype=torch.float64)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("way", ["_by_member_weights", "_by_scaled_activations"])
def test_each_member_is_the_layer_with_its_weight(kind: str, way: str) -> None:
    fast, x = build(kind)
    draw = fast.draw()
    together = getattr(fast, way)(x, draw)
    for j in range(3):
        plain = copy.deepcopy(fast.layer)
        plain.weight = nn.Parameter(restate_weight(plain, draw.r[j], draw.s[j]))
        if draw.bias is not None:
            plain.bias = nn.Parameter(draw.bias[j])
        torch.testing.assert_close(together[2 * j : 2 * j + 2], plain(x[2 * j : 2 * j + 2]))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("factors", FACTORS)
def test_gradients_of_every_factor(kind: str, factors: str) -> None:
    fast, x = build(kind, members=2, factors=factors)
    parameters = dict(fast.named_parameters())

    def forward(*values: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)  # the same noise in every evaluation
        return torch.func.functional_call(fast, dict(zip(parameters, values, strict=True)), (x,))

    values = tuple(p.detach().clone().requires_grad_() for p in parameters.values())
    assert torch.autograd.gradcheck(forward, values, fast_mode=True)


def test_gradients_of_the_penalties() -> None:
    factors = LatentFactors(3, 5, 2, latent=4).double()
    parameters = dict(factors.named_parameters())

    class Terms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = factors

        def forward(self) -> torch.Tensor:
            return torch.stack(LatentFactors.terms([self.factors]))

    terms = Terms()

    def forward(*values: torch.Tensor) -> torch.Tensor:
        named = {f"factors.{n}": v for n, v in zip(parameters, values, strict=True)}
        return torch.func.functional_call(terms, named, ())

    values = tuple(p.detach().clone().requires_grad_() for p in parameters.values())
    assert torch.autograd.gradcheck(forward, values)


@pytest.mark.parametrize("kind", LAYERS)
def test_one_member_with_unit_factors_is_the_plain_layer_to_the_last_bit(kind: str) -> None:
    make, shape = LAYERS[kind]
    layer = make().double()
    x = torch.randn(5, *shape, dtype=torch.float64)
    expected = layer(x)
    inputs, outputs = widths(layer)
    ones = FixedFactors(torch.ones(1, inputs), torch.ones(1, outputs)).double()
    assert torch.equal(RankOneLayer(layer, ones)(x), expected)


@pytest.mark.parametrize("way", ["_by_member_weights", "_by_scaled_activations"])
def test_channels_last_is_kept(way: str) -> None:
    layer = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
    fast = RankOneLayer(layer, PointFactors(2, 8, 8))
    x = torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last)
    y = getattr(fast, way)(x, fast.draw())
    assert y.is_contiguous(memory_format=torch.channels_last)


# No transposed layer here: torch's own bfloat16 kernel for it dies on CPUs without the instruction.
@pytest.mark.parametrize("kind", ["linear", "linear-tokens", "conv2d", "conv2d-grouped"])
@pytest.mark.parametrize("factors", FACTORS)
def test_autocast_computes_the_factors_in_float32(kind: str, factors: str) -> None:
    fast, x = build(kind, factors=factors)
    fast.float()
    with torch.autocast("cpu", torch.bfloat16):
        draw = fast.draw()
        y = fast(x.float())
    assert draw.r.dtype == draw.s.dtype == torch.float32
    assert y.dtype == torch.bfloat16


def test_a_model_wholly_in_bfloat16() -> None:
    fast, x = build("conv2d", factors="latent")
    assert fast.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_output_size_of_a_transposed_convolution() -> None:
    layer = nn.ConvTranspose2d(4, 6, 3, stride=2)
    fast = RankOneLayer(layer, PointFactors(2, 4, 6))
    x = torch.randn(4, 4, 5, 5)
    for way in (fast._by_member_weights, fast._by_scaled_activations):
        assert way(x, fast.draw(), output_size=[12, 12]).shape[2:] == (12, 12)


def test_a_parametrised_layer_keeps_its_parametrisation() -> None:
    layer = parametrizations.spectral_norm(nn.Linear(4, 6)).eval()
    fast = RankOneLayer(layer, PointFactors(2, 4, 6))
    draw = fast.draw()
    x = torch.randn(4, 4)
    expected = draw.s[0] * nn.functional.linear(draw.r[0] * x[:2], layer.weight) + draw.bias[0]
    torch.testing.assert_close(fast(x)[:2], expected)


def test_reading_the_weight_past_forward_is_loud() -> None:
    fast, _ = build("linear")
    refusal = "uses its .weight directly, past its forward.*exclude='linear'"
    with pytest.raises(TypeError, match=refusal):
        nn.functional.linear(torch.randn(2, 4), fast.weight)
    with pytest.raises(AttributeError, match=refusal):
        fast.weight.t()
    with pytest.raises(AttributeError, match=refusal):
        fast.weight = nn.Parameter(torch.zeros(6, 4))
    # What does not bypass the members is answered.
    assert (fast.in_features, fast.weight.dtype, fast.weight.shape) == (4, torch.float64, (6, 4))


def test_rows_that_are_no_multiple_of_the_members() -> None:
    fast, x = build("linear")
    with pytest.raises(ValueError, match="5 rows for 3 members"):
        fast(x[:5])


def test_drawn_together_or_alone_is_the_same_to_rounding() -> None:
    many = [LatentFactors(3, width, 4) for width in (5, 6, 5, 5)]
    torch.manual_seed(3)
    together = draw_all(many)
    torch.manual_seed(3)  # all noise in one draw, widths in order of first appearance
    in_order = torch.randn(4, 1, 3, 32)
    noise = [in_order[i] for i in (0, 3, 1, 2)]
    for factors, (r, s), eps in zip(many, together, noise, strict=True):
        mu, log_variance = factors.encoder((factors.r - 1) / factors.inputs**0.5).chunk(2, -1)
        z = mu + (0.5 * log_variance).exp() * eps[0]
        torch.testing.assert_close(r, factors.decoder(z / 32**0.5))
        assert torch.equal(s, factors.s)


@pytest.mark.parametrize("method", ["batchensemble", "lpbnn"])
def test_a_compiled_loss_takes_any_batch_and_gives_the_same_gradients(method: str) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2)
    )
    model = lpbnn.build(net, method, members=2, num_data=100)
    learning = [p for p in model.parameters() if p.requires_grad]
    compiled = torch.compile(model.loss, backend="aot_eager", dynamic=True)
    for rows in (4, 6):
        x, y = torch.randn(rows, 3, 6, 6), torch.zeros(rows, dtype=torch.int64)
        found = []
        for loss in (compiled, model.loss):
            torch.manual_seed(0)
            found.append(torch.autograd.grad(loss(x, y)["loss"], learning))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)
    torch._dynamo.reset()


def test_what_a_compiler_takes_for_the_converted_layers_is_what_is_there() -> None:
    """It does not walk through the network: a copy has its own layers, and one undone has none."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = lpbnn.build(net, "batchensemble", members=2, batch_norm="member")
    twin = copy.deepcopy(model)
    x, y = torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)
    for one in (model, twin):
        compiled = torch.compile(one.loss, backend="eager")
        torch.testing.assert_close(compiled(x, y)["loss"], one.loss(x, y)["loss"])
        assert all(layer in set(one.modules()) for layer in one.layers)
    lpbnn.undo(twin)
    with pytest.raises(Exception, match="no converted layer"):
        torch.compile(twin.loss, backend="eager")(x, y)
    assert len(model.layers) == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("parametrized", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_batch_that_is_not_spread_gets_its_members_from_the_layer(
    kind: str, parametrized: bool
) -> None:
    torch.manual_seed(0)
    fast, x = build(kind)
    if parametrized:
        parametrizations.weight_norm(fast.layer)
    x = x[:2]
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    fast._late, fast._rows, fast._held = True, 6, fast.draw()
    y, expected = fast(x), fast(spread(x, 3))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    assert y.stride() == expected.stride()
    fast._late = False
    with pytest.raises(ValueError, match="2 rows for 3 members"):
        fast(x)
