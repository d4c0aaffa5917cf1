import collections
import copy
import dataclasses
import sys
from collections import OrderedDict, UserDict, defaultdict, deque
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.modules import conversion_helper, float16_to_fp32, fp32_to_float16, mark_keep_in_fp32
from mcore.modules.precision import _BF16_TYPES, _FLOAT_TYPES, _HALF_TYPES
from mcore.tensor import WrappedTensor

ones = torch.ones


def to_half(value):
    return fp32_to_float16(value, torch.Tensor.half)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    n: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass
class Counted:
    x: Any
    made: list = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.made.append(1)


@dataclasses.dataclass
class ModelOutput(OrderedDict):
    """Like that of Hugging Face: fields that are not None are items too."""

    loss: Any = None
    logits: Any = None
    hidden: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]


@pytest.mark.usefixtures("on_each_device")
def test_nested_structure_of_the_documented_example():
    result = to_half((ones(2), [ones(1, dtype=torch.int64), None, 3]))
    assert type(result) is tuple
    assert type(result[1]) is list
    assert result[0].dtype is torch.float16
    assert result[1][0].dtype is torch.int64
    assert result[1][1:] == [None, 3]


@pytest.mark.usefixtures("on_each_device")
def test_named_tuple_keeps_its_type():
    result = to_half(Pair(a=ones(1), b=2))
    assert type(result) is Pair
    assert result.a.dtype is torch.float16
    assert result.b == 2


@pytest.mark.usefixtures("on_each_device")
def test_torch_return_types_keep_their_fields():
    result = to_half(torch.max(ones(3, 2), 0))
    assert type(result) is torch.return_types.max
    assert result.values.dtype is torch.float16
    assert result.indices.dtype is torch.int64


@pytest.mark.usefixtures("on_each_device")
def test_mappings_keep_type_order_and_factory_and_the_original():
    original = defaultdict(list, {"k": ones(1), "a": [ones(1)]})
    result = to_half(original)
    assert type(result) is defaultdict
    assert result.default_factory is list
    assert list(result) == ["k", "a"]
    assert result["k"].dtype is result["a"][0].dtype is torch.float16
    assert original["k"].dtype is original["a"][0].dtype is torch.float32


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    "make", [dict, OrderedDict, UserDict, MappingProxyType, collections.Counter], ids=str
)
def test_every_mapping_is_converted(make):
    result = to_half(make({"k": ones(1)}))
    assert type(result) is make
    assert result["k"].dtype is torch.float16


@pytest.mark.usefixtures("on_each_device")
def test_dict_that_is_its_own_namespace():
    class Attributes(dict):
        def __init__(self, *args):
            super().__init__(*args)
            self.__dict__ = self

    result = to_half(Attributes({"x": ones(1)}))
    assert result.x is result["x"]
    assert result.x.dtype is torch.float16


@pytest.mark.usefixtures("on_each_device")
def test_deque_keeps_its_maximal_length():
    result = to_half(deque([ones(1), ones(1)], maxlen=5))
    assert type(result) is deque
    assert result.maxlen == 5
    assert [tensor.dtype for tensor in result] == [torch.float16] * 2


@pytest.mark.usefixtures("on_each_device")
def test_namespace_and_subclasses_of_containers():
    class Tensors(list):
        pass

    class Three(tuple):
        __slots__ = ()

    result = to_half(SimpleNamespace(x=ones(1), many=Tensors([ones(1)]), three=Three([ones(1)])))
    assert type(result) is SimpleNamespace
    assert type(result.many) is Tensors
    assert type(result.three) is Three
    assert result.x.dtype is result.many[0].dtype is result.three[0].dtype is torch.float16


@pytest.mark.usefixtures("on_each_device")
def test_frozen_dataclass_with_a_field_that_is_no_argument():
    original = Frozen(ones(1))
    object.__setattr__(original, "n", 7)
    result = to_half(original)
    assert type(result) is Frozen
    assert result.x.dtype is torch.float16
    assert result.n == 7
    assert original.x.dtype is torch.float32


@pytest.mark.usefixtures("on_each_device")
def test_post_init_does_not_run_again():
    original = Counted(ones(1))
    result = to_half(original)
    assert result.x.dtype is torch.float16
    assert result.made == [1]


@pytest.mark.usefixtures("on_each_device")
def test_a_field_that_was_never_set_stays_unset():
    @dataclasses.dataclass
    class Late:
        x: Any
        made: Any = dataclasses.field(init=False)

    cast = float16_to_fp32(Late(torch.ones(1).half()))
    assert (cast.x.dtype, hasattr(cast, "made")) == (torch.float32, False)


