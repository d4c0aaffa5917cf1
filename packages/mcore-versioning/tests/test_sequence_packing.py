"""Tests of the question whether the Mamba kernels can process packed sequences."""

import sys
import types

import pytest

from mcore.versioning import check_mamba_sequence_packing_support


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
def test_support_for_inference(
    conv: str | None,
    mamba: str | None,
    expected: tuple[bool, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _pretend(conv, mamba, monkeypatch)
    assert check_mamba_sequence_packing_support() == expected
    assert check_mamba_sequence_packing_support(for_inference_not_training=True) == expected


@pytest.mark.parametrize(
    ("conv", "mamba", "expected"),
    [
        ("1.4.0", "2.0.0", (True, None)),
        ("1.3.9", "2.0.0", (False, "causal_conv1d >= 1.4.0 is required (found 1.3.9)")),
        ("1.4.0", None, (False, "mamba_ssm >= 2.0.0 is required (not installed)")),
    ],
)
def test_support_for_training(
    conv: str | None,
    mamba: str | None,
    expected: tuple[bool, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _pretend(conv, mamba, monkeypatch)
    assert check_mamba_sequence_packing_support(for_inference_not_training=False) == expected


def _pretend(conv: str | None, mamba: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, version in (("causal_conv1d", conv), ("mamba_ssm", mamba)):
        stub = None if version is None else types.SimpleNamespace(__version__=version)
        monkeypatch.setitem(sys.modules, module, stub)
