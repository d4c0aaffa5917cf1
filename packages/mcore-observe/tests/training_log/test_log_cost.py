"""What a step of the training log costs: collectives and copies to the host."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mcore.observe import MemorySink, MoEMetricsTracker, MTPMetricsTracker


class NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), f"{func} copies to the host"
        return func(*args, **(kwargs or {}))


def test_a_step_that_logs_nothing_waits_for_nothing(
    make_state, log_step, world_of_eight, monkeypatch
):
    world = dist.group.WORLD
    groups = SimpleNamespace(mp=world, pp=world, dp=world)
    state = make_state(
        step=0,
        sinks=[MemorySink()],
        log_interval=200,
        tensorboard_log_interval=200,
        timing_log_level=2,
        log_timers_to_tensorboard=True,
        log_memory_to_tensorboard=True,
        model=SimpleNamespace(
            num_moe_experts=4,
            num_layers=2,
            moe_router_load_balancing_type="aux_loss",
            mtp_num_layers=1,
        ),
    )
    state.moe_metrics, state.mtp_metrics = MoEMetricsTracker(), MTPMetricsTracker()

    def forbid(name):
        def fail(*args, **kwargs):
            raise AssertionError(f"{name} was called")

        return fail

    for name in ("all_reduce", "all_gather", "barrier", "broadcast", "reduce", "gather"):
        monkeypatch.setattr(dist, name, forbid(name))
    for name in ("all_gather_single", "all_gather_into_tensor", "all_gather_object"):
        monkeypatch.setattr(dist, name, forbid(name), raising=False)
    for name in ("item", "tolist", "numpy", "cpu", "__float__", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, forbid(name))
    totals = {}
    losses = {f"loss {i}": torch.tensor(float(i)) for i in range(12)}
    with NoHostReads():
        for step in range(1, 101):
            state.train_state.step = step
            state.moe_metrics.record("load_balancing_loss", torch.tensor(1.0), 1, 2)
            state.mtp_metrics.record(torch.tensor(1.0), 1, 1)
            log_step(
                state,
                losses,
                totals,
                lr=torch.tensor(0.5),
                grad_norm=torch.tensor(1.0),
                pg_collection=groups,
            )
    monkeypatch.undo()
    assert totals["advanced iterations"] == 100
    assert totals["loss 3"].tolist() == [300.0]


def test_one_transfer_reads_all_device_values(make_state, log_step, monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (reads.append(t.shape), tolist(t))[1])
    state = make_state(sinks=[MemorySink()])
    losses = {f"loss {i}": torch.tensor(float(i)) for i in range(12)}
    with NoHostReads():
        log_step(state, losses, grad_norm=torch.tensor(1.0), lr=torch.tensor(0.5))
    # twelve losses of the step and their averages, gradient norm and learning rate twice each
    assert reads == [torch.Size([28])]
