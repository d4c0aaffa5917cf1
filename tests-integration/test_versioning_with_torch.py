"""Tests together with the real torch: its version, its modules, its process groups."""

import contextvars
import copy
import importlib.metadata
import io
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.utils.checkpoint import checkpoint

from mcore.versioning import (
    ExperimentalNotEnabledError,
    check_mamba_sequence_packing_support,
    config,
    deprecated,
    experimental_cls,
    experimental_enabled,
    experimental_fn,
    get_causal_conv1d_version,
    get_fa_version,
    get_mamba_version,
    get_package_version,
    get_te_version,
    get_torch_version,
    is_causal_conv1d_min_version,
    is_experimental_enabled,
    is_fa_min_version,
    is_mamba_min_version,
    is_package_min_version,
    is_te_min_version,
    is_torch_min_version,
    set_experimental_flag,
)
from mcore.versioning.process_rank import process_rank
from rank_testing import run_ranks


@experimental_cls("0.1.0")
class Doubling(torch.nn.Module):
    """A layer with one parameter."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x * self.weight


def test_version_is_that_of_torch() -> None:
    assert get_torch_version() == Version(str(torch.__version__))
    assert is_torch_min_version(str(torch.__version__)) is True
    assert is_torch_min_version(Version(str(torch.__version__)).public, False) is False
    assert is_torch_min_version("1.0") is is_torch_min_version("1.0") is True
    assert is_torch_min_version("1000") is False


def test_version_is_the_same_before_torch_is_loaded() -> None:
    """But for the local label: the metadata of CUDA wheels on PyPI lacks it."""
    code = (
        "import sys, mcore.versioning as v; print(v.get_torch_version());"
        "assert 'torch' not in sys.modules"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert Version(finished.stdout) == Version(importlib.metadata.version("torch"))
    assert Version(finished.stdout).public == Version(str(torch.__version__)).public


def test_patched_torch_version_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = str(torch.__version__)
    assert is_torch_min_version(now) is True
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.9.0a0+50eac811a6.nv25.09")
        assert is_torch_min_version(now) is False
        assert is_torch_min_version("2.9.0") is False
        assert is_torch_min_version("2.9.0", release_only=True) is True
    assert is_torch_min_version(now) is True
    assert get_torch_version() == Version(now)


def test_gated_module_is_an_ordinary_module() -> None:
    with pytest.raises(ExperimentalNotEnabledError):
        Doubling(2)
    with experimental_enabled():
        layer = Doubling(2)
        stack = torch.nn.Sequential(layer, Doubling(2))
    x = torch.tensor([1.0, 3.0])
    assert torch.equal(stack(x), 4 * x)
    assert list(stack.state_dict()) == ["0.weight", "1.weight"]
    stack(x).sum().backward()
    assert torch.equal(layer.weight.grad, 4 * x)
    again = copy.deepcopy(layer)
    assert type(again) is Doubling
    assert again.weight is not layer.weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        for other in (torch.fx.symbolic_trace(layer), torch.jit.script(layer)):
            assert torch.equal(other(x), layer(x))


def test_schema_of_a_gated_model_is_described_at_any_time() -> None:
    import pydantic  # with mlflow, which needs it

    @experimental_cls("0.1.0")
    class Settings(pydantic.BaseModel):
        width: int = 8

        @pydantic.computed_field
        def area(self) -> int:
            return self.width**2

    with pytest.raises(ExperimentalNotEnabledError):
        Settings()
    with experimental_enabled():
        settings = Settings(width=3)
    assert settings.model_copy(update={"width": 4}).model_dump() == {"width": 4, "area": 16}
    schema = Settings.model_json_schema(mode="serialization")
    assert list(schema["properties"]) == ["width", "area"]


def test_gated_module_is_saved_and_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules.get(__name__) or sys.modules[Doubling.__module__]
    monkeypatch.setitem(sys.modules, __name__, module)
    with experimental_enabled():
        layer = Doubling(2)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert type(again) is Doubling
    assert torch.equal(again.weight, layer.weight)


@experimental_cls("0.1.0")
class Tripling(torch.autograd.Function):
    """A function whose backward pass reads the class by its name."""

    factor = 3.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return Tripling.factor * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return Tripling.factor * grad


@experimental_cls("0.1.0")
class Cubing(torch.autograd.Function):
    """A function that torch.func can transform."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def test_backward_pass_runs_after_the_gate_was_closed() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with experimental_enabled():
        total = Tripling.apply(x).sum() + Cubing.apply(x).sum()
        _, pull_back = torch.func.vjp(Cubing.apply, x.detach())
    total.backward()
    assert torch.equal(x.grad, torch.tensor([3 + 3.0, 3 + 12.0]))
    assert torch.equal(pull_back(torch.ones(2))[0], torch.tensor([3.0, 12.0]))
    for function in (Tripling, Cubing):
        with pytest.raises(ExperimentalNotEnabledError):
            function.apply(x)


