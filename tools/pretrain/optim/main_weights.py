"""AdamW over fp32 main weights: gradients reduced, clipped, stepped and checkpointed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from mcore.parallel import ProcessGroups, get_pg_size
from mcore.tensor import get_global_memory_buffer
from pretrain.model.experts import is_expert
from pretrain.model.stages import copy_marks, is_shared_embedding
from pretrain.model.tensor_parallel import has_partial_gradient, sum_partial_gradients
from pretrain.optim.adamw import AdamW, TrainingOptimizer, clip_to_norm
from pretrain.settings import Settings

_LEAST_PART = 1 << 18  # elements of a reduction: smaller ones mostly cost their latency
_MOST_PARTS = 8
_TOO_LATE = (
    "a parameter got a gradient after its reduction had started: run one backward per micro-batch, "
    "use_reentrant=False in checkpoints, one optimizer per model, and none again after an error"
)


class MainWeightOptimizer(TrainingOptimizer):
    """Keeps fp32 weights for a model of any precision and updates both.

    All ranks build it over their slices of the same model and call its methods together. ``dp_cp``
    replicas average gradients, ``expt_dp`` replicas average gradients of experts. ``tp`` ranks
    share the gradient norm, ``tp_ep_pp`` ranks share the norm of experts. Without a pipeline the
    last backward of a step starts the reductions over ``dp_cp``.
    """

    def __init__(self, model: torch.nn.Module, groups: ProcessGroups, settings: Settings) -> None:
        self.groups = groups
        trained = [param for param in model.parameters() if param.requires_grad]
        # Experts first, then gradients to sum over tp: each kind is one piece of the bucket.
        order = sorted(trained, key=has_partial_gradient, reverse=True)
        self.params = sorted(order, key=is_expert, reverse=True)
        self.main = [_make_main_weight(param) for param in self.params]
        self.adamw = AdamW(self.main, settings)
        pairs = zip(self.params, self.main, strict=True)
        several = (groups.dp_cp, groups.expt_dp, groups.tp, groups.pp)
        self._is_alone = all(param is main for param, main in pairs) and not any(
            get_pg_size(group) > 1 for group in several
        )
        self._views: list[torch.Tensor] = []
        self._parts: list[tuple[range, torch.Tensor]] = []
        self._num_backwards = settings.num_microbatches
        if not self._is_alone:
            self._make_bucket(is_overlapped=get_pg_size(groups.dp_cp) > 1 and settings.pp == 1)
        self._start_step()

    def _make_bucket(self, *, is_overlapped: bool) -> None:
        """The bucket: experts, the loss, gradients to sum over tp, all others as in the model."""
        experts = sum(map(is_expert, self.params))
        head = sum(is_expert(param) or has_partial_gradient(param) for param in self.params)
        head = head if is_overlapped else len(self.params)
        sizes = [param.numel() for param in self.params]
        sizes.insert(experts, 1)
        ends = list(accumulate(sizes, initial=0))
        self._bucket = get_global_memory_buffer().get_tensor(
            (ends[-1],), torch.float32, "pretrain_gradients", device=self.main[0].device
        )
        pieces = list(torch.split(self._bucket, sizes))
        self._loss = pieces.pop(experts)
        self._views = [one.view(p.shape) for one, p in zip(pieces, self.params, strict=True)]
        self._of_experts, dense = self._bucket[: ends[experts]], self._bucket[ends[experts] :]
        self._head = self._bucket[ends[experts] : ends[head + 1]]
        self._partial = dense[1:][: sum(p.numel() for p in self.params if has_partial_gradient(p))]
        least, first = max(_LEAST_PART, len(dense) // _MOST_PARTS), head
        for place in range(head, len(self.params)):
            hook: Any = self.params[place].register_post_accumulate_grad_hook
            hook(partial(self._note, place))
            flat = self._bucket[ends[first + 1] : ends[place + 2]]
            if len(flat) >= least or place + 1 == len(self.params):
                self._parts.append((range(first, place + 1), flat))
                first = place + 1

    def _start_step(self) -> None:
        self._accumulated, self._is_filled = 0, False
        self._waiting, self._noted = list(self._parts), set[int]()
        self._reductions: list[dist.Work] = []

    def _note(self, place: int, _: torch.Tensor) -> None:
        """Reduce each part of the bucket as soon as the last backward has made its gradients.

        All ranks start the parts in one order, from the end of the model. Raises RuntimeError if a
        reduced gradient changes, as it would be lost.
        """
        if self._accumulated + 1 == self._num_backwards:
            if not any(place in places for places, _ in self._waiting):
                raise RuntimeError(_TOO_LATE)
            self._noted.add(place)
            while self._waiting and self._noted.issuperset(self._waiting[-1][0]):
                self._reduce_part()

    def _reduce_part(self) -> None:
        places, flat = self._waiting.pop()
        self._collect(places)
        self._reductions.append(dist.all_reduce(flat, group=self.groups.dp_cp, async_op=True))

    def accumulate_gradients(self, *, is_whole: bool = True) -> None:
        """Add the model's gradients to the fp32 bucket and delete them. Call after each backward.

        On one rank in fp32 there is no bucket: gradients stay in ``param.grad``.
        """
        self._accumulated += is_whole
        if not self._is_alone:
            started = sum(len(places) for places, _ in self._parts[len(self._waiting) :])
            self._collect(range(len(self.params) - started))
            self._is_filled = True

    def _collect(self, places: range) -> None:
        """Move the gradients of some parameters into the bucket."""
        filled = self._is_filled
        some = [place for place in places if not filled or self.params[place].grad is not None]
        if some:
            move = torch._foreach_add_ if filled else torch._foreach_copy_
            views = [self._views[one] for one in some]
            move(views, [_get_gradient(self.params[one]) for one in some])
        for place in some:
            self.params[place].grad = None

    def sum_of(self, param: torch.nn.Parameter) -> torch.Tensor:
        """The fp32 tensor in which the gradients of a parameter are accumulated."""
        return next(
            view for other, view in zip(self.params, self._views, strict=True) if other is param
        )

    def reduce_gradients(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Average gradients and loss over the accumulated micro-batches and over ``dp_cp``.

        All-reduces over ``dp_cp`` of the bucket's parts that the last backward has not started.
        The first part has the loss and, with sequence parallelism, the partial gradients, which
        one over ``tp`` sums before. Gradients of experts, which include the tokens of all ``ep``
        ranks, are summed over ``expt_dp``. If two stages share the embedding, one over ``embd``
        of its gradient follows.
        """
        if self._is_alone:
            return self._average_alone(loss_sum)
        self._loss.copy_(loss_sum.detach())
        while self._waiting:
            self._reduce_part()
        if len(self._partial):
            sum_partial_gradients([self._partial], self.groups.tp)
        rest = (self._head, self.groups.dp_cp), (self._of_experts, self.groups.expt_dp)
        for flat, group in rest:
            if len(flat) and get_pg_size(group) > 1:
                dist.all_reduce(flat, group=group)
        for reduction in self._reductions:
            reduction.wait()
        self._bucket /= self._accumulated * get_pg_size(self.groups.dp_cp)
        shared = [param for param in self.params if is_shared_embedding(param)]
        sum_partial_gradients([self.sum_of(param) for param in shared], self.groups.embd)
        for main, view in zip(self.main, self._views, strict=True):
            main.grad = view
        self._start_step()
        return self._loss.sum()  # a copy without its dimension

    def _average_alone(self, loss_sum: torch.Tensor) -> torch.Tensor:
        for param in self.params:
            param.grad = _get_gradient(param)
        count, self._accumulated = self._accumulated, 0
        if count > 1:
            torch._foreach_div_([_get_gradient(param) for param in self.params], count)
        return loss_sum.detach() / count

    def clip_gradients(self, limit: float) -> torch.Tensor:
        """Scale the gradients to a global norm of at most ``limit``.

        One all-reduce over ``pp`` and one over ``tp``.
        """
        gradients = [(main, main.grad) for main in self.main if main.grad is not None]
        return clip_to_norm(
            gradients, limit, tp_group=self.groups.tp, shard_groups=[self.groups.pp],
            expert_groups=[self.groups.tp_ep_pp],
        )  # fmt: skip

    def step(self, learning_rate: float, norm: torch.Tensor) -> None:
        """Update the main weights if the norm is finite, and copy them into the model."""
        super().step(learning_rate, norm)
        with torch.no_grad():
            for param, main in zip(self.params, self.main, strict=True):
                if param is not main:
                    param.copy_(main)

    def list_states(self, place: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The main weight and the moments of the parameter at a place."""
        main = self.main[place]
        if main is not self.params[place]:
            yield "main", main.detach()
        yield from self.adamw.moments(main)


def _make_main_weight(param: torch.nn.Parameter) -> torch.nn.Parameter:
    if param.dtype == torch.float32:
        return param
    main = torch.nn.Parameter(param.detach().float())
    copy_marks(main, param)
    return main


def _get_gradient(param: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad
