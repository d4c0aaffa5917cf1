"""The rules of a configuration that defers weight gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mcore.parallel.wgrad import defers_embedding_wgrad, validate_wgrad_deferral


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"wgrad_deferral_limit": 3},
        {"defer_embedding_wgrad_compute": False, "pipeline_model_parallel_size": 1},
        {"defer_embedding_wgrad_compute": True, "pipeline_model_parallel_size": 2},
        {
            "defer_embedding_wgrad_compute": True,
            "pipeline_model_parallel_size": 4,
            "wgrad_deferral_limit": 7,
        },
    ],
)
def test_valid_configurations(fields: dict[str, int]) -> None:
    validate_wgrad_deferral(SimpleNamespace(**fields))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"wgrad_deferral_limit": -1}, "wgrad_deferral_limit is -1"),
        (
            {"defer_embedding_wgrad_compute": True, "pipeline_model_parallel_size": 1},
            "pipeline_model_parallel_size 1",
        ),
        ({"defer_embedding_wgrad_compute": True}, "pipeline_model_parallel_size 1"),
    ],
)
def test_invalid_configurations(fields: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        validate_wgrad_deferral(SimpleNamespace(**fields))


@pytest.mark.parametrize(
    ("deferring", "limit", "expected"),
    [
        (True, 0, [True] * 5),
        (True, 1, [True, False, False, False, False]),
        (True, 3, [True, True, True, False, False]),
        (False, 0, [False] * 5),
        (False, 3, [False] * 5),
    ],
)
def test_a_layer_defers_as_long_as_its_buffer_holds_less_than_the_limit(
    deferring: bool, limit: int, expected: list[bool]
) -> None:
    config = SimpleNamespace(defer_embedding_wgrad_compute=deferring, wgrad_deferral_limit=limit)
    assert [defers_embedding_wgrad(config, held) for held in range(5)] == expected


def test_an_object_without_the_fields_does_not_defer() -> None:
    assert defers_embedding_wgrad(object(), 0) is False
    validate_wgrad_deferral(object())
