"""Tensors that share the memory of a view without keeping its base tensor alive.

A viewless tensor has no ``_base``. It is not compact: a slice of ten elements still keeps the
storage of the whole base allocated, and only the base tensor object is freed.
"""

from __future__ import annotations

from typing import Any, Generic, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mcore.versioning import internal_api

T = TypeVar("T")
_Wrapped = TypeVar("_Wrapped", bound="Tensor | None")


@internal_api
def _kernel_make_viewless_tensor(inp: Tensor, requires_grad: bool) -> Tensor:
    """Return a leaf on the memory of a tensor, without a base and outside the graph.

    The version counter is shared, so autograd raises if either tensor is written in place between
    a forward pass and its backward pass.

    Args:
        inp: Any tensor. The type of a subclass is kept.
        requires_grad: Whether the leaf requires grad.

    Returns:
        The leaf, with the strides and the storage offset of ``inp``.

    Raises:
        RuntimeError: From torch: ``requires_grad`` for an integer tensor, or for an inference
            tensor outside of inference mode.

    Example:
        >>> base = torch.arange(6.0)
        >>> leaf = _kernel_make_viewless_tensor(base[2:], requires_grad=True)
        >>> leaf._base is None, leaf.is_leaf, leaf.data_ptr() == base[2:].data_ptr()
        (True, True, True)
    """
    out = inp.detach()
    return out.requires_grad_() if requires_grad else out


class MakeViewlessTensor(torch.autograd.Function):
    """The autograd function of ``make_viewless_tensor(..., keep_graph=True)``.

    Example:
        >>> x = torch.ones(2, 3, requires_grad=True)
        >>> y = MakeViewlessTensor.apply((x * 2).view(3, 2), True)
        >>> y._base is None, y.requires_grad
        (True, True)
    """

    @staticmethod
    def forward(ctx: Any, inp: Tensor, requires_grad: bool) -> Tensor:
        """Return a viewless tensor on the memory of the input.

        Autograd adds it to the graph if and only if ``inp`` requires grad. The flag is unused.
        """
        return inp.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Return the gradient unchanged. ``requires_grad`` has no gradient."""
        return grad_output, None


class _TransformableViewlessTensor(torch.autograd.Function):
    """``MakeViewlessTensor`` for forward-mode derivatives and ``torch.func`` transforms.

    A separate class, since ``torch.compile`` supports no autograd function with a ``jvp``.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(inp: Tensor) -> Tensor:
        return inp.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """Return a tensor on the memory of a view that does not keep the view's base alive.

    Works in inference mode, under ``torch.func`` transforms, with forward-mode derivatives and in
    ``torch.compile(fullgraph=True)``, except that a compiled function cannot return a new leaf
    that requires grad.

    Args:
        inp: A tensor. If it is not a view, it is returned as is and the other arguments are
            ignored.
        requires_grad: Whether the result requires grad if ``keep_graph`` is false.
        keep_graph: Whether the result stays in the autograd graph of ``inp``. If so, it requires
            grad if and only if ``inp`` does.

    Returns:
        A tensor with ``_base is None`` and the storage, offset, strides and version counter of
        ``inp``.

    Raises:
        RuntimeError: From torch: ``requires_grad`` without the graph for an integer tensor, or for
            an inference tensor outside of inference mode.

    Example:
        >>> x = torch.ones(3, 4, requires_grad=True)
        >>> hidden = make_viewless_tensor((x * 2).view(4, 3), requires_grad=True, keep_graph=True)
        >>> hidden._base is None
        True
        >>> hidden.sum().backward()
        >>> x.grad.unique()
        tensor([2.])
    """
    if inp._base is None:
        return inp
    if not keep_graph:
        # Without a helper function: its call would add a fifth to the time.
        return inp.detach().requires_grad_() if requires_grad else inp.detach()
    if not _is_derived():
        viewless = MakeViewlessTensor.apply(inp, requires_grad)  # type: ignore[no-untyped-call]
    elif torch.compiler.is_compiling():
        # A traced forward would lose tangents. In a compiled graph a view keeps no base.
        viewless = inp.view_as(inp)
    else:
        viewless = _TransformableViewlessTensor.apply(inp)  # type: ignore[no-untyped-call]
    return cast("Tensor", viewless)


