"""Command line: ``python -m monorepo [CHECK ...]``. Checks the repository's files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from monorepo import changelog, dependencies, ranges, settings, tree, words
from monorepo.git_tags import GitError
from monorepo.workspace import REPOSITORY, Workspace, load_workspace

CHECKS: Mapping[str, Callable[[Workspace, str | None], Iterable[str]]] = {
    "settings": lambda workspace, _: settings.problems(workspace),
    "tree": lambda workspace, _: tree.problems(tree.import_roots(workspace)),
    "links": lambda workspace, _: settings.link_problems(workspace.root),
    "dependencies": lambda workspace, _: dependencies.problems(workspace),
    "ranges": lambda workspace, _: ranges.find_misfits(workspace),
    "changelog": changelog.problems,
    "words": lambda workspace, _: words.problems(workspace.root),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the problems found. Returns 1 if there are any, 2 if the files cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m monorepo", description=__doc__)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--base", metavar="REF", help="also check the changes since this revision")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = set(options.checks) - CHECKS.keys()
    if unknown:
        parser.error(f"no check {', '.join(sorted(unknown))}; there are: {', '.join(CHECKS)}")
    status = 0
    try:
        workspace = load_workspace(options.root)
        for name in options.checks or CHECKS:
            found = list(CHECKS[name](workspace, options.base))
            print("\n".join(found) or f"{name}: in order", flush=True)
            status = status or int(bool(found))
    except (GitError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
