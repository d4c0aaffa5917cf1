"""Files of torch.save become checkpoints and come back, against the file that torch loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore.parallel.checkpoint import (
    CheckpointingException,
    from_torch,
    load_training_state,
    save_sharded_state_dict,
    to_torch,
)
from mcore.parallel.checkpoint.__main__ import main
from rank_testing import run_ranks


def make_state() -> dict[str, Any]:
    torch.manual_seed(0)
    matrix = torch.randn(1500, 1400)
    return {
        "model": {"weight": matrix, "bias": torch.randn(1500)},
        "turned": torch.arange(6).view(2, 3).t(),
        "tied": [matrix[:2], {"half": torch.ones(3, dtype=torch.bfloat16)}],
        "empty": torch.zeros(0, 3),
        "step": 7,
        "none": None,
    }


def write(folder: str) -> str:
    """Write the file of a rank, which only the first rank may have."""
    rank = dist.get_rank()
    from_torch(f"{folder}/old.pt", f"{folder}/step_7")
    with pytest.raises(CheckpointingException, match=r"rank 1: .*one\.pt cannot be read") as caught:
        from_torch(f"{folder}/{'old' if rank == 0 else 'one'}.pt", f"{folder}/step_8")
    return str(caught.value)


@pytest.mark.parametrize("is_zip", [True, False])
def test_two_ranks_write_a_file_that_comes_back(is_zip: bool, tmp_path: Path) -> None:
    state, saved = make_state(), tmp_path / "step_7"
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=is_zip)
    first, second = run_ranks(write, 2, str(tmp_path))
    assert first == second
    assert sorted(os.listdir(tmp_path)) == ["old.pt", "step_7"]
    largest = max(file.stat().st_size for file in saved.iterdir())
    assert largest < 0.6 * state["model"]["weight"].nbytes  # each has written a part

    keys = to_torch(saved, tmp_path / "new.pt")
    assert keys == ["empty", "model.bias", "model.weight", "none", "step", "tied.0", "tied.1.half",
                    "turned"]  # fmt: skip
    torch.testing.assert_close(torch.load(tmp_path / "new.pt"), state, rtol=0, atol=0)
    assert to_torch(saved, tmp_path / "part.pt", keys=["model.*"]) == keys[1:3]
    assert list(torch.load(tmp_path / "part.pt")) == ["model"]
    with pytest.raises(CheckpointingException, match="already exists"):
        to_torch(saved, tmp_path / "part.pt")

    model = torch.nn.Linear(1400, 1500)
    load_training_state(saved, model, unexpected="ignore")
    assert torch.equal(model.weight, state["model"]["weight"])


def test_a_file_that_appears_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_sharded_state_dict({"step": 1}, tmp_path / "step_1")
    real = torch.save

    def save(*given: Any) -> None:
        real(*given)
        (tmp_path / "new.pt").write_bytes(b"of another program")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(CheckpointingException, match="already exists"):
        to_torch(tmp_path / "step_1", tmp_path / "new.pt")
    assert (tmp_path / "new.pt").read_bytes() == b"of another program"
    assert sorted(os.listdir(tmp_path)) == ["new.pt", "step_1"]


def test_files_without_a_dict_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save([1], tmp_path / "list.pt")
    torch.save({"where": Path("/data")}, tmp_path / "path.pt")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    for name, problem in {
        "list": "list.pt has a list, not a dict",
        "path": "pathlib.PosixPath",
        "junk": "junk.pt cannot be read as a file of torch.save",
        "none": "No such file or directory",
    }.items():
        assert main(["from-torch", str(tmp_path / f"{name}.pt"), str(tmp_path / "new")]) == 2
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    torch.save({"step": 1}, tmp_path / "good.pt")
    assert main(["from-torch", str(tmp_path / "good.pt"), str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/new\n"


def test_a_file_may_have_the_longest_name_of_a_file(tmp_path: Path) -> None:
    save_sharded_state_dict({"step": 1}, tmp_path / "step_1")
    longest = os.pathconf(tmp_path, "PC_NAME_MAX")
    to_torch(tmp_path / "step_1", tmp_path / ("x" * longest))
    assert torch.load(tmp_path / ("x" * longest)) == {"step": 1}
    with pytest.raises(CheckpointingException, match="File name too long"):
        to_torch(tmp_path / "step_1", tmp_path / ("y" * (longest + 1)))
    assert sorted(os.listdir(tmp_path)) == ["step_1", "x" * longest]
