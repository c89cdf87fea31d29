"""Networks of other packages as LP-BNN: do their members equal networks that are built one by one?

    python -m benchmarks.architectures run results/architectures.json
    python -m benchmarks.architectures show results/architectures.json  # its table

Every network is small, untrained, and made from a configuration, without a download. An architecture whose
package cannot be imported is recorded with the reason. Three members of six examples are compared, in float64
and evaluation mode, with copies of the network whose weights are W * (s_j r_j^T): outputs, gradients of the
shared weights, and slices of the batch as in training. Then the frozen members, and the network after ``undo``.
"""

import copy
import importlib
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import torch
import yaml
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map_only

import lpbnn
from benchmarks.archive import read_json, write_json
from benchmarks.rows import command, markdown, works
from lpbnn.bench import interleaved
from lpbnn.members.call import as_call
from lpbnn.members.ensemble import MemberEnsemble
from lpbnn.training.environment import environment

MEMBERS, BATCH, CLASSES, REPEATS = 3, 6, 5, 9
TOLERANCE = 1e-8  # of the largest number, in float64
TOKENS, LENGTH = 99, 12
PARTS = ("outputs", "gradients", "slices", "frozen")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # of nn.MultiheadAttention, in the order of its matrix
Inputs = Any


@dataclass(frozen=True)
class Architecture:
    """A network of another package.

    Args:
        package: the package that has to be imported.
        make: returns the network; settings of its own take the place of the small ones.
        inputs: returns a batch of the given size.
        dense: True if there is a label for every position of a map (class dimension 1).
        options: of ``lpbnn.build``; the likelihood "tokens" has a label for every token, a readout is the
            name of an attribute.
        published: the settings of the published size; None if the network has that size.
    """

    package: str
    make: Callable[..., nn.Module]
    inputs: Callable[[int], Inputs]
    dense: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] | None = None


def tokens(batch: int) -> Inputs:
    """Return sentences of different lengths, with their padding masked."""
    lengths = torch.arange(batch) % 4 + LENGTH - 4
    mask = (torch.arange(LENGTH) < lengths.unsqueeze(1)).long()
    ids = torch.randint(5, TOKENS, (batch, LENGTH)) * mask
    ids[torch.arange(batch), lengths - 1] = 2  # the end of the sentence, for those who read there
    return {"input_ids": ids, "attention_mask": mask}


def pictures(batch: int, size: int = 32, name: str = "pixel_values") -> Inputs:
    """Return pictures; without a name, they are the only argument."""
    x = torch.randn(batch, 3, size, size)
    return {name: x} if name else x


def sound(batch: int) -> Inputs:
    """Return recordings of different lengths."""
    mask = (torch.arange(1600) < 1600 - 100 * (torch.arange(batch) % 3).unsqueeze(1)).long()
    return {"input_values": torch.randn(batch, 1600) * mask, "attention_mask": mask}


def series(batch: int) -> Inputs:
    return {"past_values": torch.randn(batch, 24, 3)}


INPUTS: dict[str, Callable[..., Inputs]] = {
    "tokens": tokens,
    "pictures": pictures,
    "large pictures": partial(pictures, size=64),
    "sound": sound,
    "series": series,
}


def make_network(package: str, name: str, settings: Mapping[str, Any]) -> nn.Module:
    """Return a network of a package, untrained, by its name there (of transformers, that of its class)."""
    if package == "transformers":
        module = importlib.import_module(package)
        config = getattr(module, f"{name.partition('For')[0]}Config")
        return getattr(module, name)(config(num_labels=CLASSES, **settings))
    if package == "timm":
        create: Any = importlib.import_module(package).create_model
        return create(name, pretrained=False, num_classes=CLASSES, **settings)
    get: Any = importlib.import_module("torchvision.models").get_model
    return get(name, weights=None, num_classes=CLASSES, **settings)


