"""The counts of patterns that make texts hard to read, on texts written for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from monorepo.words import RULES, problems

# 320 words in plain sentences, none of which has a pattern.
PLAIN = "A plain short sentence of eight words here.\n" * 40
SENTENCES = {
    '"what" as a noun': "It prints what was sent.",
    "semicolon": "One thing; another thing.",
    '"where" for if or when': "It stops where that fails.",
    "who, whom, whose": "A rank whose peer is gone.",
    '"the one"': "It keeps the one below.",
    "own": "A process of its own.",
    "a program that talks": "The log says so.",
    "software that walks": "The value lies in a file.",
    "behind, beside": "A page behind a proxy.",
    "so that": "It waits so that peers finish.",
    "filler": "It starts again.",
}


def _find(tmp_path: Path, text: str, name: str = "page.md") -> list[str]:
    file = tmp_path / "packages" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "README.md").write_text("A short page.\n")
    file.write_text(text, encoding="utf-8")
    return list(problems(tmp_path))


def test_every_rule_has_a_sentence_and_plain_text_passes(tmp_path: Path) -> None:
    assert SENTENCES.keys() == RULES.keys()
    assert _find(tmp_path, PLAIN) == []
    assert _find(tmp_path, "It prints what was sent.\n" * 20) == []  # too few words to count


@pytest.mark.parametrize("title", SENTENCES)
def test_a_planted_pattern_is_found_with_its_lines(tmp_path: Path, title: str) -> None:
    planted = f"{SENTENCES[title]}\n" * 2
    (found,) = _find(tmp_path, f"{PLAIN}\n{planted}")
    assert found.startswith(f"packages/page.md:42: {title}, 2 times in 3")
    assert found.endswith(f": {RULES[title].instead}. Lines 42, 43")
    assert _find(tmp_path, f"{PLAIN}\n{SENTENCES[title]}\n") == []  # a first use is free


@pytest.mark.parametrize(
    "text",
    [
        "```\nIt says what goes on; again.\n```\n",
        "<!-- It says what goes on; again. -->\n",
        "`It says what goes on; again.`\n",
        "[a link](what/where/who;)\n",
        "What happens then? Where is it?\n",
    ],
)
def test_code_comments_addresses_and_questions_do_not_count(tmp_path: Path, text: str) -> None:
    assert _find(tmp_path, PLAIN + text * 3) == []


def test_long_sentences_of_pages_are_found(tmp_path: Path) -> None:
    long = " ".join(["word"] * 26) + ".\n"
    assert _find(tmp_path, PLAIN + long * 4) == []
    (found,) = _find(tmp_path, PLAIN + long * 5)
    assert found == (
        "packages/page.md:41: 5 of 45 sentences have more than 25 words (at most 10%). "
        "Lines 41, 42, 43, 44, 45"
    )
    listed = "".join(f"- {long[:-2]}\n" for _ in range(5))  # items need no full stop
    assert "5 of 45 sentences" in _find(tmp_path, PLAIN + listed)[0]


def test_a_module_counts_docstrings_comments_and_messages_once(tmp_path: Path) -> None:
    docstring = f'"""{PLAIN}"""\n'
    assert _find(tmp_path, docstring, "module.py") == []
    code = (
        'NAMES = "what; who"\n'  # too short for a message
        'def f(name):\n    """Run it.\n\n    >>> f("what; who; where; so that")\n    0\n    """\n'
        "    # It prints what was sent.\n"
        '    raise ValueError(f"{name} is not what {name} expects here")\n'
        '    raise ValueError("a message: `what; who` is code")\n'
    )
    (found,) = _find(tmp_path, docstring + code, "module.py")
    assert found.startswith('packages/module.py:49: "what" as a noun, 2 times in 3')
    assert found.endswith("Lines 49, 50")
    (tmp_path / "packages" / "module.py").unlink()
    assert _find(tmp_path, docstring + code, "tests/test_x.py") == []
