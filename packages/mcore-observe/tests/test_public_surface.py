import ast
import inspect
from pathlib import Path

import pytest

import mcore.observe
import mcore.observe.sinks
from mcore.tensor.param_flags import param_is_not_shared


@pytest.mark.parametrize("package", [mcore.observe, mcore.observe.sinks])
def test_all_is_what_is_imported(package):
    tree = ast.parse(Path(package.__file__).read_text())
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(package.__all__) == imported
    assert len(package.__all__) == len(imported)
    assert all(hasattr(package, name) for name in package.__all__)


def test_shared_flag_is_the_one_of_the_tensor_package():
    assert mcore.observe.param_is_not_shared is param_is_not_shared


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
