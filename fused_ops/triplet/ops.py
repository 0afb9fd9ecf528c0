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
    forward = torch.ops.fused_ops.triplet_forward.default
    backward = torch.ops.fused_ops.triplet_backward.default
    forward_with_gradients = torch.ops.fused_ops.triplet_forward_with_gradients.default
    correct_gradients = torch.ops.fused_ops.triplet_correct_gradients.default

    @torch.library.register_fake("fused_ops::triplet_forward")
    def _(
        anchor, positive, negative, margin, p, eps, swap, reduction, float32_loss, save_state,
        form=-1,
    ):  # fmt: skip
        return _fake_forward(anchor, p, swap, reduction, float32_loss, save_state)

    @torch.library.register_fake("fused_ops::triplet_forward_with_gradients")
    def _(
        anchor, positive, negative, margin, p, eps, swap, reduction, float32_loss,
        anchor_needs_grad, positive_needs_grad, negative_needs_grad, form=-1,
    ):  # fmt: skip
        needs_grad = anchor_needs_grad, positive_needs_grad, negative_needs_grad
        return (
            *_fake_forward(anchor, p, swap, reduction, float32_loss, True),
            *_fake_gradients(anchor, needs_grad),
        )

    @torch.library.register_fake("fused_ops::triplet_backward")
    def _(
        grad_loss, anchor, positive, negative, state, margin, p, eps, swap, reduction,
        anchor_needs_grad, positive_needs_grad, negative_needs_grad, form=-1,
    ):  # fmt: skip
        needs_grad = anchor_needs_grad, positive_needs_grad, negative_needs_grad
        return _fake_gradients(anchor, needs_grad)

    @torch.library.register_fake("fused_ops::triplet_correct_gradients")
    def _(
        grad_loss, anchor, positive, negative, state, margin, p, eps, swap, reduction,
        grad_anchor, grad_positive, grad_negative, form=-1,
    ):  # fmt: skip
        pass

    def _fake_forward(anchor, p, swap, reduction, float32_loss, save_state):
        accumulate = accumulate_dtype(anchor.dtype)
        loss_shape = anchor.shape[:-1] if reduction == NONE else ()
        loss = anchor.new_empty(loss_shape, dtype=accumulate if float32_loss else anchor.dtype)
        elements = 0
        if save_state:
            header, columns = native.triplet_state_layout(p, swap, accumulate.itemsize)
            elements = header + anchor.numel() // anchor.shape[-1] * columns
        return loss, anchor.new_empty((elements,), dtype=accumulate)

    def _fake_gradients(anchor, needs_grad):
        return tuple(anchor.new_empty(anchor.shape if needed else (0,)) for needed in needs_grad)


class set_gradients_in_forward:
    """Sets whether the forward of a loss forms its gradients too, in the whole process.

    Call it for good, or use it as a context manager that restores the former setting. Enabled, as
    it is at start, a training step on CUDA reads its inputs once rather than twice: the forward
    forms the gradients while it holds the rows, for the upstream gradient last seen, and the
    backward forms them again only where that was another. Disabled, all is left to the backward,
    so that between the two no memory is held for gradients. The gradients are the same to the bit.

    Without effect on the CPU, inside torch.compile, on rows of more than 64 KiB, and where
    saved-tensor hooks are active, as under activation checkpointing: there the backward forms them.

    Args:
        enabled: True or False.
    """

    enabled = True

    def __init__(self, enabled: bool) -> None:
        self.former = set_gradients_in_forward.enabled
        set_gradients_in_forward.enabled = bool(enabled)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        set_gradients_in_forward.enabled = self.former


def forms_gradients_in_forward(anchor: torch.Tensor) -> bool:
    """Whether the forward of a call that needs gradients forms them."""
    return (
        set_gradients_in_forward.enabled
        and anchor.is_cuda
        and anchor.shape[-1] * anchor.element_size() <= native.TRIPLET_LONGEST_HELD_ROW
        and not torch.compiler.is_compiling()
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    )


class TripletMarginLossFunction(torch.autograd.Function):
    """The fused loss with the fused gradient.

    A gradient that is to be differentiated itself (create_graph=True) is formed by PyTorch, from
    torch's own triplet_margin_loss.
    """

    @staticmethod
    def forward(
        ctx, anchor, positive, negative, margin, p, eps, swap, reduction, float32_loss, in_forward
    ):
        arguments = anchor, positive, negative, margin, p, eps, swap, reduction, float32_loss
        if in_forward:
            loss, state, *ctx.gradients = forward_with_gradients(
                *arguments, *ctx.needs_input_grad[:3]
            )
        else:
            loss, state = forward(*arguments, True)
            ctx.gradients = None
        ctx.save_for_backward(anchor, positive, negative, state)
        ctx.settings = margin, p, eps, swap, reduction
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        *inputs, state = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[:3]
        # Given away, so that .grad may keep them without a copy; a second backward forms new ones.
        gradients, ctx.gradients = ctx.gradients, None
        if torch.is_grad_enabled():
            check_fallback("triplet_margin_loss", ["its gradient is to be differentiated"])
            gradients = _differentiable_gradients(grad_loss, inputs, needs_grad, ctx.settings)
        elif gradients is None or torch._C._functorch.is_legacy_batchedtensor(grad_loss):
            # The latter under is_grads_batched=True: several gradients, which one buffer cannot be.
            gradients = backward(grad_loss, *inputs, state, *ctx.settings, *needs_grad)
        else:
            correct_gradients(grad_loss, *inputs, state, *ctx.settings, *gradients)
        wanted = (
            gradient if needed else None
            for gradient, needed in zip(gradients, needs_grad, strict=True)
        )
        return *wanted, None, None, None, None, None, None, None


def _differentiable_gradients(grad_loss, inputs, needs_grad, settings):
    # Views stand for the inputs, so that one tensor given twice still gets two gradients.
    views = [tensor.view_as(tensor) for tensor in inputs]
    # Under autocast the loss has the gradient's wider dtype.
    loss = torch.triplet_margin_loss(*(view.to(grad_loss.dtype) for view in views), *settings)
    wanted = [view for view, needed in zip(views, needs_grad, strict=True) if needed]
    gradients = iter(torch.autograd.grad(loss, wanted, grad_loss, create_graph=True))
    return [next(gradients) if needed else None for needed in needs_grad]
