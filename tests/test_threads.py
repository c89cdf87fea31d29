"""Four threads predict with one model, as a web service does, and none notices the others."""

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from networks import ResNet, settle
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lpbnn
from lpbnn import methods
from lpbnn.model import RunLock

THREADS, CALLS = 4, 3


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def made(method: str) -> lpbnn.UncertainModel:
    """A model with batch norm, members that differ, and its networks drawn if the method draws any."""
    model = lpbnn.build(settle(ResNet()), method, num_data=10, check=method != "abnn")
    if method == "tradi":
        x, y = torch.randn(6, 3, 8, 8), torch.randint(3, (6,))
        model.loss(x, y)["loss"].backward()
        model.after_step(lr=0.1)
        model.after_fit([(x, y)])
    return model.eval()


def in_threads(call: Callable[[int], Any], calls: int = CALLS) -> list[Any]:
    """Return ``call(i)`` for several calls of each thread; all threads start at once."""
    start = threading.Barrier(THREADS)

    def work(thread: int) -> list[Any]:
        start.wait()
        return [call(calls * thread + i) for i in range(calls)]

    with ThreadPoolExecutor(THREADS) as pool:
        return [found for each in pool.map(work, range(THREADS)) for found in each]


MODELS = [*methods.names(), "frozen lpbnn", "frozen batchensemble", "frozen rank1"]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_every_thread_gets_the_answer_it_would_get_alone(kind: str, training: bool) -> None:
    """With seeds, and other inputs in every call; the first call makes the check, too."""
    frozen, method = kind.startswith("frozen"), kind.split()[-1]
    model = made(method)
    if frozen:
        model = lpbnn.freeze(model, samples=2)
    inputs = torch.randn(THREADS * CALLS, 3, 3, 8, 8)

    def probs(asked: lpbnn.UncertainModel, i: int) -> Tensor:
        return lpbnn.predict(asked, inputs[i], samples=2, seed=i).probs

    alone = copy.deepcopy(model)
    expected = [probs(alone, i) for i in range(len(inputs))]
    model.train(training)
    before = copy.deepcopy(model.state_dict())
    found = in_threads(lambda i: probs(model, i))
    for i, answer in enumerate(found):
        torch.testing.assert_close(answer, expected[i], rtol=1e-5, atol=1e-6)
    assert all(module.training == training for module in model.net.modules())
    for name, value in model.state_dict().items():
        if not name.endswith("_extra_state"):
            assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("method", methods.names())
def test_a_seeded_prediction_leaves_torchs_generator_alone(method: str) -> None:
    """Neither read nor set, not even for a moment: another thread draws from it meanwhile."""
    model, x = made(method), torch.randn(3, 3, 8, 8)
    lpbnn.predict(model, x)  # makes the check
    torch.manual_seed(5)
    expected = torch.cat([torch.randn(50) for _ in range(20)])
    torch.manual_seed(5)
    stop = threading.Event()

    def predict() -> None:
        while not stop.is_set():
            lpbnn.predict(model, x, seed=0)

    thread = threading.Thread(target=predict)
    thread.start()
    drawn = torch.cat([torch.randn(50) for _ in range(20)])
    stop.set()
    thread.join()
    assert torch.equal(drawn, expected)


def test_the_last_thread_out_gives_the_modes_back() -> None:
    model = made("batchensemble").train()
    model.net.stage1.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    x = torch.randn(3, 3, 8, 8)
    in_threads(lambda i: lpbnn.predict(model, x))
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_the_comparison_of_rows_takes_no_part_in_the_draws_of_other_threads() -> None:
    model = lpbnn.build(torch.nn.Linear(4, 3), "meanfield", num_data=10)
    seeds = iter(range(100))

    def draw_elsewhere(*_: Any) -> None:
        torch.default_generator.manual_seed(next(seeds))

    model.net.register_forward_pre_hook(draw_elsewhere)
    x = torch.randn(5, 4)
    found = lpbnn.predict(model, x, seed=0, chunk=2)
    torch.testing.assert_close(found.probs, lpbnn.predict(model, x, seed=0).probs)


