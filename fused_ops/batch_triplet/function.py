# SPDX-License-Identifier: BSD-3-Clause
"""The public function and module."""

import numbers
from typing import NamedTuple

import torch

from fused_ops._support import (
    Dispatch,
    accumulate_dtype,
    check_fallback,
    check_floating,
    explains,
    gradient_reasons,
    name_of,
    tensor_reasons,
    unplain_reason,
)
from fused_ops.batch_triplet import ops
from fused_ops.batch_triplet.reference import unit_rows


class BatchTripletStats(NamedTuple):
    """What `batch_triplet_loss` found, as 0-dim float64 tensors on the embeddings' device.

    Attributes:
        active_fraction: share of the valid triplets, pairs or anchors whose loss is above zero.
        positive_distance: mean distance of the positives: over all pairs of "all", else over those
            that were mined. NaN where there are none, or where one is NaN.
        negative_distance: the same of the negatives.
    """

    active_fraction: torch.Tensor
    positive_distance: torch.Tensor
    negative_distance: torch.Tensor


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
    reference_embeddings: torch.Tensor | None = None,
    reference_labels: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, BatchTripletStats]:
    r"""Triplet loss over the triplets that a batch holds, found and weighed inside the kernels.

    Row i is an anchor; its positives p are the other rows with its label, its negatives n the rows
    with another. With :math:`l(p, n) = \max(d_{ip} - d_{in} + margin, 0)`, an anchor that has both
    contributes, by ``mining``,

    ========== ===================================================================================
    "all"      l of every positive with every negative
    "semihard" for each positive, l with the nearest negative that is farther than it, or where
               there is none with the farthest negative
    "hard"     l of the farthest positive with the nearest negative
    ========== ===================================================================================

    Of equal distances the row that comes first counts. No tensor of triplets is formed: "all" takes
    O(A * M * log M) time after the distances, and memory for a block of rows of their matrix.

    Distances come from a product of matrices around the mean row, under PyTorch's switches for TF32
    as any product, and from differences of the rows where the product would lose their digits, so
    that equal rows are at distance 0, where the gradient is 0. A row with NaN gives NaN. Float16
    and bfloat16 are computed in float32. Results are bitwise the same from run to run.

    Args:
        embeddings: (A, dim), floating point: the anchors.
        labels: (A,), integers, on the embeddings' device.
        margin: a number. Default: 0.2
        mining: "all", "semihard" or "hard". Default: "all"
        distance: "euclidean" (no eps is added), "squared" (of the euclidean) or "cosine" (1 - cos
            of the angle; a row of zeros counts as at 1/2 from others). Default: "euclidean"
        reduction: "mean" over the valid triplets ("all"), pairs of anchor and positive
            ("semihard") or anchors ("hard"); "mean_active" over those whose loss is above zero;
            "sum"; or "none": the sum of each anchor. Without any the loss is 0. Default: "mean"
        soft: softplus(d_ip - d_in + margin) in place of the maximum, not with "all", where it
            would need every triplet. Default: False
        return_stats: return `BatchTripletStats` too. Default: False
        reference_embeddings: (M, dim), like the embeddings: the rows among which positives and
            negatives are sought, such as a memory bank. Nothing is left out: where a reference is
            the anchor itself, it is a positive at distance 0. Gradients reach it. Default: the
            embeddings, each without the anchor itself
        reference_labels: (M,), integers; given together with ``reference_embeddings``.

    Returns:
        A tensor () or, with reduction "none", (A,): float64 for float64, else float32. With
        ``return_stats`` a pair of it and the statistics, for which nothing waits.

    Raises:
        TypeError: embeddings are not floating point, labels not integers, ``margin`` no number.
        ValueError: a shape or device that does not fit; references of another dtype, or without
            their labels; an unknown mining, distance or reduction; ``soft`` with "all"; a margin
            that is NaN.
        FallbackError: the kernels do not take the call and ``set_fallback("error")`` is in force.

    Source: Hermans, Beyer & Leibe, "In Defense of the Triplet Loss for Person Re-Identification",
    2017, https://arxiv.org/abs/1703.07737 ("all", "hard", soft); Schroff, Kalenichenko & Philbin,
    "FaceNet", CVPR 2015, https://arxiv.org/abs/1503.03832 ("semihard")
    """
    references = check(
        embeddings, labels, margin, mining, distance, reduction, soft, reference_embeddings,
        reference_labels,
    )  # fmt: skip
    if references is None:
        reference_labels = labels
    settings = (
        0 if references is None else -1, float(margin), mining, distance, reduction, bool(soft)
    )  # fmt: skip
    why = reasons(embeddings, labels, references, reference_labels)
    if distance == "cosine":
        embeddings, references = unit(embeddings), unit(references)
    if why:
        check_fallback("batch_triplet_loss", why)
        loss, totals = ops.loss_in_torch(embeddings, references, labels, reference_labels, settings)
    else:
        loss, totals = ops.BatchTripletFunction.apply(
            embeddings, references, labels.long(), reference_labels.long(), settings
        )
    return (loss, stats(totals)) if return_stats else loss


