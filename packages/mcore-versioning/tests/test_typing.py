"""Tests of what a type checker sees through each decorator."""

import re
import textwrap
from pathlib import Path

import pytest
from mypy import api

import mcore.versioning

SOURCE = Path(mcore.versioning.__file__).parents[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy_cache")


@pytest.fixture
def check(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    """Check a snippet strictly; returns the complaints with their line numbers."""
    if SOURCE.name != "site-packages":  # mypy finds installed packages by itself
        monkeypatch.setenv("MYPYPATH", str(SOURCE))
    configuration = tmp_path / "mypy.ini"
    configuration.write_text("[mypy]\n")

    def run(code: str) -> list[str]:  # other options would need another cache
        file = tmp_path / "snippet.py"
        file.write_text(textwrap.dedent(code))
        output, errors, _ = api.run(
            [
                "--strict",
                "--namespace-packages",
                "--explicit-package-bases",
                f"--config-file={configuration}",
                f"--cache-dir={cache}",
                "--enable-error-code=deprecated",
                str(file),
            ]
        )
        assert errors == ""
        return re.findall(r"snippet\.py:(\d+: \w+: .*)", output)

    return run


def _revealed(found: list[str]) -> list[str]:
    """The revealed types, without the name of the module that built-in types come from."""
    texts = [re.search(r'Revealed type is "(.*)"', line).group(1) for line in found]
    return [text.replace("builtins.", "") for text in texts]


def _errors(found: list[str]) -> list[tuple[int, str]]:
    """Line numbers and error codes."""
    matches = (re.match(r"(\d+): error: .*\[([\w-]+)\]", line) for line in found)
    return [(int(match.group(1)), match.group(2)) for match in matches if match]


def test_function_decorators_keep_the_signature(check) -> None:
    found = check(
        """
        from mcore.versioning import (
            deprecate_args, deprecated, experimental_api, experimental_fn, internal_api,
            null_decorator,
        )

        @deprecated("1.0.0", "2.0.0", "g", reason="r")
        def a(x: int, *, y: str = "") -> float: return x
        @experimental_fn("0.1.0", max_lifetime=2)
        def b(x: int, *, y: str = "") -> float: return x
        @internal_api
        def c(x: int, *, y: str = "") -> float: return x
        @experimental_api
        def d(x: int, *, y: str = "") -> float: return x
        @deprecate_args("y")
        def e(x: int, *, y: str = "") -> float: return x
        @null_decorator
        def f(x: int, *, y: str = "") -> float: return x
        @null_decorator(configs=[1])
        def g(x: int, *, y: str = "") -> float: return x

        reveal_type(a)
        reveal_type(b)
        reveal_type(c)
        reveal_type(d)
        reveal_type(e)
        reveal_type(f)
        reveal_type(g)
        """
    )
    assert _revealed(found) == ["def (x: int, *, y: str =) -> float"] * 7


def test_wrong_calls_of_decorated_functions_are_rejected(check) -> None:
    found = check(
        """
        from mcore.versioning import deprecated, experimental_fn, internal_api
        @deprecated("1.0.0")
        def a(x: int) -> int: return x
        @experimental_fn("0.1.0")
        def b(x: int) -> int: return x
        @internal_api
        def c(x: int) -> int: return x
        a("text")
        b()
        c(1, 2)
        a(1) + b(2) + c(3)
        """
    )
    assert _errors(found) == [(9, "arg-type"), (10, "call-arg"), (11, "call-arg")]


def test_wrong_uses_of_the_decorators_are_rejected(check) -> None:
    found = check(
        """
        from mcore.versioning import (
            deprecated, experimental_fn, is_te_min_version, is_torch_min_version
        )
        @deprecated
        def a() -> None: ...
        @experimental_fn
        def b() -> None: ...
        deprecated("1.0.0", category=ValueError)
        is_torch_min_version("2.0", True, True)
        is_torch_min_version(2.0)
        is_te_min_version("2.0", vers="2.0")
        is_te_min_version(vers="2.0")
        is_te_min_version("2.0", False, release_only=True)
        """
    )
    assert sorted({line for line, _ in _errors(found)}) == [5, 7, 9, 10, 11, 12]


def test_methods_coroutines_and_properties_keep_their_types(check) -> None:
    found = check(
        """
        from collections.abc import AsyncIterator, Iterator
        from mcore.versioning import deprecated, experimental_fn

        class K:
            @deprecated("1.0.0")
            def method(self, x: int) -> str: return ""
            @classmethod
            @deprecated("1.0.0")
            def build(cls, x: int) -> "K": return cls()
            @staticmethod
            @experimental_fn("0.1.0")
            def helper(x: int) -> str: return ""
            @property
            @deprecated("1.0.0")
            def size(self) -> int: return 1

        @deprecated("1.0.0")
        async def co(x: int) -> str: return ""
        @experimental_fn("0.1.0")
        def gen(x: int) -> Iterator[str]: yield ""
        @deprecated("1.0.0")
        async def agen(x: int) -> AsyncIterator[str]: yield ""

        reveal_type(K().method(1))
        reveal_type(K.build(1))
        reveal_type(K.helper(1))
        reveal_type(K().size)
        reveal_type(co)
        reveal_type(gen)
        reveal_type(agen)
        """
    )
    assert _revealed(found) == [
        "str",
        "snippet.K",
        "str",
        "int",
        "def (x: int) -> typing.Coroutine[Any, Any, str]",
        "def (x: int) -> typing.Iterator[str]",
        "def (x: int) -> typing.AsyncIterator[str]",
    ]


def test_classes_stay_classes(check) -> None:
    found = check(
        """
        from mcore.versioning import deprecated, experimental_api, experimental_cls, internal_api

        @deprecated("1.0.0")
        class A:
            def __init__(self, x: int) -> None: ...
        @experimental_cls("0.1.0")
        class B:
            def __init__(self, x: int) -> None: ...
        @internal_api
        @experimental_api
        class C:
            def __init__(self, x: int) -> None: ...
        class Child(A): ...
        def use(a: A | None, b: type[B]) -> None: ...

        reveal_type(A(1)); reveal_type(B(1)); reveal_type(C(1)); reveal_type(Child(1))
        A("x"); B("x"); C("x"); Child("x")
        use(Child(1), B)
        """
    )
    assert _revealed([line for line in found if "Revealed" in line]) == [
        "snippet.A",
        "snippet.B",
        "snippet.C",
        "snippet.Child",
    ]
    assert _errors(found) == [(18, "arg-type")] * 4


def test_stand_in_works_as_a_context_manager(check) -> None:
    found = check(
        """
        from mcore.versioning import experimental_enabled, null_decorator
        def f() -> int:
            with null_decorator("range", color="red"), experimental_enabled():
                return 1
        """
    )
    assert found == []


def test_other_functions_have_useful_types(check) -> None:
    found = check(
        """
        import inspect
        from mcore.versioning import (
            check_mamba_sequence_packing_support, create_updated_function_signature,
            deprecate_inference_params, get_deprecation, get_package_version, get_torch_version,
            is_te_min_version, is_torch_min_version, DeprecationInfo,
        )
        reveal_type(get_torch_version())
        reveal_type(is_torch_min_version("2.0", release_only=True))
        reveal_type(is_te_min_version(vers="2.0"))
        reveal_type(get_package_version("x"))
        reveal_type(check_mamba_sequence_packing_support())
        reveal_type(deprecate_inference_params(1, "x"))
        reveal_type(get_deprecation(len))
        f: inspect.Signature = create_updated_function_signature(len, z=1)
        info: DeprecationInfo
        """
    )
    assert _revealed(found) == [
        "packaging.version.Version",
        "bool",
        "bool",
        "packaging.version.Version | None",
        "tuple[bool, str | None]",
        "int | str | None",
        "tuple[str, str | None, str | None, str | None, str, "
        "fallback=mcore.versioning.deprecation.DeprecationInfo] | None",
    ]


@pytest.mark.parametrize("ours_outermost", [True, False])
def test_stacked_standard_decorator_is_reported_and_keeps_the_signature(
    check, ours_outermost: bool
) -> None:
    ours = '@deprecated("1.0.0", alternative="new")'
    standard = (
        '@typing_extensions.deprecated("old is deprecated since version 1.0.0. Use new instead.", '
        "category=None)"
    )
    first, second = (ours, standard) if ours_outermost else (standard, ours)
    found = check(
        f"""
        import typing_extensions
        from mcore.versioning import deprecated
        {first}
        {second}
        def old(x: int) -> int: return x
        {first}
        {second}
        class Old:
            def __init__(self, x: int) -> None: ...
        old(1)
        old("text")
        Old(2)
        """
    )
    assert _errors(found) == [
        (11, "deprecated"),
        (12, "deprecated"),
        (12, "arg-type"),
        (13, "deprecated"),
    ]
    assert "Use new instead" in found[0]


def test_our_decorator_alone_is_invisible_to_the_checker(check) -> None:
    found = check(
        """
        from mcore.versioning import deprecated
        @deprecated("1.0.0")
        def old(x: int) -> int: return x
        old(1)
        """
    )
    assert found == []
