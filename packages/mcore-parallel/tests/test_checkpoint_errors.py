"""Reports of many ranks as text, written out by hand."""

from __future__ import annotations

import pytest

from mcore.parallel.checkpoint.errors import (
    CheckpointingException,
    bounded_list,
    describe_error,
    merge_reports,
    ranks_text,
)


def test_up_to_twenty_items_are_all_of_the_list() -> None:
    assert bounded_list("bad keys", ["a"]) == "bad keys (1 problem):\n  - a"
    assert bounded_list("bad", ["a", "b"], "key") == "bad (2 keys):\n  - a\n  - b"
    twenty = bounded_list("bad", [str(n) for n in range(20)]).splitlines()
    assert twenty == ["bad (20 problems):", *(f"  - {n}" for n in range(20))]
    more = bounded_list("bad", [str(n) for n in range(23)]).splitlines()
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


def test_equal_reports_stand_there_once_and_in_the_order_of_the_ranks() -> None:
    reports = {2: "full", 0: "lost", 1: "full"}
    assert merge_reports(reports) == "rank 0: lost\nranks 1-2: full"
    many = merge_reports({rank: f"text {rank}" for rank in range(25)}).splitlines()
    assert many == [*(f"rank {rank}: text {rank}" for rank in range(20)), "... and 5 more"]


def test_an_error_of_another_kind_is_named_with_its_type() -> None:
    assert describe_error(CheckpointingException("key 'w'")) == "key 'w'"
    assert describe_error(OSError("disk full")) == "OSError: disk full"
