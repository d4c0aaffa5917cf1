"""Trainers of transformers, Lightning and torchtitan log their runs: see ``adapter_programs``."""

import csv
import importlib
import json
import sys
from pathlib import Path

import pytest

from mcore.observe.runs import Run
from rank_testing import free_port
from rank_testing.scripts import run_script
from standin.guard import find_problem

pytestmark = [
    pytest.mark.xdist_group("adapters"),  # one worker has the programs run
    pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan needs Python 3.11"),
]

# The trainers import some libraries where they are installed, in seconds. No scenario uses them.
PROGRAM = """
import atexit, pathlib, sys
sys.modules.update(dict.fromkeys(("comet_ml", "datasets", "peft", "s3fs", "torchao")))
sys.path.insert(0, sys.argv[1])
atexit.register(lambda: adapter_programs.keep_libraries())  # first, so it is called last
import adapter_programs
sys.exit(adapter_programs.main(pathlib.Path.cwd(), sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder in which all programs have run."""
    folder = tmp_path_factory.mktemp("adapters")
    ports = [str(port) for port in {free_port() for _ in range(40)}][:13]
    here = str(Path(__file__).parent)
    done = run_script(PROGRAM, here, *ports, cwd=folder, timeout_s=600)
    assert done.returncode == 0, done.stderr
    return folder


def result(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def status(folder, name):
    return (folder / f"{name}.status").read_text().split()


def lines(folder, name):
    """The console lines of a process, each as its fields."""
    text = (folder / f"{name}.txt").read_text()
    return [
        dict(part.split(": ", 1) for part in line.split(" | ")[1:] if ": " in part)
        for line in text.splitlines()
        if line.startswith(" [")
    ]


def test_transformers_lines_have_the_trainers_losses_and_evaluations_their_steps(ran):
    history = result(ran, "hf_train.0")["history"]
    losses = {one["step"]: one["loss"] for one in history if "loss" in one}
    evaluations = {one["step"]: one["eval_loss"] for one in history if "eval_loss" in one}
    assert (list(losses), list(evaluations)) == ([2, 4], [3, 5])
    shown = lines(ran, "hf_train.0")[:2]
    assert [float(line["loss"]) for line in shown] == pytest.approx([*losses.values()], rel=1e-6)
    assert [int(line["consumed samples"]) for line in shown] == [8, 16]  # 2 steps of 2 batches of 2
    assert all(line["learning rate"] and "tokens/s" in line for line in shown)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(ran / "hf_run" / "tensorboard")).Reload()
    read = {name: {e.step: e.value for e in events.Scalars(name)} for name in ("loss", "eval_loss")}
    assert read["loss"] == pytest.approx(losses)
    assert read["eval_loss"] == pytest.approx(evaluations)


def test_transformers_continue_a_run_from_a_checkpoint_and_open_another_from_step_0(ran):
    found = result(ran, "hf_train.0")
    loss = {one["step"]: one["loss"] for one in found["resumed"] if "loss" in one}[4]
    run = Run.read(ran / "hf_run")
    assert run.curves["loss"] == {2: found["history"][0]["loss"], 4: loss}
    assert run.curves["samples vs steps"] == {2: 8, 4: 16}
    assert found["consumed"] == 20  # of 5 steps
    assert list(Run.read(ran / "hf_run-2").curves["loss"]) == [2, 4]
    assert status(ran, "hf_train") == ["FINISHED"]
    assert (found["params"], found["hooks"]) == (1e-3, 0)


def test_transformers_steps_keep_their_time_and_number_whatever_other_callbacks_do(ran):
    found = result(ran, "hf_odd.0")
    waited, early, late = lines(ran, "hf_odd.0")[:3], *found["losses"][1:]
    assert all(float(line["step ms"]) >= 50 for line in waited)
    assert early == {"4": 4.0, "5": 5.0}
    assert late == {"2": 2.0, "3": 3.0, "4": 4.0}
    # 3 steps of 2 x 2; the same and 2 of 2 x 4; the last two of 4 steps, and before them as many.
    # transformers 5.0 goes on with the batch of the checkpoint, whatever it is given.
    assert found["batches"] in ([4, 2], [2, 2])
    assert found["consumed"] == [12, 12 + 2 * 2 * found["batches"][0], 16]


