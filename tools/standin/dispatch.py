"""Every op on tensors of the stand-in: checked, counted, and run by the kernel of the CPU."""

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_leaves

from standin import recording
from standin.clocks import HOST, POISON, Key, RaceError, clocks, current_stream, find_range
from standin.generators import default_generators, find_state
from standin.guard import current_index
from standin.memory import NAME, is_device, is_pinned, to_device, to_host

# Ops that themselves move tensors between devices.
_ANY_DEVICE = {"copy_", "_copy_from", "_copy_from_and_resize", "_to_copy", "set_", "_foreach_copy_"}
# Indices may be on the CPU: torch moves them to the indexed tensor's device, which waits.
_INDEXED = {"index", "index_put_", "_index_put_impl_", "index_put", "_unsafe_index"}
# A tensor of the CPU without dimensions is a number for them. Others are found by their tag.
_NUMBERS = {"where", "masked_fill_", "masked_fill", "index_fill_", "fill_", "lerp", "lerp_"}
_WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "equal", "bincount", "is_set_to",
}  # fmt: skip
# Kernels of the CPU that CUDA does not have: ops, formats, the message, and its source.
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_ABSENT: list[tuple[set[str], set[torch.dtype], str]] = [
    # https://github.com/pytorch/pytorch/issues/127176, and AmpKernels.cu for 8 bits
    ({_UNSCALE}, {torch.bfloat16} | _FLOAT8, f"{_UNSCALE}cuda"),
    # https://github.com/pytorch/pytorch/issues/44428, integers: cuBLAS has no such product
    ({"mm", "addmm", "addmv", "mv"}, _INTEGERS, "addmm_cuda"),
    # https://github.com/pytorch/pytorch/issues/11936
    ({"bmm", "baddbmm"}, _INTEGERS, "baddbmm_cuda"),
    # https://github.com/pytorch/pytorch/issues/158313 and intel/torch-xpu-ops issue 1939
    ({"add", "sub"}, _FLOAT8, "ufunc_add_CUDA"),
    ({"mul"}, _FLOAT8, "mul_cuda"),
    ({"div"}, _FLOAT8, "div_true_cuda"),
]
_CPU_KEYS = DispatchKeySet(DispatchKey.CPU)
# Views of the same memory: the CPU's kernels make them on any device.
_VIEWS = {
    "as_strided", "view", "_reshape_alias", "unfold", "alias", "detach", "_unsafe_view",
    "view_as_real", "view_as_complex", "_conj", "_neg_view",
}  # fmt: skip
_ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


class Op:
    """Facts on an op, from its schema: names of its arguments, of those it changes, of results."""

    def __init__(self, op: Any) -> None:
        arguments = op._schema.arguments
        self.name = op._schema.name.removeprefix("aten::")
        self.types = {a.name: str(a.type) for a in arguments}
        self.written = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
        self.outs = {a.name for a in arguments if a.is_out}
        self.is_pointwise = torch.Tag.pointwise in op.tags or self.name in _NUMBERS
        is_seeded = torch.Tag.nondeterministic_seeded in op.tags
        self.is_random = is_seeded or "generator" in self.types
        self.absent = [absent for absent in _ABSENT if self.name in absent[0]]


describe_op = functools.cache(Op)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [one for one in values if isinstance(one, torch.Tensor)]


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return an argument or a result with each of its tensors changed."""
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(change, one) for one in value])
    return change(value) if isinstance(value, torch.Tensor) else value


def find_device(op: Op, named: dict[str, Any]) -> torch.device | None:
    """Return the device of an op's tensors, None without any. Raises if they have several."""
    tensors = {name: tensors_in(value) for name, value in named.items()}
    places = [one.device for found in tensors.values() for one in found]
    if op.name in _ANY_DEVICE or len(set(places)) < 2:
        rows: list[Any] = []
    elif op.name.startswith("_foreach_"):  # tensors of two places need not share a device
        lists = [t for name, t in tensors.items() if t and t[0] is not named[name]]
        single = [t for name, t in tensors.items() if t and t[0] is named[name]]
        rows = [*zip(*lists, strict=False), *([*one, lists[0][0]] for one in single)]
    else:
        rows = [[one for name, found in tensors.items() for one in found
                 if is_device(one) or not _may_be_on_host(op, name, one)]]  # fmt: skip
    for row in rows:
        devices = sorted({str(tensor.device) for tensor in row})
        if len(devices) > 1:
            problem = f"found at least two devices, {devices[0]} and {devices[1]}! ({op.name})"
            raise RuntimeError(f"Expected all tensors to be on the same device, but {problem}")
    return next((place for place in places if place.type == NAME), None)


