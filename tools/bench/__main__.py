"""Command line: ``python -m bench [SUITE ...] [--record]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.machine import joined, load_average, now
from bench.results import ResultsError, keep, page, read_results, write_whole
from bench.running import SuiteResult, facts, run_suites, suite_names
from bench.table import text_table

EXIT_OK, EXIT_FAILED, EXIT_NOTHING_RAN = 0, 1, 2
RESULTS = Path(__file__).parents[1] / "docs/benchmarks.jsonl"
PAGE = RESULTS.with_suffix(".md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested suites and print their tables; 1: one failed or disagreed, 2: none ran."""
    available = suite_names()
    options = _parser(available).parse_args(arguments)
    if (options.record or options.page) and not options.results:
        options.results, options.output = RESULTS, options.output or PAGE
    if refused := _refused(options, available):
        print(f"bench: error: {refused}", file=sys.stderr)
        return EXIT_NOTHING_RAN
    print(f"suites: {', '.join(available)}")
    if options.list:
        return EXIT_OK
    try:
        return _write_page(options) if options.page else _measure(options, available)
    except (OSError, ResultsError) as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return EXIT_NOTHING_RAN


def exit_code(results: Sequence[SuiteResult]) -> int:
    """The worst that happened; suites that lack their peer count only when nothing else ran."""
    if any(result.failed for result in results):
        return EXIT_FAILED
    return EXIT_OK if any(result.rows for result in results) else EXIT_NOTHING_RAN


def _refused(options: argparse.Namespace, available: Sequence[str]) -> str:
    """Why these options are none, else empty."""
    if unknown := sorted(set(options.suites) - set(available)):
        return f"no suite {', '.join(unknown)}; there are: {', '.join(available)}"
    if options.output and not options.results:
        return "--output writes the page of the results in a file: name it with --results"
    if options.page and (options.suites or not options.output):
        return "--page measures no suite, and writes to --output what --results has"
    return ""


def _write_page(options: argparse.Namespace) -> int:
    write_whole(options.output, page(read_results(options.results)))
    return EXIT_OK


def _measure(options: argparse.Namespace, available: Sequence[str]) -> int:
    """Run the suites; what one found is kept before the next begins."""
    if options.output:
        _write_page(options)
    elif options.results:
        read_results(options.results)
    print(joined({"date": now(), **facts(), "load average": load_average()}))
    results = []
    for result in run_suites(options.suites or available):
        results.append(result)
        _print_result(result)
        if options.results:
            _keep(result, options.results, options.output)
    return exit_code(results)


def _keep(result: SuiteResult, results: Path, output: Path | None) -> None:
    if not result.is_whole:
        print(f"{results} keeps what it had of {result.suite}", file=sys.stderr)
        return
    kept = keep(results, result)
    if output:
        write_whole(output, page(kept))


def _parser(available: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hatch run bench",
        description="Measure both sides of every case in turn, after comparing their results.",
    )
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help=f"{', '.join(available)} (all)")
    add("--list", action="store_true", help="name the suites and stop")
    add(
        "--results", type=Path, metavar="FILE",
        help="keep each suite's figures here, in place of its earlier ones",
    )  # fmt: skip
    add("--output", type=Path, metavar="FILE", help="write the page of all results")
    add(
        "--record", action="store_true",
        help="short for --results tools/docs/benchmarks.jsonl --output tools/docs/benchmarks.md",
    )  # fmt: skip
    add("--page", action="store_true", help="measure nothing: write the page again")
    return parser


def _print_result(result: SuiteResult) -> None:
    print(f"\n{result.suite}, {result.seconds:.0f} s, load average {' to '.join(result.load)}")
    if result.rows:
        print(text_table(result.rows), flush=True)
    if result.missing:
        print(
            f"not run: this suite needs the module {result.missing!r}, which is not installed "
            f"here; `hatch run bench {result.suite}` runs it where all peers are"
        )
    if result.error:
        print(f"ERROR: the suite failed\n{result.error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
