"""The migration table: where each documented Megatron name is imported from now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from api_check.surface import Surface, read_surface
from api_check.trees import CannotCheckError
from monorepo.workspace import REPOSITORY, Workspace, load_workspace

SOURCE = Path(__file__).with_name("migration_names.tsv")
PAGE = "tools/docs/migration.md"
BEGIN = "<!-- migration table: begin; `hatch run migration` writes it -->"
END = "<!-- migration table: end -->"
_NOTHING = "-"


class MigrationError(ValueError):
    """The list of names or the page is malformed."""


@dataclass(frozen=True)
class Move:
    """One name that has moved.

    Attributes:
        name: What is imported.
        old: The modules that had it.
        new: The module that has it now.
        without_group: What leaving out its group or passing None means now; empty where it
            takes none.
    """

    name: str
    old: tuple[str, ...]
    new: str
    without_group: str

    @property
    def package(self) -> str:
        """The package that the new module is part of."""
        return ".".join(self.new.split(".")[:2])


def read_moves(source: Path) -> list[Move]:
    """Read the list of names."""
    moves: list[Move] = []
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        columns = line.split("\t")
        if len(columns) != 4 or not all(columns):
            raise MigrationError(
                f"{source.name}:{number} needs four columns with tabs between: name, old modules, "
                f"new module, and what an absent group means or {_NOTHING}"
            )
        name, old, new, note = columns
        moves.append(Move(name, tuple(old.split(", ")), new, "" if note == _NOTHING else note))
    seen: set[tuple[str, str]] = set()
    for move in moves:
        if (move.name, move.new) in seen:
            raise MigrationError(f"{source.name} lists {move.new}.{move.name} twice")
        seen.add((move.name, move.new))
    return moves


def table(moves: Sequence[Move], modules: Iterable[str]) -> str:
    """The table as Markdown, one collapsed block per package."""
    return "\n\n".join(
        _block(module, mine)
        for module in modules
        if (mine := [move for move in moves if move.package == module])
    )


def with_table(page: str, text: str) -> str:
    """The page with the text between the two markers replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise MigrationError(f"{PAGE} needs one line {BEGIN!r} and one line {END!r} after it")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def problems(workspace: Workspace, names: Path = SOURCE) -> Iterator[str]:
    """Names that can't be imported from where the list says, and a table that is stale.

    A name of a package has to be in its ``__all__``; one with an underscore may instead be
    defined in a module of it.
    """
    try:
        surfaces = {
            package.module: read_surface(package) for package in workspace.distributions.values()
        }
        for move in read_moves(names):
            yield from _move_problems(move, surfaces)
        if (workspace.root / PAGE).read_text(encoding="utf-8") != fresh_page(workspace, names):
            yield f"the table in {PAGE} is stale; run: hatch run migration"
    except (MigrationError, CannotCheckError) as error:
        yield str(error)


def fresh_page(workspace: Workspace, names: Path = SOURCE) -> str:
    """The page with the table as the list has it."""
    modules = [package.module for package in workspace.distributions.values()]
    text = (workspace.root / PAGE).read_text(encoding="utf-8")
    return with_table(text, table(read_moves(names), modules))


def main() -> None:
    """Write the table."""
    text = fresh_page(load_workspace(REPOSITORY))
    (REPOSITORY / PAGE).write_text(text, encoding="utf-8")


def _move_problems(move: Move, surfaces: Mapping[str, Surface]) -> Iterable[str]:
    surface = surfaces.get(move.package)
    if surface is None:
        yield f"{move.name}: {move.new} is not part of a package here"
    elif move.new == move.package:
        if f"{move.new}.{move.name}" not in surface.entries:
            yield f"{move.name} is not in __all__ of {move.new}"
    elif f"{move.package}.{move.name}" in surface.entries:
        yield f"{move.name} is public and has to be imported from {move.package}, not {move.new}"
    elif not move.name.startswith("_"):
        yield f"{move.name} is not in __all__ of {move.package}"
    elif not surface.defines(f"{move.new}.{move.name}") and not _is_answered(move, surface):
        yield f"{move.name} is not defined in {move.new}"


def _is_answered(move: Move, surface: Surface) -> bool:
    """Whether the ``__getattr__`` of the new module has a case for the name."""
    try:
        answers = surface.module[f"{move.new.removeprefix(f'{move.package}.')}.__getattr__"]
    except KeyError:
        return False
    return f'"{move.name}"' in answers.source


def _block(module: str, moves: Sequence[Move]) -> str:
    groups = any(move.without_group for move in moves)
    heading = ["name", "was imported from", "is imported from"]
    if groups:
        heading.append("an absent group now means")
    rows = [heading, ["---"] * len(heading)]
    for move in sorted(moves, key=lambda move: (move.name.lstrip("_").lower(), move.new)):
        row = [f"`{move.name}`", ", ".join(f"`{old}`" for old in move.old), f"`{move.new}`"]
        rows.append([*row, move.without_group] if groups else row)
    lines = "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)
    summary = f"<summary><code>{module}</code>: {len(moves)} names</summary>"
    return f"<details>\n{summary}\n\n{lines}\n\n</details>"


if __name__ == "__main__":
    main()
