import functools
import logging

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mcore.observe import log_on_each_pipeline_stage, log_single_rank
from mcore.observe.rank_logging import safe_get_rank, safe_get_world_size
from mcore.parallel import ProcessGroups, use_process_groups
from rank_testing import run_ranks

VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


def make_logger(level=logging.INFO):
    logger, kept = logging.Logger("kept", level), Kept()
    logger.addHandler(kept)
    return logger, kept.records


@pytest.fixture
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


class FakeGroup:
    def __init__(self, rank, size=4):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


class NeverAsked:
    def rank(self):
        raise RuntimeError("asked for the rank while the level is disabled")

    size = rank


def one_of_four(rank, group_size=None):
    logger, records = make_logger()
    group = None
    if group_size is not None:
        group = [dist.new_group(list(range(start, start + 2))) for start in (0, 2)][
            dist.get_rank() // 2
        ]
    log_single_rank(logger, logging.INFO, "v=%s", 42, rank=rank, group=group, extra={"k": 1})
    return [(r.getMessage(), r.k, r.funcName, r.levelno) for r in records]


RECORD = [("v=42", 1, "one_of_four", logging.INFO)]


@pytest.mark.parametrize(("rank", "logging_rank"), [(3, 3), (0, 0), (-1, 3), (-4, 0)])
def test_only_the_given_rank_logs(rank, logging_rank):
    expected = [[], [], [], []]
    expected[logging_rank] = RECORD
    assert run_ranks(one_of_four, 4, rank) == expected


def test_ranks_of_a_group():
    assert run_ranks(one_of_four, 4, 1, 2) == [[], RECORD, [], RECORD]
    assert run_ranks(one_of_four, 4, -2, 2) == [RECORD, [], RECORD, []]


def outside_of_group():
    group = dist.new_group([1, 0])
    logger, records = make_logger()
    log_single_rank(logger, logging.INFO, "single", group=group)
    log_on_each_pipeline_stage(logger, logging.INFO, "stage", tp_group=group, dp_cp_group=group)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    log_single_rank(logger, logging.INFO, "mesh", rank=-1, group=mesh)
    return [r.getMessage() for r in records]


def test_ranks_outside_of_the_group_do_not_log():
    # torch sorts the ranks of a group: rank 0 is its first.
    assert run_ranks(outside_of_group, 3) == [["single", "stage"], [], ["mesh"]]


