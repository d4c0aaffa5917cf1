import logging
import subprocess
import sys
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


def test_runners_are_built_and_chosen_without_touching_a_device():
    script = (
        "import torch\n"
        "from types import SimpleNamespace\n"
        "from mcore.modules.graphs import TEGraphRunner, TorchGraphRunner, resolve_graph_runner\n"
        "for device in (torch.device('cpu'), torch.device('cuda', 0), torch.device('xpu')):\n"
        "    for impl in ('none', 'local', 'transformer_engine'):\n"
        "        resolve_graph_runner(SimpleNamespace(cuda_graph_impl=impl, fp8='e4m3'), device)\n"
        "    TorchGraphRunner().is_available(device), TEGraphRunner().is_available(device)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    no_numpy = "ignore:Failed to initialize NumPy"  # torch says so where numpy is not installed
    command = [sys.executable, "-W", "error", "-W", no_numpy, "-c", script]
    subprocess.run(command, check=True, timeout=600)


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
