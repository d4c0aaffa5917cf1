"""False and late warnings of the straggler detector, compared with nvidia-resiliency-ext's rule.

``python -m bench.verdicts [--reports N] [--record]``. Both rules get the same simulated times. With
two and four real ranks, the peer's report has to agree with the two scores that are used here.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bench.peers import name_of
from mcore.observe import SectionStats
from mcore.observe.straggler.exchange import ELAPSED, GatheredRows, encode_row
from mcore.observe.straggler.outliers import PastReports
from mcore.observe.straggler.report import RankComparison
from rank_testing import run_ranks
from results import RECORDS
from results.journal import write_whole
from results.machine import describe_machine, join_facts, timestamp
from results.page import markdown_table

RESULTS = RECORDS / "verdicts.jsonl"
WORLDS = (1, 2, 8, 64, 1024, 16384)
_NAMES = ("compute", "data")
_USUAL_MS = 100.0
_BEFORE, _AFTER = 40, 40  # reports
_PEER_THRESHOLD = 0.75  # its default
_TEMPERATURE = ELAPSED + 2
_Verdicts = list[set[int]]  # per report, the reported ranks


class Job(NamedTuple):
    """Simulated times ``[reports, world]`` in ms of ranks, none of which is slow."""

    times: torch.Tensor
    temperatures: torch.Tensor | None = None  # C, by rank
    peers: tuple[str, ...] = ()


_Draw = Callable[..., torch.Tensor]  # a random tensor of a given shape
_Model = Callable[[torch.Tensor, _Draw], Job]  # of random numbers [reports, world]


def _vary(times: torch.Tensor) -> Job:
    return Job(_USUAL_MS * times)


def _normal(sigma: float) -> _Model:
    return lambda noise, _: _vary(1 + sigma * noise)


def _lognormal(sigma: float) -> _Model:
    return lambda noise, _: _vary((sigma * noise).exp())


def _autocorrelated(noise: torch.Tensor, _: _Draw) -> Job:
    """5 % of noise, of which 90 % remain in the next report."""
    steps = math.sqrt(1 - 0.9**2)
    for number in range(1, len(noise)):
        noise[number] = 0.9 * noise[number - 1] + steps * noise[number]
    return _vary((0.05 * noise).exp())


def _pause(noise: torch.Tensor, is_paused: torch.Tensor) -> Job:
    return _vary((1 + 0.02 * noise) * (1 + is_paused.double()))


def _stalls(noise: torch.Tensor, _: _Draw) -> Job:
    """Every seventh report of a rank is doubled, of different ranks at different times."""
    number = torch.arange(len(noise))[:, None] + torch.arange(noise.shape[1]) * 3
    return _pause(noise, number % 7 == 0)


def _saves(noise: torch.Tensor, _: _Draw) -> Job:
    """Rank 0 takes twice as long in every second report."""
    is_saving = torch.zeros_like(noise, dtype=torch.bool)
    is_saving[1::2, 0] = True
    return _pause(noise, is_saving)


def _pareto(noise: torch.Tensor, _: _Draw) -> Job:
    """A tail of the power 1.5."""
    above = torch.special.ndtr(-noise).clamp_(min=1e-12)
    return _vary(0.95 + 0.05 * above.pow(-1 / 1.5))


def _two_speeds(noise: torch.Tensor, _: _Draw) -> Job:
    """The second half of the ranks takes 15 % longer, and says so by ``peers``."""
    world = noise.shape[1]
    is_slow = torch.arange(world) >= world / 2
    job = _vary((1 + 0.02 * noise) * (1 + 0.15 * is_slow))
    return job._replace(peers=tuple("new" if slow else "old" for slow in is_slow.tolist()))


def _chassis(noise: torch.Tensor, _: _Draw) -> Job:
    """Of eight GPUs in a chassis, the last is 12 C warmer."""
    temperatures = 55.0 + 12.0 * (torch.arange(noise.shape[1]) % 8 == 7)
    return _vary(1 + 0.005 * noise)._replace(temperatures=temperatures.double())


def _ramp(noise: torch.Tensor, draw: _Draw) -> Job:
    """Ranks take 10 % longer once they are warm, give or take 0.5 %."""
    warmth = 1 - (-torch.arange(len(noise))[:, None] / 50).exp()
    return _vary((1 + 0.02 * noise) * (1 + (0.1 + 0.005 * draw(noise.shape[1])) * warmth))


# The most false warnings per 1,000 reports that are wanted, and the noise.
MODELS: dict[str, tuple[float | None, _Model]] = {
    "normal 0.5 %": (1, _normal(0.005)),
    "normal 2 %": (1, _normal(0.02)),
    "normal 5 %": (1, _normal(0.05)),
    "lognormal 0.1": (1, _lognormal(0.1)),
    "lognormal 0.2": (1, _lognormal(0.2)),
    "lognormal 0.3": (5, _lognormal(0.3)),
    "autocorrelated 5 %": (5, _autocorrelated),
    "stalls in every 7th report": (5, _stalls),
    "5 % of reports doubled": (5, lambda noise, draw: _pause(draw(*noise.shape), noise > 1.645)),
    "Pareto 1.5": (None, _pareto),
    "two-speed hardware, as peers": (5, _two_speeds),
    "saves on rank 0": (5, _saves),
    "temperature by chassis": (1, _chassis),
    "thermal ramp": (5, _ramp),
}
# Noise, how much longer a rank takes, and the reports within which it should be named.
SLOW = ((0.02, 1.2, 5), (0.005, 1.05, 10), (0.02, 1.1, 20))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables. Returns 1 if the peer's scores disagree with its report."""
    parser = argparse.ArgumentParser(prog="hatch run verdicts", description=__doc__)
    parser.add_argument("--reports", type=int, default=1000, help="number of reports in a job")
    parser.add_argument("--ranks", type=int, nargs="*", default=WORLDS)
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name} and its page")
    options = parser.parse_args(arguments)
    peer = name_of("nvidia-resiliency-ext")
    for world in (2, 4):
        times = simulate("normal 5 %", world, 50).times
        if judge_by_scores(times) != run_ranks(judge_by_peer, world, times.tolist())[0]:
            print(f"{world} ranks: the peer's report disagrees with its scores")
            return 1
    results = []
    for result in measure(options.reports, options.ranks):
        results.append(result)
        print(json.dumps(result), flush=True)
    if options.record:
        facts = {"date": timestamp(), **describe_machine("nvidia-resiliency-ext")}
        write_whole(RESULTS, "".join(json.dumps(result) + "\n" for result in results))
        write_whole(RESULTS.with_suffix(".md"), page(results, peer, join_facts(facts)))
    return 0