def test_threads_that_predict_in_portions_wait_for_one_comparison() -> None:
    model = made("meanfield")
    inputs = torch.randn(THREADS * CALLS, 5, 3, 8, 8)
    alone = copy.deepcopy(model)
    expected = [lpbnn.predict(alone, x, seed=0).probs for x in inputs]
    found = in_threads(lambda i: lpbnn.predict(model, inputs[i], seed=0, chunk=2).probs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("method", ["lpbnn", "rank1", "meanfield"])
def test_recomputed_parts_belong_to_the_thread_that_differentiates(method: str) -> None:
    """Saliency maps, say, of a network with activation checkpointing: each thread has its own members."""

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(6, 16), torch.nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Any = checkpoint(lambda x: self.first(x).tanh(), x, use_reentrant=False)
            return self.last(hidden)

    model = lpbnn.build(Checkpointed(), method, num_data=10).eval()
    inputs = torch.randn(THREADS * CALLS * 5, 8, 6)
    model(inputs[0])  # makes the check
    runs = [next(iter(model.passes(1, model.members))) for _ in inputs]

    def gradient(i: int) -> Tensor:
        x = inputs[i].clone().requires_grad_()
        runs[i](x).square().sum().backward(inputs=[x])
        assert x.grad is not None
        return x.grad

    expected = [gradient(i) for i in range(len(inputs))]
    found = in_threads(gradient, calls=CALLS * 5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class Switched(torch.nn.Module):
    """Drops by its own flag, and has a last layer of zeros: a check changes both for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        torch.nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        return self.last(torch.nn.functional.dropout(self.first(x), 0.5, self.training))


@pytest.mark.parametrize("method", ["lpbnn", "mcdropout", "ensemble", "mcp"])
def test_a_check_in_one_thread_is_seen_by_no_other(method: str) -> None:
    model = lpbnn.build(Switched(), method, num_data=10).eval()
    x, stop = torch.randn(5, 4), threading.Event()
    expected = lpbnn.predict(model, x, chunk=10, seed=0).probs

    def check(_: int) -> None:
        try:
            for i in range(20):
                model.checks.pop("x:2 flag:True", None)
                lpbnn.predict(model, {"x": x, "flag": True}, chunk=10, seed=i)  # a new kind of call
                lpbnn.check(model, x)
        finally:
            stop.set()

    def ask(_: int) -> list[Tensor]:
        found = []
        while not stop.is_set():
            found.append(lpbnn.predict(model, x, chunk=10, seed=0).probs)
        return found

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, i) for i in range(2)]
        pool.submit(check, 0).result()
        answers = [answer for each in asked for answer in each.result()]
    assert answers
    for answer in answers:
        torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-6)


def test_two_threads_that_wait_for_their_checks_do_not_wait_for_each_other() -> None:
    model = lpbnn.build(Switched(), "lpbnn", num_data=10).eval()
    x = torch.randn(5, 4)

    def ask(i: int) -> Tensor:
        with model.lock.shared():  # both run the model when both find a new kind of call
            return lpbnn.predict(model, {"x": x, "flag": bool(i % 2)}, seed=0).probs

    for _ in range(10):
        model.checks.clear()
        assert len(in_threads(ask, calls=2)) == 2 * THREADS


def test_a_thread_that_has_checked_still_runs_and_one_that_has_left_does_not() -> None:
    lock, entered = RunLock(), threading.Event()

    def check() -> None:
        with lock.alone():
            entered.set()

    with lock.shared():
        with lock.alone():
            pass
        other = threading.Thread(target=check, daemon=True)
        other.start()
        assert not entered.wait(0.05)
    assert entered.wait(5.0)


def test_a_thread_that_runs_may_enter_again_while_another_waits_for_its_check() -> None:
    lock, entered = RunLock(), threading.Event()

    def check() -> None:
        with lock.alone():
            pass

    other = threading.Thread(target=check, daemon=True)

    def run() -> None:
        with lock.shared():
            other.start()
            other.join(0.05)
            with lock.shared():
                entered.set()

    threading.Thread(target=run, daemon=True).start()
    assert entered.wait(5.0)
    other.join(5.0)
    assert not other.is_alive()
