"""Command line: ``python -m monorepo.links``. Relative links of the documents, checked."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from monorepo.git_tags import git
from monorepo.workspace import PACKAGES_FOLDER, REPOSITORY

_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the links that lead nowhere; return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m monorepo.links", description=__doc__)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    root = parser.parse_args(arguments).root.resolve()
    listed = git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z", "*.md")
    documents = [root / name for name in listed.split("\0") if name and (root / name).is_file()]
    found = [problem for document in documents for problem in broken_links(root, document)]
    print("\n".join(found) or f"every link of {len(documents)} documents leads somewhere")
    return 1 if found else 0


def broken_links(root: Path, document: Path) -> Iterator[str]:
    """The links of a document to files or headings that do not exist, a line each."""
    text = _CODE.sub("", _FENCED.sub("", document.read_text(encoding="utf-8")))
    for target in _LINK.findall(text):
        if _ELSEWHERE.match(target):
            continue
        path, _, heading = target.partition("#")
        file = (root / path[1:] if path.startswith("/") else document.parent / path).resolve()
        file = document if not path else file
        shown = f"{document.relative_to(root)}: {target}"
        on_the_index = document.name == "README.md" and document.parents[1].name == PACKAGES_FOLDER
        if path and on_the_index:
            yield f"{shown} leads nowhere from the page that a package index shows"
        elif not file.exists():
            yield f"{shown} leads to no file"
        elif heading and heading not in headings(file.read_text(encoding="utf-8")):
            yield f"{shown} leads to no heading"


def headings(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    plain = (re.sub(r"[`*]|\[|\]\([^)]*\)", "", each) for each in _HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in plain}


if __name__ == "__main__":
    sys.exit(main())
