"""Command line: ``python -m mcore.parallel.checkpoint``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from mcore.parallel.checkpoint.errors import CheckpointingException, find_passing, is_out_of_memory
from mcore.parallel.checkpoint.inspection.contents import Output, escaped

_DESCRIPTION = """\
List, describe, check, compare and convert checkpoints.

PATH is a checkpoint of this package or of torch.distributed.checkpoint, or the folder of a run with
checkpoints step_N in it. No code in a checkpoint is run. Only to-torch, to-hf and from-hf load all
their tensors into memory.
"""
_EXIT_CODES = """\
exit codes: 0: success. 1: verify found damage, or diff found a difference. 2: anything else: the
arguments are wrong, a path cannot be read or written, or the memory does not suffice.
"""
_MODULES = {
    **dict.fromkeys(("ls", "show", "to-torch", "from-torch"), "inspection.listing"),
    "verify": "inspection.verify",
    "diff": "inspection.diff",
    **dict.fromkeys(("to-hf", "from-hf"), "hugging_face.hf_folder"),
}
_BROKEN_PIPE = 128 + 13  # the exit code of a shell for a program that SIGPIPE ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = vars(_build_parser().parse_args(arguments))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        output = Output(sys.stdout, sys.stderr, as_json=options.pop("json"))
        code = _run(**options, output=output)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter writes the rest of the buffer at its end, which would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT
    except Exception as error:
        # An error of Python would end with 1, which means damage or a difference.
        is_expected = isinstance(error, CheckpointingException) or find_passing(error)
        if not is_expected and not isinstance(error, OSError):
            traceback.print_exc()
        kind = "out of memory: " if is_out_of_memory(error) else ""
        lines = map(escaped, (str(error) or type(error).__name__).splitlines())
        sys.stderr.write("\n".join([f"error: {kind}{next(lines)}", *lines, ""]))
        return 2
    return code


def _run(command: str, **arguments: Any) -> int:
    """Run a command. Each imports only the modules that it needs, which takes seconds."""
    module = importlib.import_module(f"mcore.parallel.checkpoint.{_MODULES[command]}")
    return int(getattr(module, command.replace("-", "_"))(**arguments))


def _build_parser() -> argparse.ArgumentParser:
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
    show = add("show", "describe a checkpoint and its files, or the locations of some keys")
    verify = add("verify", "read every byte and compare the checksums", either)
    diff = add(
        "diff", "compare two checkpoints, which may have different layouts", "the old checkpoint"
    )
    diff.add_argument("other", metavar="OTHER", help="the new checkpoint")
    to_torch = add("to-torch", "write a checkpoint as one file for torch.load, in host memory")
    to_torch.add_argument("file", metavar="FILE", help="the new file, which must not exist")
    from_torch = add("from-torch", "write a file of torch.save as a checkpoint", "the file")
    to_hf = add("to-hf", "write a checkpoint as a folder of Hugging Face, in host memory")
    from_hf = add("from-hf", "write a folder of Hugging Face as a checkpoint", "the folder")
    for command in (from_torch, to_hf, from_hf):
        command.add_argument("new", metavar="NEW", help="the new folder, which must not exist")
    for command in (to_hf, from_hf):
        command.add_argument("--prefix", default="", help="a start of keys that names lack")
    to_hf.add_argument("--config", metavar="FILE", help="the config.json of the model")
    to_hf.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="such as 5GB")
    for command in (ls, show):
        command.add_argument(
            "keys", metavar="KEY", nargs="*", help="only these keys; wildcards: *, ?, [...]"
        )
    for command in (diff, to_torch):
        command.add_argument(
            "--keys",
            metavar="KEY",
            nargs="+",
            default=[],
            help="only these keys; wildcards: *, ?, [...]",
        )
    for command in (verify, diff):
        command.add_argument(
            "--workers",
            metavar="N",
            type=_parse_positive,
            help="number of workers (default: all cores)",
        )
    return parser


def _parse_positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
