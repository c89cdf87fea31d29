"""RankOneLayer computes s * W(r * x) + b for every layer type, in each of its ways."""

import copy
from typing import Any

import pytest
import torch
from networks import restate_weight
from torch import nn
from torch.nn.utils import parametrizations

import lpbnn
from lpbnn.convert.checks import widths
from lpbnn.members.passes import MemberPass
from lpbnn.members.rows import expand_batch
from lpbnn.methods.lpbnn import LatentFactors, LatentPosterior
from lpbnn.methods.rank1 import GaussianFactors
from lpbnn.rank_one.factors import FixedFactors, LayerFactors, PointFactors
from lpbnn.rank_one.layer import RankOneLayer, sample_layers

LAYERS = {
    "linear": (lambda: nn.Linear(4, 6), (4,)),
    "linear-tokens": (lambda: nn.Linear(4, 6, bias=False), (3, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"), (4, 7, 7)),
    "conv2d-oblong": (
        lambda: nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="circular"),
        (4, 5, 7),
    ),
    "conv2d-even": (
        lambda: nn.Conv2d(4, 6, (2, 4), padding="same", padding_mode="reflect"),
        (4, 7, 9),
    ),
    "conv2d-dilated-one-way": (
        lambda: nn.Conv2d(4, 6, (3, 2), padding="same", dilation=(1, 3), padding_mode="reflect"),
        (4, 7, 9),
    ),
    "conv2d-no-padding": (
        lambda: nn.Conv2d(4, 6, 3, padding="valid", padding_mode="circular"),
        (4, 5, 7),
    ),
    "conv3d-unequal": (
        lambda: nn.Conv3d(4, 6, 3, (1, 2, 1), (0, 1, 2), (1, 1, 2), padding_mode="circular"),
        (4, 3, 5, 7),
    ),
    "conv2d-grouped": (lambda: nn.Conv2d(4, 6, 3, dilation=2, groups=2, bias=False), (4, 7, 7)),
    "conv2d-dilated": (lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2), (4, 7, 7)),
    "conv2d-depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (4, 7, 7)),
    "conv3d": (lambda: nn.Conv3d(4, 6, (1, 3, 3), padding=(0, 1, 1)), (4, 3, 5, 5)),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1), (4, 5)),
    "transposed2d": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, output_padding=1, groups=2), (4, 5, 5)),
    "transposed3d": (lambda: nn.ConvTranspose3d(4, 6, 2, stride=2, bias=False), (4, 3, 3, 3)),
}
WAYS = ["member weights", "scaled activations"]
FACTORS = {"point": PointFactors, "gaussian": GaussianFactors, "latent": LatentFactors}


def build(kind: str, members: int = 3, factors: str = "point") -> tuple[RankOneLayer, torch.Tensor]:
    make, shape = LAYERS[kind]
    layer = make()
    converted = RankOneLayer(layer, FACTORS[factors](members, *widths(layer)), kind).double()
    if converted.member_bias is not None:
        nn.init.normal_(converted.member_bias)
    return converted, torch.randn(2 * members, *shape, dtype=torch.float64)


def sample(layer: RankOneLayer) -> LayerFactors:
    return sample_layers([layer]).layers[0]


@pytest.fixture(params=WAYS)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = request.param == "member weights"
    monkeypatch.setattr("lpbnn.rank_one.layer.prefers_member_weights", lambda *call: chosen)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("kind", LAYERS)
def test_each_member_is_the_layer_with_its_weight(kind: str) -> None:
    layer, x = build(kind)
    together, factors = layer(x), sample(layer)
    for j in range(3):
        rows = x[2 * j : 2 * j + 2]
        plain = copy.deepcopy(layer.layer)
        plain.weight = nn.Parameter(restate_weight(plain, factors.r[j], factors.s[j]))
        if layer.member_bias is not None:
            plain.bias = nn.Parameter(layer.member_bias[j])
        torch.testing.assert_close(together[2 * j : 2 * j + 2], plain(rows))
        with layer.slot.use(MemberPass(sample_layers([layer]).take(j, 1), batch=2)):
            torch.testing.assert_close(layer(rows), plain(rows))


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
    factors = LatentFactors(3, 5, 2, latent=4, train_r=True, train_decoder=True).double()
    parameters = dict(factors.named_parameters())

    class Terms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = factors

        def forward(self) -> torch.Tensor:
            posterior = LatentPosterior([self.factors])
            terms = [posterior.kl(), posterior.squared_error(True), posterior.squared_error(False)]
            return torch.stack(terms)

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


@pytest.mark.parametrize("method", ["batchensemble", "lpbnn", "rank1"])
def test_layers_of_one_shape_that_are_apart_keep_their_own_factors(method: str) -> None:
    """They are sampled together, and given back in the order of the network."""
    sizes = [(4, 4), (4, 6), (6, 4), (4, 4), (4, 6)]
    net = nn.Sequential(*(nn.Linear(*size) for size in sizes))
    model: Any = lpbnn.build(net, method, members=2, num_data=10)
    if method != "batchensemble":
        model.set_noise_scale(0.0)
    for layer, factors in zip(model.layers, model.sample().layers, strict=True):
        names = ("r_mean", "s_mean") if method == "rank1" else ("r", "s")
        for found, name in zip(factors[:2], names, strict=True):
            torch.testing.assert_close(found, getattr(layer.factors, name), atol=1e-3, rtol=0)


