import os
import sys
import types

import pytest
import torch

from mcore.observe import (
    ConfigContainer,
    EnergyMonitor,
    GlobalState,
    JsonlSink,
    LoggerConfig,
    MemorySink,
    MTPMetricsTracker,
    TrainState,
)
from mcore.observe.sinks.trackers import TRACKERS
from rank_testing import run_ranks

NAMED = [spec for spec in TRACKERS if spec.named_by is not None]
PROGRESS = TrainState(
    step=5,
    consumed_train_samples=640,
    skipped_train_samples=7,
    consumed_valid_samples=32,
    floating_point_operations_so_far=1.5e20,
    do_train=True,
    do_valid=True,
)


def configured(**logger):
    return GlobalState(ConfigContainer(logger=LoggerConfig(**logger)))


def test_nothing_is_configured():
    state = configured()
    attributes = [spec.attribute for spec in TRACKERS]
    assert {"tensorboard_logger", "wandb_logger", "mlflow_logger", "comet_logger"} <= {*attributes}
    assert [getattr(state, name) for name in attributes] == [None] * len(attributes)
    assert state.energy_monitor is None
    assert state.sinks() == []
    assert [getattr(GlobalState(), name) for name in attributes] == [None] * len(attributes)


def test_what_was_decided_stays_until_a_restart(tmp_path):
    pytest.importorskip("tensorboard")
    state = configured()
    assert state.tensorboard_logger is None
    state.cfg.logger.tensorboard_dir = str(tmp_path)
    assert state.tensorboard_logger is None
    state.reset_for_restart()
    assert state.tensorboard_logger is state.tensorboard_logger
    assert [path.name[:6] for path in tmp_path.glob("events*")] == ["events"]
    state.close()


@pytest.mark.parametrize(
    ("tracker", "settings"),
    [
        ("wandb_logger", {"wandb_project": "p", "wandb_exp_name": ""}),
        *((spec.attribute, {spec.wanted_by: "p"}) for spec in NAMED),
    ],
)
def test_a_tracker_without_a_name_for_its_run_is_refused(tracker, settings):
    with pytest.raises(ValueError, match="give the run a name"):
        getattr(configured(**settings), tracker)


def test_timers_follow_the_configuration():
    timers = configured(timing_log_level=1, timing_log_option="max").timers
    timers("a", log_level=1).set_elapsed(0.002)
    timers("b", log_level=2).set_elapsed(0.002)
    assert timers.get_all_timers_string(["a", "b"]).splitlines()[1:] == [
        "    a ..............................................: 2.00"
    ]


