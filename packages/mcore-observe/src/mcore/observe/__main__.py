"""The command line: show a run, compare runs, and send metrics that are not delivered yet."""

from __future__ import annotations

import argparse
import glob
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mcore.observe.runs import Run, compare, draw_page, draw_picture, show
from mcore.observe.sinks.delivery.replay import replay
from mcore.observe.terminal import plain

_LOOK_EVERY_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m mcore.observe", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = _add_command(commands, "show", "show the metrics of a run", _show)
    one.add_argument("run", help="folder of a run, or its metrics.jsonl")
    one.add_argument(
        "--follow", action="store_true", help="print again when the run has grown, until Ctrl-C"
    )
    two = _add_command(commands, "compare", "compare the metrics of two runs or more", _compare)
    two.add_argument(
        "runs", metavar="run", nargs="+", help="folders, files or patterns such as 'runs/lr-*'"
    )
    for command in (one, two):
        command.add_argument(
            "--metric", action="append", default=[], help="only this name or pattern (repeatable)"
        )
        command.add_argument("--png", metavar="FILE", help="write a picture (needs matplotlib)")
        command.add_argument("--html", metavar="FILE", help="write a self-contained HTML page")
    sending = _add_command(commands, "replay", "send undelivered metrics to trackers", _replay)
    sending.add_argument("run", help="folder of the run")
    sending.add_argument("--mlflow-uri", help="MLflow server (MLFLOW_TRACKING_URI)")
    sending.add_argument(
        "--trust-run",
        action="store_true",
        help="send metrics and credentials to the address in the folder",
    )
    options = parser.parse_args(arguments)
    try:
        for line in options.call(options):
            print(plain(line), flush=True)  # noqa: T201
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # of head, or a closed pager
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        print(f"{parser.prog}: error: {_describe(error)}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _describe(error: Exception) -> str:
    # str() of a KeyError adds quotes.
    return plain(str(error.args[0] if isinstance(error, KeyError) else error))


def _add_command(
    commands: Any, name: str, text: str, call: Callable[[argparse.Namespace], Iterator[str]]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(call=call)
    return parser


def _show(options: argparse.Namespace) -> Iterator[str]:
    shown: dict[str, dict[int, float]] | None = None
    reason = ""
    while True:
        try:
            run = Run.read(options.run)
            lines = list(show(run, options.metric)) if run.curves != shown else []
        except (FileNotFoundError, KeyError, ValueError) as error:
            # The run starts later or anew: a renamed file, a new one without lines, or no metric.
            if not options.follow:
                raise
            lines, before, reason = [], reason, _describe(error)
            if reason != before:
                yield f"waiting: {reason}"
        if lines:
            yield from [""] * bool(shown) + lines
            yield from _draw([run], options)
            shown = run.curves
        if not options.follow:
            return
        time.sleep(_LOOK_EVERY_S)


def _compare(options: argparse.Namespace) -> Iterator[str]:
    paths = [sorted(glob.glob(path)) or [path] for path in options.runs]
    runs = [Run.read(path) for path in itertools.chain(*paths)]
    if len(runs) < 2:
        raise ValueError(f"{options.runs[0]} is one run: give two or more")
    yield from compare(runs, options.metric)
    yield from _draw(runs, options)


def _draw(runs: Sequence[Run], options: argparse.Namespace) -> Iterator[str]:
    runs = [
        replace(run, curves={n: run.curves[n] for n in run.match(options.metric)}) for run in runs
    ]
    for path, draw in ((options.png, draw_picture), (options.html, draw_page)):
        if path is not None:
            draw(runs, path)
            yield f"wrote {path}"


def _replay(options: argparse.Namespace) -> Iterator[str]:
    is_empty = True
    for line in replay(options.run, mlflow_uri=options.mlflow_uri, trust_run=options.trust_run):
        is_empty = False
        yield line
    if is_empty:
        yield f"nothing is left to send in {options.run}"


if __name__ == "__main__":
    sys.exit(main())
