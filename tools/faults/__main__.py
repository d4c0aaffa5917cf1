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
from faults.machine import end_all_with_this_process, small_disk
from faults.report import page
from pretrain.usage import EXIT_USAGE
from results.journal import write_whole

_IN_NAMESPACE = "FAULTS_NAMESPACE"


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign and print its page. Returns 1 if the job lost data or did not recover."""
    options = _build_parser().parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    if _IN_NAMESPACE not in os.environ:
        _enter_namespace(words)
    end_all_with_this_process()
    folder = (options.keep or Path(tempfile.mkdtemp(prefix="faults-"))).absolute()

    def is_chosen(fault: Fault) -> bool:
        return (not options.kind or fault.kind in options.kind) and (
            not options.phase or fault.phase in options.phase
        )

    try:
        with small_disk(folder / "disk") as disk:
            campaign = Campaign(
                folder, options.seed, timeout_s=options.timeout_s, disk=disk, is_chosen=is_chosen,
                launchers=(options.launcher,) if options.launcher else LAUNCHERS,
                report=lambda line: print(f"{time.strftime('%H:%M:%S')} {line}", flush=True),
            )  # fmt: skip
            until = time.time() + 60.0 * options.minutes
            result = campaign.run(faults=options.faults, until=until, at_once=options.at_once)
    except ValueError as error:
        print(f"faults: error: {error}", file=sys.stderr)
        if options.keep is None:
            shutil.rmtree(folder)
        return EXIT_USAGE
    text = page(result, shlex.join(["hatch", "run", "faults", *words]), disk is not None)
    print(text)
    if options.table is not None:
        write_whole(options.table, text)
    if not result.failed and options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    lost = [one for one in result.happened if one.recovered_s is None]
    return 1 if result.failed or lost else 0


def _enter_namespace(words: list[str]) -> None:
    """If permitted, restart as a process with private mounts, for the small disk."""
    os.environ[_IN_NAMESPACE] = "1"
    unshare = shutil.which("unshare")
    if unshare is not None and os.system(f"{unshare} -Urm true 2>/dev/null") == 0:
        os.execv(unshare, [unshare, "-Urm", sys.executable, "-m", "faults", *words])


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hatch run faults",
        description="Inject faults into the main job and check that it recovers.",
    )
    add = parser.add_argument
    add("--seed", type=int, default=1, help="seed of the run and of the order of faults")
    add("--minutes", type=float, default=60.0, help="stop starting runs after this many minutes")
    add("--faults", type=int, default=10_000, help="stop starting runs after this many faults")
    add("--timeout-s", type=float, default=8.0, help="timeout of collectives")
    add("--at-once", type=int, default=1, help="number of concurrent runs")
    add("--launcher", choices=sorted(set(LAUNCHERS)), help="only this launcher")
    add("--kind", action="append", choices=KINDS, help="only this kind (repeatable)")
    phases = [phase.name for phase in PHASES]
    add("--phase", action="append", choices=phases, help="only this phase (repeatable)")
    add("--table", type=Path, metavar="FILE", help="also write the page here")
    add(
        "--keep", type=Path, metavar="FOLDER",
        help="keep the runs here. An interrupted campaign of the same seed continues in it",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
