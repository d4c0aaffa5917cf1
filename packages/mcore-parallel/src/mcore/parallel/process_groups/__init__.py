"""The process groups of a rank in one object, and the default object of the process."""

from mcore.parallel.process_groups.collection import ProcessGroupCollection, ProcessGroups
from mcore.parallel.process_groups.default import (
    clear_default_process_groups,
    get_default_process_groups,
    get_tensor_model_parallel_group_if_none,
    set_default_process_groups,
    use_process_groups,
)

__all__ = [
    "ProcessGroupCollection",
    "ProcessGroups",
    "clear_default_process_groups",
    "get_default_process_groups",
    "get_tensor_model_parallel_group_if_none",
    "set_default_process_groups",
    "use_process_groups",
]
