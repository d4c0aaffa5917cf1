"""The command line: show straggler controllers, query them, switch them on and off."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence

from mcore.observe.extras import require_extra
from mcore.observe.straggler_command.client import (
    MOST_TEXT,
    TOKEN_VARIABLE,
    Address,
    AnswerError,
    Client,
    read_token,
)
from mcore.observe.straggler_command.snapshot import JobSnapshot
from mcore.observe.straggler_command.table import Poller, as_json, headline, show_live, text_of
from mcore.observe.terminal import plain

# Scripts check these. 2 is also the code of argparse for wrong arguments.
FINE, UNREACHABLE, USAGE, SLOW = 0, 1, 2, 3
_DEFAULT_ROWS = 10
_EXIT_CODES = (
    "exit code: 0 fine, 1 a controller does not answer, 2 usage, 3 a rank is slow (only watch)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    try:
        token = read_token(options.token_file)
    except (OSError, ValueError) as error:
        parser.error(f"--token-file: {error}" if options.token_file else str(error))
    clients = [
        Client(address, token=token, timeout_s=options.timeout) for address in options.address
    ]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # unsupported characters become question marks
    try:
        code: int = options.call(clients, options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # head, or a pager that was closed
        # Python would print an error when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    return code


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-straggler",
        description="Show the straggler controllers of jobs, query them, switch them on and off.",
        epilog=f"Set the token in {TOKEN_VARIABLE} or --token-file. {_EXIT_CODES}.",
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("address", nargs="+", type=_parse_address, metavar="HOST:PORT")
    shared.add_argument("--token-file", metavar="FILE", help="file with the token")
    shared.add_argument(
        "--timeout",
        type=_parse_seconds,
        default=5.0,
        metavar="S",
        help="timeout of a request in seconds (5)",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, text: str, call: Callable[[list[Client], argparse.Namespace], int]
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=text, description=text, parents=[shared], epilog=_EXIT_CODES
        )
        added.set_defaults(call=call)
        return added

    one = command("watch", "show the slowest ranks, live, until Ctrl-C", _watch)
    one.add_argument(
        "--interval",
        type=_parse_seconds,
        default=2.0,
        metavar="S",
        help="seconds between requests (2)",
    )
    one.add_argument(
        "--rows", type=_parse_rows, metavar="N", help="ranks per job (as many as fit, or 10)"
    )
    one.add_argument(
        "--metric",
        default="elapsed_ms",
        help="sort by this: elapsed_ms, data_ms, temp_c, power_w, util_pct, clock_mhz, etpt_tf "
        "or a section (elapsed_ms)",
    )
    one.add_argument("--once", action="store_true", help="print the present state and exit")
    one.add_argument("--json", action="store_true", help="print a JSON object (only with --once)")
    status = command(
        "status", "print whether timing is on, the number of ranks and of reports", _print_status
    )
    status.add_argument(
        "--json", action="store_true", help="print the JSON of each controller on a line"
    )
    status.set_defaults(method="GET", path="/status")
    report = command("report", "print the last report of each controller as JSON on a line", _query)
    report.set_defaults(method="GET", path="/report")
    for name, text in (
        ("toggle", "switch timing to the other state after the next report"),
        ("on", "switch timing on after the next report"),
        ("off", "switch timing off after the next report"),
    ):
        command(name, text, _query).set_defaults(method="POST", path=f"/{name}")
    return parser


def _watch(clients: list[Client], options: argparse.Namespace) -> int:
    if options.json and not options.once:
        print("mcore-straggler: error: watch --json needs --once", file=sys.stderr)  # noqa: T201
        return USAGE
    if not options.json:
        try:
            require_extra("watch", "mcore-straggler watch")
        except ModuleNotFoundError as error:
            print(f"mcore-straggler: error: {error}", file=sys.stderr)  # noqa: T201
            return USAGE
    poller = Poller(clients, options.metric, options.interval)
    poller.poll_once()
    reports = [job.report for job in poller.jobs if job.report is not None]
    names = list(dict.fromkeys(name for report in reports for name in report.names))
    if reports and options.metric not in names:
        known = plain(", ".join(names), 400)
        text = f"no controller has the metric {plain(options.metric)!r}: they have {known}"
        print(f"mcore-straggler: error: {text}", file=sys.stderr)  # noqa: T201
        return USAGE
    if not options.once:
        try:
            show_live(poller, options.rows, sys.stdout)
        except KeyboardInterrupt:
            return _choose_exit_code(poller.jobs)
    rows = _DEFAULT_ROWS if options.rows is None else options.rows
    if options.json:
        _print(json.dumps(as_json(poller.jobs, rows), allow_nan=False))
    else:
        sys.stdout.write(text_of(poller.jobs, rows, sys.stdout))
    return _choose_exit_code(poller.jobs)


def _print_status(clients: list[Client], options: argparse.Namespace) -> int:
    if options.json:
        return _query(clients, options)
    poller = Poller(clients, "elapsed_ms", 0.0)
    poller.poll_once()
    for job in poller.jobs:
        _print(headline(job))
    return UNREACHABLE if any(job.error is not None for job in poller.jobs) else FINE


def _query(clients: list[Client], options: argparse.Namespace) -> int:
    """Print the answer of each controller, or its error on standard error."""
    code, method = FINE, options.method
    for client in clients:
        try:
            answer = client.request(method, options.path).check()
            text = json.dumps(answer.json()) if method == "GET" else plain(answer.text, MOST_TEXT)
        except AnswerError as error:
            print(f"{client.address}: {error}", file=sys.stderr)  # noqa: T201
            code = UNREACHABLE
        else:
            _print(f"{client.address}: {text}" if method == "POST" else text)
    return code


def _choose_exit_code(jobs: Sequence[JobSnapshot]) -> int:
    """Return the exit code. If several apply, that of a slow rank."""
    if any(job.slow for job in jobs):
        return SLOW
    return UNREACHABLE if any(job.error is not None for job in jobs) else FINE


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _parse_address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 3600 seconds")
    return value


def _parse_rows(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
