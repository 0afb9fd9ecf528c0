# SPDX-License-Identifier: BSD-3-Clause
"""The ops of csrc/triplet as torch sees them: fake kernels, and the gradient of the loss.

The gradient is a torch.autograd.Function in front of the ops, not an autograd kernel behind them:
the latter would stand in the way of every call, also of those that need no gradient.
"""

import torch

from fused_ops._library import native
from fused_ops._support import accumulate_dtype, check_fallback

NONE = 0  # torch's number of reduction="none"

if native is not None:
    STATE_COLUMNS = dict(zip(native.TRIPLET_NORMS, native.TRIPLET_STATE_COLUMNS, strict=True))

    forward = torch.ops.fused_ops.triplet_forward.default
    backward = torch.ops.fused_ops.triplet_backward.default

    @torch.library.register_fake("fused_ops::triplet_forward")
    def _(
        anchor, positive, negative, margin, p, eps, swap, reduction, float32_loss, save_state,
        form=-1,
    ):  # fmt: skip
        accumulate = accumulate_dtype(anchor.dtype)
        loss_shape = anchor.shape[:-1] if reduction == NONE else ()
        rows = anchor.numel() // anchor.shape[-1] if save_state else 0
        return (
            anchor.new_empty(loss_shape, dtype=accumulate if float32_loss else anchor.dtype),
            anchor.new_empty((rows, STATE_COLUMNS[p]), dtype=accumulate),
        )

    @torch.library.register_fake("fused_ops::triplet_backward")
    def _(
        grad_loss, anchor, positive, negative, state, p, eps, swap, reduction,
        anchor_needs_grad, positive_needs_grad, negative_needs_grad, form=-1,
    ):  # fmt: skip
        needs_grad = (anchor_needs_grad, positive_needs_grad, negative_needs_grad)
        return tuple(anchor.new_empty(anchor.shape if needed else (0,)) for needed in needs_grad)


class TripletMarginLossFunction(torch.autograd.Function):
    """The fused loss with the fused gradient.

    A gradient that is to be differentiated itself (create_graph=True) is formed by PyTorch, from
    torch's own triplet_margin_loss.
    """

    @staticmethod
    def forward(ctx, anchor, positive, negative, margin, p, eps, swap, reduction, float32_loss):
        loss, state = forward(
            anchor, positive, negative, margin, p, eps, swap, reduction, float32_loss, True
        )
        ctx.save_for_backward(anchor, positive, negative, state)
        ctx.settings = margin, p, eps, swap, reduction
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        *inputs, state = ctx.saved_tensors
        _, p, eps, swap, reduction = ctx.settings
        needs_grad = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            check_fallback("triplet_margin_loss", ["its gradient is to be differentiated"])
            gradients = _differentiable_gradients(grad_loss, inputs, needs_grad, ctx.settings)
        else:
            gradients = backward(grad_loss, *inputs, state, p, eps, swap, reduction, *needs_grad)
        wanted = (
            gradient if needed else None
            for gradient, needed in zip(gradients, needs_grad, strict=True)
        )
        return *wanted, None, None, None, None, None, None


def _differentiable_gradients(grad_loss, inputs, needs_grad, settings):
    # Views stand for the inputs, so that one tensor given twice still gets two gradients.
    views = [tensor.view_as(tensor) for tensor in inputs]
    # Under autocast the loss has the gradient's wider dtype.
    loss = torch.triplet_margin_loss(*(view.to(grad_loss.dtype) for view in views), *settings)
    wanted = [view for view, needed in zip(views, needs_grad, strict=True) if needed]
    gradients = iter(torch.autograd.grad(loss, wanted, grad_loss, create_graph=True))
    return [next(gradients) if needed else None for needed in needs_grad]
