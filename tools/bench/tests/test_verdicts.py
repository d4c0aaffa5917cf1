"""The table of verdicts: both rules on jobs worked out by hand, and the page."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.verdicts import (
    MODELS,
    SLOW,
    Job,
    judge_by_detector,
    judge_by_scores,
    measure,
    page,
    simulate,
)


def test_the_scores_of_the_peer() -> None:
    times = torch.tensor([[100.0, 100.0], [100.0, 134.0], [150.0, 140.0]])
    # 100 / 134 and 100 / 150 are below 0.75, 100 / 140 too.
    assert judge_by_scores(times) == [set(), {1}, {0, 1}]


def test_the_detector_names_a_rank_that_takes_longer_and_no_other() -> None:
    job = simulate("normal 2 %", 8, 30)
    job.times[20:, 5] *= 1.5
    verdicts = list(judge_by_detector(job))
    assert verdicts[:22] == [set()] * 22
    assert verdicts[24:] == [{5}] * 6


@pytest.mark.parametrize("model", MODELS)
def test_models_are_repeatable_and_positive(model: str) -> None:
    job, same = simulate(model, 16, 60), simulate(model, 16, 60)
    assert job.times.shape == (60, 16)
    assert torch.equal(job.times, same.times)
    assert job.times.min() > 0
    assert job.times.median() == pytest.approx(100, rel=0.2)


def test_models_have_their_shapes() -> None:
    assert simulate("normal 2 %", 64, 500).times.std() == pytest.approx(2, rel=0.05)
    assert simulate("lognormal 0.3", 64, 500).times.log().std() == pytest.approx(0.3, rel=0.05)
    noise = simulate("autocorrelated 5 %", 64, 500).times.log() - torch.tensor(100.0).log()
    assert (noise[1:] * noise[:-1]).mean() / noise.square().mean() == pytest.approx(0.9, abs=0.03)
    is_long = simulate("stalls in every 7th report", 8, 70).times > 150
    assert is_long.sum(dim=0).tolist() == [10] * 8
    assert (simulate("saves on rank 0", 2, 40).times > 150).sum(dim=0).tolist() == [20, 0]
    doubled = (simulate("5 % of reports doubled", 64, 500).times > 150).double().mean()
    assert doubled == pytest.approx(0.05, abs=0.005)
    job = simulate("two-speed hardware, as peers", 4, 100)
    assert job.peers == ("old", "old", "new", "new")
    assert (job.times[:, 2:].mean() / job.times[:, :2].mean()) == pytest.approx(1.15, abs=0.01)
    chassis = simulate("temperature by chassis", 16, 4).temperatures
    assert isinstance(chassis, torch.Tensor)
    assert chassis.tolist() == [*[55.0] * 7, 67.0] * 2


def test_the_temperature_alone_names_nobody() -> None:
    job = simulate("temperature by chassis", 8, 30)
    assert list(judge_by_detector(job)) == [set()] * 30
    assert list(judge_by_detector(Job(job.times))) == [set()] * 30


def test_the_page_has_every_figure() -> None:
    false = {"ranks": 2, "reports": 100, "ours": 0.5, "theirs": 250.0, "aim": None}
    late = {"ranks": 2, "jobs": 5, "ours": [3, 4], "theirs": [40, 40], "aim": 5}
    results: list[dict[str, Any]] = [
        {"model": "a model", **false},
        {"noise": 0.02, "factor": 1.2, **late},
    ]
    lines = page(results, "a peer 1.0", "date: today").splitlines()
    assert "| a model | none | 0.5 / 250 |" in lines
    assert "| 20% longer, noise 2.0% | 5 | 3 to 4 / never to never |" in lines
    assert any("a peer 1.0" in line for line in lines)


def test_a_measurement_of_all_models_of_one_rank() -> None:
    results = list(measure(30, [1]))
    assert [each["model"] for each in results if "model" in each] == list(MODELS)
    assert sum("factor" in each for each in results) == len(SLOW)
    # Noise that lasts for several reports is the known limit of a rank without peers.
    warned = {each["model"] for each in results if "model" in each and each["ours"]}
    assert warned <= {"autocorrelated 5 %"}
