"""The readable console line, which is the default; Megatron-LM's has tests of its own."""

import contextlib
import io
import math
import re
import time

import pytest
import torch
import torch.distributed as dist

from mcore.observe import (
    ConfigContainer,
    DatasetConfig,
    GlobalState,
    LoggerConfig,
    TrainingConfig,
    training_log,
)
from mcore.observe.training_log.measures import peak_tflops
from rank_testing import run_ranks


def test_a_line_without_a_device_says_what_a_user_wants_to_know(make_state, log_step, printed_line):
    state = make_state(console_format="readable", log_throughput=True, log_interval=1)
    state.cfg.dataset = DatasetConfig(seq_length=10)
    state.timers("interval-time", log_level=0).start()
    with_data = state.timers("batch-generator", log_level=0)
    with_data.start()
    with_data.stop()
    interval = state.timers("interval-time")
    interval.set_elapsed(0.5)
    state.train_state.floating_point_operations_so_far = 1e12
    log_step(state, grad_norm=2.5)
    line = printed_line()
    found = re.search(r"step ms: ([\d.]+) \| tokens/s: ([\d,]+) \| data %: ([\d.]+) \|", line)
    assert found, line
    step_ms, tokens = float(found[1]), int(found[2].replace(",", ""))
    assert tokens == pytest.approx(64 * 10 / (step_ms / 1e3), rel=0.01)
    data_ms = with_data.active_time() * 1e3
    assert float(found[3]) == pytest.approx(100 * data_ms / step_ms, abs=0.06)
    assert line.endswith(
        " learning rate: 1.000000E-04 | global batch size:    64 | lm loss: 2.500000E+00 | "
        "grad norm: 2.500 |"
    )
    for absent in ("TFLOP", "MFU", "memory", "loss scale", "skipped", "OOM", "GPU"):
        assert absent not in line


def test_what_is_unusual_is_shown(make_state, log_step, printed_line):
    totals = {}
    state = make_state(console_format="readable", step=4)
    log_step(state, totals=totals, skipped=1)
    state.train_state.step = 5
    log_step(state, totals=totals, loss_scale=1024.0)
    line = printed_line()
    assert " loss scale: 1024.0 |" in line
    assert " number of skipped iterations:   1 |" in line
    assert "samples/s: " in line  # the length of a sample is not known


def test_settings_that_know_no_format_get_megatrons_line(make_state, log_step, printed_line):
    state = make_state(console_format="readable")
    settings = vars(state.cfg.logger)
    del settings["console_format"]
    state.cfg.logger = type("Settings", (), settings)()
    log_step(state)
    assert " elapsed time per iteration (ms): " in printed_line()


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        # What the data sheets state, those with sparsity halved.
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H200", 989.5),
        ("NVIDIA L4", 121.0),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI325X", 1307.4),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", None),
        ("AMD Instinct MI250X", None),  # a device is half of one
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("a device of tomorrow", None),
    ],
)
def test_peaks_are_those_of_known_devices_only(name, peak):
    assert peak_tflops(name) == (None if peak is None else pytest.approx(peak, rel=2e-3))


def test_peaks_are_those_that_torchtitan_quotes_from_the_makers_pages():
    quoted = pytest.importorskip("torchtitan.tools.utils").get_peak_flops
    unknown = quoted("a device of tomorrow")
    for name in ("H100 PCIe", "H100 80GB HBM3", "H100 NVL", "H200", "B200", "GB200"):
        theirs = quoted(f"NVIDIA {name}")
        assert theirs != unknown
        assert peak_tflops(f"NVIDIA {name}") == pytest.approx(theirs / 1e12, rel=2e-3)


def of_two_ranks():
    config = ConfigContainer(
        logger=LoggerConfig(log_interval=1), train=TrainingConfig(micro_batch_size=2)
    )
    lines = []
    for step, losses in enumerate(
        [{"a": 1.0 + dist.get_rank(), "b": 5.0}, {"a": 3.0}, {"a": math.nan}], 1
    ):
        if dist.get_rank() == 0:  # the largest, NaN included, is not that of the rank that prints
            losses["a"] = losses["a"] + 7.0
        state = GlobalState(config)
        state.train_state.step = step
        if step == 2 and dist.get_rank() == 0:
            losses = {}  # a stage of a pipeline without losses
        if step == 3 and dist.get_rank() == 1:
            losses["a"] = 1.0
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            training_log(
                {name: torch.tensor(loss) for name, loss in losses.items()}, {}, None, None, 1.0,
                False, 0, None, None, None, config, state, None, None,
            )  # fmt: skip
        lines.append(out.getvalue())
    return lines


def test_the_largest_loss_of_all_ranks_is_shown():
    printed = run_ranks(of_two_ranks, 2)
    assert printed[0] == ["", "", ""]
    first, second, third = printed[1]
    assert " global batch size:     4 | a: 2.000000E+00 | max a: 8.000000E+00 | b: 5" in first
    assert "max b" not in first
    assert " a: 3.000000E+00 |" in second
    assert "max" not in second
    assert " a: 1.000000E+00 | max a: NAN |" in third


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_line_of_a_device_has_its_memory_and_use(make_state, log_step, printed_line):
    """Checks memory in percent, and MFU where the device's peak is known."""
    state = make_state(console_format="readable", log_interval=1, log_throughput=True)
    device = torch.ones(1 << 20, device="cuda")
    log_step(state)
    printed_line()
    time.sleep(0.01)
    state.train_state.step += 1
    state.train_state.floating_point_operations_so_far = 1e12
    log_step(state, {"lm loss": device[0]})
    line = printed_line()
    assert " memory %: " in line
    assert "throughput per GPU (TFLOP/s/GPU): " in line
    known = peak_tflops(torch.cuda.get_device_name()) is not None
    assert (" MFU %: " in line) == known


def test_a_name_with_escape_sequences_stays_in_its_line(make_state, log_step, printed_line):
    state = make_state(log_interval=1)
    name = "loss\x1b]0;title\x07\x1b[2J\n iteration 9 | lm"
    log_step(state, {name: torch.tensor(2.5)}, {})
    line = printed_line()
    assert line.isprintable()
    assert "lm: 2.500000E+00" in line
