"""The settings of a run: one dataclass that is also its options and its ``config.json``."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import platform
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from mcore.observe.files import replacing
from pretrain.usage import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_RANKS = 2
# config.json records the versions of these.
_DISTRIBUTIONS = ("torch", "numpy", "mlflow", "tensorboard")
_PARTS = ("versioning", "tensor", "parallel", "modules", "observe")
_MODEL = "its weights depend on it"
BY_TEXT = "its place in the text depends on it, unless you pass --reset-data"
_SEEDED = "the order of its text depends on it"
_SLOW_RANK = re.compile(r"(\d+):(\d+(?:\.\d+)?)")


@dataclasses.dataclass(frozen=True)
class Limit:
    """The allowed values of one setting, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _at_least(minimum: int) -> Limit:
    return Limit(f"at least {minimum}", lambda value: value >= minimum)


_FINITE = Limit("finite and at least 0", lambda value: 0 <= value < math.inf)
_POSITIVE = Limit("above 0 and finite", lambda value: 0 < value < math.inf)
_SHARE = Limit("in [0, 1)", lambda value: 0.0 <= value < 1.0)
_PART = Limit("between 0 and 1", lambda value: 0.0 < value < 1.0)
_MOST_S = 1_000_000  # timeouts of torch and the OS overflow above this
_DURATION = Limit(f"above 0 and at most {_MOST_S}", lambda value: 0 < value <= _MOST_S)
_PATIENCE = Limit(f"from 0 to {_MOST_S}", lambda value: 0 <= value <= _MOST_S)
_SEED = Limit("from 0 to 1000000000000", lambda value: 0 <= value <= 10**12)  # times 1,000,003
_UP_TO_ONE = Limit("0 or 1", lambda value: value in (0, 1))
_PORT = Limit("from 0 to 65535", lambda value: 0 <= value <= 65535)


