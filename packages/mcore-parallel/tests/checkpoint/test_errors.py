"""Reports of many ranks as text, written out by hand."""

from __future__ import annotations

from mcore.parallel.checkpoint.errors import (
    CheckpointingException,
    describe_error,
    merge_reports,
)


def test_equal_reports_stand_there_once_and_in_the_order_of_the_ranks() -> None:
    reports = {2: "full", 0: "lost", 1: "full"}
    assert merge_reports(reports) == "rank 0: lost\nranks 1-2: full"
    many = merge_reports({rank: f"text {rank}" for rank in range(25)}).splitlines()
    assert many == [*(f"rank {rank}: text {rank}" for rank in range(20)), "... and 5 more"]


def test_an_error_of_another_kind_is_named_with_its_type() -> None:
    assert describe_error(CheckpointingException("key 'w'")) == "key 'w'"
    assert describe_error(OSError("disk full")) == "OSError: disk full"
