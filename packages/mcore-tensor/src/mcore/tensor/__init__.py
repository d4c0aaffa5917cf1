"""Memory buffers, viewless tensors, multi-tensor operations and DTensor helpers."""

from mcore.tensor._version import __version__
from mcore.tensor.arithmetic import (
    DivisibilityError,
    divide,
    ensure_divisibility,
    maybe_cat,
    round_up_to_nearest_multiple,
)
from mcore.tensor.buffers import (
    GlobalMemoryBuffer,
    destroy_global_memory_buffer,
    get_global_memory_buffer,
)
from mcore.tensor.device import current_device, resolve_device
from mcore.tensor.dtensor import (
    get_data_parallel_group_if_dtensor,
    get_full_tensor_if_necessary,
    is_dtensor,
    resolve_data_parallel_group,
    to_local_if_dtensor,
)
from mcore.tensor.multi_tensor import (
    calc_norm,
    local_multi_tensor_applier,
    local_multi_tensor_l2_norm,
    local_multi_tensor_scale,
)
from mcore.tensor.param_flags import (
    ensure_params_ready,
    mark_param_shared,
    param_is_not_shared,
    param_is_shared,
)
from mcore.tensor.symmetric_memory import GlobalSymmetricMemoryBuffer
from mcore.tensor.viewless import (
    MakeViewlessTensor,
    WrappedTensor,
    _kernel_make_viewless_tensor,
    assert_viewless_tensor,
    make_viewless_tensor,
    safely_set_viewless_tensor_data,
)

__all__ = [
    "DivisibilityError",
    "GlobalMemoryBuffer",
    "GlobalSymmetricMemoryBuffer",
    "MakeViewlessTensor",
    "WrappedTensor",
    "__version__",
    "_kernel_make_viewless_tensor",
    "assert_viewless_tensor",
    "calc_norm",
    "current_device",
    "destroy_global_memory_buffer",
    "divide",
    "ensure_divisibility",
    "ensure_params_ready",
    "get_data_parallel_group_if_dtensor",
    "get_full_tensor_if_necessary",
    "get_global_memory_buffer",
    "is_dtensor",
    "local_multi_tensor_applier",
    "local_multi_tensor_l2_norm",
    "local_multi_tensor_scale",
    "make_viewless_tensor",
    "mark_param_shared",
    "maybe_cat",
    "param_is_not_shared",
    "param_is_shared",
    "resolve_data_parallel_group",
    "resolve_device",
    "round_up_to_nearest_multiple",
    "safely_set_viewless_tensor_data",
    "to_local_if_dtensor",
]
