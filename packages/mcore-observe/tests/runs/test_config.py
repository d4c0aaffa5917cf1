import pytest

from mcore.observe import ConfigContainer, LoggerConfig, ProfilingConfig
from mcore.observe.rank_logging import warn_once
from mcore.observe.sinks.trackers import TRACKERS

NAMED = [spec for spec in TRACKERS if spec.named_by is not None]


def test_logger_defaults_are_valid():
    LoggerConfig().finalize()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"log_interval": 0}, "log_interval is 0"),
        ({"tensorboard_log_interval": 0}, "tensorboard_log_interval is 0"),
        ({"timing_log_level": 3}, "timing_log_level is 3"),
        ({"timing_log_option": "mean"}, "timing_log_option is 'mean'"),
        ({"runtime_time_unit": "weeks"}, "runtime_time_unit is 'weeks'"),
        *(({spec.wanted_by: "e"}, f"{spec.named_by} is missing") for spec in NAMED),
        ({"wandb_project": "p", "wandb_exp_name": ""}, "wandb_exp_name is missing"),
    ],
)
def test_wrong_logger_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LoggerConfig(**settings).finalize()


@pytest.mark.parametrize(
    ("settings", "extra"),
    [
        ({"tensorboard_dir": "runs"}, "tensorboard"),
        *(({spec.wanted_by: "e", spec.named_by: "r"}, spec.name) for spec in NAMED),
    ],
)
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(settings, extra, hide_libraries):
    hide_libraries()
    with pytest.raises(ModuleNotFoundError, match=rf"mcore-observe\[{extra}\]"):
        LoggerConfig(**settings).finalize()


def test_the_key_is_not_shown():
    assert "secret" not in repr(LoggerConfig(comet_api_key="secret"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_nsys_profiler": True, "use_pytorch_profiler": True}, "are both on"),
        ({"profile_step_start": -1}, "profile_step_start is -1"),
        ({"profile_step_start": 0, "profile_step_end": -1}, "profile_step_end is -1"),
        ({"profile_step_start": 5, "profile_step_end": 4}, "profile_step_end is 4, before"),
    ],
)
def test_wrong_profiling_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ProfilingConfig(**settings).finalize()


def test_profiling_defaults_are_valid_and_not_shared():
    first, second = ProfilingConfig(), ProfilingConfig()
    first.finalize()
    first.profile_ranks.append(1)
    assert second.profile_ranks == [0]


def test_the_container_checks_its_parts():
    with pytest.raises(ValueError, match="log_interval"):
        ConfigContainer(logger=LoggerConfig(log_interval=0)).finalize()
    with pytest.raises(ValueError, match="profile_step_start"):
        ConfigContainer(profiling=ProfilingConfig(profile_step_start=-1)).finalize()


def test_settings_without_effect_are_one_warning_each(caplog):
    warn_once.cache_clear()
    for _ in range(2):
        ProfilingConfig(record_shapes=True, nvtx_ranges=True).finalize()
    assert [record.getMessage() for record in caplog.records] == [
        "ProfilingConfig.record_shapes has no effect in mcore.observe: pass record_shapes=True to "
        "torch.profiler.profile",
        "ProfilingConfig.nvtx_ranges has no effect in mcore.observe: call "
        "mcore.observe.configure_nvtx_profiling(True)",
    ]
    caplog.clear()
    ProfilingConfig().finalize()
    assert not caplog.records
