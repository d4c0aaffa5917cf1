import gc
import weakref

import pytest
import torch
from torch.autograd import forward_ad

from mcore.tensor import (
    MakeViewlessTensor,
    _kernel_make_viewless_tensor,
    assert_viewless_tensor,
    make_viewless_tensor,
    safely_set_viewless_tensor_data,
)


def doubled_view(x):
    return (x * 2).view(4, 3)


@pytest.mark.usefixtures("on_each_device")
def test_with_the_graph_the_gradient_flows():
    x = torch.randn(3, 4, requires_grad=True)
    y = doubled_view(x)
    viewless = make_viewless_tensor(y, True, True)
    assert viewless._base is None
    assert viewless.data_ptr() == y.data_ptr()
    assert torch.equal(viewless, y)
    viewless.sum().backward()
    assert (x.grad == 2).all()


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("input_requires_grad", [True, False])
def test_with_the_graph_only_the_input_decides_on_requires_grad(requires_grad, input_requires_grad):
    y = doubled_view(torch.ones(3, 4, requires_grad=input_requires_grad))
    viewless = make_viewless_tensor(y, requires_grad, True)
    assert viewless.requires_grad is input_requires_grad
    assert (viewless.grad_fn is not None) is input_requires_grad
    applied = MakeViewlessTensor.apply(y, requires_grad)
    assert (applied.requires_grad, applied._base) == (input_requires_grad, None)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("make", [
    lambda view, requires_grad: make_viewless_tensor(view, requires_grad, False),
    _kernel_make_viewless_tensor,
])  # fmt: skip
def test_without_the_graph_it_is_a_leaf(make, requires_grad):
    y = doubled_view(torch.ones(3, 4, requires_grad=True))
    leaf = make(y, requires_grad)
    assert (leaf._base, leaf.grad_fn, leaf.is_leaf) == (None, None, True)
    assert leaf.requires_grad is requires_grad
    assert leaf.data_ptr() == y.data_ptr()


@pytest.mark.usefixtures("on_each_device")
def test_strides_and_offset_are_those_of_the_view():
    view = torch.arange(24.0).view(4, 6)[1:, ::2].t()
    for keep_graph in (True, False):
        viewless = make_viewless_tensor(view, False, keep_graph)
        assert viewless.stride() == view.stride()
        assert viewless.storage_offset() == view.storage_offset()
        assert torch.equal(viewless, view)


@pytest.mark.usefixtures("on_each_device")
def test_what_is_no_view_is_returned_as_it_is():
    tensor = torch.ones(2)
    assert make_viewless_tensor(tensor, True, True) is tensor
    assert make_viewless_tensor(tensor, True, False) is tensor
    assert not tensor.requires_grad


@pytest.mark.usefixtures("on_each_device")
def test_the_base_is_let_go():
    base = torch.randn(10)
    reference = weakref.ref(base)
    viewless = make_viewless_tensor(base[:4], False, False)
    del base
    gc.collect()
    assert reference() is None
    assert viewless.untyped_storage().nbytes() == 40  # viewless is not compact


@pytest.mark.usefixtures("on_each_device")
def test_the_base_is_let_go_with_the_graph_too():
    base = torch.randn(10, requires_grad=True) * 2
    reference = weakref.ref(base)
    viewless = make_viewless_tensor(base[:4], True, True)
    del base
    gc.collect()
    assert reference() is None
    viewless.sum().backward()


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("keep_graph", [True, False])
def test_a_change_of_the_original_before_backward_is_noticed(keep_graph):
    parameter = torch.ones(3, requires_grad=True)
    hidden = (parameter * 1).view(3)
    viewless = make_viewless_tensor(hidden, True, keep_graph)
    loss = (viewless * viewless).sum()
    with torch.no_grad():
        hidden.add_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("on_each_device")
def test_an_integer_tensor_cannot_require_grad():
    view = torch.arange(6).view(2, 3)
    assert make_viewless_tensor(view, False, False)._base is None
    with pytest.raises(RuntimeError, match="floating point"):
        make_viewless_tensor(view, True, False)


@pytest.mark.usefixtures("on_each_device")
def test_forward_and_backward_of_the_function():
    view = torch.ones(4).view(2, 2)
    out = MakeViewlessTensor.forward(None, view, False)
    assert out._base is None
    gradient = torch.ones(2)
    assert MakeViewlessTensor.backward(None, gradient) == (gradient, None)


class Tagged(torch.Tensor):
    pass


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("keep_graph", [True, False])
def test_a_subclass_stays_one(keep_graph):
    view = torch.ones(4).as_subclass(Tagged).view(2, 2)
    assert type(make_viewless_tensor(view, False, keep_graph)) is Tagged


@pytest.mark.usefixtures("on_each_device")
def test_double_backward():
    x = torch.randn(3, 4, requires_grad=True)
    loss = make_viewless_tensor(doubled_view(x), True, True).pow(3).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 48 * x.detach())


def test_pseudo_deallocation_then_backward():
    x = torch.ones(3, 4, requires_grad=True)
    out = make_viewless_tensor(doubled_view(x), True, True)
    gradient = torch.full_like(out, 5)
    out.data = torch.empty(1)
    torch.autograd.Variable._execution_engine.run_backward(
        (out,), (gradient,), keep_graph=False, create_graph=False, inputs=(),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip
    assert (x.grad == 10).all()


def cubes(x):
    return make_viewless_tensor(doubled_view(x), True, True).pow(3).sum()


@pytest.mark.usefixtures("on_each_device")
def test_under_function_transforms():
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(torch.func.grad(cubes)(x[0]), 24 * x[0] ** 2)
    torch.testing.assert_close(torch.func.vmap(cubes)(x), (8 * x**3).sum((1, 2)))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(cubes))(x), 24 * x**2)
    torch.testing.assert_close(
        torch.func.grad(lambda y: torch.func.grad(cubes)(y).sum())(x[0]), 48 * x[0]
    )


