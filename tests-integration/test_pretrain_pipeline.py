"""Pipelines in the main job: every layout against one process, the order of passes, refusals."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pretrain.cli.command import main
from pretrain.cli.options import parse, resolve
from pretrain.model.deferred import DeferredWeightGradient
from pretrain.run import pipeline_steps
from pretrain.run.pipeline import Pass, forward_order, training_order
from pretrain.run_folder import RunFolder
from pretrain.sample import load_model
from pretrain.settings import Settings
from pretrain.usage import UsageError
from pretrain_runs import SMALL, TINY, curves_of, losses_of, pretrain, train_here
from rank_testing import run_ranks

ALONE = Settings(
    dp=1, micro_batch_size=2, log_interval=1,
    **{**SMALL, "num_layers": 4, "train_iters": 2, "eval_batches": 2},
)  # fmt: skip
FOUR_STEPS = dataclasses.replace(ALONE, train_iters=4)
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp4": {"pp": 4, "defer_embedding_wgrad": True},
    "pp2-dp2": {"pp": 2, "dp": 2, "micro_batch_size": 1},
    "pp2-tp2-sequence": {
        "pp": 2, "vpp": 2, "tp": 2, "sequence_parallel": True, "defer_embedding_wgrad": True,
    },
    "pp2-cp2-recompute": {"pp": 2, "cp": 2, "recompute": True, "micro_batch_size": 1},
    "pp2-fsdp2": {"pp": 2, "vpp": 2, "dp": 2, "fsdp": True},
}  # fmt: skip
ONE_PROCESS = {
    "fp32": ALONE,
    "four steps": FOUR_STEPS,
    "untied": dataclasses.replace(ALONE, untied=True),
    "value head": dataclasses.replace(ALONE, value_head=True),
    # Untied: one process adds the two gradients of a tied embedding in bf16, two stages in fp32.
    "bf16": dataclasses.replace(ALONE, bf16=True, untied=True),
    "experts": dataclasses.replace(ALONE, experts=4, topk=2, balance="sequence"),
    "packed": dataclasses.replace(ALONE, packed=True),
}
OTHERS: dict[str, dict[str, Any]] = {
    "experts": {"pp": 2, "dp": 2, "ep": 2, "micro_batch_size": 1},
    "packed": {"pp": 2, "cp": 2, "micro_batch_size": 1},
}


Job = tuple[str, Settings]  # the folder of a run below a common one


def all_here(runs: list[Job], folder: str) -> list[str]:
    """Be a rank of one run after the other, in one process group; the same name is resumed."""
    names = [name for name, _ in runs]
    return [
        train_here(settings, f"{folder}/{name}", resume=name in names[:place])
        for place, (name, settings) in enumerate(runs)
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs in one process that pipelines are to equal."""
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(all_here, 1, list(ONE_PROCESS.items()), str(folder), timeout_s=600)
    return folder


def weights_of(settings: Settings, run: Path) -> dict[str, torch.Tensor]:
    """The weights of the last checkpoint, read as those of the whole model in one process."""
    whole = dataclasses.replace(
        settings, tp=1, cp=1, pp=1, vpp=1, dp=1, ep=1, fsdp=False, sequence_parallel=False,
        defer_embedding_wgrad=False,
    )  # fmt: skip
    return load_model(whole, RunFolder(run)).state_dict()


def assert_equal_runs(settings: Settings, run: Path, expected: Path, *, rel: float = 1e-5) -> None:
    """The same losses, norms and validation, and the same weights at the end."""
    name = "value loss" if settings.value_head else "lm loss"
    curves, wanted = curves_of(run), curves_of(expected)
    for metric in (name, f"{name} validation", "grad-norm", "params-norm"):
        found = {step: curves[metric][step] for step in wanted[metric]}
        assert found == pytest.approx(wanted[metric], rel=rel), (run.name, metric)
        assert len(found) == (1 if "validation" in metric else settings.train_iters)
    weights, other = weights_of(settings, run), weights_of(settings, expected)
    assert weights.keys() == other.keys()
    if settings.bf16:
        # Stages add up the norm that clips in another order: it differs in the eighth digit,
        # which rounds a weight here and there to the neighbour of the one process's. Where the
        # kernels of bf16 depend on the shape, 2 weights in 100 differ.
        both = [torch.cat([each.flatten() for each in of.values()]) for of in (weights, other)]
        assert float((both[0] != both[1]).float().mean()) < 0.05
    for key, values in weights.items():
        wanted_values = other[key].float()
        if settings.bf16:
            # A weight whose gradient is near 0 moves by the sign of a rounding error: compare all.
            assert (values.float() - wanted_values).norm() < 0.02 * wanted_values.norm(), key
        else:
            scale = float(wanted_values.abs().max())
            torch.testing.assert_close(values, other[key], rtol=rel, atol=20 * rel * scale)


