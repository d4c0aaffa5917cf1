"""The command line: parsed, and merged with a resumed run's settings and the defaults."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from pretrain.cli.checks import check
from pretrain.settings import (
    BY_TEXT,
    DEFAULT_RANKS,
    Settings,
    format_flag,
    kept_settings,
    read_config,
    read_settings,
)
from pretrain.usage import UsageError

MLFLOW_URI = "--mlflow-uri"
_SIZES = ("tp", "cp", "pp", "dp")
_WITHIN_SIZES = ("vpp", "ep", "hsdp_outer")
_ONLY_WITH = {
    "experts": ("topk", "balance", "balance_loss", "z_loss"),
    "mtp": ("mtp_loss",),
    "packed": ("document_multiple",),
    "data": ("field", "data_cache"),
    "lr_schedule wsd": ("lr_wsd_decay_iters",),
}
_STARTS = ("device", "run_dir", "resume", "runs_dir", "by_itself", "trust_run", "mlflow_uri")
_PATHS = ("data", "tokenizer", "data_cache", "init_from")
# The first setting of each group of options in --help.
_GROUPS = {
    "tp": "layout",
    "fsdp": "sharding, experts and memory",
    "data": "text",
    "num_layers": "model",
    "experts": "experts and a second token",
    "train_iters": "training",
    "lr": "learning rate and optimizer",
    "log_interval": "reports and checkpoints",
    "timeout_s": "trackers and monitoring",
}
_FIRST = {
    "data", "num_layers", "hidden_size", "bf16", "tp", "train_iters", "global_batch_size", "lr",
}  # fmt: skip
_EXAMPLES = """examples:
  pretrain --tp 2 --cp 2                     four ranks share matrices and sequences
  pretrain --pp 2 --vpp 2                    a pipeline of two ranks with two layer chunks each
  pretrain --fsdp --bf16 --train-iters 600   parameters sharded over the ranks
  pretrain --dp 4 --experts 8 --ep 4         experts spread over four ranks
  pretrain --data "books/*.txt"              train on your text
  pretrain --resume runs/RUN                 continue from the last complete checkpoint
  pretrain --config runs/RUN/config.json     a new run with the settings of another run
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One start of the job: the settings and where it reads and writes."""

    settings: Settings
    run_dir: Path | None = None
    resume: Path | None = None
    runs_dir: Path = Path("runs")
    device: str = ""  # torch's accelerator, or the CPU
    by_itself: bool = False  # resumed automatically, without --resume
    trust_run: bool = False
    names: tuple[str, ...] = ()  # text and cache that only the run to resume names
    mlflow_uri: str | None = dataclasses.field(default=None, repr=False)
    claims: list[IO[str]] = dataclasses.field(default_factory=list)  # kept open by rank 0


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. The result contains only the options that were given."""
    parser = Parser(
        prog="pretrain", usage="pretrain [options]",
        description="Train a small GPT on the bytes of Python's standard library, or on --data.",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=False,
    )  # fmt: skip
    first = parser.add_argument_group("the first options")
    first.add_argument("--run-dir", type=Path, help="folder of this run (default: a new one)")
    first.add_argument("--resume", type=Path, metavar="RUN_DIR", help="continue this run")
    group = parser.add_argument_group("starts and folders")
    group.add_argument("-h", "--help", action="help", help="show this text")
    group.add_argument("--ranks", type=int, help="ranks to start (default: tp * cp * pp * dp)")
    group.add_argument("--device", choices=("standin",), help="an accelerator for tests")
    group.add_argument("--runs-dir", type=Path, help="folder of all runs (default: runs)")
    group.add_argument("--auto-resume", action="store_true", help="continue --run-dir if possible")
    group.add_argument(
        "--trust-run",
        action="store_true",
        help="accept a run folder of another user, links in it, and the text and MLflow server "
        "that it names (which then gets your credentials)",
    )
    group.add_argument(
        MLFLOW_URI,
        metavar="URI",
        help="MLflow server or database (default: MLFLOW_TRACKING_URI, else a file in the run "
        "folder). A password is safer in MLFLOW_TRACKING_PASSWORD",
    )
    group.add_argument(
        "--config", type=Path, metavar="FILE",
        help="settings from a TOML file or a run's config.json; options override them",
    )  # fmt: skip
    for field in dataclasses.fields(Settings):
        if field.name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[field.name])
        if not field.metadata["derived"]:
            _add_option(first if field.name in _FIRST else group, field)
    return parser.parse_args(argv)


def _add_option(parser: argparse._ArgumentGroup, field: dataclasses.Field[Any]) -> None:
    flag = format_flag(field.name)
    default = f" (default: {field.default})" if field.default else ""
    text = f"{field.metadata['help']}{default}"
    if isinstance(field.default, bool):
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    else:
        choices, kind = field.metadata["choices"], type(field.default)
        sign = None if choices else {int: "N", float: "X", str: "TEXT"}[kind]
        parser.add_argument(flag, type=kind, choices=choices, metavar=sign, help=text)


