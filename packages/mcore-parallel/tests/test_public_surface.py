"""What `mcore.parallel` exports, what importing it leaves alone, and the README's example."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mcore.parallel

README = Path(__file__).parents[1] / "README.md"

IMPORT_AND_LOOK = """
import random, sys, threading
import numpy, torch
before = torch.get_rng_state(), random.getstate(), threading.active_count()
import mcore.parallel
assert torch.equal(torch.get_rng_state(), before[0])
assert random.getstate() == before[1]
assert threading.active_count() == before[2]
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
assert mcore.parallel.get_default_process_groups() is None
optional = ("apex", "einops", "fused_weight_gradient_mlp_cuda", "transformer_engine")
print([name for name in optional if name in sys.modules])
"""


def test_all_is_sorted_and_complete() -> None:
    exported = {
        name
        for name, value in vars(mcore.parallel).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert len(set(mcore.parallel.__all__)) == len(mcore.parallel.__all__)
    assert set(mcore.parallel.__all__) == exported | {"__version__"}


@pytest.mark.parametrize("name", sorted(mcore.parallel.__all__))
def test_every_name_comes_from_this_package_with_a_docstring(name: str) -> None:
    value = getattr(mcore.parallel, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__module__.startswith("mcore.parallel.")
        assert value.__doc__


def test_names_of_groups_are_exported() -> None:
    assert {
        "ProcessGroupCollection",
        "ProcessGroups",
        "clear_default_process_groups",
        "get_default_process_groups",
        "get_mcore_tensor_parallel_partition_dim",
        "get_pg_rank",
        "get_pg_size",
        "get_pg_src_rank",
        "get_tensor_model_parallel_group_if_none",
        "is_mcore_tensor_model_parallel",
        "is_mcore_tensor_parallel_duplicated",
        "logical_and_across_model_parallel_group",
        "reduce_max_memory_across_pp_group",
        "reduce_max_stat_across_model_parallel_group",
        "set_default_process_groups",
        "use_process_groups",
    } <= set(mcore.parallel.__all__)


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_initialises_nothing_and_needs_no_optional_library() -> None:
    assert run_python(IMPORT_AND_LOOK) == "[]\n"


def test_readme_example_prints_what_the_readme_says() -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", README.read_text(), flags=re.DOTALL)
    code = next(text for language, text in blocks if language == "python")
    output = next(text for language, text in blocks if language == "text")
    assert len(code.splitlines()) <= 10
    assert run_python(code) == output
