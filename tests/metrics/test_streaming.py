"""What every metric promises: batches, merges and processes give the number of one update.

Also what ``update`` must not do: wait for the GPU, or hold more than a chunk of memory.
"""

import copy
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lpbnn import metrics
from lpbnn.metrics import ClassificationMetrics, _base

N = 12


@dataclass(frozen=True)
class Case:
    make: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    axes: tuple[int, ...]
    """Where the examples are, in each input."""
    bounded: bool = True

    def part(self, index: slice) -> tuple[Tensor, ...]:
        examples = torch.arange(N)[index]
        pairs = zip(self.inputs, self.axes, strict=True)
        return tuple(x.index_select(axis, examples) for x, axis in pairs)


def cases() -> dict[str, Case]:
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (N,), generator=rng)
    probs = torch.randn(N, 3, generator=rng).softmax(1)
    maps = torch.randn(N, 3, 4, 5, generator=rng).softmax(1)
    classes = torch.randint(3, (N, 4, 5), generator=rng)
    classes[:, 0] = 255
    scores, is_ood = torch.rand(N, generator=rng), torch.arange(N) % 3 == 0
    score_maps, ood_maps = torch.rand(N, 4, 5, generator=rng), classes == 0
    members = torch.randn(3, N, 3, generator=rng).softmax(-1)
    means, variances = torch.randn(2, 2, N, generator=rng)
    pair = (0, 0)
    return {
        "classification": Case(metrics.ClassificationMetrics, (probs, labels), pair),
        "pixels": Case(
            lambda **k: metrics.ClassificationMetrics(ignore_index=255, **k), (maps, classes), pair
        ),
        "detection": Case(metrics.DetectionMetrics, (scores, is_ood), pair, bounded=False),
        "pooled": Case(
            metrics.PooledDetectionMetrics, (score_maps, ood_maps, classes != 255), (0, 0, 0)
        ),
        "image": Case(
            metrics.ImageDetectionMetrics, (score_maps, ood_maps, classes != 255), (0, 0, 0)
        ),
        "miou": Case(lambda **k: metrics.MeanIoU(3, **k), (maps, classes), pair),
        "miou of class maps": Case(
            lambda **k: metrics.MeanIoU(3, **k), (maps.argmax(1), classes), pair
        ),
        "diversity": Case(lambda **k: metrics.DiversityMetrics(3, **k), (members, labels), (1, 0)),
        "regression": Case(metrics.RegressionMetrics, (means, variances.exp(), scores), (1, 1, 0)),
    }


CASES = cases()
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def numbers(metric: Any) -> dict[str, float]:
    value = metric.compute()
    return value if isinstance(value, dict) else {"value": float(value)}


def one_update(case: Case) -> dict[str, float]:
    metric = case.make()
    metric.update(*case.inputs)
    return numbers(metric)


@every
@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(0, N), max_size=4))
def test_batches_give_the_number_of_one_update(case: Case, cuts: list[int]) -> None:
    metric, edges = case.make(), [0, *sorted(cuts), N]  # equal cuts are empty batches
    for low, high in zip(edges[:-1], edges[1:], strict=True):  # noqa: RUF007 (as slices)
        metric.update(*case.part(slice(low, high)))
    assert numbers(metric) == pytest.approx(one_update(case), rel=1e-9)


@every
def test_merging_gives_the_number_of_one_update(case: Case) -> None:
    first, second, fresh = case.make(), case.make(), case.make()
    first.update(*case.part(slice(0, 7)))
    second.update(*case.part(slice(7, N)))
    numbers(first)  # a cached value must not survive the merge
    first.merge_state(second)
    assert numbers(first) == pytest.approx(one_update(case))
    fresh.merge_state(first)
    assert numbers(fresh) == pytest.approx(one_update(case))
    fresh.merge_state(case.make().metric_state)
    assert numbers(fresh) == pytest.approx(one_update(case))


def test_only_metrics_of_one_kind_merge() -> None:
    with pytest.raises(ValueError, match=r"state 'counts' is \(2, 1\) there and \(2, 15\) here"):
        ClassificationMetrics().merge_state(ClassificationMetrics(num_bins=1))
    with pytest.raises(ValueError, match="cannot merge: the state 'counts' is None there"):
        ClassificationMetrics().merge_state(metrics.MeanIoU(2))


@every
def test_reset_copy_and_pickle(case: Case) -> None:
    metric = case.make()
    metric.update(*case.part(slice(0, 7)))
    halfway = pickle.loads(pickle.dumps(metric)) if "lambda" not in str(case.make) else None
    for other in filter(None, (copy.deepcopy(metric), metric.clone(), halfway)):
        other.update(*case.part(slice(7, N)))
        assert numbers(other) == pytest.approx(one_update(case))
    metric.reset()
    metric.update(*case.inputs)
    assert numbers(metric) == one_update(case)


@every
def test_nothing_seen_is_an_error_that_says_so(case: Case) -> None:
    metric = case.make()
    metric.update(*case.part(slice(0, 0)))
    with pytest.raises(ValueError, match=r"seen no|0 out-of-distribution and 0"):
        metric.compute()
    with (
        pytest.warns(UserWarning, match="before the ``update``"),
        pytest.raises(ValueError, match="; expected "),
    ):
        case.make().compute()


