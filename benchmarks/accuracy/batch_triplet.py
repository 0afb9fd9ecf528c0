# SPDX-License-Identifier: BSD-3-Clause
"""batch_triplet_loss of every mining, and its gradient.

Which rows are mined, and which terms are above zero, jumps. Where rounding could decide that, the
gradient of any implementation may differ by a whole term, and chance by how many; inputs are taken
that have nothing so close, to the accumulation type of the kernels. In a narrower type eager's
rounding does decide.
"""

from collections.abc import Iterator
from functools import partial

import numpy
import torch

import fused_ops
from benchmarks.accuracy.measure import Case, Results, Undecided, loss_results, widened
from benchmarks.batch_triplet.cases import MARGIN, reference_loss
from fused_ops._support import accumulate_dtype
from fused_ops.batch_triplet.ops import MINING

SHAPES = {(64, 512): 8, (256, 128): 4}
ROWS_OF_A_CLASS = 4
CLEARANCE = 4  # units in the last place of the largest distance


LOSSES = {
    "fused": partial(fused_ops.batch_triplet_loss, margin=MARGIN),
    "eager": reference_loss,
    "compile": torch.compile(reference_loss),
}


def mined(d: numpy.ndarray, labels: numpy.ndarray, mining: str) -> tuple[numpy.ndarray, ...]:
    """Of the triplets, of which each anchor has equally many, the anchors, positives and
    negatives; and by how much the closest of the comparisons that chose them was decided."""
    count = len(d)
    same = labels[:, None] == labels
    negative = numpy.nonzero(~same)[1].reshape(count, -1)
    numpy.fill_diagonal(same, False)
    positive = numpy.nonzero(same)[1].reshape(count, -1)

    def by_distance(columns):
        order = numpy.take_along_axis(d, columns, 1).argsort(1)
        columns = numpy.take_along_axis(columns, order, 1)
        return columns, numpy.take_along_axis(d, columns, 1)

    positive, d_ip = by_distance(positive)
    negative, d_in = by_distance(negative)
    closest = numpy.inf
    if mining == "semihard":
        apart = d_in[:, None, :] - d_ip[:, :, None]
        last = d_in.shape[1] - 1
        place = numpy.minimum((apart <= 0).sum(2), last)  # where none is farther, the farthest
        before = numpy.minimum(place, last - 1)
        next_apart = numpy.take_along_axis(numpy.diff(d_in), before, 1)
        closest = min(abs(apart).min(), next_apart.min())
        negative = numpy.take_along_axis(negative, place, 1)[:, :, None]
    elif mining == "hard":
        gaps = numpy.diff(d_ip)[:, -1:], numpy.diff(d_in)[:, :1]  # of one positive there is none
        closest = min(gap.min(initial=numpy.inf) for gap in gaps)
        positive, negative = positive[:, -1:], negative[:, :1]
    if mining != "semihard":
        negative = negative[:, None, :]
    anchor = numpy.arange(count)[:, None, None]
    triplets = numpy.broadcast_arrays(anchor, positive[:, :, None], negative)
    return *(rows.ravel() for rows in triplets), closest


def exact_loss(
    x: numpy.ndarray, labels: numpy.ndarray, mining: str, rounding: float
) -> tuple[numpy.longdouble, numpy.ndarray]:
    """The loss and its gradient; raises Undecided where rounding may decide them."""
    d = numpy.stack([numpy.sqrt(((row - x) ** 2).sum(1)) for row in x])
    anchor, positive, negative, closest = mined(d, labels, mining)
    terms = d[anchor, positive] - d[anchor, negative] + MARGIN
    if min(closest, abs(terms).min()) < CLEARANCE * rounding * d.max():
        raise Undecided
    share = (terms > 0) / numpy.longdouble(len(terms))
    slope = numpy.zeros_like(d)
    numpy.add.at(slope, (anchor, positive), share)
    numpy.add.at(slope, (anchor, negative), -share)
    numpy.fill_diagonal(d, 1)  # where the slope is 0
    weight = (slope + slope.T) / d
    gradient = weight.sum(1, keepdims=True) * x - weight @ x
    return numpy.maximum(terms, 0).mean(), gradient[None]


def results(mining: str, inputs: list[torch.Tensor]) -> tuple[dict[str, Results], Results]:
    (embeddings,) = inputs
    labels = torch.arange(len(embeddings)) % (len(embeddings) // ROWS_OF_A_CLASS)
    rounding = torch.finfo(accumulate_dtype(embeddings.dtype)).eps
    exact = exact_loss(widened(embeddings), labels.numpy(), mining, rounding)
    settings = {"labels": labels.to(embeddings.device), "mining": mining}
    losses = {impl: partial(loss, **settings) for impl, loss in LOSSES.items()}
    return loss_results(f"batch_triplet_loss, {mining}", losses, inputs, exact)


def cases(device: str) -> Iterator[Case]:
    for shape, draws in SHAPES.items():
        for mining in MINING:
            yield Case(partial(results, mining), 1, shape, draws)
