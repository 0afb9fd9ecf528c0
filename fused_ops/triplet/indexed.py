# SPDX-License-Identifier: BSD-3-Clause
"""The loss of triplets given by the rows of one tensor: the public function and its ops."""

import torch

from fused_ops._library import native
from fused_ops._support import (
    Dispatch,
    accumulate_dtype,
    check_fallback,
    explains,
    name_of,
    needs_grad,
    tensor_reasons,
    unplain_reason,
)
from fused_ops.triplet.function import check_settings, in_torch, option_reasons, rows_are_whole
from fused_ops.triplet.ops import NONE

if native is not None:
    forward = torch.ops.fused_ops.triplet_indexed_forward.default
    backward = torch.ops.fused_ops.triplet_indexed_backward.default

    @torch.library.register_fake("fused_ops::triplet_indexed_forward")
    def _(embeddings, indices, margin, p, eps, swap, reduction, float32_loss, save_state):
        accumulate = accumulate_dtype(embeddings.dtype)
        triplets = indices.shape[1]
        loss = embeddings.new_empty(
            (triplets,) if reduction == NONE else (),
            dtype=accumulate if float32_loss else embeddings.dtype,
        )
        elements = 0
        if save_state:
            header, columns = native.triplet_state_layout(p, swap, accumulate.itemsize)
            elements = header + triplets * columns
        return loss, embeddings.new_empty((elements,), dtype=accumulate)

    @torch.library.register_fake("fused_ops::triplet_indexed_backward")
    def _(grad_loss, embeddings, indices, state, margin, p, eps, swap, reduction, share=0):
        return embeddings.new_empty(embeddings.shape)


def reference(
    embeddings, anchor_index, positive_index, negative_index, margin=1.0, p=2.0, eps=1e-6,
    swap=False, reduction="mean",
) -> torch.Tensor:  # fmt: skip
    """What :func:`triplet_margin_loss_indexed` computes, of rows that are gathered first."""
    indices = anchor_index, positive_index, negative_index
    return in_torch(*(embeddings[index] for index in indices), margin, p, eps, swap, reduction)


