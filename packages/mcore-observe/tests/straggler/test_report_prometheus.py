import math

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from mcore.observe import Outlier, SectionStats, StragglerReport
from mcore.observe.straggler.server.routes import ControllerState, Router

HOST = 'no"de\\1\nx %d% nan'


@pytest.fixture
def report():
    names = ("elapsed_ms", "data_ms", "temp_c", "power_w", "util_pct", "clock_mhz", "etpt_tf")
    values = ((20.0, 48.0), (1.5, math.nan), (60.0, 61.0), (400.5, 401.0), (97.0, 98.0),
              (1980.0, 1500.0), (20.0, 8.25))  # fmt: skip
    stats = (SectionStats(4, 200.0, 50.0, 60.0), SectionStats(0, 0.0, math.nan, math.nan))
    return StragglerReport(
        unix_time=1.0,
        world_size=2,
        log_interval=10,
        total_flops=1e12,
        hosts=("a", HOST),
        metrics=dict(zip(names, values, strict=True)),
        sections={"compute": stats, "att": stats},
        relative_scores={"compute": (1.0, 0.5)},
        individual_scores={"compute": (1.0, math.nan)},
        outliers=(Outlier("elapsed_ms", 1, HOST, 48.0, 20.0, 9.0, 0.5),),
        stragglers=(Outlier("data", 0, "a", 8.0, 2.0, 9.0, 0.5),),
    )


@pytest.fixture
def text_of(compared):
    """What the controller answers after a report."""

    def text(state, report, query="ranks=all"):
        if report is not None:
            state.applied(True, compared(report))
        router = Router(state, token=None, allow_get_toggle=False)
        return router.answer("GET", "/metrics", query).body

    return text


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(family):
    return {tuple(sorted(sample.labels.items())): sample.value for sample in family.samples}


def test_per_rank_metrics_in_base_units(report):
    found = families(report.to_prometheus())
    expected = {
        "iteration_seconds": (0.02, 0.048),
        "data_seconds": (0.0015, math.nan),
        "gpu_temperature_celsius": (60.0, 61.0),
        "gpu_power_watts": (400.5, 401.0),
        "gpu_utilization_ratio": (0.97, 0.98),
        "gpu_clock_hertz": (1.98e9, 1.5e9),
        "estimated_tflops": (20.0, 8.25),
    }
    for name, (first, second) in expected.items():
        family = found[f"mcore_straggler_{name}"]
        assert family.type == "gauge"
        assert family.documentation
        values = samples(family)
        assert values[("host", "a"), ("rank", "0")] == first
        assert values[("host", HOST), ("rank", "1")] == pytest.approx(second, nan_ok=True)


def test_sections_scores_and_outliers(report):
    found = families(report.to_prometheus())
    seconds = samples(found["mcore_straggler_section_seconds"])
    assert seconds[("host", "a"), ("rank", "0"), ("section", "att")] == 0.02
    relative = samples(found["mcore_straggler_relative_score"])
    assert relative[("host", HOST), ("rank", "1"), ("section", "compute")] == 0.5
    individual = samples(found["mcore_straggler_individual_score"])
    assert math.isnan(individual[("host", HOST), ("rank", "1"), ("section", "compute")])
    outliers = samples(found["mcore_straggler_outlier"])
    assert outliers == {(("metric", "elapsed_ms"), ("rank", "1")): 1.0}
    stragglers = samples(found["mcore_straggler_straggler"])
    assert stragglers == {(("metric", "data"), ("rank", "0")): 1.0}