@every
def test_modes_of_torch_do_not_change_the_number(case: Case) -> None:
    metric = case.make()
    with torch.inference_mode():
        metric.reset()  # makes inference tensors, which forbid writing in place later
        metric.update(*case.part(slice(0, 4)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        metric.update(*case.part(slice(4, 8)))
    tracked = [x.requires_grad_() if x.is_floating_point() else x for x in case.part(slice(8, N))]
    metric(*tracked)  # forward: the batch's own value, and into the sum
    states = [x for s in metric.metric_state.values() for x in (s if isinstance(s, list) else [s])]
    assert not any(state.requires_grad for state in states)
    assert numbers(metric) == pytest.approx(one_update(case), rel=1e-6)


@every
def test_update_stays_on_the_device_of_the_inputs(case: Case) -> None:
    """Shown without a GPU by the meta device, which refuses to be mixed."""
    metric = case.make().to("meta")
    metric.update(*(x.to("meta") for x in case.inputs))
    states = [x for s in metric.metric_state.values() for x in (s if isinstance(s, list) else [s])]
    assert all(state.is_meta for state in states)


@every
def test_a_merge_ends_on_the_device_of_the_metric(case: Case) -> None:
    metric, other = case.make().to("meta"), case.make()
    other.update(*case.inputs)
    metric.merge_state(other)
    states = [x for s in metric.metric_state.values() for x in (s if isinstance(s, list) else [s])]
    assert all(state.is_meta for state in states)


@every
def test_the_size_of_a_chunk_does_not_change_the_number(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one_update(case)
    monkeypatch.setattr(_base, "CHUNK", 7)
    assert one_update(case) == pytest.approx(expected, rel=1e-9)


@every
def test_state_does_not_grow_with_the_data(case: Case) -> None:
    metric = case.make()
    metric.update(*case.inputs)
    before = {name: getattr(state, "shape", None) for name, state in metric.metric_state.items()}
    metric.update(*case.inputs)
    after = {name: getattr(state, "shape", None) for name, state in metric.metric_state.items()}
    assert before == after
    assert all(shape is not None for shape in after.values()) == case.bounded


class Watch(TorchDispatchMode):
    """Records what would make a GPU wait, and the largest tensor made."""

    WAITS = (
        "_local_scalar_dense",
        "nonzero",
        "bincount",
        "masked_select",
        "unique",
        "equal.default",
    )

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        by_mask = name.startswith("index.") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in args[1]
        )
        if name.startswith(self.WAITS) or by_mask:
            self.waits.append(name)
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.numel())
        return out


@every
def test_update_never_waits_for_the_device(case: Case) -> None:
    metric = case.make()
    with Watch() as watch:
        metric.update(*case.inputs)
    assert watch.waits == []


@every
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_number_of_the_cpu_without_a_wait(case: Case) -> None:
    metric, inputs = case.make().to("cuda"), [x.cuda() for x in case.inputs]
    torch.cuda.set_sync_debug_mode("error")
    try:
        metric.update(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert numbers(metric) == pytest.approx(one_update(case), rel=1e-6)
    left_on_cpu = case.make()
    left_on_cpu.update(*inputs)
    assert numbers(left_on_cpu) == pytest.approx(one_update(case), rel=1e-6)


def test_the_watch_sees_a_wait() -> None:
    with Watch() as watch:
        torch.ones(3)[torch.ones(3, dtype=torch.bool)].sum().item()
    assert watch.waits == ["index.Tensor", "_local_scalar_dense.default"]


@pytest.mark.parametrize("name", ["classification", "miou", "diversity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_maps_are_never_copied_whole(name: str, dtype: torch.dtype) -> None:
    probs = torch.full((1, 13, 720, 1280), 1 / 13, dtype=dtype)
    labels = torch.zeros(1, 720, 1280, dtype=torch.int64)
    metric = {
        "classification": metrics.ClassificationMetrics(),
        "miou": metrics.MeanIoU(13),
        "diversity": metrics.DiversityMetrics(2),
    }[name]
    with Watch() as watch:
        metric.update(probs.expand(2, -1, -1, -1, -1) if name == "diversity" else probs, labels)
    assert watch.largest <= _base.CHUNK < probs.numel() / 10


@every
@pytest.mark.filterwarnings("ignore:The ``compute`` method")  # said on the rank that saw nothing
@pytest.mark.parametrize("cut", [7, 0], ids=["two ranks", "one rank saw nothing"])
def test_processes_give_the_number_of_one_update(case: Case, cut: int) -> None:
    """torchmetrics' own synchronisation, with the all-gather played by two threads."""
    sent: dict[int, Tensor] = {}
    results: dict[int, dict[str, float]] = {}
    barrier = threading.Barrier(2, timeout=20)

    def gather_for(rank: int) -> Callable[..., list[Tensor]]:
        def gather(tensor: Tensor, group: object = None) -> list[Tensor]:
            sent[rank] = tensor
            barrier.wait()
            both = [sent[0], sent[1]]
            barrier.wait()
            # What NCCL asks for: a rank without data must still send the same kind of tensor.
            assert both[0].dtype == both[1].dtype
            assert both[0].ndim == both[1].ndim
            return both

        return gather

    def process(rank: int) -> None:
        metric = case.make(dist_sync_fn=gather_for(rank), distributed_available_fn=lambda: True)
        if rank == 1 or cut > 0:
            metric.update(*case.part(slice(0, cut) if rank == 0 else slice(cut, N)))
        results[rank] = numbers(metric)
        for extra in ("per_class", "reliability"):
            getattr(metric, extra, lambda: None)()

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] == pytest.approx(one_update(case))


PROBS, LABELS = torch.randn(24, 3).softmax(1), torch.arange(24) % 3
MEANS, VARIANCES, NUMBERS = torch.randn(2, 24), torch.rand(2, 24) + 0.1, torch.randn(24)
FUNCTIONS: dict[str, tuple[Tensor, ...]] = {
    "accuracy": (PROBS, LABELS),
    "nll": (PROBS, LABELS),
    "brier": (PROBS, LABELS),
    "ece": (PROBS, LABELS),
    "adaptive_ece": (PROBS, LABELS),
    "classwise_ece": (PROBS, LABELS),
    "auroc": (NUMBERS, LABELS == 0),
    "aupr": (NUMBERS, LABELS == 0),
    "fpr95": (NUMBERS, LABELS == 0),
    "aurc": (NUMBERS, VARIANCES[0]),
    "augrc": (NUMBERS, VARIANCES[0]),
    "crps": (MEANS, VARIANCES, NUMBERS),
    "rmse": (MEANS, NUMBERS),
    "coverage": (MEANS, VARIANCES, NUMBERS),
    "quantile_error": (MEANS, VARIANCES, NUMBERS),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_takes_tensors_that_learn_and_tensors_of_double_precision(name: str) -> None:
    function, inputs = getattr(metrics, name), FUNCTIONS[name]
    expected = function(*inputs)
    tracked = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    assert isinstance(expected, float)
    assert function(*tracked) == expected
    double = [x.double() if x.is_floating_point() else x for x in inputs]
    assert function(*double) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_any_integer_type_give_the_same_number(dtype: torch.dtype) -> None:
    for name in ("accuracy", "nll", "brier", "ece", "adaptive_ece", "classwise_ece"):
        function = getattr(metrics, name)
        assert function(PROBS, LABELS.to(dtype)) == function(PROBS, LABELS)
    sets = PROBS > 0.3
    assert metrics.set_coverage(sets, LABELS.to(dtype)) == metrics.set_coverage(sets, LABELS)


IGNORING: dict[str, Callable[..., Any]] = {
    name: getattr(metrics, name)
    for name in ("accuracy", "nll", "brier", "ece", "adaptive_ece", "classwise_ece")
} | {
    "reliability": lambda *data, **options: metrics.reliability(*data, **options).count.tolist(),
    "miou": lambda *data, **options: metrics.miou(*data, 3, **options),
    "set_coverage": lambda probs, y, **options: metrics.set_coverage(probs > 0.3, y, **options),
    "set_size": lambda probs, y, **options: metrics.set_size(probs > 0.3, y, **options),
    "q_statistic": lambda probs, y, **options: metrics.q_statistic(
        torch.stack([probs, probs.flip(1), probs.roll(1, 1)]), y, **options
    ),
}


@pytest.mark.parametrize("name", IGNORING)
@pytest.mark.parametrize("ignored", [7, 1, (7, 1)])
def test_an_ignored_label_is_as_good_as_no_example(name: str, ignored: Any) -> None:
    function, labels = IGNORING[name], LABELS.clone()
    both = ignored if isinstance(ignored, tuple) else (ignored,)
    labels[::4] = 7 if 7 in both else 1
    left = torch.tensor([label not in both for label in labels.tolist()])
    assert 0 < left.sum() < len(left)
    found = function(PROBS, labels, ignore_index=ignored)
    expected = function(PROBS[left], labels[left])
    assert found == pytest.approx(expected, nan_ok=True)


FUNCTIONS_OF_MEMBERS = {
    name: (torch.stack([PROBS, PROBS.flip(1)]), LABELS)
    for name in ("ratio_error", "q_statistic", "correlation")
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *FUNCTIONS_OF_MEMBERS])
def test_what_is_no_tensor_or_has_no_dimension_is_refused(name: str) -> None:
    inputs = (FUNCTIONS | FUNCTIONS_OF_MEMBERS)[name]
    for i, own in enumerate(inputs):
        for wrong in (own.tolist(), own.numpy(), own.flatten()[0], own[..., :2, None]):
            with pytest.raises(ValueError, match="expected"):
                getattr(metrics, name)(*inputs[:i], wrong, *inputs[i + 1 :])
    with pytest.raises(ValueError, match="expected"):
        getattr(metrics, name)(*(given.flatten()[0] for given in inputs))
