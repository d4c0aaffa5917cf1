"""Command line: ``python -m faults [--seed S] [--minutes M | --faults N]``."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

from faults.campaign import LAUNCHERS, Campaign
from faults.deck import KINDS, PHASES, Fault
from faults.journal import Result
from faults.machine import end_all_with_this_process, small_disk
from faults.report import page
from pretrain.usage import EXIT_USAGE

_IN_NAMESPACE = "FAULTS_NAMESPACE"


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign and print its table; 1: something did not recover or differs."""
    options = _parser().parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    if _IN_NAMESPACE not in os.environ:
        _enter_a_namespace(words)
    end_all_with_this_process()
    folder = (options.keep or Path(tempfile.mkdtemp(prefix="faults-"))).absolute()
    try:
        with small_disk(folder / "disk") as disk:
            result = _run(folder, disk, options)
    except ValueError as error:
        print(f"faults: error: {error}", file=sys.stderr)
        if options.keep is None:
            shutil.rmtree(folder)
        return EXIT_USAGE
    text = page(result, _shown(words), disk is not None)
    print(text)
    if options.table is not None:
        options.table.write_text(text)
    if not result.failed and options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    lost = [one for one in result.happened if one.recovered_s is None]
    return 1 if result.failed or lost else 0


def _run(folder: Path, disk: Path | None, options: argparse.Namespace) -> Result:
    campaign = Campaign(
        folder,
        options.seed,
        timeout_s=options.timeout_s,
        disk=disk,
        chosen=lambda fault: _is_chosen(fault, options),
        launchers=(options.launcher,) if options.launcher else LAUNCHERS,
        say=lambda line: print(f"{time.strftime('%H:%M:%S')} {line}", flush=True),
    )
    until = time.time() + 60.0 * options.minutes
    return campaign.run(faults=options.faults, until=until, at_once=options.at_once)


def _shown(words: list[str]) -> str:
    """The command without where it wrote to."""
    kept, it = [], iter(words)
    for word in it:
        if word in ("--keep", "--table"):
            next(it)
        else:
            kept.append(shlex.quote(word))
    return " ".join(["hatch run faults", *kept])


def _is_chosen(fault: Fault, options: argparse.Namespace) -> bool:
    return (not options.kind or fault.kind in options.kind) and (
        not options.phase or fault.phase in options.phase
    )


def _enter_a_namespace(words: list[str]) -> None:
    """Go on, where that is allowed, as a process that may mount what nobody else sees."""
    os.environ[_IN_NAMESPACE] = "1"
    unshare = shutil.which("unshare")
    if unshare is not None and os.system(f"{unshare} -Urm true 2>/dev/null") == 0:
        os.execv(unshare, [unshare, "-Urm", sys.executable, "-m", "faults", *words])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hatch run faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the order of faults and of the run")
    parser.add_argument("--minutes", type=float, default=60.0, help="no new run after these")
    parser.add_argument("--faults", type=int, default=10_000, help="no new run after these")
    parser.add_argument("--timeout-s", type=float, default=8.0, help="of collectives")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time")
    parser.add_argument("--launcher", choices=sorted(set(LAUNCHERS)), help="only this")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this; may repeat")
    parser.add_argument(
        "--phase", action="append", choices=[p.name for p in PHASES], help="only this; may repeat"
    )
    parser.add_argument("--table", type=Path, help="write the Markdown page here")
    parser.add_argument(
        "--keep", type=Path, help="a folder for the runs, which stays; an interrupted campaign of "
        "the same seed goes on in it",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