def read_architectures(path: Path) -> dict[str, Architecture]:
    """Return the architectures of a file: by package, by name in the tables."""
    found: dict[str, Architecture] = {}
    for package, entries in yaml.safe_load(path.read_text()).items():
        for title, entry in entries.items() if package != "parts" else ():
            transformers = package == "transformers"
            network = entry.get("network", title.partition(",")[0].rpartition(" ")[2])
            inputs = INPUTS[entry.get("inputs", "tokens" if transformers else "pictures")]
            found[title] = Architecture(
                package,
                partial(make_network, package, network, settings=entry.get("settings", {})),
                inputs if transformers else partial(inputs, name=""),
                entry.get("dense", False),
                entry.get("options", {}),
                entry.get("published", {}) if transformers else None,
            )
    return found


ARCHITECTURES = read_architectures(Path(__file__).with_suffix(".yaml"))


def build(architecture: Architecture, net: nn.Module, method: str) -> MemberEnsemble:
    """Return the network as a model of a method."""
    options = dict(architecture.options)
    if options.get("likelihood") == "tokens":
        options["likelihood"] = lpbnn.likelihoods.Categorical(dim=-1)
    if "readout" in options:
        options["readout"] = attrgetter(options["readout"])
    if architecture.dense:
        options["task"] = "segmentation"
    if method == "mcp":  # the plain network converts nothing
        options.pop("exclude", None)
    else:
        options |= {"members": MEMBERS, "num_data": 1000}
    return cast(MemberEnsemble, lpbnn.build(net, method, **options))


def build_member(plain: nn.Module, model: MemberEnsemble, sampled: Any, member: int) -> nn.Module:
    """Return a copy of the plain network with the weights W * (s r^T) and the biases of one member."""
    net = copy.deepcopy(plain)
    for converted, factors in zip(cast(Any, model).layers, sampled.layers, strict=True):
        r, s = factors.r[member], factors.s[member]
        place = find_place(net, converted.path)
        layer = place.layer
        if computes_weight(layer):
            scale_around(layer, r, s)
        else:
            # A new one: an embedding that shares the weight keeps it as it is.
            weight = getattr(layer, place.weight).clone()
            weight[place.rows] *= weight_scale(layer, r, s)
            setattr(layer, place.weight, nn.Parameter(weight))
        if converted.member_bias is not None:
            getattr(layer, place.bias)[place.rows] = converted.member_bias[member]
    return net


class Place(NamedTuple):
    """Where a network without members keeps the weight of a converted layer.

    Args:
        layer: a layer, or the ``nn.MultiheadAttention`` that holds three projections as one matrix.
        weight: the name of its weight.
        bias: the name of its bias.
        rows: of weight and bias.
    """

    layer: Any
    weight: str = "weight"
    bias: str = "bias"
    rows: slice = slice(None)


def find_place(net: nn.Module, path: str) -> Place:
    """Return where the plain network has the weight of a layer that is converted as ``path``."""
    parent, _, name = path.rpartition(".")
    attention = net.get_submodule(parent)
    if name in PROJECTIONS and isinstance(attention, nn.MultiheadAttention):
        start = PROJECTIONS.index(name) * attention.embed_dim
        rows = slice(start, start + attention.embed_dim)
        return Place(attention, "in_proj_weight", "in_proj_bias", rows)
    return Place(net.get_submodule(path))


def computes_weight(layer: nn.Module) -> bool:
    """Return True if a layer's forward uses a weight that it makes of its own, such as a standardised one."""
    return parametrize.is_parametrized(layer) or "Std" in type(layer).__name__


def weight_scale(layer: Any, r: Tensor, s: Tensor) -> Tensor:
    """Return what a weight is multiplied with: s_o r_i for the output o and the input i that it connects."""
    if type(layer).__name__ == "Conv1D":  # of transformers: (inputs, outputs)
        return torch.outer(r, s)
    rows, columns = (r, s) if getattr(layer, "transposed", False) else (s, r)
    groups = getattr(layer, "groups", 1)
    columns = columns.view(groups, -1).repeat_interleave(len(rows) // groups, 0)
    scale = rows.unsqueeze(1) * columns
    return scale.view(*scale.shape, *(1,) * len(getattr(layer, "kernel_size", ())))


def scale_around(layer: Any, r: Tensor, s: Tensor) -> None:
    """Scale the inputs and the outputs, without the bias, of a convolution that computes its weight."""
    shape = (-1, *(1,) * len(layer.kernel_size))
    r, s = r.view(shape), s.view(shape)
    layer.register_forward_pre_hook(lambda _, args: (args[0] * r, *args[1:]))

    def scale(layer: Any, _: object, y: Tensor) -> Tensor:
        bias = 0 if layer.bias is None else layer.bias.view(shape)
        return (y - bias) * s + bias

    layer.register_forward_hook(scale)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def as_float64(x: Inputs) -> Inputs:
    """Return inputs with their floating-point numbers in float64."""
    return tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, x)