def test_close_closes_everything_and_twice_is_fine(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    state = GlobalState(extra_sinks=[sink])
    closed = []
    state.comet_logger = types.SimpleNamespace(end=lambda: closed.append("comet"))
    state.close()
    state.close()
    assert closed == ["comet"]
    with pytest.raises(ValueError, match="closed"):
        sink.log({"a": 1.0}, 1)


def test_a_tracker_that_cannot_be_closed_does_not_keep_the_others_open(tmp_path, caplog):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    state = GlobalState(extra_sinks=[sink])
    state.wandb_logger = types.SimpleNamespace(finish=lambda: 1 / 0)
    state.close()
    assert "Weights & Biases failed to close" in caplog.text
    with pytest.raises(ValueError, match="closed"):
        sink.log({"a": 1.0}, 1)


def test_close_opens_nothing(tmp_path):
    pytest.importorskip("tensorboard")
    configured(tensorboard_dir=str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []


def test_further_metrics_reach_every_tracker_and_tensorboard_over_samples_too():
    sink, tensorboard = MemorySink(), []
    train_state = TrainState(step=10, consumed_train_samples=640)
    state = GlobalState(train_state=train_state, extra_sinks=[sink])
    state.tensorboard_logger = types.SimpleNamespace(
        add_scalar=lambda *call: tensorboard.append(call)
    )
    state.log_metrics({"lm loss validation": torch.tensor(2.5)})
    state.log_metrics({"ppl": 12.0}, versus_samples=False)
    assert sink.steps == {10: {"lm loss validation": 2.5, "ppl": 12.0}}
    assert tensorboard == [
        ("lm loss validation", 2.5, 10),
        ("lm loss validation vs samples", 2.5, 640),
        ("ppl", 12.0, 10),
    ]


def test_restart_forgets_progress_and_measurements_but_keeps_sinks():
    sink = MemorySink()
    state = GlobalState(ConfigContainer(), train_state=TrainState(step=5), extra_sinks=[sink])
    first_timers = state.timers
    monitor = state.energy_monitor = EnergyMonitor(lambda: 0)
    state.mtp_metrics = MTPMetricsTracker()
    state._flops_at_last_log = 1e12
    state.sinks()
    state.reset_for_restart()
    assert state.train_state == TrainState()
    assert state.timers is not first_timers
    assert state.energy_monitor is None
    assert monitor._read_mj is None
    assert state._flops_at_last_log is None
    assert "_training_log_state" not in vars(state)
    assert [guard.sink for guard in state.sinks()] == [sink]


def test_weights_and_biases_is_opened_with_masked_settings(monkeypatch):
    calls = []
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: (
        calls.append(options) or types.SimpleNamespace(finish=lambda: calls.append("finished"))
    )
    wandb.setup = lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode="offline"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("mcore.observe.extras._has_metadata", lambda name: True)
    state = configured(
        wandb_project="p", wandb_exp_name="e", wandb_save_dir="d", comet_api_key="secret"
    )
    assert state.wandb_logger is state.wandb_logger
    state.wandb_logger.open()
    (options,) = calls
    config, records = options.pop("config"), options.pop("settings")
    assert (records["console"], records["x_disable_meta"]) == ("off", True)
    assert options.pop("id") == state.wandb_logger.run_id != ""
    assert options == {"project": "p", "name": "e", "dir": "d", "entity": None}
    assert config["logger.comet_api_key"] == "***"
    first = state.wandb_logger
    state.reset_for_restart()
    state.wandb_logger.open()
    assert calls[1] == "finished"
    assert calls[2]["id"] == state.wandb_logger.run_id != first.run_id
    state.close()


def test_comet_is_opened_with_the_key_from_the_environment(monkeypatch):
    made = []

    class Experiment:
        def __init__(self, **options):
            made.append(options)

        def set_name(self, name):
            made.append(("name", name))

        def add_tags(self, tags):
            made.append(("tags", tags))

        def log_parameters(self, parameters):
            made.append(("parameters", parameters["logger.comet_project"]))

        def end(self):
            pass

    comet = types.ModuleType("comet_ml")
    comet.Experiment = Experiment
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    monkeypatch.setattr("mcore.observe.extras._has_metadata", lambda name: True)
    monkeypatch.setenv("COMET_API_KEY", "  key from outside\n")
    state = configured(comet_project="p", comet_experiment_name="e", comet_tags=["a"])
    assert isinstance(state.comet_logger.open(), Experiment)
    state.close()
    assert made == [
        {
            "api_key": "key from outside",
            "project_name": "p",
            "workspace": None,
            "auto_metric_logging": False,
            "auto_param_logging": False,
            "parse_args": False,
            "log_code": False,
            "log_git_patch": False,
            "log_git_metadata": False,
            "log_env_details": False,
            "auto_output_logging": False,
        },
        ("name", "e"),
        ("tags", ["a"]),
        ("parameters", "p"),
    ]
    assert os.environ["COMET_API_KEY"] == "  key from outside\n"


def opens_tensorboard(folder):
    state = configured(tensorboard_dir=folder)
    has_writer = state.tensorboard_logger is not None
    state.close()
    return has_writer


def test_only_the_last_rank_opens_trackers(tmp_path):
    pytest.importorskip("tensorboard")
    assert run_ranks(opens_tensorboard, 2, str(tmp_path)) == [False, True]


def test_progress_becomes_tensors_without_dimensions():
    saved = PROGRESS.state_dict()
    assert {name: t.dtype for name, t in saved.items()} == {
        "step": torch.int64,
        "consumed_train_samples": torch.int64,
        "skipped_train_samples": torch.int64,
        "consumed_valid_samples": torch.int64,
        "floating_point_operations_so_far": torch.float64,
        "do_train": torch.bool,
        "do_valid": torch.bool,
        "do_test": torch.bool,
    }
    assert all(t.shape == () and t.device.type == "cpu" for t in saved.values())


def test_a_round_trip_of_progress_keeps_values_and_types():
    loaded = TrainState()
    loaded.load_state_dict(PROGRESS.state_dict())
    assert loaded == PROGRESS
    assert [type(loaded.step), type(loaded.do_train)] == [int, bool]


def test_missing_progress_keeps_its_default_and_other_keys_are_ignored():
    state = TrainState()
    state.load_state_dict({"step": 7, "what is this": torch.tensor(1)})
    assert state == TrainState(step=7)


def test_distributed_checkpoints_take_progress(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.stateful import Stateful

    assert isinstance(PROGRESS, Stateful)
    dcp.save({"train_state": PROGRESS}, checkpoint_id=str(tmp_path), no_dist=True)
    loaded = TrainState()
    dcp.load({"train_state": loaded}, checkpoint_id=str(tmp_path), no_dist=True)
    assert loaded == PROGRESS
