"""Every public name copied, pickled, saved, forked, spawned, exported, compiled and transformed.

Each operation gives the result of the plain object, or refuses with the remedy.
"""

import copy
import io
import os
import pickle
import select
import signal
from pathlib import Path

import pytest
import torch
from public_names import ROWS, use, use_all
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves

import mcore.modules
import mcore.tensor
import mcore.versioning
from rank_testing.scripts import run_script

HERE = Path(__file__).parent
PACKAGES = ("versioning", "tensor", "modules")
MODULES = [name for name, row in ROWS.items() if row.input is not None]
LIMIT_S = 240  # of a child that hangs
# Objects come pickled, and results leave so.
SPAWNED = """
import pathlib, pickle, sys
sys.path.insert(0, sys.argv[1])
import public_names
folder = pathlib.Path(sys.argv[2])
received = pickle.loads((folder / "sent").read_bytes())
results = public_names.use_all({name: pickle.loads(one) for name, one in received.items()})
(folder / "results").write_bytes(pickle.dumps(results))
"""


def save_and_load(made):
    memory = io.BytesIO()
    torch.save(made, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


COPIES = {
    "copy": copy.deepcopy,
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
    "save": save_and_load,
}


def test_each_public_name_has_a_row():
    public = {f"{one}.{name}" for one in PACKAGES for name in getattr(mcore, one).__all__}
    rows = {name for name in ROWS if not name.startswith("parallel.")}
    assert rows == public


@pytest.mark.parametrize("operation", COPIES)
@pytest.mark.parametrize("name", ROWS)
def test_a_copy_gives_the_same_or_is_refused(name, operation):
    row = ROWS[name]
    made, expected = row.make(), use(row, row.make())
    refusal = row.refusals.get(operation)
    if refusal is not None:
        with pytest.raises((TypeError, pickle.PicklingError), match=refusal):
            COPIES[operation](made)
        return
    assert use(row, COPIES[operation](made)) == expected
    assert use(row, made) == expected  # the copied object is as before


def test_a_forked_child_gives_the_same():
    made = {name: row.make() for name, row in ROWS.items()}
    expected = use_all({name: row.make() for name, row in ROWS.items()})
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(sending, "wb") as file:
            pickle.dump(use_all(made), file)
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as file:
        if not select.select([file], [], [], LIMIT_S)[0]:
            os.kill(child, signal.SIGKILL)
        found = pickle.loads(file.read() or pickle.dumps("the child hangs"))
    assert os.waitpid(child, 0)[1] == 0
    assert found == expected


def test_a_spawned_child_gives_the_same(tmp_path):
    rows = {name: row for name, row in ROWS.items() if "spawn" not in row.refusals}
    expected = use_all({name: row.make() for name, row in rows.items()})
    sent = pickle.dumps({name: pickle.dumps(row.make()) for name, row in rows.items()})
    (tmp_path / "sent").write_bytes(sent)
    done = run_script(SPAWNED, str(HERE), str(tmp_path), timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert pickle.loads((tmp_path / "results").read_bytes()) == expected


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_an_exported_module_gives_the_same(name, strict):
    module, x = ROWS[name].make(), ROWS[name].input()
    exported = torch.export.export(module, (x,), strict=strict).module()
    assert_equal(exported(x), module(x))


@pytest.mark.parametrize("name", MODULES)
def test_a_compiled_module_gives_the_same(name):
    module, x = ROWS[name].make(), ROWS[name].input()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert_equal(compiled(x), module(x))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_under_torch_func_gives_the_same(name):
    module, x = ROWS[name].make(), ROWS[name].input()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    doubled = {key: value.detach() * 2 for key, value in tensors.items()}
    other = copy.deepcopy(module)
    with torch.no_grad():
        for key, value in [*other.named_parameters(), *other.named_buffers()]:
            value.copy_(doubled[key])
    assert_equal(functional_call(module, doubled, (x,)), other(x))
    each = vmap(lambda row: first(functional_call(module, tensors, (row[None],)))[0])(x)
    assert torch.allclose(each, first(module(x)), atol=2e-2)

    parameters = dict(module.named_parameters())
    gradients = grad(lambda p: first(functional_call(module, p, (x,))).sum())(parameters)
    first(module(x)).sum().backward()
    for key, parameter in parameters.items():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.equal(gradients[key], expected), key


def first(outputs):
    return next(one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor))


def assert_equal(outputs, expected):
    found, wanted = tree_leaves(outputs), tree_leaves(expected)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one is other or torch.equal(one, other)