def resolve(given: argparse.Namespace, world_size: int | None) -> Request:
    """Combine the given options, a resumed run's settings and the defaults.

    ``world_size`` is None if this process starts the ranks, without another launcher.
    """
    options = dict(vars(given))
    ranks = options.pop("ranks", None)
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks must be at least 1, got {ranks}")
    options.pop("auto_resume", None)
    start = {name: options.pop(name) for name in _STARTS if name in options}
    resume = start.get("resume")
    if resume is not None and "run_dir" in start:
        raise UsageError("--resume continues in the folder of the run: remove --run-dir")
    if (config := options.pop("config", None)) is not None:
        options = {**read_config(config), **options}
        given = argparse.Namespace(**options)
    base: Mapping[str, Any] = {} if resume is None else read_settings(resume)
    if options.get("reset_data") and (resume is None or start.get("by_itself")):
        raise UsageError("--reset-data needs --resume, since each start would reset the text")
    if options.get("init_from") and resume is not None and not start.get("by_itself"):
        raise UsageError("--init-from is for a new run, and --resume continues one: remove one")
    if base:
        _refuse_changes(base, options)
    kept = kept_settings(base)
    if base and options.get("train_iters") not in (None, base["train_iters"]):
        kept["lr_decay_iters"] = base["lr_decay_iters"] or base["train_iters"]
    if base and any(name in options for name in _SIZES):
        kept |= dict.fromkeys(_WITHIN_SIZES, 1)  # a new layout replaces the stored one
    options = {**kept, **options, **_choose_layout(vars(given), base, ranks, world_size)}
    settings = Settings(**_add_tokenizer(options, base))
    if not base:
        _refuse_unused(options, settings)
    check(settings, world_size if world_size is not None else ranks)
    if "mlflow_uri" in start and not settings.mlflow:
        raise UsageError("--mlflow-uri needs --mlflow, which is off")
    used = [name for name in ("data", "data_cache") if getattr(settings, name)]
    names = tuple(name for name in used if name in base and name not in given)
    return Request(settings=settings, names=names, **start)


def _add_tokenizer(options: dict[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The options with absolute paths, and with vocabulary and checksum of the tokenizer."""
    paths = {name: str(Path(options[name]).absolute()) for name in _PATHS if options.get(name)}
    options = {**options, **paths}
    digest, path = "", paths.get("tokenizer", "")
    if path:
        from pretrain.text.tokenizer import open_tokenizer

        tokenizer = open_tokenizer(path)
        digest = tokenizer.digest
        options |= {"vocabulary_size": tokenizer.vocabulary_size, "tokenizer_digest": digest}
    if base and base["tokenizer_digest"] != digest:
        raise UsageError(
            f"--tokenizer {path or '(none)'} differs from the tokenizer of the run to resume, "
            f"{base['tokenizer'] or '(none)'}: pass the same file or start a new run"
        )
    return options


def _choose_layout(
    given: Mapping[str, Any], base: Mapping[str, Any], ranks: int | None, world_size: int | None
) -> dict[str, int]:
    """The given sizes, else those of a resumed run. A missing dp uses the remaining ranks."""
    available = world_size if world_size is not None else ranks
    named = [name for name in _SIZES if name in given]
    sizes = {name: given.get(name, 1) for name in _SIZES}
    if base and not named:
        sizes = {name: base[name] for name in _SIZES}
        needed = math.prod(sizes.values())
        if available in (None, needed):
            return sizes
        if ranks is None:
            raise UsageError(
                f"the run to resume has {needed} ranks and {available} were started: start "
                f"{needed}, or set another layout with --tp, --cp, --pp and --dp"
            )
    if "dp" in given or min(sizes.values()) < 1:
        return sizes
    if available is None and not named:
        available = DEFAULT_RANKS
    taken = sizes["tp"] * sizes["cp"] * sizes["pp"]
    if available is not None and available % taken == 0:
        sizes["dp"] = available // taken
    return sizes


def _refuse_unused(options: Mapping[str, Any], settings: Settings) -> None:
    """Raise UsageError for a non-default option of a feature that is off."""
    defaults = Settings()
    for owner, names in _ONLY_WITH.items():
        switch, _, wanted = owner.partition(" ")
        state = getattr(settings, switch)
        for name in names:
            value = options.get(name, getattr(defaults, name))
            if (state != wanted if wanted else not state) and value != getattr(defaults, name):
                flag = format_flag(name)
                raise UsageError(f"{flag} {value} has no effect without {format_flag(owner)}")


def _refuse_changes(base: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    resets = options.get("reset_data")
    for field in dataclasses.fields(Settings):
        new, reason = options.get(field.name, base[field.name]), field.metadata["fixed"]
        if field.name == "data" and not new:
            reason = BY_TEXT
        if new == base[field.name] or not reason or (reason == BY_TEXT and resets):
            continue
        raise UsageError(
            f"{format_flag(field.name)} {new or repr(new)} differs from the run to resume, which "
            f"has {base[field.name]}: {reason}. Remove it or start a new run"
        )