def test_numbers_that_are_not_finite_have_the_names_of_prometheus(report):
    report.metrics["power_w"] = (math.inf, -math.inf)
    text = report.to_prometheus()
    host = r'host="no\"de\\1\nx %d% nan"'
    for line in (
        'mcore_straggler_gpu_power_watts{rank="0",host="a"} +Inf',
        f'mcore_straggler_gpu_power_watts{{rank="1",{host}}} -Inf',
        f'mcore_straggler_data_seconds{{rank="1",{host}}} NaN',
        f'mcore_straggler_individual_score{{rank="1",{host},section="compute"}} NaN',
        f'mcore_straggler_gpu_clock_hertz{{rank="1",{host}}} 1500000000',
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize("all_ranks", [True, False])
def test_the_server_formats_many_ranks_without_an_object_for_each(simulated_job, all_ranks):
    job = simulated_job(64, ["att"], [f"node{rank // 8}%" for rank in range(64)])
    values = torch.rand(10, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = job.report(values[:7], 1000 * values[7:])
    text = found.to_prometheus(all_ranks=all_ranks)
    assert "report" not in vars(found)
    assert text == found.report.to_prometheus(all_ranks=all_ranks)
    seconds = samples(families(text)["mcore_straggler_section_seconds"])
    if all_ranks:  # a sum in ms over ten iterations
        key = (("host", "node7%"), ("rank", "63"), ("section", "att"))
        assert seconds[key] == pytest.approx(values[9, 63].item() / 10)
    else:
        key = (("of", "max"), ("section", "att"))
        assert seconds[key] == pytest.approx(values[9].max().item() / 10)


def test_state_before_and_after_a_report(report, text_of, compared):
    state = ControllerState(rank=0, world_size=2, enabled=True)
    found = families(text_of(state, None))
    assert list(found) == [
        "mcore_straggler_enabled",
        "mcore_straggler_reports",
        "mcore_straggler_refused",
        "mcore_straggler_last_report_timestamp_seconds",
        "mcore_straggler_training",
    ]
    assert found["mcore_straggler_enabled"].samples[0].value == 1
    state.applied(False, compared(report))
    text = text_of(state, None)
    found = families(text)
    assert found["mcore_straggler_enabled"].samples[0].value == 0
    [total] = found["mcore_straggler_reports"].samples
    assert (total.name, total.value) == ("mcore_straggler_reports_total", 1)
    assert text.endswith("\n")
    assert report.to_prometheus() in text


def test_every_family_has_help_and_type_once_before_its_samples(report, text_of):
    state = ControllerState(rank=0, world_size=2, enabled=True)
    seen = []
    for line in text_of(state, report).splitlines():
        if line.startswith("#"):
            _, keyword, name, rest = line.split(" ", 3)
            assert rest
            seen.append((keyword, name))
        else:
            assert line.partition("{")[0].partition(" ")[0] == seen[-1][1]
    assert len(seen) == len(set(seen)) == 2 * 17
    assert [name for keyword, name in seen if keyword == "HELP"] == [
        name for keyword, name in seen if keyword == "TYPE"
    ]


def test_sections_of_many_ranks_come_as_their_ends_and_median(report, text_of):
    state = ControllerState(rank=0, world_size=2, enabled=True)
    found = families(text_of(state, report, query=""))
    seconds = samples(found["mcore_straggler_section_seconds"])
    assert seconds == {
        (("of", end), ("section", section)): value
        for section in ("compute", "att")
        for end, value in (("min", 0.0), ("median", 0.01), ("max", 0.02))
    }
    scores = samples(found["mcore_straggler_individual_score"])
    assert scores[("of", "max"), ("section", "compute")] == 1.0
    assert len(samples(found["mcore_straggler_iteration_seconds"])) == 2
    for query in ("ranks=all", "x=1&ranks=all"):
        every = families(text_of(state, None, query))
        assert samples(every["mcore_straggler_section_seconds"])[
            ("host", "a"), ("rank", "0"), ("section", "att")
        ] == pytest.approx(0.02)


def test_age_of_the_report_refused_requests_and_the_training(report, text_of):
    state = ControllerState(rank=0, world_size=2, enabled=True)
    found = families(text_of(state, None))
    assert samples(found["mcore_straggler_last_report_timestamp_seconds"]) == {}
    state.count_refusal()
    state.show({"lm loss": 2.5, "x": 1.0})
    state.show({"x": 3.0})
    found = families(text_of(state, report))
    assert samples(found["mcore_straggler_last_report_timestamp_seconds"]) == {(): 1.0}
    assert samples(found["mcore_straggler_refused"]) == {(): 1.0}
    assert samples(found["mcore_straggler_training"]) == {
        (("name", "lm loss"),): 2.5,
        (("name", "x"),): 3.0,
    }