def test_deprecated_module_warns_once_and_works() -> None:
    @deprecated("1.0.0", alternative="torch.nn.Linear")
    class OldLinear(torch.nn.Linear): ...

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = OldLinear(2, 3, bias=False)
        copy.deepcopy(layer)
    messages = [str(w.message) for w in caught if w.category is DeprecationWarning]
    assert len(messages) == 1
    assert "Use torch.nn.Linear instead." in messages[0]
    assert layer(torch.ones(4, 2)).shape == (4, 3)


# torch.compile. Each function below is compiled into one graph.


@experimental_fn("0.1.0")
def doubled(x: torch.Tensor) -> torch.Tensor:
    """A gated function."""
    return 2 * x


@experimental_cls("0.1.0")
class Scale:
    """A gated class that methods reach in all ways."""

    factor = 3

    def __init__(self, power: int) -> None:
        self.power = power

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.power * type(self).factor * Scale.factor * self.factor_of_class()

    @classmethod
    def factor_of_class(cls) -> int:
        return cls.factor


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="eager", fullgraph=True)


def _graphs(function: Callable[..., Any], calls: int) -> int:
    """The number of graphs that some calls of a function make."""
    from torch._dynamo.testing import CompileCounter  # here: it takes long to import

    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for _ in range(calls):
        compiled(torch.ones(2))
    return int(counter.frame_count)


# What may be asked for in compiled code; torch 2.11 makes no constant of other objects than texts.
ONE = Version("1.0") if is_torch_min_version("2.12") else "1.0"
ABSENT = ("transformer_engine", "flash_attn", "mamba_ssm", "causal_conv1d", "no_such_module")


def _ask_everything(x: torch.Tensor) -> tuple[Any, ...]:
    checks = (
        is_torch_min_version("2.0"),
        is_te_min_version("2.0"),
        is_te_min_version(vers="2.0", release_only=True),
        is_fa_min_version("2.0"),
        is_mamba_min_version("2.0", False),
        is_causal_conv1d_min_version(ONE),
        is_package_min_version("packaging", "20.0"),
        is_package_min_version("no_such_module", "0.0"),
    )
    versions = (str(get_torch_version()), get_te_version().major, str(get_te_version()))
    others = (get_package_version("packaging").release, get_package_version("no_such_module"))
    missing = []
    for get in (get_fa_version, get_mamba_version, get_causal_conv1d_version):
        try:
            missing.append(str(get()))
        except ImportError:
            missing.append("absent")
    packing = (
        check_mamba_sequence_packing_support(),
        check_mamba_sequence_packing_support(for_inference_not_training=False),
    )
    return x + checks[0], checks, versions, others, missing, packing