def test_training_that_fails_is_told_to_the_sinks_even_if_the_program_goes_on(ran):
    assert status(ran, "hf_fails") == ["FAILED"]
    assert status(ran, "pl_failed") == status(ran, "pl_logger") == ["FAILED"]
    assert status(ran, "pl_stopped") == status(ran, "pl_killed") == ["KILLED"]


@pytest.mark.parametrize(("name", "samples"), [("hf_ranks", 136), ("pl_ranks", 68)])
def test_of_two_ranks_the_last_one_writes_and_the_slow_one_shows(ran, name, samples):
    first, last = (result(ran, f"{name}.{rank}") for rank in range(2))
    writer = 0 if name == "pl_ranks" else 1  # Lightning's loggers write on rank 0
    assert not lines(ran, f"{name}.{1 - writer}")
    assert (first, last)[1 - writer]["steps"] == {}
    (line,) = lines(ran, f"{name}.{writer}")
    assert int(line["consumed samples"]) == first["consumed"] == last["consumed"] == samples
    at_the_end = (first, last)[writer]["steps"]["17"]
    assert at_the_end["samples vs steps"] == samples
    mean = (first["losses"][-1] + last["losses"][-1]) / 2
    assert at_the_end["loss"] == pytest.approx(mean)
    assert first["ranks"] == last["ranks"]
    assert list(Run.read(ran / name).slow) == [16, 17]  # who was slow, of each report
    fast_ms, slow_ms = last["ranks"]["compute"]
    assert slow_ms >= 3.0  # it sleeps as long
    assert fast_ms > 0
    assert all(waited_ms > 0 for waited_ms in last["ranks"]["data"])
    assert status(ran, f"{name}.0") == status(ran, f"{name}.1") == ["FINISHED"]


def test_lightning_steps_are_the_optimizers_with_the_losses_of_their_batches(ran):
    found = result(ran, "pl_fit.0")
    losses, steps = found["losses"], found["steps"]
    assert len(losses) == 8  # two batches a step
    means = {str(i + 1): sum(losses[2 * i : 2 * i + 2]) / 2 for i in range(4)}
    assert {step: values["loss"] for step, values in steps.items()} == pytest.approx(means)
    rates = [values["learning-rate"] for values in steps.values()]
    assert rates == pytest.approx([0.1, 0.05, 0.025, 0.1])  # a second fit, a new scheduler
    assert [values["samples vs steps"] for values in steps.values()] == [4, 8, 12, 16]
    seconds = {str(i + 1): losses[2 * i + 1] for i in range(4)}
    assert {s: v["train_loss"] for s, v in steps.items()} == pytest.approx(seconds)
    assert [step for step, values in steps.items() if "val_loss" in values] == ["2"]
    assert [step for step, values in steps.items() if "test_loss" in values] == ["4"]
    assert found["params"] == {"rate": 0.1}


def test_lightning_continues_a_run_from_a_checkpoint(ran):
    found = result(ran, "pl_fit.0")
    assert [float(line["learning rate"]) for line in lines(ran, "pl_fit.0")[4:]] == [
        0.0125,
        0.00625,
    ]
    assert list(found["resumed"]) == ["4", "5"]
    assert Run.read(ran / "pl_run").curves["samples vs steps"] == {
        1: 4, 2: 8, 3: 12, 4: 16, 5: 20,
    }  # fmt: skip
    assert found["consumed"] == 20
    assert found["folders"] == ["checkpoints", "config.json", "metrics.jsonl"]
    assert Run.read(ran / "pl_run").settings["trainer.rate"] == "0.1"


