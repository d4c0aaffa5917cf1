"""The lazy names of the package resolve."""

from __future__ import annotations

import pytest

import mcore.parallel.checkpoint


@pytest.mark.parametrize("name", sorted(mcore.parallel.checkpoint.__all__))
def test_every_name_is_there(name: str) -> None:
    assert getattr(mcore.parallel.checkpoint, name) is not None


def test_names_are_unique_and_unknown_ones_an_error() -> None:
    names = mcore.parallel.checkpoint.__all__
    assert len(set(names)) == len(names)
    with pytest.raises(AttributeError, match="no attribute 'ShardedPlan'"):
        mcore.parallel.checkpoint.ShardedPlan  # noqa: B018 - the look-up is the test
