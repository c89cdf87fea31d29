"""Seeded draws: from generators of their own, so that threads do not disturb each other."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What takes a generator.
DRAWING = {
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    torch.normal,
    torch.bernoulli,
    torch.multinomial,
    torch.poisson,
    Tensor.bernoulli,
    Tensor.bernoulli_,
    Tensor.exponential_,
    Tensor.multinomial,
    Tensor.normal_,
    Tensor.random_,
    Tensor.uniform_,
}
# What takes none, and fills a new tensor like the given one by a method that does.
LIKE = {torch.randn_like: Tensor.normal_, torch.rand_like: Tensor.uniform_}


class PrivateDraws(TorchFunctionMode):
    """Draw from generators of this object inside the block: torch's global ones are neither read nor set.

    It holds for the thread that entered the block. The numbers are those that the global generators would
    give after ``torch.manual_seed``. Functions that take no generator, for example a dropout that is active
    in evaluation, draw from the global ones as ever.

    Args:
        seed: of the generators, one per device.

    Example:
        >>> with PrivateDraws(0):
        ...     first = torch.randn(3)
        >>> _ = torch.manual_seed(0)
        >>> torch.equal(first, torch.randn(3))
        True
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device | str | None) -> torch.Generator:
        """Return the generator of a device; None is torch's default device."""
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in LIKE:
            empty = torch.empty_like(*args, **kwargs)
            return LIKE[func](empty, generator=self.generator(empty.device))
        if func in DRAWING and kwargs.get("generator") is None:
            first = args[0] if args else None
            device = first.device if isinstance(first, Tensor) else kwargs.get("device")
            kwargs["generator"] = self.generator(device)
        return func(*args, **kwargs)


class RepeatedDraws(TorchFunctionMode):
    """Record draws inside the block; with ``repeat`` give the same numbers again, as constants.

    A draw is found again by its generator's seed and its place among those of that generator, so members may
    run in another order. A tracer thus sees numbers, not draws; their shapes may not depend on the batch.

    Example:
        >>> draws = RepeatedDraws()
        >>> with draws:
        ...     first = torch.randn(3)
        >>> draws.repeat = True
        >>> with draws:
        ...     again = torch.randn(3)
        >>> torch.equal(first, again)
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self.repeat = False
        self.recorded: dict[tuple[int | None, int], Tensor] = {}
        self.counts: dict[int | None, int] = {}
        self.alive: list[Any] = []  # generators, whose ids must not be used again

    def __enter__(self) -> Any:
        self.counts, self.alive = {}, []
        return super().__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in DRAWING and func not in LIKE:
            return func(*args, **kwargs)
        generator: torch.Generator | None = kwargs.get("generator")
        who = None if generator is None else id(generator)
        count = self.counts.get(who, 0)
        self.counts[who] = count + 1
        self.alive.append(generator)
        key = (None if generator is None else generator.initial_seed(), count)
        if not self.repeat:
            self.recorded[key] = func(*args, **kwargs).clone()
        found = self.recorded[key].clone()  # the network may change its draw in place
        in_place = getattr(func, "__name__", "").endswith("_")
        return args[0].copy_(found) if in_place else found


def seed_from(generator: torch.Generator, seed: int | None = None) -> int:
    """Return a seed drawn from a generator; refuse another one beside it."""
    if seed is not None:
        raise ValueError("give seed or generator, not both.")
    device = generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device).item())