def measure(reports: int, worlds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the false warnings of each model, then the reports until a slow rank is named."""
    for world in worlds:
        number = max(100, min(reports, 64 * reports // world))
        for model, (aim, _) in MODELS.items():
            job = simulate(model, world, number)
            ours, theirs = (
                round(1000 * sum(map(bool, verdicts)) / number, 1)
                for verdicts in (judge_by_detector(job), judge_by_scores(job.times))
            )
            yield {"model": model, "ranks": world, "reports": number, "ours": ours,
                   "theirs": theirs, "aim": aim}  # fmt: skip
        for noise, factor, within in SLOW:
            jobs = 20 if world <= 64 else 5
            delays = [_measure_delays(noise, factor, world, seed) for seed in range(jobs)]
            by_rule = [_summarize(of_rule) for of_rule in zip(*delays, strict=True)]
            yield {"noise": noise, "factor": factor, "ranks": world, "jobs": jobs,
                   "ours": by_rule[0], "theirs": by_rule[1], "aim": within}  # fmt: skip


def simulate(model: str, world: int, reports: int, *, seed: int = 0) -> Job:
    """Simulate a job of ranks that are not slow."""
    return _simulate(MODELS[model][1], world, reports, seed)


def _simulate(model: _Model, world: int, reports: int, seed: int) -> Job:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return model(draw(reports, world), draw)


def _measure_delays(noise: float, factor: float, world: int, seed: int) -> list[int]:
    """The reports until the last rank is named by each rule, once it takes longer."""
    job, last = _simulate(_normal(noise), world, _BEFORE + _AFTER, seed), world - 1
    job.times[_BEFORE:, last] *= factor
    return [
        next((at for at, named in enumerate(rule, 1 - _BEFORE) if at > 0 and last in named), _AFTER)
        for rule in (judge_by_detector(job), judge_by_scores(job.times))
    ]


def _summarize(delays: Sequence[int]) -> list[int]:
    """The median and the 90th percentile."""
    tenths = quantiles(delays, n=10, method="inclusive")
    return [round(tenths[4]), math.ceil(tenths[8])]


def judge_by_detector(job: Job) -> Iterator[set[int]]:
    """Yield the ranks that the straggler detector reports, of each report."""
    world, past = job.times.shape[1], PastReports(_NAMES, peers=job.peers)
    stats = {0: SectionStats(1, 1.0, 1.0, 1.0)}
    rows = encode_row(0.0, stats, 2, enabled=True, wanted=True, log_interval=1).repeat(world, 1)
    if job.temperatures is not None:
        rows[:, _TEMPERATURE] = job.temperatures
    for of_report in job.times:
        rows = rows.clone()
        rows[:, ELAPSED] = of_report
        found = RankComparison(
            GatheredRows(rows, tuple(range(world))), unix_time=0.0, hosts=("host",) * world,
            names=_NAMES, past=past,
        )  # fmt: skip
        yield {one.rank for one in found.stragglers}


def judge_by_scores(times: torch.Tensor) -> _Verdicts:
    """The ranks with a score below the threshold.

    The scores are the fastest rank's time over the rank's time, and the rank's best time over it.
    """
    times = times.float()
    best = times.cummin(dim=0).values
    relative = times.amin(dim=1, keepdim=True) / times
    is_slow = (relative < _PEER_THRESHOLD) | (best / times < _PEER_THRESHOLD)
    return [set(of_report.nonzero().flatten().tolist()) for of_report in is_slow]


def judge_by_peer(times: list[list[float]]) -> _Verdicts:
    """The ranks that the peer reports, on real ranks. Empty on all but rank 0."""
    reporting: Any = import_module("nvidia_resiliency_ext.straggler.reporting")
    statistics: Any = import_module("nvidia_resiliency_ext.straggler.statistics")
    generator = reporting.ReportGenerator(["relative_perf_scores", "individual_perf_scores"])
    verdicts = []
    for of_report in times:
        own = of_report[dist.get_rank()]
        summary = dict.fromkeys(statistics.Statistic, own)
        report = generator.generate_report({"compute": summary}, {})
        if report is not None:
            found = report.identify_stragglers(
                section_rel_threshold=_PEER_THRESHOLD, section_indiv_threshold=_PEER_THRESHOLD
            )
            sections = ("straggler_sections_relative", "straggler_sections_individual")
            named = [each for kind in sections for ranks in found[kind].values() for each in ranks]
            verdicts.append({each.rank for each in named})
    return verdicts


def page(results: Sequence[dict[str, Any]], peer: str, facts: str) -> str:
    """The page of the results, in Markdown."""
    worlds = sorted({result["ranks"] for result in results})
    number = {result["ranks"]: str(result["reports"]) for result in results if "model" in result}
    false = {"": ["(reports of a job)", "", *number.values()]}
    late: dict[str, list[str]] = {}
    for result in results:
        aim = "none" if result["aim"] is None else str(result["aim"])
        if "model" in result:
            cells = false.setdefault(result["model"], [result["model"], aim])
            cells.append(f"{result['ours']:g} / {result['theirs']:g}")
        else:
            case = f"{result['factor'] - 1:.0%} longer, noise {result['noise']:.1%}"
            named = [
                " to ".join("never" if at == _AFTER else str(at) for at in result[side])
                for side in ("ours", "theirs")
            ]
            late.setdefault(case, [case, aim]).append(" / ".join(named))
    ranks = [f"{world:,}" for world in worlds]
    parts = [
        (Path(__file__).parent / "verdicts_page.txt").read_text().replace("PEER", peer),
        facts,
        "## False warnings",
        markdown_table(["noise", "aim", *ranks], list(false.values())),
        "## Reports until a slow rank is named",
        markdown_table(["slow rank", "aim", *ranks], list(late.values())),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