def test_every_layout_of_four_ranks_equals_one_process(alone: Path, tmp_path: Path) -> None:
    runs = [(name, dataclasses.replace(ALONE, **layout)) for name, layout in LAYOUTS.items()]
    chain = [
        ("chain", dataclasses.replace(FOUR_STEPS, exit_after=1, **layout))
        for layout in (LAYOUTS["pp2-tp2-sequence"], {"tp": 2, "dp": 2}, *LAYOUTS.values())
    ]
    others = [
        (name, dataclasses.replace(ONE_PROCESS[name], **layout)) for name, layout in OTHERS.items()
    ]
    printed = run_ranks(all_here, 4, [*runs, *chain[:4], *others], str(tmp_path), timeout_s=600)
    for name, settings in others:
        assert_equal_runs(settings, tmp_path / name, alone / name)
    for name, settings in runs:
        assert_equal_runs(settings, tmp_path / name, alone / "fp32")
    assert_equal_runs(FOUR_STEPS, tmp_path / "chain", alone / "four steps")
    stages = [line for of_rank in printed for line in of_rank[0].splitlines() if "stage " in line]
    assert [line.partition(", about")[0].split(maxsplit=4) for line in stages] == [
        ["stage", "1", "of", "4", "embedding, layer 0"],
        ["stage", "2", "of", "4", "layer 1"],
        ["stage", "3", "of", "4", "layer 2"],
        ["stage", "4", "of", "4", "layer 3, final norm and head"],
    ]
    interleaved = "".join(of_rank[2] for of_rank in printed)
    assert interleaved.count("stage ") == 2
    assert "     embedding, layer 0; layer 2, about" in interleaved


def two_stages_here(folder: str) -> list[int]:
    """Be one of two stages in several runs; how many gradients this rank's last one deferred."""
    drained = []

    def drain(deferred: DeferredWeightGradient, weight: torch.Tensor) -> None:
        drained.append(len(deferred.inputs))
        real(deferred, weight)
        assert not deferred.inputs
        assert weight.grad is None

    real = DeferredWeightGradient.drain
    all_here(TWO_STAGES, folder)
    deferring = dataclasses.replace(ONE_PROCESS["untied"], pp=2, defer_embedding_wgrad=True)
    with mock.patch.object(DeferredWeightGradient, "drain", drain):
        all_here([("untied", deferring)], folder)
    return drained


DROPPING = dataclasses.replace(FOUR_STEPS, pp=2, dropout=0.2)
TWO_STAGES = [
    ("value head", dataclasses.replace(ONE_PROCESS["value head"], pp=2, vpp=2)),
    ("bf16", dataclasses.replace(ONE_PROCESS["bf16"], pp=2, vpp=2)),
    ("dropped", DROPPING),
    ("dropped in two", dataclasses.replace(DROPPING, exit_after=2)),
    ("dropped in two", DROPPING),
]


def test_every_kind_of_head_equals_one_process_and_a_stopped_run_goes_on(
    alone: Path, tmp_path: Path
) -> None:
    deferred = run_ranks(two_stages_here, 2, str(tmp_path), timeout_s=600)
    assert deferred == [[], [ALONE.num_microbatches] * ALONE.train_iters]
    # The kernels of bf16 round differently for other shapes on some CPUs, by up to 2**-9.
    for name, rel in (("untied", 1e-5), ("value head", 1e-5), ("bf16", 2e-3)):
        assert_equal_runs(ONE_PROCESS[name], tmp_path / name, alone / name, rel=rel)
    losses = losses_of(tmp_path / "dropped")
    assert losses == losses_of(tmp_path / "dropped in two")
    assert losses != pytest.approx(losses_of(alone / "four steps"), rel=1e-3)


TWO_LAYERS = (*TINY, "--pp", "2", "--num-layers", "2", "--micro-batch-size", "2", "--no-mlflow",
              "--no-tensorboard", "--train-iters", "8")  # fmt: skip


