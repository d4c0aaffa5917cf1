"""A graph runner for tests, which records what is captured and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mcore.modules.graphs.checked import CheckedGraph, Replay
from mcore.modules.graphs.runner import GraphedCallable, GraphSpec

__all__ = ["RecordingRunner"]


class RecordingRunner:
    """Runs layers eagerly on any device and keeps a list of events.

    Inputs are checked as by a real runner, except ``requires_grad``, and a graph may be called
    again before its backward.

    Attributes:
        events: ``("capture", order, microbatch)`` for each spec, and ``("replay", order,
            microbatch, is_first_microbatch, shapes)`` for each call that passes the checks, where
            shapes are those of the positional, then of the keyword tensors.

    Example:
        >>> import torch
        >>> from mcore.modules.graphs import GraphSpec
        >>> layer = torch.nn.Linear(2, 2)
        >>> runner = RecordingRunner()
        >>> [graph] = runner.capture([GraphSpec(layer, layer.forward, (torch.ones(1, 2),))])
        >>> _ = graph(torch.ones(1, 2), is_first_microbatch=True)
        >>> runner.events
        [('capture', 0, 0), ('replay', 0, 0, True, ((1, 2),))]
    """

    name = "recording"

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def is_available(self, device: torch.device) -> bool:
        """Return True."""
        return True

    def capture(
        self,
        specs: Sequence[GraphSpec],
        *,
        num_warmup_iters: int = 3,
        allow_unused_input: bool = False,
    ) -> list[GraphedCallable]:
        """Record each spec and return a callable for it that runs ``spec.fn``."""
        graphs: list[GraphedCallable] = []
        for spec in specs:
            self.events.append(("capture", spec.order, spec.microbatch))
            graphs.append(CheckedGraph(spec, self._replay_of(spec), strict=False))
        return graphs

    def _replay_of(self, spec: GraphSpec) -> Replay:
        def replay(
            args: tuple[torch.Tensor, ...],
            kwargs: dict[str, torch.Tensor],
            controls: dict[str, Any],
        ) -> Any:
            shapes = tuple(tuple(tensor.shape) for tensor in (*args, *kwargs.values()))
            is_first = controls.get("is_first_microbatch")
            self.events.append(("replay", spec.order, spec.microbatch, is_first, shapes))
            return spec.fn(*args, **kwargs)

        return replay
