"""Tests of the decorator that does nothing."""

import pytest

from mcore.versioning import null_decorator


def _increment(x: int) -> int:
    return x + 1


def test_decorated_function_is_the_function_itself_and_can_be_called() -> None:
    assert null_decorator(_increment) is _increment
    assert null_decorator(lambda x: x + 1)(1) == 2


def test_class_is_returned_itself() -> None:
    class Kernel:
        pass

    assert null_decorator(Kernel) is Kernel


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((), {"configs": [1], "key": ["n"]}),
        (("message",), {}),
        (("message",), {"color": "red"}),
        ((_increment,), {"warmup": 2}),
        ((_increment, _increment), {}),
    ],
)
def test_arguments_give_an_identity_decorator(args: tuple, kwargs: dict) -> None:
    decorate = null_decorator(*args, **kwargs)
    assert decorate(_increment) is _increment
    assert decorate(int) is int


def test_with_statement_can_be_repeated() -> None:
    annotation = null_decorator("range")
    passes = 0
    for _ in range(2):
        with annotation as entered:
            passes += 1
            assert entered is annotation
    assert passes == 2


def test_with_statement_lets_exceptions_through() -> None:
    with pytest.raises(KeyError, match="lost"), null_decorator("range"):
        raise KeyError("lost")


def test_decorated_functions_do_not_become_context_managers() -> None:
    @null_decorator
    def bare(x: int) -> int:
        return x

    @null_decorator(num_warps=4)
    def configured(x: int) -> int:
        return x

    assert (bare(3), configured(4)) == (3, 4)
