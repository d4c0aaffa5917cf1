"""Every op on tensors of the stand-in: checked, counted, and run by the kernel of the CPU."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_leaves, tree_map

from standin import recording, rules
from standin.clocks import HOST, POISON, Key, RaceError, clocks, current_stream, find_range
from standin.generators import default_generators, find_state
from standin.guard import current_index
from standin.memory import NAME, is_device, is_pinned, to_device, to_host

_CPU_KEYS = DispatchKeySet(DispatchKey.CPU)
# Views of the same memory: the CPU's kernels make them on any device.
_VIEWS = {
    "as_strided", "view", "_reshape_alias", "unfold", "alias", "detach", "_unsafe_view",
    "view_as_real", "view_as_complex", "_conj", "_neg_view",
}  # fmt: skip
_ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


def run_op(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one op. Kernels of the CPU compute on the same memory."""
    facts = rules.describe_op(op)
    if facts.name in _VIEWS or (facts.name == "set_" and len(args) > 1):
        return op.redispatch(_CPU_KEYS, *args, **kwargs)
    if facts.name == "resize_":
        return _resize(*args[:2])
    named = dict(zip(facts.types, args, strict=False)) | kwargs
    device = rules.find_device(facts, named)
    if facts.name in ("_copy_from", "_copy_from_and_resize"):
        return copy(named["dst"], named["self"], bool(named.get("non_blocking")))
    if isinstance(asked := named.get("device"), torch.device):
        device = asked if asked.type == NAME else None
    index = current_index() if device is None or device.index is None else device.index
    rules.refuse_absent(facts, named)
    if facts.name not in _ALLOCATIONS:
        for _ in range(rules.count_kernels(facts, named)):
            recording.note("ops", facts.name)
    waits = rules.does_wait(facts, named)
    if waits:
        recording.note("waits", facts.name)
    first: list[Any] = []

    def work() -> Any:
        result = _compute(op, facts, named, index)
        if not first:
            if device is not None:
                result = tree_map(lambda leaf: _wrap(leaf, index), result)
            first.extend(tree_leaves(result))
        for made, again in zip(first, tree_leaves(result), strict=True):
            if isinstance(again, torch.Tensor) and made is not again:
                to_host(made).copy_(again)  # a replay computes into the memory of the capture
        return result

    pairs = [(name, tensor) for name, value in named.items() for tensor in rules.tensors_in(value)]
    written = [tensor for name, tensor in pairs if name in facts.written and is_device(tensor)]
    read = [tensor for name, tensor in pairs if name not in facts.outs and is_device(tensor)]
    result = _launch(index, read, written, work)
    if written and facts.name.startswith("_foreach_"):
        torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])
    if waits:
        key = current_stream(index).key
        clocks.wait(HOST, clocks.read_view(key))
    made = sum(is_device(leaf) and all(leaf is not t for _, t in pairs) for leaf in first)
    for _ in range(made):
        recording.note("allocations", "allocation")
    return result


def _launch(
    index: int, read: list[torch.Tensor], written: list[torch.Tensor], work: Callable[[], Any]
) -> Any:
    """Run work on the current stream of a device, also at each replay of a graph."""
    for capture in recording.captures:
        capture.keep_before(written)
    result = clocks.run(current_stream(index).key, read, written, work)
    for capture in recording.captures:
        capture.add(read, written, work, [one for one in tree_leaves(result) if is_device(one)])
    return result


def _compute(op: Any, facts: rules.Op, named: dict[str, Any], index: int) -> Any:
    """Run the kernel of the CPU. Arguments among its results are those that were given."""
    given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def unwrap(name: str, leaf: Any) -> Any:
        if not is_device(leaf):
            return leaf
        is_empty = name in facts.outs and leaf.numel() == 0  # the kernel may resize it
        host = torch.empty(0, dtype=leaf.dtype) if is_empty else to_host(leaf)
        given[id(host)] = (leaf, host)
        return host

    def convert(name: str, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if facts.types[name] == "Tensor" and type(value) in (int, float):
            return torch.tensor(value, dtype=torch.int64 if type(value) is int else None)
        return tree_map(functools.partial(unwrap, name), value)

    arguments = {name: convert(name, value) for name, value in named.items()}
    result = _draw(op, arguments, index) if facts.is_random else op(**arguments)
    for leaf, host in given.values():
        if leaf.shape != host.shape:
            to_host(_resize(leaf, host.shape)).copy_(host)
    return tree_map(lambda leaf: given.get(id(leaf), (leaf,))[0], result)


def _draw(op: Any, arguments: dict[str, Any], index: int) -> Any:
    """Run a kernel that draws from the generator of the call or from that of the device."""
    generator = arguments.get("generator")
    if generator is not None:
        arguments["generator"] = None
    state = find_state(default_generators[index] if generator is None else generator)
    if state is None:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
    for capture in recording.captures:
        capture.draw_from(state)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state.get_state())
        result = op(**arguments)
        state.set_state(torch.get_rng_state())
    return result


