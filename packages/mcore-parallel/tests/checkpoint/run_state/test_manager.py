"""A folder of checkpoints: which are written, kept and loaded, and what ranks hear of damage."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mcore.parallel.checkpoint import (
    CheckpointingException,
    CheckpointManager,
    DamagedCheckpointError,
    load_training_state,
    save_training_state,
)
from mcore.parallel.checkpoint.files.directory import incomplete_sibling
from rank_testing import preload, run_ranks
from rank_testing.scripts import run_script

preload("torch.distributed.checkpoint")


def linear(value: float = 0.0) -> torch.nn.Linear:
    model = torch.nn.Linear(2, 1)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def flip_a_byte(checkpoint: Path) -> None:
    """Change the last element of a tensor in the file that holds most."""
    file = max(checkpoint.glob("*.distcp"), key=lambda one: one.stat().st_size)
    content = bytearray(file.read_bytes())
    at = content.rindex(torch.tensor(8.0, device="cpu").numpy().tobytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.usefixtures("on_each_device")
def test_every_and_keep_say_what_is_written_and_stays(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=2, every=3, protect=["step_3"])
    assert manager.load_latest(linear()) is None
    (tmp_path / "step_1").mkdir()  # no checkpoint, so that nobody counts or deletes it
    assert [step for step in range(1, 12) if manager.save(linear(), step=step)] == [3, 6, 9]
    assert manager.save(linear(), step=11, force=True)
    assert not manager.save(linear(), step=11, force=True)
    assert names(tmp_path) == ["step_1", "step_11", "step_3", "step_9"]
    assert manager.save(linear(), step=9)  # a run that went back keeps what it left
    assert names(tmp_path) == ["after_step_3", "step_1", "step_3", "step_9"]
    assert names(tmp_path / "after_step_3") == ["step_11", "step_9"]
    for options in ({"keep": 0}, {"every": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            CheckpointManager(tmp_path, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("protect", ["step_1", b"step_1"])
def test_one_protected_name_needs_no_list(protect: Any, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1, protect=protect)
    assert all(manager.save(linear(), step=step) for step in (1, 2, 3))
    assert names(tmp_path) == ["step_1", "step_3"]


ANOTHER_RUN = """
import sys, torch
from mcore.parallel.checkpoint import CheckpointManager
assert CheckpointManager(sys.argv[1]).save(torch.nn.Linear(2, 1), step=3)
"""


class WrittenWhileAnotherRunSaves:
    """A value whose pickling, in the middle of a save, waits for the save of another process."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, ""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        [self.unfinished] = [name for name in names(self.root) if name.startswith(".step_2.")]
        done = run_script(ANOTHER_RUN, str(self.root))
        done.check_returncode()
        self.log = done.stderr
        return dict, ()


