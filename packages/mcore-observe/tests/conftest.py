"""What the tests of the training log share: a run of one process, and what it prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from mcore.observe import (
    ConfigContainer,
    GlobalState,
    LoggerConfig,
    TrainingConfig,
    TrainState,
    training_log,
)

LINE = re.compile(r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\](?P<fields> iteration.*)$", re.MULTILINE)


def _make_state(*, step=5, sinks=(), train=None, model=None, optimizer=None, **logger):
    config = ConfigContainer(
        logger=LoggerConfig(**{"log_interval": 5, "tensorboard_log_interval": 5} | logger),
        train=train or TrainingConfig(micro_batch_size=2, global_batch_size=64, train_iters=1000),
        model=model,
        optimizer=optimizer,
        data_parallel_size=4,
    )
    train_state = TrainState(step=step, consumed_train_samples=128 * step)
    return GlobalState(config, train_state=train_state, extra_sinks=sinks)


def _log_step(state, losses=None, totals=None, *, lr=1e-4, memory=False, skipped=0, **options):
    arguments = {
        "decoupled_learning_rate": None,
        "loss_scale": 1.0,
        "grad_norm": None,
        "params_norm": None,
        "num_zeros_in_grad": None,
        "history_wct": None,
        "model": None,
    } | options
    return training_log(
        losses if losses is not None else {"lm loss": torch.tensor(2.5)},
        totals if totals is not None else {},
        learning_rate=lr,
        report_memory_flag=memory,
        skipped_iter=skipped,
        config=state.cfg,
        global_state=state,
        **arguments,
    )


@pytest.fixture(scope="session")
def make_state() -> Callable[..., GlobalState]:
    """Makes the state of a run that logs every fifth step, with a batch of 64."""
    return _make_state


@pytest.fixture(scope="session")
def log_step() -> Callable[..., bool]:
    """Calls the training log for the present step of a state, with a loss of 2.5."""
    return _log_step


@pytest.fixture
def printed_line(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Returns the fields of the one console line that was printed since the last call."""

    def read() -> str:
        text = capsys.readouterr().out
        found = LINE.findall(text)
        assert len(found) == 1, text
        return found[0]

    return read


@pytest.fixture
def world_of_eight() -> Iterator[None]:
    """Makes this process the last of eight ranks, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
    yield
    dist.destroy_process_group()