def _is_derived() -> bool:
    """Return whether a transform of ``torch.func`` or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _require_viewless(value: object, where: str, extra_msg: str | None) -> None:
    if isinstance(value, Tensor):
        if value._base is None or (torch.compiler.is_compiling() and _is_derived()):
            return
        message = (
            f"{where} of shape {tuple(value.shape)} is a view: its base, of shape "
            f"{tuple(value._base.shape)}, stays alive through tensor._base, so storing the "
            "tensor leaks memory across iterations. Pass it through make_viewless_tensor() first."
        )
        raise AssertionError(message if extra_msg is None else f"{message} {extra_msg}")
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _require_viewless(item, f"{where}[{index}]", extra_msg)


def assert_viewless_tensor(tensor: T, extra_msg: str | None = None) -> T:
    """Raise if a tensor, or a tensor in nested lists and tuples, is a view. Also with ``-O``.

    Args:
        tensor: A tensor, or nested lists and tuples of tensors. Other objects are accepted.
        extra_msg: Text to append to the error message.

    Returns:
        ``tensor`` itself.

    Raises:
        AssertionError: A tensor has a ``_base``. The message has its index in the lists.

    Example:
        >>> batch = [torch.ones(2), None]
        >>> assert_viewless_tensor(batch) is batch
        True
    """
    _require_viewless(tensor, "tensor", extra_msg)
    return tensor


def safely_set_viewless_tensor_data(tensor: Tensor, new_data_tensor: Tensor) -> None:
    """Set the data of a tensor after checking that it is not a view.

    Shape and dtype may change.

    Args:
        tensor: The tensor to change, without a ``_base``.
        new_data_tensor: The tensor with the new data, on the same device type.

    Raises:
        AssertionError: ``tensor`` is a view.
        TypeError: One of the two is not a tensor.
        RuntimeError: From torch: the device types differ.

    Example:
        >>> tensor = torch.zeros(2)
        >>> safely_set_viewless_tensor_data(tensor, torch.ones(3))
        >>> tensor
        tensor([1., 1., 1.])
    """
    for name, value in (("tensor", tensor), ("new_data_tensor", new_data_tensor)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if tensor._base is not None:
        assert_viewless_tensor(
            tensor,
            f"The data of shape {tuple(new_data_tensor.shape)} was not set on the tensor of shape "
            f"{tuple(tensor.shape)}.",
        )
    tensor.data = new_data_tensor


class WrappedTensor(Generic[_Wrapped]):
    """A holder that lets a callee free a tensor that its caller passed in.

    A caller that passes a tensor keeps a reference to it until the call returns. If it passes
    ``WrappedTensor(tensor)`` instead and keeps no reference, the callee can take the tensor out and
    free it before it returns. If several threads call ``unwrap()``, exactly one gets the tensor. It
    cannot be copied or pickled, since a second reference would keep the tensor alive.

    Args:
        tensor: The tensor to hand over, or None (on a middle pipeline stage, for example).

    Example:
        >>> import torch
        >>> wrapped = WrappedTensor(torch.ones(2))
        >>> wrapped.unwrap()
        tensor([1., 1.])
        >>> wrapped
        WrappedTensor(unwrapped)
    """

    __slots__ = ("__weakref__", "_held")

    def __init__(self, tensor: _Wrapped) -> None:
        self._held = [tensor]

    def unwrap(self) -> _Wrapped:
        """Return the tensor and drop the reference to it.

        Returns:
            The wrapped tensor, or the wrapped None.

        Raises:
            RuntimeError: The tensor was taken out before.

        Example:
            >>> import torch
            >>> WrappedTensor(torch.zeros(1)).unwrap()
            tensor([0.])
        """
        try:
            return self._held.pop()  # list.pop is atomic: one thread gets it
        except IndexError:
            pass
        raise RuntimeError(
            "the WrappedTensor has already been unwrapped: unwrap() returns the tensor once, "
            "keep the result"
        )

    def __repr__(self) -> str:
        return f"WrappedTensor({'wrapped' if self._held else 'unwrapped'})"

    def _refuse_copy(self, *_: Any) -> NoReturn:
        raise TypeError(
            "a WrappedTensor cannot be copied or pickled, since it holds the only reference to its "
            "tensor: pass the object itself, or unwrap() it"
        )

    __reduce_ex__ = _refuse_copy  # copy and pickle both use it
