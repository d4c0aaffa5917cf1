"""Hashes of parameters: compared with SHA-1 of the parameters' own storage."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import warnings
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

from mcore.parallel.param_hashing import hash_params, named_params
from mcore.parallel.replicas import param_hashes

EMPTY = "da39a3ee5e6b4b0d3255bfef95601890afd80709"
ONES_FLOAT32 = "df87141c4e5d8879ae12632dd0e1eee69aa1d093"
ONES_BFLOAT16 = "8020f4cad1996d3079938cbebd533325b223e614"
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def module_of(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


def memory(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def sha1(tensor: torch.Tensor) -> str:
    return hashlib.sha1(memory(tensor.clone(memory_format=torch.contiguous_format))).hexdigest()


def hash_of(tensor: torch.Tensor, **kwargs: Any) -> str:
    return param_hashes(module_of(w=tensor), **kwargs)["w"]


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("bit_exact", [True, False])
def test_known_values(bit_exact: bool) -> None:
    assert hash_of(torch.ones(4), bit_exact=bit_exact) == ONES_FLOAT32
    assert hash_of(torch.empty(0), bit_exact=bit_exact) == EMPTY
    assert hash_of(torch.empty(3, 0, 2, dtype=torch.bfloat16), bit_exact=bit_exact) == EMPTY
    half = ONES_BFLOAT16 if bit_exact else ONES_FLOAT32
    assert hash_of(torch.ones(4, dtype=torch.bfloat16), bit_exact=bit_exact) == half


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("bit_exact", [True, False])
def test_a_torch_without_numpy_is_enough(monkeypatch, bit_exact: bool) -> None:
    def unavailable(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Numpy is not available")  # what torch says where there is none

    monkeypatch.setattr(torch.Tensor, "numpy", unavailable)
    assert hash_of(torch.ones(4), bit_exact=bit_exact) == ONES_FLOAT32


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_hashed_as_it_is_stored(dtype: torch.dtype) -> None:
    tensor = (torch.randn(7, 5) * 10).to(dtype)
    assert hash_of(tensor) == sha1(tensor)
    if not dtype.is_complex:
        assert hash_of(tensor, bit_exact=False) == sha1(tensor.float())


@pytest.mark.usefixtures("on_each_device")
def test_what_float32_cannot_tell_apart_differs_only_bit_by_bit() -> None:
    pairs = [
        (torch.tensor([1.0], dtype=torch.float64), torch.tensor([1 + 1e-12], dtype=torch.float64)),
        (torch.tensor([2**24]), torch.tensor([2**24 + 1])),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j])),
    ]
    for first, second in pairs:
        assert hash_of(first) != hash_of(second)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert hash_of(first, bit_exact=False) == hash_of(second, bit_exact=False)
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0]))
    assert hash_of(torch.tensor([float("nan")])) == hash_of(torch.tensor([float("nan")]))


@pytest.mark.usefixtures("on_each_device")
def test_a_large_tensor_is_converted_piece_by_piece_without_a_gap() -> None:
    tensor = torch.randn(2**19 + 3, dtype=torch.float64)
    assert hash_of(tensor, bit_exact=False) == sha1(tensor.float())


@pytest.mark.usefixtures("on_each_device")
def test_views_and_scalars() -> None:
    tensor = torch.arange(24.0).reshape(2, 3, 4)
    assert hash_of(tensor.permute(2, 0, 1)) == sha1(tensor.permute(2, 0, 1))
    assert hash_of(tensor[:, 1]) == sha1(tensor[:, 1])
    assert hash_of(torch.tensor(3.0)) == sha1(torch.tensor([3.0]))


@pytest.mark.usefixtures("on_each_device")
def test_names_of_one_chunk_and_of_several() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2, bias=False)]
    assert list(param_hashes(layers[0])) == list(param_hashes(layers[:1])) == ["weight", "bias"]
    found = param_hashes(layers)
    assert found == {
        "chunk0.weight": sha1(layers[0].weight),
        "chunk0.bias": sha1(layers[0].bias),
        "chunk1.weight": sha1(layers[1].weight),
    }
    assert param_hashes(nn.ModuleList(layers))["1.weight"] == found["chunk1.weight"]
    assert param_hashes([]) == param_hashes(nn.Identity()) == {}


@pytest.mark.usefixtures("on_each_device")
def test_tied_parameters_are_listed_once_in_a_chunk_and_read_once_over_chunks(monkeypatch) -> None:
    first = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    first[1].weight = first[0].weight
    last = nn.Linear(4, 4, bias=False)
    last.weight = first[0].weight
    reads = []
    digest = hashlib.sha1
    monkeypatch.setattr(hashlib, "sha1", lambda *args, **kw: reads.append(1) or digest(*args, **kw))
    found = param_hashes([first, last])
    monkeypatch.undo()
    assert found == {"chunk0.0.weight": sha1(last.weight), "chunk1.weight": sha1(last.weight)}
    assert len(reads) == 1


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("num_threads", [None, 1, 2, 5])
def test_any_number_of_threads_gives_the_same_hashes(num_threads: int | None) -> None:
    module = module_of(**{f"w{i}": torch.randn(2**16 * (i % 5), 3) for i in range(12)})
    before = set(threading.enumerate())
    found = param_hashes(module, num_threads=num_threads)
    assert found == {name: sha1(param) for name, param in module.named_parameters()}
    assert set(threading.enumerate()) <= before  # one of an earlier test may end meanwhile


@pytest.mark.usefixtures("on_each_device")
def test_several_threads_work_at_the_same_time() -> None:
    module = module_of(**{f"w{i}": torch.zeros(2**20) for i in range(2)})
    both_hash = threading.Barrier(2, timeout=300)
    digest = hashlib.sha1

    def meet(*args: Any, **kwargs: Any) -> Any:
        both_hash.wait()  # breaks unless a second thread comes while this one waits
        return digest(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashlib, "sha1", meet)
        assert len(param_hashes(module, num_threads=2)) == 2


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch) -> None:
    module = module_of(**{f"w{i}": torch.zeros(2**20) for i in range(4)})

    def fail(**kwargs: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(hashlib, "sha1", fail)
    with pytest.raises(MemoryError, match="no room"):
        param_hashes(module, num_threads=2)


class Quantised(torch.Tensor):
    """Integers and a scale that stand for a float tensor."""

    values: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Quantised:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)
        made.values, made.scale = values, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        raise NotImplementedError(str(func))


class Opaque(torch.Tensor):
    """A wrapper that hides what is inside."""

    @staticmethod
    def __new__(cls) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.detach.default:
            return cls()
        raise NotImplementedError(str(func))


class Marked(torch.Tensor):
    """An ordinary tensor under another name."""


@pytest.mark.usefixtures("on_each_device")
def test_a_wrapper_is_the_tensors_inside_it() -> None:
    values, scale = torch.arange(4, dtype=torch.int8), torch.tensor([0.5])
    expected = hashlib.sha1(memory(values) + memory(scale))
    assert hash_of(Quantised(values, scale)) == expected.hexdigest()
    assert hash_of(Quantised(values, 2 * scale)) != expected.hexdigest()
    nested = Quantised(Quantised(values, scale), torch.zeros(0))
    assert hash_of(nested) == expected.hexdigest()


@pytest.mark.usefixtures("on_each_device")
def test_a_subclass_with_ordinary_storage_is_an_ordinary_tensor() -> None:
    assert hash_of(torch.ones(4).as_subclass(Marked)) == ONES_FLOAT32


def unreadable(reason: str) -> torch.Tensor:
    if reason == "meta device":
        return torch.empty(2, device="meta")
    if reason == "__tensor_flatten__":
        return Opaque()
    if reason == "layout torch.sparse_coo":
        return torch.eye(2).to_sparse()
    return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize(
    "reason",
    ["meta device", "__tensor_flatten__", "layout torch.sparse_coo", "dtype torch.quint8"],
)
def test_what_has_no_bytes_to_read_is_named(reason: str) -> None:
    module = module_of(good=torch.ones(2), bad=unreadable(reason))
    with pytest.raises(ValueError, match=rf"'bad' of model chunk 0 cannot be hashed.*{reason}"):
        param_hashes(module)


@pytest.mark.usefixtures("on_each_device")
def test_uninitialised_parameters_are_named() -> None:
    with pytest.raises(ValueError, match=r"'weight' of model chunk 1 .*not initialised"):
        param_hashes([nn.Linear(1, 1), nn.LazyLinear(2)])


@pytest.mark.parametrize("model", [None, torch.ones(2), "model", [nn.Linear(1, 1), None], {1: 2}])
def test_what_is_no_model_is_a_type_error(model: Any) -> None:
    with pytest.raises(TypeError, match="must be a module"):
        param_hashes(model)


@pytest.mark.usefixtures("on_each_device")
def test_no_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="num_threads is 0"):
        param_hashes(nn.Linear(1, 1), num_threads=0)


@pytest.mark.usefixtures("on_each_device")
def test_grad_mode_and_inference_mode_do_not_matter() -> None:
    with torch.inference_mode():
        module = nn.Linear(600, 600)
    [weight, bias] = hash_params(named_params(module), hashlib.sha1, num_threads=2, bit_exact=False)
    assert weight.hex() == sha1(module.weight.detach())
    assert bias.hex() == sha1(module.bias.detach())


@pytest.mark.usefixtures("on_each_device")
def test_no_bit_and_no_place_is_lost_in_the_digest_that_replicas_compare() -> None:
    values = torch.arange(1.0, 65.0)
    bits = values.view(torch.int32)
    each_bit = torch.tensor([1 << bit for bit in range(31)] + [-(2**31)], dtype=torch.int32)
    flips = torch.eye(len(bits), dtype=torch.int32)[:, None] * each_bit[:, None]
    flipped = (flips.flatten(0, 1) ^ bits).view(torch.float32)
    others = [*flipped, *(values[torch.randperm(len(values))] for _ in range(100))]
    assert len(others) == 32 * len(bits) + 100
    module = module_of(**{f"w{i}": value for i, value in enumerate([values, values, *others])})
    found = hash_params(named_params(module), xxhash.xxh3_128, num_threads=1, bit_exact=True)
    assert found[0] == found[1] == xxhash.xxh3_128(memory(values)).digest()
    assert len(set(found)) == 1 + len(others)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="checks parameters on a CUDA device")
def test_a_model_on_a_cuda_device_has_the_hashes_of_its_copy_on_the_cpu() -> None:
    module = module_of(**{f"w{i}": torch.randn(2**18 * (i % 4), 3) for i in range(9)})
    expected = [param_hashes(module, bit_exact=bit_exact) for bit_exact in (True, False)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # values that are not there yet when the hashing starts
        torch.cuda._sleep(50_000_000)
        module.cuda()
        for param in module.parameters():
            param.add_(0.0)
    found = [
        param_hashes(module, bit_exact=bit_exact, num_threads=3) for bit_exact in (True, False)
    ]
    assert found == expected
