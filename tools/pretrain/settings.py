"""What can be set for a run: one dataclass that is also the command line and ``config.json``."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from pretrain.setting_checks import check
from pretrain.usage import UsageError

DEFAULT_RANKS = 2


def _option(
    default: Any,
    help_text: str,
    *,
    fixed: bool = False,
    kept: bool = True,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A field of the settings.

    When a run is resumed, ``fixed`` ones may not change, and those not ``kept`` are at their
    defaults again.
    """
    metadata = {"help": help_text, "fixed": fixed, "kept": kept, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Every setting of a run, after defaults and layout are resolved."""

    tp: int = _option(1, "tensor-parallel size: ranks that share each weight matrix")
    cp: int = _option(1, "context-parallel size: ranks that share each sequence")
    dp: int = _option(DEFAULT_RANKS, "data-parallel size: ranks that share the global batch")
    fsdp: bool = _option(False, "cut parameters and optimizer over the dp x cp ranks")
    hsdp_outer: int = _option(1, "with --fsdp: copies of the shards over parts of dp")
    sequence_parallel: bool = _option(
        False, "with --tp: cut what lies between the split matrices along the sequence"
    )
    cuda_graph: Literal["none", "local"] = _option(
        "none",
        "local: run each layer from a captured graph; on a CPU eagerly under the rules of graphs",
        choices=("none", "local"),
    )

    num_layers: int = _option(4, "transformer layers", fixed=True)
    hidden_size: int = _option(128, "width of the hidden states", fixed=True)
    num_attention_heads: int = _option(4, "attention heads", fixed=True)
    seq_length: int = _option(128, "bytes per sequence", fixed=True)
    untied: bool = _option(False, "give the output head a weight of its own", fixed=True)
    bf16: bool = _option(False, "run the model in bfloat16 with fp32 main weights", fixed=True)
    dropout: float = _option(0.0, "dropout on attention weights and residuals", fixed=True)
    value_head: bool = _option(
        False, "learn the column of each byte in its line instead of the next byte", fixed=True
    )

    train_iters: int = _option(200, "optimizer steps in all")
    global_batch_size: int = _option(16, "sequences per optimizer step", fixed=True)
    micro_batch_size: int = _option(0, "sequences per rank and forward pass; 0: all at once")
    lr: float = _option(3e-3, "peak learning rate", fixed=True)
    min_lr: float = _option(3e-4, "learning rate at the end", fixed=True)
    warmup_iters: int = _option(20, "steps of linear warm-up", fixed=True)
    weight_decay: float = _option(0.1, "AdamW weight decay of the matrices", fixed=True)
    clip_grad: float = _option(1.0, "global gradient norm limit; 0: no clipping", fixed=True)
    seed: int = _option(1234, "seed of weights, batches and dropout", fixed=True)

    log_interval: int = _option(10, "steps between console lines")
    eval_interval: int = _option(50, "steps between validation losses; 0: only at the end")
    eval_batches: int = _option(8, "validation batches of the global batch size")
    save_interval: int = _option(100, "steps between checkpoints; 0: only at the end")
    keep_last: int = _option(0, "newest checkpoints to keep; 0: all of them")
    async_save: bool = _option(False, "go on training while a checkpoint is written")
    check_replicas_interval: int = _option(
        0, "steps between comparisons of the copies over dp x cp, bit by bit; 0: none"
    )
    exit_after: int = _option(0, "stop with a checkpoint after this many steps; 0: no")
    timeout_s: float = _option(300.0, "seconds after which a stuck collective ends the run")

    tensorboard: bool = _option(True, "write TensorBoard events")
    mlflow: bool = _option(True, "log to MLflow, in the background")
    straggler: bool = _option(True, "compare the ranks' times and name those that are slow")
    straggler_port: int = _option(
        0, "port on rank 0 that answers on slow ranks; 0: a free one", kept=False
    )
    slow_rank: str = _option(
        "", "RANK:FACTOR has that rank take FACTOR times as long for a forward", kept=False
    )
    nvtx: bool = _option(False, "name the parts of a step for profilers", kept=False)

    @property
    def world_size(self) -> int:
        """Ranks that this layout needs."""
        return self.tp * self.cp * self.dp

    @property
    def layout(self) -> str:
        """The layout in short, such as ``tp2-cp1-dp1``."""
        return f"tp{self.tp}-cp{self.cp}-dp{self.dp}"

    @property
    def run_kind(self) -> str:
        """What names run folders: the layout, and the objective where it is not the usual one."""
        return self.layout + ("-value-head" if self.value_head else "")

    @property
    def rows_per_forward(self) -> int:
        """Sequences of one rank's forward pass."""
        return self.micro_batch_size or self.global_batch_size // self.dp

    @property
    def num_microbatches(self) -> int:
        """Forward passes of one rank per optimizer step."""
        return self.global_batch_size // (self.dp * self.rows_per_forward)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One start of the job: the settings and where it reads and writes."""

    settings: Settings
    run_dir: Path | None
    resume: Path | None
    runs_dir: Path
    mlflow_uri: str | None = dataclasses.field(default=None, repr=False)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other refusal."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; options that were not given are absent from the result."""
    parser = _Parser(
        prog="pretrain",
        description="Train a small byte-level GPT on the text of Python's standard library.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=int, help="ranks to start here (default: tp * cp * dp)")
    parser.add_argument("--runs-dir", type=Path, help="folder of all runs (default: runs)")
    parser.add_argument("--run-dir", type=Path, help="folder of this run (default: a new one)")
    parser.add_argument("--resume", type=Path, metavar="RUN_DIR", help="continue this run")
    parser.add_argument(
        "--mlflow-uri",
        metavar="URI",
        help="MLflow server or database (default: MLFLOW_TRACKING_URI, else a file in the run "
        "folder)",
    )
    for field in dataclasses.fields(Settings):
        _add_option(parser, field)
    return parser.parse_args(argv)


def _add_option(parser: argparse.ArgumentParser, field: dataclasses.Field[Any]) -> None:
    flag = "--" + field.name.replace("_", "-")
    text = f"{field.metadata['help']} (default: {field.default})"
    if isinstance(field.default, bool):
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    else:
        choices = field.metadata["choices"]
        parser.add_argument(flag, type=type(field.default), choices=choices, help=text)


def resolve(given: argparse.Namespace, world_size: int | None) -> Request:
    """Make settings from what was given, a resumed run's settings and the defaults.

    Args:
        given: what ``parse`` returned.
        world_size: ranks that a launcher has started, or None where this process will start them.

    Raises:
        UsageError: the settings contradict each other or the run to resume.
    """
    options = dict(vars(given))
    ranks = options.pop("ranks", None)
    resume = options.pop("resume", None)
    run_dir = options.pop("run_dir", None)
    runs_dir = options.pop("runs_dir", Path("runs"))
    mlflow_uri = options.pop("mlflow_uri", None)
    if resume is not None and run_dir is not None:
        raise UsageError("--resume continues in its own folder: leave --run-dir out")
    base: Mapping[str, Any] = {} if resume is None else read_settings(resume)
    _refuse_changes(base, options)
    options = {**_kept(base), **options, **_layout(vars(given), base, ranks, world_size)}
    settings = Settings(**options)
    check(settings, world_size if world_size is not None else ranks)
    if mlflow_uri is not None and not settings.mlflow:
        raise UsageError("--mlflow-uri needs --mlflow, which is off")
    return Request(
        settings=settings,
        run_dir=run_dir,
        resume=resume,
        runs_dir=runs_dir,
        mlflow_uri=mlflow_uri,
    )


def _layout(
    given: Mapping[str, Any], base: Mapping[str, Any], ranks: int | None, world_size: int | None
) -> dict[str, int]:
    """The three sizes: those given; dp fills up the ranks where it was not."""
    available = world_size if world_size is not None else ranks
    named = [name for name in ("tp", "cp", "dp") if name in given]
    if base and not named and available is None:
        return {name: base[name] for name in ("tp", "cp", "dp")}
    sizes = {name: given.get(name, 1) for name in ("tp", "cp", "dp")}
    if "dp" in given or min(sizes.values()) < 1:
        return sizes
    if available is None and not named:
        available = DEFAULT_RANKS
    if available is not None and available % (sizes["tp"] * sizes["cp"]) == 0:
        sizes["dp"] = available // (sizes["tp"] * sizes["cp"])
    return sizes


def _kept(base: Mapping[str, Any]) -> dict[str, Any]:
    """What a resumed run takes over."""
    fields = dataclasses.fields(Settings) if base else ()
    return {field.name: base[field.name] for field in fields if field.metadata["kept"]}


def _refuse_changes(base: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    if not base:
        return
    for field in dataclasses.fields(Settings):
        if not field.metadata["fixed"] or field.name not in options:
            continue
        if options[field.name] != base[field.name]:
            raise UsageError(
                f"--{field.name.replace('_', '-')} {options[field.name]} differs from the run to "
                f"resume, which has {base[field.name]}: leave it out or start a new run"
            )


def write_settings(settings: Settings, run_dir: Path, facts: Iterable[tuple[str, Any]]) -> None:
    """Write ``config.json``: the settings, and facts about the start that shaped the run."""
    text = json.dumps({"settings": dataclasses.asdict(settings), **dict(facts)}, indent=2)
    target = run_dir / "config.json"
    partial = target.with_suffix(".json.partial")
    partial.write_text(text + "\n")
    partial.replace(target)


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Read the settings of a run; UsageError says why the folder is not one."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise UsageError(f"--resume {run_dir}: no run folder (it has no config.json)")
    try:
        stored = json.loads(path.read_text())["settings"]
        known = {field.name for field in dataclasses.fields(Settings)}
        if set(stored) != known:
            raise KeyError(f"settings differ in {sorted(set(stored) ^ known)}")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--resume {run_dir}: config.json is not of this job ({error})") from None
    return dict(stored)
