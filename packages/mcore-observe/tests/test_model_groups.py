from types import SimpleNamespace

import torch

from mcore.observe.norms import find_process_groups, model_chunks
from mcore.parallel.process_groups import ProcessGroups, use_process_groups


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def test_groups_of_the_caller_then_of_the_model_then_the_default():
    given, of_model, default = SimpleNamespace(), SimpleNamespace(), ProcessGroups()
    model = torch.nn.Linear(1, 1)
    model.pg_collection = of_model
    with use_process_groups(default):
        assert find_process_groups(given, [model]) is given
        assert find_process_groups(None, [model]) is of_model
        assert find_process_groups(None, model) is of_model
        assert find_process_groups(None, [Wrapper(Wrapper(model)), None]) is of_model
        assert find_process_groups(None, torch.nn.Linear(1, 1)) is default
        assert find_process_groups(None, None) is default
        assert find_process_groups(None, []) is default
    assert find_process_groups(None, None) is None


def test_chunks():
    chunk = torch.nn.Linear(1, 1)
    assert model_chunks(None) == []
    assert model_chunks(chunk) == [chunk]
    assert model_chunks((chunk, chunk)) == [chunk, chunk]
