"""Draws from generators of their own, and draws that are repeated for a tracer."""

import pytest
import torch
from torch import Tensor

from lpbnn.draws import PrivateDraws, RepeatedDraws


def some_draws(generator: torch.Generator | None = None) -> list[Tensor]:
    filled = torch.empty(2).normal_(generator=generator)
    return [torch.randn(3, generator=generator), torch.rand(3, generator=generator), filled]


def test_every_draw_of_a_block_is_repeated_in_its_place() -> None:
    draws = RepeatedDraws()
    with draws:
        first = [*some_draws(), *some_draws()]
    draws.repeat = True
    for _ in range(2):
        with draws:
            again = [*some_draws(), *some_draws()]
        assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[3])


def test_the_generators_of_all_devices_have_the_seed() -> None:
    """As after ``torch.manual_seed``, whichever device draws first."""
    draws = PrivateDraws(7)
    draws.generators[torch.device("meta")] = torch.Generator()  # in the place of a GPU
    assert draws.generator("cpu").initial_seed() == 7


def test_what_is_done_to_a_drawn_tensor_does_not_change_the_record() -> None:
    """A network fills its own tensor with noise and then scales it in place, in every pass."""
    draws = RepeatedDraws()

    def scaled() -> list[Tensor]:
        return [torch.empty(3).normal_().mul_(5), torch.randn(3).add_(1)]

    with draws:
        first = [tensor.clone() for tensor in scaled()]
    draws.repeat = True
    with draws:
        again = scaled()
    assert all(map(torch.equal, first, again))


def test_generators_are_told_apart_by_their_seeds() -> None:
    """So that members may run in another order."""
    draws = RepeatedDraws()
    with draws:
        first = {seed: some_draws(torch.Generator().manual_seed(seed)) for seed in (1, 2)}
    draws.repeat = True
    with draws:
        for seed in (2, 1):
            again = some_draws(torch.Generator().manual_seed(seed))
            assert all(map(torch.equal, first[seed], again))


@pytest.mark.parametrize("seed", [0, 7])
def test_private_draws_are_those_of_torchs_generator_with_that_seed(seed: int) -> None:
    like = torch.zeros(4)

    def drawn() -> list[Tensor]:
        return [
            *some_draws(),
            torch.randn_like(like),
            torch.rand_like(like),
            torch.randint(9, (4,)),
            torch.randperm(5),
            torch.bernoulli(torch.full((9,), 0.5)),
            like.clone().bernoulli_(0.5),
            like.clone().uniform_(),
            torch.full((3,), 0.5).multinomial(2),
        ]

    state = torch.get_rng_state()
    with PrivateDraws(seed):
        found = drawn()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(seed)
    for one, other in zip(found, drawn(), strict=True):
        assert torch.equal(one, other)


def test_repeated_draws_survive_a_change_in_place() -> None:
    draws = RepeatedDraws()
    with draws:
        first = torch.randn(3)
    draws.repeat = True
    for _ in range(2):
        with draws:
            again = torch.randn(3)
        assert torch.equal(again, first)
        again.zero_()
