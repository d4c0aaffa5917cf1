"""Version checks, experimental gates and deprecation for large-model code, without torch."""

from mcore.versioning._version import __version__

TYPE_CHECKING = False  # not from typing, whose import takes longer than this module's
if TYPE_CHECKING:
    from mcore.versioning.config import (
        experimental_enabled,
        is_experimental_enabled,
        set_experimental_flag,
    )
    from mcore.versioning.deprecation import (
        DeprecationInfo,
        deprecate_args,
        deprecate_inference_params,
    )
    from mcore.versioning.experimental import (
        ExperimentalNotEnabledError,
        experimental_cls,
        experimental_fn,
    )
    from mcore.versioning.installed import (
        check_mamba_sequence_packing_support,
        get_causal_conv1d_version,
        get_emerging_optimizers_version,
        get_fa_version,
        get_flashinfer_version,
        get_mamba_version,
        get_package_version,
        get_te_version,
        get_torch_version,
        is_causal_conv1d_min_version,
        is_emerging_optimizers_min_version,
        is_fa_min_version,
        is_flashinfer_min_version,
        is_mamba_min_version,
        is_package_min_version,
        is_te_min_version,
        is_torch_min_version,
    )
    from mcore.versioning.lifecycle import (
        deprecated,
        experimental_api,
        get_deprecation,
        internal_api,
        is_experimental_api,
        is_internal_api,
    )
    from mcore.versioning.lookup import clear_version_cache
    from mcore.versioning.signatures import (
        accepts_parameter,
        create_updated_function_signature,
        null_decorator,
    )

__all__ = [
    "DeprecationInfo",
    "ExperimentalNotEnabledError",
    "__version__",
    "accepts_parameter",
    "check_mamba_sequence_packing_support",
    "clear_version_cache",
    "create_updated_function_signature",
    "deprecate_args",
    "deprecate_inference_params",
    "deprecated",
    "experimental_api",
    "experimental_cls",
    "experimental_enabled",
    "experimental_fn",
    "get_causal_conv1d_version",
    "get_deprecation",
    "get_emerging_optimizers_version",
    "get_fa_version",
    "get_flashinfer_version",
    "get_mamba_version",
    "get_package_version",
    "get_te_version",
    "get_torch_version",
    "internal_api",
    "is_causal_conv1d_min_version",
    "is_emerging_optimizers_min_version",
    "is_experimental_api",
    "is_experimental_enabled",
    "is_fa_min_version",
    "is_flashinfer_min_version",
    "is_internal_api",
    "is_mamba_min_version",
    "is_package_min_version",
    "is_te_min_version",
    "is_torch_min_version",
    "null_decorator",
    "set_experimental_flag",
]

# Without those of the module `installed`, the others in __all__.
_NAMES_OF_MODULES = {
    "config": "experimental_enabled is_experimental_enabled set_experimental_flag",
    "deprecation": "DeprecationInfo deprecate_args deprecate_inference_params",
    "experimental": "ExperimentalNotEnabledError experimental_cls experimental_fn",
    "lifecycle": (
        "deprecated experimental_api get_deprecation internal_api is_experimental_api "
        "is_internal_api"
    ),
    "lookup": "clear_version_cache",
    "signatures": "accepts_parameter create_updated_function_signature null_decorator",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF_MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Import the module of a public name, or a submodule, at its first use."""
    from importlib import import_module

    module = _MODULE_OF.get(name, "installed" if name in __all__ else name)
    try:
        found = import_module(f"{__name__}.{module}")
    except ModuleNotFoundError as error:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error
    globals()[name] = value = found if module == name else getattr(found, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
