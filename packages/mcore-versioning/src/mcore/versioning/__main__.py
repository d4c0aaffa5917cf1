"""The command ``python -m mcore.versioning [--json]``, which prints the environment report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the environment report and return the exit status 0."""
    parser = argparse.ArgumentParser(
        prog="python -m mcore.versioning",
        description="Print the versions of Python, torch, related libraries and mcore without "
        "importing them. Paste the output into bug reports.",
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    as_json = parser.parse_args(arguments).json
    from mcore.versioning.environment import environment_report

    report = environment_report()
    sys.stdout.write((report.as_json() if as_json else report.as_text()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