def _may_be_on_host(op: Op, name: str, tensor: torch.Tensor) -> bool:
    if op.name in _INDEXED and name == "indices":
        return True
    is_number = tensor.dim() == 0 and name not in op.written
    return is_number and (op.is_pointwise or (op.name in _INDEXED and name == "values"))


def refuse_absent(op: Op, named: dict[str, Any]) -> None:
    """Raise if CUDA has no kernel for an op and its formats."""
    for _, formats, kernel in op.absent:
        dtypes = {tensor.dtype for value in named.values() for tensor in tensors_in(value)}
        for dtype in dtypes & formats:
            title = str(dtype).removeprefix("torch.")
            raise NotImplementedError(f"\"{kernel}\" not implemented for '{title}'")


def count_kernels(op: Op, named: dict[str, Any]) -> int:
    """Return 1, or for lists that CUDA's kernels cannot process together, one for each tensor."""
    if not op.name.startswith("_foreach_"):
        return 1
    lists = [tensors_in(value) for value in named.values() if isinstance(value, (list, tuple))]
    lists = [tensors for tensors in lists if tensors]
    groups = lists if op.name == "_foreach_copy_" else [[t for one in lists for t in one]]
    has_kernel = all(
        len({(t.dtype, t.device) for t in group}) == 1 and is_device(group[0]) for group in groups
    )
    same = all(len({(t.shape, t.stride()) for t in row}) == 1 for row in zip(*lists, strict=False))
    return 1 if has_kernel and same else len(lists[0])


def does_wait(op: Op, named: dict[str, Any]) -> bool:
    """Return whether the host waits: for a number of elements, or as it moves an index."""
    if op.name == "repeat_interleave":
        return named.get("output_size") is None
    if op.name not in _INDEXED:
        return op.name in _WAITS
    indices = tensors_in(named["indices"])
    masks = [tensor for tensor in indices if tensor.dtype in (torch.bool, torch.uint8)]
    if "values" in named and named["values"].numel() == 1 and len(masks) == len(indices):
        masks = []  # becomes masked_fill_
    return bool(masks) or not all(map(is_device, indices))


