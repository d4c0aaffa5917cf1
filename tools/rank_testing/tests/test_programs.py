"""Programs of several ranks: environment, output and exit codes as under torchrun."""

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from rank_testing import RankFailure
from rank_testing.programs import run_program


def joining(arguments: list[str]) -> int:
    dist.init_process_group("gloo")
    total = [None] * dist.get_world_size()
    dist.all_gather_object(total, os.environ["RANK"])
    print(arguments, total, Path.cwd().name, os.environ["LOCAL_WORLD_SIZE"], flush=True)
    dist.destroy_process_group()
    return 0


def leaving(arguments: list[str]) -> int:
    warnings.warn("old", DeprecationWarning, stacklevel=1)
    print("refused", file=sys.stderr)
    os._exit(2 + int(os.environ["RANK"]))


def failing(arguments: list[str]) -> int:
    raise ValueError("not caught")


def test_ranks_join_a_group_and_share_their_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run_program(joining, ["--x", "1"], 2)
    assert ended.exit_codes == [0, 0]
    assert ended.stdout == f"['--x', '1'] ['0', '1'] {tmp_path.name} 2\n" * 2
    assert ended.stderr == ""


def test_exit_codes_are_those_of_the_ranks() -> None:
    ended = run_program(leaving, [], 2)
    assert ended.exit_codes == [2, 3]
    assert ended.stderr == "refused\n" * 2


def test_an_error_that_nobody_catches_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="ValueError: not caught"):
        run_program(failing, [], 1)
