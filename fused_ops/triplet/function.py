# SPDX-License-Identifier: BSD-3-Clause
"""The public function and module."""

import torch
from torch.nn import _reduction as _Reduction
from torch.nn.functional import triplet_margin_loss as reference
from torch.overrides import handle_torch_function, has_torch_function

from fused_ops._library import native
from fused_ops._support import (
    Dispatch,
    check_fallback,
    explains,
    gradient_reasons,
    name_of,
    needs_grad,
    tensor_reasons,
)
from fused_ops.triplet import ops

_NORMS = frozenset(native.TRIPLET_NORMS) if native else frozenset()


def _reasons(anchor, positive, negative, margin, p, eps, swap) -> list[str]:
    """Why the kernels do not take a call; empty where they do."""
    reasons = tensor_reasons(anchor, positive, negative)
    if reasons:
        return reasons
    if not (anchor.shape == positive.shape == negative.shape):
        reasons.append(
            f"shapes {tuple(anchor.shape)}, {tuple(positive.shape)}, {tuple(negative.shape)} differ"
        )
    if anchor.dim() == 0 or anchor.numel() == 0:
        reasons.append("empty or 0-dimensional inputs")
    return reasons + option_reasons((anchor, positive, negative), margin, p, eps, swap)


def option_reasons(tensors, margin, p, eps, swap) -> list[str]:
    """Why the kernels do not take the options of a call, or its tensors' gradients."""
    reasons = []
    if not (
        isinstance(margin, (int, float)) and isinstance(eps, (int, float)) and type(swap) is bool
    ):
        reasons.append("margin and eps are no plain numbers, or swap is no bool")
    reasons += gradient_reasons(*tensors)
    if not isinstance(p, (int, float)) or p not in _NORMS:
        reasons.append(f"p={p} (kernels take {', '.join(map(str, sorted(_NORMS)))})")
    return reasons


def check_settings(margin, reduction, size_average=None, reduce=None) -> int:
    """Raises what PyTorch does for these; the number of the reduction."""
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)
    number = _Reduction.get_enum(reduction)
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    return number


