"""Command line: ``python -m bench [SUITE ...] [--json FILE] [--markdown]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.running import SuiteResult, run_suites, suite_names
from bench.table import as_data, describe_machine, markdown_table, text_table

EXIT_OK, EXIT_FAILED, EXIT_NOTHING_RAN = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested suites and print their tables; 1: one failed or disagreed, 2: none ran."""
    available = suite_names()
    options = _parser(available).parse_args(arguments)
    unknown = sorted(set(options.suites) - set(available))
    if unknown:
        print(f"no suite {', '.join(unknown)}; there are: {', '.join(available)}", file=sys.stderr)
        return EXIT_NOTHING_RAN
    print(f"suites: {', '.join(available)}")
    if options.list:
        return EXIT_OK
    machine = describe_machine()
    _print_machine(machine, options.markdown)
    results = []
    for result in run_suites(options.suites or available):
        results.append(result)
        _print_result(result, options.markdown)
    if options.json:
        options.json.write_text(json.dumps(as_data(machine, results), indent=2) + "\n")
    return exit_code(results)


def exit_code(results: Sequence[SuiteResult]) -> int:
    """The worst that happened; suites that lack their peer count only when nothing else ran."""
    if any(result.failed for result in results):
        return EXIT_FAILED
    return EXIT_OK if any(result.rows for result in results) else EXIT_NOTHING_RAN


def _parser(available: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(available))
    parser.add_argument("--list", action="store_true", help="name the suites and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here as well")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    return parser


def _print_machine(machine: Mapping[str, str], markdown: bool) -> None:
    line = " | ".join(f"{label}: {text}" for label, text in machine.items())
    print(f"\n{line.replace(' | ', '; ')}" if markdown else line)


def _print_result(result: SuiteResult, markdown: bool) -> None:
    print(f"\n{'### ' if markdown else ''}{result.suite}", end="\n\n" if markdown else "\n")
    if result.rows:
        print(markdown_table(result.rows) if markdown else text_table(result.rows), flush=True)
    if result.missing:
        print(
            f"not run: this suite needs the module {result.missing!r}, which is not installed "
            f"here; `hatch run bench {result.suite}` runs it where all peers are"
        )
    if result.error:
        print(f"ERROR: the suite failed\n{result.error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
