# SPDX-License-Identifier: BSD-3-Clause
"""The batch triplet loss in plain, differentiable PyTorch: specification, fallback and oracle.

It holds differences (A, M, dim), and for "all" and "semihard" every triplet (A, M, M).
"""

import torch
from torch.nn.functional import relu, softplus

# What is summed up over the anchors, in this order.
TOTALS = ("loss", "items", "active", "positive_sum", "positives", "negative_sum", "negatives")


def sqrt(value: torch.Tensor) -> torch.Tensor:
    """The square root with gradient 0 at 0, where the distance of equal rows has none."""
    return torch.where(value == 0, value, torch.where(value == 0, 1, value).sqrt())


def unit_rows(rows: torch.Tensor) -> torch.Tensor:
    """Each row over its norm; a row of zeros stays."""
    norm = sqrt(rows.square().sum(-1, keepdim=True))
    return rows / torch.where(norm == 0, 1, norm)


def distances(x: torch.Tensor, y: torch.Tensor, distance: str) -> torch.Tensor:
    """(A, M); "cosine" of rows that have unit length."""
    squared = (x[:, None, :] - y[None, :, :]).square().sum(-1)
    if distance == "euclidean":
        return sqrt(squared)
    return squared if distance == "squared" else squared / 2


def loss_and_totals(
    embeddings: torch.Tensor,
    labels: torch.Tensor,
    references: torch.Tensor,
    reference_labels: torch.Tensor,
    first_own: int,
    margin: float,
    mining: str,
    distance: str,
    reduction: str,
    soft: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the sums of `TOTALS` in float64.

    Anchor i does not pair with reference `first_own + i`, which is itself; -1 where none is.
    """
    anchors, candidates = len(embeddings), len(references)
    if anchors * candidates == 0:
        losses = 0 * (embeddings.sum(1) + references.sum())
        totals = torch.zeros(len(TOTALS), dtype=torch.float64, device=losses.device)
        return (losses if reduction == "none" else losses.sum()), totals
    d = distances(embeddings, references, distance)
    column = torch.arange(candidates, device=d.device)
    same = labels[:, None] == reference_labels[None, :]
    own = first_own + torch.arange(anchors, device=d.device)
    positive = same & (column != own[:, None]) if first_own >= 0 else same
    negative = ~same
    valid = (positive.any(1) & negative.any(1))[:, None]
    positive, negative = positive & valid, negative & valid

    # d_ip, d_in and whether there is such an item: of triplets, pairs or anchors.
    if mining == "all":
        d_ip, d_in, item = d[:, :, None], d[:, None, :], positive[:, :, None] & negative[:, None, :]
    elif mining == "semihard":
        farther = negative[:, None, :] & (d[:, None, :] > d[:, :, None])
        nearest = _first_extreme(d[:, None, :], farther, "nearest")
        farthest = _first_extreme(d, negative, "farthest")[:, None]
        d_ip, item = d, positive
        d_in = d.gather(1, torch.where(farther.any(2), nearest, farthest))
    else:
        d_ip = d.gather(1, _first_extreme(d, positive, "farthest")[:, None])
        d_in = d.gather(1, _first_extreme(d, negative, "nearest")[:, None])
        item = valid
    terms = torch.where(item, d_ip - d_in + margin, 0)
    # Beyond the threshold softplus is its argument, which by default is not so in float64.
    terms = softplus(terms, threshold=40) if soft else relu(terms)
    terms = torch.where(item, terms, 0)
    # Mining leaves NaN out, the loss must not.
    poisoned = ((positive | negative) & d.isnan()).any(1)
    losses = terms.flatten(1).sum(1) * torch.where(poisoned, torch.nan, 1.0).to(d)

    if mining == "all":
        positives, negatives, d_ip, d_in = positive, negative, d, d
    else:
        positives = negatives = item
    active = torch.where(poisoned, 0, (terms > 0).flatten(1).sum(1))
    counts = [item.sum(), active.sum()]
    sums = [losses.sum(), *counts]
    for mask, values in ((positives, d_ip), (negatives, d_in)):
        sums += [torch.where(mask, values, 0).sum(), mask.sum()]
    totals = torch.stack([total.detach().double() for total in sums])
    if reduction == "none":
        return losses, totals
    if reduction == "sum":
        return losses.sum(), totals
    count = counts[0] if reduction == "mean" else counts[1]
    return losses.sum() / count.clamp_min(1), totals


def _first_extreme(d: torch.Tensor, mask: torch.Tensor, which: str) -> torch.Tensor:
    """The first column, along the last dimension, that holds the extreme of what `mask` leaves."""
    d = d.detach()
    if which == "nearest":
        masked = torch.where(mask & ~d.isnan(), d, torch.inf)
        extreme = masked.amin(-1, keepdim=True)
    else:
        masked = torch.where(mask & ~d.isnan(), d, -torch.inf)
        extreme = masked.amax(-1, keepdim=True)
    column = torch.arange(d.shape[-1], device=d.device)
    first = torch.where(mask & (masked == extreme), column, d.shape[-1] - 1)
    return first.amin(-1)
