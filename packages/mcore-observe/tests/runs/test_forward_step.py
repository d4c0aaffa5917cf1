from __future__ import annotations
import __future__

import functools
import sys
import typing
from types import SimpleNamespace

import pytest

from mcore.observe import (
    GlobalState,
    maybe_inject_state,
    needs_global_state_injection,
    prepare_forward_step_func,
)

STATE = SimpleNamespace(train_state=SimpleNamespace(step=0))


def plain(data_iterator, model):
    return data_iterator, model


def plain_with_plan(data_iterator, model, return_schedule_plan=False):
    return data_iterator, model, return_schedule_plan


def first_by_name(state, data_iterator, model):
    return state, data_iterator, model


def first_by_other_name(global_state, data_iterator, model):
    return global_state, data_iterator, model


def first_by_annotation(s: GlobalState, data_iterator, model, return_schedule_plan=False):
    return s, data_iterator, model


def middle(data_iterator, s: GlobalState, model):
    return s, data_iterator, model


def last(data_iterator, model, s: GlobalState):
    return s, data_iterator, model


def before_the_plan(data_iterator, model, s: GlobalState, return_schedule_plan=False):
    return s, data_iterator, model, return_schedule_plan


def keyword_only(data_iterator, model, *, s: typing.Optional[GlobalState] = None):  # noqa: UP045
    return s, data_iterator, model


def similar_name(data_iterator: MyGlobalStateless, model):  # noqa: F821
    return data_iterator, model


def nothing():
    return "nothing"


def anything(*args, **kwargs):
    return args, kwargs


class Functor:
    def __init__(self):
        self.calls = 0

    def __call__(self, state, data_iterator, model):
        self.calls += 1
        return state, data_iterator, model

    def method(self, state, data_iterator, model):
        return state, data_iterator, model


@pytest.mark.parametrize(
    "function",
    [
        first_by_name,
        first_by_other_name,
        first_by_annotation,
        middle,
        last,
        before_the_plan,
        keyword_only,
        lambda state, data_iterator, model: (state, data_iterator, model),
        Functor(),
        Functor().method,
        functools.partial(first_by_name),
    ],
)
def test_the_state_lands_where_it_is_asked_for(function):
    assert needs_global_state_injection(function) is True
    prepared = prepare_forward_step_func(function, STATE)
    assert prepared is not function
    state, data_iterator, model = prepared("iterator", "model")[:3]
    assert state is STATE
    assert (data_iterator, model) == ("iterator", "model")


@pytest.mark.parametrize(
    "function",
    [
        plain,
        plain_with_plan,
        similar_name,
        nothing,
        anything,
        functools.partial(first_by_name, STATE),
        functools.partial(first_by_name, state=STATE),
        functools.partial(last, s=STATE),
        dict,
        print,
        "not callable",
    ],
)
def test_what_asks_for_no_state_is_returned_as_it_is(function):
    assert needs_global_state_injection(function) is False
    assert prepare_forward_step_func(function, STATE) is function


def test_the_plan_is_handed_through():
    prepared = prepare_forward_step_func(before_the_plan, STATE)
    assert prepared("iterator", "model", True) == (STATE, "iterator", "model", True)
    assert prepared("iterator", "model", return_schedule_plan=True)[3] is True
    assert prepared(data_iterator="iterator", model="model")[0] is STATE
    first = prepare_forward_step_func(first_by_annotation, STATE)
    assert first("iterator", "model", True)[0] is STATE


@pytest.mark.parametrize(
    "annotation",
    [
        GlobalState,
        "GlobalState",
        "state.GlobalState | None",
        "Optional[GlobalState]",
        typing.Optional[GlobalState],  # noqa: UP045
        GlobalState | None,
        typing.Annotated[GlobalState, "doc"],
        typing.Optional["GlobalState"],
        type("GlobalState", (), {}),
    ],
)
def test_annotations_that_name_the_class(annotation):
    def forward_step(data_iterator, model, where):
        return where

    forward_step.__annotations__ = {"where": annotation}
    assert needs_global_state_injection(forward_step)


@pytest.mark.parametrize("annotation", [int, "MyGlobalState", "GlobalStates", None, dict[str, int]])
def test_annotations_that_do_not(annotation):
    def forward_step(data_iterator, model, where):
        return where

    forward_step.__annotations__ = {"where": annotation}
    assert not needs_global_state_injection(forward_step)


def test_changes_of_the_state_and_of_a_functor_are_seen():
    functor = Functor()
    prepared = prepare_forward_step_func(functor, STATE)
    prepared("iterator", "model")
    STATE.train_state.step = 7
    assert prepared("iterator", "model")[0].train_state.step == 7
    assert functor.calls == 2


def test_the_caller_may_know_the_answer():
    assert maybe_inject_state(first_by_name, STATE, needs_injection=False) is first_by_name
    assert maybe_inject_state(last, STATE, needs_injection=True)("i", "m")[0] is STATE
    bound = maybe_inject_state(anything, STATE, needs_injection=True)
    assert bound("iterator") == ((STATE, "iterator"), {})


@pytest.mark.parametrize(
    "annotation", ["GlobalState", "GlobalState | None", "Optional[GlobalState]"]
)
def test_the_class_may_be_imported_for_type_checkers_alone(annotation):
    """From Python 3.14 on without an import from ``__future__``, before it with one."""
    source = f"def forward_step(iterator: Batches, model, where: {annotation} = None): return where"
    flags = 0 if sys.version_info >= (3, 14) else __future__.annotations.compiler_flag
    names = {"Optional": typing.Optional}
    exec(compile(source, "user", "exec", flags, dont_inherit=True), names)
    prepared = prepare_forward_step_func(names["forward_step"], STATE)
    assert prepared("iterator", "model") is STATE
