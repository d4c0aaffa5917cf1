import torch

from mcore.tensor.scratch import Scratch


def test_requests_of_one_dtype_share_memory():
    scratch = Scratch(8)
    first = scratch.take(8, torch.float32)
    assert scratch.take(3, torch.float32).data_ptr() == first.data_ptr()
    assert scratch.take(3, torch.float64).data_ptr() != first.data_ptr()
    assert (first.shape, first.device.type) == ((8,), "cpu")


def test_a_request_beyond_the_capacity_gets_more():
    scratch = Scratch(2)
    assert scratch.take(5, torch.int16).shape == (5,)
    assert scratch.take(0, torch.int16).shape == (0,)
