"""Export to ONNX: one file from raw inputs to label, probabilities, uncertainties and prediction set.

The graph holds what ``predict`` does: the inputs are prepared, the members run (draws of a stochastic model
are made once and stored in the file), their outputs are calibrated and averaged. It needs no torch and no
lpbnn to run. Before anything is written, onnxruntime runs it beside ``predict`` for several batch sizes.
"""

import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import tree_flatten, tree_unflatten

import lpbnn
from lpbnn.atomic import write_atomic
from lpbnn.calibration.conformal import Conformal
from lpbnn.draws import RepeatedDraws
from lpbnn.likelihoods import MultiHead
from lpbnn.members.call import Arguments, as_call, batch_size, is_batched
from lpbnn.model import UncertainModel
from lpbnn.predict import (
    MemberSums,
    Prediction,
    predict,
    seeded_passes,
    to_device,
    unwrap,
)

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LARGEST = 2**31 - 1  # bytes: ONNX files are protocol buffers
TOLERANCE = 1e-3  # of the check, relative to the largest number of an output
DECISIONS = ("label", "prediction_set")  # they jump where two numbers are nearly equal


class Exported(NamedTuple):
    """What was written.

    Args:
        path: the file.
        inputs: name and type of each input, such as "float (batch, 4)".
        outputs: the same of each output.
        difference: the largest difference of an output between onnxruntime and ``predict``, as a share of
            the largest number of that output, or of 1 if that is larger.
        batches: the batch sizes that were compared.
        size: bytes of the file.
    """

    path: Path
    inputs: dict[str, str]
    outputs: dict[str, str]
    difference: float
    batches: tuple[int, ...]
    size: int


class Answers(NamedTuple):
    """How a prediction becomes the named outputs of a graph.

    Args:
        conformal: adds ``prediction_set``, or ``lower`` and ``upper``.
        level: of the sets and intervals.
        target_mean: of numbers, if the model predicts standardised ones.
        target_std: the same.
    """

    conformal: Conformal | None = None
    level: float = 0.9
    target_mean: float = 0.0
    target_std: float = 1.0

    def __call__(self, prediction: Prediction | Mapping[str, Prediction]) -> dict[str, Tensor]:
        """Return the outputs by name; those of several heads as "head.name"."""
        if isinstance(prediction, Mapping):
            return {
                f"{head}.{name}": value
                for head, p in prediction.items()
                for name, value in self(p).items()
            }
        p = prediction
        uncertainties = {"total": p.total, "epistemic": p.epistemic}
        if p.quantity == "mean":
            scale, shift = self.target_std, self.target_mean
            found = {"mean": p.mean * scale + shift, "std": p.std * scale}
            found |= {name: value * scale**2 for name, value in uncertainties.items()}
            found["ood_score"] = p.ood_score
            if self.conformal is not None:
                low, high = p.interval(self.level, self.conformal)
                found |= {"lower": low * scale + shift, "upper": high * scale + shift}
            return found
        first = {"values": p.values}
        if p.quantity == "probs":
            first = {"label": p.labels, "probs": p.probs}
        found = {**first, **uncertainties, "ood_score": p.ood_score}
        if self.conformal is not None:
            found["prediction_set"] = p.sets(self.conformal, self.level)
        return found


class PredictionGraph(nn.Module):
    """``predict`` as a module without draws and checks: what is traced.

    Args:
        model: in evaluation mode.
        runs: the passes of its members.
        rebuild: makes the call's arguments of the graph's tensors.
        prepare: from raw inputs to those of the model; None leaves them.
        answers: names the outputs.
        draws: repeats what the passes draw themselves.
    """

    def __init__(
        self,
        model: UncertainModel,
        runs: Sequence[Callable[..., Any]],
        rebuild: Callable[[Sequence[Tensor]], Any],
        prepare: nn.Module | None,
        answers: Answers,
        draws: RepeatedDraws,
    ) -> None:
        super().__init__()
        self.model, self.runs, self.rebuild = model, runs, rebuild
        self.prepare, self.answers, self.draws = prepare, answers, draws

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = prepared(self.rebuild(tensors), self.prepare)
        likelihood = self.model.likelihood
        heads = likelihood.heads
        sums = {name: MemberSums(head, keep=False) for name, head in heads.items()}
        with self.draws:
            for run in self.runs:
                outputs = run(*args, **kwargs)
                for name, head in heads.items():
                    own = outputs[name] if isinstance(outputs, Mapping) else outputs
                    sums[name].add_summary(head.summary(own), self.model.ood_score(own))
        found = {name: head_sums.finish() for name, head_sums in sums.items()}
        named = self.answers(found if isinstance(likelihood, MultiHead) else found[""])
        return tuple(named.values())


