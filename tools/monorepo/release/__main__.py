"""Command line: ``python -m monorepo.release show|prepare|verify|push|rehearse|...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path

from monorepo.changelog import CHANGELOG, find_section
from monorepo.git_tags import GitError
from monorepo.isolation.run import check_floors
from monorepo.isolation.venv import IsolationError
from monorepo.release.prepare import REMOTE, ReleaseError, plan_release, push, unpushed, write
from monorepo.release.rehearse import rehearse
from monorepo.release.verify import show, verify_archives, verify_release
from monorepo.workspace import REPOSITORY, Workspace, WorkspaceError, load_workspace, read_torch_pin


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one step of a release. Returns 1 if it is refused, 2 if the repository is unreadable."""
    options = _make_parser().parse_args(arguments)
    try:
        for line in options.run(load_workspace(options.root), options):
            print(line, flush=True)
    except (ReleaseError, IsolationError) as error:
        print(error, file=sys.stderr)
        return 1
    except (GitError, WorkspaceError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _show(workspace: Workspace, options: argparse.Namespace) -> Iterator[str]:
    for name in workspace.choose(options.packages):
        yield from show(workspace, name)


def _prepare(workspace: Workspace, options: argparse.Namespace) -> Iterator[str]:
    plan = plan_release(workspace, options.package, options.step, date.today())
    package, root = plan.tag.package, workspace.root
    yield from plan.notes
    yield from (f"writes {path.relative_to(root)}" for path in sorted(plan.contents))
    yield from (f"deletes {path.relative_to(root)}" for path in plan.deleted)
    for name in workspace.dependants([package]):
        yield f"then: hatch run test packages/{name}"
    yield f"then, once merged: hatch run release push --apply {package}"
    if options.apply:
        write(workspace, plan)
        yield "Written. To undo it: git restore packages && git clean -fd packages"
    else:
        yield "Nothing was written; add --apply to write it."


def _verify(workspace: Workspace, options: argparse.Namespace) -> Iterator[str]:
    package = workspace[options.package]
    found = verify_release(workspace, package.name, tag=options.tag)
    yield from found.notes
    refused = [*found.refused, *verify_archives(package, options.archives)]
    if refused:
        raise ReleaseError("\n".join(refused))
    verdict = "may be published" if options.tag else "is in order"
    yield f"{package.name} {package.version} {verdict}"


def _push(workspace: Workspace, options: argparse.Namespace) -> Iterator[str]:
    for tag in unpushed(workspace, options.packages):
        if options.apply:
            push(workspace, tag)
            start = f"gh workflow run release.yml --ref main -f release={tag.name} -f dry-run=false"
            yield f"{tag.name} is pushed. To publish it: {start}"
        else:
            yield f"git tag {tag.name}; git push {REMOTE} {tag.name}"
    if not options.apply:
        yield "Nothing was pushed; add --apply to push each tag alone."


def _floors(workspace: Workspace, options: argparse.Namespace) -> Iterator[str]:
    torch = read_torch_pin(workspace.root)
    return check_floors(workspace, options.package, python=sys.executable, torch=torch)


def _rehearse(workspace: Workspace, options: argparse.Namespace) -> Iterator[str]:
    return rehearse(workspace, python=sys.executable, torch=read_torch_pin(workspace.root))


def _notes(workspace: Workspace, options: argparse.Namespace) -> Iterator[str]:
    package = workspace[options.package]
    section = find_section((package.folder / CHANGELOG).read_text("utf-8"), package.version)
    if not section:
        raise ReleaseError(
            f"{CHANGELOG} of {package.name} has nothing under '## {package.version} (YYYY-MM-DD)'"
        )
    yield section


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m monorepo.release", description=__doc__)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    one, several = (argparse.ArgumentParser(add_help=False) for _ in range(2))
    one.add_argument("package", metavar="PACKAGE")
    several.add_argument("packages", nargs="*", metavar="PACKAGE", help="default: all")
    commands = parser.add_subparsers(required=True)

    def command(
        run: Callable[..., Iterator[str]], text: str, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(run.__name__[1:], help=text, description=text, parents=parents)
        made.set_defaults(run=run)
        return made

    command(_show, "list unreleased changes", several)
    made = command(_prepare, "set version, changelog and ranges for a release", one)
    made.add_argument(
        "step",
        nargs="?",
        metavar="STEP",
        help="major, minor, patch, rc, or a version; default: the version in the files",
    )
    made.add_argument("--apply", action="store_true", help="write it; default: only show it")
    made = command(_verify, "check a package before it is published", one)
    made.add_argument("--tag", metavar="TAG", help="the pushed tag")
    made.add_argument("--archives", type=Path, metavar="FOLDER", help="default: build them")
    command(_floors, "test with siblings at the lowest tags allowed", one)
    made = command(_push, "set and push the tags of prepared releases, one by one", several)
    made.add_argument("--apply", action="store_true", help="do it; default: only show it")
    command(_rehearse, "publish all packages on a local index and install them from it")
    command(_notes, "print the changelog's section of the current version", one)
    return parser


if __name__ == "__main__":
    sys.exit(main())
