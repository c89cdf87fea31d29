"""Networks of other packages: members equal networks that are built one by one."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import architectures, lora, peers
from benchmarks.architectures import ARCHITECTURES, Architecture, agrees, compare
from benchmarks.archive import read_json

ROOT = Path(__file__).parents[2]


def small() -> nn.Module:
    convolution = nn.Conv2d(4, 8, 3, padding=1, groups=2)
    transposed = nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2)
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), convolution, transposed, nn.Flatten(), nn.Linear(64, 5)
    )


def test_grouped_and_transposed_layers_agree() -> None:
    row = compare(Architecture("torch", small, lambda batch: torch.randn(batch, 3, 2, 2)))
    assert agrees(row)
    assert row["layers"] == 4
    assert row["execution"] == "batched"


def test_a_wrong_member_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = architectures.weight_scale

    def wrong(layer: nn.Module, r: Tensor, s: Tensor) -> Tensor:
        return scale(layer, r.flip(0), s)

    monkeypatch.setattr(architectures, "weight_scale", wrong)
    row = compare(Architecture("torch", small, lambda batch: torch.randn(batch, 3, 2, 2)))
    assert not agrees(row)
    assert row["outputs"] > 1e-3


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "ViT"])
def test_a_transformer_agrees(name: str) -> None:
    pytest.importorskip("transformers")
    row = compare(ARCHITECTURES[name])
    assert agrees(row)
    assert row["execution"] == "batched"
    assert not row["warnings"]


def test_every_recorded_network_agrees() -> None:
    rows = read_json(ROOT / "results" / "architectures.json")["rows"]
    assert len(rows) >= 10
    assert all(agrees(row) for row in rows.values())


@pytest.mark.parametrize(
    ("page", "table"),
    [
        ("results/architectures.md", architectures.show(ROOT / "results" / "architectures.json")),
        ("howto/partial.md", lora.show(ROOT / "results" / "lora.json")),
        ("results/cost.md", peers.show(ROOT / "results" / "peers.json")),
    ],
)
def test_the_pages_show_the_records(page: str, table: str) -> None:
    assert table in (ROOT / "docs" / page).read_text()