def export_onnx(
    model: nn.Module,
    example: Any,
    path: str | Path,
    *,
    samples: int = 1,
    seed: int = 0,
    prepare: nn.Module | None = None,
    conformal: Conformal | None = None,
    level: float = 0.9,
    target_mean: float = 0.0,
    target_std: float = 1.0,
    metadata: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Exported:
    """Write a model as an ONNX file that predicts, and compare the file with ``predict``.

    Outputs, (batch, ...), by name: ``label, probs, total, epistemic, ood_score``, and ``prediction_set`` with
    a ``conformal``; of numbers ``mean, std, total, epistemic, ood_score``, and ``lower, upper``; of a custom
    likelihood ``values, total, epistemic, ood_score``. Those of several heads are ``head.name``. They are what
    ``predict(model, x, samples=samples, seed=seed)`` returns, for any batch size.

    Args:
        model: what ``lpbnn.build`` or ``lpbnn.freeze`` returned, calibrated or not.
        example: inputs as ``predict`` takes them, at least one example. Every tensor in it is an input of the
            graph; its first dimension may have any size if that is the batch, the others stay.
        path: the file.
        samples: draws of each member, stored in the file.
        seed: of the draws.
        prepare: from the graph's inputs to the model's, for example a normalisation.
        conformal: from ``lpbnn.calibration.fit_conformal``.
        level: of its sets or intervals.
        target_mean: of numbers: outputs are multiplied by ``target_std``, and this is added.
        target_std: see ``target_mean``.
        metadata: further entries of the file's properties; what is not a string is stored as JSON.
        force: replace an existing file.

    Raises:
        ImportError: a package of ``lpbnn[export]`` is missing.
        FileExistsError: the file is there, and ``force`` is False.
        ValueError: the model cannot be exported, or the graph does not agree with ``predict``.

    Example:
        >>> import tempfile
        >>> model = lpbnn.build(nn.Linear(4, 3), "lpbnn", members=4, num_data=100)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = export_onnx(model, torch.randn(2, 4), Path(folder) / "model.onnx")
        >>> found.inputs, list(found.outputs), found.difference < 1e-5
        ({'inputs': 'float (batch, 4)'}, ['label', 'probs', 'total', 'epistemic', 'ood_score'], True)
    """
    path = Path(path)
    require_packages()
    require_free(path, force)
    own = unwrap(model)
    answers = Answers(conformal, level, target_mean, target_std)
    if conformal is not None:
        if isinstance(own.likelihood, MultiHead):
            raise ValueError("conformal= is for a model with one head. Fix: leave it out.")
        if conformal.randomised:
            raise ValueError(
                "randomised prediction sets are drawn anew in every call, and a file gives the same answer "
                "twice. Fix: fit_conformal(..., randomised=False)."
            )
    inputs = GraphInputs(to_device(example, own))
    options: dict[str, Any] = {"samples": samples, "seed": seed}

    def expected(tensors: Sequence[Tensor]) -> Prediction | dict[str, Prediction]:
        args, kwargs = prepared(inputs.rebuild(tensors), prepare)
        return predict(own, kwargs if kwargs else args, keep_members=False, **options)

    # An input that does not fit is refused here.
    names = list(answers(expected(inputs.rows(inputs.traced))))
    graph = to_onnx(own, inputs, prepare, answers, names, **options)
    content = with_properties(graph, {**describe(own, answers, **options), **(metadata or {})})
    session = cpu_session(content)
    difference = compare(session, inputs, names, expected, answers)
    require_free(path, force)  # it may have been written meanwhile
    write_atomic(path, content)
    ours, theirs = (
        {one.name: f"{one.type[7:-1]} ({', '.join(map(str, one.shape))})" for one in part}
        for part in (session.get_inputs(), session.get_outputs())
    )
    return Exported(path, ours, theirs, difference, inputs.batches, len(content))


def require_packages() -> None:
    """Refuse to export if a package of the extra is missing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"the export needs {', '.join(missing)}, which is not installed. Fix: pip install "
            "'lpbnn[export]'."
        )


def require_free(path: Path, force: bool) -> None:
    """Refuse a path that cannot be written to, or where a file is that may not be replaced."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Fix: name a file, such as {path}/model.onnx.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is no folder. Fix: make it, or give another path.")
    if path.exists() and not force:
        raise FileExistsError(
            f"{path} is already there. Fix: give another path, or replace it with force (--force)."
        )


