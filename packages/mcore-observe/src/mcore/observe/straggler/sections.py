"""The names of what is timed: the two built-in kinds, and sections that the user declares."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

__all__ = ["COMPUTE", "DATA", "MAX_SECTIONS", "checked_sections", "section_hash"]

COMPUTE = "compute"
DATA = "data"
MAX_SECTIONS = 64

_HASH_BITS = 52  # a float64 holds such an integer exactly


def checked_sections(sections: Sequence[str]) -> tuple[str, ...]:
    """Check the names that a user declares and put the two built-in kinds before them.

    Args:
        sections: The user's names.

    Returns:
        ``("compute", "data", *sections)``.

    Raises:
        ValueError: More than 64 names, a name twice, empty or not text, or the name of a built-in
            kind.

    Example:
        >>> checked_sections(["attention"])
        ('compute', 'data', 'attention')
    """
    if isinstance(sections, str):
        raise ValueError(f"sections is the text {sections!r}; give a sequence of names")
    if len(sections) > MAX_SECTIONS:
        raise ValueError(f"{len(sections)} sections; at most {MAX_SECTIONS} can be declared")
    names = (COMPUTE, DATA, *sections)
    for name in sections:
        if not isinstance(name, str) or not name:
            raise ValueError(f"section {name!r} has no name; give text that is not empty")
        if names.count(name) > 1:
            raise ValueError(
                f"section {name!r} is declared twice or built in; give each its own name "
                f"(built in are {COMPUTE!r} and {DATA!r})"
            )
    return names


def section_hash(names: Sequence[str]) -> float:
    """Return 52 bits of a hash of some names, which a float64 holds exactly.

    Args:
        names: The names; their order counts.

    Returns:
        A whole number.

    Example:
        >>> section_hash(["a", "b"]) == section_hash(["a", "b"]) != section_hash(["b", "a"])
        True
    """
    text = b"".join(len(name.encode()).to_bytes(8, "little") + name.encode() for name in names)
    digest = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    return float(digest & ((1 << _HASH_BITS) - 1))
