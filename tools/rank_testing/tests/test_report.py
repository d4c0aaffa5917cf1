"""The order and the text of a failure, from reports written by hand."""

from rank_testing.report import (
    Kind,
    RankReport,
    in_torch_distributed,
    rank_failure,
    readable_stacks,
)


def report(rank: int, kind: Kind, *, elapsed_s: float = 0.5, place: int = 0) -> RankReport:
    return RankReport(rank, kind, "SomeError", f"message {rank}", "", "", elapsed_s, place)


def test_the_smallest_place_comes_first_then_the_earliest_then_the_lowest_rank() -> None:
    reports = [
        report(0, "connection", elapsed_s=0.1, place=3),
        report(1, "raised", elapsed_s=0.3),
        report(2, "died", elapsed_s=0.2),
        report(4, "died", elapsed_s=0.2),
        report(3, "hung", elapsed_s=0.1, place=1),
    ]
    failure = rank_failure(reports, {}, 5, "test_x.py::f")
    assert [entry.rank for entry in failure.ranks] == [2, 4, 1, 3, 0]
    assert str(failure).splitlines()[0] == "rank 2 of 5 died: message 2, in test_x.py::f"


def test_the_first_line_is_one_line_of_bounded_length() -> None:
    long = RankReport(0, "raised", "ValueError", "one\ntwo " + "x" * 1000, "", "", 0.1, 0)
    first = str(rank_failure([long], {}, 1, "test_x.py::f")).splitlines()[0]
    assert first.startswith("rank 0 of 1 raised ValueError: one two xxx")
    assert first.endswith("x..., in test_x.py::f")
    assert len(first) < 400


def test_the_output_of_ranks_that_returned_is_shown() -> None:
    text = str(rank_failure([report(1, "raised")], {0: "hello\n", 2: ""}, 3, "f"))
    assert "ranks that returned: 0, 2" in text
    assert "==== rank 0: returned ====\n---- output of rank 0 ----\nhello" in text
    assert "rank 2: returned" not in text


def test_stacks_lose_the_frames_and_threads_of_the_harness() -> None:
    import rank_testing.child
    import rank_testing.orphans

    text = (
        "Thread 0x1 (most recent call first):\n"
        '  File "/lib/threading.py", line 1 in wait\n'
        f'  File "{rank_testing.orphans.__file__}", line 2 in wait_and_end\n'
        "\n"
        "Current thread 0x2 (most recent call first):\n"
        '  File "/lib/torch/distributed/c10d.py", line 3 in all_reduce\n'
        '  File "/tests/test_x.py", line 4 in step\n'
        f'  File "{rank_testing.child.__file__}", line 5 in _call\n'
        '  File "/lib/multiprocessing/process.py", line 6 in run\n'
        "\n"
        "Extension modules: torch._C (total: 1)\n"
    )
    stacks = readable_stacks(text)
    assert stacks == (
        "Current thread 0x2 (most recent call first):\n"
        '  File "/lib/torch/distributed/c10d.py", line 3 in all_reduce\n'
        '  File "/tests/test_x.py", line 4 in step'
    )
    assert in_torch_distributed(stacks)
    assert not in_torch_distributed(readable_stacks(text.replace("torch/distributed", "torch")))
