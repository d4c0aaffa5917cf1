"""Every op on tensors of the stand-in: checked, counted, and run by the kernel of the CPU."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_leaves, tree_map

from standin import recording
from standin.clocks import HOST, POISON, Key, RaceError, byte_range, clocks, current_stream
from standin.generators import default_generators, find_state
from standin.graphs import find_capture
from standin.guard import current_index
from standin.memory import NAME, is_device, to_device, to_host
from standin.pinned import is_pinned
from standin.rules import Op, check_devices, describe_op

_CPU_KEYS = DispatchKeySet(DispatchKey.CPU)
# Kernels of the CPU that CUDA does not have: ops, formats, the message, and its source.
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
_ABSENT: list[tuple[set[str], set[torch.dtype], str]] = [
    # https://github.com/pytorch/pytorch/issues/127176, and AmpKernels.cu for 8 bits
    (
        {"_amp_foreach_non_finite_check_and_unscale_"},
        {torch.bfloat16} | _FLOAT8,
        "_amp_foreach_non_finite_check_and_unscale_cuda",
    ),
    # https://github.com/pytorch/pytorch/issues/44428, integers: cuBLAS has no such product
    ({"mm", "addmm", "addmv", "mv"}, _INTEGERS, "addmm_cuda"),
    # https://github.com/pytorch/pytorch/issues/11936
    ({"bmm", "baddbmm"}, _INTEGERS, "baddbmm_cuda"),
    # https://github.com/pytorch/pytorch/issues/158313 and intel/torch-xpu-ops issue 1939
    ({"add", "sub"}, _FLOAT8, "ufunc_add_CUDA"),
    ({"mul"}, _FLOAT8, "mul_cuda"),
    ({"div"}, _FLOAT8, "div_true_cuda"),
]  # fmt: skip
# Views of the same memory: the CPU's kernels make them on any device.
_VIEWS = {
    "as_strided", "view", "_reshape_alias", "unfold", "alias", "detach", "_unsafe_view",
    "view_as_real", "view_as_complex", "_conj", "_neg_view",
}  # fmt: skip
_ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "equal", "bincount", "is_set_to",
}  # fmt: skip
_COPIES = {"_copy_from", "_copy_from_and_resize", "copy_"}


def run_op(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one op. Kernels of the CPU compute on the same memory."""
    facts = describe_op(op)
    if facts.name in _VIEWS or (facts.name == "set_" and len(args) > 1):
        return op.redispatch(_CPU_KEYS, *args, **kwargs)
    named = [*zip(facts.arguments, args, strict=False), *kwargs.items()]
    tensors = [(n, v) for n, v in named if isinstance(v, (torch.Tensor, list, tuple))]
    device = check_devices(facts, tensors)
    asked = kwargs.get("device")
    if isinstance(asked, torch.device):
        device = None if asked.type != NAME else asked
    index = current_index() if device is None or device.index is None else device.index
    if facts.name == "resize_":
        return _resize(args[0], args[1])
    if facts.name in _COPIES:
        source, target = (args[1], args[0]) if facts.name == "copy_" else args[:2]
        return copy(target, source, bool((*args, *[kwargs.get("non_blocking")])[2]))
    _refuse_absent(facts, tensors)
    _note(facts, dict(named))
    return _Call(op, facts, args, kwargs, index, device is not None).run()


def _refuse_absent(facts: Op, named: list[tuple[str, Any]]) -> None:
    for names, formats, kernel in _ABSENT:
        if facts.name in names:
            for tensor in (tensor for _, value in named for tensor in _tensors(value)):
                if tensor.dtype in formats:
                    title = str(tensor.dtype).removeprefix("torch.")
                    raise NotImplementedError(f"\"{kernel}\" not implemented for '{title}'")


