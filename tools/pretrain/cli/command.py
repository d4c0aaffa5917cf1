"""The command: read the request, then start the ranks or be one of them."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
import time
from pathlib import Path

from pretrain.cli.claim import PATIENCE_S, check_unclaimed, claim, is_of_this_launcher
from pretrain.cli.console import open_console
from pretrain.cli.options import MLFLOW_URI, Request, parse, resolve
from pretrain.run_folder import RunFolder, free_number, make_run_folder, name_run, refuse_foreign
from pretrain.usage import EXIT_USAGE, UsageError
from pretrain.watch.mlflow_target import choose_target, mask_uri

_URI_FOR_RANKS = "PRETRAIN_MLFLOW_URI"


def main(argv: list[str]) -> int:
    """Run the job and return the exit code (2: nothing was started, stderr has the reason)."""
    open_console()
    try:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return _run_rank_process(argv)
        return _start_ranks(argv)
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # each node may see different folders
            print(f"pretrain: error: {mask_uri(str(error))}", file=sys.stderr, flush=True)
        return EXIT_USAGE


def _start_ranks(argv: list[str]) -> int:
    request = _read_request(argv, None)
    if request.resume is not None:
        check_unclaimed(request.resume, PATIENCE_S if request.by_itself else 0.0)
    _check_tracking(request)
    _find_start_step(request)
    _prepare_text(request)
    if request.resume is not None:
        folder = RunFolder(request.resume)
    else:
        kind, started = request.settings.run_kind, int(time.time())
        number = free_number(request.runs_dir, kind, started)
        path = request.run_dir or name_run(request.runs_dir, kind, started, number)
        folder = make_run_folder(path, trusted=request.trust_run)
    from pretrain.cli.launch import launch

    gc.enable()
    return launch(_hand_over(argv, request.mlflow_uri), request, folder)


def _run_rank_process(argv: list[str]) -> int:
    request = _read_request(argv, int(os.environ["WORLD_SIZE"]))
    handed = os.environ.pop(_URI_FOR_RANKS, None)  # not inherited by child processes
    if handed is not None:
        request = dataclasses.replace(request, mlflow_uri=handed)
    _check_tracking(request)
    step = _find_start_step(request)
    if request.resume is not None and os.environ["RANK"] == "0":
        patience_s = min(PATIENCE_S, request.settings.timeout_s) if request.by_itself else 0.0
        request.claims.append(claim(request.resume, patience_s))
        RunFolder(request.resume).diverged.unlink(missing_ok=True)
        _set_damaged_aside(RunFolder(request.resume), step)
    from pretrain.rank import run_rank

    gc.freeze()  # collections during the training leave out the modules
    gc.enable()
    return run_rank(request)


def _read_request(argv: list[str], world_size: int | None) -> Request:
    """Read the command line and the run to resume, which is foreign without ``--trust-run``."""
    given = parse(argv)
    _resume_automatically(given)
    trusted = "trust_run" in given
    if "resume" in given and not trusted:
        refuse_foreign(given.resume, "--resume")
    request = resolve(given, world_size)
    if request.names and not trusted:
        from pretrain.text.cache import refuse_foreign_text

        refuse_foreign_text(request.settings, given.resume, request.names)
    return request


def _resume_automatically(given: argparse.Namespace) -> None:
    """Resume ``--run-dir`` with ``--auto-resume`` or after torchrun has restarted the ranks.

    A folder without a checkpoint is renamed, and the run starts from step 0. If ranks of another
    node failed, torchrun restarts the ranks of this node without counting a restart.
    """
    wanted = vars(given).pop("auto_resume", False)
    if "run_dir" not in given:
        return
    counted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not (wanted or counted or is_of_this_launcher(given.run_dir)):
        return
    from pretrain.run.checkpoints import has_checkpoint, set_aside

    path: Path = given.run_dir
    if has_checkpoint(RunFolder(path)):
        given.resume, given.by_itself = path, True
        del given.run_dir
    elif os.environ.get("RANK", "0") == "0" and path.is_dir() and any(path.iterdir()):
        check_unclaimed(path, PATIENCE_S)
        set_aside(path, "unsaved")


def _hand_over(argv: list[str], uri: str | None) -> list[str]:
    """Move the URI from the command line, which every user can see, to the ranks' environment."""
    os.environ.pop(_URI_FOR_RANKS, None)
    if uri is not None:
        os.environ[_URI_FOR_RANKS] = uri
    kept = []
    words = iter(argv)
    for word in words:
        if word == MLFLOW_URI:
            next(words, None)
        elif not word.startswith(f"{MLFLOW_URI}="):
            kept.append(word)
    return kept


def _check_tracking(request: Request) -> None:
    """Raise UsageError if MLflow's address is invalid."""
    if not request.settings.mlflow:
        return
    folder = RunFolder(request.resume or request.run_dir or request.runs_dir)
    choose_target(folder, request.mlflow_uri, trusted=request.trust_run)


def _find_start_step(request: Request) -> int:
    """The step to continue from, 0 for a new run. Raises UsageError if there is no checkpoint."""
    from pretrain.corpus import require_text
    from pretrain.text.sources import find_sources

    if request.settings.data:
        find_sources(request.settings.data)
    else:
        require_text(request.settings)
    if request.resume is None:
        if request.settings.init_from:
            from pretrain.run.checkpoints import find_weights

            find_weights(request.settings)
        return 0
    from pretrain.run.checkpoints import step_to_load

    step = step_to_load(RunFolder(request.resume))
    if step >= request.settings.train_iters and not request.by_itself:
        raise UsageError(
            f"--resume {request.resume}: its checkpoint is at step {step} of "
            f"{request.settings.train_iters}: pass a larger --train-iters"
        )
    return step


def _prepare_text(request: Request) -> None:
    """Tokenize ``--data`` before the run folder is created. Raises UsageError if it fails."""
    if not request.settings.data:
        return
    from pretrain.corpus import load_cached_corpus
    from pretrain.text.cache import find_cache, make_cache

    run_dir = request.resume or request.run_dir or request.runs_dir / "run"
    cache = find_cache(request.settings, run_dir)
    make_cache(request.settings, cache, None if request.settings.reset_data else request.resume)
    load_cached_corpus(request.settings, cache)


def _set_damaged_aside(folder: RunFolder, step: int) -> None:
    """Rename damaged checkpoints of later steps and report them: their steps are repeated."""
    from pretrain.run.checkpoints import damaged_after, set_aside

    skipped = [
        f"{path} ({problem}), now {set_aside(path, 'damaged').name}"
        for path, problem in damaged_after(folder, step).items()
    ]
    if skipped:
        line = f"pretrain: warning: continuing from step {step}, skipped {', '.join(skipped)}"
        print(line, file=sys.stderr, flush=True)
