"""The main job's model in plain PyTorch on one process: the reference for its layouts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from pretrain.corpus import load_corpus
from pretrain.model.randomness import ParameterInit
from pretrain.settings import Settings
from pretrain.windows import starts_in_order

Part = tuple[list[int], list[int]]


def columns_by_counting(tokens: torch.Tensor) -> torch.Tensor:
    """Bytes since the last line break, as a share of 80, counted one by one."""
    rows = []
    for row in tokens.tolist():
        column, columns = 0, []
        for byte in row:
            column = 0 if byte == ord("\n") else column + 1
            columns.append(min(column, 80) / 80)
        rows.append(columns)
    return torch.tensor(rows)


class PlainGPT(torch.nn.Module):
    """Written without any parallel part: whole matrices, and the operations of torch."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.heads = settings.num_attention_heads
        self.step = 0  # of the loss that is computed
        self.weights = torch.nn.ParameterDict()
        hidden = settings.hidden_size
        self._draw("embedding.weight", 256, hidden)
        if settings.value_head:
            self._draw("output_layer.weight", 1, hidden)
        elif settings.untied:
            self._draw("head.weight", 256, hidden)
        for layer in range(settings.num_layers):
            name = f"layers.{layer}"
            self._make_linear(f"{name}.attention.qkv", 3 * hidden, hidden)
            self._make_linear(f"{name}.attention.projection", hidden, hidden, is_added=True)
            self._make_feed_forward(f"{name}.feed_forward")
            self._make_norm(f"{name}.attention_norm")
            self._make_norm(f"{name}.feed_forward_norm")
        self._make_norm("final_norm")

    def _make_feed_forward(self, name: str) -> None:
        hidden = self.settings.hidden_size
        self._make_linear(f"{name}.widen", 4 * hidden, hidden)
        self._make_linear(f"{name}.narrow", hidden, 4 * hidden, is_added=True)

    def _make_linear(self, name: str, *shape: int, is_added: bool = False) -> None:
        self._draw(f"{name}.weight", *shape, is_added=is_added)
        self._fill(f"{name}.bias", shape[0], 0.0)

    def _make_norm(self, name: str) -> None:
        self._fill(f"{name}.weight", self.settings.hidden_size, 1.0)
        self._fill(f"{name}.bias", self.settings.hidden_size, 0.0)

    def _draw(
        self, name: str, *shape: int, is_added: bool = False, drawn_as: str | None = None
    ) -> None:
        """Draw a weight. Weights that add to the residual stream are smaller in a deeper model."""
        std = 0.02 / math.sqrt(2.0 * self.settings.num_layers) if is_added else 0.02
        values = ParameterInit(self.settings.seed, torch.device("cpu"), None).whole(
            drawn_as or name, shape, lambda tensor: torch.nn.init.normal_(tensor, 0.0, std)
        )
        self.weights[name.replace(".", "/")] = torch.nn.Parameter(values)

    def _fill(self, name: str, size: int, value: float) -> None:
        self.weights[name.replace(".", "/")] = torch.nn.Parameter(torch.full((size,), value))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}/weight"], self.weights[f"{name}/bias"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(
            x, x.shape[-1:], self.weights[f"{name}/weight"], self.weights[f"{name}/bias"]
        )

    def _attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        qkv = self._linear(f"{name}/qkv", x).view(batch, length, self.heads, -1).transpose(1, 2)
        query, key, value = qkv.chunk(3, dim=-1)
        cos, sin = _compute_turns(length, hidden // self.heads, x.dtype)

        def rotate(heads: torch.Tensor) -> torch.Tensor:
            first, second = heads.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

        context = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        context = context.transpose(1, 2).reshape(batch, length, hidden)
        return self._linear(f"{name}/projection", context)

    def _feed_forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._linear(f"{name}/narrow", F.gelu(self._linear(f"{name}/widen", x)))

    def _block(self, name: str, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attention(f"{name}/attention", self._norm(f"{name}/attention_norm", x))
        normed = self._norm(f"{name}/feed_forward_norm", x)
        return x + self._feed_forward(f"{name}/feed_forward", normed)

    def routing_loss(self, windows: Sequence[torch.Tensor]) -> torch.Tensor:
        """The routers' loss of the rows since the last call. The windows have these rows."""
        return torch.zeros(())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` bytes to logits ``[b, s, 256]``, or values ``[b, s, 1]``."""
        x = self.weights["embedding/weight"][tokens]
        for layer in range(self.settings.num_layers):
            x = self._block(f"layers/{layer}", x)
        heads = ("output_layer/weight", "head/weight", "embedding/weight")
        head = next(name for name in heads if name in self.weights)
        result: torch.Tensor = self._norm("final_norm", x) @ self.weights[head].T
        return result

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradient of each parameter, by its name in checkpoints."""
        weights = self.weights.items()
        return {key.replace("/", "."): one.grad for key, one in weights if one.grad is not None}

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Mean over all bytes of a batch: nats, or squared errors of the column in the line."""
        output = self(batch["tokens"])
        if "output_layer/weight" in self.weights:
            return F.mse_loss(output[..., 0], columns_by_counting(batch["tokens"]))
        return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


@functools.cache
def _compute_turns(length: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine ``[length, size / 2]`` by which each pair of numbers of a head is turned."""
    turn = torch.arange(size // 2, dtype=dtype) * (-math.log(10_000.0) / (size // 2))
    angles = torch.arange(length)[:, None] * turn.exp()
    return angles.cos(), angles.sin()


def without_layout(settings: Settings) -> Settings:
    """The settings of the one process that does the same, in full precision."""
    return dataclasses.replace(
        settings, tp=1, cp=1, pp=1, vpp=1, dp=1, ep=1, fsdp=False, hsdp_outer=1,
        micro_batch_size=0, sequence_parallel=False, recompute=False, bf16=False,
    )  # fmt: skip


def plain_losses(settings: Settings) -> list[float]:
    """Train the plain model, once for all layouts, and return the loss of each step."""
    return plain_run(without_layout(settings))[0]


@functools.cache
def plain_run(settings: Settings) -> tuple[list[float], float]:
    """Train the plain model. Returns the loss of each step and the validation loss at the end."""
    model, corpus, rows = PlainGPT(settings), load_corpus(), slice(None)
    losses, _ = train_plain(
        model, settings, lambda step: model.loss(corpus.training_batch(settings, rows, step))
    )
    with torch.no_grad():
        numbers = range(settings.eval_batches)
        batches = (corpus.validation_batch(settings, rows, number) for number in numbers)
        validation = [model.loss(batch).item() for batch in batches]
    return losses, sum(validation) / len(validation)


class PlainSteps:
    """The updates of a plain model by AdamW."""

    def __init__(self, model: PlainGPT, *, fused: bool = False) -> None:
        self.model, self.settings = model, model.settings
        groups = [
            {"params": [p for p in model.parameters() if p.dim() in dims], "weight_decay": decay}
            for dims, decay in (((2,), 0.1), ((1,), 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused)

    def update(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        """Update the model by the loss of a step, from 1. Returns the norm of the gradients."""
        settings = self.settings
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        limit = settings.clip_grad or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        if step <= settings.warmup_iters:
            rate = settings.lr * step / settings.warmup_iters
        else:
            done = (step - settings.warmup_iters) / (settings.train_iters - settings.warmup_iters)
            rate = settings.min_lr
            rate += (settings.lr - settings.min_lr) * (1 + math.cos(math.pi * done)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return norm


def train_plain(
    model: PlainGPT, settings: Settings, loss_of: Callable[[int], torch.Tensor], *,
    steps: int | None = None,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """Train a plain model by its loss of each step. Returns the losses and the gradient norms."""
    losses, norms, plain = [], [], PlainSteps(model)
    for step in range(1, (steps or settings.train_iters) + 1):
        loss = loss_of(step)
        losses.append(loss.item())
        norms.append(plain.update(step, loss).item())
    return losses, norms


def plain_gradients(settings: Settings) -> dict[str, torch.Tensor]:
    """Run the first step of the plain model and return the gradient of each parameter."""
    model = PlainGPT(settings)
    batch = load_corpus().training_batch(settings, slice(None), 1)
    torch.autograd.backward(model.loss(batch))
    return model.gradients()


def parts_of(
    documents: Sequence[Sequence[int]], seq_length: int, multiple: int
) -> list[list[Part]]:
    """The parts of documents in each window, tokens and labels, placed one token at a time.

    A label of -1 marks the end of a document: there is no next token.
    """
    places: list[tuple[int, int, int] | None] = []
    for number, document in enumerate(documents):
        for at, token in enumerate(document):
            label = document[at + 1] if at + 1 < len(document) else -1
            places.append((number, token, label))
        while len(places) % multiple:
            places.append(None)
    windows = []
    for start in range(0, len(places) - seq_length + 1, seq_length):
        parts: dict[int, Part] = {}
        for place in places[start : start + seq_length]:
            if place is not None:
                tokens, labels = parts.setdefault(place[0], ([], []))
                tokens.append(place[1])
                labels.append(place[2])
        windows.append(list(parts.values()))
    return windows


def loss_in_parts(
    model: PlainGPT, settings: Settings, documents: Sequence[bytes]
) -> Callable[[int], torch.Tensor]:
    """The loss of a step that computes each part of a document alone.

    Without ``--packed`` the text is one document. ``documents`` are the records of a ``.jsonl``
    file given as ``--data``. The gradient includes the routers' losses, with each sequence balanced
    separately.
    """
    text = b"".join(documents)
    split = int(len(text) * (1 - settings.validation_share))
    multiple = settings.document_multiple if settings.packed else 1
    windows = [
        [(list(text[at : at + settings.seq_length]), list(text[at + 1 :][: settings.seq_length]))]
        for at in range(0, split - settings.seq_length, settings.seq_length)
    ]
    if settings.packed:
        trained, left = [], split
        for document in documents:
            trained.append(document[:left])
            left = max(0, left - len(document))
        windows = parts_of(trained, settings.seq_length, settings.document_multiple)

    def loss_of(step: int) -> torch.Tensor:
        model.step = step
        first = (step - 1) * settings.global_batch_size
        starts = starts_in_order(
            len(windows) * settings.seq_length + 1, seq_length=settings.seq_length,
            seed=settings.seed, first=first, count=settings.global_batch_size,
        )  # fmt: skip
        rows = [
            (place, tokens + [0] * (-len(tokens) % multiple), labels)  # routers count these too
            for place, start in enumerate(starts.tolist())
            for tokens, labels in windows[start // settings.seq_length]
        ]
        total, count, of_windows = torch.zeros(()), 0, []
        for length in sorted({len(tokens) for _, tokens, _ in rows}):
            alike = [row for row in rows if len(row[1]) == length]
            tokens = torch.tensor([row[1] for row in alike])
            wanted = torch.tensor([row[2] + [-1] * (length - len(row[2])) for row in alike])
            of_windows.append(torch.tensor([row[0] for row in alike]))
            output = model(tokens)
            if settings.value_head:
                errors = (output[..., 0] - columns_by_counting(tokens)).square()
                total = total + errors[wanted >= 0].sum()
            else:
                total = total + F.cross_entropy(
                    output.flatten(0, 1), wanted.flatten(), ignore_index=-1, reduction="sum"
                )
            count += int((wanted >= 0).sum())
        routing = model.routing_loss(of_windows)
        return total / count + (routing - routing.detach())

    return loss_of
