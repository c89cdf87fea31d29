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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map_only

import lpbnn
from benchmarks.rows import command, markdown
from lpbnn.bench import interleaved
from lpbnn.members.call import as_call
from lpbnn.members.ensemble import MemberEnsemble
from lpbnn.training.environment import environment
from lpbnn.training.files import read_json, write_json

MEMBERS, BATCH, CLASSES, REPEATS = 3, 6, 5, 9
TOLERANCE = 1e-8  # of the largest number, in float64
TOKENS, LENGTH = 99, 12
PARTS = ("outputs", "gradients", "slices", "frozen")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # of nn.MultiheadAttention, in the order of its matrix
Inputs = Any
Settings = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A network of another package.

    Args:
        package: the package that has to be imported.
        make: returns the network.
        inputs: returns a batch of the given size.
        dense: True if there is a label for every position of a map (class dimension 1).
        options: of ``lpbnn.build``; the likelihood "tokens" has a label for every token.
        published: returns the network in its published size, whose parameters are counted.
    """

    package: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    dense: bool = False
    options: dict[str, Any] | None = None
    published: Callable[[], nn.Module] | None = None


def tokens(batch: int) -> Inputs:
    """Return sentences of different lengths, with their padding masked."""
    lengths = torch.arange(batch) % 4 + LENGTH - 4
    mask = (torch.arange(LENGTH) < lengths.unsqueeze(1)).long()
    ids = torch.randint(5, TOKENS, (batch, LENGTH)) * mask
    ids[torch.arange(batch), lengths - 1] = 2  # the end of the sentence, for those who read there
    return {"input_ids": ids, "attention_mask": mask}


def pictures(size: int = 32, name: str = "pixel_values") -> Callable[[int], Inputs]:
    """Return a function that makes pictures; without a name, they are the only argument."""

    def make(batch: int) -> Inputs:
        x = torch.randn(batch, 3, size, size)
        return {name: x} if name else x

    return make


def sound(batch: int) -> Inputs:
    """Return recordings of different lengths."""
    mask = (torch.arange(1600) < 1600 - 100 * (torch.arange(batch) % 3).unsqueeze(1)).long()
    return {"input_values": torch.randn(batch, 1600) * mask, "attention_mask": mask}


def from_transformers(
    name: str,
    inputs: Callable[[int], Inputs] = tokens,
    head: str = "ForSequenceClassification",
    dense: bool = False,
    options: dict[str, Any] | None = None,
    published: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Architecture:
    """Return an architecture of transformers, by the name that its classes begin with.

    Args:
        name: the beginning of the names of its classes.
        inputs: returns a batch of the given size.
        head: the end of the name of the network's class.
        dense: True if there is a label for every position of a map.
        options: of ``lpbnn.build``.
        published: settings in which the published size differs from the configuration's defaults.
        **settings: of the small configuration.
    """

    def make(**settings: Any) -> nn.Module:
        package = importlib.import_module("transformers")
        config = getattr(package, f"{name}Config")(num_labels=CLASSES, **settings)
        return getattr(package, f"{name}{head}")(config)

    return Architecture(
        "transformers",
        partial(make, **settings),
        inputs,
        dense,
        options,
        partial(make, **published),
    )


def from_timm(name: str, size: int = 32, **settings: Any) -> Architecture:
    """Return an architecture of timm, by its name there; settings make it take small pictures."""

    def make() -> nn.Module:
        package = importlib.import_module("timm")
        return package.create_model(name, pretrained=False, num_classes=CLASSES, **settings)

    return Architecture("timm", make, pictures(size, ""))


def from_torchvision(
    name: str,
    size: int = 32,
    dense: bool = False,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Architecture:
    """Return an architecture of torchvision, by its name there; settings make it take small pictures."""

    def make() -> nn.Module:
        package = importlib.import_module("torchvision.models")
        weights = {"weights_backbone": None} if dense else {}
        return package.get_model(name, weights=None, num_classes=CLASSES, **weights, **settings)

    return Architecture("torchvision", make, pictures(size, ""), dense, options)


TEXT: Settings = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ENCODER: Settings = {
    **TEXT,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
RELATIVE: Settings = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
DECODER: Settings = {**ENCODER, "num_key_value_heads": 2}
EYES: Settings = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2}
VISION: Settings = {**EYES, "num_attention_heads": 4, "intermediate_size": 64}
SEQUENCES: Settings = {"vocab_size": TOKENS, "d_model": 32, "pad_token_id": 0}
START: Settings = {"decoder_start_token_id": 0}
T5: Settings = {"num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64, **START}
WAVES: Settings = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{
        "intermediate_size": 64,
        "conv_dim": [32, 32],
        "conv_stride": [5, 2],
        "conv_kernel": [10, 3],
    },
    **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "classifier_proj_size": 16},
    "num_conv_pos_embedding_groups": 4,
}
WINDOWS: Settings = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "window_size": 4}
SWIN: Settings = {**WINDOWS, "depths": [2, 2], "num_heads": [2, 4]}
IMAGE, MAP = "ForImageClassification", "ForSemanticSegmentation"

ARCHITECTURES: dict[str, Architecture] = {
    "BERT": from_transformers("Bert", **ENCODER),
    "RoBERTa": from_transformers("Roberta", **ENCODER),
    "ALBERT": from_transformers("Albert", **ENCODER, embedding_size=16),
    "ELECTRA": from_transformers("Electra", **ENCODER, embedding_size=16),
    "DeBERTa-v2": from_transformers("DebertaV2", **ENCODER, **RELATIVE, published=RELATIVE),
    "DeBERTa-v2, without positions": from_transformers(
        "DebertaV2",
        **ENCODER,
        **RELATIVE,
        options={"exclude": ["*pos_key_proj", "*pos_query_proj"]},
        published=RELATIVE,
    ),
    "ModernBERT": from_transformers(
        "ModernBert", **ENCODER, cls_token_id=1, bos_token_id=1, eos_token_id=2, sep_token_id=2
    ),
    "DistilBERT": from_transformers(
        "DistilBert", vocab_size=TOKENS, dim=32, n_layers=2, n_heads=4, hidden_dim=64
    ),
    "GPT-2": from_transformers(
        "GPT2", vocab_size=TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0
    ),
    "Llama": from_transformers("Llama", **DECODER),
    "Qwen3": from_transformers("Qwen3", **DECODER, head_dim=8),
    "Mamba, without conv1d and dt_proj": from_transformers(
        "Mamba",
        head="ForCausalLM",
        vocab_size=TOKENS,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        pad_token_id=0,
        tie_word_embeddings=False,  # a tied gradient has the embedding's part, too
        options={"likelihood": "tokens", "exclude": ["*conv1d", "*dt_proj"]},
    ),
    "Falcon": from_transformers("Falcon", **TEXT, pad_token_id=0, alibi=True),
    "XLNet": from_transformers(
        "XLNet", vocab_size=TOKENS, d_model=32, n_layer=2, n_head=4, d_inner=64
    ),
    "Longformer": from_transformers(
        "Longformer", **{**ENCODER, "max_position_embeddings": 66}, attention_window=4
    ),
    "T5": from_transformers("T5", **SEQUENCES, **T5, eos_token_id=2, published=START),
    "T5 encoder": from_transformers(
        "T5", **SEQUENCES, **T5, head="ForTokenClassification", options={"likelihood": "tokens"}
    ),
    "BART": from_transformers(
        "Bart",
        **SEQUENCES,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        eos_token_id=2,
    ),
    "ViT": from_transformers("ViT", pictures(), IMAGE, **VISION),
    "DeiT": from_transformers("DeiT", pictures(), IMAGE, **VISION),
    "BEiT": from_transformers("Beit", pictures(), IMAGE, **VISION),
    "DINOv2": from_transformers(
        "Dinov2", pictures(), IMAGE, **EYES, num_attention_heads=4, mlp_ratio=2
    ),
    "CLIP, image tower": from_transformers(
        "CLIP", pictures(), IMAGE, vision_config=VISION, text_config=ENCODER
    ),
    "Swin": from_transformers("Swin", pictures(), IMAGE, **SWIN),
    "Swin v2": from_transformers("Swinv2", pictures(), IMAGE, **SWIN),
    "Swin v2, without positions": from_transformers(
        "Swinv2", pictures(), IMAGE, **SWIN, options={"exclude": "*continuous_position_bias_mlp*"}
    ),
    "ConvNeXt": from_transformers(
        "ConvNext", pictures(), IMAGE, hidden_sizes=[16, 32], depths=[2, 2], num_stages=2
    ),
    "ResNet": from_transformers(
        "ResNet", pictures(), IMAGE, embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2]
    ),
    "MobileNetV2": from_transformers(
        "MobileNetV2", pictures(64), IMAGE, image_size=64, depth_multiplier=0.35
    ),
    "MobileViT": from_transformers(
        "MobileViT",
        pictures(64),
        IMAGE,
        image_size=64,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 32],
    ),
    "SegFormer": from_transformers(
        "Segformer",
        pictures(64),
        MAP,
        dense=True,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 3, 4],
        decoder_hidden_size=32,
    ),
    "Wav2Vec2": from_transformers(
        "Wav2Vec2", sound, **WAVES, apply_spec_augment=False, layerdrop=0.0
    ),
    "Wav2Vec2, SpecAugment": from_transformers("Wav2Vec2", sound, **WAVES),
    "PatchTST": from_transformers(
        "PatchTST",
        lambda batch: {"past_values": torch.randn(batch, 24, 3)},
        "ForClassification",
        num_input_channels=3,
        context_length=24,
        patch_length=4,
        patch_stride=4,
        d_model=32,
        num_attention_heads=4,
        ffn_dim=64,
        num_hidden_layers=2,
        num_targets=CLASSES,
        use_cls_token=True,
        options={"readout": lambda output: output.prediction_logits},
    ),
    "timm resnet18": from_timm("resnet18"),
    "timm efficientnet_b0": from_timm("efficientnet_b0"),
    "timm mobilenetv3_small_100": from_timm("mobilenetv3_small_100"),
    "timm convnext_atto": from_timm("convnext_atto"),
    "timm vit_tiny_patch16_224": from_timm("vit_tiny_patch16_224", img_size=32),
    "timm deit_tiny_patch16_224": from_timm("deit_tiny_patch16_224", img_size=32),
    "timm mixer_s32_224": from_timm("mixer_s32_224", 64, img_size=64),
    "timm regnety_002": from_timm("regnety_002"),
    "timm poolformer_s12": from_timm("poolformer_s12"),
    "timm nf_resnet26": from_timm("nf_resnet26"),
    "torchvision resnet18": from_torchvision("resnet18"),
    "torchvision resnet50": from_torchvision("resnet50"),
    "torchvision densenet121": from_torchvision("densenet121"),
    "torchvision efficientnet_b0": from_torchvision("efficientnet_b0"),
    "torchvision mobilenet_v3_small": from_torchvision("mobilenet_v3_small"),
    "torchvision regnet_y_400mf": from_torchvision("regnet_y_400mf"),
    "torchvision shufflenet_v2_x0_5": from_torchvision("shufflenet_v2_x0_5"),
    "torchvision convnext_tiny": from_torchvision("convnext_tiny"),
    "torchvision vit_b_16": from_torchvision("vit_b_16", image_size=32),
    "torchvision swin_t, without attention": from_torchvision(
        "swin_t", options={"exclude": ["*attn.qkv", "*attn.proj"]}
    ),
    "torchvision deeplabv3_resnet50": from_torchvision("deeplabv3_resnet50", dense=True),
    "torchvision lraspp_mobilenet_v3_large": from_torchvision(
        "lraspp_mobilenet_v3_large", dense=True
    ),
}


def build(architecture: Architecture, net: nn.Module, method: str) -> MemberEnsemble:
    """Return the network as a model of a method."""
    options = dict(architecture.options or {})
    if options.get("likelihood") == "tokens":  # of a shared object a model would take possession
        options["likelihood"] = lpbnn.likelihoods.Categorical(dim=-1)
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
    class_dim = 3 if (architecture.options or {}).get("likelihood") else 2
    y = torch.randint(
        shape.shape[class_dim], (*shape.shape[1:class_dim], *shape.shape[class_dim + 1 :])
    )
    works: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        model.loss(x, y)  # the check of the first batch is not part of a step
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model.train().loss(x, y)["loss"].backward()
            optimizer.step()

        works[f"train {name}"] = step
        works[f"predict {name}"] = lambda model=model: lpbnn.predict(model.eval(), x, seed=0)
    times = {name: median(found) for name, found in interleaved(works, REPEATS).items()}
    return {
        **count(architecture),
        "train_ratio": times["train lpbnn"] / times["train mcp"],
        "predict_ratio": times["predict lpbnn"] / times["predict mcp"],
        "seconds": times,
    }


def count(architecture: Architecture) -> dict[str, int]:
    """Return the parameters of the published size, plain and as LP-BNN."""
    make = architecture.published or architecture.make
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
