"""The main job as a value model: its target, losses and gradients, and what it says of itself."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from layouts.reference import plain_gradients, plain_losses
from mcore.modules import LinearForLastLayer
from mcore.parallel import ProcessGroups, get_batch_on_this_cp_rank
from pretrain.corpus import draw_batch, load_corpus
from pretrain.model.building import build_model, build_optimizer
from pretrain.model.configuration import transformer_config
from pretrain.model.objective import line_columns, objective_of
from pretrain.model.randomness import seed_streams
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.watch.step_metrics import training_flops
from pretrain.watch.summary import draw_run
from pretrain_runs import SMALL as BASE
from pretrain_runs import curve_of, losses_of, pretrain, train_on_ranks
from pretrain_worlds import train_all
from rank_testing import run_ranks

STEPS = 4
SMALL: dict[str, Any] = {**BASE, "train_iters": STEPS, "value_head": True}
CPU = torch.device("cpu")


def test_columns_count_bytes_since_the_line_break() -> None:
    text = b"ab\n\nc\n" + b"x" * 82
    expected = [1, 2, 0, 0, 1, 0, *range(1, 81), 80, 80]
    columns = line_columns(torch.tensor([list(text)]), torch.arange(len(text)))
    assert columns.shape == (1, len(expected))
    assert columns[0].tolist() == pytest.approx([column / 80 for column in expected])


@examples(deadline=None)
@given(st.lists(st.binary(min_size=9, max_size=9), min_size=1, max_size=3), st.integers(0, 255))
def test_columns_are_those_counted_byte_by_byte(rows: list[bytes], replaced: int) -> None:
    text = [[10 if byte >= replaced else byte for byte in row] for row in rows]
    columns = line_columns(torch.tensor(text), torch.arange(9))
    for row, counted in zip(text, columns.mul(80).round().int().tolist(), strict=True):
        for place, column in enumerate(counted):
            assert 10 not in row[place - column + 1 : place + 1]
            assert column == place + 1 or row[place - column] == 10


def gradients_here(settings: Settings) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Gradients of this rank's parameters in the first step, and along which axis they are cut."""
    groups = ProcessGroups.from_sizes(tp=settings.tp, cp=settings.cp)
    seed_streams(settings.seed, groups, CPU)
    model = build_model(settings, transformer_config(settings), groups, CPU)
    optimizer = build_optimizer(settings, model, groups)
    objective = objective_of(settings)
    rows = slice(groups.rank("dp"), None, groups.size("dp"))
    batch = draw_batch(load_corpus().train, settings, rows, settings.seed, 1)
    local = get_batch_on_this_cp_rank(objective.with_labels(batch), groups.cp)
    output = model(local["tokens"], local["position_ids"])
    loss = objective.losses(output, local["labels"].transpose(0, 1), groups.tp).mean()
    loss.backward()
    optimizer.accumulate_gradients()
    optimizer.reduce_gradients(loss)
    return {
        name: (param.grad, param.partition_dim if is_cut(param) else None)
        for name, param in model.named_parameters()
    }


def is_cut(param: torch.Tensor) -> bool:
    """Whether each tensor-parallel rank has another part."""
    return getattr(param, "tensor_model_parallel", False)


@pytest.mark.parametrize(
    ("tp", "cp", "dp"), [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)], ids=lambda size: str(size)
)
def test_gradients_under_sequence_parallelism_are_those_of_one_process(
    tp: int, cp: int, dp: int
) -> None:
    settings = Settings(tp=tp, cp=cp, dp=dp, sequence_parallel=True, **SMALL)
    ranks = run_ranks(gradients_here, settings.world_size, settings, timeout_s=600)
    expected = plain_gradients(settings)
    assert ranks[0].keys() == expected.keys()
    for name, whole in expected.items():
        axis = ranks[0][name][1]
        if axis is None:
            found = [rank[name][0] for rank in ranks]
        else:  # tp ranks lie next to each other
            found = [torch.cat([rank[name][0] for rank in ranks[:tp]], dim=axis)]
        for gradient in found:
            torch.testing.assert_close(gradient, whole, rtol=1e-4, atol=1e-7, msg=name)


