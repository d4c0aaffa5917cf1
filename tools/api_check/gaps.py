"""Differences that griffe does not report."""

from __future__ import annotations

from collections.abc import Iterator

import griffe

from api_check.findings import Weight

Difference = tuple[str, str, str, Weight]
_BINDINGS = ("staticmethod", "classmethod")


def compare_pair(old: griffe.Object, new: griffe.Object) -> list[griffe.Breakage]:
    """What griffe says about two definitions of one public name, whatever their own names."""
    before, after = griffe.Module("before"), griffe.Module("after")
    public_before, public_after = old.public, new.public
    before.members["x"], after.members["x"] = old, new
    old.public = new.public = True
    try:
        return list(griffe.find_breaking_changes(before, after))
    finally:
        old.public, new.public = public_before, public_after


def further_differences(old: griffe.Object, new: griffe.Object) -> Iterator[Difference]:
    """Kind, old text, new text and weight of each difference between two definitions."""
    if isinstance(old, griffe.Function) and isinstance(new, griffe.Function):
        yield from _functions(old, new)
    elif isinstance(old, griffe.Attribute) and isinstance(new, griffe.Attribute):
        yield from _attributes(old, new)


def signature(function: griffe.Function) -> str:
    """The parameters and the result as written."""
    return f"{_is_async(function)} {function.signature()}"


def _functions(old: griffe.Function, new: griffe.Function) -> Iterator[Difference]:
    if _is_async(old) != _is_async(new):
        yield "ASYNC_CHANGED", _is_async(old), _is_async(new), Weight.BREAKAGE
    if _binding(old) != _binding(new):
        yield "BINDING_CHANGED", _binding(old), _binding(new), Weight.BREAKAGE
    if old.returns is not None and new.returns is not None and str(old.returns) != str(new.returns):
        yield "ANNOTATION_CHANGED", f"-> {old.returns}", f"-> {new.returns}", Weight.WARNING
    for name, before, after in _changed_annotations(old, new):
        yield "ANNOTATION_CHANGED", f"{name}: {before}", f"{name}: {after}", Weight.WARNING
    for overload in old.overloads or ():
        if not any(_still_offers(overload, other) for other in new.overloads or ()):
            yield "OVERLOAD_REMOVED", signature(overload), "", Weight.BREAKAGE


def _attributes(old: griffe.Attribute, new: griffe.Attribute) -> Iterator[Difference]:
    before, after = str(old.annotation or ""), str(new.annotation or "")
    if before and before != after:
        yield "ANNOTATION_CHANGED", before, after, Weight.WARNING
    constant = "instance-attribute" not in old.labels
    if constant and old.value is not None and str(old.value) != str(new.value):
        yield "VALUE_CHANGED", str(old.value), str(new.value), Weight.WARNING


def _is_async(function: griffe.Function) -> str:
    return "async def" if "async" in function.labels else "def"


def _binding(function: griffe.Function) -> str:
    return next((label for label in _BINDINGS if label in function.labels), "plain")


def _changed_annotations(
    old: griffe.Function, new: griffe.Function
) -> Iterator[tuple[str, str, str]]:
    now = {parameter.name: str(parameter.annotation or "") for parameter in new.parameters}
    for parameter in old.parameters:
        before = str(parameter.annotation or "")
        if before and parameter.name in now and before != now[parameter.name]:
            yield parameter.name, before, now[parameter.name] or "(none)"


def _still_offers(old: griffe.Function, new: griffe.Function) -> bool:
    """Whether calls of one overload are calls of another."""
    same_result = str(old.returns) == str(new.returns)
    changed = any(_changed_annotations(old, new))
    return same_result and not changed and not compare_pair(old, new)
