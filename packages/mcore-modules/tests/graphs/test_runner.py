import logging
import threading
from types import SimpleNamespace

import pytest
import torch

from mcore.modules.graphs import graph_capturing, is_graph_capturing, resolve, resolve_graph_runner

CPU = torch.device("cpu")


@pytest.fixture
def fresh_log(caplog):
    resolve._log_downgrade.cache_clear()
    caplog.set_level(logging.WARNING, logger="mcore.modules")
    return caplog


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_a_downgrade_is_logged_once(fresh_log, impl):
    config = SimpleNamespace(cuda_graph_impl=impl)
    runners = [resolve_graph_runner(config, CPU) for _ in range(3)]
    assert {runner.name for runner in runners} == {"eager"}
    [record] = fresh_log.records
    assert impl in record.getMessage()
    assert "eager" in record.getMessage()


@pytest.mark.parametrize("config", [SimpleNamespace(), SimpleNamespace(cuda_graph_impl="none")])
def test_no_wish_is_no_downgrade(fresh_log, config):
    assert resolve_graph_runner(config, CPU).name == "eager"
    assert fresh_log.records == []


def test_flag_is_on_inside_the_block_only():
    assert is_graph_capturing() is False
    with graph_capturing():
        assert is_graph_capturing() is True
        with graph_capturing():
            assert is_graph_capturing() is True
        assert is_graph_capturing() is True
    assert is_graph_capturing() is False


def test_an_exception_ends_the_capture():
    with pytest.raises(ArithmeticError), graph_capturing():
        raise ArithmeticError
    assert is_graph_capturing() is False


def test_other_threads_do_not_capture():
    seen = []
    with graph_capturing():
        thread = threading.Thread(target=lambda: seen.append(is_graph_capturing()))
        thread.start()
        thread.join()
    assert seen == [False]
