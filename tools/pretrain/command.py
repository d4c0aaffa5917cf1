"""The command: read what was asked, then start the ranks or be one of them."""

from __future__ import annotations

import os
import sys
import time

from pretrain.run_folder import RunFolder, free_number, make_run_folder, name_run
from pretrain.settings import Request, parse, resolve
from pretrain.usage import EXIT_USAGE, UsageError


def main(argv: list[str]) -> int:
    """Run the job; returns the exit code (2: nothing was started, one line says what to change)."""
    try:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return _be_a_rank(argv)
        return _start_ranks(argv)
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"pretrain: error: {_shown(str(error))}", file=sys.stderr, flush=True)
        return EXIT_USAGE


def _start_ranks(argv: list[str]) -> int:
    request = resolve(parse(argv), None)
    _check_tracking(request)
    _check_sources(request)
    folder = _folder(request)
    from pretrain.launch import launch

    return launch(argv, request, folder)


def _be_a_rank(argv: list[str]) -> int:
    request = resolve(parse(argv), int(os.environ["WORLD_SIZE"]))
    _check_tracking(request)
    _check_sources(request)
    from pretrain.rank import run_rank

    return run_rank(request)


def _folder(request: Request) -> RunFolder:
    if request.resume is not None:
        return RunFolder(request.resume)
    if request.run_dir is not None:
        return make_run_folder(request.run_dir)
    layout, started = request.settings.run_kind, int(time.time())
    number = free_number(request.runs_dir, layout, started)
    return make_run_folder(name_run(request.runs_dir, layout, started, number))


def _check_tracking(request: Request) -> None:
    """Raise UsageError where MLflow's address cannot be one."""
    if not request.settings.mlflow:
        return
    from pretrain.mlflow_target import choose_target

    choose_target(
        RunFolder(request.resume or request.run_dir or request.runs_dir), request.mlflow_uri
    )


def _shown(text: str) -> str:
    """The text without the password of a URI that was typed in the wrong place."""
    if "://" not in text:
        return text
    from mcore.observe.secret_texts import mask_secrets

    return mask_secrets(text)


def _check_sources(request: Request) -> None:
    """Raise UsageError where the text is too short, or the run to resume has nothing to go on."""
    from pretrain.corpus import require_text

    require_text(request.settings.seq_length)
    if request.resume is None:
        return
    from pretrain.checkpoints import latest_step

    step = latest_step(RunFolder(request.resume))
    if step >= request.settings.train_iters:
        raise UsageError(
            f"--resume {request.resume}: its checkpoint is at step {step} of "
            f"{request.settings.train_iters}: give a larger --train-iters"
        )
