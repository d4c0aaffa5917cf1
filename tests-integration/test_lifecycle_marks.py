"""The packages mark their own names with the decorators of mcore.versioning."""

from __future__ import annotations

import importlib

import pytest

from mcore.modules import graphs
from mcore.versioning import is_experimental_api, is_internal_api

INTERNAL = (
    "mcore.tensor.viewless._kernel_make_viewless_tensor",
    "mcore.parallel.rng.state._get_cuda_rng_state",
    "mcore.parallel.rng.state._set_cuda_rng_state",
    "mcore.modules.freezing._freeze_parameter_if_present",
    "mcore.modules.value_head._register_linear_for_last_layer_mapping",
    "mcore.observe.experts.moe_metrics._MoeMetricFanoutWriter",
    "mcore.observe.experts.moe_metrics._build_moe_metric_writer",
)


@pytest.mark.parametrize("path", INTERNAL)
def test_documented_names_with_an_underscore_are_marked_internal(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert is_internal_api(getattr(importlib.import_module(module), name))


def test_graph_runners_that_no_accelerator_has_tested_are_marked_experimental() -> None:
    assert is_experimental_api(graphs.TorchGraphRunner)
    assert is_experimental_api(graphs.TEGraphRunner)
    assert not is_experimental_api(graphs.EagerGraphRunner)
