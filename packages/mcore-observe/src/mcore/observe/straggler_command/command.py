"""The command line: watch straggler controllers, ask them, switch them on and off."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence

from mcore.observe.straggler_command.client import (
    TOKEN_VARIABLE,
    Address,
    AnswerError,
    Client,
    plain,
    token_of,
)
from mcore.observe.straggler_command.screen import Watcher, text_of, watch
from mcore.observe.straggler_command.snapshot import View
from mcore.observe.straggler_command.table import as_json, headline

FINE, UNREACHABLE, USAGE, SLOW = 0, 1, 2, 3
_DEFAULT_ROWS = 10
_EXIT_CODES = "exit code: 0 fine, 1 a controller gives no answer, 2 usage, 3 a rank is slow"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        token = token_of(options.token_file)
    except (OSError, ValueError) as error:
        parser.error(f"--token-file: {error}" if options.token_file else str(error))
    clients = [
        Client(address, token=token, timeout_s=options.timeout) for address in options.address
    ]
    _be_quiet_about_encodings()
    try:
        code: int = options.call(clients, options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # of head, or a pager that was left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-straggler",
        description="Watch the straggler controllers of jobs, ask them, switch them on and off.",
        epilog=f"{TOKEN_VARIABLE} or --token-file gives the token. {_EXIT_CODES}.",
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("address", nargs="+", type=_address, metavar="HOST:PORT")
    shared.add_argument("--token-file", metavar="FILE", help="a file with the token")
    shared.add_argument(
        "--timeout", type=_seconds, default=5.0, metavar="S", help="seconds for an answer (5)"
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

    one = command("watch", "the slowest ranks, live, until Ctrl-C", _watch)
    one.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="S", help="seconds between looks (2)"
    )
    one.add_argument("--rows", type=_rows, metavar="N", help="ranks of each job (what fits, or 10)")
    one.add_argument(
        "--metric",
        default="elapsed_ms",
        help="sort by this: elapsed_ms, data_ms, temp_c, power_w, util_pct, clock_mhz, etpt_tf "
        "or a section (elapsed_ms)",
    )
    one.add_argument("--once", action="store_true", help="look once and end")
    one.add_argument("--json", action="store_true", help="one JSON object; needs --once")
    status = command("status", "whether timing is on, ranks and reports", _status)
    status.add_argument("--json", action="store_true", help="the controller's JSON, a line each")
    command("report", "the last report as JSON, a line for each controller", _report)
    for name, text in (
        ("toggle", "switch timing to the other state after the next report"),
        ("on", "switch timing on after the next report"),
        ("off", "switch timing off after the next report"),
    ):
        command(name, text, _switch).set_defaults(path=f"/{name}")
    return parser


def _watch(clients: list[Client], options: argparse.Namespace) -> int:
    if options.json and not options.once:
        return _usage("watch --json needs --once")
    watcher = Watcher(clients, options.metric, options.interval)
    if not options.once:
        try:
            watch(watcher, options.rows, sys.stdout)
        except KeyboardInterrupt:
            return _code(watcher.views)
    watcher.look_once()
    rows = _DEFAULT_ROWS if options.rows is None else options.rows
    if options.json:
        _say(json.dumps(as_json(watcher.views, rows), allow_nan=False))
    else:
        sys.stdout.write(text_of(watcher.views, rows, sys.stdout))
    return _code(watcher.views)


def _status(clients: list[Client], options: argparse.Namespace) -> int:
    if options.json:
        return _ask(clients, "GET", "/status")
    watcher = Watcher(clients, "elapsed_ms", 0.0)
    watcher.look_once()
    for view in watcher.views:
        _say(headline(view))
    return UNREACHABLE if any(view.error is not None for view in watcher.views) else FINE


def _report(clients: list[Client], options: argparse.Namespace) -> int:
    return _ask(clients, "GET", "/report")


def _switch(clients: list[Client], options: argparse.Namespace) -> int:
    return _ask(clients, "POST", options.path)


def _ask(clients: list[Client], method: str, path: str) -> int:
    """Print each controller's answer; those that give none are named on standard error."""
    code = FINE
    for client in clients:
        try:
            answer = client.ask(method, path).checked()
            text = json.dumps(answer.json()) if method == "GET" else plain(answer.text)
        except AnswerError as error:
            print(f"{client.address}: {error}", file=sys.stderr)  # noqa: T201
            code = UNREACHABLE
        else:
            _say(f"{client.address}: {text}" if method == "POST" else text)
    return code


def _code(views: Sequence[View]) -> int:
    """A rank that is known to be slow counts more than a controller that gives no answer."""
    if any(view.slow for view in views):
        return SLOW
    return UNREACHABLE if any(view.error is not None for view in views) else FINE


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _usage(text: str) -> int:
    print(f"mcore-straggler: error: {text}", file=sys.stderr)  # noqa: T201
    return USAGE


def _be_quiet_about_encodings() -> None:
    """Print what a terminal has no characters for as question marks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 3600 seconds")
    return value


def _rows(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value
