"""What mcore.modules exports, what importing it leaves alone, and the README's example."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mcore.modules
import mcore.modules.graphs
import mcore.tensor

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("path", ["mcore.modules", "mcore.modules.graphs"])
def test_all_is_complete(path):
    package = importlib.import_module(path)
    exported = package.__all__
    assert len(exported) == len(set(exported))
    assert all(hasattr(package, name) for name in exported)
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("mcore.")
    }
    assert public <= set(exported)


def test_names_of_configurations_have_a_module_of_their_own():
    assert {
        "TransformerConfig",
        "is_switched_on",
        "read_field",
    } == set(mcore.modules.config.__all__)


def test_documented_names_with_an_underscore_are_exported():
    assert {
        "_BF16_TYPES",
        "_FLOAT_TYPES",
        "_HALF_TYPES",
        "_ensure_model_list",
        "_freeze_parameter_if_present",
        "_register_linear_for_last_layer_mapping",
    } <= set(mcore.modules.__all__)


def test_param_is_not_shared_is_that_of_mcore_tensor():
    assert mcore.modules.param_is_not_shared is mcore.tensor.param_is_not_shared


# What one interpreter that raises warnings sees, in the order of its lines.
FRESH = """
import json, sys, threading, torch, types
import mcore.modules
before = set(sys.modules)
mcore.modules.unwrap_model(types.SimpleNamespace())
of_unwrapping = sorted(set(sys.modules) - before)
state = [
    torch.cuda.is_initialized(), torch.distributed.is_initialized(), threading.active_count(),
    "transformer_engine" in sys.modules,
]
print(json.dumps([of_unwrapping, state]))
from mcore.modules.graphs import TEGraphRunner, TorchGraphRunner, resolve_graph_runner
for device in (torch.device("cpu"), torch.device("cuda", 0), torch.device("xpu")):
    for impl in ("none", "local", "transformer_engine"):
        config = types.SimpleNamespace(cuda_graph_impl=impl, fp8="e4m3")
        resolve_graph_runner(config, device)
    TorchGraphRunner().is_available(device), TEGraphRunner().is_available(device)
print(torch.cuda.is_initialized())
"""


@pytest.fixture(scope="module")
def fresh():
    """The outputs of one new interpreter."""
    no_numpy = "ignore:Failed to initialize NumPy"  # torch says so where numpy is not installed
    command = [sys.executable, "-W", "error", "-W", no_numpy, "-c", FRESH]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_import_initialises_nothing_and_unwrapping_imports_nothing(fresh):
    assert json.loads(fresh.stdout.splitlines()[0]) == [[], [False, False, 1, False]], fresh.stderr


def test_runners_are_built_and_chosen_without_touching_a_device(fresh):
    assert fresh.stdout.splitlines()[1:] == ["False"], fresh.stderr
    assert fresh.returncode == 0, fresh.stderr


def test_the_readme_example_runs(capsys):
    text = README.read_text()
    [example], [printed] = (
        re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL) for kind in ("python", "text")
    )
    exec(compile(example, str(README), "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == printed


def test_readme_names_exist():
    prose = re.sub(r"```.*?```", "", README.read_text(), flags=re.DOTALL)
    places = (
        mcore.modules,
        mcore.modules.config,
        mcore.modules.graphs,
        mcore.modules.MegatronModule,
    )
    names = re.findall(r"`(\w+)`", prose)
    assert len(names) > 12
    for name in names:
        assert any(hasattr(place, name) for place in places), name
