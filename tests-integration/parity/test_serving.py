"""Megatron's training and saves are bit for bit the same with mcore's names in its modules."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mcore_migrate.__main__ import main as migrate

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
SCRIPT = HERE / "tree/pretrain_gpt.py"
SERVED = ("-m", "mcore_megatron", "--report")


# Ranks, and the sizes of the tensor, pipeline and expert dimensions. The others are data-parallel.
JOBS = {
    "one rank": (1, 1, 1, 1),
    "tensor": (2, 2, 1, 1),
    "pipeline": (2, 1, 2, 1),
    "data": (2, 1, 1, 1),
    "experts": (2, 1, 1, 2),
}


def train(folder: Path, job: str, *command: str) -> tuple[str, float]:
    """Run the ranks of a job. Returns the output of rank 0, and the seconds of all steps."""
    ranks_of_job, *sizes = JOBS[job]
    options = [f"--{name}={size}" for name, size in zip(("tp", "pp", "ep"), sizes, strict=True)]
    paths = [str(HERE), *sys.path]
    given = {**os.environ, "WORLD_SIZE": str(ranks_of_job), "PYTHONPATH": os.pathsep.join(paths)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *command, *options, f"--save={folder}"],
            env={**given, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(ranks_of_job)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
    return outputs[0], float(re.findall(r"^seconds: (.*)$", outputs[-1], re.MULTILINE)[0])


def read_checkpoint(folder: Path) -> tuple[set[str], dict[str, torch.Tensor]]:
    """All keys of a checkpoint, and its tensors."""
    path = folder / "checkpoint"
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in saved.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=FileSystemReader(path), no_dist=True)
    return set(saved), tensors


def assert_equal_jobs(folder: Path, expected: Path, job: str) -> None:
    for rank in range(JOBS[job][0]):
        losses, weights = torch.load(folder / f"rank{rank}.pt")
        their_losses, their_weights = torch.load(expected / f"rank{rank}.pt")
        assert losses == their_losses
        assert len({step[-1] for step in losses}) == len(losses)  # it trains
        assert_equal_tensors(weights, their_weights)
    (keys, tensors), (their_keys, their_tensors) = map(read_checkpoint, (folder, expected))
    assert keys == their_keys
    assert_equal_tensors(tensors, their_tensors)


def assert_equal_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert len(found) > 10
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


ENTRIES = "unwrap_model([model])[0].sharded_state_dict()"
CONVERT = "from mcore.modules import to_megatron_sharded_state_dict as convert"


@pytest.mark.parametrize("job", JOBS)
def test_losses_weights_and_checkpoints_are_megatrons(job: str, tmp_path: Path) -> None:
    _, their_seconds = train(tmp_path / "theirs", job, str(SCRIPT))
    output, seconds = train(tmp_path / "served", job, *SERVED, str(SCRIPT))
    assert "local_multi_tensor_scale: Megatron's, it multiplies in float32" in output
    assert int(output.splitlines()[-1].partition(" names are mcore's")[0]) > 85
    assert_equal_jobs(tmp_path / "served", tmp_path / "theirs", job)
    moved = shutil.copytree(SCRIPT.parent, tmp_path / "tree") / SCRIPT.name
    converted = SCRIPT.read_text().replace(ENTRIES, f"convert({ENTRIES})")
    moved.write_text(converted.replace("\nSTEPS", f"\n{CONVERT}\n\nSTEPS", 1))
    assert migrate(["--check", str(moved.parent)]) == 1
    assert migrate([str(moved.parent)]) == 0
    assert "megatron.core.utils" not in moved.read_text()
    _, last_seconds = train(tmp_path / "rewritten", job, str(moved))
    assert_equal_jobs(tmp_path / "rewritten", tmp_path / "theirs", job)
    for name, spent in {"served": seconds, "rewritten": last_seconds}.items():
        sys.stdout.write(f"{job}, {name}: {spent / their_seconds:.2f} times Megatron's time\n")


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments, "-c", f"import megatron_on_cpu\n{code}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}, text=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    return done.stdout + done.stderr.splitlines()[-1] if done.returncode else done.stdout


def test_names_are_chosen_and_put_back() -> None:
    printed = run(
        "import mcore_megatron, json\n"
        "names = ['divide', 'StragglerDetector']\n"
        "mcore_megatron.install(only=names, exclude=names[1:])\n"
        "from megatron.core import utils\n"
        "served = utils.divide.__module__, utils.StragglerDetector.__module__\n"
        "reasons = {row.name: row.reason for row in mcore_megatron.report()}\n"
        "mcore_megatron.uninstall()\n"
        "print(json.dumps([served, reasons['StragglerDetector'], utils.divide.__module__]))\n"
    )
    served, reason, after = json.loads(printed.splitlines()[-1])
    assert served[0].startswith("mcore.tensor")
    assert served[1] == after == "megatron.core.utils"
    assert reason == "the options leave it"


def test_a_late_import_and_an_unknown_name_are_errors() -> None:
    late = run("import megatron.core.utils\nimport mcore_megatron\n")
    assert "RuntimeError: megatron.core" in late
    assert "was imported before" in late
    unknown = run("import mcore_megatron\nmcore_megatron.install(only=['devide'])\n")
    assert "ValueError: not on the migration page: devide" in unknown
