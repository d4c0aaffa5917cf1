"""Tests of installing all packages together, with tiny wheels and without an index."""

from pathlib import Path

import pytest

from monorepo.isolation.together import main
from monorepo.tests.sample_repository import SampleRepository
from monorepo.tests.sample_wheel import write_wheel

_PYTEST = """
import mcore.base, mcore.other, pathlib, sys
import pretrain
places = {mcore.base.__file__, mcore.other.__file__}
assert all(place.startswith(sys.prefix) for place in places), places
tests = sorted(path.name for path in pathlib.Path("tests-integration").iterdir())
print("ran", *sys.argv[1:], *tests)
raise SystemExit(int("--fail" in sys.argv))
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SampleRepository:
    """Two packages, and an index with a pytest and a torch that are a few lines."""
    made = SampleRepository(tmp_path / "repository")
    made.add_package("mcore-base")
    made.add_package("mcore-other", needs=("mcore-base>=0.1,<0.2",), code="import mcore.base\n")
    made.write(
        {
            "hatch.toml": (
                '[envs.default]\ndependencies = ["torch=={matrix:torch:2.13.0}"]\n'
                '[envs.dev]\nextra-dependencies = ["pytest>=8"]\n'
            ),
            "pyproject.toml": "",
            "tools/pretrain/__init__.py": "",
            "tools/pretrain/tests/test_x.py": "",
            "tests-integration/pretrain_runs.py": "",
            "tests-integration/test_pretrain_x.py": "",
            "tests-integration/test_sources.py": "",
        }
    )
    links = tmp_path / "links"
    links.mkdir()
    write_wheel(links, "pytest", "8.3", code=f"import sys; sys.path[:0] = ['tools']\n{_PYTEST}")
    write_wheel(links, "torch", "2.13.0")
    (tmp_path / "empty-index").mkdir()
    monkeypatch.setenv("UV_DEFAULT_INDEX", (tmp_path / "empty-index").as_uri())
    monkeypatch.setenv("UV_FIND_LINKS", str(links))
    return made


def test_the_main_jobs_tests_run_on_installed_packages(
    repository: SampleRepository, capfd: pytest.CaptureFixture[str]
) -> None:
    root = ["--root", str(repository.root)]
    assert main([*root, "-k", "losses"]) == 0
    first, second = capfd.readouterr().out.splitlines()
    assert first == "mcore-base, mcore-other import from one environment"
    assert second.startswith("ran ")
    assert second.endswith(" tests-integration -k losses pretrain_runs.py test_pretrain_x.py")
    assert main([*root, "--fail"]) == 1


def test_what_cannot_be_used_together_is_an_error(
    repository: SampleRepository, capfd: pytest.CaptureFixture[str]
) -> None:
    root = ["--root", str(repository.root)]
    repository.set_code("mcore-other", "import mcore.gone\n")
    assert main(root) == 1
    assert "mcore-other cannot be imported:" in capfd.readouterr().err
    repository.set_version("mcore-base", "0.2.0")
    assert main(root) == 1
    assert "mcore-base>=0.1,<0.2" in capfd.readouterr().err
