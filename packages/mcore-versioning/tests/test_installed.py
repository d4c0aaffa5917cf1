"""Tests of the version lookups: each documented function, and the order of the sources."""

import importlib
import importlib.metadata
import inspect
import logging
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import InvalidVersion, Version

import mcore.versioning as v
from mcore.versioning.experimental import owner_version
from mcore.versioning.lookup import _parse, known_package

PACKAGES = [
    ("torch", "torch", v.get_torch_version, v.is_torch_min_version, Version("0.0.0")),
    (
        "transformer_engine",
        "transformer-engine",
        v.get_te_version,
        v.is_te_min_version,
        Version("0.0.0"),
    ),
    ("flash_attn", "flash-attn", v.get_fa_version, v.is_fa_min_version, PackageNotFoundError),
    ("mamba_ssm", "mamba-ssm", v.get_mamba_version, v.is_mamba_min_version, PackageNotFoundError),
    (
        "causal_conv1d",
        "causal-conv1d",
        v.get_causal_conv1d_version,
        v.is_causal_conv1d_min_version,
        PackageNotFoundError,
    ),
]
each_package = pytest.mark.parametrize(
    ("module", "distribution", "get", "is_min", "absent"), PACKAGES, ids=[p[0] for p in PACKAGES]
)
Install = Callable[..., Path]
Unload = Callable[[str], None]