def test_dataclass_types_and_modules_are_leaves():
    linear = torch.nn.Linear(1, 1)
    assert to_half(Counted) is Counted
    assert to_half(linear) is linear
    assert linear.weight.dtype is torch.float32


@pytest.mark.usefixtures("on_each_device")
def test_model_output_agrees_by_item_and_attribute():
    original = ModelOutput(loss=ones(()), hidden=(ones(1), ones(2)))
    result = to_half(original)
    assert type(result) is ModelOutput
    assert list(result) == ["loss", "hidden"]
    assert result.loss is result["loss"]
    assert result.hidden is result["hidden"]
    assert result.loss.dtype is result.hidden[1].dtype is torch.float16
    assert result.logits is None
    assert original.loss.dtype is original["loss"].dtype is torch.float32


@pytest.mark.parametrize(
    "leaf",
    [
        ones(1, dtype=torch.float64),
        ones(1, dtype=torch.bfloat16),
        ones(1, dtype=torch.complex64),
        ones(1, dtype=torch.bool),
        ones(1).to(torch.float8_e4m3fn),
        mark_keep_in_fp32(ones(1)),
        torch.Size([2, 3]),
        WrappedTensor(ones(1)),
        {1, 2},
        "text",
        b"bytes",
        3.5,
        True,
        None,
        object(),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_leaves_that_are_not_float32_are_the_same_objects(leaf):
    assert to_half([leaf])[0] is leaf


@pytest.mark.usefixtures("on_each_device")
def test_wrapped_tensor_is_not_unwrapped():
    wrapped = WrappedTensor(ones(1))
    to_half(wrapped)
    assert wrapped.unwrap().dtype is torch.float32


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_upcast_of_both_half_types(dtype):
    result = float16_to_fp32({"l": ones(1, dtype=dtype), "d": ones(1, dtype=torch.float64)})
    assert result["l"].dtype is torch.float32
    assert result["d"].dtype is torch.float64


def test_meta_and_sparse_tensors_are_converted():
    assert to_half(torch.empty(2, device="meta")).dtype is torch.float16
    sparse = to_half(torch.eye(2).to_sparse())
    assert sparse.is_sparse
    assert sparse.dtype is torch.float16
    assert float16_to_fp32(sparse).dtype is torch.float32


class Cache(UserDict):
    """Filled by the model that gets it; cannot be made without an argument."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit


class Named(list):
    def __init__(self, name, items):
        super().__init__(items)
        self.name = name


class Point(tuple):
    def __new__(cls, x, y):
        return super().__new__(cls, (x, y))


def test_attributes_of_a_tuple_subclass_are_kept():
    point = Point(ones(1), 2)
    point.unit = "m"
    converted = fp32_to_float16(point, torch.Tensor.half)
    assert (type(converted), converted.unit, converted[1]) == (Point, "m", 2)
    assert converted[0].dtype is torch.float16


def unchanged():
    ids = ones(1, dtype=torch.int64)
    nested = {"a": [ids], "b": (ids, {})}
    return [
        [],
        {},
        deque(),
        OrderedDict(),
        nested,
        Cache(3),
        Named("n", [ids]),
        Point(ids, 1),
        Pair(ids, 2),
        Counted(ids),
        SimpleNamespace(cache={}),
        defaultdict(list),
        MappingProxyType({"ids": ids}),
    ]


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("place", range(len(unchanged())))
def test_a_container_in_which_nothing_changes_is_returned_itself(place):
    val = unchanged()[place]
    assert to_half(val) is val
    outer = {"x": ones(1), "kept": val}
    assert to_half(outer)["kept"] is val
    assert conversion_helper(val, lambda leaf: leaf) is val


@pytest.mark.usefixtures("on_each_device")
def test_containers_with_constructors_of_their_own_are_rebuilt_without_them():
    named = to_half(Named("n", [ones(1)]))
    assert (type(named), named.name, named[0].dtype) == (Named, "n", torch.float16)
    point = to_half(Point(ones(1), 2))
    assert (type(point), point[0].dtype, point[1]) == (Point, torch.float16, 2)
    cache = Cache(3)
    cache["x"] = ones(1)
    result = to_half(cache)
    assert (type(result), result.limit, result["x"].dtype) == (Cache, 3, torch.float16)
    assert cache["x"].dtype is torch.float32


@pytest.mark.usefixtures("on_each_device")
def test_mappings_that_cannot_be_copied_are_leaves():
    class Table(collections.abc.Mapping):
        def __init__(self, path):
            self.held = {path: ones(1)}

        def __getitem__(self, key):
            return self.held[key]

        def __iter__(self):
            return iter(self.held)

        def __len__(self):
            return len(self.held)

    table = Table("p")
    assert to_half([table, ones(1)])[0] is table


@pytest.mark.usefixtures("on_each_device")
def test_a_tensor_that_occurs_twice_is_converted_once():
    calls = []

    def convert(tensor):
        calls.append(tensor)
        return tensor.half()

    x = ones(1)
    result = fp32_to_float16([x, {"again": x}], convert)
    assert result[0] is result[1]["again"]
    assert len(calls) == 1


@pytest.mark.usefixtures("on_each_device")
def test_a_container_that_occurs_twice_is_no_cycle():
    shared = [ones(1)]
    result = to_half((shared, shared))
    assert result[0][0] is result[1][0]


@pytest.mark.usefixtures("on_each_device")
def test_cycles_are_refused():
    cycle = [ones(1)]
    cycle.append({"me": cycle})
    with pytest.raises(ValueError, match="contains itself"):
        to_half(cycle)


def test_torch_compile_traces_containers_and_leaves_a_cycle_to_python():
    def cast_twice(x):
        made = x + 1
        return to_half({"made": (made, [made, 3]), "given": [x]})

    torch.compiler.reset()
    result = torch.compile(cast_twice, backend="eager", fullgraph=True)(ones(2))
    assert result["made"][0].tolist() == [2.0, 2.0]
    assert result["made"][1][0] is result["made"][0]
    assert result["made"][0].dtype is result["given"][0].dtype is torch.float16

    def cast_within(x, depth, cycle):
        innermost = containers = [x]
        for _ in range(depth):
            containers = [containers]
        if cycle:
            innermost.append(containers)
        return to_half(containers)

    compiled = torch.compile(cast_within, backend="eager")
    found = compiled(ones(2), 20, cycle=False)  # deeper than what is traced at once
    while isinstance(found, list):
        [found] = found
    assert found.dtype is torch.float16
    with pytest.raises(ValueError, match="list contains itself"):
        compiled(ones(2), 3, cycle=True)


@pytest.mark.usefixtures("on_each_device")
def test_caller_may_retry_after_a_cycle_or_an_error():
    def fail(_):
        raise ArithmeticError("no")

    container = [ones(1)]
    with pytest.raises(ArithmeticError):
        conversion_helper(container, fail)
    assert to_half(container)[0].dtype is torch.float16


@pytest.mark.usefixtures("on_each_device")
def test_casts_are_part_of_the_autograd_graph():
    parameter = torch.nn.Parameter(ones(2))
    out = to_half(parameter)
    assert not out.is_leaf
    out.sum().backward()
    assert parameter.grad.dtype is torch.float32
    assert parameter.grad.tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("on_each_device")
def test_a_cast_view_is_no_view():
    assert to_half(ones(4)[:2])._base is None


def test_conversion_helper_converts_every_kind_of_leaf():
    seen = conversion_helper([1, None, "a", {2}], lambda leaf: ("leaf", leaf))
    assert seen == [("leaf", 1), ("leaf", None), ("leaf", "a"), ("leaf", {2})]


def test_legacy_type_tuples_hold_the_cpu_types():
    assert torch.FloatTensor in _FLOAT_TYPES
    assert torch.HalfTensor in _HALF_TYPES
    assert torch.BFloat16Tensor in _BF16_TYPES


leaves = st.sampled_from([0.5, 1, None, "s", True])
structures = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(structures)
def test_identity_conversion_gives_an_equal_structure(structure):
    before = copy.deepcopy(structure)
    result = conversion_helper(structure, lambda leaf: leaf)
    assert result == before == structure
    assert type(result) is type(structure)


@pytest.mark.usefixtures("on_each_device")
def test_small_inputs_cost_few_calls():
    inputs = (ones(1, dtype=torch.int64), None, ones(1, dtype=torch.int64))
    to_half(inputs)
    calls = []
    sys.setprofile(lambda frame, event, arg: event == "call" and calls.append(frame.f_code))
    try:
        to_half(inputs)
    finally:
        sys.setprofile(None)
    # A tree map over the same tuple makes several times as many.
    assert len(calls) < 15