class _Call:
    """One call: tensors of the device become tensors of the CPU for the kernel, and back."""

    def __init__(
        self, op: Any, facts: Op, args: Any, kwargs: Any, index: int, returns_device: bool
    ) -> None:
        self.op, self.facts, self.args, self.kwargs = op, facts, args, dict(kwargs)
        self.index, self.returns_device = index, returns_device
        self._originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._grown: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self) -> Any:
        key = current_stream(self.index).key
        read, written = self._split()
        capture = find_capture()
        if capture is not None:
            capture.keep_before(written)
        number = clocks.launch(key)
        with clocks.shown_to(key, read, written):
            result = self._compute()
        for host, original in self._grown:
            _adopt(original, host, self.index)
        out = tree_map(self._wrap, result)
        if capture is not None:
            again = functools.partial(self._run_again, tree_leaves(out))
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            capture.add(again, [t for t in made if all(t is not old for old in written)])
        for tensor in (*written, *(t for t in tree_leaves(out) if isinstance(t, torch.Tensor))):
            if is_device(tensor):
                clocks.wrote(tensor, key, number)
        if _waits(self.facts, dict(self._named())):
            clocks.wait(HOST, clocks.read_view(key))
        return out

    def _run_again(self, made: list[Any]) -> None:
        """Compute once more, into the memory of the first results."""
        call = _Call(self.op, self.facts, self.args, self.kwargs, self.index, self.returns_device)
        for original, host in zip(made, tree_leaves(call._compute()), strict=True):
            if isinstance(original, torch.Tensor) and id(host) not in call._originals:
                to_host(original).copy_(host)

    def _named(self) -> list[tuple[str, Any]]:
        return [*zip(self.facts.arguments, self.args, strict=False), *self.kwargs.items()]

    def _split(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        read, written = [], []
        for name, value in self._named():
            for tensor in _tensors(value):
                if is_device(tensor):
                    if name in self.facts.written:
                        written.append(tensor)
                    if name not in self.facts.outs:
                        read.append(tensor)
        return read, written

    def _compute(self) -> Any:
        args = [self._convert(n, k, v) for n, k, v in zip(
            self.facts.arguments, self.facts.types, self.args, strict=False)]  # fmt: skip
        kinds = dict(zip(self.facts.arguments, self.facts.types, strict=False))
        kwargs = {n: self._convert(n, kinds[n], v) for n, v in self.kwargs.items()}
        if kwargs.get("pin_memory"):
            raise RuntimeError(f"Only dense CPU tensors can be pinned, got device {NAME}")
        default = default_generators[self.index].state
        capture = find_capture()
        if self.facts.generator is not None:
            position = self.facts.arguments.index(self.facts.generator)
            given = args[position] if position < len(args) else kwargs.get(self.facts.generator)
            state = default if given is None else find_state(given)
            if state is None:
                raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
            if capture is not None:
                capture.draw_from(state)
            if position < len(args):
                args[position] = state
            else:
                kwargs[self.facts.generator] = state
        elif self.facts.is_random:
            if capture is not None:
                capture.draw_from(default)
            with _drawing_from(default):
                return self.op(*args, **kwargs)
        return self.op(*args, **kwargs)

    def _convert(self, name: str, kind: str, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if kind == "Tensor" and isinstance(value, (int, float)) and not isinstance(value, bool):
            return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else None)
        is_out = name in self.facts.outs
        return tree_map(lambda leaf: self._unwrap(leaf, is_out), value)

    def _unwrap(self, value: Any, is_out: bool) -> Any:
        if not isinstance(value, torch.Tensor) or not is_device(value):
            return value
        if is_out and value.numel() == 0:
            host = torch.empty(0, dtype=value.dtype)
            self._grown.append((host, value))
        else:
            host = to_host(value)
        self._originals[id(host)] = (host, value)
        return host

    def _wrap(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self._originals:
            return self._originals[id(value)][1]
        if self.returns_device:
            if self.facts.name not in _ALLOCATIONS:
                recording.note_allocations()
            return to_device(value, self.index)
        return value


def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    """Copy between memories or on the device, with the waits of CUDA."""
    capture = find_capture()
    if capture is not None:
        if not (is_device(source) or is_pinned(source)):
            recording.refuse_in_capture("a copy from pageable memory")
        capture.keep_before([target])
        capture.add(lambda: _alias(target).copy_(_alias(source)), [])
    place = source.device if is_device(source) else target.device
    key = current_stream(place).key
    if is_device(target) and is_device(source):
        recording.note_op("copy")
        other = current_stream(target.device).key
        clocks.wait(key, clocks.read_view(other))
        number = clocks.launch(key)
        with clocks.shown_to(key, [source], [target]):
            to_host(target).copy_(to_host(source))
        clocks.wrote(target, key, number)
        clocks.wait(other, clocks.read_view(key))
    elif is_device(source):
        _copy_to_host(target, source, key, non_blocking)
    else:
        _copy_from_host(target, source, key, non_blocking)
    return target


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return to_host(tensor) if is_device(tensor) else tensor


def _copy_from_host(
    target: torch.Tensor, source: torch.Tensor, key: Key, non_blocking: bool
) -> None:
    number = clocks.launch(key)
    what = f"copy to the device, {tuple(source.shape)} {source.dtype}"
    (recording.note_copy if non_blocking else recording.note_wait)(what)
    to_host(target).copy_(source)
    clocks.wrote(target, key, number)
    if not non_blocking:
        clocks.wait(HOST, clocks.read_view(key))
    elif is_pinned(source) and find_capture() is None:
        _watch_source(source, key, number)


def _copy_to_host(target: torch.Tensor, source: torch.Tensor, key: Key, non_blocking: bool) -> None:
    number = clocks.launch(key)
    shape = f"{tuple(source.shape)} {source.dtype}"
    is_late = non_blocking and is_pinned(target)
    if is_late:
        recording.note_copy(f"to pinned memory, {shape}")
    else:
        recording.note_wait(f"copy to {'pageable ' if non_blocking else ''}host memory, {shape}")
    with clocks.shown_to(key, [source], []):
        content = to_host(source).to(target.dtype, copy=True)
    if not is_late:
        clocks.wait(HOST, clocks.read_view(key))
        target.copy_(content)
        return
    low, high = byte_range(target)
    ctypes.memset(low, POISON, high - low)
    clocks.when_host_waits(key, number, functools.partial(target.copy_, content))


def _watch_source(source: torch.Tensor, key: Key, number: int) -> None:
    """Raise once the host waits if it has changed the pinned source of a copy before."""
    low, high = byte_range(source)
    content, line = ctypes.string_at(low, high - low), recording.find_line()

    def compare() -> None:
        if ctypes.string_at(source.data_ptr(), high - low) != content:
            raise RaceError(f"pinned memory was changed before its copy to the device, at {line}")

    clocks.when_host_waits(key, number, compare, or_at_end=True)


def _to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> torch.Tensor:
    device = self.device if device is None else torch.device(device)
    if device.type == NAME and device.index is None:
        device = torch.device(NAME, current_index())
    target = torch.empty_like(
        self,
        dtype=dtype,
        layout=layout,
        device=device,
        memory_format=memory_format or torch.preserve_format,
    )
    return copy(target, self, non_blocking)


def _resize(tensor: torch.Tensor, size: Any) -> torch.Tensor:
    storage = tensor.untyped_storage()
    end = tensor.storage_offset() + math.prod(size)
    if end * tensor.element_size() > storage.nbytes():
        fresh = torch.empty(end, dtype=tensor.dtype, device=tensor.device)
        old = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
        fresh[: old.numel()].copy_(old)
        storage = fresh.untyped_storage()
    tensor.set_(storage, tensor.storage_offset(), size)  # type: ignore[call-overload]
    return tensor


def _adopt(original: torch.Tensor, host: torch.Tensor, index: int) -> None:
    """Give a result that was empty the memory of the computed one."""
    storage = (
        to_device(host, index).untyped_storage() if host.numel() else original.untyped_storage()
    )
    original.set_(storage, 0, tuple(host.shape), host.stride())


def _note(facts: Op, named: dict[str, Any]) -> None:
    if facts.name in _ALLOCATIONS:
        recording.note_allocations()
        return
    for _ in range(_num_kernels(facts, named)):
        recording.note_op(facts.name)
    if _waits(facts, named):
        recording.note_wait(facts.name)


def _num_kernels(facts: Op, named: dict[str, Any]) -> int:
    """Return 1, or for lists that CUDA's kernels cannot process together, one for each tensor."""
    if not facts.name.startswith("_foreach_"):
        return 1
    lists = [v for v in named.values() if isinstance(v, (list, tuple)) and list(_tensors(v))]
    kinds = {(tensor.dtype, tensor.device) for value in lists for tensor in _tensors(value)}
    if facts.name == "_foreach_copy_":
        is_fast = all(len({(t.dtype, t.device) for t in v}) == 1 for v in lists) and all(
            is_device(t) for v in lists for t in v
        )
    else:
        is_fast = len(kinds) == 1
    same = all(len({(t.shape, t.stride()) for t in row}) == 1 for row in zip(*lists, strict=False))
    return 1 if is_fast and same else len(lists[0])


def _waits(facts: Op, named: dict[str, Any]) -> bool:
    """Return whether the host waits: for a number of elements, or as it moves an index."""
    if facts.name == "repeat_interleave":
        return named.get("output_size") is None
    if facts.name not in ("index", "index_put_", "_index_put_impl_", "index_put"):
        return facts.name in _WAITS
    indices = list(_tensors(named["indices"]))
    masks = [tensor for tensor in indices if tensor.dtype in (torch.bool, torch.uint8)]
    if "values" in named and named["values"].numel() == 1 and len(masks) == len(indices):
        masks = []  # becomes masked_fill_
    return bool(masks) or not all(map(is_device, indices))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (leaf for leaf in value if isinstance(leaf, torch.Tensor))


class _drawing_from:  # noqa: N801
    """Let torch's default generator of the CPU draw from another one in a block."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def __enter__(self) -> None:
        self._saved = torch.default_generator.get_state()
        torch.default_generator.set_state(self._generator.get_state())

    def __exit__(self, *_: object) -> None:
        self._generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(self._saved)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Choose the kernel of attention that the CPU would, for equal numbers."""
    tensors = [
        t
        if t is None
        else to_host(t.detach()).requires_grad_(t.requires_grad and t.is_floating_point())
        for t in (query, key, value, attn_mask)
    ]
    settings = {"scale": scale, "enable_gqa": enable_gqa}
    choice = torch.ops.aten._fused_sdp_choice(*tensors, dropout_p, is_causal, **settings)
    if choice == SDPBackend.FLASH_ATTENTION.value:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zeros.masked_fill_(attn_mask.logical_not(), -math.inf)
        arguments = (query, key, value, dropout_p, is_causal)
        if attn_mask is not None and attn_mask.dtype == torch.bool:  # the kernel adds its mask
            added = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = added.masked_fill_(~attn_mask, float("-inf"))
        return flash(*arguments, attn_mask=attn_mask, scale=scale)[0]  # type: ignore[no-any-return]
    plain = torch.ops.aten._scaled_dot_product_attention_math
    weighted: torch.Tensor
    weighted, _ = plain(query, key, value, attn_mask, dropout_p, is_causal, None, **settings)
    return weighted


def register_ops() -> list[Any]:
    """Send all ops on the stand-in to ``run_op``. Returns the libraries, which must be kept."""
    library: Any = torch.library.Library
    fallback = library("_", "IMPL")
    fallback.fallback(run_op, "PrivateUse1")
    aten = library("aten", "IMPL")
    aten.impl("_to_copy", _to_copy, "PrivateUse1")
    aten.impl("scaled_dot_product_attention", _attend, "PrivateUse1")
    aten.impl("scaled_dot_product_attention", _attend, "AutogradPrivateUse1")
    for name in torch._C._dispatch_get_all_op_names():
        if _has_kernel_on_cuda(name):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(name.removeprefix("aten::"), _bind(op), "PrivateUse1")
    return [fallback, aten]


def _has_kernel_on_cuda(name: str) -> bool:
    """Return whether torch would run an op as several smaller ones for an unknown device only."""
    if not name.startswith("aten::") or name.endswith("out"):
        return False
    if name.startswith(("aten::_foreach_", "aten::_fused_adam", "aten::_amp_")):
        return True
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return name in ("aten::cat", "aten::stack") or (
        has(name, "CPU")
        and (has(name, "CompositeExplicitAutograd") or has(name, "CompositeImplicitAutograd"))
    )


def _bind(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: run_op(op, *args, **kwargs)