def finished(ranks: int, chunks: int, batches: int) -> tuple[int, int]:
    """When the last rank is done and how many passes a rank keeps, by playing all ranks' orders.

    A forward pass of a whole rank takes ``chunks`` units of time and its backward twice that.
    """
    orders = [training_order(rank, ranks, chunks, batches) for rank in range(ranks)]
    done: dict[tuple[int, int, bool], int] = {}  # by place in the model
    clocks, places, most = [0] * ranks, [0] * ranks, 0
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = sum(places)
        for rank, order in enumerate(orders):
            if places[rank] == len(order):
                continue
            one = order[places[rank]]
            stage, last = one.chunk * ranks + rank, ranks * chunks - 1
            needs = (stage - 1 if one.is_forward else stage + 1, one.batch, one.is_forward)
            if stage == (0 if one.is_forward else last):
                needs = (stage, one.batch, True)
            if needs not in done and (stage, one.is_forward) != (0, True):
                continue
            start = max(clocks[rank], done.get(needs, 0))
            clocks[rank] = start + (1 if one.is_forward else 2)
            done[stage, one.batch, one.is_forward] = clocks[rank]
            places[rank] += 1
            passed = order[: places[rank]]
            kept = sum(1 if each.is_forward else -1 for each in passed)
            most = max(most, kept - (ranks - rank) if chunks == 1 else 0)
        assert sum(places) > before, "the ranks wait for each other"
    return max(clocks), most


def test_the_order_of_passes_has_no_deadlock_and_the_least_bubble() -> None:
    for ranks, chunks, rounds in itertools.product((2, 3, 4, 8), (1, 2, 3), (1, 2, 3)):
        batches = ranks * rounds + (chunks == 1)
        took, surplus = finished(ranks, chunks, batches)
        assert took == 3 * (batches * chunks + ranks - 1)
        assert surplus <= 0
    assert forward_order(2, 1, 3) == [Pass(0, 0), Pass(0, 1), Pass(0, 2)]


def main_with_a_failing_stage(arguments: list[str]) -> int:
    """The command, whose second rank fails in its sixth backward pass."""
    calls = itertools.count()
    real = pipeline_steps._Work.backward

    def backward(*given: Any) -> None:
        if os.environ["RANK"] == "1" and next(calls) == 5:
            raise ArithmeticError("the second stage fails")
        real(*given)

    with mock.patch.object(pipeline_steps._Work, "backward", backward):
        try:
            return main(arguments)
        finally:  # a rank that has ended has no connections, while this process goes on
            if os.environ["RANK"] == "1":
                dist.destroy_process_group()


def test_a_stage_that_fails_takes_the_others_down(tmp_path: Path) -> None:
    done = pretrain(
        tmp_path, *TWO_LAYERS, "--run-dir", "run", entry=main_with_a_failing_stage
    )  # fmt: skip
    assert done.returncode == 1
    assert "rank 1 failed:" in done.stderr
    assert "ArithmeticError: the second stage fails" in done.stderr
    assert "pretrain: rank 0 lost its peer" in done.stderr
    assert len(losses_of(tmp_path / "run")) == 1


def test_all_stages_agree_that_a_run_diverges(tmp_path: Path) -> None:
    done = pretrain(
        tmp_path, *TWO_LAYERS, "--run-dir", "run", "--lr", "1e30", "--min-lr", "1",
        "--warmup-iters", "0", "--max-skipped", "2", "--slow-rank", "1:2", "--save-interval", "1",
    )  # fmt: skip
    assert done.returncode == 4
    assert done.stderr.count("the gradients of 2 steps in a row, to step 3, were not finite") == 1
    assert "The last complete checkpoint is run/checkpoints/step_00000001" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--vpp 2", "--vpp 2 is for a pipeline: set --pp above 1, or --vpp 1"),
        ("--defer-embedding-wgrad", "is for a pipeline: set --pp above 1"),
        ("--pp 3", "--num-layers 4 is not divisible by --pp * --vpp 3"),
        ("--pp 2 --vpp 4", "--num-layers 4 is not divisible by --pp * --vpp 8"),
        ("--pp 2 --micro-batch-size 16", "makes 1 micro-batches, but --pp 2 needs 2 or more"),
        (
            "--pp 2 --vpp 2 --global-batch-size 15",
            "makes 15 micro-batches, but --vpp needs a multiple",
        ),
        ("--pp 2 --cuda-graph local", "--cuda-graph cannot work with --pp, which needs a set"),
        ("--pp 2 --fsdp --defer-embedding-wgrad", "cannot work with --fsdp, which reduces"),
        ("--pp 2 --value-head --defer-embedding-wgrad", "cannot work with --value-head, which has"),
        ("--pp 2 --ranks 3", "tp * cp * pp * dp = 1 * 1 * 2 * 1 = 2, but there are 3 ranks"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(options: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolve(parse(options.split()), None)
    assert said in str(refused.value)
