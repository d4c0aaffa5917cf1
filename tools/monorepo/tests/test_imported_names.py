"""Tests of finding imports without running the code."""

from pathlib import Path

from monorepo.dependencies import Moment, imported_names

_SOURCE = """\
import a.b, c as d
from e.f import g, h
from . import sibling
from .sibling import name
import importlib
from typing import TYPE_CHECKING
import typing
if TYPE_CHECKING:
    import i
    def inner():
        import j
else:
    import k
if typing.TYPE_CHECKING:
    from l import m
try:
    import n
except ImportError:
    pass
NAME = "o.p"
def function(argument=__import__("default")):
    import q
    importlib.import_module(NAME)
    importlib.import_module("r")
    importlib.import_module(argument)
    "import not_code"
class Holder:
    import s
    async def method(self):
        import t
later = lambda: __import__("u")
"""


def test_every_kind_of_import_is_found_with_its_moment(tmp_path: Path) -> None:
    file = tmp_path / "package" / "module.py"
    file.parent.mkdir()
    file.write_text(_SOURCE)
    standard = ("importlib", "typing", "typing.TYPE_CHECKING")
    found = [one for one in imported_names(tmp_path) if one.name not in standard]
    moments = {one.name: one.moment for one in found}
    assert {name for name, moment in moments.items() if moment is Moment.LOADING} == {
        "a.b", "c", "e.f.g", "e.f.h", "k", "n", "default", "s",
    }  # fmt: skip
    assert {name for name, moment in moments.items() if moment is Moment.TYPING} == {
        "i", "j", "l.m",
    }  # fmt: skip
    assert {name for name, moment in moments.items() if moment is Moment.CALLING} == {
        "q", "o.p", "r", "t", "u",
    }  # fmt: skip
    assert {one.file for one in found} == {file}
    assert next(one.line for one in found if one.name == "q") == 22
