import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mcore.tensor
from rank_testing.scripts import run_script


def test_the_exported_names_are_listed_in_order():
    assert mcore.tensor.__all__ == sorted(mcore.tensor.__all__)
    for name in mcore.tensor.__all__:
        assert getattr(mcore.tensor, name) is not None


def test_nothing_else_is_exported():
    modules = {path.stem for path in Path(mcore.tensor.__file__).parent.iterdir()}
    visible = {name for name in vars(mcore.tensor) if not name.startswith("__")} - modules
    assert visible <= set(mcore.tensor.__all__)


DOCUMENTED = """
    GlobalMemoryBuffer get_global_memory_buffer GlobalSymmetricMemoryBuffer
    _kernel_make_viewless_tensor WrappedTensor MakeViewlessTensor make_viewless_tensor
    assert_viewless_tensor safely_set_viewless_tensor_data get_full_tensor_if_necessary
    to_local_if_dtensor get_data_parallel_group_if_dtensor local_multi_tensor_applier
    local_multi_tensor_l2_norm local_multi_tensor_scale ensure_divisibility divide maybe_cat
    param_is_not_shared param_is_shared mark_param_shared round_up_to_nearest_multiple
    destroy_global_memory_buffer resolve_data_parallel_group calc_norm
"""


@pytest.mark.parametrize("name", DOCUMENTED.split())
def test_documented_names_are_exported(name):
    assert name in mcore.tensor.__all__


# What one interpreter without assertions sees, in the order of its lines.
FRESH = """
import json, sys, threading
import torch
from mcore.versioning import *
before = set(sys.modules)
import mcore.tensor as mt
loaded = sorted(set(sys.modules) - before)
assert False, "assertions are off"
state = [
    torch.cuda.is_initialized(), torch.distributed.is_initialized(), threading.active_count()
]
t = torch.ones(2)
mt.to_local_if_dtensor(t), mt.get_full_tensor_if_necessary(t), mt.is_dtensor(t)
mt.get_data_parallel_group_if_dtensor(t), mt.resolve_data_parallel_group([t])
mt.local_multi_tensor_l2_norm(1, None, [[t]], True)
has_dtensor = "torch.distributed.tensor" in sys.modules
raised = []
for call in (
    lambda: mt.divide(4, 5),
    lambda: mt.ensure_divisibility(4, 5),
    lambda: mt.assert_viewless_tensor(torch.ones(4).view(2, 2)),
):
    try:
        call()
    except AssertionError as error:
        raised.append(type(error).__name__)
print(json.dumps([loaded, state, has_dtensor, raised]))
"""
EXAMPLES = """
import gc, weakref, torch
from mcore.tensor import *
def check(condition):
    if not condition:
        raise SystemExit("does not hold")
b = GlobalMemoryBuffer()
a = b.get_tensor((128,), torch.float32, "x")
p = a.untyped_storage().data_ptr()
for s in [(128,), (64,), (1,), (4, 25), (), (0, 7)]:
    check(b.get_tensor(s, torch.float32, "x").untyped_storage().data_ptr() == p)
check(divide(8, 2) == 4)
for error in (ValueError, AssertionError):
    try:
        divide(4, 5)
    except error as caught:
        check(str(caught) == "4 is not divisible by 5")
    else:
        check(False)
try:
    assert_viewless_tensor((torch.ones(4).view(2, 2),))
except AssertionError:
    pass
else:
    check(False)
base = torch.randn(10)
w = weakref.ref(base)
v = make_viewless_tensor(base[:4], False, False)
del base
gc.collect()
check(w() is None)
def f(w):
    t = w.unwrap()
    r = weakref.ref(t)
    del t
    return r() is None
check(f(WrappedTensor(torch.ones(2))))
norm, _ = local_multi_tensor_applier(
    local_multi_tensor_l2_norm, None, [[torch.tensor([3.0, 4.0]), torch.tensor([12.0])]], False)
check(norm.tolist() == [13.0])
print("holds")
"""


@pytest.fixture(scope="module")
def fresh():
    """The outputs of one new interpreter."""
    return subprocess.run(
        [sys.executable, "-O", "-c", FRESH + EXAMPLES], capture_output=True, text=True, timeout=600
    )


@pytest.fixture
def facts(fresh):
    return json.loads(fresh.stdout.splitlines()[0])


def test_the_import_loads_nothing_but_itself_and_versioning_beside_torch(facts):
    loaded = facts[0]
    assert "mcore.tensor" in loaded
    assert {name for name in loaded if not name.startswith("mcore.tensor")} == set()


def test_the_import_initialises_nothing(fresh, facts):
    assert facts[1] == [False, False, 1]
    assert fresh.stderr == ""


def test_plain_tensors_do_not_import_dtensor(facts):
    assert facts[2] is False


def test_divisibility_holds_without_assertions(facts):
    assert facts[3] == ["DivisibilityError", "DivisibilityError", "AssertionError"]


def test_acceptance_examples_hold_without_assertions(fresh):
    assert fresh.stdout.splitlines()[1:] == ["holds"], fresh.stderr


def test_acceptance_examples_hold_with_assertions():
    finished = run_script(EXAMPLES)
    assert finished.stdout == "holds\n", finished.stderr


def test_it_works_where_torch_has_no_distributed_package():
    program = """
import sys, torch
for name in [name for name in sys.modules if name.partition(".")[0] == "mcore"]:
    del sys.modules[name]
torch.distributed.is_available = lambda: False
for name in ("is_initialized", "get_rank", "group"):
    if hasattr(torch.distributed, name):
        delattr(torch.distributed, name)
import mcore.tensor as mt
buffer = mt.GlobalSymmetricMemoryBuffer(1, None)
assert not buffer.available
assert "no torch.distributed" in buffer.init_failure_reason
assert mt.to_local_if_dtensor(3) == 3
print("works")
"""
    finished = run_script(program)
    assert finished.stdout == "works\n", finished.stderr


def test_no_module_asserts():
    for path in Path(mcore.tensor.__file__).parent.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        assert not [node.lineno for node in nodes if isinstance(node, ast.Assert)], path


def test_no_device_of_cuda_by_name():
    for path in Path(mcore.tensor.__file__).parent.rglob("*.py"):
        assert not re.search(r"""["']cuda""", path.read_text())


def test_annotations_of_the_package_are_shipped():
    assert (Path(mcore.tensor.__file__).parent / "py.typed").exists()
    assert torch.__version__
