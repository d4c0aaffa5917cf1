"""Command line: ``python -m mcore.parallel.checkpoint``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.inspection.output import Output, escaped

_DESCRIPTION = """\
Look into checkpoints, check them, compare and convert them.

PATH is a checkpoint, of this package or of torch.distributed.checkpoint, or the folder of a run
with checkpoints step_N in it. Nothing that a checkpoint holds is run, and none is loaded whole
except by to-torch.
"""
_EXIT_CODES = """\
exit codes: 0 success; 1 verify found damage, diff found a difference; 2 the command is wrong, or
what it names cannot be read
"""
_BROKEN_PIPE = 128 + 13  # as of a program that the signal ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = _parser().parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code: int = _run(options, Output(sys.stdout, sys.stderr, as_json=options.json))
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left would be written, and fail again, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except (CheckpointingException, OSError) as error:
        lines = map(escaped, str(error).splitlines())
        sys.stderr.write("\n".join(["error: " + next(lines, ""), *lines, ""]))
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _run(options: argparse.Namespace, output: Output) -> int:
    """Import what a command needs, and no more, and run it."""
    if options.command == "ls":
        from mcore.parallel.checkpoint.inspection.listing import ls

        return ls(options.path, options.keys, output)
    if options.command == "show":
        from mcore.parallel.checkpoint.inspection.listing import show

        return show(options.path, options.keys, output)
    if options.command == "verify":
        from mcore.parallel.checkpoint.inspection.verifying import verify

        return verify(options.path, options.workers, output)
    if options.command == "diff":
        from mcore.parallel.checkpoint.inspection.comparing import diff

        return diff(options.path, options.other, options.keys, options.workers, output)
    from mcore.parallel.checkpoint.inspection.to_torch import to_torch

    return to_torch(options.path, options.file, options.keys, output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mcore.parallel.checkpoint",
        description=_DESCRIPTION,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, title: str, path: str = "a checkpoint") -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=title, description=f"{title[0].upper()}{title[1:]}."
        )
        command.add_argument("path", metavar="PATH", help=path)
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        return command

    either = "a checkpoint, or the folder of a run"
    ls = add("ls", "list the keys of a checkpoint, or the checkpoints of a run", either)
    show = add("show", "describe a checkpoint and its files, or where the pieces of keys lie")
    verify = add("verify", "read every byte and compare the checksums", either)
    diff = add(
        "diff", "compare two checkpoints, whatever layouts they were saved in", "the old one"
    )
    diff.add_argument("other", metavar="OTHER", help="the new one")
    to_torch = add("to-torch", "write a checkpoint as one file for torch.load, in host memory")
    to_torch.add_argument("file", metavar="FILE", help="the file to make; it must not exist")
    for command in (ls, show):
        command.add_argument(
            "keys", metavar="KEY", nargs="*", help="only these; may hold wildcards (*, ?, [...])"
        )
    for command in (diff, to_torch):
        command.add_argument(
            "--keys", metavar="KEY", nargs="+", default=[], help="only these; may hold wildcards"
        )
    for command in (verify, diff):
        command.add_argument(
            "--workers", metavar="N", type=_positive, help="how many at a time (default: all cores)"
        )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