def stages(how):
    logger, records = make_logger()
    rank, kept = dist.get_rank(), Kept()
    logging.getLogger("mcore.observe.rank_logging").addHandler(kept)
    log = functools.partial(log_on_each_pipeline_stage, logger, logging.INFO)
    if how == "groups":
        tp = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        dp_cp = [dist.new_group([r]) for r in range(4)][rank]
        log("stage %d", rank // 2, tp_group=tp, dp_cp_group=dp_cp, extra={"k": 1})
    elif how == "default":
        with use_process_groups(ProcessGroups.from_sizes(tp=2, pp=2)):
            log("stage %d", rank // 2, extra={"k": 1})
    else:
        log("stage %d", rank // 2, extra={"k": 1})
        log("stage %d", rank // 2, extra={"k": 1})
    return [(r.getMessage(), r.k) for r in records], [r.levelname for r in kept.records]


@pytest.mark.parametrize("how", ["groups", "default"])
def test_once_for_each_pipeline_stage(how):
    assert run_ranks(stages, 4, how) == [
        ([("stage 0", 1)], []),
        ([], []),
        ([("stage 1", 1)], []),
        ([], []),
    ]


def test_no_groups_anywhere_is_rank_zero_and_one_warning():
    twice = [("stage 0", 1)] * 2
    assert run_ranks(stages, 2, "nothing") == [(twice, ["WARNING"]), ([], ["WARNING"])]


@pytest.mark.parametrize("given", ["tp_group", "dp_cp_group"])
def test_one_group_is_an_error_even_while_disabled(given):
    logger, records = make_logger(logging.ERROR)
    with pytest.raises(ValueError, match=f"got {given} without"):
        log_on_each_pipeline_stage(logger, logging.INFO, "x", **{given: FakeGroup(0)})
    assert records == []


def test_disabled_levels_ask_for_no_rank():
    logger, records = make_logger(logging.ERROR)
    never = NeverAsked()
    log_single_rank(logger, logging.INFO, "x", rank=-1, group=never)
    log_on_each_pipeline_stage(logger, logging.INFO, "x", tp_group=never, dp_cp_group=never)
    assert records == []


def test_one_process_logs_its_pipeline_stage():
    logger, records = make_logger()
    log_on_each_pipeline_stage(logger, logging.INFO, "plain")
    group = FakeGroup(1)
    log_on_each_pipeline_stage(logger, logging.INFO, "stub", tp_group=group, dp_cp_group=group)
    assert [r.getMessage() for r in records] == ["plain", "stub"]


def test_the_record_names_the_caller(no_variables):
    logger, records = make_logger()

    def caller():
        log_single_rank(logger, logging.INFO, "a")
        log_on_each_pipeline_stage(logger, logging.INFO, "b")
        log_single_rank(logger, logging.INFO, "c", stacklevel=2)
        log_on_each_pipeline_stage(logger, logging.INFO, "d", stacklevel=2)

    caller()
    mine = "test_the_record_names_the_caller"
    assert [r.funcName for r in records] == ["caller", "caller", mine, mine]
    assert {r.filename for r in records} == {"test_rank_logging.py"}


def test_level_and_message_as_keywords_and_exc_info(no_variables):
    logger, records = make_logger()
    log_single_rank(logger, level=logging.WARNING, msg="text")
    try:
        raise KeyError("k")
    except KeyError:
        log_single_rank(logger, logging.ERROR, "failed", exc_info=True)
    assert [(r.levelname, r.getMessage()) for r in records] == [
        ("WARNING", "text"),
        ("ERROR", "failed"),
    ]
    assert records[1].exc_info[0] is KeyError
    for bad in [(), ("INFO", "text")]:
        with pytest.raises(TypeError, match=r"logging\.INFO"):
            log_single_rank(logger, *bad)


@pytest.mark.parametrize(
    ("variables", "rank", "logs"),
    [
        ({}, 0, True),
        ({}, 5, True),
        ({}, -1, True),
        ({"RANK": "2"}, 2, True),
        ({"RANK": "2"}, 0, False),
        ({"RANK": "2"}, -1, True),
        ({"RANK": "2", "WORLD_SIZE": "3"}, -1, True),
        ({"RANK": "2", "WORLD_SIZE": "4"}, -1, False),
        ({"RANK": "x"}, 7, True),
        ({"SLURM_PROCID": "2"}, 0, False),
        ({"SLURM_PROCID": "2"}, 2, True),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, 0, False),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, -2, True),
        ({"RANK": "1", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, 1, True),
        ({"WORLD_SIZE": "4"}, -1, True),
    ],
)
def test_rank_before_distributed_is_up(no_variables, variables, rank, logs):
    for name, value in variables.items():
        no_variables.setenv(name, value)
    logger, records = make_logger()
    log_single_rank(logger, logging.INFO, "x", rank=rank)
    assert len(records) == logs


@pytest.mark.parametrize(
    ("variables", "rank", "world_size"),
    [
        ({}, 0, 1),
        ({"RANK": "2", "WORLD_SIZE": "3"}, 2, 3),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, 2, 4),
        ({"SLURM_PROCID": "2"}, 2, 1),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, 1, 2),
        ({"RANK": "", "WORLD_SIZE": "many"}, 0, 1),
    ],
)
def test_safe_lookups(no_variables, caplog, variables, rank, world_size):
    for name, value in variables.items():
        no_variables.setenv(name, value)
    assert (safe_get_rank(), safe_get_world_size()) == (rank, world_size)
    assert caplog.records == []


def lookups():
    return safe_get_rank(), safe_get_world_size()


def test_torch_knows_better_than_the_environment():
    wrong = {"SLURM_PROCID": "7", "SLURM_NTASKS": "9"}
    assert run_ranks(lookups, 2, env=wrong) == [(0, 2), (1, 2)]