def _stub(version: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(__version__=version)


@pytest.fixture
def count_scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The distributions whose metadata is requested, in order."""
    scanned: list[str] = []
    real = importlib.metadata.version

    def counting(name: str) -> str:
        scanned.append(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", counting)
    return scanned


@each_package
def test_absent_package(
    module: str,
    distribution: str,
    get: Any,
    is_min: Any,
    absent: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if isinstance(absent, Version):
        assert get() == absent
    else:
        with pytest.raises(absent, match=distribution):
            get()
        with pytest.raises(ImportError):
            get()
    for request in ("0.0.0", "0.0.0a0", "1.0", Version("0.0.0")):
        assert is_min(request) is False
        assert is_min(request, check_equality=False) is False


@each_package
def test_loaded_module_gives_its_version(
    module: str,
    distribution: str,
    get: Any,
    is_min: Any,
    absent: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, module, _stub("2.7.4.post1"))
    assert get() == Version("2.7.4.post1")
    assert is_min("2.7.4") is True
    assert is_min("2.7.4", False) is True
    assert is_min("2.7.4.post1") is inspect.signature(is_min).parameters["check_equality"].default
    assert is_min("2.7.4.post1", check_equality=False) is False
    assert is_min(Version("2.8")) is False


@each_package
def test_metadata_gives_the_version_without_an_import(
    module: str,
    distribution: str,
    get: Any,
    is_min: Any,
    absent: Any,
    install: Install,
    unload: Unload,
) -> None:
    unload(module)
    install(distribution, "3.1", module=module, source="raise RuntimeError('imported')")
    assert get() == Version("3.1")
    assert is_min("3.1") is True
    assert module not in sys.modules


@each_package
def test_request_that_is_no_version(
    module: str,
    distribution: str,
    get: Any,
    is_min: Any,
    absent: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for there in (_stub("1.0"), None):
        monkeypatch.setitem(sys.modules, module, there)
        with pytest.raises(InvalidVersion):
            is_min("newest")


def test_stubs_in_sys_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", _stub("2.7.4.post1"))
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert v.is_fa_min_version("2.7.4") is True
    assert v.is_fa_min_version("2.7.4.post1", check_equality=False) is False
    assert v.get_te_version() == Version("0.0.0")
    assert v.is_te_min_version("0.0.0") is False


def test_asking_for_torch_does_not_load_it() -> None:
    code = (
        "import sys, mcore.versioning as v; v.get_torch_version(); v.is_torch_min_version('2.0');"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_blocked_module_is_absent_whatever_the_metadata_says(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("flash-attn", "2.7")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert v.is_fa_min_version("1.0") is False


def test_package_that_is_blocked_after_it_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", _stub("2.7"))
    assert [v.is_fa_min_version("2.0") for _ in range(3)] == [True, True, True]
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert v.is_fa_min_version("2.0") is False
    with pytest.raises(PackageNotFoundError):
        v.get_fa_version()


class EqualToAll(str):
    """A text that equals any other, as versions of some libraries equal other spellings."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def test_an_equal_version_of_another_text_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for text in ("1.0", "3.0", "1.0"):
        module = types.ModuleType("flash_attn")
        module.__version__ = EqualToAll(text)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn", module)
        answers += [v.is_fa_min_version("2.0"), v.is_fa_min_version("2.0")]
    assert answers == [False, False, True, True, False, False]


def test_module_that_is_replaced_after_it_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", _stub("2.7"))
    assert v.is_fa_min_version("2.0") is True
    monkeypatch.setitem(sys.modules, "flash_attn", _stub("1.9"))
    assert v.is_fa_min_version("2.0") is False
    assert v.get_fa_version() == Version("1.9")


def test_an_answer_from_the_metadata_is_not_kept_for_a_module_that_was_loaded_before(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = _stub("1.0")
    monkeypatch.setitem(sys.modules, "flash_attn", stub)
    assert v.is_fa_min_version("1.5") is False
    install("flash-attn", "3.0")
    monkeypatch.delitem(sys.modules, "flash_attn")
    assert v.is_fa_min_version("2.0") is True
    monkeypatch.setitem(sys.modules, "flash_attn", stub)
    assert v.is_fa_min_version("2.0") is False


def test_answers_are_kept_for_an_equal_version_of_a_replaced_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = known_package("flash_attn", "flash-attn")
    for digits in (["2", "7"], ["2", "7"]):
        stub = _stub(".".join(digits))  # a new object each time
        monkeypatch.setitem(sys.modules, "flash_attn", stub)
        assert v.is_fa_min_version("2.0") is True
        assert kept.loaded[0] is stub.__version__
        assert kept.loaded[1] == {"2.0": True}


def test_a_request_that_is_no_version_is_refused_after_answers_were_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", _stub("2.7"))
    assert v.is_fa_min_version("2.0") is True
    with pytest.raises(TypeError, match="a str or a packaging Version"):
        v.is_fa_min_version(["2.0"])  # type: ignore[arg-type]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_distribution_of_that_name_comes_before_that_of_the_files(
    is_loaded: bool, install: Install, unload: Unload
) -> None:
    unload("peculiar")
    install("peculiar", "1.0", module="something_else")
    install("big-project", "2.0", module="peculiar")
    if is_loaded:
        importlib.import_module("peculiar")
    assert v.get_package_version("peculiar") == Version("1.0")


@pytest.mark.parametrize("version", ["3.1", None])
def test_metadata_without_a_name_gives_its_version_and_owns_no_code(
    version: str | None, install: Install, unload: Unload
) -> None:
    unload("nameless")
    info = install("nameless-files", version, module="nameless")
    text = (info / "METADATA").read_text()
    (info / "METADATA").write_text(text.replace("Name: nameless-files\n", ""))
    importlib.import_module("nameless")
    assert v.get_package_version("nameless") == (None if version is None else Version(version))
    assert owner_version("nameless") is None


def test_patched_and_restored_version_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = _stub("2.7")
    monkeypatch.setitem(sys.modules, "flash_attn", stub)
    for _ in range(2):
        assert v.is_fa_min_version("2.0") is True
        with monkeypatch.context() as patch:
            patch.setattr(stub, "__version__", "1.9")
            assert [v.is_fa_min_version("2.0") for _ in range(2)] == [False, False]
            assert v.get_fa_version() == Version("1.9")
        assert [v.is_fa_min_version("2.0") for _ in range(2)] == [True, True]
        assert v.get_fa_version() == Version("2.7")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["1.9", "2.0", "2.1+cpu", "2.0rc1", "a branch", None, 7]),
            st.sampled_from(["2.0", "2.1", Version("2.1"), Version("2.0")]),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_answers_follow_every_change_of_the_version(
    steps: list[tuple[Any, Any, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = _stub("0.0")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", stub)
        for version, request, is_copied in steps:
            is_text = isinstance(version, str)
            # An equal version may be another object.
            stub.__version__ = "".join(list(version)) if is_text and is_copied else version
            if version == "a branch":
                with pytest.raises(InvalidVersion):
                    v.is_fa_min_version(request)
                continue
            expected = is_text and Version(version) >= Version(str(request))
            assert v.is_fa_min_version(request) is expected
            assert v.is_fa_min_version(request) is expected


@pytest.mark.parametrize("version", ["", 5, None, (2, 7), "not a version"])
def test_unusable_dunder_version_gives_way_to_metadata(
    version: object, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("flash-attn", "2.6")
    monkeypatch.setitem(sys.modules, "flash_attn", _stub(version))
    assert v.get_fa_version() == Version("2.6")


def test_string_subclasses_and_versions_count_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class TorchVersion(str):
        __slots__ = ()

    for version in (TorchVersion("2.13.0+cpu"), Version("2.13.0+cpu")):
        monkeypatch.setitem(sys.modules, "torch", _stub(version))
        assert v.get_torch_version() == Version("2.13.0+cpu")
        assert type(v.get_torch_version()) is Version


@pytest.mark.parametrize("attributes", [{}, {"__version__": ""}, {"__version__": 7}])
def test_loaded_module_without_a_version_anywhere_is_absent(
    attributes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(**attributes))
    assert v.is_fa_min_version("0.0") is False


def test_unreadable_dunder_version_without_metadata_is_an_error_that_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", _stub("main-branch"))
    with pytest.raises(InvalidVersion, match=r"flash_attn.*main-branch"):
        v.get_fa_version()


def test_unreadable_metadata_is_an_error_that_names_the_package(
    install: Install, unload: Unload, monkeypatch: pytest.MonkeyPatch
) -> None:
    unload("flash_attn")
    install("flash-attn", "main-branch")
    with pytest.raises(InvalidVersion, match=r"flash-attn.*main-branch"):
        v.get_fa_version()
    monkeypatch.setitem(sys.modules, "flash_attn", _stub("also wrong"))
    with pytest.raises(InvalidVersion, match=r"flash-attn.*main-branch"):
        v.is_fa_min_version("1.0")


def test_metadata_without_a_version_is_none(install: Install, unload: Unload) -> None:
    unload("flash_attn")
    install("flash-attn", None)
    assert v.is_fa_min_version("0.0") is False


def test_source_tree_without_metadata_is_imported(site: Path, unload: Unload) -> None:
    unload("flash_attn")
    (site / "flash_attn.py").write_text("__version__ = '2.8.1'\n")
    assert v.get_fa_version() == Version("2.8.1")
    assert "flash_attn" in sys.modules


def test_source_tree_without_a_version_is_absent(site: Path, unload: Unload) -> None:
    unload("flash_attn")
    (site / "flash_attn.py").write_text("")
    assert v.is_fa_min_version("0.0") is False


def test_source_tree_with_an_unreadable_version(site: Path, unload: Unload) -> None:
    unload("flash_attn")
    (site / "flash_attn.py").write_text("__version__ = 'unknown'\n")
    with pytest.raises(InvalidVersion, match=r"flash_attn.*unknown"):
        v.get_fa_version()


@pytest.mark.parametrize("error", ["ImportError('no CUDA')", "OSError('libcudart.so.12')"])
def test_source_tree_whose_import_fails_is_absent(
    error: str, site: Path, unload: Unload, caplog: pytest.LogCaptureFixture
) -> None:
    unload("flash_attn")
    (site / "flash_attn.py").write_text(f"raise {error}\n")
    with caplog.at_level(logging.DEBUG, logger="mcore.versioning"):
        assert v.is_fa_min_version("0.0") is False
    assert [(r.levelno, r.name) for r in caplog.records] == [(logging.DEBUG, "mcore.versioning")]
    assert "flash_attn" in caplog.text
    assert error.partition("'")[2][:-2] in caplog.text


def test_other_errors_of_an_import_are_not_swallowed(site: Path, unload: Unload) -> None:
    unload("flash_attn")
    (site / "flash_attn.py").write_text("raise ZeroDivisionError\n")
    with pytest.raises(ZeroDivisionError):
        v.get_fa_version()


def test_second_lookup_reads_no_metadata(
    install: Install, unload: Unload, count_scans: list[str]
) -> None:
    unload("flash_attn")
    install("flash-attn", "2.6")
    assert [str(v.get_fa_version()) for _ in range(3)] == ["2.6"] * 3
    assert v.is_fa_min_version("2.0") is True
    assert count_scans == ["flash-attn"]
    v.clear_version_cache()
    v.get_fa_version()
    assert count_scans == ["flash-attn", "flash-attn"]


def test_absence_is_not_cached(install: Install, unload: Unload) -> None:
    unload("flash_attn")
    assert v.is_fa_min_version("1.0") is False
    install("flash-attn", "2.6")
    assert v.is_fa_min_version("1.0") is True


def test_version_from_metadata_is_replaced_by_that_of_the_imported_module(
    install: Install, unload: Unload, monkeypatch: pytest.MonkeyPatch
) -> None:
    unload("flash_attn")
    install("flash-attn", "2.6")
    assert v.is_fa_min_version("2.6") is True
    monkeypatch.setitem(sys.modules, "flash_attn", _stub("2.5"))
    assert v.get_fa_version() == Version("2.5")
    assert v.is_fa_min_version("2.6") is False


def test_module_that_is_being_imported_does_not_hide_the_metadata(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("flash-attn", "2.6")
    half_made = types.ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", half_made)
    assert v.get_fa_version() == Version("2.6")
    half_made.__version__ = "2.7"  # type: ignore[attr-defined]
    assert v.get_fa_version() == Version("2.7")


def test_many_requests_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", _stub("1000.0"))
    assert all(v.is_fa_min_version(f"1.{minor}") for minor in range(2000))
    assert 0 < _parse.cache_info().currsize <= 256


def test_request_that_cannot_be_hashed_is_a_type_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", _stub("1.0"))
    with pytest.raises(TypeError, match="a str or a packaging Version"):
        v.is_fa_min_version([1, 0])


def test_lookups_from_many_threads_agree(install: Install, unload: Unload) -> None:
    unload("flash_attn")
    install("flash-attn", "2.6")
    answers: list[object] = []

    def ask() -> None:
        for _ in range(50):
            v.clear_version_cache()
            answers.append((str(v.get_fa_version()), v.is_fa_min_version("2.6")))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert set(answers) == {("2.6", True)}
    assert len(answers) == 200


def test_release_only_on_a_vendor_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", _stub("2.9.0a0+50eac811a6.nv25.09"))
    assert v.is_torch_min_version("2.9.0") is False
    assert v.is_torch_min_version("2.9.0a0") is True
    assert v.is_torch_min_version("2.9.0", release_only=True) is True
    assert v.is_package_min_version("torch", "2.9.0", release_only=True) is True


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "torch"),
        ("transformer_engine", "te"),
        ("flash_attn", "fa"),
        ("mamba_ssm", "mamba"),
        ("causal_conv1d", "causal_conv1d"),
        ("flashinfer", "flashinfer"),
        ("emerging_optimizers", "emerging_optimizers"),
    ],
)
def test_a_pre_release_is_older_than_its_release_unless_asked(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_min = getattr(v, f"is_{name}_min_version")
    monkeypatch.setitem(sys.modules, module, _stub("2.9.0rc1"))
    assert [is_min("2.9.0"), is_min("2.9.0", release_only=True)] == [False, True]
    assert [is_min("2.9.0", True), is_min("2.9.0", False, release_only=True)] == [False, False]
    # The defaults that help() and editors show are those of the calls above.
    shown = inspect.signature(is_min).parameters
    assert (shown["release_only"].default, shown["check_equality"].default) == (False, True)


def test_defaults_for_any_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "some_lib", _stub("2.9.0rc1"))
    is_min = v.is_package_min_version
    assert is_min("some_lib", "2.9.0") is False
    assert is_min("some_lib", "2.9.0", release_only=True) is True
    assert is_min("some_lib", "2.9.0rc1") is True
    assert is_min("some_lib", "2.9.0rc1", False) is False


def test_a_nightly_is_older_than_the_first_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", _stub("2.9.0.dev20250915+cu128"))
    assert v.is_torch_min_version("2.9.0a0") is False
    assert v.is_torch_min_version("2.9.0.dev0") is True
    assert v.is_torch_min_version("2.9.0", release_only=True) is True


def test_an_answer_for_a_release_is_not_that_for_the_version_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", _stub("2.9.0a0"))
    assert v.is_torch_min_version("2.9.0", release_only=True) is True
    assert v.is_torch_min_version("2.9.0") is False


def test_kept_answers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", _stub("2.9.0"))
    for minor in range(1000):
        assert v.is_torch_min_version(f"2.{minor}") is (minor <= 9)
    assert len(known_package("torch", "torch").loaded[1]) <= 256


def test_vers_is_another_name_of_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", _stub("2.1"))
    assert v.is_te_min_version(vers="2.1") is True
    assert v.is_te_min_version(vers="2.1", check_equality=False) is False
    assert v.is_te_min_version(version="2.1") is True
    for arguments, keywords in ((("2.1",), {}), ((), {"version": "2.1"})):
        with pytest.raises(TypeError, match="not both"):
            v.is_te_min_version(*arguments, vers="2.1", **keywords)
    with pytest.raises(TypeError):
        v.is_te_min_version()


@pytest.mark.parametrize("is_loaded", [False, True])
def test_version_by_the_name_of_the_module_and_of_the_distribution(
    is_loaded: bool, install: Install, unload: Unload
) -> None:
    unload("peculiar")
    install("strangely-named", "4.2", module="peculiar", source="imported = True")
    if is_loaded:
        importlib.import_module("peculiar")
    for name in ("peculiar", "strangely-named", "Strangely_Named"):
        assert v.get_package_version(name) == Version("4.2")
        assert v.is_package_min_version(name, "4.2") is True
        assert v.is_package_min_version(name, "4.3") is False
    assert ("peculiar" in sys.modules) is is_loaded


def test_version_of_a_submodule_of_a_shared_namespace(install: Install, site: Path) -> None:
    for part, version in (("storage", "1.1"), ("compute", "2.2")):
        info = install(f"acme-{part}", version)
        (site / "acme_space" / part).mkdir(parents=True)
        (site / "acme_space" / part / "__init__.py").write_text("raise RuntimeError")
        (info / "RECORD").write_text(f"acme_space/{part}/__init__.py,,\n")
    assert v.get_package_version("acme_space.compute") == Version("2.2")
    assert "acme_space" not in sys.modules
    assert v.get_package_version("acme_space") is None


def test_unreadable_version_of_the_owner_is_an_error_that_names_it(
    install: Install, unload: Unload
) -> None:
    unload("peculiar")
    install("strangely-named", "main-branch", module="peculiar")
    with pytest.raises(InvalidVersion, match=r"strangely-named.*main-branch"):
        v.get_package_version("peculiar")


def test_a_module_of_the_standard_library_has_no_owner(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("backport", "9.9", module="shelve")
    assert v.get_package_version("shelve") is None


def test_any_package_by_module_and_distribution(
    install: Install, unload: Unload, monkeypatch: pytest.MonkeyPatch
) -> None:
    unload("peculiar")
    install("strangely-named", "4.2")
    assert v.get_package_version("peculiar") is None
    assert v.get_package_version("peculiar", "strangely-named") == Version("4.2")
    assert v.is_package_min_version("peculiar", "4.2", distribution="strangely-named") is True
    assert v.is_package_min_version("peculiar", "4.2", False, distribution="strangely-named") is (
        False
    )
    assert v.is_package_min_version("peculiar", "0.0") is False
    assert v.get_package_version("no_such_parent.child") is None


def test_generic_lookup_of_a_documented_package_shares_its_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", _stub("2.7"))
    found = v.get_package_version("flash_attn", "flash-attn")
    assert found is v.get_fa_version()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    installed=st.sampled_from(["2.9.0a0+nv", "2.13.0+cpu", "2.7.4.post1", "1.5.3", "3.0.dev1"]),
    requests=st.lists(
        st.tuples(
            st.sampled_from(["1.5.3", "2.7.4", "2.9.0", "2.9.0a0", "2.13", "3.0", "2.13.0+cpu"]),
            st.booleans(),
            st.booleans(),
        ),
        max_size=12,
    ),
)
def test_remembered_answers_equal_fresh_ones(
    installed: str,
    requests: list[tuple[str, bool, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", _stub(installed))
    there = Version(installed)
    for request, check_equality, release_only in requests:
        wanted = Version(request)
        post = "" if there.post is None else f".post{there.post}"
        shown = Version(there.base_version + post) if release_only else there
        if not check_equality and wanted.local is None:
            shown = Version(shown.public)
        expected = shown >= wanted if check_equality else shown > wanted
        answer = v.is_torch_min_version(request, check_equality, release_only=release_only)
        assert answer is expected


@pytest.mark.parametrize(
    ("conv", "mamba", "expected"),
    [
        ("1.5.3.post1", "2.2.6.post3", (True, None)),
        ("1.6.0", "2.3.0", (True, None)),
        ("1.5.3", "2.2.6.post3", (False, "causal_conv1d >= 1.5.3.post1 is required (found 1.5.3)")),
        (None, None, (False, "causal_conv1d >= 1.5.3.post1 is required (not installed)")),
        ("1.5.3.post1", "2.2.6", (False, "mamba_ssm >= 2.2.6.post3 is required (found 2.2.6)")),
        ("1.5.3.post1", None, (False, "mamba_ssm >= 2.2.6.post3 is required (not installed)")),
    ],
)
def test_packed_sequences_in_inference(
    conv: str | None,
    mamba: str | None,
    expected: tuple[bool, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _pretend(conv, mamba, monkeypatch)
    assert v.check_mamba_sequence_packing_support() == expected
    assert v.check_mamba_sequence_packing_support(for_inference_not_training=True) == expected


@pytest.mark.parametrize(
    ("conv", "mamba", "expected"),
    [
        ("1.4.0", "2.0.0", (True, None)),
        ("1.3.9", "2.0.0", (False, "causal_conv1d >= 1.4.0 is required (found 1.3.9)")),
        ("1.4.0", None, (False, "mamba_ssm >= 2.0.0 is required (not installed)")),
    ],
)
def test_packed_sequences_in_training(
    conv: str | None,
    mamba: str | None,
    expected: tuple[bool, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _pretend(conv, mamba, monkeypatch)
    assert v.check_mamba_sequence_packing_support(for_inference_not_training=False) == expected


def _pretend(conv: str | None, mamba: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, version in (("causal_conv1d", conv), ("mamba_ssm", mamba)):
        stub = None if version is None else types.SimpleNamespace(__version__=version)
        monkeypatch.setitem(sys.modules, module, stub)


@pytest.mark.parametrize(
    ("module", "name"),
    [("flashinfer", "flashinfer"), ("emerging_optimizers", "emerging_optimizers")],
)
def test_newer_libraries(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    get = getattr(v, f"get_{name}_version")
    is_min = getattr(v, f"is_{name}_min_version")
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    assert get() is None
    assert is_min("0.1") is False
    there = types.ModuleType(module)
    there.__version__ = "0.6.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, there)
    assert get() == Version("0.6.0")
    assert [is_min("0.6.0"), is_min("0.6.0", check_equality=False), is_min("0.7")] == [
        True,
        False,
        False,
    ]
