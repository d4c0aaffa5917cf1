"""Experts and a second token in the main job: as in plain PyTorch, and the same in each layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from layouts.experts import PlainExperts
from mcore.observe import get_moe_metrics_tracker, get_mtp_metrics_tracker
from mcore.parallel import ProcessGroups
from pretrain import sample
from pretrain.cli.checks import check
from pretrain.corpus import draw_batch, load_corpus
from pretrain.model.building import build_model
from pretrain.model.configuration import transformer_config
from pretrain.model.mtp import likeliest, loss_ahead, with_labels_ahead
from pretrain.model.objective import objective_of
from pretrain.model.router import choose
from pretrain.run.loop import DivergedError
from pretrain.settings import Settings
from pretrain.usage import UsageError
from pretrain.watch.step_metrics import training_flops
from pretrain_runs import SMALL as BASE
from pretrain_runs import (
    curves_of,
    norm_of,
    train_here,
    whole_parameters,
)
from rank_testing import run_ranks

STEPS = 4
ROUTING: dict[str, Any] = {"experts": 4, "balance_loss": 0.5, "z_loss": 0.2}
SMALL: dict[str, Any] = {**BASE, **ROUTING, "mtp": 1, "train_iters": STEPS}


# Runs of four ranks that change their layout after each step. One rank does the last of "first".
CHAINS: dict[str, list[dict[str, Any]]] = {
    "first": [
        {"dp": 4, "ep": 4},
        {"dp": 4, "ep": 2, "fsdp": True},
        {"tp": 2, "cp": 2, "dp": 1, "ep": 2, "fsdp": True, "recompute": True},
    ],
    "second": [
        {"dp": 4, "ep": 2, "recompute": True, "check_replicas_interval": 1},
        {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True, "check_replicas_interval": 1},
        {"cp": 2, "dp": 2, "ep": 2, "async_save": True},
        {"dp": 4, "fsdp": True, "hsdp_outer": 2},
    ],
}
LOW: list[dict[str, Any]] = [
    {"dp": 4, "ep": 2, "exit_after": 1},
    {"dp": 4, "ep": 4, "fsdp": True, "exit_after": 1},
    {"tp": 2, "dp": 2, "ep": 2},
]
COMPARED = (
    *("lm loss", "grad-norm", "load_balancing_loss", "z_loss", "mtp_1 loss"),
    *("mtp_1_acceptance_rate", "moe/load_balancing_loss_layer_1", "moe/z_loss_layer_0"),
)


def settings_of(**chosen: Any) -> Settings:
    """The settings of a small run that logs every step."""
    return Settings(**{**SMALL, "log_interval": 1, "dp": 1, "num_layers": 1, **chosen})


def train_on_four(root: str) -> str:
    """Be one of four ranks in all runs; return what it prints in the one with frozen routers."""
    for name, layouts in CHAINS.items():
        for number, layout in enumerate(layouts):
            settings = settings_of(exit_after=1, **layout)
            train_here(settings, f"{root}/{name}", resume=number > 0)
    away = {"lr": 1e30, "min_lr": 1.0, "warmup_iters": 0, "max_skipped": 0, "train_iters": 3}
    with pytest.raises(DivergedError):
        train_here(settings_of(dp=4, ep=2, **away), f"{root}/diverged")
    for number, layout in enumerate(LOW):
        settings = settings_of(bf16=True, **layout)
        train_here(settings, f"{root}/bf16", resume=number > 0)
    frozen = settings_of(dp=4, ep=4, freeze_router=True, train_iters=2)
    return train_here(frozen, f"{root}/frozen")


def train_alone(root: str) -> None:
    """Be the only rank: without an interruption, and behind the others' checkpoint."""
    train_here(settings_of(), f"{root}/alone")
    train_here(settings_of(bf16=True), f"{root}/alone-bf16")
    train_here(settings_of(), f"{root}/first", resume=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of all runs, and what the rank that writes logs has printed in the last."""
    root = tmp_path_factory.mktemp("runs")
    printed = run_ranks(train_on_four, 4, str(root), timeout_s=900)
    run_ranks(train_alone, 1, str(root), timeout_s=900)
    return root, printed[-1]


class PlainAhead(PlainExperts):
    """The plain model with experts and one block more, in float64, with a model's weights."""

    def __init__(self, settings: Settings, model: torch.nn.Module) -> None:
        super().__init__(settings)
        named = model.named_parameters()
        self.weights = torch.nn.ParameterDict(
            {name.replace(".", "/"): p.detach().double() for name, p in named}
        )

    def logits(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.weights["embedding/weight"]
        x = table[batch["tokens"]]
        for layer in range(self.settings.num_layers):
            x = self._block(f"layers/{layer}", x)
        following = self._norm("mtp/next_norm", table[batch["labels"]])
        joined = torch.cat((self._norm("mtp/hidden_norm", x), following), -1)
        ahead = self._block("mtp/layer", joined @ self.weights["mtp/projection"].T)
        return self._norm("final_norm", x) @ table.T, self._norm("mtp/final_norm", ahead) @ table.T


@pytest.mark.parametrize(("topk", "balance"), [(2, "batch"), (1, "sequence"), (3, "sequence")])
def test_losses_and_gradients_are_those_of_plain_pytorch(topk: int, balance: str) -> None:
    settings = Settings(dp=1, topk=topk, balance=balance, **SMALL)  # type: ignore[arg-type]
    groups, config = ProcessGroups.from_sizes(), transformer_config(settings)
    model = build_model(settings, config, groups, torch.device("cpu"))
    with torch.no_grad():  # far from equal shares, so that a mistake in a loss shows
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter.mul_(20.0)
    shape = Settings(global_batch_size=8, seq_length=32)
    batch = with_labels_ahead(draw_batch(load_corpus().train, shape, slice(None), 1, 1))
    get_moe_metrics_tracker().reset()
    get_mtp_metrics_tracker().reset()
    with FlopCounterMode(display=False) as counter:
        outputs = model(batch["tokens"], batch["position_ids"], next_tokens=batch["labels"])
    losses = objective_of(settings).losses
    own = losses(outputs[0], batch["labels"].T, None).mean()
    ahead = loss_ahead(outputs, batch, losses, groups, 256)
    (own + 0.3 * ahead).backward()
    moe = get_moe_metrics_tracker().take(1.0, mtp_num_layers=1)
    mtp = get_mtp_metrics_tracker().take(1.0)

    plain = PlainAhead(settings, model)
    first, second = plain.logits(batch)
    labels = batch["labels"]
    wanted = F.cross_entropy(first.flatten(0, 1), labels.flatten())
    wanted_ahead = F.cross_entropy(second[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    balances, sizes = plain.routing()
    (wanted + 0.3 * wanted_ahead + 0.5 * balances.sum() + 0.2 * sizes.sum()).backward()
    name = "load_balancing_loss" if balance == "batch" else "seq_load_balancing_loss"
    accepted = (second[:, :-1].argmax(-1) == first[:, 1:].argmax(-1)).double().mean()
    for found, expected in (
        (own, wanted), (ahead, wanted_ahead), (mtp["mtp_1 loss"], wanted_ahead),
        (mtp["mtp_1_acceptance_rate"], 100 * accepted), (moe.layers[name], balances),
        (moe.layers["z_loss"], sizes),
    ):  # fmt: skip
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-9)
    assert balances.max() > 1.01
    counts = counter.get_flop_counts()["Global"]
    products = counts[torch.ops.aten.mm] + counts[torch.ops.aten.addmm]
    assert training_flops(settings) == 3 * (products + config.num_blocks * 4 * 32 * 32 * 8 * 32)
    for name, parameter in model.named_parameters():
        wanted_grad = plain.weights[name.replace(".", "/")].grad
        assert parameter.grad is not None
        assert wanted_grad is not None
        difference = (parameter.grad.double() - wanted_grad).norm() / wanted_grad.norm()
        assert difference < 1e-5, name


def test_of_equal_experts_the_lower_number_is_taken() -> None:
    gates, chosen = choose(torch.tensor([[0.2, 0.3, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]]), 3)
    assert chosen.tolist() == [[1, 2, 0], [0, 1, 2]]
    torch.testing.assert_close(gates.sum(-1), torch.ones(2))


def test_rows_that_fill_up_the_vocabulary_are_no_predictions() -> None:
    logits = torch.tensor([[-3.0, -1.0, -2.0, 0.0], [-1.0, -4.0, -1.0, 9.0]])
    assert likeliest(logits, None, 3).tolist() == [1, 0]


def test_layouts_do_the_same_and_go_on_from_each_other(runs: tuple[Path, str]) -> None:
    root, _ = runs
    expected = curves_of(root / "alone")
    weights = whole_parameters(root / f"alone/checkpoints/step_{STEPS:08d}")
    assert expected["lm loss"][STEPS] < expected["lm loss"][1] - 0.1
    for name in CHAINS:
        found = curves_of(root / name)
        for metric in COMPARED:
            assert list(expected[metric]) == list(range(1, STEPS + 1))
            assert found[metric] == pytest.approx(expected[metric], rel=1e-5), (name, metric)
        after = whole_parameters(root / name / f"checkpoints/step_{STEPS:08d}")
        assert after.keys() == weights.keys()
        difference = norm_of(after[key] - weights[key] for key in after)
        assert difference < 1e-5 * norm_of(weights.values())
        for key, values in after.items():
            torch.testing.assert_close(values, weights[key], rtol=1e-5, atol=2e-5, msg=key)


def test_bf16_stays_near_itself_on_one_rank(runs: tuple[Path, str]) -> None:
    found, expected = (curves_of(runs[0] / name) for name in ("bf16", "alone-bf16"))
    for metric in ("lm loss", "mtp_1 loss", "load_balancing_loss", "grad-norm"):
        assert found[metric] == pytest.approx(expected[metric], rel=2e-2), metric


def test_skipped_steps_have_no_metrics_of_experts(runs: tuple[Path, str]) -> None:
    diverged = curves_of(runs[0] / "diverged")
    assert diverged["skipped-train-samples"][3] == 16
    assert list(diverged["load_balancing_loss"]) == list(diverged["mtp_1 loss"]) == [1]


def test_frozen_routers_stay_as_they_were(runs: tuple[Path, str]) -> None:
    root, printed = runs
    for name in ("load_balancing_loss", "z_loss", "mtp_1 loss"):
        assert len(re.findall(rf"{name}: \d\.\d+E[+-]\d+", printed)) == 2, printed
    assert re.search(r"^model .* 4 experts, 2 for each token$", printed, re.MULTILINE)
    settings, groups = settings_of(), ProcessGroups.from_sizes()
    started = build_model(settings, transformer_config(settings), groups, torch.device("cpu"))
    after = whole_parameters(root / "frozen/checkpoints/step_00000002")
    for name, parameter in started.named_parameters():
        assert torch.equal(parameter, after[name]) is ("router" in name), name


def test_one_process_continues_a_text(
    runs: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sample.main(["--run", str(runs[0] / "second"), "import ", "--tokens", "4"]) == 0
    assert len(capsys.readouterr().out) == len("import ") + 4 + 1


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"ep": 2}, "--ep 2 is for a model with experts"),
        ({"freeze_router": True}, "--freeze-router is for a model with experts"),
        ({"experts": 6, "ep": 4, "dp": 4}, "--experts 6 is not divisible by --ep 4"),
        ({"experts": 4, "ep": 4, "tp": 2}, r"--ep 4 does not divide cp \* dp = 1 \* 2 = 2"),
        ({"experts": 4, "topk": 5}, "--topk 5 is larger than --experts 4"),
        (
            {"experts": 4, "ep": 2, "fsdp": True, "hsdp_outer": 2},
            "number of replicas of an expert, 1 is not divisible by --hsdp-outer 2",
        ),
        ({"experts": 4, "cuda_graph": "local"}, "--cuda-graph cannot work with --experts, "),
        ({"mtp": 2}, "--mtp must be 0 or 1"),
        ({"mtp": 1, "value_head": True}, "--mtp cannot work with --value-head"),
    ],
)
def test_what_makes_no_sense_is_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(Settings(**chosen), None)
