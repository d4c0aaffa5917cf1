"""The settings are stated once: ``configure`` has the fields of the dataclass as parameters."""

import dataclasses
import inspect
import re

import pytest

from mcore.observe import StragglerDetector, StragglerSettings

NAN = float("nan")


@pytest.fixture
def detector():
    StragglerDetector.reset_singleton()
    yield StragglerDetector()
    StragglerDetector.reset_singleton()


def test_configure_has_the_parameters_of_the_settings(detector):
    fields = inspect.signature(StragglerSettings).parameters
    assert inspect.signature(detector.configure).parameters == fields
    of_class = inspect.signature(StragglerDetector.configure)
    assert list(of_class.parameters) == ["self", *fields]
    assert of_class.return_annotation == "None"
    positional = [p.name for p in fields.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["world", "rank", "mmcnt", "amp", "port", "prefill", "enabled"]


def test_every_field_is_documented_once():
    text = inspect.getdoc(StragglerSettings)
    documented = re.findall(r"^    (\w+): ", text, re.MULTILINE)
    fields = [field.name for field in dataclasses.fields(StragglerSettings)]
    assert [name for name in documented if name != "ValueError"] == fields


def test_the_first_arguments_may_be_positional(detector):
    detector.configure(1, 0, 2, 1.5, 0, 16, True, controller=False)
    assert (detector.world, detector.rank, detector.mmcnt, detector.amp) == (1, 0, 2, 1.5)
    assert (detector.port, detector.enabled) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((), "'world' and 'rank'"), ((1, 0, 1, 3.0, 0, 8, True, None), "arguments")],
)
def test_wrong_calls_are_type_errors_and_change_nothing(detector, arguments, named):
    with pytest.raises(TypeError, match=named):
        detector.configure(*arguments)
    with pytest.raises(TypeError, match="nothing"):
        detector.configure(1, 0, nothing=1)
    assert (detector.configured, detector.world) == (False, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"world": 0}, "world is 0; give at least 1"),
        ({"rank": 2}, "rank is 2; give 0 to 1"),
        ({"amp": NAN}, "amp is nan; give a number above 0"),
        ({"port": 65536}, "port is 65536; give 0 to 65535"),
        ({"prefill": -1}, "prefill is -1; give 0 or more"),
        ({"sample_every": 0}, "sample_every is 0; give at least 1"),
        ({"z_threshold": 0.0}, "z_threshold is 0.0; give a number above 0"),
        ({"individual_threshold": 0.0}, "individual_threshold is 0.0; give a number above 0"),
        ({"peers": "x" * 33}, f"peers is {'x' * 33!r}; give at most 32 bytes"),
        ({"report_every_s": NAN}, "report_every_s is nan; give seconds above 0"),
        ({"on_straggler": "stops"}, "on_straggler is 'stops'; give 'log', 'stop' or a function"),
    ],
)
def test_values_out_of_range_are_named(wrong, message):
    with pytest.raises(ValueError, match=re.escape(f"straggler detector: {message}")):
        StragglerSettings(**{"world": 2, "rank": 0} | wrong)


def test_few_listed_ranks_count_as_one_and_the_token_is_not_shown():
    settings = StragglerSettings(1, 0, mmcnt=-3, token="s3cret")
    assert settings.mmcnt == 1
    assert "s3cret" not in repr(settings)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.amp = 1.0
