"""Whether the Mamba kernels that are installed can process packed sequences."""

from __future__ import annotations

from mcore.versioning.installed import get_package_version, is_package_min_version

_FOR_INFERENCE = (("causal_conv1d", "1.5.3.post1"), ("mamba_ssm", "2.2.6.post3"))
_FOR_TRAINING = (("causal_conv1d", "1.4.0"), ("mamba_ssm", "2.0.0"))


def check_mamba_sequence_packing_support(
    for_inference_not_training: bool = True,
) -> tuple[bool, str | None]:
    """Whether causal_conv1d and mamba_ssm are new enough for packed sequences.

    Args:
        for_inference_not_training: False asks for what training needs, which older versions have.

    Returns:
        `(True, None)`, or `(False, reason)` with the first package that is missing or too old;
        causal_conv1d is tested first.

    Example:
        >>> supported, reason = check_mamba_sequence_packing_support()
        >>> supported == (reason is None)
        True
    """
    for module, minimum in _FOR_INFERENCE if for_inference_not_training else _FOR_TRAINING:
        distribution = module.replace("_", "-")
        if not is_package_min_version(module, minimum, distribution=distribution):
            found = get_package_version(module, distribution)
            state = "not installed" if found is None else f"found {found}"
            return False, f"{module} >= {minimum} is required ({state})"
    return True, None
