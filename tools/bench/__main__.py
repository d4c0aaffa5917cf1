"""Command line: ``python -m bench [SUITE ...] [--record]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.record import COLUMNS, cells, keep, page, read_results
from bench.running import SuiteResult, facts, run_suites, suite_names
from results import RECORDS
from results.journal import JournalError, write_whole
from results.machine import join_facts, load_average, timestamp
from results.page import text_table

EXIT_OK, EXIT_FAILED, EXIT_NOTHING_RAN = 0, 1, 2
RESULTS = RECORDS / "benchmarks.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested suites and print their tables.

    Returns 1 if a suite failed or disagreed, 2 if none ran. A suite without its peer counts only
    if no other suite ran.
    """
    available = suite_names()
    options = _build_parser(available).parse_args(arguments)
    if (options.record or options.page) and not options.results:
        options.results = RESULTS
    if error := _find_conflict(options, available):
        print(f"bench: error: {error}", file=sys.stderr)
        return EXIT_NOTHING_RAN
    try:
        # Before anything is measured: a damaged journal or an unusable file ends the run here.
        kept = read_results(options.results) if options.results else {}
        if options.results:
            write_whole(options.results.with_suffix(".md"), page(kept))
        return EXIT_OK if options.page else _measure(options, available)
    except (OSError, JournalError) as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return EXIT_NOTHING_RAN


def _find_conflict(options: argparse.Namespace, available: Sequence[str]) -> str:
    if unknown := sorted(set(options.suites) - set(available)):
        return f"no suite {', '.join(unknown)}. Available: {', '.join(available)}"
    return "--page measures no suite" if options.page and options.suites else ""


def _measure(options: argparse.Namespace, available: Sequence[str]) -> int:
    """Run the suites. The results of each are kept before the next begins."""
    print(join_facts({"date": timestamp(), **facts(), "load average": load_average()}))
    results = []
    for result in run_suites(options.suites or available):
        results.append(result)
        _print_result(result)
        if options.results and not result.is_complete:
            print(f"{options.results} keeps the earlier results of {result.suite}", file=sys.stderr)
        elif options.results:
            kept = keep(options.results, result)
            write_whole(options.results.with_suffix(".md"), page(kept))
    if any(result.failed for result in results):
        return EXIT_FAILED
    return EXIT_OK if any(result.rows for result in results) else EXIT_NOTHING_RAN


def _build_parser(available: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hatch run bench",
        description="Measure both sides of every case in turns, after comparing their results.",
    )
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help=f"{', '.join(available)} (default: all)")
    add("--results", type=Path, metavar="FILE", help="keep the results here, with a page")
    add("--record", action="store_true", help="use the results and the page of the repository")
    add("--page", action="store_true", help="measure nothing, write only the page")
    return parser


def _print_result(result: SuiteResult) -> None:
    print(f"\n{result.suite}, {result.seconds:.0f} s, load average {' to '.join(result.load)}")
    if result.rows:
        print(text_table(COLUMNS, map(cells, result.rows)), flush=True)
    if result.missing:
        print(
            f"not run: this suite needs the module {result.missing!r}, which is not installed. "
            f"`hatch run bench {result.suite}` runs it in an environment with all peers"
        )
    if result.error:
        print(f"ERROR: the suite failed\n{result.error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
