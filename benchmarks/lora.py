"""LP-BNN over the LoRA adapters of a frozen transformer: parameters, and cost beside plain LoRA.

    python -m benchmarks.lora run results/lora.json
    python -m benchmarks.lora show results/lora.json  # the table of docs/howto/partial.md

The networks are made from configurations: times of small ones (four layers of width 128, batch 16, 16 tokens,
one thread, repeats in turn), parameters of the published sizes. It needs transformers and peft.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import lpbnn
from benchmarks.archive import read_json, write_json
from benchmarks.rows import command, markdown, record, works
from lpbnn.bench import interleaved

MEMBERS, RANK, BATCH, TOKENS, REPEATS = 4, 8, 16, 16, 7
WAYS = ("LoRA", "LP-BNN over LoRA", "LP-BNN over LoRA in the last layer")
Settings = dict[str, Any]
SMALL: dict[str, Settings] = {
    "BERT": {
        **{"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"intermediate_size": 512, "vocab_size": 2000},
    },
    "GPT-2": {
        **{"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 2000},
        **{"bos_token_id": 1, "eos_token_id": 1},
    },
}
NAMES = {"BERT": "Bert", "GPT-2": "GPT2"}
TARGETS = {"BERT": ["query", "value"], "GPT-2": ["c_attn"]}


def make(name: str, way: str, settings: Settings) -> nn.Module:
    """Return a classifier with adapters."""
    transformers, peft = importlib.import_module("transformers"), importlib.import_module("peft")
    config = getattr(transformers, f"{NAMES[name]}Config")(num_labels=4, pad_token_id=0, **settings)
    net = getattr(transformers, f"{NAMES[name]}ForSequenceClassification")(config)
    last = [config.num_hidden_layers - 1] if "last" in way else None
    adapters = peft.LoraConfig(
        task_type="SEQ_CLS",
        r=RANK,
        target_modules=TARGETS[name],
        fan_in_fan_out=name == "GPT-2",
        layers_to_transform=last,
    )
    return peft.get_peft_model(net, adapters)


def build(net: nn.Module, way: str) -> lpbnn.UncertainModel:
    """Return a classifier with adapters as a model."""
    if way == "LoRA":
        return lpbnn.build(net, "mcp")
    return lpbnn.build(net, "lpbnn", members=MEMBERS, num_data=1000, include="*lora_*")


def learned(net: nn.Module) -> int:
    """Return how many parameters are learned."""
    return sum(p.numel() for p in net.parameters() if p.requires_grad)


def count(name: str) -> dict[str, int]:
    """Return the parameters of the published size: all of the plain network, and those that each way learns."""
    with torch.device("meta"):
        nets = {way: make(name, way, {}) for way in WAYS}
    models = {way: build(net, way) for way, net in nets.items()}
    found = {way: learned(model) for way, model in models.items()}
    adapters = [p.numel() for n, p in models["LoRA"].named_parameters() if "lora_" in n]
    every = sum(p.numel() for p in models["LoRA"].parameters())
    return {**found, "adapters": sum(adapters), "all": every}


def measure(name: str) -> dict[str, dict[str, float]]:
    """Return the seconds of a training step and of a prediction, for each way."""
    x = {"input_ids": torch.randint(2, 2000, (BATCH, TOKENS))}
    x["attention_mask"] = torch.ones_like(x["input_ids"])
    y = torch.randint(4, (BATCH,))
    timed: dict[str, Callable[[], object]] = {}
    for way in WAYS:
        torch.manual_seed(0)
        model = build(make(name, way, SMALL[name]), way)
        learning = [p for p in model.parameters() if p.requires_grad]
        timed |= works(way, model, x, y, torch.optim.AdamW(learning, lr=1e-4))
    times = interleaved(timed, REPEATS)
    return {
        part: {way: median(times[f"{part}/{way}"]) for way in WAYS} for part in ("train", "predict")
    }


def run(path: Path, names: Sequence[str] = tuple(SMALL)) -> None:
    """Measure, and write the record."""
    start = time.perf_counter()
    settings: Settings = {
        "members": MEMBERS,
        "rank": RANK,
        "batch": BATCH,
        "tokens": TOKENS,
        "seed": 0,
    }
    found = record(packages=("transformers", "peft"), **settings, repeats=REPEATS)
    found["rows"] = {name: {"parameters": count(name), **measure(name)} for name in names}
    found["seconds"] = time.perf_counter() - start
    write_json(path, found)


def show(path: Path) -> str:
    """Return the table of a record as Markdown."""
    head = ("network", "model", "learned, of all weights", "training step", "prediction")
    lines = []
    for name, row in read_json(path)["rows"].items():
        for way in WAYS:
            train, predict = (row[part][way] / row[part]["LoRA"] for part in ("train", "predict"))
            learned = row["parameters"][way]
            share = f"{learned:,} ({learned / row['parameters']['all']:.2%})"
            lines.append([name, way, share, f"{train:.2f}", f"{predict:.2f}"])
    return markdown(head, lines, 2)


if __name__ == "__main__":
    command("benchmarks.lora", __doc__, run, show)