def triplet_margin_loss(
    anchor: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    r"""Triplet margin loss, a drop-in for :func:`torch.nn.functional.triplet_margin_loss`.

    For each row, with distances :math:`d(x, y) = \lVert x - y + \mathrm{eps} \rVert_p` over the
    last dimension, the loss is

    .. math:: \max(d(anchor, positive) - d(anchor, negative) + margin, 0)

    Fused kernels run on CPU and CUDA for equal shapes and dtypes (float16, bfloat16, float32,
    float64), p of 1, 2 and inf, and first-order gradients. Everything else runs in PyTorch;
    :func:`fused_ops.explain` tells which and why, :func:`fused_ops.set_fallback` can forbid it.

    It differs from torch's function in rounding, and where that is the better result:

    - float16 and bfloat16 inputs are accumulated in float32 and rounded once, at the end;
    - a row with zero loss has zero gradient, also where it holds inf (torch gives NaN).

    Results are bitwise the same from run to run.

    Args:
        anchor: (..., dim), floating point.
        positive: (..., dim), same class as the anchor's rows.
        negative: (..., dim), other classes than the anchor's rows.
        margin: positive number. Default: 1.0
        p: norm degree of the distance. Default: 2
        eps: added to each (signed) difference. Default: 1e-6
        swap: take the smaller of d(anchor, negative) and d(positive, negative), the distance swap
            of Balntas et al., "Learning shallow convolutional feature descriptors with triplet
            losses" (BMVC 2016). Default: False
        size_average: deprecated, see ``reduction``.
        reduce: deprecated, see ``reduction``.
        reduction: "none" (a loss for each row), "mean" or "sum" over all rows. Default: "mean"

    Returns:
        A tensor () or, with reduction "none", (...). It has the inputs' dtype; under autocast
        float32 for 16-bit inputs.

    Raises:
        ValueError: ``margin`` is not positive, or ``reduction`` is none of the above.
        RuntimeError: the inputs differ in their number of dimensions or cannot be broadcast.
        FallbackError: the kernels do not take the call and ``set_fallback("error")`` is in force.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.TripletMarginLoss.html
    """
    reduction_number = check_settings(margin, reduction, size_average, reduce)
    reasons = _reasons(anchor, positive, negative, margin, p, eps, swap)
    if reasons:
        reduction = ("none", "mean", "sum")[reduction_number]
        loss = in_torch(anchor, positive, negative, margin, p, eps, swap, reduction)
        # Afterwards, so that what PyTorch refuses too is refused in its words.
        check_fallback("triplet_margin_loss", reasons)
        return loss
    # As torch's autocast list has it: computed and returned in float32.
    float32_loss = torch.is_autocast_enabled(anchor.device.type)
    settings = margin, p, eps, swap, reduction_number, float32_loss
    if needs_grad(anchor, positive, negative):
        in_forward = ops.forms_gradients_in_forward(anchor)
        return ops.TripletMarginLossFunction.apply(
            anchor, positive, negative, *settings, in_forward
        )
    return ops.forward(anchor, positive, negative, *settings, False)[0]


def in_torch(anchor, positive, negative, margin, p, eps, swap, reduction) -> torch.Tensor:
    settings = {"margin": margin, "p": p, "eps": eps, "swap": swap, "reduction": reduction}
    tensors = anchor, positive, negative
    if has_torch_function(tensors):
        # Here, for torch's function passes on what its name stands for, which may be ours by now.
        return handle_torch_function(reference, tensors, *tensors, **settings)
    return reference(*tensors, **settings)


class TripletMarginLoss(torch.nn.TripletMarginLoss):
    """Module form of :func:`fused_ops.triplet_margin_loss`, a drop-in for
    :class:`torch.nn.TripletMarginLoss` with the same arguments, defaults and errors.

    Shapes, dtypes and what runs fused are those of the function.
    """

    def forward(
        self, anchor: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor
    ) -> torch.Tensor:
        return triplet_margin_loss(
            anchor,
            positive,
            negative,
            margin=self.margin,
            p=self.p,
            eps=self.eps,
            swap=self.swap,
            reduction=self.reduction,
        )


@explains(triplet_margin_loss)
def _explain(
    anchor, positive, negative, margin=1.0, p=2, eps=1e-6, swap=False, size_average=None,
    reduce=None, reduction="mean",
) -> Dispatch:  # fmt: skip
    check_settings(margin, reduction, size_average, reduce)
    reasons = tuple(_reasons(anchor, positive, negative, margin, p, eps, swap))
    if reasons:
        return Dispatch("triplet_margin_loss", "pytorch", reasons=reasons)
    details = {"device": anchor.device.type, "dtype": name_of(anchor.dtype)}
    if anchor.device.type == "cuda":
        dim = anchor.shape[-1]
        device = torch.cuda.get_device_properties(anchor.device)
        details |= native.triplet_policy(
            rows=anchor.numel() // dim,
            dim=dim,
            element_size=anchor.element_size(),
            whole=all(map(rows_are_whole, (anchor, positive, negative))),
            packed=all(map(_rows_are_packed, (anchor, positive, negative))),
            multiprocessors=device.multi_processor_count,
            shared_memory=device.shared_memory_per_block_optin,
        )
        if needs_grad(anchor, positive, negative):
            details["gradients_in_forward"] = ops.forms_gradients_in_forward(anchor)
    return Dispatch("triplet_margin_loss", "fused", details)


def _rows_are_packed(tensor: torch.Tensor) -> bool:
    """Whether rows lie one behind another from a 16-byte boundary on."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def rows_are_whole(tensor: torch.Tensor) -> bool:
    """Whether rows start and end on 16-byte boundaries."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    distance = rows.stride(0) if len(rows) > 1 else 0
    elements = rows.shape[-1], distance
    return rows.data_ptr() % 16 == 0 and all(n * rows.element_size() % 16 == 0 for n in elements)
