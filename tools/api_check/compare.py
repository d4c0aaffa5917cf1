"""Compare two surfaces of one package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import griffe
from packaging.version import Version

from api_check.lifecycle_marks import read_marks
from api_check.surface import Entry, Surface

_OF_THE_CLASS = ("CLASS_REMOVED_BASE", "OBJECT_CHANGED_KIND")
_BINDINGS = ("staticmethod", "classmethod")


class Weight(str, Enum):
    """The effect of a finding on the outcome.

    ``WARNING`` is only shown. ``BREAKAGE`` fails unless the version announces it.
    ``BROKEN_PROMISE`` always fails.
    """

    WARNING = "warning"
    BREAKAGE = "breakage"
    BROKEN_PROMISE = "broken promise"


@dataclass(frozen=True)
class Finding:
    """One difference.

    Attributes:
        package: The distribution.
        kind: In capitals, such as ``PARAMETER_REMOVED``.
        path: The public path, as users import it.
        old: The old text.
        new: The new text.
        file: The file, relative to the repository.
        line: The line in it, from 1, or 0 if there is none.
        weight: The effect on the outcome.
        covered: Whether the version of the package announces it.
    """

    package: str
    kind: str
    path: str
    old: str
    new: str
    file: str
    line: int
    weight: Weight
    covered: bool = False

    def __str__(self) -> str:
        """The kind, the path and the change, in a line."""
        return f"{self.kind} {self.path}: {self.change}"

    @property
    def change(self) -> str:
        """The old and the new text."""
        return f"{self.old or '(nothing)'} -> {self.new or '(nothing)'}"

    @property
    def fails(self) -> bool:
        """Whether the check fails because of it."""
        return self.weight is not Weight.WARNING and not self.covered


Difference = tuple[str, str, str, Weight]  # kind, old text, new text, weight


@dataclass(frozen=True)
class Comparison:
    """One package on both sides.

    Attributes:
        package: The distribution.
        old: The surface of the baseline.
        new: The present surface.
        version: The present version.
        roots: The folders of the two repositories, to shorten paths of files.
    """

    package: str
    old: Surface
    new: Surface
    version: Version
    roots: tuple[Path, Path]

    def list_findings(self) -> list[Finding]:
        """Every difference that concerns a promise of the baseline."""
        found: list[Finding] = []
        gone: set[str] = set()
        for entry in self.old.entries.values():
            if self._is_exempt(entry):
                continue
            new = self.new.entries.get(entry.path)
            if new is None:
                if entry.owner not in gone:
                    found.append(self._make_finding(entry, *self._describe_removal(entry)))
                gone.add(entry.path)
            elif entry.owner not in gone:  # else the removal of its owner is reported
                found += [self._make_finding(new, *one) for one in _list_changes(entry, new)]
        # Public modules that are not entries themselves, such as subpackages.
        for path, module in self.old.modules.items():
            if path not in self.new.modules and path not in self.old.entries:
                entry = Entry(path, module.path.rpartition(".")[0], module.name, module, path, True)
                change = ("OBJECT_REMOVED", "module", "", Weight.BREAKAGE)
                found.append(self._make_finding(entry, *change))
        return [*found, *self._check_marks()]

    def _is_exempt(self, entry: Entry) -> bool:
        """Whether an entry or an owner of it was never promised."""
        owner: Entry | None = entry
        while owner is not None:
            if read_marks(owner.found).exempt:
                return True
            owner = self.old.entries.get(owner.owner)
        return False

    def _describe_removal(self, entry: Entry) -> Difference:
        marks = read_marks(entry.found)
        if marks.unreadable is not None:
            return "NON_LITERAL", marks.unreadable, "", Weight.BROKEN_PROMISE
        if marks.removal_version is not None:
            promised = f"may go in {marks.removal_version}"
            if self.version >= marks.removal_version:
                return "OBJECT_REMOVED", promised, "", Weight.WARNING
            now = f"gone in {self.version}"
            return "REMOVED_TOO_EARLY", promised, now, Weight.BROKEN_PROMISE
        owner = self.new.modules.get(entry.owner)
        is_defined = self.new.defines(entry.target) or (
            owner is not None and entry.name in owner.members
        )
        if entry.top_level and is_defined:
            return "EXPORT_REMOVED", _describe(entry), "defined, not public", Weight.BREAKAGE
        return "OBJECT_REMOVED", _describe(entry), "", Weight.BREAKAGE

    def _check_marks(self) -> Iterator[Finding]:
        for entry in self.new.entries.values():
            marks = read_marks(entry.found)
            if marks.unreadable is not None:
                change = ("NON_LITERAL", "", marks.unreadable, Weight.BROKEN_PROMISE)
                yield self._make_finding(entry, *change)
            elif marks.removal_version is not None and self.version >= marks.removal_version:
                due = f"was to go in {marks.removal_version}"
                now = f"still present in {self.version}"
                yield self._make_finding(entry, "OVERDUE", due, now, Weight.WARNING)

    def _make_finding(self, entry: Entry, kind: str, old: str, new: str, weight: Weight) -> Finding:
        found = entry.found or self.new.module
        file, line = "", 0
        if not isinstance(found.filepath, list):
            file, line = str(found.filepath), found.lineno or 0
            for root in self.roots:
                if found.filepath.is_relative_to(root):
                    file = found.filepath.relative_to(root).as_posix()
        return Finding(self.package, kind, entry.path, old, new, file, line, weight)


def _list_changes(old: Entry, new: Entry) -> Iterator[Difference]:
    # An entry without a definition here comes from another distribution.
    if any(one.found is None and one.target != one.path for one in (old, new)):
        if old.target != new.target:
            yield "REEXPORT_CHANGED", old.target, new.target, Weight.BREAKAGE
        return
    if old.found is None or new.found is None:
        return
    if demoted := read_marks(new.found).exempt:
        yield "API_DEMOTED", "public", ", ".join(demoted), Weight.BREAKAGE
    for breakage in compare_pair(old.found, new.found):
        # Members of classes are separate entries.
        is_about_it = breakage.obj is new.found or breakage.obj is old.found
        if not isinstance(old.found, griffe.Class | griffe.Module) or (
            is_about_it and breakage.kind.name in _OF_THE_CLASS
        ):
            # Without the colours of griffe's explanation.
            before, after = _format(breakage.old_value), _format(breakage.new_value)
            after = breakage.details if before == after and breakage.details else after
            yield breakage.kind.name, before, after, Weight.BREAKAGE
    if isinstance(old.found, griffe.Function) and isinstance(new.found, griffe.Function):
        yield from _compare_functions(old.found, new.found)
    elif isinstance(old.found, griffe.Attribute) and isinstance(new.found, griffe.Attribute):
        yield from _compare_attributes(old.found, new.found)


def compare_pair(old: griffe.Object, new: griffe.Object) -> list[griffe.Breakage]:
    """The breakages that griffe finds between two definitions, even under different names."""
    # griffe compares members of equal names, and only public members.
    before, after = griffe.Module("before"), griffe.Module("after")
    public_before, public_after = old.public, new.public
    before.members["x"], after.members["x"] = old, new
    old.public = new.public = True
    try:
        return list(griffe.find_breaking_changes(before, after))
    finally:
        old.public, new.public = public_before, public_after


def _compare_functions(old: griffe.Function, new: griffe.Function) -> Iterator[Difference]:
    """Differences that griffe does not report."""
    for kind, read in (("ASYNC_CHANGED", _read_keyword), ("BINDING_CHANGED", _read_binding)):
        if read(old) != read(new):
            yield kind, read(old), read(new), Weight.BREAKAGE
    if old.returns is not None and new.returns is not None and str(old.returns) != str(new.returns):
        yield "ANNOTATION_CHANGED", f"-> {old.returns}", f"-> {new.returns}", Weight.WARNING
    for name, before, after in _list_changed_annotations(old, new):
        yield "ANNOTATION_CHANGED", f"{name}: {before}", f"{name}: {after}", Weight.WARNING
    for overload in old.overloads or ():
        if not any(_accepts_calls(overload, other) for other in new.overloads or ()):
            yield "OVERLOAD_REMOVED", _format(overload), "", Weight.BREAKAGE


def _compare_attributes(old: griffe.Attribute, new: griffe.Attribute) -> Iterator[Difference]:
    before, after = str(old.annotation or ""), str(new.annotation or "")
    if before and before != after:
        yield "ANNOTATION_CHANGED", before, after, Weight.WARNING
    is_constant = "instance-attribute" not in old.labels
    if is_constant and old.value is not None and str(old.value) != str(new.value):
        yield "VALUE_CHANGED", str(old.value), str(new.value), Weight.WARNING


def _list_changed_annotations(
    old: griffe.Function, new: griffe.Function
) -> Iterator[tuple[str, str, str]]:
    now = {parameter.name: str(parameter.annotation or "") for parameter in new.parameters}
    for parameter in old.parameters:
        before = str(parameter.annotation or "")
        if before and parameter.name in now and before != now[parameter.name]:
            yield parameter.name, before, now[parameter.name] or "(none)"


def _accepts_calls(old: griffe.Function, new: griffe.Function) -> bool:
    """Whether calls of one overload are calls of another."""
    same_result = str(old.returns) == str(new.returns)
    changed = any(_list_changed_annotations(old, new))
    return same_result and not changed and not compare_pair(old, new)


def _read_keyword(function: griffe.Function) -> str:
    return "async def" if "async" in function.labels else "def"


def _read_binding(function: griffe.Function) -> str:
    return next((label for label in _BINDINGS if label in function.labels), "plain")


def _describe(entry: Entry) -> str:
    if isinstance(entry.found, griffe.Attribute) and entry.found.value is not None:
        return f"{entry.name} = {entry.found.value}"
    if isinstance(entry.found, griffe.Function):
        return _format(entry.found)
    return entry.target if entry.found is None else entry.found.kind.value


def _format(value: object) -> str:
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
        return f"{_read_keyword(value)} {value.signature()}"
    if isinstance(value, list | tuple):
        return ", ".join(str(part) for part in value) or "(none)"
    return str(value)
