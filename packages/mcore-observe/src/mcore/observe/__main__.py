"""The command line: what a run has logged, two runs side by side, and what is left to send."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mcore.observe.sinks.replay import replay


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m mcore.observe", description=__doc__)
    commands = parser.add_subparsers(required=True)
    sending = commands.add_parser("replay", help="send what trackers have not taken")
    sending.add_argument("run", help="folder of the run")
    sending.add_argument("--mlflow-uri", help="MLflow's server, if its address has a password")
    sending.set_defaults(call=_replay)
    options = parser.parse_args(arguments)
    try:
        for line in options.call(options):
            print(line, flush=True)  # noqa: T201
    except Exception as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    return 0


def _replay(options: argparse.Namespace) -> Sequence[str]:
    lines = list(replay(options.run, mlflow_uri=options.mlflow_uri))
    return lines or [f"nothing is left to send in {options.run}"]


if __name__ == "__main__":
    sys.exit(main())
