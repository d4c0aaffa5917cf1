"""Patterns that make texts hard to read, counted in each file and held to a ceiling."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FEWEST_WORDS = 300  # below this a count per 1,000 words says nothing
LONG_SENTENCE = 25
LONG_SHARE = 0.1


class Rule(NamedTuple):
    """A pattern, how often it may occur in 1,000 words, and the wording to use instead."""

    pattern: re.Pattern[str]
    ceiling: float
    instead: str


def _rule(pattern: str, ceiling: float, instead: str) -> Rule:
    return Rule(re.compile(pattern, re.IGNORECASE), ceiling, instead)


RULES = {
    '"what" as a noun': _rule(r"\bwhat(?:ever)?\b(?![^.?!]*\?)", 1.5, "name the thing"),
    "semicolon": _rule(r";(?=\s)", 3, "write two sentences"),
    '"where" for if or when': _rule(r"\bwhere\b(?![^.?!]*\?)", 1.5, "write if or when"),
    "who, whom, whose": _rule(r"\bwho(?:m|se)?\b", 1, "repeat the noun"),
    '"the one"': _rule(
        r"\b(?:the|an|each|every) ones?\b|\bthose (?:that|which|of)\b", 1, "repeat the noun"
    ),
    "own": _rule(r"\bown\b", 1, "drop it or write separate"),
    "a program that talks": _rule(
        r"\b(?:says?|said|tells?|told|knows?|asks?|asked)\b", 0.5, "write reports, prints, requests"
    ),
    "software that walks": _rule(
        r"\b(?:go|goes|going|went) on\b|\b(?:comes|came|gives|gave|stands|stood|lies)\b"
        r"|\btakes (?!\d|about|at|up to|longer|less|long|time|seconds|minutes|hours)",
        0.5,
        "write continues, returns, accepts, is",
    ),
    "behind, beside": _rule(r"\b(?:behind|besides?)\b", 0.5, "write after, next to"),
    "so that": _rule(r"\bso that\b", 0.5, "write so or to"),
    "filler": _rule(
        r"\b(?:by itself|by themselves|by hand|meanwhile|likewise|by then|again)\b", 0.7, "drop it"
    ),
}


def problems(root: Path) -> Iterator[str]:
    """Each pattern that a text of the repository uses more often than its ceiling."""
    for folder in ("packages", "tools", ".github"):
        for path in sorted((root / folder).rglob("*")):
            inside = path.relative_to(root).parts
            if path.suffix == ".md" or (path.suffix == ".py" and "tests" not in inside):
                yield from _describe_excess(path, "/".join(inside))
    yield from _describe_excess(root / "README.md", "README.md")


def _describe_excess(path: Path, name: str) -> Iterator[str]:
    page = path.suffix == ".md"
    content = path.read_text(encoding="utf-8")
    text = _read_page(content) if page else _read_module(content)
    num_words = len(text.split())
    if num_words < FEWEST_WORDS:
        return
    for title, rule in RULES.items():
        lines = [text.count("\n", 0, found.start()) + 1 for found in rule.pattern.finditer(text)]
        # A first use is free: one in 400 words is already 2.5 in 1,000.
        if len(lines) > max(1, rule.ceiling * num_words / 1000):
            places = ", ".join(str(line) for line in lines)
            yield (
                f"{name}:{lines[0]}: {title}, {len(lines)} times in {num_words} words (at most "
                f"{rule.ceiling:g} in 1,000): {rule.instead}. Lines {places}"
            )
    if page:
        yield from _describe_long_sentences(text, name)


def _describe_long_sentences(text: str, name: str) -> Iterator[str]:
    starts = [
        0,
        *(found.end() for found in re.finditer(r"[.?!:](?=\s)\s*|\n\s*\n|\n(?=\x1f)|\|", text)),
    ]
    pieces = [
        (start, text[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)
    ]
    sentences = [(start, len(piece.split())) for start, piece in pieces if piece.strip(" \n|-\x1f")]
    long = [text.count("\n", 0, start) + 1 for start, words in sentences if words > LONG_SENTENCE]
    if len(long) > LONG_SHARE * len(sentences):
        places = ", ".join(str(line) for line in long)
        yield (
            f"{name}:{long[0]}: {len(long)} of {len(sentences)} sentences have more than "
            f"{LONG_SENTENCE} words (at most {LONG_SHARE:.0%}). Lines {places}"
        )


def _read_page(content: str) -> str:
    """The prose of a page: code is blanked, so lines keep their numbers; lists start with \\x1f."""
    text = re.sub(r"(?ms)^ *(```|~~~).*?^ *\1", lambda found: "\n" * found[0].count("\n"), content)
    text = re.sub(r"(?s)<!--.*?-->", lambda found: "\n" * found[0].count("\n"), text)
    text = re.sub(r"`[^`]*`", lambda found: "x" + "\n" * found[0].count("\n"), text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"(?m)^(?=\s*(?:[-*#]|\d+\.)\s)", "\x1f", text)


def _read_module(source: str) -> str:
    """Docstrings, messages and comments of a module, each on the line where it is written."""
    lines = [""] * (source.count("\n") + 2)
    seen: set[ast.AST] = set()  # pieces of an f-string, which is read whole
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "x" for part in node.values]
            _add_text(lines, node.lineno, "".join(str(part) for part in parts))
            seen.update(node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in seen:
            _add_text(lines, node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0]] += f" {token.string.lstrip('#:!')}"
    return "\n".join(lines[1:])


def _add_text(lines: list[str], first: int, text: str) -> None:
    if text.count(" ") < 3:  # a name or a format, no message
        return
    text = re.sub(r"``?[^`]*``?", lambda found: "x" + "\n" * found[0].count("\n"), text)
    example = False
    for number, line in enumerate(text.split("\n"), first):
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        if not example:
            lines[min(number, len(lines) - 1)] += f" {line}"
