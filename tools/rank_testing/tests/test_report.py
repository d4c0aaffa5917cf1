"""The order and the text of a failure, from reports written for the test."""

from rank_testing.report import Kind, RankReport, make_failure


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
    failure = make_failure(reports, {}, 5, "test_x.py::f")
    assert [entry.rank for entry in failure.ranks] == [2, 4, 1, 3, 0]
    assert str(failure).splitlines()[0] == "rank 2 of 5 died: message 2, in test_x.py::f"
