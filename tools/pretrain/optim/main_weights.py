"""AdamW over fp32 main weights: gradients reduced in one bucket, clipped, stepped, checkpointed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from mcore.parallel import ProcessGroups, get_pg_size
from mcore.tensor import get_global_memory_buffer
from pretrain.model.experts import is_expert
from pretrain.model.stages import copy_marks, is_shared_embedding
from pretrain.model.tensor_parallel import has_partial_gradient, sum_partial_gradients
from pretrain.optim.adamw import AdamW, TrainingOptimizer, clip_to_norm
from pretrain.settings import Settings


class MainWeightOptimizer(TrainingOptimizer):
    """Keeps fp32 weights for a model of any precision and updates both.

    All ranks build it over their slices of the same model and call its methods together. ``dp_cp``
    replicas average gradients, ``expt_dp`` replicas average gradients of experts. ``tp`` ranks
    share the gradient norm, ``tp_ep_pp`` ranks share the norm of experts.
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
        numel = 1 if self._is_alone else sum(param.numel() for param in self.params) + 1
        self._num_partial = sum(p.numel() for p in self.params if has_partial_gradient(p))
        self._bucket = get_global_memory_buffer().get_tensor(
            (numel,), torch.float32, "pretrain_gradients", device=self.main[0].device
        )
        self._views = [] if self._is_alone else _split_bucket(self._bucket, self.params)
        num_expert = sum(p.numel() for p in self.params if is_expert(p))
        self._of_experts, self._dense = self._bucket[:num_expert], self._bucket[num_expert:]
        self._accumulated = 0
        self._is_filled = False

    def accumulate_gradients(self, *, is_whole: bool = True) -> None:
        """Add the model's gradients to the fp32 bucket and delete them. Call after each backward.

        On one rank in fp32 there is no bucket: gradients stay in ``param.grad``.
        """
        self._accumulated += is_whole
        if self._is_alone:
            return
        if self._is_filled:
            ready = [place for place, param in enumerate(self.params) if param.grad is not None]
            if ready:
                views = [self._views[place] for place in ready]
                torch._foreach_add_(views, [_get_gradient(self.params[place]) for place in ready])
        else:
            torch._foreach_copy_(self._views, [_get_gradient(param) for param in self.params])
        self._is_filled = True
        for param in self.params:
            param.grad = None

    def sum_of(self, param: torch.nn.Parameter) -> torch.Tensor:
        """The fp32 tensor in which the gradients of a parameter are accumulated."""
        return next(
            view for other, view in zip(self.params, self._views, strict=True) if other is param
        )

    def reduce_gradients(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Average gradients and loss over the accumulated micro-batches and over ``dp_cp``.

        One all-reduce over ``dp_cp`` of the bucket, with the loss as its last element. With
        sequence parallelism, one over ``tp`` of the partial gradients precedes it. Gradients of
        experts, which include the tokens of all ``ep`` ranks, are summed over ``expt_dp``. If two
        stages share the embedding, one over ``embd`` of its gradient follows.
        """
        if self._is_alone:
            return self._average_alone(loss_sum)
        self._bucket[-1] = loss_sum.detach()
        if self._num_partial:
            sum_partial_gradients([self._dense[: self._num_partial]], self.groups.tp)
        if get_pg_size(self.groups.dp_cp) > 1:
            dist.all_reduce(self._dense, group=self.groups.dp_cp)
        if len(self._of_experts) and get_pg_size(self.groups.expt_dp) > 1:
            dist.all_reduce(self._of_experts, group=self.groups.expt_dp)
        self._bucket /= self._accumulated * get_pg_size(self.groups.dp_cp)
        shared = [param for param in self.params if is_shared_embedding(param)]
        sum_partial_gradients([self.sum_of(param) for param in shared], self.groups.embd)
        for main, view in zip(self.main, self._views, strict=True):
            main.grad = view
        self._accumulated, self._is_filled = 0, False
        return self._bucket[-1].clone()

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


def _split_bucket(bucket: torch.Tensor, params: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    views, start = [], 0
    for param in params:
        views.append(bucket[start : start + param.numel()].view(param.shape))
        start += param.numel()
    return views
