"""Compare two surfaces of one package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import griffe
from packaging.version import Version

from api_check.findings import Finding, Weight
from api_check.gaps import compare_pair, further_differences, signature
from api_check.lifecycle_marks import marks_of
from api_check.surface import Entry, Surface

_OF_THE_CLASS = ("CLASS_REMOVED_BASE", "OBJECT_CHANGED_KIND")


@dataclass(frozen=True)
class Comparison:
    """One package on both sides.

    Attributes:
        package: The distribution.
        old: What the baseline offers.
        new: What is offered now.
        version: The version now.
        roots: The folders of the two repositories, to shorten paths of files.
    """

    package: str
    old: Surface
    new: Surface
    version: Version
    roots: tuple[Path, Path]

    def findings(self) -> list[Finding]:
        """Every difference that touches what the baseline promised."""
        found: list[Finding] = []
        gone: set[str] = set()
        for entry in self.old.entries.values():
            if self._exempt(entry):
                continue
            new = self.new.entries.get(entry.path)
            if new is None:
                if entry.owner not in gone:
                    found.append(self._removal(entry))
                gone.add(entry.path)
            elif entry.owner not in gone:
                found.extend(self._change(entry, new))
        return [*found, *self._lost_modules(), *self._current_marks()]

    def _exempt(self, entry: Entry) -> bool:
        """Whether an entry or what holds it was never promised."""
        held: Entry | None = entry
        while held is not None:
            if marks_of(held.found).exempt:
                return True
            held = self.old.entries.get(held.owner)
        return False

    def _removal(self, entry: Entry) -> Finding:
        marks = marks_of(entry.found)
        text = describe(entry)
        if marks.unreadable is not None:
            return self._finding(entry, "NON_LITERAL", marks.unreadable, "", Weight.BROKEN_PROMISE)
        if marks.removal_version is not None:
            promised = f"may go in {marks.removal_version}"
            if self.version >= marks.removal_version:
                return self._finding(entry, "OBJECT_REMOVED", promised, "", Weight.WARNING)
            now = f"gone in {self.version}"
            return self._finding(entry, "REMOVED_TOO_EARLY", promised, now, Weight.BROKEN_PROMISE)
        if entry.top_level and self._still_there(entry):
            return self._finding(
                entry, "EXPORT_REMOVED", text, "defined, not public", Weight.BREAKAGE
            )
        return self._finding(entry, "OBJECT_REMOVED", text, "", Weight.BREAKAGE)

    def _still_there(self, entry: Entry) -> bool:
        owner = self.new.modules.get(entry.owner)
        return self.new.defines(entry.target) or (owner is not None and entry.name in owner.members)

    def _change(self, old: Entry, new: Entry) -> Iterator[Finding]:
        if _is_foreign(old) or _is_foreign(new):
            if old.target != new.target:
                yield self._finding(
                    new, "REEXPORT_CHANGED", old.target, new.target, Weight.BREAKAGE
                )
            return
        if old.found is None or new.found is None:
            return
        demoted = marks_of(new.found).exempt
        if demoted:
            yield self._finding(new, "API_DEMOTED", "public", ", ".join(demoted), Weight.BREAKAGE)
        for breakage in compare_pair(old.found, new.found):
            # Members of classes are entries of their own.
            own = breakage.obj is new.found or breakage.obj is old.found
            if not isinstance(old.found, griffe.Class | griffe.Module) or (
                own and breakage.kind.name in _OF_THE_CLASS
            ):
                yield self._finding(new, breakage.kind.name, *_texts(breakage), Weight.BREAKAGE)
        for kind, before, after, weight in further_differences(old.found, new.found):
            yield self._finding(new, kind, before, after, weight)

    def _lost_modules(self) -> Iterator[Finding]:
        """Public modules that are not entries themselves, such as subpackages."""
        for path, module in self.old.modules.items():
            if path not in self.new.modules and path not in self.old.entries:
                entry = Entry(path, module.path.rpartition(".")[0], module.name, module, path, True)
                yield self._finding(entry, "OBJECT_REMOVED", "module", "", Weight.BREAKAGE)

    def _current_marks(self) -> Iterator[Finding]:
        for entry in self.new.entries.values():
            marks = marks_of(entry.found)
            if marks.unreadable is not None:
                yield self._finding(
                    entry, "NON_LITERAL", "", marks.unreadable, Weight.BROKEN_PROMISE
                )
            elif marks.removal_version is not None and self.version >= marks.removal_version:
                due = f"was to go in {marks.removal_version}"
                now = f"still there in {self.version}"
                yield self._finding(entry, "OVERDUE", due, now, Weight.OVERDUE)

    def _finding(self, entry: Entry, kind: str, old: str, new: str, weight: Weight) -> Finding:
        file, line = self._place(entry)
        return Finding(self.package, kind, entry.path, old, new, file, line, weight)

    def _place(self, entry: Entry) -> tuple[str, int]:
        found = entry.found or self.new.module
        if isinstance(found.filepath, list):
            return "", 0
        for root in self.roots:
            if found.filepath.is_relative_to(root):
                return found.filepath.relative_to(root).as_posix(), found.lineno or 0
        return str(found.filepath), found.lineno or 0


def describe(entry: Entry) -> str:
    """One line about a definition."""
    if isinstance(entry.found, griffe.Function):
        return signature(entry.found)
    if isinstance(entry.found, griffe.Attribute) and entry.found.value is not None:
        return f"{entry.name} = {entry.found.value}"
    return entry.target if entry.found is None else entry.found.kind.value


def _is_foreign(entry: Entry) -> bool:
    """Whether an entry comes from another distribution."""
    return entry.found is None and entry.target != entry.path


def _texts(breakage: griffe.Breakage) -> tuple[str, str]:
    """What was and what is, without the colours of griffe's own explanation."""
    old, new = _text(breakage.old_value), _text(breakage.new_value)
    return old, breakage.details if old == new and breakage.details else new


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, griffe.Parameter):
        annotation = "" if value.annotation is None else f": {value.annotation}"
        default = "" if value.default is None else f" = {value.default}"
        kind = value.kind.value if value.kind is not None else "parameter"
        return f"{value.name}{annotation}{default} ({kind})"
    if isinstance(value, griffe.Kind):
        return str(value.value)
    if isinstance(value, griffe.Function):
        return signature(value)
    if isinstance(value, list | tuple):
        return ", ".join(str(part) for part in value) or "(none)"
    return str(value)
