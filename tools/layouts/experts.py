"""The plain model with experts: each expert sees every token, and most outputs have weight 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from layouts.reference import PlainGPT
from pretrain.settings import Settings


class PlainExperts(PlainGPT):
    """Feed-forwards of experts, with the losses of their routers written out as in the papers."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._noted: dict[str, list[torch.Tensor]] = {}  # logits of each router, part after part

    def _make_feed_forward(self, name: str) -> None:
        hidden, number = self.settings.hidden_size, self.settings.experts
        self._draw(f"{name}.router.weight", number, hidden)
        for one in range(number):
            place, drawn_as = f"{name}.experts.own.{one}", f"{name}.experts.{one}"
            self._draw(f"{place}.widen", 4 * hidden, hidden, drawn_as=f"{drawn_as}.widen")
            self._draw(
                f"{place}.narrow", hidden, 4 * hidden, is_added=True, drawn_as=f"{drawn_as}.narrow"
            )

    def _feed_forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        logits = x @ self.weights[f"{name}/router/weight"].T
        self._noted.setdefault(name, []).append(logits)
        gates = _compute_softmax(logits) * self._mark_chosen(logits)
        if self.settings.topk > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for one in range(self.settings.experts):
            place = f"{name}/experts/own/{one}"
            wide = F.gelu(x @ self.weights[f"{place}/widen"].T)
            out = out + gates[..., one, None] * (wide @ self.weights[f"{place}/narrow"].T)
        return out

    def routing(
        self, windows: Sequence[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Load-balancing and z loss of each layer, of all rows seen since the last call.

        ``windows`` has the window of each row of each pass: rows of a window are balanced together.
        Without it each row is a separate window.
        """
        balances, sizes = [], []
        for parts in self._noted.values():
            logits = torch.cat([part.flatten(0, 1) for part in parts])
            of_rows = windows or [torch.arange(len(part)) for part in parts]
            window = torch.cat(
                [
                    of.repeat_interleave(part.shape[1])
                    for of, part in zip(of_rows, parts, strict=True)
                ]
            )
            if self.settings.balance == "batch":
                window = torch.zeros_like(window)
            load = _average(self._mark_chosen(logits), window) / self.settings.topk
            mean = _average(_compute_softmax(logits), window)
            balances.append((self.settings.experts * load * mean).sum(-1).mean())
            sizes.append(logits.exp().sum(-1).log().square().mean())
        self._noted.clear()
        return torch.stack(balances), torch.stack(sizes)

    def routing_loss(self, windows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Both losses, summed over the layers with the weights of the settings."""
        balances, sizes = self.routing(windows)
        return self.settings.balance_loss * balances.sum() + self.settings.z_loss * sizes.sum()

    def _mark_chosen(self, logits: torch.Tensor) -> torch.Tensor:
        """1 for each of the likeliest experts. Of equal experts the lower number wins."""
        is_chosen = torch.zeros_like(logits)
        for _ in range(self.settings.topk):
            best = (_compute_softmax(logits) - 2 * is_chosen).argmax(-1)
            is_chosen = is_chosen + F.one_hot(best, self.settings.experts)
        return is_chosen


def _compute_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.exp() / logits.exp().sum(-1, keepdim=True)


def _average(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The mean of the values ``[n, E]`` of each group: ``[groups, E]``."""
    counts = torch.bincount(groups)
    sums = torch.zeros(len(counts), values.shape[1], dtype=values.dtype)
    return sums.index_add(0, groups, values) / counts[:, None]