def test_losses_equal_the_plain_value_model(tmp_path: Path) -> None:
    sequence = {"tp": 2, "sequence_parallel": True}
    layouts: dict[str, dict[str, Any]] = {
        "dp2": {"dp": 2},
        "tp2": {"tp": 2, "dp": 1},
        "tp2-cp2-sp": {**sequence, "cp": 2, "dp": 1, "micro_batch_size": 2},
        "tp2-dp2-sp-fsdp": {**sequence, "dp": 2, "fsdp": True},
    }
    jobs = [(name, Settings(**{**SMALL, **layout})) for name, layout in layouts.items()]
    train_all(jobs, tmp_path)
    for name, settings in jobs:
        losses = losses_of(tmp_path / name, "value loss")
        assert len(losses) == STEPS
        assert losses[-1] < 0.7 * losses[0]
        assert losses == pytest.approx(plain_losses(settings), rel=2e-5), name


def test_a_run_says_that_it_trains_a_value_head(tmp_path: Path) -> None:
    settings = Settings(dp=1, bf16=True, **{**SMALL, "train_iters": 12, "lr": 1e-2})
    [printed] = train_on_ranks(settings, tmp_path)
    losses = losses_of(tmp_path, "value loss")
    assert losses[-1] < 0.5 * losses[0]
    [validation] = curve_of(tmp_path, "value loss validation").values()
    assert curve_of(tmp_path, "lm loss") == {}
    assert (
        "objective        value head: the column of each byte in its line, 1 for 80 and more\n"
        f"loss             {losses[0]:.5f} at step 1, {sum(losses[-10:]) / 10:.5f} over the last "
        "10 steps (mean squared error)\n"
        f"validation loss  {validation:.5f} mean squared error\n"
    ) in printed
    assert f" validation loss at iteration 12 | value loss value: {validation:.6E} |\n" in printed
    assert "PPL" not in printed
    assert json.loads((tmp_path / "config.json").read_text())["settings"]["value_head"]
    draw_run(RunFolder(tmp_path), objective_of(settings))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert settings.run_kind == "tp1-cp1-dp1-value-head"


def head_here(settings: Settings) -> tuple[bool, torch.Tensor]:
    """Whether the output layer is a value head, and its weight; ranks draw from other streams."""
    groups = ProcessGroups.from_sizes(tp=settings.tp)
    seed_streams(settings.seed, groups, CPU)
    model = build_model(settings, transformer_config(settings), groups, CPU)
    return isinstance(model.output_layer, LinearForLastLayer), model.output_layer.weight.detach()


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2)])
def test_the_head_starts_equal_on_all_ranks_of_all_layouts(tp: int, dp: int) -> None:
    heads = run_ranks(head_here, 2, Settings(tp=tp, dp=dp, **SMALL), timeout_s=600)
    [(_, alone)] = run_ranks(head_here, 1, Settings(dp=1, **SMALL), timeout_s=600)
    assert all(is_head and torch.equal(weight, alone) for is_head, weight in heads)


def test_arithmetic_counts_one_output() -> None:
    layers = 2 * (24 * 32 * 32 + 4 * 32 * 32)
    assert training_flops(Settings(dp=1, **SMALL)) == 3 * (layers + 2 * 32) * 8 * 32


REFUSED = {
    "untied": (["--untied"], "--untied cannot work with --value-head, which replaces"),
    "no tp": (["--sequence-parallel"], "--sequence-parallel splits the sequence over the tp ranks"),
    "length": (
        shlex.split(
            "--hidden-size 48 --num-attention-heads 6 --seq-length 40 --cp 2 --tp 3 "
            "--sequence-parallel"
        ),
        "--seq-length 40 is not divisible by --cp * --tp, which --sequence-parallel needs: 6",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_work_is_refused_in_one_line(
    options: list[str], message: str, tmp_path: Path
) -> None:
    done = pretrain(tmp_path, "--value-head", *options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("pretrain: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []
