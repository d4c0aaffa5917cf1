"""What importing the package costs, and that its lazy names resolve."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mcore.parallel.checkpoint

LOOK = """
import sys
import mcore.parallel.checkpoint
heavy = ("torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.fsdp")
print([name for name in heavy if name in sys.modules])
mcore.parallel.checkpoint.ShardedSavePlanner
print("torch.distributed.checkpoint" in sys.modules)
"""


def test_torchs_checkpoints_are_imported_at_first_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "[]\nTrue\n"


@pytest.mark.parametrize("name", sorted(mcore.parallel.checkpoint.__all__))
def test_every_name_is_there(name: str) -> None:
    assert getattr(mcore.parallel.checkpoint, name) is not None


def test_names_are_unique_and_unknown_ones_an_error() -> None:
    names = mcore.parallel.checkpoint.__all__
    assert len(set(names)) == len(names)
    with pytest.raises(AttributeError, match="no attribute 'ShardedPlan'"):
        mcore.parallel.checkpoint.ShardedPlan  # noqa: B018 - the look-up is the test
