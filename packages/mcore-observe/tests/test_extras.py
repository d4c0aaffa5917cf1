import importlib.metadata
from pathlib import Path

import pytest

from mcore.observe.extras import is_extra_installed, require_extra
from mcore.observe.sinks.trackers import TRACKERS

pytest_plugins = ["pytester"]


def test_a_missing_library_is_named_with_its_extra(hide_libraries):
    hide_libraries()
    assert not is_extra_installed("comet")
    with pytest.raises(ModuleNotFoundError) as caught:
        require_extra("comet", "comet_project")
    assert str(caught.value) == (
        'comet_project needs comet-ml, which is not installed: pip install "mcore-observe[comet]"'
    )


def test_any_distribution_with_the_library_will_do(hide_libraries):
    hide_libraries(but="mlflow-skinny")
    assert is_extra_installed("mlflow")
    require_extra("mlflow", "mlflow_experiment")


def test_every_extra_is_declared_by_the_distribution():
    declared = importlib.metadata.metadata("mcore-observe").get_all("Provides-Extra")
    assert {"charts", "lightning", "nvml", "nvtx", "watch"} < set(declared)
    for extra in (*declared, *(spec.name for spec in TRACKERS)):
        is_extra_installed(extra)  # a ValueError if it finds no library


def test_unknown_extra():
    with pytest.raises(ValueError, match="unknown extra 'excel'"):
        is_extra_installed("excel")


@pytest.mark.xdist_group("imports")
def test_import_brings_no_optional_library_and_starts_nothing(imports):
    for place in ("without torch", "with torch"):  # torch.cuda takes pynvml where there is one
        assert imports[place]["loaded"] == [], place
        assert imports[place]["started"] == [1, True, True], place
    assert imports["with torch"]["initialized"] == [False, False]


def test_what_a_test_needs_is_missed_in_ci_and_skipped_elsewhere(pytester, monkeypatch):
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.needs("pytest", "sh")
        def test_has_both(): pass
        @pytest.mark.needs("pytest", "absent_program")
        def test_has_one(): pass
        def test_shows(chromium): pass
        """
    )
    sh = next(path for path in map(Path, ("/bin/sh", "/usr/bin/sh")) if path.exists())
    (pytester.path / "bin").mkdir()
    (pytester.path / "bin" / "sh").symlink_to(sh)
    monkeypatch.setenv("PATH", str(pytester.path / "bin"))
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    pytester.runpytest_inprocess().assert_outcomes(passed=1, skipped=2)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(["*needs absent_program", "*needs one of chromium, *"])