def test_the_first_save_of_another_process_leaves_an_unfinished_save(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(linear(), step=1)
    value = WrittenWhileAnotherRunSaves(tmp_path)
    assert manager.save(linear(2.0), step=2, weights_only=False, value=value)
    assert f"{tmp_path / value.unfinished} is not deleted: a process is still writing it" in (
        value.log
    )
    assert names(tmp_path) == ["step_1", "step_2", "step_3"]
    model = linear()
    loaded = manager.load(model, step=2, weights_only=False)
    assert loaded == {"step": 2, "value": {}}
    assert model.weight.tolist() == [[2.0, 2.0]]


@pytest.mark.usefixtures("on_each_device")
def test_a_damaged_checkpoint_of_a_later_step_costs_no_good_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step, value in ((2, 1.0), (4, 8.0), (6, 8.0)):
        manager.save(linear(value), step=step)
    flip_a_byte(tmp_path / "step_4")
    flip_a_byte(tmp_path / "step_6")
    manager = CheckpointManager(tmp_path, keep=1)
    assert manager.load_latest(linear()) == {"step": 2}
    assert manager.save(linear(3.0), step=3)
    assert names(tmp_path) == ["step_3", "step_4", "step_6"]
    manager = CheckpointManager(tmp_path, keep=2)
    assert manager.load_latest(linear()) == {"step": 3}
    assert manager.save(linear(5.0), step=5)
    assert names(tmp_path) == ["step_3", "step_4", "step_5", "step_6"]
    assert manager.save(linear(7.0), step=7)  # damaged ones are no reason to delete step 5
    assert names(tmp_path) == ["step_4", "step_5", "step_6", "step_7"]


def test_a_run_that_went_back_never_meets_the_future_that_it_left(tmp_path: Path) -> None:
    for step in (2, 8, 9):
        save_training_state(tmp_path / f"step_{step}", linear(float(step)), step=step)
    # Also if it went back by a plain load, and the first save has the step of an old one.
    manager = CheckpointManager(tmp_path, keep=2)
    load_training_state(tmp_path / "step_2", linear())
    assert manager.save(linear(1.0), step=8)
    assert names(tmp_path) == ["after_step_2", "step_2", "step_8"]
    assert names(tmp_path / "after_step_2") == ["step_8", "step_9"]
    model = linear()
    assert load_training_state(tmp_path / "after_step_2" / "step_9", model) == {"step": 9}
    assert model.bias.item() == 9.0
    manager = CheckpointManager(tmp_path, keep=1)
    assert manager.load_latest(model) == {"step": 8}
    assert model.bias.item() == 1.0
    assert manager.save(linear(), step=9)  # after a resume nothing is set aside
    assert names(tmp_path) == ["after_step_2", "step_9"]


def test_a_sparser_save_after_going_back_leaves_no_future_behind(tmp_path: Path) -> None:
    for step in (1, 8, 9):
        save_training_state(tmp_path / f"step_{step}", linear(float(step)), step=step)
    manager = CheckpointManager(tmp_path, every=10, keep=2)
    manager.load(linear(), step=1)
    assert manager.save(linear(-1.0), step=10)  # later than all that it left
    assert names(tmp_path) == ["after_step_1", "step_1", "step_10"]
    assert names(tmp_path / "after_step_1") == ["step_8", "step_9"]


def test_a_manager_whose_run_goes_back_by_a_plain_load_continues(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(linear(float(step)), step=step)
    load_training_state(tmp_path / "step_1", linear())
    assert [manager.save(linear(-1.0), step=step) for step in (2, 3)] == [True, True]
    assert names(tmp_path / "after_step_1") == ["step_2", "step_3"]
    model = linear()
    assert manager.load_latest(model) == {"step": 3}
    assert model.bias.item() == -1.0


@pytest.mark.usefixtures("on_each_device")
def test_going_back_to_a_step(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every=10)
    model = linear()
    for step in (10, 20, 30, 40):
        manager.save(linear(float(step)), step=step)
    assert manager.load(model, step=20) == {"step": 20}
    assert model.bias.item() == 20.0
    assert not manager.save(model, step=20)  # it is there
    assert names(tmp_path) == [
        "step_10",
        "step_20",
        "step_30",
        "step_40",
    ]  # to look changes nothing
    assert [manager.save(linear(-1.0), step=step) for step in (30, 40)] == [True, True]
    assert names(tmp_path / "after_step_20") == ["step_30", "step_40"]
    assert CheckpointManager(tmp_path).load_latest(model) == {"step": 40}
    assert model.bias.item() == -1.0
    branch = manager.rollback(20)
    assert branch == tmp_path / "after_step_20-2"
    assert names(branch) == ["step_30", "step_40"]
    assert manager.load_latest(model) == {"step": 20}
    assert manager.rollback(20, "again") is None
    with pytest.raises(CheckpointingException, match="step_30 is no complete checkpoint"):
        manager.rollback(30)
    for name in ("step_7", "a/b", "after_step_20"):
        with pytest.raises(CheckpointingException, match=r"cannot have the name|already exists"):
            manager.rollback(10, name)
    assert manager.rollback(10, "spike") == tmp_path / "spike"
    assert names(tmp_path) == ["after_step_20", "after_step_20-2", "spike", "step_10"]
    with pytest.raises(DamagedCheckpointError, match="step_20"):
        manager.load(model, step=20)


def test_a_rollback_that_is_killed_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    manager = CheckpointManager(root)
    for step in (1, 2, 3, 4):
        manager.save(linear(), step=step)
    copies = tmp_path / "copy"
    shutil.copytree(root, copies)
    real = Path.rename
    for killed_at in range(6):
        shutil.rmtree(root)
        shutil.copytree(copies, root)
        count = [0]

        def rename(path: Path, target: Any, at: int = killed_at, count: list[int] = count) -> Any:
            count[0] += 1
            if count[0] > at:
                raise KeyboardInterrupt
            return real(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            try:
                CheckpointManager(root).rollback(1)
                is_complete = True
            except KeyboardInterrupt:
                is_complete = False
        assert is_complete == (killed_at >= 4)
        # Before the branch has its name nothing has changed, afterwards all of it has.
        expected = 4 if killed_at == 0 else 1
        assert CheckpointManager(root).load_latest(linear()) == {"step": expected}
        if expected == 1:
            assert names(root / "after_step_1") == ["step_2", "step_3", "step_4"]


def go_back(root: str) -> tuple[Any, ...]:
    manager = CheckpointManager(root)
    for step in (1, 2, 3):
        manager.save(linear(), step=step)
    branch = manager.rollback(1)
    errors = []
    for step in (3, 7):
        with pytest.raises(CheckpointingException) as caught:
            manager.rollback(step)
        errors.append(str(caught.value))
    return branch, errors, manager.load_latest(linear()), manager.save(linear(), step=2)


def test_all_ranks_go_back_together(tmp_path: Path) -> None:
    first, second = run_ranks(go_back, 2, str(tmp_path))
    assert first == second
    assert first[0] == tmp_path / "after_step_1"
    assert first[2:] == ({"step": 1}, True)
    assert names(tmp_path) == ["after_step_1", "step_1", "step_2"]


@pytest.mark.parametrize("step", [-2, 2.0, "2", None, torch.tensor(2.0)])
def test_a_step_that_would_never_be_found_again_is_refused(tmp_path: Path, step: Any) -> None:
    manager = CheckpointManager(tmp_path / "run")
    with pytest.raises(
        (TypeError, ValueError), match=r"step must be a(t least 0| whole number), got"
    ):
        manager.save(linear(), step=step)
    assert not (tmp_path / "run").exists()
    for options in ({"keep": 1.5}, {"every": "2"}):
        with pytest.raises(TypeError, match="must be a whole number, got"):
            CheckpointManager(tmp_path, **options)  # type: ignore[arg-type]


def test_what_a_killed_save_left_is_deleted_by_the_first_save(tmp_path: Path) -> None:
    left = incomplete_sibling(tmp_path / "step_2", 1)
    save_training_state(tmp_path / "step_1", linear(), step=1)
    (tmp_path / "step_1").rename(left)
    manager = CheckpointManager(tmp_path)
    assert manager.load_latest(linear()) is None
    assert names(tmp_path) == [left.name]
    manager.save(linear(), step=3)
    assert names(tmp_path) == ["step_3"]


@pytest.mark.usefixtures("on_each_device")
def test_a_background_save_that_fails_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, start = threading.Event(), threading.Thread.run

    def run(thread: threading.Thread) -> None:
        if thread.name.startswith("save-"):
            gate.wait()
        start(thread)

    monkeypatch.setattr(threading.Thread, "run", run)
    model = linear(1.0)
    with CheckpointManager(tmp_path, keep=1, async_=True) as manager:
        assert manager.save(model, step=1)
        (tmp_path / "step_1" / "in the way").mkdir(parents=True)
        gate.set()
        with pytest.raises(
            CheckpointingException, match=r"cannot save .*step_1 was made by another"
        ):
            manager.save(model, step=2)
        manager.save(model, step=2)
        manager.save(model, step=3)
        torch.nn.init.zeros_(model.weight)
    assert names(tmp_path) == ["step_1", "step_3"]
    load_training_state(tmp_path / "step_3", model)
    assert model.weight.tolist() == [[1.0, 1.0]]


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def text_of(call: Any) -> str:
    try:
        call()
    except CheckpointingException as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Stage(torch.nn.Module):
    """A stage of a pipeline, whose names are those of the whole model."""

    def __init__(self, *numbers: int, value: float = 0.0) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({str(number): linear(value) for number in numbers})


def stages(rank: int) -> tuple[list[Stage], torch.optim.Optimizer]:
    """Two chunks of a pipeline of two ranks, with options that differ over layers."""
    chunks = [Stage(rank, value=rank + 1.0), Stage(rank + 2, value=rank + 3.0)]
    groups: list[dict[str, Any]] = [{"params": list(chunks[0].parameters()), "lr": 0.1}]
    groups.append({"params": list(chunks[1].parameters()), "lr": [0.1, 0.3][rank]})
    optimizer = torch.optim.SGD(groups, momentum=0.5)
    sum(value.sum() for chunk in chunks for value in chunk.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return chunks, optimizer


def on_two_ranks(folder: str) -> dict[str, Any]:
    rank, root, heard = dist.get_rank(), Path(folder), Heard()
    logging.getLogger("mcore.parallel.checkpoint").addHandler(heard)
    found: dict[str, Any] = {}

    model = DistributedDataParallel(linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = CheckpointManager(root / "run", keep=3, every=2, async_=True)
    for step in range(1, 9):
        torch.nn.init.constant_(model.module.weight, float(step))
        manager.save(model, optimizer, step=step, place=rank)
    manager.wait()
    if rank == 0:
        flip_a_byte(root / "run" / "step_8")
        next((root / "run" / "step_6").glob("*.distcp")).unlink()
    dist.barrier()
    state = manager.load_latest(model, optimizer)
    found["went on"] = [state, model.module.weight.tolist()]
    found["heard"], heard.texts = heard.texts, []
    found["misfit"] = text_of(lambda: manager.load_latest(torch.nn.Linear(2, 3)))
    found["not heard"] = [text for text in heard.texts if "step_4" in text]
    with manager:
        manager.save(model, optimizer, step=6)
    if rank == 0:
        for name in ("step_4", "step_6", "step_8"):
            (root / "run" / name / "manifest.json").unlink(missing_ok=True)
    dist.barrier()
    found["all damaged"] = text_of(lambda: manager.load_latest(model, optimizer))

    with torch.no_grad():
        model.module.weight[0, rank] += 1
    found["diverged"] = text_of(lambda: save_training_state(root / "bad", model, step=1))
    found["names"] = text_of(
        lambda: save_training_state(root / "bad", linear(), step=1, **{"ab"[rank]: 1})
    )
    chunks, optimizer = stages(rank)
    save_training_state(root / "pipeline", chunks, optimizer, step=1, place=rank)
    return found


def check_the_whole_pipeline(path: Path) -> None:
    """One process takes over what two ranks held, with the options of each layer."""
    model = Stage(0, 1, 2, 3)
    groups = [list(model.layers[number].parameters()) for number in "0123"]
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=9.0, momentum=0.5)
    text = text_of(lambda: load_training_state(path, model, optimizer, place=0))
    assert "'place' was saved for each of 2 ranks, and 1 load" in text
    with pytest.warns(UserWarning, match="place/shard_0_2"):
        assert load_training_state(path, model, optimizer) == {"step": 1}
    for number, (value, rate) in enumerate([(1, 0.1), (2, 0.1), (3, 0.1), (4, 0.3)]):
        [weight, bias] = groups[number]
        assert torch.equal(weight, torch.full((1, 2), value - rate))
        assert optimizer.param_groups[number]["lr"] == rate
        assert torch.equal(optimizer.state[bias]["momentum_buffer"], torch.ones(1))


def test_two_ranks_go_back_past_damage_and_raise_alike(tmp_path: Path) -> None:
    results = run_ranks(on_two_ranks, 2, str(tmp_path))
    run = tmp_path / "run"
    for rank, found in enumerate(results):
        assert found["went on"] == [{"place": rank, "step": 4}, [[4.0, 4.0]]]
        assert len(found["heard"]) == 2
        assert f"going back to the checkpoint before {run / 'step_8'}" in found["heard"][0]
        assert "'model.weight' has changed" in found["heard"][0]
        assert f"going back to the checkpoint before {run / 'step_6'}" in found["heard"][1]
        assert found["misfit"].startswith("CheckpointingException: cannot load")
        assert "key 'model.weight': the checkpoint has global shape (1, 2)" in found["misfit"]
        assert found["not heard"] == []
        assert "every checkpoint in" in found["all damaged"]
        assert found["all damaged"].startswith("DamagedCheckpointError")
        assert "'model.weight', offset (0, 0) shape (1, 2): rank 0 and rank 1" in found["diverged"]
        assert "names of values: ['a'] on rank 0; ['b'] on rank 1. Pass the same" in found["names"]
    assert {key: results[0][key] for key in ("heard", "misfit", "all damaged", "diverged")} == {
        key: results[1][key] for key in ("heard", "misfit", "all damaged", "diverged")
    }
    assert names(tmp_path) == ["pipeline", "run"]
    check_the_whole_pipeline(tmp_path / "pipeline")
    assert names(run) == ["step_4", "step_6", "step_6.damaged", "step_8"]


def save_while_the_storage_does_not_list(folder: str) -> tuple[list[bool], list[str]]:
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    class Silent(LocalFileSystem):  # type: ignore[misc]
        """A storage in a folder, whose root may not answer."""

        protocol = "silent"
        silent = False

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**{**kwargs, "auto_mkdir": True})

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(super()._strip_protocol(path.removeprefix("silent://")))

        def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
            if self.silent and path.rstrip("/").endswith("/run"):
                raise TimeoutError("no answer")
            return super().ls(path, detail=detail, **kwargs)

    fsspec.register_implementation("silent", Silent)
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore.parallel.checkpoint").addHandler(handler)
    model = torch.nn.Linear(2, 1)
    manager = CheckpointManager(f"silent://{folder}/run", keep=1)
    saved = [manager.save(model, step=1)]
    Silent.silent = True
    saved.append(manager.save(model, step=2))
    return saved, messages


def test_old_checkpoints_that_cannot_be_listed_fail_no_save(tmp_path: Path) -> None:
    first, second = run_ranks(save_while_the_storage_does_not_list, 2, str(tmp_path))
    assert first[0] == second[0] == [True, True]
    assert second[1] == []
    assert len(first[1]) == 1
    assert "were not looked at" in first[1][0]
    assert "no answer" in first[1][0]
    for step in (1, 2):
        assert (tmp_path / "run" / f"step_{step}" / "manifest.json").is_file()
