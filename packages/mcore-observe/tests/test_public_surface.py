import ast
import inspect
import sys
from pathlib import Path

import pytest

import mcore.observe
import mcore.observe.sinks
from mcore.tensor.param_flags import param_is_not_shared


@pytest.mark.parametrize("package", [mcore.observe, mcore.observe.sinks])
def test_all_is_what_is_imported(package):
    imported = imported_names(package)
    assert set(package.__all__) == set(imported)
    assert len(package.__all__) == len(imported)
    assert all(hasattr(package, name) for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))


def imported_names(package):
    """Each name that a package imports from the repository, with its module."""
    body = ast.parse(Path(package.__file__).read_text()).body
    typed = (node for node in body if isinstance(node, ast.If))
    return {
        alias.asname or alias.name: node.module
        for node in (*body, *(inner for block in typed for inner in block.body))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("mcore.")
        for alias in node.names
    }


def test_names_are_loaded_from_the_modules_that_type_checkers_see():
    package = mcore.observe
    typed = imported_names(package)
    assert typed.pop("__version__") == "mcore.observe._version"
    assert typed == package._MODULE_OF
    for name, module in typed.items():
        assert getattr(package, name) is getattr(sys.modules[module], name), name


@pytest.mark.xdist_group("imports")
def test_import_loads_no_torch_until_a_name_needs_it(imports):
    found = imports["without torch"]
    assert (found["version"], found["loaded"]) == (mcore.observe.__version__, [])
    assert found["loads torch"]
    assert set(mcore.observe.__all__) <= set(found["dir"])


@pytest.mark.xdist_group("imports")
def test_a_name_of_every_module_can_be_the_first(imports):
    assert imports["not first"] == []


@pytest.mark.xdist_group("imports")
def test_star_import_brings_all_names_and_submodules_are_attributes(imports):
    assert (imports["not starred"], imports["submodule"]) == ([], "show")


@pytest.mark.xdist_group("imports")
def test_training_log_is_the_function_after_an_import_of_its_module(imports):
    assert imports["function"] == [True, True]


def test_shared_flag_is_the_one_of_the_tensor_package():
    assert mcore.observe.param_is_not_shared is param_is_not_shared


def test_unknown_names_are_errors():
    assert not hasattr(mcore.observe, "nothing")
    with pytest.raises(AttributeError, match=r"'mcore.observe' has no attribute 'nothing'"):
        _ = mcore.observe.nothing
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from mcore.observe import nothing  # noqa: F401


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (
            "training_log",
            "loss_dict, total_loss_dict, learning_rate, decoupled_learning_rate, loss_scale, "
            "report_memory_flag, skipped_iter, grad_norm, params_norm, num_zeros_in_grad, config, "
            "global_state, history_wct, model",
        ),
        ("calc_params_l2_norm", "model, model_config, use_megatron_fsdp, force_create_fp32_copy"),
        ("calc_dtensor_params_l2_norm", "params"),
        ("report_memory", "memory_keys"),
        ("report_l2_norm_grad", "model"),
        ("report_runtime", "train_state, start_time, seq_length, train_iters, time_unit"),
        ("report_throughput", "train_config, iteration, seq_length, history_wct, window_size"),
        ("prepare_forward_step_func", "forward_step_func, state"),
        ("needs_global_state_injection", "forward_step_func"),
        ("maybe_inject_state", "forward_step_func, state, needs_injection"),
        ("start_memory_history_recording", "profiling"),
        ("_build_moe_metric_writer", "tb_writer, comet_logger, mlflow_logger"),
        ("_MoeMetricFanoutWriter", "tb_writer, comet_logger, mlflow_logger"),
    ],
)
def test_documented_positional_parameters(name, parameters):
    signature = inspect.signature(getattr(mcore.observe, name))
    positional = [p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert positional == parameters.split(", ")


@pytest.mark.parametrize("package", [mcore.observe, mcore.observe.sinks])
def test_public_functions_have_docstrings(package):
    for name in package.__all__:
        thing = getattr(package, name)
        if callable(thing):
            assert inspect.getdoc(thing), name
