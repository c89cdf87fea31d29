"""Parts that do unusual things: one by one or together, members answer as in the whole network."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import Decoder, EncoderDecoder
from torch import nn

import lpbnn


class Changing(Decoder):
    """It changes what it is given."""

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        features["low"].add_(1)
        return super().forward(features)


class Reusing(Decoder):
    """Its output lies in memory that the next call writes to."""

    loop_members = False

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        out = super().forward(features)
        if getattr(self, "kept", out[:0]).shape != out.shape:
            self.kept = torch.empty_like(out)
        return self.kept.copy_(out)


class Leaving(EncoderDecoder):
    """The decoder leaves a tensor behind that the network reads."""

    def __init__(self) -> None:
        super().__init__(Stashing())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.decoder.aside.mean(1, keepdim=True)


class Stashing(Decoder):
    loop_members = False

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        out = super().forward(features)
        self.aside = out.square()
        return out


class Tied(nn.Module):
    """One expansion point is a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), self.head)
        self.head.loop_members = self.block.loop_members = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.first(x)))


class Itself(nn.Module):
    """A part that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(5, 6), Again()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.first(x), 2)


class Again(nn.Module):
    loop_members = True

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        x = self.b(torch.tanh(self.a(x)))
        return self(x, times - 1) if times else x


class TwoPoints(nn.Module):
    """Two points; the second gets what the first gave and what was not expanded, and changes both."""

    expand_at = ("wide", "last")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(5, 6), nn.Linear(6, 6), Joining()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        wide = torch.tanh(self.wide(x))
        out = self.last(x, {"wide": [wide], "table": None, "scale": 2.0})["out"]
        return out + wide  # as the second part left it


class Joining(nn.Module):
    loop_members = True

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, more: dict[str, Any]) -> dict[str, torch.Tensor]:
        (wide,) = more["wide"]
        out = self.a(x) + self.b(wide) * more["scale"]
        if more["table"] is not None:
            out = out + more["table"].mean(0)
        x.add_(1)
        wide.mul_(0.5).add_(x)
        return {"out": out}


class Table(TwoPoints):
    """The part that expands the batch is given a table with as many rows as there will be."""

    expand_at = ()

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Identity()
        self.register_buffer("table", torch.randn(12, 6))  # four examples, three members

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x, {"wide": [x.clone()], "table": self.table, "scale": 2.0})["out"]


def doubled(net: nn.Module, when: str) -> nn.Module:
    if when == "before":
        net.decoder.register_forward_pre_hook(
            lambda module, args: ({name: 2 * part for name, part in args[0].items()},)
        )
    else:
        net.decoder.register_forward_hook(lambda module, args, output: 2 * output)
    return net


ODD: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], object]] = {
    "changes its input": (lambda: EncoderDecoder(Changing()), (3, 5, 5), "decoder"),
    "writes to its own memory": (lambda: EncoderDecoder(Reusing()), (3, 5, 5), "decoder"),
    "leaves a tensor behind": (Leaving, (3, 5, 5), "decoder"),
    "a part of another": (Tied, (5,), ["block", "head"]),
    "calls itself": (Itself, (5,), "part"),
    "two points": (TwoPoints, (5,), ["wide", "last.*"]),
    "two points, one converted": (TwoPoints, (5,), "wide"),
    "a table by chance": (Table, (5,), "last.*"),
    "hooks before": (lambda: doubled(EncoderDecoder(), "before"), (3, 5, 5), "decoder"),
    "hooks after": (lambda: doubled(EncoderDecoder(), "after"), (3, 5, 5), "decoder"),
}


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("case", ODD)
def test_odd_parts_give_what_the_whole_network_gives(
    case: str, samples: int, fill_device: Callable[[bool], None]
) -> None:
    fill_device(True)
    make, shape, include = ODD[case]
    torch.manual_seed(0)
    net = make().double()
    options = {"members": 3, "num_data": 10, "include": include}
    x = torch.randn(1 if "leaves" in case else 4, *shape).double()  # of one, all would fit all
    given = x.clone()
    found = []
    for whole in ({}, {"expand_at": ""}):
        torch.manual_seed(1)
        model = lpbnn.build(copy.deepcopy(net), "lpbnn", **options, **whole).double()
        found.append(lpbnn.predict(model, x, samples=samples, seed=2).members)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-13)
    assert torch.equal(x, given)


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_second_point_gives_each_member_its_own_rows(
    batch: int, samples: int, fill_device: Callable[[bool], None]
) -> None:
    net, x = TwoPoints().double(), torch.randn(batch, 5).double()
    model = lpbnn.build(net, "lpbnn", members=3, num_data=9, include=["wide", "last.*"])
    model = model.double()
    lpbnn.predict(model, x)  # the check
    assert model.expand_at == ["wide", "last"]
    assert model.points.can_loop
    seen: list[list[int]] = []
    forward = net.last.forward

    def counted(x: torch.Tensor, more: dict[str, Any]) -> object:
        seen.append([len(x), len(more["wide"][0])])
        return forward(x, more)

    net.last.forward = counted
    fill_device(True)
    one_by_one = lpbnn.predict(model, x, samples=samples, seed=1).members
    assert seen == [[batch, batch]] * 3 * samples
    seen.clear()
    fill_device(False)
    together = lpbnn.predict(model, x, samples=samples, seed=1).members
    assert seen == [[3 * batch, 3 * batch]] * samples  # those of one draw
    torch.testing.assert_close(one_by_one, together, rtol=0, atol=1e-14)


@pytest.mark.parametrize("check", [True, False])  # a check finds that the table has no examples
@pytest.mark.parametrize("rows", [6, 7])
def test_an_input_that_could_be_taken_for_members_keeps_them_together(
    rows: int, check: bool, fill_device: Callable[[bool], None]
) -> None:
    class Given(TwoPoints):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            wide = torch.tanh(self.wide(x))
            return self.last(x, {"wide": [wide], "table": table, "scale": 2.0})["out"]

    fill_device(True)
    net = Given().double()
    x, table = torch.randn(2, 5).double(), torch.randn(rows, 6).double()
    options = {"members": 3, "include": ["wide", "last.*"], "check": check}
    model = lpbnn.build(net, "batchensemble", **options).double()
    found = lpbnn.predict(model, (x, table)).members
    model.use_expansion_points([""])
    expected = lpbnn.predict(model, (x, table)).members
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