def prepared(x: Any, prepare: nn.Module | None) -> Arguments:
    """Return the model's arguments from the graph's inputs."""
    args, kwargs = as_call(x)
    return (args, kwargs) if prepare is None else as_call(prepare(*args, **kwargs))


class GraphInputs:
    """The tensors of an example, and the batches that the graph is traced and compared with.

    Args:
        example: as ``predict`` takes it.
    """

    def __init__(self, example: Any) -> None:
        leaves, self.spec = tree_flatten(example)
        self.leaves: list[Any] = leaves
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [leaves[i] for i in self.places]
        if not self.tensors or self.tensors[0].dim() == 0 or not len(self.tensors[0]):
            raise ValueError(
                "the example has no tensor with a batch. Fix: inputs of at least one example, for "
                "example x[:2]."
            )
        self.batch = len(self.tensors[0])
        self.moves = [is_batched(tensor, self.batch) for tensor in self.tensors]
        others = {size for tensor in self.tensors for size in tensor.shape[1:]}
        # A batch of one is special to tracers, and one equal to another dimension is told apart badly.
        self.traced = next(n for n in range(3, 5 + len(others)) if n not in others)
        self.batches = (1, 2, self.traced + 2)

    @property
    def names(self) -> list[str]:
        """The names of the graph's inputs: keywords, or "inputs", with a number if there are several."""
        example = tree_unflatten(self.leaves, self.spec)
        if isinstance(example, Mapping) and len(example) == len(self.tensors):
            return [str(name) for name in example]
        if len(self.tensors) == 1:
            return ["inputs"]
        return [f"inputs_{i}" for i in range(len(self.tensors))]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the call that these tensors make in the example's structure."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.places, tensors, strict=True):
            leaves[i] = tensor
        return tree_unflatten(leaves, self.spec)

    def rows(self, count: int) -> list[Tensor]:
        """Return ``count`` examples: those of the example, again and again."""
        index = torch.arange(count) % self.batch
        return [
            tensor[index.to(tensor.device)] if moves else tensor
            for tensor, moves in zip(self.tensors, self.moves, strict=True)
        ]


def to_onnx(
    model: UncertainModel,
    inputs: GraphInputs,
    prepare: nn.Module | None,
    answers: Answers,
    names: Sequence[str],
    samples: int,
    seed: int,
) -> Any:
    """Return the graph as an ``onnx.ModelProto``."""
    tensors = tuple(inputs.rows(inputs.traced))
    args, kwargs = prepared(inputs.rebuild(tensors), prepare)
    width, _ = model.chunk_sizes(batch_size(args, kwargs), samples, None)
    dynamic = tuple({0: Dim("batch")} if moves else {} for moves in inputs.moves)
    with model.evaluating(), torch.no_grad(), quiet():
        draws = RepeatedDraws()
        runs = list(seeded_passes(model, samples, width, seed))
        graph = PredictionGraph(model, runs, inputs.rebuild, prepare, answers, draws).eval()
        graph(*tensors)  # what it draws itself is recorded
        draws.repeat = True
        try:
            program = torch.onnx.export(
                graph,
                tensors,
                dynamo=True,
                dynamic_shapes=(dynamic,),
                input_names=inputs.names,
                output_names=list(names),
                verbose=False,
            )
        except Exception as error:  # a tracer can fail in any way at all
            raise ValueError(
                f"{type(model).__name__} around {type(model.networks[0]).__name__} cannot be exported to "
                f"ONNX: {root_cause(error)} Fix: a forward without Python branches on values and on the "
                "batch size, of operations that ONNX has."
            ) from error
    assert program is not None
    return program.model_proto


