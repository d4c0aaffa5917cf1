"""Run a function of a test in N processes joined by ``torch.distributed``.

>>> import torch.distributed as dist
>>> from rank_testing import run_ranks
>>> run_ranks(dist.get_rank, 2)
[0, 1]
"""

from rank_testing.launch import run_ranks
from rank_testing.ports import free_port
from rank_testing.report import RankFailure, RankReport
from rank_testing.server import preload

__all__ = ["RankFailure", "RankReport", "free_port", "preload", "run_ranks"]
