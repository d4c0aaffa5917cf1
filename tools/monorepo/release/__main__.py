"""Command line: ``python -m monorepo.release show|prepare|verify|push|rehearse|...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
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
    set_address,
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
    wanted = [workspace[name].name for name in options.packages] or workspace.names
    for name in workspace.ordered(wanted):
        print("\n".join(show(workspace, name)))
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
    print(f"{package.name} {package.version} may be published")
    return 0


def _floors(workspace: Workspace, options: argparse.Namespace) -> int:
    torch = options.torch or torch_pin(workspace.root)
    found = check_floors(workspace, options.package, python=options.python, torch=torch)
    for note in found.notes:
        print(note)
    if found.isolated is None:
        print(f"{options.package} has no sibling with a release tag: nothing to go back to")
    else:
        taken = ", ".join(tag.name for tag in found.tags.values())
        print(f"{options.package} works with {taken}")
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


def _address(workspace: Workspace, options: argparse.Namespace) -> int:
    for file in set_address(workspace, options.url):
        print(f"wrote {file.relative_to(workspace.root)}")
    return 0


def _rehearse(workspace: Workspace, options: argparse.Namespace) -> int:
    torch = options.torch or torch_pin(workspace.root)
    for said in rehearse(workspace, python=options.python, torch=torch):
        print(said, flush=True)
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
    lines += [f"breaks users: {one}" for one in plan.breaks]
    lines += [f"writes {path.relative_to(root)}" for path in sorted(plan.contents)]
    lines += [f"deletes {path.relative_to(root)}" for path in plan.deleted]
    lines += [f"then: hatch run test packages/{name}" for name in plan.affected]
    return [*lines, f"then, once merged: hatch run release push --apply {plan.tag.package}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m monorepo.release", description=__doc__)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("show", help="what is unreleased")
    one.add_argument("packages", nargs="*", metavar="PACKAGE", help="default: all")
    one.set_defaults(run=_show)
    one = commands.add_parser("prepare", help="version, changelog and ranges for a release")
    one.add_argument("package", metavar="PACKAGE")
    one.add_argument(
        "step",
        nargs="?",
        metavar="STEP",
        help="major, minor, patch, rc, or a version; left out: the version of the files",
    )
    one.add_argument("--apply", action="store_true", help="write it; without, it is only shown")
    one.set_defaults(run=_prepare)
    one = commands.add_parser("verify", help="refuse what must not be published")
    one.add_argument("package", metavar="PACKAGE")
    one.add_argument("--tag", metavar="TAG", help="the tag that was pushed")
    one.add_argument("--archives", type=Path, metavar="FOLDER", help="default: build them")
    one.set_defaults(run=_verify)
    one = commands.add_parser("floors", help="test with siblings at the lowest tags allowed")
    one.add_argument("package", metavar="PACKAGE")
    one.add_argument("--torch", metavar="VERSION", help="by default that of hatch.toml")
    one.add_argument("--python", default=sys.executable, help="by default this one")
    one.set_defaults(run=_floors)
    one = commands.add_parser("push", help="set and push the tags of what is prepared, one by one")
    one.add_argument("packages", nargs="*", metavar="PACKAGE", help="default: all")
    one.add_argument("--remote", default="origin", help="default: origin")
    one.add_argument("--apply", action="store_true", help="do it; without, it is only shown")
    one.set_defaults(run=_push)
    one = commands.add_parser("rehearse", help="all packages on a local index, used by strangers")
    one.add_argument("--torch", metavar="VERSION", help="by default that of hatch.toml")
    one.add_argument("--python", default=sys.executable, help="by default this one")
    one.set_defaults(run=_rehearse)
    one = commands.add_parser("address", help="name the repository in all packages")
    one.add_argument("url", metavar="URL", help="such as https://github.com/OWNER/NAME")
    one.set_defaults(run=_address)
    one = commands.add_parser("notes", help="what the changelog says about the current version")
    one.add_argument("package", metavar="PACKAGE")
    one.set_defaults(run=_notes)
    return parser


if __name__ == "__main__":
    sys.exit(main())
