"""The plain model with experts: each expert sees every token, and most outputs have weight 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from layouts.reference import PlainGPT
from pretrain.settings import Settings

# Logits and experts ``[n, E]`` and ``[n, topk]`` of the tokens of a step and a layer, in any order.
Route = tuple[torch.Tensor, torch.Tensor]
Routes = Mapping[tuple[int, int], Route]
# Rounding moves a logit by up to 1e-5 within the steps of a combination (measured: fp32 against
# float64), and logits have a spread of 0.15. Only nearer logits may be taken for each other.
_TIE = 1e-4


class RoutingError(Exception):
    """A combination chose experts that rounding does not explain."""


class PlainExperts(PlainGPT):
    """Feed-forwards of experts, with the losses of their routers written out as in the papers.

    ``routes`` are the choices of another process. They decide between experts that are equally
    likely but for rounding, and ``ties`` counts these tokens.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        # Logits and choices of each router, part after part.
        self._noted: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.routes: Routes = {}
        self.ties = 0

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
        is_chosen = self._mark_chosen(logits)
        if self.routes:
            # The last steps are only of a resumed job.
            route = self.routes.get((self.step, int(name.split("/")[1])))
            if route is not None:
                is_chosen = self._mark_as_routed(logits.detach(), is_chosen, route)
        self._noted.setdefault(name, []).append((logits, is_chosen))
        gates = _compute_softmax(logits) * is_chosen
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
            both = zip(*parts, strict=True)
            logits, is_chosen = (torch.cat([one.flatten(0, 1) for one in each]) for each in both)
            of_rows = windows or [torch.arange(len(part)) for part, _ in parts]
            pairs = zip(of_rows, parts, strict=True)
            window = torch.cat([of.repeat_interleave(part.shape[1]) for of, (part, _) in pairs])
            if self.settings.balance == "batch":
                window = torch.zeros_like(window)
            load = _average(is_chosen, window) / self.settings.topk
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

    def _mark_as_routed(
        self, logits: torch.Tensor, is_chosen: torch.Tensor, route: Route
    ) -> torch.Tensor:
        """The choice of the other process for each token, found by the logits of the token."""
        their_logits, their_experts = route
        apart = torch.cdist(logits.flatten(0, 1), their_logits.to(logits.dtype))
        distance, nearest = apart.min(dim=1)
        theirs = F.one_hot(their_experts[nearest], self.settings.experts).sum(1).to(logits.dtype)
        theirs = theirs.view_as(logits)
        left = logits.masked_fill(theirs > 0, -torch.inf).amax(-1)
        taken = logits.masked_fill(theirs == 0, torch.inf).amin(-1)
        if max(distance.max(), (left - taken).max()) > _TIE:
            raise RoutingError(
                f"step {self.step}: logits differ by {distance.max():.1e}, and an expert was left "
                f"that is {(left - taken).max():.1e} likelier than a chosen one"
            )
        self.ties += int((theirs != is_chosen).any(-1).sum())
        return theirs


def _compute_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.exp() / logits.exp().sum(-1, keepdim=True)


def _average(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The mean of the values ``[n, E]`` of each group: ``[groups, E]``."""
    counts = torch.bincount(groups)
    sums = torch.zeros(len(counts), values.shape[1], dtype=values.dtype)
    return sums.index_add(0, groups, values) / counts[:, None]
