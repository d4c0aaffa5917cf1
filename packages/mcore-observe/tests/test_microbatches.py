import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

from mcore.observe.steplog.microbatches import find_num_microbatches, samples_per_step

from mcore.observe import ConfigContainer, TrainingConfig

CALCULATOR = "megatron.core.num_microbatches_calculator"


def make_config(**train):
    sizes = {"micro_batch_size": 2, "global_batch_size": 64} | train
    return ConfigContainer(train=TrainingConfig(**sizes), data_parallel_size=4)


def calculator(count):
    module = ModuleType(CALCULATOR)
    module.get_num_microbatches = count
    return module


def test_order_of_the_sources(monkeypatch):
    monkeypatch.setitem(sys.modules, CALCULATOR, calculator(lambda: 5))
    state = SimpleNamespace(get_num_microbatches=lambda: 3)
    assert find_num_microbatches(make_config(num_microbatches=4), state) == 3
    assert find_num_microbatches(make_config(num_microbatches=4)) == 4
    assert find_num_microbatches(make_config()) == 5
    monkeypatch.delitem(sys.modules, CALCULATOR)
    assert find_num_microbatches(make_config()) == 8
    assert find_num_microbatches(SimpleNamespace(train=SimpleNamespace(micro_batch_size=2))) == 1


def test_a_calculator_that_is_not_set_up_is_passed_over(monkeypatch):
    def not_set_up():
        raise AttributeError("'NoneType' object has no attribute 'get'")

    monkeypatch.setitem(sys.modules, CALCULATOR, calculator(not_set_up))
    assert find_num_microbatches(make_config()) == 8


def test_mocks_are_no_numbers():
    config = mock.MagicMock()
    config.train.global_batch_size, config.train.micro_batch_size = 16, 2
    config.data_parallel_size = 4
    assert find_num_microbatches(config, mock.MagicMock()) == 2


def test_samples_of_a_step():
    assert samples_per_step(make_config(), 8) == 64
    inner = ConfigContainer(train=TrainingConfig(micro_batch_size=2, data_parallel_size=3))
    assert samples_per_step(inner, 1) == 6