def check(
    embeddings, labels, margin, mining, distance, reduction, soft, reference_embeddings,
    reference_labels,
) -> torch.Tensor | None:  # fmt: skip
    """Raises what `batch_triplet_loss` does; the references, or None for the embeddings."""
    _check_rows("embeddings", embeddings, "labels", labels)
    if isinstance(margin, bool) or not isinstance(margin, numbers.Real):
        raise TypeError(f"margin: expected a number, got {type(margin).__name__}")
    if margin != margin:
        raise ValueError("margin: expected a number, got NaN")
    for name, value, known in (
        ("mining", mining, ops.MINING),
        ("distance", distance, ops.DISTANCES),
        ("reduction", reduction, ops.REDUCTIONS),
    ):
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    if soft and mining == "all":
        raise ValueError('soft: expected mining "semihard" or "hard" with it, got "all"')
    if (reference_embeddings is None) != (reference_labels is None):
        raise ValueError("reference_embeddings, reference_labels: expected both or neither")
    if reference_embeddings is None:
        return None
    _check_rows("reference_embeddings", reference_embeddings, "reference_labels", reference_labels)
    for name in ("dtype", "device"):
        ours, expected = getattr(reference_embeddings, name), getattr(embeddings, name)
        if ours != expected:
            raise ValueError(
                f"reference_embeddings: expected the {name} of embeddings, {expected}, got {ours}"
            )
    if reference_embeddings.shape[1] != embeddings.shape[1]:
        raise ValueError(
            f"reference_embeddings: expected the dim of embeddings, {embeddings.shape[1]}, "
            f"got {reference_embeddings.shape[1]}"
        )
    return reference_embeddings


def _check_rows(name, rows, labels_name, labels) -> None:
    check_floating(name, rows)
    if not isinstance(labels, torch.Tensor):
        raise TypeError(f"{labels_name}: expected a tensor, got {type(labels).__name__}")
    if labels.dtype.is_floating_point or labels.dtype.is_complex:
        raise TypeError(f"{labels_name}: expected integers, got {labels.dtype}")
    if rows.dim() != 2:
        raise ValueError(f"{name}: expected (rows, dim), got shape {tuple(rows.shape)}")
    if labels.shape != rows.shape[:1]:
        raise ValueError(
            f"{labels_name}: expected one for each row of {name}, shape {tuple(rows.shape[:1])}, "
            f"got {tuple(labels.shape)}"
        )
    if labels.device != rows.device:
        raise ValueError(
            f"{labels_name}: expected the device of {name}, {rows.device}, got {labels.device}"
        )


def unit(rows: torch.Tensor | None) -> torch.Tensor | None:
    """Rows of unit length, in the dtype that kernels accumulate in."""
    if rows is None:
        return None
    # Contiguous, or torch may sum rows up in different orders, and equal ones differ.
    return unit_rows(rows.to(accumulate_dtype(rows.dtype)).contiguous())


def reasons(embeddings, labels, references, reference_labels) -> list[str]:
    """Why the kernels do not take a call; empty where they do."""
    tensors = [embeddings] if references is None else [embeddings, references]
    found = tensor_reasons(*tensors)
    if found:
        return found
    why = unplain_reason(labels) or unplain_reason(reference_labels)
    found = [why] if why else []
    if any(tensor.numel() == 0 for tensor in tensors):
        found.append("no rows or no dimensions")
    return found + gradient_reasons(*tensors)


def stats(totals: torch.Tensor) -> BatchTripletStats:
    _, items, active, positive_sum, positives, negative_sum, negatives = totals.unbind()
    return BatchTripletStats(
        active / items.clamp_min(1), positive_sum / positives, negative_sum / negatives
    )


class BatchTripletLoss(torch.nn.Module):
    """Module form of :func:`fused_ops.batch_triplet_loss`, with the same settings and defaults.

    Args:
        margin: a number. Default: 0.2
        mining: "all", "semihard" or "hard". Default: "all"
        distance: "euclidean", "squared" or "cosine". Default: "euclidean"
        reduction: "mean", "mean_active", "sum" or "none". Default: "mean"
        soft: softplus in place of the maximum. Default: False
        return_stats: return `BatchTripletStats` too. Default: False

    Shapes, dtypes and errors are those of the function.
    """

    def __init__(
        self,
        margin: float = 0.2,
        mining: str = "all",
        distance: str = "euclidean",
        reduction: str = "mean",
        soft: bool = False,
        return_stats: bool = False,
    ) -> None:
        super().__init__()
        self.settings = {
            "margin": margin, "mining": mining, "distance": distance, "reduction": reduction,
            "soft": soft, "return_stats": return_stats,
        }  # fmt: skip

    def forward(
        self,
        embeddings: torch.Tensor,
        labels: torch.Tensor,
        reference_embeddings: torch.Tensor | None = None,
        reference_labels: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, BatchTripletStats]:
        return batch_triplet_loss(
            embeddings, labels, **self.settings,
            reference_embeddings=reference_embeddings, reference_labels=reference_labels,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


@explains(batch_triplet_loss)
def _(
    embeddings, labels, margin=0.2, mining="all", distance="euclidean", reduction="mean",
    soft=False, return_stats=False, *, reference_embeddings=None, reference_labels=None,
) -> Dispatch:  # fmt: skip
    references = check(
        embeddings, labels, margin, mining, distance, reduction, soft, reference_embeddings,
        reference_labels,
    )  # fmt: skip
    if references is None:
        reference_labels = labels
    why = reasons(embeddings, labels, references, reference_labels)
    if why:
        return Dispatch("batch_triplet_loss", "pytorch", reasons=tuple(why))
    details = {"device": embeddings.device.type, "dtype": name_of(embeddings.dtype)}
    return Dispatch("batch_triplet_loss", "fused", details)