def run_op(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one op. Kernels of the CPU compute on the same memory."""
    facts = describe_op(op)
    if facts.name in _VIEWS or (facts.name == "set_" and len(args) > 1):
        return op.redispatch(_CPU_KEYS, *args, **kwargs)
    if facts.name == "resize_":
        return _resize(*args[:2])
    named = dict(zip(facts.types, args, strict=False)) | kwargs
    device = find_device(facts, named)
    if facts.name in ("_copy_from", "_copy_from_and_resize"):
        return copy(named["dst"], named["self"], bool(named.get("non_blocking")))
    if isinstance(asked := named.get("device"), torch.device):
        device = asked if asked.type == NAME else None
    index = current_index() if device is None or device.index is None else device.index
    refuse_absent(facts, named)
    if facts.name not in _ALLOCATIONS:
        for _ in range(count_kernels(facts, named)):
            recording.note("ops", facts.name)
    waits = does_wait(facts, named)
    if waits:
        recording.note("waits", facts.name)
    first: list[Any] = []

    def wrap(leaf: torch.Tensor) -> torch.Tensor:
        if device is None or is_device(leaf):
            return leaf
        recording.note("allocations", "allocation")
        # An allocator keeps one pool a stream: work of a former owner is over, or in order.
        clocks.accesses.pop(leaf.untyped_storage().data_ptr(), None)
        return to_device(leaf, index)

    def work() -> Any:
        result = _compute(op, facts, named, index)
        if not first:
            result = map_tensors(wrap, result)
            first.extend(tree_leaves(result))
        for made, again in zip(first, tree_leaves(result), strict=True):
            if isinstance(again, torch.Tensor) and made is not again:
                to_host(made).copy_(again)  # a replay computes into the memory of the capture
        return result

    pairs = [(name, tensor) for name, value in named.items() for tensor in tensors_in(value)]
    written = [tensor for name, tensor in pairs if name in facts.written and is_device(tensor)]
    read = [tensor for name, tensor in pairs if name not in facts.outs and is_device(tensor)]
    result = _launch(index, read, written, work)
    if written and facts.name.startswith("_foreach_"):
        torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])
    if waits:
        clocks.wait(HOST, current_stream(index).view)
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


def _compute(op: Any, facts: Op, named: dict[str, Any], index: int) -> Any:
    """Run the kernel of the CPU. Arguments among its results are those that were given."""
    given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def unwrap(name: str, leaf: torch.Tensor) -> torch.Tensor:
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
        return map_tensors(functools.partial(unwrap, name), value)

    arguments = {name: convert(name, value) for name, value in named.items()}
    result = _draw(op, arguments, index) if facts.is_random else op(**arguments)
    for leaf, host in given.values():
        if leaf.shape != host.shape:
            to_host(_resize(leaf, host.shape)).copy_(host)
    return map_tensors(lambda leaf: given.get(id(leaf), (leaf,))[0], result)


def _draw(op: Any, arguments: dict[str, Any], index: int) -> Any:
    """Run a kernel that draws from the generator of the call or from that of the device."""
    state = find_state(arguments.get("generator") or default_generators[index])
    if "generator" in arguments:
        arguments["generator"] = None
    if state is None:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
    for capture in recording.captures:
        capture.draw_from(state)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state.get_state())
        result = op(**arguments)
        state.set_state(torch.get_rng_state())
    return result


def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    """Copy between memories or on the device, with the waits of CUDA."""
    comes, stays = is_device(target), is_device(source) and is_device(target)
    is_free = stays or (non_blocking and (comes or is_pinned(target)))
    if stays:
        recording.note("ops", "copy")
    elif not is_free:
        recording.note("waits", f"copy to {target.device}, {tuple(source.shape)} {source.dtype}")
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
        clocks.wait(HOST, stream.view)
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
    fresh = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    number = min(fresh.numel(), tensor.numel())
    fresh.flatten()[:number].copy_(tensor.flatten()[:number])
    return tensor.set_(fresh.untyped_storage(), 0, tuple(size))  # type: ignore[call-overload, no-any-return]


def _attend(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, **settings: Any,
) -> Any:  # fmt: skip
    """Choose the kernel of attention that the CPU would, for equal numbers."""
    hosts = [one if one is None else to_host(one.detach()).requires_grad_(one.requires_grad)
             for one in (query, key, value, attn_mask)]  # fmt: skip
    choice = torch.ops.aten._fused_sdp_choice(*hosts, dropout_p, is_causal, **settings)
    if choice != SDPBackend.FLASH_ATTENTION.value:
        attend = torch.ops.aten._scaled_dot_product_attention_math
        return attend(query, key, value, attn_mask, dropout_p, is_causal, None, **settings)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the kernel adds its mask
        attn_mask = query.new_zeros(attn_mask.shape).masked_fill_(~attn_mask, -math.inf)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    masked = {"attn_mask": attn_mask, "scale": settings.get("scale")}
    return attend(query, key, value, dropout_p, is_causal, **masked)[0]


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
    is_several = any(has(name, f"Composite{kind}Autograd") for kind in ("Explicit", "Implicit"))
    return name in ("aten::cat", "aten::stack") or (has(name, "CPU") and is_several)
