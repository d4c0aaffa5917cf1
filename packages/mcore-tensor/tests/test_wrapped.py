import contextlib
import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch

from mcore.tensor import WrappedTensor


def frees_it_half_way(wrapped):
    tensor = wrapped.unwrap()
    reference = weakref.ref(tensor)
    del tensor
    return reference() is None


def test_the_callee_can_free_the_tensor():
    freed = frees_it_half_way(WrappedTensor(torch.ones(2)))  # not in the assert, which keeps parts
    assert freed


def test_a_plain_argument_could_not_be_freed():
    def callee(tensor):
        reference = weakref.ref(tensor)
        del tensor
        return reference() is None

    kept = torch.ones(2)
    assert not callee(kept)


def test_it_is_handed_over_once():
    tensor = torch.ones(2)
    wrapped = WrappedTensor(tensor)
    assert wrapped.unwrap() is tensor
    for _ in range(2):
        with pytest.raises(RuntimeError, match="already been unwrapped"):
            wrapped.unwrap()


def test_the_error_keeps_no_reference():
    wrapped = WrappedTensor(torch.ones(2))
    reference = weakref.ref(wrapped.unwrap())
    with pytest.raises(RuntimeError) as caught:
        wrapped.unwrap()
    gc.collect()
    assert reference() is None
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_none_can_be_wrapped_and_is_handed_over_once_too():
    wrapped = WrappedTensor(None)
    assert wrapped.unwrap() is None
    with pytest.raises(RuntimeError, match="already been unwrapped"):
        wrapped.unwrap()


def test_exactly_one_thread_gets_it():
    for _ in range(50):
        wrapped = WrappedTensor(torch.ones(1))
        start = threading.Barrier(8)
        won = []

        def race(wrapped=wrapped, start=start, won=won):
            start.wait()
            with contextlib.suppress(RuntimeError):
                won.append(wrapped.unwrap())

        threads = [threading.Thread(target=race) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
        assert len(won) == 1


def test_the_representation_has_no_value():
    wrapped = WrappedTensor(torch.full((2,), 12345.0))
    assert repr(wrapped) == "WrappedTensor(wrapped)"
    wrapped.unwrap()
    assert repr(wrapped) == "WrappedTensor(unwrapped)"


def test_it_is_small_and_can_be_referenced_weakly():
    wrapped = WrappedTensor(torch.ones(1))
    assert not hasattr(wrapped, "__dict__")
    with pytest.raises(AttributeError):
        wrapped.more = 1
    assert weakref.ref(wrapped)() is wrapped


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_duplicated(duplicate):
    wrapped = WrappedTensor(torch.ones(1))
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        duplicate(wrapped)
    assert wrapped.unwrap().item() == 1
