import json
import math
import time
import urllib.request

import torch.distributed as dist

from mcore.observe.straggler.detector import StragglerDetector
from rank_testing import run_ranks


def ask(address, path, data=None):
    url = f"http://{address[0]}:{address[1]}{path}"
    request = urllib.request.Request(url, data, {"Authorization": "Bearer s3cret"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.read().decode()


def switched_over_http():
    rank, detector, states = dist.get_rank(), StragglerDetector(), []
    detector.configure(
        world=2, rank=rank, port=0, token="s3cret", telemetry=lambda: (math.nan,) * 4
    )

    def report():
        with detector:
            time.sleep(0.001)
        detector.report(total_flops=1e9, log_interval=1)
        states.append(detector.enabled)

    def on_rank_0(path, data=None):
        text = ask(detector.controller_address, path, data) if rank == 0 else None
        dist.barrier()
        return text

    for _ in range(10):
        on_rank_0("/")
    report()  # nothing was asked for
    on_rank_0("/on", b"")
    states.append(detector.enabled)  # before the next report
    report()
    report()
    metrics, kept = on_rank_0("/metrics"), on_rank_0("/report")
    on_rank_0("/toggle", b"")
    on_rank_0("/toggle", b"")
    report()
    on_rank_0("/off", b"")
    report()
    reports = json.loads(on_rank_0("/status") or '{"reports": null}')["reports"]
    detector.close()
    return states, metrics, kept, reports


def test_requests_switch_all_ranks_at_the_end_of_the_next_report():
    (states, metrics, report, reports), (other_states, *nothing) = run_ranks(switched_over_http, 2)
    assert states == [False, False, True, True, True, False]
    assert other_states == states
    assert nothing == [None, None, None]
    seconds = [line for line in metrics.splitlines() if "_iteration_seconds{" in line]
    assert [f'rank="{rank}"' in line for rank, line in enumerate(seconds)] == [True, True]
    assert all(float(line.rsplit(" ", 1)[1]) >= 0.001 for line in seconds)
    assert "mcore_straggler_enabled 1\n" in metrics
    assert json.loads(report)["world_size"] == 2
    assert reports >= 2
