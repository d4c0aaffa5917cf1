"""The files that the ranks of one run leave in its folder."""

import os
from pathlib import Path


def output_path(folder: str, rank: int) -> str:
    """Return the file that takes the standard output and error of `rank`."""
    return os.path.join(folder, f"rank{rank}.output")


def stack_path(folder: str, rank: int) -> str:
    """Return the file that takes the Python stacks of `rank`."""
    return os.path.join(folder, f"rank{rank}.stack")


def rendezvous_path(folder: str) -> str:
    """Return the file through which the ranks find each other."""
    return os.path.join(folder, "rendezvous")


def text_of(path: str) -> str:
    """Return what was written to `path`; nothing where a rank did not come to open it."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
