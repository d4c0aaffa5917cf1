"""Shortened lists, written out by hand."""

from __future__ import annotations

import pytest

from mcore.parallel.shortened import ranks_text, titled_list


def test_up_to_twenty_items_are_all_of_the_list() -> None:
    assert titled_list("bad keys", ["a"]) == "bad keys (1 problem):\n  - a"
    assert titled_list("bad", ["a", "b"], "key") == "bad (2 keys):\n  - a\n  - b"
    twenty = titled_list("bad", [str(n) for n in range(20)]).splitlines()
    assert twenty == ["bad (20 problems):", *(f"  - {n}" for n in range(20))]
    more = titled_list("bad", [str(n) for n in range(23)]).splitlines()
    assert more == ["bad (23 problems):", *twenty[1:], "  ... and 3 more"]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([0, 1, 2, 7, 9, 10], "ranks 0-2, 7, 9-10"),
        (list(range(0, 40, 2)), "ranks " + ", ".join(map(str, range(0, 40, 2)))),
        (list(range(0, 44, 2)), "ranks " + ", ".join(map(str, range(0, 40, 2))) + ", ..."),
    ],
)
def test_ranks_are_written_as_ranges(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
