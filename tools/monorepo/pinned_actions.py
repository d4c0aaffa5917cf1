"""Command line: ``python -m monorepo.pinned_actions``.

Every action that a workflow uses is named by its commit, with its release in a comment.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from monorepo.workspace import REPOSITORY

WORKFLOWS = ".github/workflows"

_USES = re.compile(r"\s*(?:-\s+)?[\"']?uses[\"']?\s*:\s*(?P<action>.*)")
_PINNED = re.compile(r"[\"']?[\w.-]+(?:/[\w.-]+)+@[0-9a-f]{40}[\"']?\s+#\s*v\d+(?:\.\d+)*\s*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every action without a commit or a release; return 1 if there is one, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m monorepo.pinned_actions",
        description="Check that workflows name every action by its commit.",
    )
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    root = parser.parse_args(arguments).root
    files = sorted([*(root / WORKFLOWS).glob("*.yml"), *(root / WORKFLOWS).glob("*.yaml")])
    problems = [problem for file in files for problem in loose_actions(file)]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def loose_actions(file: Path) -> Iterator[str]:
    """Yield the actions of a workflow file that are not pinned.

    Those of this repository, which begin with ``./``, come with the commit itself.
    """
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        found = _USES.fullmatch(line)
        if found is None or found["action"].startswith("./"):
            continue
        if _PINNED.fullmatch(found["action"]) is None:
            yield (
                f"{file.name}:{number}: {found['action']} has to be OWNER/NAME@COMMIT # vRELEASE, "
                "with the 40 digits of the commit"
            )


if __name__ == "__main__":
    sys.exit(main())