def compare(architecture: Architecture) -> dict[str, Any]:
    """Return how far members are from networks that are built one by one, and what was warned of."""
    torch.manual_seed(0)
    plain = architecture.make().double().eval()
    x = as_float64(architecture.inputs(BATCH))
    args, kwargs = as_call(x)
    before = copy.deepcopy(plain.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = build(architecture, copy.deepcopy(plain), "lpbnn").double().eval()
        report = lpbnn.check(model, x)
    with torch.no_grad():
        for layer in cast(Any, model).layers:
            if layer.member_bias is not None:
                layer.member_bias.normal_()
        sampled = model.probe(MEMBERS)  # factors that differ strongly
        nets = [build_member(plain, model, sampled, j) for j in range(MEMBERS)]
        expected = [model.readout(net(*args, **kwargs)) for net in nets]
        call = cast(Any, model).call(args, kwargs, MEMBERS)
        rows = model.run(sampled, call)
        split = model.run(sampled, call, "split")
        size = BATCH // MEMBERS
        slices = [out[j * size : (j + 1) * size] for j, out in enumerate(expected)]
        p = lpbnn.predict(model, x, samples=2, seed=0)
        frozen = lpbnn.predict(lpbnn.freeze(model, samples=2, seed=0), x)
    row = {
        "layers": len(cast(Any, model).layers),
        "execution": report.execution,
        "expand_at": report.expand_at,
        "independent_rows": report.result.independent_rows,
        "warnings": [str(one.message) for one in caught]
        + ([report.warning] if report.warning else []),
        "outputs": difference(rows, torch.cat(expected)),
        "gradients": gradient_difference(model, sampled, nets, plain, args, kwargs),
        "slices": difference(split, torch.cat(slices)),
        "frozen": difference(frozen.probs, p.probs),
        "members_differ": float((p.epistemic > 0).double().mean()),
    }
    after = lpbnn.undo(model).state_dict()
    # The members' biases were drawn above, so that the mean of them is another one than before.
    row["undone"] = list(after) == list(before) and all(
        torch.equal(after[name], before[name]) for name in before if not name.endswith("bias")
    )
    return row


def gradient_difference(
    model: MemberEnsemble, sampled: Any, nets: list[nn.Module], plain: nn.Module, args: Any, kwargs: Any
) -> float:  # fmt: skip
    """Return the largest difference of the shared weights' gradients, relative to the largest gradient."""
    generator = torch.Generator().manual_seed(0)
    rows = model.run(sampled, model.call(args, kwargs, MEMBERS))
    direction = torch.randn(rows.shape, generator=generator, dtype=rows.dtype)
    model.zero_grad()
    (rows * direction).sum().backward()
    for net, part in zip(nets, direction.chunk(MEMBERS), strict=True):
        (model.readout(net(*args, **kwargs)) * part).sum().backward()
    worst = largest = 0.0
    for number, converted in enumerate(cast(Any, model).layers):
        places = [find_place(net, converted.path) for net in nets]
        if computes_weight(places[0].layer):
            continue
        factors = sampled.layers[number]
        gradients = [getattr(place.layer, place.weight).grad for place in places]
        expected = sum(
            gradient[place.rows] * weight_scale(place.layer, factors.r[j], factors.s[j])
            for j, (place, gradient) in enumerate(zip(places, gradients, strict=True))
            if gradient is not None
        )
        found = converted.layer.weight.grad
        if isinstance(expected, int):  # no member used the layer
            expected = torch.zeros_like(converted.layer.weight)
        if type(places[0].layer).__name__ == "Conv1D":
            expected = expected.mT
        found = torch.zeros_like(expected) if found is None else found
        worst = max(worst, float((found - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    return worst / largest


def cost(architecture: Architecture) -> dict[str, Any]:
    """Return parameters, and the times of a training step and a prediction beside the plain network."""
    torch.manual_seed(0)
    plain = architecture.make()
    batch = 32
    x = architecture.inputs(batch)
    models = {name: build(architecture, copy.deepcopy(plain), name) for name in ("mcp", "lpbnn")}
    with torch.no_grad():
        shape = models["mcp"](x) if isinstance(x, Tensor) else models["mcp"](**x)
    class_dim = 3 if "likelihood" in architecture.options else 2
    y = torch.randint(
        shape.shape[class_dim], (*shape.shape[1:class_dim], *shape.shape[class_dim + 1 :])
    )
    timed: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        timed |= works(name, model, x, y, torch.optim.SGD(model.parameters(), lr=1e-4))
    times = {name: median(found) for name, found in interleaved(timed, REPEATS).items()}
    return {
        **count(architecture),
        "train_ratio": times["train/lpbnn"] / times["train/mcp"],
        "predict_ratio": times["predict/lpbnn"] / times["predict/mcp"],
        "seconds": times,
    }


def count(architecture: Architecture) -> dict[str, int]:
    """Return the parameters of the published size, plain and as LP-BNN."""
    published = architecture.published
    make = (
        architecture.make if published is None else partial(architecture.make, settings=published)
    )
    try:
        with torch.device("meta"):
            net = make()
    except NotImplementedError:  # it computes with its weights while it is made
        net = make()
    plain = sum(p.numel() for p in net.parameters())
    model = build(architecture, net, "lpbnn")
    return {"parameters": sum(p.numel() for p in model.parameters()), "parameters_plain": plain}


def run(path: Path) -> None:
    """Compare and measure the architectures that the record lacks, and write it after each."""
    start = time.perf_counter()
    record: dict[str, Any] = {"format": 1, "members": MEMBERS, "seed": 0, "sessions": []}
    record |= {"rows": {}, "skipped": {}, "failed": {}}
    if path.exists():
        record = read_json(path)
    session = {"date": time.strftime("%Y-%m-%d"), **environment()}
    session["versions"] |= {name: version(name) for name in PACKAGES}
    record["sessions"].append(session)
    for name, architecture in ARCHITECTURES.items():
        if name in record["rows"]:
            continue
        record["skipped"].pop(name, None)
        record["failed"].pop(name, None)
        try:
            importlib.import_module(architecture.package)
        except Exception as error:  # a package may break in any way beside another torch
            record["skipped"][name] = f"{type(error).__name__}: {error}"
            continue
        try:
            row = compare(architecture) | cost(architecture)
            record["rows"][name] = {"session": len(record["sessions"]) - 1, **row}
        except Exception as error:
            record["failed"][name] = f"{type(error).__name__}: {error}"
        print(name, record["rows"].get(name, record["failed"].get(name)), flush=True)
        session["seconds"] = time.perf_counter() - start
        write_json(path, record)
    write_json(path, record)


PACKAGES = ("transformers", "timm", "torchvision")


def version(package: str) -> str | None:
    """Return the version of a package; None if it cannot be imported."""
    try:
        return importlib.import_module(package).__version__
    except Exception:
        return None


def agrees(row: dict[str, Any]) -> bool:
    """Return True if members equal the networks that were built one by one."""
    return row["undone"] and all(row[part] is not None and row[part] < TOLERANCE for part in PARTS)


def show(path: Path) -> str:
    """Return the tables of a record as Markdown."""
    record = read_json(path)
    head = ("network", "layers", "agrees", "largest difference", "execution")
    head += ("parameters, LP-BNN / plain", "training step", "prediction")
    lines = [
        [
            name,
            str(row["layers"]),
            "yes" if agrees(row) else "NO",
            f"{max(row[part] for part in PARTS):.0e}",
            row["execution"],
            f"{row['parameters'] / row['parameters_plain']:.2f}",
            f"{row['train_ratio']:.2f}",
            f"{row['predict_ratio']:.2f}",
        ]
        for name, row in record["rows"].items()
    ]
    lines += [[name, "", f"not built: {why}", *[""] * 5] for name, why in record["failed"].items()]
    return markdown(head, lines, len(head))


if __name__ == "__main__":
    command("benchmarks.architectures", __doc__, run, show)
