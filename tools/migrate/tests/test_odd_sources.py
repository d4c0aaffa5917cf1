"""Sources with odd bindings, comments and ends: rewritten rightly, or left and told."""

from __future__ import annotations

from pathlib import Path

import pytest

from migrate.__main__ import main
from migrate.rewrite import rewrite
from migrate.table import read_table

TABLE = read_table()

# Each before, and what a person would write.
CASES = {
    "a module that is an attribute of a class": (
        "class A:\n    from megatron.core import utils\n    x = utils.divide(4, 2)\n"
        "A.utils.divide\n",
        "class A:\n    from megatron.core import utils\n    import mcore.tensor as mcore_tensor\n"
        "    x = mcore_tensor.divide(4, 2)\nA.utils.divide\n",
    ),
    "a module that is re-exported under its own name": (
        "from megatron.core import utils as utils\nutils.divide\n",
        "from megatron.core import utils as utils\nimport mcore.tensor as mcore_tensor\n"
        "mcore_tensor.divide\n",
    ),
    "a comment behind an import that is needed no more": (
        "from megatron.core import utils  # a\nimport megatron.core.utils as u  # b\n"
        "utils.divide, u.divide\n",
        "import mcore.tensor as mcore_tensor  # a\nimport mcore.tensor as mcore_tensor  # b\n"
        "mcore_tensor.divide, mcore_tensor.divide\n",
    ),
    "comments above names": (
        "from megatron.core.utils import (  # head\n    # above divide\n    divide,\n"
        "    # above other\n    other,  # behind other\n    WrappedTensor,\n    # tail\n)\n",
        "from megatron.core.utils import (  # head\n    # above other\n    other,  # behind other\n"
        "    # tail\n)\nfrom mcore.tensor import (  # head\n    # above divide\n    divide,\n"
        "    WrappedTensor,\n    # tail\n)\n",
    ),
    "a comment behind a last name without a comma": (
        "from megatron.core.utils import (\n    other,\n    divide  # about divide\n)\n",
        "from megatron.core.utils import (\n    other\n)\nfrom mcore.tensor import (\n"
        "    divide  # about divide\n)\n",
    ),
    "a comment behind a last name without a comma, which stays": (
        "from megatron.core.utils import (\n    divide,\n    other  # about other\n)\n",
        "from megatron.core.utils import (\n    other  # about other\n)\n"
        "from mcore.tensor import (\n    divide\n)\n",
    ),
    "blanks at the end": (
        "from megatron.core.utils import divide\n\n   \n\t",
        "from mcore.tensor import divide\n\n   \n\t",
    ),
}
IMPORT = "import megatron.core.utils as u\n"
LEFT = {
    "captured": "match x:\n    case {'k': u}: u.divide(4, 2)\n",
    "captured as a whole": "match x:\n    case int() as u: u.divide(4, 2)\n",
    "captured from a sequence": "match x:\n    case [_, *u]: u.divide(4, 2)\n",
    "captured from a mapping": "match x:\n    case {'k': 1, **u}: u.divide(4, 2)\n",
    "bound by a walrus": "[u := y for y in x]\nu.divide(4, 2)\n",
    "bound by an error": "try: f()\nexcept E as u: u.divide(4, 2)\n",
}


@pytest.mark.parametrize("case", CASES)
def test_a_rewritten_source_is_what_a_person_would_write(case: str) -> None:
    before, after = CASES[case]
    assert rewrite(before.encode(), TABLE).source.decode() == after
    assert rewrite(after.encode(), TABLE).source.decode() == after


@pytest.mark.parametrize("case", LEFT)
def test_a_name_that_may_be_something_else_is_left_and_told(case: str) -> None:
    source = IMPORT + LEFT[case]
    done = rewrite(source.encode(), TABLE)
    assert done.source.decode() == source
    line = source[: source.index("u.divide(")].count("\n") + 1
    assert [(one.line, one.name, one.is_left) for one in done.notes] == [(line, "divide", True)]


def test_a_module_that_a_function_binds_globally_is_left_and_told() -> None:
    source = f"def f():\n    global u\n    {IMPORT}\ndef g():\n    return u.divide(4, 2)\n"
    done = rewrite(source.encode(), TABLE)
    assert done.source.decode() == source
    assert [(one.line, one.name, one.is_left) for one in done.notes] == [(6, "divide", True)]


def test_what_replaces_a_name_of_the_old_module_is_told() -> None:
    source = (
        "from megatron.core import utils\nmonkeypatch.setattr(utils, 'divide', f)\n"
        "with patch.object(utils, 'get_pg_size'): pass\nmonkeypatch.setattr(utils, 'other', f)\n"
        "utils.divide = f\ndel utils.divide\n"
    )
    notes = [(one.line, one.name, one.is_left) for one in rewrite(source.encode(), TABLE).notes]
    assert notes == [
        (2, "divide", True),
        (3, "get_pg_size", True),
        (5, "divide", False),
        (6, "divide", False),
    ]


def test_a_flag_that_is_handed_on_and_a_controller_that_is_configured_are_told() -> None:
    source = (
        "from megatron.core.utils import __straggler__ as s, local_multi_tensor_applier as apply\n"
        "s.configure(2, 0)\napply(scale, flag, [a, b], 2.0)\ns.report()\n"
    )
    notes = [(one.line, one.name) for one in rewrite(source.encode(), TABLE).notes]
    assert notes == [(2, "__straggler__"), (3, "local_multi_tensor_applier")]


def test_lines_are_those_of_the_file_as_it_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "from megatron.core.utils import divide, get_pg_size\nfrom megatron.core import utils\n"
        "import megatron.core.utils as u\nget_pg_size()\nutils.divide, u.divide\n\n"
        "def f():\n    from megatron.core.utils import divide, other\n    return get_pg_size()\n"
    )
    for options, lines in (["--check"], [4, 9]), ([], [4, 10]):
        main([str(file), *options])
        told = [one for one in capsys.readouterr().out.splitlines() if "get_pg_size" in one]
        assert [int(one.split(":")[1]) for one in told] == lines
    written = file.read_text().splitlines()
    assert all("get_pg_size()" in written[line - 1] for line in lines)
