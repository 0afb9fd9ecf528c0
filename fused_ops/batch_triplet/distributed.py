# SPDX-License-Identifier: BSD-3-Clause
"""The batch triplet loss of a batch whose rows are spread over processes.

Every process gathers all embeddings and labels, mines for its own anchors among all rows, and adds
up with the others the loss and what each row's gradient gets from anchors elsewhere.
"""

from __future__ import annotations  # a torch without distributed has no ProcessGroup

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from fused_ops._shards import Shards
from fused_ops._support import accumulate_dtype, check_fallback
from fused_ops.batch_triplet import function, ops
from fused_ops.batch_triplet.reference import TOTALS


def batch_triplet_loss(
    embeddings: torch.Tensor,
    labels: torch.Tensor,
    margin: float = 0.2,
    mining: str = "all",
    distance: str = "euclidean",
    reduction: str = "mean",
    soft: bool = False,
    return_stats: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
    counts: Sequence[int] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, function.BatchTripletStats]:
    """`fused_ops.batch_triplet_loss` of the batch that the processes hold together.

    All processes call it together, with the same settings and dtype, and all with gradients or all
    without. Each receives the loss of the whole batch, the same bits everywhere, and for its own
    embeddings the gradient that one process with all rows would compute, but for rounding.

    The gradients of a model's parameters are then those of the whole batch once they are summed
    over the processes. DistributedDataParallel takes their mean: multiply the loss by the number of
    processes before its backward.

    Args:
        embeddings: this process's rows, (A of the process, dim). A may be zero in some.
        labels: their labels, (A of the process,), integers that mean the same everywhere.
        margin: as in `fused_ops.batch_triplet_loss`. Default: 0.2
        mining: as there. Default: "all"
        distance: as there. Default: "euclidean"
        reduction: "mean", "mean_active" or "sum" over the whole batch. Default: "mean"
        soft: as there. Default: False
        return_stats: return the statistics of the whole batch too. Default: False
        group: the processes, of any backend that takes the embeddings' device. Default: all
        counts: how many rows each process has, in the order of ranks. By default the processes
            tell each other, for which the host waits; given, nothing waits.

    Returns:
        As `fused_ops.batch_triplet_loss`. The gradient cannot be differentiated itself.

    Raises:
        TypeError: as `fused_ops.batch_triplet_loss`.
        ValueError: as there, or reduction "none"; ``counts`` is not one number for each process, or
            not this process's; the processes differ in dim.
        FallbackError: the kernels do not take the call and ``set_fallback("error")`` is in force.
    """
    function.check(embeddings, labels, margin, mining, distance, reduction, soft, None, None)
    if reduction == "none":
        raise ValueError('reduction: expected "mean", "mean_active" or "sum", got "none"')
    shards = Shards("embeddings", embeddings, group, counts)
    if distance == "cosine":
        embeddings = function.unit(embeddings)
    settings = shards.first, float(margin), mining, distance, reduction, bool(soft)
    loss, totals = _GatheredLoss.apply(embeddings, labels.long(), settings, shards)
    return (loss, function.stats(totals)) if return_stats else loss


class _GatheredLoss(torch.autograd.Function):
    """The loss with the gradient, which the forward forms for an upstream gradient of 1."""

    @staticmethod
    def forward(ctx, embeddings, labels, settings, shards):
        wanted = ctx.needs_input_grad[0]
        everyone = shards.gather(embeddings)
        everyones_labels = shards.gather(labels[:, None])[:, 0]
        *others, reduction, soft = settings
        totals, own, shared = _sums(
            embeddings, labels, everyone, everyones_labels, (*others, "sum", soft), wanted
        )
        dist.all_reduce(totals, group=shards.group)
        loss, items, active = totals[:3].unbind()
        scale = torch.ones_like(loss)
        if reduction != "sum":
            scale /= (items if reduction == "mean" else active).clamp_min(1)
        if wanted:
            dist.all_reduce(shared, group=shards.group)
            own = own + shared[shards.first : shards.first + len(own)]
            ctx.save_for_backward(own * scale.to(own.dtype))
        ctx.dtype = embeddings.dtype
        ctx.mark_non_differentiable(totals)
        return (loss * scale).to(accumulate_dtype(embeddings.dtype)), totals

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_loss).to(ctx.dtype), None, None, None


def _sums(embeddings, labels, everyone, everyones_labels, settings, wanted):
    """The totals of this process's anchors, and the gradient of their sum of losses for the anchors
    and for everyone."""
    dtype = accumulate_dtype(embeddings.dtype)
    if embeddings.numel() == 0:
        totals = torch.zeros(len(TOTALS), dtype=torch.float64, device=embeddings.device)
        return totals, embeddings.to(dtype), torch.zeros_like(everyone, dtype=dtype)
    tensors = embeddings, labels, everyone, everyones_labels
    if why := function.reasons(embeddings, labels, everyone, everyones_labels):
        check_fallback("distributed.batch_triplet_loss", why)
        with torch.enable_grad():
            x, y = (rows.detach().requires_grad_() for rows in (embeddings, everyone))
            loss, totals = ops.loss_in_torch(x, y, labels, everyones_labels, settings)
            gradients = torch.autograd.grad(loss, (x, y)) if wanted else (None, None)
    else:
        _, totals, *gradients = ops.batch_triplet(
            *tensors, None, *ops.numbers_of(settings), wanted, wanted
        )
    return totals, *gradients
