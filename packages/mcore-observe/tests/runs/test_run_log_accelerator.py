"""The log of a run on the stand-in accelerator: the host waits only where it logs."""

import contextlib
import json
import re

import torch

from mcore.observe import RunLog
from standin import no_host_waits


def test_losses_of_a_device_are_waited_for_only_by_steps_that_log(accelerator, tmp_path, capsys):
    with RunLog(tmp_path, batch_size=4, log_every=3) as log:
        for step in range(1, 7):
            loss = torch.full((), float(step), device=accelerator)
            norm = torch.full((), 2.0 * step, device=accelerator)
            with contextlib.nullcontext() if step % 3 == 0 else no_host_waits():
                log.log_step({"loss": loss}, grad_norm=norm, lr=0.5)
            loss.fill_(torch.nan)  # the loop may write its tensors again at once
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [3.0, 6.0]
    assert [line["grad-norm"] for line in lines] == [6.0, 12.0]
    averages = re.findall(r" \| loss: (\S+) \|", capsys.readouterr().out)
    assert list(map(float, averages)) == [2.0, 5.0]
