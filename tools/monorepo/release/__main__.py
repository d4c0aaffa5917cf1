"""Command line: ``python -m monorepo.release show|prepare|verify|push|rehearse|...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path

from monorepo.changelog import CHANGELOG, section
from monorepo.git_tags import GitError
from monorepo.hatch_settings import torch_pin
from monorepo.isolation.checks import IsolationError
from monorepo.isolation.floors import check_floors
from monorepo.isolation.venv import InstallError
from monorepo.isolation.wheels import BuildError
from monorepo.release.prepare import (
    Plan,
    ReleaseError,
    plan_release,
    push,
    unpushed,
    write,
)
from monorepo.release.rehearse import RehearsalError, rehearse
from monorepo.release.verify import show, verify_archives, verify_release
from monorepo.workspace import REPOSITORY, Workspace, WorkspaceError, load_workspace


def main(arguments: Sequence[str] | None = None) -> int:
    """Show, prepare or verify a release."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(load_workspace(options.root), options)
    except (ReleaseError, RehearsalError, BuildError, InstallError, IsolationError) as error:
        print(error, file=sys.stderr)
        return 1
    except (GitError, WorkspaceError) as error:
        print(error, file=sys.stderr)
        return 2
    return status


def _show(workspace: Workspace, options: argparse.Namespace) -> int:
    for name in workspace.chosen(options.packages):
        _told(show(workspace, name))
    return 0


def _prepare(workspace: Workspace, options: argparse.Namespace) -> int:
    plan = plan_release(workspace, options.package, options.step, date.today())
    print("\n".join(_described(workspace, plan)))
    if not options.apply:
        print("Nothing was written; add --apply to write it.")
        return 0
    write(workspace, plan)
    print("Written. To take it back: git restore packages && git clean -fd packages")
    return 0


def _verify(workspace: Workspace, options: argparse.Namespace) -> int:
    package = workspace[options.package]
    found = verify_release(workspace, package.name, tag=options.tag)
    for note in found.notes:
        print(note)
    refused = [*found.refused, *verify_archives(package, options.archives)]
    if refused:
        print("\n".join(refused), file=sys.stderr)
        return 1
    verdict = "may be published" if options.tag else "is in order"
    print(f"{package.name} {package.version} {verdict}")
    return 0


def _push(workspace: Workspace, options: argparse.Namespace) -> int:
    for tag in unpushed(workspace, options.packages, options.remote):
        if not options.apply:
            print(f"git tag {tag.name}; git push {options.remote} {tag.name}")
            continue
        push(workspace, tag, options.remote)
        print(f"{tag.name} is pushed", flush=True)
    if not options.apply:
        print("Nothing was pushed; add --apply to do so, one push each.")
    return 0


def _floors(workspace: Workspace, options: argparse.Namespace) -> int:
    torch = options.torch or torch_pin(workspace.root)
    return _told(check_floors(workspace, options.package, python=options.python, torch=torch))


def _rehearse(workspace: Workspace, options: argparse.Namespace) -> int:
    torch = options.torch or torch_pin(workspace.root)
    return _told(rehearse(workspace, python=options.python, torch=torch))


def _told(lines: Iterable[str]) -> int:
    for line in lines:
        print(line, flush=True)
    return 0


def _notes(workspace: Workspace, options: argparse.Namespace) -> int:
    package = workspace[options.package]
    said = section((package.folder / CHANGELOG).read_text(encoding="utf-8"), package.version)
    if not said:
        raise ReleaseError(
            f"{CHANGELOG} of {package.name} says nothing under '## {package.version} (YYYY-MM-DD)'"
        )
    print(said)
    return 0


def _described(workspace: Workspace, plan: Plan) -> list[str]:
    root = workspace.root
    lines = [*plan.notes]
    lines += [f"writes {path.relative_to(root)}" for path in sorted(plan.contents)]
    lines += [f"deletes {path.relative_to(root)}" for path in plan.deleted]
    lines += [
        f"then: hatch run test packages/{name}" for name in workspace.dependants([plan.tag.package])
    ]
    return [*lines, f"then, once merged: hatch run release push --apply {plan.tag.package}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m monorepo.release", description=__doc__)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    one, several, used = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    one.add_argument("package", metavar="PACKAGE")
    several.add_argument("packages", nargs="*", metavar="PACKAGE", help="default: all")
    used.add_argument("--torch", metavar="VERSION", help="by default that of hatch.toml")
    used.add_argument("--python", default=sys.executable, help="by default this one")
    commands = parser.add_subparsers(required=True)

    def command(
        run: Callable[..., int], text: str, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(run.__name__[1:], help=text, description=text, parents=parents)
        made.set_defaults(run=run)
        return made

    command(_show, "what is unreleased", several)
    made = command(_prepare, "version, changelog and ranges for a release", one)
    made.add_argument(
        "step",
        nargs="?",
        metavar="STEP",
        help="major, minor, patch, rc, or a version; left out: the version of the files",
    )
    made.add_argument("--apply", action="store_true", help="write it; without, it is only shown")
    made = command(_verify, "refuse what must not be published", one)
    made.add_argument("--tag", metavar="TAG", help="the tag that was pushed")
    made.add_argument("--archives", type=Path, metavar="FOLDER", help="default: build them")
    command(_floors, "test with siblings at the lowest tags allowed", one, used)
    made = command(_push, "set and push the tags of what is prepared, one by one", several)
    made.add_argument("--remote", default="origin", help="default: origin")
    made.add_argument("--apply", action="store_true", help="do it; without, it is only shown")
    command(_rehearse, "all packages on a local index, used by strangers", used)
    command(_notes, "what the changelog says about the current version", one)
    return parser


if __name__ == "__main__":
    sys.exit(main())
