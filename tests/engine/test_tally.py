"""Three processes (here: threads), one without a batch, find what one finds, to the last bit."""

import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lpbnn import data
from lpbnn.engine import RunConfig
from lpbnn.engine.build import DataInfo, build_model
from lpbnn.engine.config import EvalConfig
from lpbnn.engine.ranks import Ranks
from lpbnn.engine.scoring import Predictor
from lpbnn.engine.tally import NotFinite, SegmentationTally, Tally, tally_of

WORLD = 3
RUNS: dict[str, tuple[RunConfig, dict[str, int]]] = {
    "classes": (RunConfig("batchensemble", evaluate=EvalConfig(batch_size=300)), {}),
    "pixels": (
        RunConfig(
            "batchensemble",
            {"include": "decoder.*"},
            "deeplab-resnet18",
            {"width": 4, "channels": 8},
            "street-scenes",
            evaluate=EvalConfig(batch_size=2),
        ),
        {"train": 2, "val": 2, "test": 4},
    ),
    "numbers": (
        RunConfig(
            "batchensemble", backbone="mlp", data="diabetes", evaluate=EvalConfig(batch_size=50)
        ),
        {},
    ),
}


class Threads(Ranks):
    """A process that is a thread."""

    def __init__(self, rank: int, meeting: threading.Barrier, given: dict[int, Any]) -> None:
        self.rank, self.world, self.meeting, self.given = rank, WORLD, meeting, given

    def gather(self, mine: Any) -> list[Any]:
        self.given[self.rank] = mine
        self.meeting.wait()
        return [self.given[rank] for rank in range(WORLD)]


def found(tally: Tally) -> str:
    """Everything that comes of a tally, exactly."""
    parts = [
        tally.metrics(),
        tally.uncertainty(),
        tally.histogram.tolist(),
        int(tally.seen.counts["examples"]),
    ]
    parts += [
        [rows.tolist() for rows in tally.rows(name)] for name in ("scores", "probs", "curves")
    ]
    if isinstance(tally, SegmentationTally):
        parts.append(tally.detection())
    if (diversity := getattr(tally, "diversity", None)) is not None:
        parts.append(diversity.compute())
    return json.dumps(parts)


@pytest.mark.parametrize("kind", RUNS)
def test_shares_make_the_whole(kind: str) -> None:
    config, options = RUNS[kind]
    splits = data.load(config.data, **options)
    info, device = DataInfo.of(splits), torch.device("cpu")
    model = build_model(config, info)
    meeting, given = threading.Barrier(WORLD, timeout=60), {}

    def share(rank: int) -> str:
        predictor = Predictor(
            copy.deepcopy(model), info, config, device, ranks=Threads(rank, meeting, given)
        )
        return found(predictor.over(splits.test, tally_of(info, device, keep=True)))

    alone = Predictor(model, info, config, device)
    batches = -(-len(splits.test) // alone.batch_size)
    assert batches == WORLD - 1  # the last one sees nothing
    whole = found(alone.over(splits.test, tally_of(info, device, keep=True)))
    with ThreadPoolExecutor(WORLD) as pool:
        assert list(pool.map(share, range(WORLD))) == [whole] * WORLD


def test_a_share_that_is_no_number_is_seen_by_all() -> None:
    config, _ = RUNS["classes"]
    splits = data.load("digits")
    info, device = DataInfo.of(splits), torch.device("cpu")
    meeting, given = threading.Barrier(WORLD, timeout=60), {}

    def share(rank: int) -> Tally:
        model = build_model(config, info)
        if rank == 1:
            torch.nn.init.constant_(next(model.parameters()), torch.nan)
        ranks = Threads(rank, meeting, given)
        predictor = Predictor(model, info, config, device, ranks=ranks)
        return predictor.over(splits.test, tally_of(info, device))

    with ThreadPoolExecutor(WORLD) as pool:
        for tally in pool.map(share, range(WORLD)):
            with pytest.raises(NotFinite, match="the model has diverged"):
                tally.metrics()
