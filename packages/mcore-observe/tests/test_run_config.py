import pytest

from mcore.observe import ConfigContainer, LoggerConfig, ProfilingConfig


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
