"""That nothing of a campaign outlives it, and that it knows when the machine was late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults.inside import send
from faults.machine import Lateness
from rank_testing.tests.living import is_living, wait_until

TOOLS = str(Path(__file__).parents[2])
# Starts, like MLflow, a server in a session of its own whose worker has one too.
CAMPAIGN = """
import subprocess, sys, time
from faults.machine import end_all_with_this_process
end_all_with_this_process()
worker = "import time; time.sleep(600)"
server = f'''
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {worker!r}], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", server], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_campaign_has_started_ends_when_it_is_killed(number: int) -> None:
    campaign = subprocess.Popen(
        [sys.executable, "-c", CAMPAIGN], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": TOOLS},
    )  # fmt: skip
    try:
        assert campaign.stdout is not None
        started = [int(campaign.stdout.readline()) for _ in range(2)]
        assert all(map(is_living, started))
        campaign.send_signal(number)
        assert campaign.wait(600) == (-number if number == signal.SIGKILL else 128 + number)
        assert wait_until(lambda: not any(map(is_living, started)), 600)
    finally:
        campaign.kill()


def test_a_process_that_had_no_core_knows_it() -> None:
    began, lateness = time.time(), Lateness()
    send("STOP+CONT", 0, Path())
    assert wait_until(lambda: lateness.between(began, time.time()) > 0.8, 600)
    assert lateness.between(began - 100, began) == 0.0


def test_a_stopped_rank_continues_although_its_launcher_ends_its_session() -> None:
    code = "import signal, faults.inside as f; signal.signal(15, print); f.send('STOP+CONT', 0, 0)"
    env = {**os.environ, "PYTHONPATH": TOOLS}
    rank = subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True)
    try:
        assert os.WIFSTOPPED(os.waitpid(rank.pid, os.WUNTRACED)[1])
        os.killpg(rank.pid, signal.SIGTERM)
        assert rank.wait(600) == 0
    finally:
        rank.kill()
