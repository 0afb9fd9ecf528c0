# SPDX-License-Identifier: BSD-3-Clause
"""Inputs, and the loss as three loops say it, for the tests of batch_triplet_loss."""

import math

import torch

from fused_ops import batch_triplet_loss

MINING = ("all", "semihard", "hard")
DISTANCES = ("euclidean", "squared", "cosine")
REDUCTIONS = ("mean", "mean_active", "sum", "none")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Each mining with and without soft, which "all" has not.
FORMS = (("all", False), ("semihard", False), ("semihard", True), ("hard", False), ("hard", True))


def random_batch(count, dim, classes, dtype=torch.float32, device="cpu", seed=0, spread=1.0):
    """Embeddings around a centre for each class, and labels in no order."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    centres = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    rows = centres[labels] + spread * torch.randn(
        count, dim, generator=generator, dtype=torch.float64
    )
    return (rows / dim**0.5).to(device, dtype), labels.to(device)


def loss_and_gradients(
    embeddings, labels, references=None, upstream=None, function=None, **settings
):
    """[loss, gradient of the embeddings, and of the references where there are such]."""
    leaves = [embeddings.detach().clone().requires_grad_()]
    if references is not None:
        rows, reference_labels = references
        leaves.append(rows.detach().clone().requires_grad_())
        settings |= {"reference_embeddings": leaves[1], "reference_labels": reference_labels}
    loss = (function or batch_triplet_loss)(leaves[0], labels, **settings)
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]


def distances_of(x, others, distance):
    if distance == "cosine":
        return 1 - others @ x / (others.norm(dim=1) * x.norm())
    squared = ((x - others) ** 2).sum(1)
    if distance == "squared":
        return squared
    return torch.where(squared > 0, torch.where(squared > 0, squared, 1).sqrt(), 0)


def looped_loss(
    embeddings, labels, margin=0.2, mining="all", distance="euclidean", reduction="mean",
    soft=False, reference_embeddings=None, reference_labels=None,
):  # fmt: skip
    """By loops over anchors, positives and negatives, in the words of the docstring."""
    own = reference_embeddings is None
    others = embeddings if own else reference_embeddings
    other_labels = (labels if own else reference_labels).tolist()
    losses, active, items = [], 0, 0
    for i, label in enumerate(labels.tolist()):
        distances = distances_of(embeddings[i], others, distance)
        d = distances.tolist()
        columns = [j for j in range(len(d)) if not (own and j == i)]
        positives = [j for j in columns if other_labels[j] == label]
        negatives = [j for j in columns if other_labels[j] != label]
        pairs = []
        if positives and negatives:
            if mining == "all":
                pairs = [(p, n) for p in positives for n in negatives]
            elif mining == "hard":
                pairs = [(max(positives, key=lambda j: d[j]), min(negatives, key=lambda j: d[j]))]
            for p in positives if mining == "semihard" else ():
                farther = [n for n in negatives if d[n] > d[p]]
                if farther:
                    pairs.append((p, min(farther, key=lambda j: d[j])))
                else:
                    pairs.append((p, max(negatives, key=lambda j: d[j])))
        chosen = [p for p, _ in pairs], [n for _, n in pairs]
        terms = distances[chosen[0]] - distances[chosen[1]] + margin
        terms = torch.log1p(terms.exp()) if soft else torch.where(terms > 0, terms, 0)
        losses.append(terms.sum())
        items += len(pairs)
        active += (terms > 0).sum().item()
    if reduction == "none":
        return torch.stack(losses)
    return sum(losses) / max({"mean": items, "mean_active": active, "sum": 1}[reduction], 1)


def error(results, exact):
    """The largest of their distances, each relative to the norm of what is exact."""
    largest = 0.0
    for result, truth in zip(results, exact, strict=True):
        scale = truth.double().norm().item() or 1.0
        found = (result.double() - truth.double()).norm().item() / scale
        largest = max(largest, found if not math.isnan(found) else math.inf)
    return largest
