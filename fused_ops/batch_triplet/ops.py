# SPDX-License-Identifier: BSD-3-Clause
"""The op of csrc/batch_triplet as torch sees it: its fake kernel, and the gradient of the loss."""

import torch

from fused_ops._library import native
from fused_ops._support import accumulate_dtype, check_fallback
from fused_ops.batch_triplet import reference

MINING = ("all", "semihard", "hard")
DISTANCES = ("euclidean", "squared", "cosine")
REDUCTIONS = ("none", "mean", "mean_active", "sum")

if native is not None:
    batch_triplet = torch.ops.fused_ops.batch_triplet.default

    @torch.library.register_fake("fused_ops::batch_triplet")
    def _(
        embeddings, labels, references, reference_labels, weights, first_own, margin, mining,
        distance, reduction, soft, embeddings_grad, references_grad,
    ):  # fmt: skip
        accumulate = accumulate_dtype(embeddings.dtype)
        shape = embeddings.shape[:1] if reduction == REDUCTIONS.index("none") else ()
        return (
            embeddings.new_empty(shape, dtype=accumulate),
            embeddings.new_empty((len(reference.TOTALS),), dtype=torch.float64),
            embeddings.new_empty(embeddings.shape if embeddings_grad else (0,), dtype=accumulate),
            embeddings.new_empty(
                references.shape if references_grad and references is not None else (0,),
                dtype=accumulate,
            ),
        )


def numbers_of(settings: tuple) -> tuple:
    """The settings as the op takes them."""
    first_own, margin, mining, distance, reduction, soft = settings
    return (
        first_own,
        margin,
        MINING.index(mining),
        DISTANCES.index(distance),
        REDUCTIONS.index(reduction),
        soft,
    )


class BatchTripletFunction(torch.autograd.Function):
    """The fused loss with the fused gradient, which the forward forms for an upstream gradient 1.

    With one loss for each anchor only the backward knows what to weight them with, so it computes
    all again. A gradient that is to be differentiated itself is formed by the reference.
    `references` is None where the embeddings are their own.
    """

    @staticmethod
    def forward(ctx, embeddings, references, labels, reference_labels, settings):
        wanted = ctx.needs_input_grad[:2] if settings[4] != "none" else (False, False)
        loss, totals, *gradients = batch_triplet(
            embeddings, labels, references, reference_labels, None, *numbers_of(settings), *wanted
        )
        ctx.save_for_backward(embeddings, references, labels, reference_labels, *gradients)
        ctx.settings = settings
        ctx.mark_non_differentiable(totals)
        ctx.set_materialize_grads(False)  # no zeros for the totals
        return loss, totals

    @staticmethod
    def backward(ctx, grad_loss, _):
        embeddings, references, labels, reference_labels, *gradients = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        inputs = embeddings, references, labels, reference_labels
        if torch.is_grad_enabled():
            check_fallback("batch_triplet_loss", ["its gradient is to be differentiated"])
            gradients = _differentiable_gradients(grad_loss, inputs, wanted, ctx.settings)
            return *gradients, None, None, None
        if ctx.settings[4] == "none":
            _, _, *gradients = batch_triplet(
                embeddings, labels, references, reference_labels, grad_loss,
                *numbers_of(ctx.settings), *wanted,
            )  # fmt: skip
            grad_loss = 1
        found = [
            (gradient * grad_loss).to(embeddings.dtype) if needed else None
            for gradient, needed in zip(gradients, wanted, strict=True)
        ]
        return *found, None, None, None


def loss_in_torch(embeddings, references, labels, reference_labels, settings):
    """The reference, in the dtype that kernels accumulate in."""
    dtype = accumulate_dtype(embeddings.dtype)
    x = embeddings.to(dtype)
    if references is None:
        return reference.loss_and_totals(x, labels, x, labels, *settings)
    return reference.loss_and_totals(x, labels, references.to(dtype), reference_labels, *settings)


def _differentiable_gradients(grad_loss, inputs, wanted, settings):
    # Views stand for the inputs, so that one tensor given twice still gets two gradients.
    embeddings, references, labels, reference_labels = inputs
    views = [None if x is None else x.view_as(x) for x in (embeddings, references)]
    loss, _ = loss_in_torch(*views, labels, reference_labels, settings)
    chosen = [view for view, needed in zip(views, wanted, strict=True) if needed]
    gradients = iter(torch.autograd.grad(loss, chosen, grad_loss, create_graph=True))
    return [next(gradients) if needed else None for needed in wanted]