def triplet_margin_loss_indexed(
    embeddings: torch.Tensor,
    anchor_index: torch.Tensor,
    positive_index: torch.Tensor,
    negative_index: torch.Tensor,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> torch.Tensor:
    """Triplet margin loss of triplets that are given by row numbers, as mining finds them.

    The values, gradients and errors of ``triplet_margin_loss(embeddings[anchor_index],
    embeddings[positive_index], embeddings[negative_index], ...)``, see
    :func:`fused_ops.triplet_margin_loss`, but nothing is gathered: the kernels read the rows where
    they are. For T triplets memory is O(T + embeddings), not O(T * dim), forward and backward.

    Fused kernels run on CPU and CUDA for float16, bfloat16, float32 and float64 (16-bit is
    accumulated in float32), p of 1, 2 and inf, and first-order gradients. Everything else is
    gathered and runs in PyTorch; :func:`fused_ops.explain` tells which and why,
    :func:`fused_ops.set_fallback` can forbid it. No triplets at all are such a case: their mean is
    NaN, as that of the gathered call is.

    Results are bitwise the same from run to run, also the gradient of a row that many triplets
    share: its summands are added in the order of the triplets, without atomics.

    Args:
        embeddings: (N, dim), floating point.
        anchor_index: (T,), int64 or int32, rows of ``embeddings``; below 0 they count from the end.
            Any shape will do that the three have in common.
        positive_index: (T,), as ``anchor_index``.
        negative_index: (T,), as ``anchor_index``.
        margin: positive number. Default: 1.0
        p: norm degree of the distance. Default: 2.0
        eps: added to each (signed) difference. Default: 1e-6
        swap: take the smaller of d(anchor, negative) and d(positive, negative). Default: False
        reduction: "none" (a loss for each triplet), "mean" or "sum" over all. Default: "mean"

    Returns:
        A tensor () or, with reduction "none", (T,). It has the dtype of ``embeddings``; under
        autocast float32 where that is a 16-bit one.

    Raises:
        IndexError: an index is out of range. On CUDA that is found on the device, which as with
            torch's own indexing is a failed assertion after which the process can no longer use it.
        ValueError: ``margin`` is not positive, or ``reduction`` is none of the above.
        FallbackError: the kernels do not take the call and ``set_fallback("error")`` is in force.
    """
    reduction_number = check_settings(margin, reduction)
    settings = margin, p, eps, swap, reduction
    indices = anchor_index, positive_index, negative_index
    reasons = _reasons(embeddings, indices, margin, p, eps, swap)
    if reasons:
        loss = reference(embeddings, *indices, *settings)
        # Afterwards, so that what PyTorch refuses too is refused in its words.
        check_fallback("triplet_margin_loss_indexed", reasons)
        return loss
    stacked = torch.stack(indices).reshape(3, -1).long()
    if not embeddings.is_cuda and _out_of_range(stacked, len(embeddings)):
        return reference(embeddings, *indices, *settings)  # which says what is wrong
    # As torch's autocast list has it: computed and returned in float32.
    float32_loss = torch.is_autocast_enabled(embeddings.device.type)
    numbers = margin, p, eps, swap, reduction_number, float32_loss
    if needs_grad(embeddings):
        loss = TripletMarginLossIndexedFunction.apply(embeddings, stacked, *numbers)
    else:
        loss = forward(embeddings, stacked, *numbers, False)[0]
    return loss.reshape(anchor_index.shape) if reduction_number == NONE else loss


def _reasons(embeddings, indices, margin, p, eps, swap) -> list[str]:
    """Why the kernels do not take a call; empty where they do."""
    reasons = tensor_reasons(embeddings)
    if reasons:
        return reasons
    for index in indices:
        if why := unplain_reason(index):
            return [why]
    shapes = [tuple(index.shape) for index in indices]
    if not shapes[0] == shapes[1] == shapes[2]:
        reasons.append(f"shapes of the indices {', '.join(map(str, shapes))} differ")
    for index in indices:
        if index.dtype not in (torch.int64, torch.int32):
            reasons.append(f"dtype {index.dtype} of an index (kernels take int32, int64)")
        if index.device != embeddings.device:
            reasons.append(f"mixed devices {embeddings.device} and {index.device}")
    if embeddings.dim() != 2:
        reasons.append(f"embeddings of {embeddings.dim()} dimensions (kernels take 2)")
    if embeddings.numel() == 0 or indices[0].numel() == 0:
        reasons.append("no embeddings or no triplets")
    return reasons + option_reasons((embeddings,), margin, p, eps, swap)


def _out_of_range(indices: torch.Tensor, count: int) -> bool:
    # Neither the compiler nor a fake tensor has values; the op looks at them too.
    if torch.compiler.is_compiling() or type(indices) is not torch.Tensor:
        return False
    low, high = indices.aminmax()
    return bool(low < -count) or bool(high >= count)


class TripletMarginLossIndexedFunction(torch.autograd.Function):
    """The fused loss with the fused gradient.

    A gradient that is to be differentiated itself (create_graph=True) is formed by PyTorch, from
    gathered rows.
    """

    @staticmethod
    def forward(ctx, embeddings, indices, margin, p, eps, swap, reduction, float32_loss):
        settings = margin, p, eps, swap, reduction
        loss, state = forward(embeddings, indices, *settings, float32_loss, True)
        ctx.save_for_backward(embeddings, indices, state)
        ctx.settings = settings
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        embeddings, indices, state = ctx.saved_tensors
        if torch.is_grad_enabled():
            check_fallback("triplet_margin_loss_indexed", ["its gradient is to be differentiated"])
            gradient = _differentiable_gradient(grad_loss, embeddings, indices, ctx.settings)
        else:
            gradient = backward(grad_loss, embeddings, indices, state, *ctx.settings)
        return gradient, None, None, None, None, None, None, None


def _differentiable_gradient(grad_loss, embeddings, indices, settings):
    view = embeddings.view_as(embeddings)
    # Under autocast the loss has the gradient's wider dtype.
    gathered = view.to(grad_loss.dtype)[indices].unbind()
    loss = torch.triplet_margin_loss(*gathered, *settings)
    (gradient,) = torch.autograd.grad(loss, view, grad_loss, create_graph=True)
    return gradient


@explains(triplet_margin_loss_indexed)
def _explain(
    embeddings, anchor_index, positive_index, negative_index, margin=1.0, p=2.0, eps=1e-6,
    swap=False, reduction="mean",
) -> Dispatch:  # fmt: skip
    check_settings(margin, reduction)
    indices = anchor_index, positive_index, negative_index
    reasons = tuple(_reasons(embeddings, indices, margin, p, eps, swap))
    if reasons:
        return Dispatch("triplet_margin_loss_indexed", "pytorch", reasons=reasons)
    details = {"device": embeddings.device.type, "dtype": name_of(embeddings.dtype)}
    if embeddings.is_cuda:
        device = torch.cuda.get_device_properties(embeddings.device)
        details |= native.triplet_indexed_policy(
            triplets=anchor_index.numel(),
            dim=embeddings.shape[1],
            element_size=embeddings.element_size(),
            whole=rows_are_whole(embeddings),
            multiprocessors=device.multi_processor_count,
        )
    return Dispatch("triplet_margin_loss_indexed", "fused", details)
