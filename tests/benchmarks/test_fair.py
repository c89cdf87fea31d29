"""The fair comparison: how settings are chosen, in which order runs are made, and how they are scored."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import fair
from benchmarks.fair import CANDIDATES, Job, Plan


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(data_root=tmp_path, out=tmp_path)


def trial(plan: Plan, method: str, candidate: int, **held_out: float) -> None:
    record: dict[str, Any] = {"noise": {"trained": {"tempered": {"held_out": held_out}}}}
    path = plan.out / f"{Job(method, candidate, 0, final=False).name}.json"
    path.write_text(json.dumps(record))


def test_the_lower_nll_with_a_temperature_is_chosen(plan: Plan) -> None:
    trial(plan, "mcp", 0, nll=0.25, accuracy=0.95)
    trial(plan, "mcp", 1, nll=0.24, accuracy=0.94)
    assert fair.chosen(plan, "mcp") == 1


def test_of_equal_nll_the_more_accurate_is_chosen(plan: Plan) -> None:
    trial(plan, "mcp", 0, nll=0.2405, accuracy=0.95)
    trial(plan, "mcp", 1, nll=0.24, accuracy=0.94)
    assert fair.chosen(plan, "mcp") == 0


def test_nothing_is_chosen_before_all_trials_have_ended(plan: Plan) -> None:
    trial(plan, "mcp", 0, nll=0.25, accuracy=0.95)
    assert fair.chosen(plan, "mcp") is None


def test_every_method_has_equally_many_candidates() -> None:
    assert len({len(candidates) for candidates in CANDIDATES.values()}) == 1


def test_the_trials_of_all_methods_come_first_and_the_late_methods_last(plan: Plan) -> None:
    first = list(fair.pending(plan, set()))
    assert len(first) == 2 * len(CANDIDATES)
    assert not any(job.final for job in first)
    for job in first:
        trial(plan, job.method, job.candidate, nll=0.2, accuracy=0.9)
    final = list(fair.pending(plan, set()))
    assert len(final) == 5 * len(CANDIDATES)
    assert all(job.final for job in final)
    assert {job.method for job in final[-4:]} == set(fair.LATE)
    assert [job.seed for job in final[: len(CANDIDATES)]] == [0] * len(CANDIDATES)


def test_a_run_that_has_ended_or_begun_is_not_made_again(plan: Plan) -> None:
    first, second, *_ = fair.pending(plan, set())
    trial(plan, first.method, first.candidate, nll=0.2, accuracy=0.9)
    assert not {first, second} & set(fair.pending(plan, {second}))


def test_the_temperature_acts_on_members_before_they_are_averaged() -> None:
    members = torch.tensor([[[0.9, 0.1]], [[0.4, 0.6]]])
    halved = members.sqrt() / members.sqrt().sum(-1, keepdim=True)
    torch.testing.assert_close(fair.average(members, 2.0), halved.mean(0))
    torch.testing.assert_close(fair.average(members), members.mean(0))


def test_every_run_differs_from_the_others_in_method_setting_and_seed_alone(plan: Plan) -> None:
    one, other = (
        fair.run_config(plan, Job(method, 0, 1, final=True)).to_data() for method in ("mcp", "edl")
    )
    assert {key for key in one if one[key] != other[key]} == {"method", "method_options"}


def test_the_trials_of_another_folder_choose_the_settings(plan: Plan, tmp_path: Path) -> None:
    elsewhere = tmp_path / "long"
    elsewhere.mkdir()
    trial(plan, "mcp", 0, nll=0.25, accuracy=0.95)
    trial(plan, "mcp", 1, nll=0.24, accuracy=0.95)
    long = Plan(tmp_path, elsewhere, trials=plan.out, methods=("mcp",), seeds=1)
    assert list(fair.pending(long, set())) == [Job("mcp", 1, 0, final=True)]


@pytest.mark.parametrize("method", CANDIDATES)
def test_the_paper_s_schedule_is_the_same_for_all_methods(plan: Plan, method: str) -> None:
    config = fair.run_config(replace(plan, schedule="paper"), Job(method, 1, 0, final=True))
    assert config.epochs == 250
    assert config.optim.weight_decay == 1e-4
    assert config.schedule.name == "step"
    assert config.schedule.milestones == (80, 160, 200)


def test_cifar_100_has_the_paper_s_cutout_and_cifar_10_out_of_distribution(plan: Plan) -> None:
    hundred = replace(plan, data="cifar100")
    config = fair.run_config(hundred, Job("lpbnn", 0, 0, final=True))
    assert (config.data, config.augment.cutout, config.epochs) == ("cifar100", 8, 30)
    assert hundred.outside == ("svhn", "cifar10")
    assert plan.outside == ("svhn", "cifar100")
