# SPDX-License-Identifier: BSD-3-Clause
"""triplet_margin_loss and triplet_margin_loss_indexed, and their gradients."""

from collections.abc import Iterator
from functools import partial

import numpy
import torch
import torch.nn.functional as F

import fused_ops
from benchmarks.accuracy.measure import Case, Results, loss_results, widened
from benchmarks.triplet.indexed import gathered

SHAPES = {(256, 128): 16, (4096, 768): 2, (64, 65536): 2}
INDEXED_SHAPES = {(256, 128): 16, (1024, 768): 2}
TRIPLETS_OF_A_ROW = 4
SETTINGS = {"margin": 1.0, "eps": 1e-6, "swap": True}


LOSSES = {
    "fused": fused_ops.triplet_margin_loss,
    "eager": F.triplet_margin_loss,
    "compile": torch.compile(F.triplet_margin_loss),
}
INDEXED_LOSSES = {
    "fused": fused_ops.triplet_margin_loss_indexed,
    "eager": gathered(F.triplet_margin_loss),
    "compile": torch.compile(gathered(F.triplet_margin_loss)),
}


def exact_loss(
    anchor: numpy.ndarray, positive: numpy.ndarray, negative: numpy.ndarray
) -> tuple[numpy.longdouble, numpy.ndarray]:
    """The loss, and the gradients stacked."""
    pairs = (anchor, positive), (anchor, negative), (positive, negative)
    u, v, w = (x - y + SETTINGS["eps"] for x, y in pairs)
    du, dv, dw = (numpy.sqrt((x * x).sum(1, keepdims=True)) for x in (u, v, w))
    unclamped = SETTINGS["margin"] + du - numpy.minimum(dv, dw)
    share = (unclamped >= 0) / numpy.longdouble(len(u))
    u, v, w = share * u / du, share * (dv < dw) * v / dv, share * (dw < dv) * w / dw
    return numpy.maximum(unclamped, 0).mean(), numpy.stack([u - v, -u - w, v + w])


def exact_indexed_loss(
    embeddings: numpy.ndarray, indices: numpy.ndarray
) -> tuple[numpy.longdouble, numpy.ndarray]:
    loss, gradients = exact_loss(*embeddings[indices])
    gradient = numpy.zeros_like(embeddings)
    numpy.add.at(gradient, indices, gradients)
    return loss, gradient[None]


def indices_of(count: int) -> torch.Tensor:
    """Of triplets of different rows, (3, triplets)."""
    generator = torch.Generator().manual_seed(0)
    anchor = torch.arange(count).repeat(TRIPLETS_OF_A_ROW)
    positive = torch.randint(1, count // 2, anchor.shape, generator=generator)
    negative = torch.randint(count // 2, count, anchor.shape, generator=generator)
    return torch.stack([anchor, anchor + positive, anchor + negative]) % count


def results(inputs: list[torch.Tensor]) -> tuple[dict[str, Results], Results]:
    losses = {impl: partial(loss, **SETTINGS) for impl, loss in LOSSES.items()}
    exact = exact_loss(*map(widened, inputs))
    return loss_results("triplet_margin_loss", losses, inputs, exact)


def indexed_results(inputs: list[torch.Tensor]) -> tuple[dict[str, Results], Results]:
    (embeddings,) = inputs
    indices = indices_of(len(embeddings))
    exact = exact_indexed_loss(widened(embeddings), indices.numpy())
    names = "anchor_index", "positive_index", "negative_index"
    settings = dict(zip(names, indices.to(embeddings.device), strict=True)) | SETTINGS
    losses = {impl: partial(loss, **settings) for impl, loss in INDEXED_LOSSES.items()}
    return loss_results("triplet_margin_loss_indexed", losses, inputs, exact)


def cases(device: str) -> Iterator[Case]:
    for shape, draws in SHAPES.items():
        yield Case(results, 3, shape, draws)
    for shape, draws in INDEXED_SHAPES.items():
        yield Case(indexed_results, 1, shape, draws)
