"""The training logs of Megatron-Bridge and of mcore write the same metrics and lines."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("megatron.bridge") is None,
        reason="megatron-bridge is not installed: hatch run peers:bridge installs it",
    ),
]
# The differences that the page states: Bridge divides `window - 1` steps by the time of `window`
# steps, has no memory without CUDA, and omits averages that are not positive.
RATE = re.compile(r"throughput/.*_per_sec")
SIZES = {"batches_per_sec": 1, "samples_per_sec": 8, "tokens_per_sec": 8 << 14}
HOST_MEMORY = {"memory/mem-host-rss-gigabytes", "memory/mem-max-host-rss-gigabytes"}
NOT_POSITIVE = re.compile(r" (?:lm loss: NAN|z loss: -[\d.E+-]+) \|")


def run(*arguments: str) -> str:
    """The output of a program that imports Bridge, which changes torch."""
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, text=True, capture_output=True, timeout=600, cwd=HERE)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of ``log_steps.py``."""
    folder = tmp_path_factory.mktemp("logs")
    ratio = run("log_steps.py", str(folder))
    sys.stdout.write(f"training_log: {ratio} times the CPU time of Megatron-Bridge's\n")
    return folder


def read_metrics(folder: Path) -> dict[str, dict[int, str]]:
    """The value of each step of each tag. Texts, since NaN is not equal to itself."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: {each.step: repr(each.value) for each in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def test_trackers_get_the_same_metrics(folder: Path) -> None:
    theirs, ours = read_metrics(folder / "theirs"), read_metrics(folder / "ours")
    assert ours.keys() - HOST_MEMORY == theirs.keys()
    assert ours.keys() > HOST_MEMORY
    assert len(theirs) == 40
    assert "nan" in theirs["lm loss"].values()
    rates = {tag for tag in theirs if RATE.fullmatch(tag)}
    assert len(rates) == 6
    assert [tag for tag in theirs if tag not in rates and ours[tag] != theirs[tag]] == []
    for tag in rates:
        expected = 2.0 * SIZES[tag.split("/")[-1]]
        assert ours[tag] == dict.fromkeys(range(4, 13), repr(expected))
        assert theirs[tag] == ours[tag] | dict.fromkeys(range(5, 13), repr(expected * 3 / 4))


def test_the_console_has_the_same_lines(folder: Path) -> None:
    theirs, ours = (
        [
            re.sub(r"^ \[[^]]*\]", "", line)
            for line in (folder / log / "console.txt").read_text().splitlines()
            if re.match(r" \[\d|Step Time", line)
        ]
        for log in ("theirs", "ours")
    )
    assert len(theirs) == 8
    assert "(ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 1.7 | learning rate: 3.3" in ours[1]
    assert [NOT_POSITIVE.sub("", line) for line in ours] == theirs
    assert [len(NOT_POSITIVE.findall(line)) for line in ours[1::2]] == [0, 2, 1, 0]


def test_rows_of_the_page_hold_for_bridge() -> None:
    code = "import bridge_on_cpu, test_migrate\nprint(test_migrate.compare_rows('Bridge'))"
    assert run("-c", code) == "(25, [])"