@pytest.mark.parametrize(("name", "strategy"), [("pl_values", "auto"), ("pl_values_ranks", "ddp")])
def test_lightning_values_are_those_of_its_own_logger(ran, name, strategy):
    """Steps count from 1, except in a test after the end, which has the last step."""
    steps = {int(at): values for at, values in result(ran, f"{name}.0")["steps"].items()}
    found = set()
    with (ran / f"pl_values_{strategy}" / "csv" / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step")) + (row["test_loss"] == "")
            for key, text in row.items():
                if text and key != "epoch":
                    assert steps[step][key] == pytest.approx(float(text)), (step, key)
                    found.add(key)
    assert found >= {
        *("train_loss", "both_step", "both_epoch", "synced_epoch", "of rank 0", "by hand"),
        *("at the end", "val_loss", "test_loss", "lr-SGD"),
    }
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert [step for step in steps if "both_epoch" in steps[step]] == [3, 6]
    rates = [values["learning-rate"] for values in steps.values()]
    assert rates == [values["lr-SGD"] for values in steps.values()]
    if strategy == "ddp":
        assert result(ran, f"{name}.1")["steps"] == {}


def test_torchtitan_logs_what_its_processor_measures(ran):
    first, last = (result(ran, f"titan_log.{rank}") for rank in range(2))
    assert first["1"]["steps"] == first["5"]["steps"] == {}
    assert list(last["1"]["steps"]) == ["1", "2", "3", "4", "5", "6"]
    step = last["1"]["steps"]["4"]
    names = ("loss", "learning-rate", "grad-norm", "samples vs steps", "n_tokens_seen")
    assert [step[name] for name in names] == [10.25, 1e-3, 1.5, 16, 256]
    assert last["1"]["steps"]["6"]["validation_metrics/loss"] == 1.0
    assert step["again"] == 1.0  # of the same step: no further one
    odd = {int(s): (v.get("loss"), v.get("samples vs steps")) for s, v in last["1"]["odd"].items()}
    assert odd == {0: (None, None), 1: (1.0, 4), 2: (2.0, 8), 4: (4.0, 10), 3: (3.0, 12)}
    run = Run.read(ran / "titan")
    assert run.curves["validation_metrics/loss"] == {3: 3.0, 5: 5.0, 8: 1.0}
    sizes = {
        line["consumed samples"].strip(): line["global batch size"]
        for line in lines(ran, "titan_log.1")
    }
    assert {int(size) for size in sizes.values()} >= {4}
    # The run that goes on from step 4 logs step 6 again.
    assert run.curves["loss"] == pytest.approx({1: 11, 2: 10.5, 4: 10.25, 6: 10 + 5 / 6, 8: 10.625})
    assert run.curves["samples vs steps"] == {1: 4, 2: 8, 4: 16, 6: 24, 8: 32}
    assert status(ran, "titan.1") == ["FINISHED", "FAILED"]
    assert all(sum_ms > 0 for sum_ms in last["ranks"]["compute"])


@pytest.mark.parametrize("library", ["transformers", "lightning", "torchtitan"])
def test_an_adapter_without_its_library_names_the_extra(library, monkeypatch, hide_libraries):
    hide_libraries()
    module = f"mcore.observe.adapters.{library}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(module)
    assert str(caught.value) == (
        f'{module} needs {library}, which is not installed: pip install "mcore-observe[{library}]"'
    )


@pytest.mark.skipif(find_problem() is not None, reason=f"no stand-in: {find_problem()}")
@pytest.mark.parametrize(
    ("program", "name"),
    [("pl_device", "train_loss"), ("hf_device", "loss"), ("titan_device", "loss")],
)
def test_losses_of_a_device_are_logged(program, name, ran):
    on_cpu, on_device = result(ran, f"{program}.0").values()
    assert (on_cpu[0], on_device[0]) == ("cpu", "standin:0")
    assert len(on_cpu[1]) == 2
    for _, losses, steps in (on_cpu, on_device):
        assert losses == on_cpu[1]
        assert [step[name] for step in steps.values()] == losses
