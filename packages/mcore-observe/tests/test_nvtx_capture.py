"""Ranges as a profiler receives them: a library that NVTX itself loads writes them down."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from rank_testing.scripts import run_script

PROGRAM = """
import asyncio
from mcore.observe import (
    configure_nvtx_profiling, nvtx_decorator, nvtx_range, nvtx_range_pop, nvtx_range_push
)

@nvtx_decorator(message="life")
async def life():
    await asyncio.sleep(0)

async def two():
    await asyncio.gather(life(), life())

configure_nvtx_profiling(True, backend={backend!r})
with nvtx_range("outer", color="red"):
    nvtx_range_push("inner", "s")
    asyncio.run(two())
    nvtx_range_pop("inner", "s")
    configure_nvtx_profiling(False)
    nvtx_range_push("unseen")
"""

OF_TORCH = "push outer\npush inner.s\nstart life\nstart life\nend 1\nend 2\npop\npop\n"
OF_THE_PACKAGE = (
    "push mcore:outer #ff0000\npush mcore:inner.s #0000ff\nstart mcore:life\nstart mcore:life\n"
    "end 1\nend 2\npop mcore\npop mcore\n"
)
CASES = [
    pytest.param(
        "torch.cuda.nvtx",
        "push mcore.observe\npop\n" + OF_TORCH,
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
    pytest.param("nvtx", OF_THE_PACKAGE, marks=pytest.mark.needs("nvtx")),
]


@pytest.mark.needs("cc")
@pytest.mark.parametrize(("backend", "expected"), CASES)
def test_what_a_profiler_receives(backend, expected, tmp_path):
    """Real NVTX calls of a real build: names, nesting, overlapping lives, colours, switching."""
    library, source = tmp_path / "injection.so", Path(__file__).with_name("nvtx_injection.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=300)
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(library)}
    done = run_script(PROGRAM.format(backend=backend), env=environment, timeout_s=600)
    assert done.stdout == expected, done.stderr