@pytest.mark.parametrize(
    ("requires_grad", "keep_graph"), [(True, True), (False, True), (False, False)]
)
def test_in_a_compiled_function(requires_grad, keep_graph):
    def square(x):
        return make_viewless_tensor(doubled_view(x), requires_grad, keep_graph) ** 2

    compiled = torch.compile(square, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 4, requires_grad=True)
    result = compiled(x)
    assert torch.equal(result, square(x))
    assert result.requires_grad is keep_graph
    if keep_graph:
        result.sum().backward()
        torch.testing.assert_close(x.grad, 8 * x.detach())


def test_a_compiled_function_under_a_transform():
    compiled = torch.compile(torch.func.grad(cubes), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(x), 24 * x**2)


def tangent_of_dual(function, x, t):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, t))).tangent


@pytest.mark.parametrize("is_compiled", [False, True])
def test_forward_mode_derivatives(is_compiled):
    x, t = torch.randn(3, 4), torch.randn(3, 4)

    def checked(x):
        return assert_viewless_tensor(make_viewless_tensor(doubled_view(x), True, True)).pow(3)

    def plain(x):
        return (2 * x).view(4, 3).pow(3)

    def squares(function):
        return lambda x: function(x).pow(2).sum()

    def derivatives(function):
        return (
            torch.func.jvp(function, (x,), (t,))[1],
            tangent_of_dual(function, x, t),
            torch.func.jvp(torch.func.grad(squares(function)), (x,), (t,))[1],
            torch.func.hessian(squares(function))(x),
        )

    compiled = torch.compile(derivatives, fullgraph=True, backend="aot_eager")
    found = (compiled if is_compiled else derivatives)(checked)
    torch.testing.assert_close(found, derivatives(plain))


@pytest.mark.usefixtures("on_each_device")
def test_in_inference_mode():
    with torch.inference_mode():
        view = torch.ones(4).view(2, 2)
        for keep_graph in (True, False):
            viewless = make_viewless_tensor(view, False, keep_graph)
            assert viewless._base is None
            assert viewless.is_inference()
            assert viewless.data_ptr() == view.data_ptr()


@pytest.mark.usefixtures("on_each_device")
def test_an_inference_tensor_cannot_require_grad_outside():
    with torch.inference_mode():
        inside = torch.ones(4)
    with pytest.raises(RuntimeError, match="inference"):
        _kernel_make_viewless_tensor(inside, True)
    assert not _kernel_make_viewless_tensor(inside, False).requires_grad


@pytest.mark.usefixtures("on_each_device")
def test_assert_viewless_returns_its_argument():
    for value in (torch.ones(2), [torch.ones(2), None], (torch.ones(2),), "text", None, 3):
        assert assert_viewless_tensor(value) is value


VIEW = torch.ones(4).view(2, 2)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (VIEW, "tensor of shape"),
        ([torch.ones(2), VIEW], r"tensor\[1\] of shape"),
        ((VIEW,), r"tensor\[0\] of shape"),
        ([None, (3, [torch.ones(1), VIEW])], r"tensor\[1\]\[1\]\[1\] of shape"),
    ],
)
def test_assert_viewless_finds_views_in_lists_and_tuples(value, place):
    with pytest.raises(AssertionError, match=place) as caught:
        assert_viewless_tensor(value)
    message = str(caught.value)
    assert "tensor._base" in message
    assert "leaks memory across iterations" in message
    assert "None" not in message
    with pytest.raises(AssertionError, match=place + ".* from the second stage$"):
        assert_viewless_tensor(value, "from the second stage")


@pytest.mark.usefixtures("on_each_device")
def test_setting_data_may_change_shape_and_dtype():
    tensor = torch.zeros(2, requires_grad=True)
    data = torch.arange(3.0, dtype=torch.float64)
    safely_set_viewless_tensor_data(tensor, data)
    assert tensor.dtype == torch.float64
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert tensor.data_ptr() == data.data_ptr()


@pytest.mark.usefixtures("on_each_device")
def test_setting_data_of_a_view_is_refused_and_names_both_shapes():
    view = torch.ones(6).view(2, 3)
    with pytest.raises(AssertionError, match=r"\(5,\).*\(2, 3\)") as caught:
        safely_set_viewless_tensor_data(view, torch.ones(5))
    assert "tensor._base" in str(caught.value)
    assert view.shape == (2, 3)


@pytest.mark.usefixtures("on_each_device")
def test_setting_data_needs_tensors_of_one_device_type():
    with pytest.raises(TypeError, match=r"tensor must be a .*, got list"):
        safely_set_viewless_tensor_data([torch.ones(2)], torch.ones(2))
    with pytest.raises(TypeError, match=r"new_data_tensor must be a .*, got float"):
        safely_set_viewless_tensor_data(torch.ones(2), 1.0)
    with pytest.raises(RuntimeError):
        safely_set_viewless_tensor_data(torch.ones(2), torch.ones(2, device="meta"))


def test_the_tangent_of_the_result_is_another_tensor():
    with forward_ad.dual_level():
        view = forward_ad.make_dual(torch.ones(3, 4), torch.ones(3, 4)).view(4, 3)
        tangents = [
            forward_ad.unpack_dual(one).tangent
            for one in (view, make_viewless_tensor(view, True, True))
        ]
    assert tangents[0] is not tangents[1]
    assert torch.equal(*tangents)