def _wrap(leaf: Any, index: int) -> Any:
    is_new = isinstance(leaf, torch.Tensor) and not is_device(leaf)
    return to_device(leaf, index) if is_new else leaf


def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    """Copy between memories or on the device, with the waits of CUDA."""
    comes, stays = is_device(target), is_device(source) and is_device(target)
    is_free = stays or (non_blocking and (comes or is_pinned(target)))
    if stays:
        recording.note("ops", "copy")
    elif not is_free:
        place = "" if comes or not non_blocking else "pageable memory of "
        recording.note("waits", f"copy to {place}{target.device}, {source.shape} {source.dtype}")
    if not is_device(source) and not is_pinned(source):
        recording.refuse_in_capture("a copy from pageable memory")
    is_late = is_free and not comes and not recording.captures
    made = torch.empty_like(target) if is_late else target
    stream = current_stream(source.device if is_device(source) else target.device)
    ends = current_stream(target.device) if stays else stream
    stream.wait_stream(ends)

    def work() -> None:
        to_host(made).copy_(to_host(source))

    read, written = [source] * is_device(source), [target] * comes
    _launch(stream.device.index, read, written, work)
    ends.wait_stream(stream)
    if not is_free:
        clocks.wait(HOST, clocks.read_view(stream.key))
    elif is_late:
        low, high = find_range(target)
        ctypes.memset(low, POISON, high - low)
        clocks.when_host_waits(stream.key, functools.partial(target.copy_, made))
    elif is_pinned(source) and not recording.captures:
        _watch_source(source, stream.key)
    return target


def _watch_source(source: torch.Tensor, key: Key) -> None:
    """Raise once the host waits if it has changed the pinned source of a copy before."""
    low, high = find_range(source)
    content, line = ctypes.string_at(low, high - low), recording.find_line()

    def compare() -> None:
        if ctypes.string_at(source.data_ptr(), high - low) != content:
            raise RaceError(f"pinned memory was changed before its copy to the device, at {line}")

    clocks.when_host_waits(key, compare)


def _to_copy(
    tensor: torch.Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any
) -> torch.Tensor:
    device = tensor.device if device is None else device
    return copy(torch.empty_like(tensor, device=device, **options), tensor, non_blocking)


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


def _attend(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, **settings: Any,
) -> Any:  # fmt: skip
    """Choose the kernel of attention that the CPU would, for equal numbers."""
    hosts = [one if one is None else to_host(one.detach()).requires_grad_(one.requires_grad)
             for one in (query, key, value, attn_mask)]  # fmt: skip
    choice = torch.ops.aten._fused_sdp_choice(*hosts, dropout_p, is_causal, **settings)
    if choice != SDPBackend.FLASH_ATTENTION.value:
        plain = torch.ops.aten._scaled_dot_product_attention_math
        return plain(query, key, value, attn_mask, dropout_p, is_causal, None, **settings)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the kernel adds its mask
        added = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = added.masked_fill_(~attn_mask, -math.inf)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    masked = functools.partial(flash, attn_mask=attn_mask, scale=settings.get("scale"))
    return masked(query, key, value, dropout_p, is_causal)[0]


def register_ops() -> list[Any]:
    """Send all ops on the stand-in to ``run_op``. Returns the libraries, which must be kept."""
    library: Any = torch.library.Library
    fallback, aten = library("_", "IMPL"), library("aten", "IMPL")
    fallback.fallback(run_op, "PrivateUse1")
    aten.impl("_to_copy", _to_copy, "PrivateUse1")
    aten.impl("scaled_dot_product_attention", _attend, "PrivateUse1")
    aten.impl("scaled_dot_product_attention", _attend, "AutogradPrivateUse1")
    for name in torch._C._dispatch_get_all_op_names():
        if _has_kernel_on_cuda(name):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(name.removeprefix("aten::"), functools.partial(run_op, op), "PrivateUse1")
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
