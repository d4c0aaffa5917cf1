"""``python -m pretrain.sample``: continues a text with a model from a run's checkpoint."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mcore.modules import MegatronModule
from mcore.parallel import ProcessGroups
from pretrain.cli.options import Parser
from pretrain.model.building import build_model
from pretrain.model.configuration import transformer_config
from pretrain.run.checkpoints import load_weights, step_to_load
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings, read_settings
from pretrain.text.tokenizer import Tokenizer, open_tokenizer
from pretrain.usage import EXIT_USAGE, UsageError, clean

_CPU = torch.device("cpu")
_ALONE = {
    "tp": 1, "cp": 1, "pp": 1, "vpp": 1, "dp": 1, "ep": 1, "defer_embedding_wgrad": False,
    "fsdp": False, "hsdp_outer": 1, "sequence_parallel": False, "recompute": False,
    "cuda_graph": "none",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt and its continuation. Returns 0, or 2 after a one-line error."""
    try:
        given = _parse(argv)
        settings = Settings(**{**read_settings(given.run, "--run"), **_ALONE})
        if settings.value_head:
            raise UsageError(f"--run {given.run} has a value head (--value-head), no text")
        tokenizer = _open_run_tokenizer(settings, given.tokenizer)
        prompt = _encode(tokenizer, given.prompt)
        model = load_model(settings, RunFolder(given.run))
        more = continue_tokens(
            model, settings, prompt, num_tokens=given.tokens,
            temperature=given.temperature, top_k=given.top_k, seed=given.seed,
        )  # fmt: skip
    except UsageError as error:
        print(f"sample: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    text = tokenizer.decode([*prompt, *more])
    print(clean(text) if sys.stdout.isatty() else text)
    return 0


def load_model(settings: Settings, folder: RunFolder) -> MegatronModule:
    """The model of a run's last complete checkpoint of any layout, in this process."""
    path = folder.checkpoint(step_to_load(folder, "--run"))
    groups = ProcessGroups.from_sizes()
    model = build_model(settings, transformer_config(settings), groups, _CPU)
    load_weights(model, groups, path)
    return model.eval()


@torch.no_grad()
def continue_tokens(
    model: MegatronModule,
    settings: Settings,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> list[int]:
    """The tokens after a prompt, each from at most ``seq_length`` earlier tokens.

    Temperature 0 picks the likeliest token, others draw from the ``top_k`` likeliest (0: all).
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        seen = torch.tensor([tokens[-settings.seq_length :]])
        logits = model(seen, torch.arange(seen.shape[1])[None])[-1, 0].float()
        tokens.append(_choose(logits[: settings.vocabulary_size], temperature, top_k, generator))
    return tokens[len(prompt) :]


def _choose(
    logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits.argmax())
    values, numbers = logits.topk(min(top_k or len(logits), len(logits)))
    chances = ((values - values[0]) / temperature).softmax(dim=0)
    return int(numbers[torch.multinomial(chances, 1, generator=generator)])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="sample",
        description="Continue a text with the model of a run, on the CPU of this process.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("prompt", help="the text to continue")
    add("--run", type=Path, required=True, metavar="RUN_DIR", help="the run")
    add("--tokens", type=int, default=200, help="how many to add (default: 200)")
    likeliest = "default: 0, always the likeliest token"
    add("--temperature", type=float, default=0.0, help=likeliest)
    likely = "with --temperature: draw from the N likeliest (0: all)"
    add("--top-k", type=int, help=likely)
    add("--seed", type=int, help="with --temperature: seed of the draws (default: 1234)")
    add("--tokenizer", metavar="FILE", help="new path of the run's tokenizer")
    given = parser.parse_args(argv)
    if given.temperature == 0 and (given.top_k is not None or given.seed is not None):
        raise UsageError("--top-k and --seed are for draws: pass --temperature too")
    given.top_k, given.seed = given.top_k or 0, 1234 if given.seed is None else given.seed
    for flag in ("tokens", "temperature", "top_k", "seed"):
        if not 0 <= getattr(given, flag) < math.inf:
            raise UsageError(f"--{flag.replace('_', '-')} must be at least 0 and finite")
    return given


def _open_run_tokenizer(settings: Settings, moved_to: str | None) -> Tokenizer:
    path = moved_to or settings.tokenizer
    tokenizer = open_tokenizer(path)
    if tokenizer.digest != settings.tokenizer_digest:
        raise UsageError(
            f"--tokenizer {path} differs from the tokenizer of the run"
            + (
                f", {settings.tokenizer}: pass that file"
                if settings.tokenizer
                else ", which learned bytes: remove the option"
            )
        )
    return tokenizer


def _encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    try:
        [numbers] = tokenizer.encode([prompt.encode(errors="surrogateescape")])
    except UnicodeDecodeError:
        raise UsageError("the prompt must be UTF-8 for the run's tokenizer") from None
    if not len(numbers):
        raise UsageError("the prompt is empty: pass at least one token")
    return [int(number) for number in numbers]


if __name__ == "__main__":
    sys.exit(main())
