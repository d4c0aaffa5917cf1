"""Tests of the argument that has got another name."""

import warnings
from pathlib import Path

import pytest

from mcore.versioning import deprecate_inference_params


def _forward(inference_context: object = None, inference_params: object = None) -> object:
    return deprecate_inference_params(inference_context, inference_params)  # blamed line


@pytest.mark.parametrize(
    ("context", "params", "expected"),
    [(None, None, None), ("c", None, "c"), ([], None, []), (0, None, 0)],
)
def test_present_name_is_returned_without_a_warning(
    context: object, params: object, expected: object
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert deprecate_inference_params(context, params) == expected


@pytest.mark.parametrize("params", ["p", [], 0])
def test_deprecated_name_is_returned_with_a_warning(params: object) -> None:
    with pytest.warns(FutureWarning) as caught:
        assert deprecate_inference_params(None, params) is params
    text = str(caught[0].message)
    assert "inference_params" in text
    assert "inference_context" in text
    assert "ignored" not in text


@pytest.mark.parametrize("context", ["c", [], 0])
def test_both_names_keep_the_present_one_and_say_so(context: object) -> None:
    with pytest.warns(FutureWarning, match=r"inference_params.*ignored.*inference_context"):
        assert deprecate_inference_params(context, "p") is context


def test_warning_is_blamed_on_the_function_that_passes_the_arguments() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _forward(None, "p")
        _forward("c", "p")
    assert len(caught) == 2
    source = Path(__file__).read_text().splitlines()
    for warning in caught:
        assert warning.filename == __file__
        assert "# blamed line" in source[warning.lineno - 1]


def test_warning_is_visible_with_the_filters_of_an_ordinary_program() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning):
            warnings.simplefilter("ignore", hidden)
        _forward(None, "p")
    assert len(caught) == 1
