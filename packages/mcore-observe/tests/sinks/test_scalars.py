import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from mcore.observe.loss_totals import add_step
from mcore.observe.sinks.scalars import (
    Scalar,
    Scalars,
    as_number,
    one_number,
    only_numbers,
    plain_numbers,
    read_scalars,
)
from rank_testing import run_ranks


@pytest.mark.usefixtures("on_each_device")
def test_names_that_repeat_open_a_further_batch():
    scalars = Scalars()
    scalars.add("a", 1.0, versus_samples=True)
    scalars.add("none", None)
    scalars.add_all({"b": torch.tensor(2.0)}, prefix="memory/")
    scalars.add_scalar("a", 3.0, 7)
    scalars.add("c", 4)
    batches, others = scalars.read({"a": torch.tensor(5), ("b", 1): None})
    assert batches == [
        {"a": Scalar(1.0, versus_samples=True), "memory/b": Scalar(2.0)},
        {"a": Scalar(3.0), "c": Scalar(4)},
    ]
    assert others == {"a": 5, ("b", 1): None}


@pytest.mark.usefixtures("on_each_device")
def test_numbers_and_tensors_of_every_type_keep_their_values():
    values = {
        "float": 0.1,
        "int": 2**60,
        "flag": True,
        "double": torch.tensor([[0.1]], dtype=torch.float64),
        "half": torch.tensor(2.5, dtype=torch.bfloat16),
        "count": torch.tensor(2**40),
        "grad": torch.nn.Parameter(torch.tensor(1.5)),
    }
    read = read_scalars(values)
    assert read == values | {"double": 0.1, "half": 2.5, "count": 2**40, "grad": 1.5}
    assert list(read) == list(values)
    assert {type(read[name]) for name in ("int", "flag", "count")} == {int}


@pytest.mark.usefixtures("on_each_device")
def test_not_finite_values_stay_as_they_are():
    read = read_scalars({"nan": torch.tensor(math.nan), "inf": torch.tensor(-math.inf)})
    assert math.isnan(read["nan"])
    assert read["inf"] == -math.inf


def test_one_transfer_for_all_tensors(monkeypatch):
    transfers = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (transfers.append(1), tolist(t))[1])
    read_scalars({i: torch.tensor(float(i)) for i in range(12)})
    assert len(transfers) == 1
    read_scalars({"number": 1.0})
    assert len(transfers) == 1


def test_an_error_names_the_value_that_is_no_number():
    with pytest.raises(TypeError, match="'lr' is '1e-4' \\(str\\)"):
        read_scalars({"lr": "1e-4"})


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(1.0, device="meta"),
        torch.tensor([1.0]).to_sparse(),
        torch.tensor([1 + 1j]),
        torch.ones(2),
        10**400,  # no float holds it
        "1.0",
    ],
)
def test_unreadable_values_are_dropped(value):
    assert one_number("x", value) is None
    assert plain_numbers({"x": value, "y": 1.0}) == {"y": 1.0}


def test_any_name_becomes_a_text_that_every_file_takes():
    scalars = Scalars()
    scalars.add(7, 1.0)
    given = {("a", 1): 1.0, "\ud800b": 2.0, "unit \u00b5": 3.0, 7: 4.0}
    names = ["('a', 1)", "?b", "unit \u00b5", "7"]
    assert plain_numbers(given) == dict(zip(names, (1.0, 2.0, 3.0, 4.0), strict=True))
    assert list(scalars.batches[0]) == ["7"]


@pytest.mark.usefixtures("on_each_device")
def test_losses_of_eight_bits_are_added():
    totals = {}
    for _ in range(2):
        add_step(totals, {"loss": torch.tensor(1.5).to(torch.float8_e4m3fn)}, False)
    assert totals["loss"].tolist() == [3.0]


def test_numpy_numbers():
    numpy = pytest.importorskip("numpy")
    assert as_number(numpy.float32(0.5)) == 0.5
    assert type(as_number(numpy.int64(3))) is int
    assert as_number(numpy.bool_(True)) is None
    assert read_scalars({"a": numpy.float64(0.25)}) == {"a": 0.25}
    arrays = {"none": numpy.array(2.5), "one": numpy.array([3]), "flag": numpy.bool_(True)}
    assert plain_numbers(arrays) == {"none": 2.5, "one": 3, "flag": 1}
    assert one_number("two", numpy.ones(2)) is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_device_are_read_with_one_wait():
    """Twelve scalars on the device take one synchronizing copy."""
    values = {i: torch.tensor(float(i), device="cuda") for i in range(12)}
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            read_scalars(values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read_scalars(values) == {i: float(i) for i in range(12)}


def read_losses_of_a_mesh() -> tuple[float, bool]:
    mesh = init_device_mesh("cpu", (2,))
    whole, partial = (
        DTensor.from_local(torch.tensor(2.5), mesh, [placement])
        for placement in (Replicate(), Partial())
    )
    totals = {}
    for _ in range(2):
        add_step(totals, only_numbers({"whole": whole, "partial": partial}), skipped=False)
    return float(totals["whole"]), "partial" in totals


def test_a_dtensor_is_a_loss_only_if_each_rank_has_it_whole():
    # A sum over the ranks would need a collective, which not all ranks may reach.
    assert run_ranks(read_losses_of_a_mesh, 2) == [(5.0, False)] * 2