def test_version_questions_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ABSENT:
        monkeypatch.setitem(sys.modules, module, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = _compiled(_ask_everything)(torch.ones(2))
    plain = _ask_everything(torch.ones(2))
    assert torch.equal(compiled[0], plain[0])
    assert compiled[1:] == plain[1:]
    assert plain[1] == (True, False, False, False, False, False, True, False)
    assert plain[4] == ["absent"] * 3


def test_flag_compiles_and_is_never_stale() -> None:
    def look(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if is_experimental_enabled() else x

    compiled = _compiled(look)
    x = torch.zeros(1)
    answers = []
    for flag in (False, True, False):
        set_experimental_flag(flag)
        answers.append(compiled(x).item())
        for block in (True, False):
            with experimental_enabled(block):
                answers.append(compiled(x).item())
                answers.append(contextvars.Context().run(compiled, x).item())
    set_experimental_flag(False)
    assert answers == [0, 1, 0, 0, 0, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0]


def test_gated_function_compiles_and_stays_gated(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mcore.versioning")

    @experimental_fn("0.1.0")
    def fresh(x: torch.Tensor) -> torch.Tensor:
        return doubled(x) + 1

    def use(x: torch.Tensor) -> torch.Tensor:
        return fresh(x)

    def use_in_pieces(x: torch.Tensor) -> torch.Tensor:
        return fresh(x)

    compiled, breaking = _compiled(use), torch.compile(use_in_pieces, backend="eager")
    x = torch.ones(2)
    for _ in range(2):
        with pytest.raises(ExperimentalNotEnabledError):
            breaking(x)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="refuse"):
            compiled(x)
        with experimental_enabled():
            assert torch.equal(compiled(x), 2 * x + 1)
            assert torch.equal(breaking(x), 2 * x + 1)
    assert len([r for r in caplog.records if "fresh" in r.getMessage()]) == 1
    with experimental_enabled():
        assert _graphs(use, 4) == 1


@pytest.mark.parametrize("after_a_block", [False, True])
def test_the_first_use_with_the_flag_may_be_compiled(
    after_a_block: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="mcore.versioning")
    monkeypatch.setattr(config, "_may_be_overridden", after_a_block)
    monkeypatch.setattr(config, "ENABLE_EXPERIMENTAL", True)

    @experimental_fn("0.1.0")
    def fresh(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    compiled, x = _compiled(lambda x: fresh(x)), torch.ones(2)
    for function in (compiled, compiled, fresh, compiled):
        assert torch.equal(function(x), 2 * x)
    assert len([r for r in caplog.records if "fresh" in r.getMessage()]) == 1
    config.ENABLE_EXPERIMENTAL = False
    for refused in (compiled, fresh):
        with pytest.raises((ExperimentalNotEnabledError, torch._dynamo.exc.Unsupported)):
            refused(x)


@experimental_fn("0.1.0")
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


class GatedLayer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sine(x) + Shifted.of(x)


@experimental_cls("0.1.0")
class Shifted:
    @staticmethod
    def of(x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_may_run_what_the_forward_ran(reentrant: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    with experimental_enabled():
        y = checkpoint(GatedLayer(), x, use_reentrant=reentrant)
    y.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, x.detach().cos() + 1)
    with pytest.raises(ExperimentalNotEnabledError):
        sine(x)


@experimental_fn("0.1.0")
def never_ran() -> None: ...


def test_a_backward_pass_does_not_open_the_gate_of_what_never_ran() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    y.register_hook(lambda grad: never_ran())
    with pytest.raises(ExperimentalNotEnabledError, match="never_ran"):
        y.sum().backward()


def test_gated_class_compiles() -> None:
    def use(x: torch.Tensor) -> torch.Tensor:
        return Scale(2).apply(x) + Scale.factor

    x = torch.ones(2)
    with experimental_enabled():
        live = Scale(2)
        assert torch.equal(_compiled(use)(x), 54 * x + 3)
        assert _graphs(use, 3) == 1
    assert torch.equal(_compiled(live.apply)(x), 54 * x)
    assert _graphs(live.apply, 3) == 1


def _rank_and_records() -> tuple[int, int, list[str]]:
    """What one rank of a process group finds, with an environment that says something else."""
    os.environ["RANK"] = "7"
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mcore.versioning")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    set_experimental_flag(True)

    @experimental_fn("0.1.0", current_version="0.9.0")
    def compute() -> int:
        return 5

    return process_rank(), compute(), records


def test_rank_of_the_process_group_decides_who_logs() -> None:
    results: list[Any] = run_ranks(_rank_and_records, 2, timeout_s=600)
    assert [(rank, value) for rank, value, _ in results] == [(0, 5), (1, 5)]
    first, second = (records for _, _, records in results)
    assert len(first) == 2
    assert "has reached end of life" in first[0]
    assert first[1].startswith("ENABLE_EXPERIMENTAL is True, running experimental code.")
    assert second == []
