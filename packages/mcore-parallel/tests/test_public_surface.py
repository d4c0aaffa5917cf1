"""What ``mcore.parallel`` exports, what importing it leaves alone, and the README's example."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mcore.parallel
from mcore.parallel import checkpoint, process_groups, regions, replicas, rng, wgrad
from rank_testing import preload
from rank_testing.scripts import run_script

preload("torch.distributed.checkpoint")

README = Path(__file__).parents[1] / "README.md"

IMPORT_AND_LOOK = """
import json, random, sys, threading
import numpy, torch
before = torch.get_rng_state(), random.getstate(), threading.active_count()
import mcore.parallel
import mcore.parallel.checkpoint
assert torch.equal(torch.get_rng_state(), before[0])
assert random.getstate() == before[1]
assert threading.active_count() == before[2]
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
assert mcore.parallel.get_default_process_groups() is None
optional = ("apex", "einops", "fused_weight_gradient_mlp_cuda", "transformer_engine")
heavy = ("torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.fsdp")
found = [[name for name in names if name in sys.modules] for names in (optional, heavy)]
mcore.parallel.checkpoint.ShardedSavePlanner
print(json.dumps([*found, "torch.distributed.checkpoint" in sys.modules]))
"""


@pytest.fixture(scope="module")
def facts() -> Any:
    """The loaded modules in a new interpreter."""
    command = [sys.executable, "-c", IMPORT_AND_LOOK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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


@pytest.mark.parametrize("module", [process_groups, regions, replicas, rng, wgrad])
def test_modules_that_users_import_by_name_list_what_they_have(module: ModuleType) -> None:
    names = module.__all__
    assert sorted(names) == sorted(set(names))
    for name in names:
        value = getattr(module, name)
        assert inspect.getdoc(value)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__.startswith(module.__name__)


def test_names_with_an_underscore_that_megatron_documents_are_in_rng() -> None:
    assert rng._MODEL_PARALLEL_RNG_TRACKER_NAME == "model-parallel-rng"
    state = rng._get_cuda_rng_state("cpu")
    assert rng._set_cuda_rng_state(state, "cpu") is None


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


def test_importing_initialises_nothing_and_needs_no_optional_library(facts: Any) -> None:
    assert facts[0] == []


def test_torchs_checkpoints_are_imported_at_first_use(facts: Any) -> None:
    assert facts[1:] == [[], True]


def print_of(code: str) -> str:
    """The output of code in a process that has torch loaded, but nothing of this package."""
    forget = "[sys.modules.pop(one) for one in [*sys.modules] if one.partition('.')[0] == 'mcore']"
    done = run_script(f"import sys; {forget}\n{code}")
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT_DISTRIBUTED = """
import sys, torch
for name in [name for name in sys.modules if name.startswith("torch.distributed")]:
    del sys.modules[name]
del torch._C._c10d_init, torch.distributed  # what a build without distributed lacks
import mcore.parallel as mp
assert not torch.distributed.is_available()
assert (mp.get_pg_size(), mp.get_pg_rank(), mp.get_pg_src_rank()) == (1, 0, 0)
assert mp.groups.comm_device() == torch.device("cpu")
assert str(mp.ProcessGroups.from_sizes()) == "ProcessGroups(empty)"
assert mp.reduce_step_stats({"a": 2}, {"b": 1}, None) == ({"a": 2.0}, {"b": True})
tokens = torch.zeros(1, 3)
assert mp.get_batch_on_this_cp_rank({"tokens": tokens})["tokens"] is tokens
assert mp.copy_to_tensor_model_parallel_region(tokens) is tokens
assert mp.check_param_hashes_across_dp_replicas(torch.nn.Linear(1, 1))
assert mp.make_sharded_tensor_for_checkpoint(tokens, "tokens").replica_id == (0, 0, 0)
print("answered")
"""


def test_a_torch_without_distributed_gets_the_answers_of_one_process() -> None:
    assert print_of(WITHOUT_DISTRIBUTED) == "answered\n"


def test_readme_examples_print_what_the_readme_says() -> None:
    found = re.findall(r"```(\w+)\n(.*?)```", README.read_text(), flags=re.DOTALL)
    languages, blocks = [language for language, _ in found], [text for _, text in found]
    assert languages == ["python", "text"] * (len(found) // 2)
    assert all(len(list(filter(None, code.splitlines()))) <= 10 for code in blocks[::2])
    assert print_of("\n".join(blocks[::2])) == "".join(blocks[1::2])


def test_readme_is_short_and_names_what_exists() -> None:
    text = README.read_text()
    lines = text.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120
    owners = (mcore.parallel, mcore.parallel.ProcessGroups, checkpoint)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    names = set(re.findall(r"`(?:ProcessGroups\.)?(\w+)`", prose)) - {"DeviceMesh"}
    assert names
    for name in names:
        assert any(hasattr(owner, name) for owner in owners), name