@pytest.mark.usefixtures("_way")
def test_channels_last_is_kept() -> None:
    layer = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
    fast = RankOneLayer(layer, PointFactors(2, 8, 8))
    x = torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last)
    y = fast(x)
    assert y.is_contiguous(memory_format=torch.channels_last)


# No transposed layer here: torch's own bfloat16 kernel for it dies on CPUs without the instruction.
@pytest.mark.parametrize("kind", ["linear", "linear-tokens", "conv2d", "conv2d-grouped"])
@pytest.mark.parametrize("factors", FACTORS)
def test_autocast_computes_the_factors_in_float32(kind: str, factors: str) -> None:
    fast, x = build(kind, factors=factors)
    fast.float()
    with torch.autocast("cpu", torch.bfloat16):
        draw = sample(fast)
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
    together = fast(x, output_size=[12, 12])
    assert together.shape[2:] == (12, 12)
    with fast.slot.use(MemberPass(sample_layers([fast]).take(0, 1), batch=2)):
        alone = fast(x[:2], output_size=[12, 12])
    torch.testing.assert_close(alone, together[:2])


def test_a_parametrised_layer_keeps_its_parametrisation() -> None:
    layer = parametrizations.spectral_norm(nn.Linear(4, 6)).eval()
    fast = RankOneLayer(layer, PointFactors(2, 4, 6))
    draw = sample(fast)
    x = torch.randn(4, 4)
    expected = draw.s[0] * nn.functional.linear(draw.r[0] * x[:2], layer.weight)
    assert fast.member_bias is not None
    expected = expected + fast.member_bias[0]
    torch.testing.assert_close(fast(x)[:2], expected)


def test_reading_the_weight_past_forward_is_loud() -> None:
    fast, _ = build("linear")
    refusal = "uses its .weight directly, past its forward.*exclude='linear'"
    with pytest.raises(TypeError, match=refusal):
        nn.functional.linear(torch.randn(2, 4), fast.weight)
    with pytest.raises(TypeError, match=refusal):
        fast.weight @ torch.randn(4, 2)
    with pytest.raises(AttributeError, match=refusal):
        fast.weight.t()
    with pytest.raises(AttributeError, match=refusal):
        fast.weight = nn.Parameter(torch.zeros(6, 4))
    # What does not bypass the members is answered.
    assert (fast.in_features, fast.weight.dtype, fast.weight.shape) == (4, torch.float64, (6, 4))


def test_reading_the_bias_past_forward_is_loud() -> None:
    """The members hold it: None would let the code around the layer compute without a bias."""
    fast, _ = build("linear")
    with pytest.raises(TypeError, match="uses its .bias directly, past its forward"):
        nn.functional.linear(torch.randn(2, 4).double(), torch.randn(6, 4).double(), fast.bias)
    assert (fast.bias.dtype, fast.bias.shape) == (torch.float64, (6,))
    assert RankOneLayer(nn.Linear(3, 2, bias=False), PointFactors(2, 3, 2)).bias is None


def test_rows_that_are_no_multiple_of_the_members() -> None:
    fast, x = build("linear")
    with pytest.raises(ValueError, match="5 rows for 3 members"):
        fast(x[:5])


def test_sampled_together_or_alone_is_the_same_to_rounding() -> None:
    many = [LatentFactors(3, width, 4) for width in (5, 6, 5, 5)]
    torch.manual_seed(3)
    together = LatentFactors.posterior(many).sample()
    torch.manual_seed(3)  # all noise in one draw, ordered by width
    in_order = torch.randn(4, 1, 3, 32)
    noise = [in_order[i] for i in (0, 3, 1, 2)]
    for factors, (r, s), eps in zip(many, together, noise, strict=True):
        mu, log_variance = factors.encoder((factors.r - 1) / factors.inputs**0.5).chunk(2, -1)
        z = mu + (0.5 * log_variance).exp() * eps[0]
        torch.testing.assert_close(r, factors.decoder(z / 32**0.5))
        assert torch.equal(s, factors.s)


@pytest.mark.parametrize("method", [pytest.param("batchensemble", marks=pytest.mark.slow), "lpbnn"])
def test_a_compiled_loss_takes_any_batch_and_gives_the_same_gradients(method: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
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


def test_a_copy_has_its_own_layers_and_an_undone_network_has_none() -> None:
    """For a compiler, too."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = lpbnn.build(net, "batchensemble", members=2, batch_norm="member")
    twin = copy.deepcopy(model)
    x, y = torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)
    for one in (model, twin):
        compiled = torch.compile(one.loss, backend="eager")
        torch.testing.assert_close(compiled(x, y)["loss"], one.loss(x, y)["loss"])
        assert all(layer in set(one.modules()) for layer in one.layers)
    lpbnn.undo(twin)
    with pytest.raises(Exception, match="the network was converted back"):
        torch.compile(twin.loss, backend="eager")(x, y)
    assert len(model.layers) == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("parametrized", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_that_may_expand_the_batch_does_so(kind: str, parametrized: bool) -> None:
    torch.manual_seed(0)
    fast, x = build(kind)
    if parametrized:
        parametrizations.weight_norm(fast.layer)
    x = x[:2]
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    fast.expands_batch = True
    with fast.slot.use(MemberPass(sample_layers([fast]), batch=2)):
        y, expected = fast(x), fast(expand_batch(x, 3))
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
        assert y.stride() == expected.stride()
        fast.expands_batch = False
        with pytest.raises(ValueError, match="2 rows for 3 members"):
            fast(x)