def _option(
    default: Any,
    help_text: str,
    limit: Limit | None = None,
    *,
    fixed: str = "",
    kept: bool = True,
    choices: tuple[str, ...] | None = None,
    derived: bool = False,
) -> Any:
    """A field of the settings.

    ``fixed`` is the reason why a resumed run must not change a setting. A resumed run resets
    settings that are not ``kept`` to their defaults. ``derived`` settings are computed from others
    and have no option.
    """
    if choices:  # a file may have any text
        limit = Limit(f"one of {', '.join(choices)}", choices.__contains__)
    metadata = {
        "help": help_text, "limit": limit, "fixed": fixed, "kept": kept and not derived,
        "choices": choices, "derived": derived,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Every setting of a run, with defaults and layout resolved."""

    tp: int = _option(1, "tensor-parallel size: ranks that share each weight matrix", _at_least(1))
    cp: int = _option(1, "context-parallel size: ranks that share each sequence", _at_least(1))
    pp: int = _option(1, "pipeline stages: ranks that hold different layers", _at_least(1))
    vpp: int = _option(1, "with --pp: layer chunks per rank (interleaved schedule)", _at_least(1))
    defer_embedding_wgrad: bool = _option(
        False, "with --pp: compute the output head's weight gradient after the last backward"
    )
    dp: int = _option(
        DEFAULT_RANKS, "data-parallel size: ranks that share the global batch", _at_least(1)
    )
    fsdp: bool = _option(False, "shard parameters and optimizer over the dp x cp ranks")
    hsdp_outer: int = _option(
        1, "with --fsdp: replicas, each sharded over dp / N ranks", _at_least(1)
    )
    ep: int = _option(1, "expert-parallel size: dp x cp ranks that share experts", _at_least(1))
    sequence_parallel: bool = _option(
        False, "with --tp: split the activations between the matrices along the sequence"
    )
    recompute: bool = _option(
        False, "discard the activations of layers and recompute them in backward"
    )
    cuda_graph: Literal["none", "local"] = _option(
        "none", "local: replay each layer as a captured graph (on a CPU: eager, with its checks)",
        choices=("none", "local"),
    )  # fmt: skip

    data: str = _option("", "file, folder or glob of your text (.jsonl files have records)")
    field: str = _option("text", "JSON key of the text in --data records", fixed=BY_TEXT)
    tokenizer: str = _option("", "Hugging Face tokenizer file for --data (default: learn bytes)")
    reset_data: bool = _option(
        False, "with --resume: begin the text, or another text, at its start", kept=False
    )
    data_cache: str = _option("", "folder for the tokens of --data (default: next to the run)")
    validation_share: float = _option(
        0.05, "share of the text, at its end, for validation", _PART, fixed=BY_TEXT
    )
    packed: bool = _option(
        False,
        "pack several documents (files or records) into a sequence, with no attention between them",
        fixed=BY_TEXT,
    )
    document_multiple: int = _option(
        8, "with --packed: pad documents to a multiple of this", _at_least(1), fixed=BY_TEXT
    )
    vocabulary_size: int = _option(256, "size of the tokenizer's vocabulary", derived=True)
    tokenizer_digest: str = _option("", "checksum of the tokenizer", derived=True)

    num_layers: int = _option(4, "transformer layers", _at_least(1), fixed=_MODEL)
    hidden_size: int = _option(128, "width of the hidden states", _at_least(1), fixed=_MODEL)
    num_attention_heads: int = _option(4, "attention heads", _at_least(1), fixed=_MODEL)
    seq_length: int = _option(128, "bytes or tokens per sequence", _at_least(1), fixed=BY_TEXT)
    untied: bool = _option(False, "separate weights for embedding and output head", fixed=_MODEL)
    bf16: bool = _option(False, "run the model in bfloat16 with fp32 main weights", fixed=_MODEL)
    dropout: float = _option(0.0, "dropout on attention weights and residuals", _SHARE)
    value_head: bool = _option(
        False, "learn the column of each byte in its line instead of the next byte", fixed=_MODEL
    )

    experts: int = _option(
        0, "experts per layer instead of one feed-forward (0: none)", _at_least(0), fixed=_MODEL
    )
    topk: int = _option(2, "experts per token", _at_least(1), fixed=_MODEL)
    balance: Literal["batch", "sequence"] = _option(
        "batch", "balance expert loads over all sequences of a forward pass or over each sequence",
        choices=("batch", "sequence"),
    )  # fmt: skip
    balance_loss: float = _option(0.01, "weight of the load-balancing loss", _FINITE)
    z_loss: float = _option(0.001, "weight of the routers' z loss", _FINITE)
    freeze_router: bool = _option(False, "keep the initial weights of the routers", fixed=_MODEL)
    mtp: int = _option(
        0, "1: also learn the token after the next, with one more layer", _UP_TO_ONE, fixed=_MODEL
    )
    mtp_loss: float = _option(0.3, "weight of that token's loss", _FINITE)

    train_iters: int = _option(200, "total number of optimizer steps", _at_least(1))
    init_from: str = _option("", "begin with the weights of this run or checkpoint, of any layout")
    eval_only: bool = _option(
        False, "with --init-from: only compute the validation loss", kept=False
    )
    global_batch_size: int = _option(16, "sequences per optimizer step", _at_least(1))
    micro_batch_size: int = _option(
        0, "sequences per rank and forward pass (0: all of the rank, with --pp one)", _at_least(0)
    )
    lr: float = _option(3e-3, "peak learning rate", _FINITE)
    min_lr: float = _option(3e-4, "learning rate at the end", _FINITE)
    warmup_iters: int = _option(20, "steps of linear warm-up", _at_least(0))
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = _option(
        "cosine", "learning rate after the warm-up (wsd: constant, then a linear decay at the end)",
        choices=("cosine", "linear", "constant", "wsd"),
    )  # fmt: skip
    lr_decay_iters: int = _option(
        0, "step at which the learning rate reaches --min-lr (0: the first start's last step)",
        _at_least(0),
    )  # fmt: skip
    lr_wsd_decay_iters: int = _option(
        0, "with wsd: steps of the decay (0: a fifth of --lr-decay-iters)", _at_least(0)
    )
    weight_decay: float = _option(0.1, "AdamW weight decay of the matrices", _FINITE)
    adam_beta1: float = _option(0.9, "AdamW decay of the mean gradient", _SHARE)
    adam_beta2: float = _option(0.95, "AdamW decay of the mean squared gradient", _SHARE)
    adam_eps: float = _option(1e-8, "AdamW term that avoids a division by zero", _POSITIVE)
    clip_grad: float = _option(1.0, "global gradient norm limit (0: no clipping)", _FINITE)
    seed: int = _option(1234, "seed of weights, batches and dropout", _SEED, fixed=_SEEDED)

    log_interval: int = _option(10, "steps between console lines", _at_least(1))
    eval_interval: int = _option(
        50, "steps between validation losses (0: only at the end)", _at_least(0)
    )
    eval_batches: int = _option(8, "validation batches of the global batch size", _at_least(1))
    save_interval: int = _option(100, "steps between checkpoints (0: only the last)", _at_least(0))
    keep_last: int = _option(0, "number of newest checkpoints to keep (0: all)", _at_least(0))
    async_save: bool = _option(False, "write checkpoints while training continues")
    check_replicas_interval: int = _option(
        0, "steps between bitwise comparisons of the dp x cp replicas (0: never)", _at_least(0)
    )
    exit_after: int = _option(
        0, "stop with a checkpoint after this many steps of this start (0: never)", _at_least(0),
        kept=False,
    )  # fmt: skip
    max_skipped: int = _option(
        10, "stop after this many steps in a row without finite gradients (0: never)", _at_least(0)
    )
    grace_s: float = _option(
        20.0, "seconds for a checkpoint after SIGTERM, SIGHUP or Ctrl-C", _PATIENCE
    )
    timeout_s: float = _option(300.0, "seconds until a stuck collective ends the run", _DURATION)

    quiet: bool = _option(False, "print only warnings and the closing lines", kept=False)
    tensorboard: bool = _option(True, "write TensorBoard events")
    mlflow: bool = _option(True, "log to MLflow, in the background")
    straggler: bool = _option(True, "compare the times of the ranks and report slow ranks")
    straggler_port: int = _option(
        0, "port of the straggler page on rank 0 (0: any free port)", _PORT, kept=False
    )
    slow_rank: str = _option(
        "", "RANK:FACTOR makes the forward pass of that rank FACTOR times as long", kept=False
    )
    nvtx: bool = _option(False, "add NVTX ranges for profilers", kept=False)

    @property
    def world_size(self) -> int:
        """Ranks that this layout needs."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def layout(self) -> str:
        """The layout in short, such as ``tp2-cp1-dp1``."""
        pipeline = f"-pp{self.pp}" if self.pp > 1 else ""
        chunks = f"-vpp{self.vpp}" if self.vpp > 1 else ""
        return f"tp{self.tp}-cp{self.cp}{pipeline}{chunks}-dp{self.dp}"

    @property
    def run_kind(self) -> str:
        """The last part of a run folder's name: the layout and an unusual objective."""
        experts = f"-ep{self.ep}" if self.ep > 1 else ""
        return self.layout + experts + ("-value-head" if self.value_head else "")

    @property
    def rows_per_forward(self) -> int:
        """Sequences of one rank's forward pass."""
        all_at_once = self.global_batch_size // self.dp
        return self.micro_batch_size or (all_at_once if self.pp == 1 else 1)

    @property
    def decay(self) -> range:
        """The steps between the end of the peak learning rate and the end of its decay."""
        end = self.lr_decay_iters or self.train_iters
        begin = end - (self.lr_wsd_decay_iters or end // 5) if self.lr_schedule == "wsd" else 0
        return range(max(self.warmup_iters, begin), end)

    @property
    def num_microbatches(self) -> int:
        """Forward passes of one rank per optimizer step."""
        return self.global_batch_size // (self.dp * self.rows_per_forward)


def format_flag(name: str) -> str:
    """The option of a setting."""
    return "--" + name.replace("_", "-")


def write_settings(
    settings: Settings, run_dir: Path, facts: Iterable[tuple[str, Any]], step: int = 0
) -> dict[str, list[Any]]:
    """Write ``config.json``: the settings, facts about the start, and the changes of each start.

    Returns the old and the new value of each setting that differs from the last start's.
    """
    stored = dataclasses.asdict(settings)
    try:
        before = json.loads((run_dir / "config.json").read_text())
    except FileNotFoundError:
        before = {"settings": stored}
    history, old = before.get("history", []), before["settings"]
    changes = {
        name: [old[name], new]
        for name, new in kept_settings(stored).items()
        if old.get(name, new) != new
    }
    if settings.reset_data:
        changes["reset_data"] = [False, True]
    if changes:
        history = [*history, {"step": step, "changes": changes}]
    text = json.dumps({"settings": stored, **dict(facts), "history": history}, indent=2)
    with replacing(run_dir / "config.json") as file:
        file.write(f"{text}\n".encode())
    return changes


def read_settings(run_dir: Path, option: str = "--resume") -> dict[str, Any]:
    """Read the settings of a run. Raises UsageError if the folder is not a run folder."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise UsageError(f"{option} {run_dir}: not a run folder (it has no config.json)")
    fields = dataclasses.fields(Settings)
    try:
        stored = _check_stored(_parse_settings(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{option} {run_dir}: config.json is not from this job ({error})"
        ) from None
    # A file of an older version may lack new settings.
    return {field.name: field.default for field in fields} | stored


def read_fact(run_dir: Path, name: str) -> Any:
    """A fact that an earlier start recorded in ``config.json``, or None."""
    return json.loads((run_dir / "config.json").read_text()).get(name)


def last_reset(run_dir: Path) -> int:
    """The step of the checkpoint after which the run last began its text at its start, or -1."""
    history = read_fact(run_dir, "history") or []
    steps: list[int] = [entry["step"] for entry in history if "reset_data" in entry["changes"]]
    return steps[-1] if steps else -1


def read_config(path: Path) -> dict[str, Any]:
    """Read settings from TOML or from a run's ``config.json``. Raises UsageError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe without a writer would block
            raise UsageError(f"--config {path}: not a regular file. Pass a regular file")
        text = path.read_text()
        if path.suffix == ".json":
            return kept_settings(_check_stored(_parse_settings(text)))
        given: dict[str, Any] = {}
        for name, value in tomllib.loads(text).items():
            if (option := name.replace("-", "_")) in given:
                raise ValueError(f"{name} is set twice, with _ and with -: remove one")
            given[option] = value
        return _check_stored(given, may_be_derived=False)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"--config {path}: {error}") from None


def kept_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a resumed run, or a new run with ``--config``, inherits."""
    kept = {field.name for field in dataclasses.fields(Settings) if field.metadata["kept"]}
    return {name: value for name, value in stored.items() if name in kept}


def _parse_settings(text: str) -> dict[str, Any]:
    """The settings in the text of a ``config.json``."""
    config = json.loads(text)
    settings = config.get("settings") if isinstance(config, dict) else None
    if not isinstance(settings, dict):
        raise ValueError("it has no table of settings")
    return settings


def _check_stored(stored: Mapping[str, Any], *, may_be_derived: bool = True) -> dict[str, Any]:
    """Return the settings. Raises ValueError for an unknown name or a wrong type."""
    fields = {
        field.name: field
        for field in dataclasses.fields(Settings)
        if may_be_derived or not field.metadata["derived"]
    }
    if unknown := sorted(set(stored) - set(fields)):
        raise ValueError(f"unknown settings: {', '.join(unknown)}")
    for name, value in stored.items():
        wanted = type(fields[name].default)
        if type(value) is not wanted and (wanted, type(value)) != (float, int):
            raise ValueError(f"{name} is {value!r}, not of type {wanted.__name__}")
    return dict(stored)


@functools.cache
def surroundings() -> dict[str, str | None]:
    """Versions of Python, torch and the packages, host and commit (or None)."""
    names = (*_DISTRIBUTIONS, *(f"mcore-{part}" for part in _PARTS))
    return {
        "python": platform.python_version(),
        **{name: _find_version(name) for name in names},
        "host": socket.gethostname(),
        "commit": _find_commit(),
    }


def _find_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _find_commit() -> str | None:
    """The commit of this code, with a plus sign if files were changed."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5,
            check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@dataclasses.dataclass(frozen=True)
class SlowRank:
    """A rank that is slowed down, and the factor for its forward pass."""

    rank: int
    factor: float

    @classmethod
    def parse(cls, text: str, world_size: int) -> SlowRank | None:
        """Read ``RANK:FACTOR``. An empty text returns None."""
        if not text:
            return None
        match = _SLOW_RANK.fullmatch(text)
        if match is None:
            raise UsageError(f"--slow-rank must be RANK:FACTOR such as 1:4, got {text}")
        slow = cls(int(match[1]), float(match[2]))
        if slow.rank >= world_size:
            raise UsageError(
                f"--slow-rank {text}: there are {world_size} ranks, 0 to {world_size - 1}"
            )
        if not 1.0 < slow.factor < math.inf:
            raise UsageError(f"--slow-rank {text}: the factor must be above 1")
        return slow
