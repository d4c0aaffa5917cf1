"""Checks that the replicas of a model's parameters on several ranks are equal."""

from mcore.parallel.replicas.check import check_param_hashes_across_dp_replicas
from mcore.parallel.replicas.hashing import param_hashes

__all__ = ["check_param_hashes_across_dp_replicas", "param_hashes"]
