"""Maxima and errors that all ranks of a group share, with ranks that fail in several ways."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore.parallel import agreement, reductions
from mcore.parallel.agreement import (
    first_difference,
    gathered_reports,
    max_or_raise,
    require_equal,
    text_digest,
)
from mcore.parallel.checkpoint.team import Team
from mcore.parallel.mesh_groups import agree_on_groups
from mcore.parallel.process_groups.creation import agree_on_plan
from mcore.parallel.torch_compat import can_order_ranks
from rank_testing import run_ranks


def outcome(numbers: list[Any], error: Exception | None) -> object:
    group = dist.group.WORLD
    try:
        return max_or_raise(numbers, [] if error is None else [error], group)
    except Exception as raised:
        return type(raised).__name__, str(raised), raised is error


def agree_and_fail() -> list[object]:
    rank = dist.get_rank()
    found = [
        outcome([rank, -rank, 2**62 - rank], None),
        outcome([0], TypeError("no number") if rank == 1 else None),
        outcome([0], [None, KeyError("b"), ValueError("c")][rank]),
        outcome([0], ValueError("long " * 1000) if rank == 2 else None),
        outcome([rank], None),
        outcome([torch.tensor(rank), 2**63 - 1, torch.tensor(-(2**63))], None),
    ]
    if can_order_ranks():
        reversed_group = dist.new_group([2, 1, 0], sort_ranks=False)
        try:
            failed = [] if rank == 1 else [ValueError(f"from {rank}")]
            max_or_raise([0], [*failed], reversed_group)
        except ValueError as raised:
            found.append(str(raised))
    return found


def test_all_ranks_get_the_maxima_or_the_error_of_the_first_that_fails() -> None:
    results = run_ranks(agree_and_fail, 3)
    for rank, (maxima, one_fails, two_fail, long, after, mixed, *other_order) in enumerate(results):
        assert maxima == [2, 0, 2**62]
        shared = "rank 1 of the process group failed: no number"
        own = rank == 1
        assert one_fails == ("TypeError", "no number" if own else shared, own)
        assert (
            two_fail
            == [
                ("RuntimeError", "rank 1 of the process group failed: 'b'", False),
                ("KeyError", "'b'", True),
                ("ValueError", "c", True),
            ][rank]
        )
        assert long[0] == "ValueError"  # type: ignore[index]
        assert "failed: long long" in long[1] or rank == 2  # type: ignore[index]
        assert after == [2]  # the group still works
        assert mixed == [2, 2**63 - 1, -(2**63)]
        expected = ["from 0", "rank 2 of the process group failed: from 2", "from 2"]
        assert other_order == ([expected[rank]] if can_order_ranks() else [])


def reports_and_messages() -> list[object]:
    """What all ranks report, and the bytes of the collectives that this takes."""
    rank, group = dist.get_rank(), dist.group.WORLD
    messages: list[tuple[str, int]] = []

    def counted(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            messages.append((name, tensor.nbytes))
            return real(tensor, *args, **kwargs)

        setattr(module, name, call)

    counted(dist, "all_reduce")
    counted(dist, "broadcast")
    return [
        gathered_reports(None, group),
        gathered_reports(["first", None, "\u00e4" * 5000][rank], group),
        gathered_reports("" if rank == 1 else None, group),
        max_or_raise([rank, -rank], [], group),
        max_or_raise([rank], [], group),
        outcome([rank], ValueError("no") if rank == 1 else None)[1:2],  # type: ignore[index]
        first_difference([b"same", b"%04d" % rank, b"same"], group),
        first_difference([b"same"], group),
        messages,
    ]


class LostError(ValueError):
    """Can be referenced weakly, unlike the errors of Python."""


def fail() -> Any:
    raise LostError("lost")


def test_an_error_that_all_ranks_raise_keeps_no_frame_alive(fake_world) -> None:
    fake_world(0, 4)
    group = dist.group.WORLD
    calls: dict[str, Any] = {
        "numbers": lambda: max_or_raise([], [LostError("lost")], group),
        "arguments": lambda: require_equal({"a": 1}, [LostError("lost")], group),
        "sizes": lambda: agree_on_plan(fail, dict),
        "meshes": lambda: agree_on_groups(fail, {}),
        "maxima": lambda: reductions._reduce(fail, group, ""),
        "save": lambda: Team(group, 0, 4).agree(fail),
        "first rank": lambda: Team(group, 0, 4).scatter(fail, 8),
    }
    found: dict[str, Any] = {}
    gc.collect()
    gc.disable()  # a group in a frame would keep its threads until the next collection
    try:
        for name, call in calls.items():
            try:
                call()
            except Exception as error:
                own = error if isinstance(error, LostError) else error.__cause__
                assert isinstance(own, LostError)
                found[name] = weakref.ref(own)
                del own
        assert {name for name, error in found.items() if error() is not None} == set()
    finally:
        gc.enable()
    assert found.keys() == calls.keys()


def reports_beyond_the_limit() -> dict[int, str]:
    agreement._MAX_REPORTS = 2
    return gathered_reports(f"text {dist.get_rank()}", dist.group.WORLD)


def test_the_first_reports_are_sent_and_all_failed_ranks_are_named() -> None:
    untold = "failed too, the text was not sent"
    expected = {0: "text 0", 1: "text 1", 2: untold, 3: untold}
    assert run_ranks(reports_beyond_the_limit, 4) == [expected] * 4


def test_reports_of_all_failing_ranks_reach_all_in_small_messages() -> None:
    results = run_ranks(reports_and_messages, 3)
    for rank, result in enumerate(results):
        none, two, empty, maxima, plain, raised, *differences, messages = result
        assert none == {}
        assert two == {0: "first", 2: "\u00e4" * 2048}
        assert empty == {1: "unknown error"}
        assert (maxima, plain) == ([2, 0], [2])
        assert raised == (("no",) if rank == 1 else ("rank 1 of the process group failed: no",))
        assert differences == [1, 1]
        assert messages == [
            ("all_reduce", 3),
            *[("all_reduce", 3), ("all_reduce", 2 * 4096)],
            *[("all_reduce", 3), ("all_reduce", 4096)],
            *[("all_reduce", 512)] * 2,
            *[("all_reduce", 512), ("broadcast", 2048)],
            ("all_reduce", 2 * 12),
            ("all_reduce", 2 * 4),
        ]


@pytest.mark.parametrize("text", ["", "a", "b", "tp 2, cp 4" * 100])
def test_a_digest_and_its_negative_fit_into_64_bits(text: str) -> None:
    digest = text_digest(text)
    both = torch.tensor([digest, -digest], dtype=torch.int64)
    assert both.tolist() == [digest, -digest]
    assert digest == text_digest(text) != text_digest(text + " ")