def with_properties(proto: Any, properties: Mapping[str, Any]) -> bytes:
    """Return the file's content with its properties."""
    import onnx

    text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in properties.items()}
    onnx.helper.set_model_props(proto, text)
    if proto.ByteSize() > LARGEST:
        raise ValueError(
            f"the graph has {proto.ByteSize():,} bytes, and an ONNX file at most {LARGEST:,}. Fix: fewer "
            "samples, or fewer members."
        )
    return proto.SerializeToString()


def describe(model: UncertainModel, answers: Answers, samples: int, seed: int) -> dict[str, Any]:
    """Return the properties that every file has."""
    scaling = model.likelihood.scaling
    found: dict[str, Any] = {
        "producer": "lpbnn",
        "version": lpbnn.__version__,
        "model": type(model).__name__,
        "task": model.task,
        "members": model.members * (samples if model.stochastic else 1),
        "samples": samples if model.stochastic else 1,
        "seed": seed,
    }
    if scaling is not None:
        kind = "vector scaling" if scaling.scale.dim() else scaling.temperature
        found["temperature"] = kind
    if answers.conformal is not None:
        found |= {"conformal": answers.conformal.method, "level": answers.level}
    return found


def cpu_session(content: bytes) -> Any:
    """Return an ``onnxruntime.InferenceSession`` on the CPU; onnxruntime reports nothing about it."""
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def compare(
    session: Any,
    inputs: GraphInputs,
    names: Sequence[str],
    expected: Callable[[Sequence[Tensor]], Prediction | dict[str, Prediction]],
    answers: Answers,
) -> float:
    """Run a graph beside the model, for several batch sizes; return ``Exported.difference``.

    Decisions are compared with those that follow from the graph's own probabilities; 1 in 100 may differ
    where two numbers are nearly equal.
    """
    given = {one.name for one in session.get_inputs()}
    largest, decisions, differing = 0.0, 0, 0
    for batch in inputs.batches:
        tensors = inputs.rows(batch)
        feed = {
            name: tensor.cpu().numpy()
            for name, tensor in zip(inputs.names, tensors, strict=True)
            if name in given  # one that the model does not use is not in the graph
        }
        values = map(torch.from_numpy, session.run(None, feed))
        found = dict(zip(names, values, strict=True))
        p = expected(tensors)
        decided = answers(_with_probs(p, found))
        for name, right in answers(p).items():
            ours, theirs = right.cpu(), found[name]
            if ours.shape != theirs.shape:
                raise _disagreement(
                    f"{name} has shape {tuple(theirs.shape)} for {batch} examples, "
                    f"expected {tuple(ours.shape)}"
                )
            if name.rpartition(".")[2] in DECISIONS:
                decisions += ours.numel()
                differing += int((decided[name].cpu() != theirs).sum())
                continue
            size = max(1.0, ours.abs().max().item())
            difference = (ours.double() - theirs.double()).abs().max().item() / size
            if not difference <= TOLERANCE:  # NaN too
                raise _disagreement(
                    f"{name} differs by {difference:.2g} of its largest number, {size:.3g} (batch of {batch})"
                )
            largest = max(largest, difference)
    if differing > math.ceil(decisions / 100):
        raise _disagreement(f"{differing} of {decisions} decisions differ")
    return largest


def _with_probs(
    p: Prediction | Mapping[str, Prediction], found: Mapping[str, Tensor], head: str = ""
) -> Prediction | dict[str, Prediction]:
    """Return a prediction with the probabilities of a graph's outputs."""
    if isinstance(p, Mapping):
        return {name: _with_probs(own, found, f"{name}.") for name, own in p.items()}  # type: ignore[misc]
    return replace(p.cpu(), average=found[f"{head}probs"]) if p.quantity == "probs" else p


def _disagreement(what: str) -> ValueError:
    return ValueError(
        f"the graph does not agree with predict, so nothing was written: {what}. Fix: look for draws or "
        "Python branches in the network's forward, which a graph does not repeat."
    )


def root_cause(error: BaseException) -> str:
    """Return the first line of the error that others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the notes that torch's exporter makes about itself."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
