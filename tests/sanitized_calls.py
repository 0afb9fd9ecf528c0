# SPDX-License-Identifier: BSD-3-Clause
"""Launches every kernel of an op in every policy, for compute-sanitizer to watch:

    compute-sanitizer --tool memcheck --error-exitcode 1 \
        python tests/sanitized_calls.py triplet memcheck 1/8

for the first of eight parts, and so on with racecheck, initcheck, synccheck and svgd,
batch_triplet; `make sanitize-cuda` runs them all. Each tensor is then an allocation of its own, so
that memory not written, or next to a tensor, is seen.

For initcheck the loss's blocks hand nothing over: a block waits for what others leave by reading
memory that nobody cleared until it holds the launch's number, which initcheck takes for a fault.
Nor is a gradient of odd rows copied: on Hopper the copy engine stores it, and initcheck takes only
the first 32 bytes of such a store for written. That every element is written is shown by the tests
that fill new memory with NaN.
"""

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial

if __name__ == "__main__":
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

import fused_ops
from fused_ops import (
    _C,
    batch_triplet_loss,
    median_bandwidth,
    svgd_phi,
    svgd_step,
    triplet_margin_loss,
)
from fused_ops.svgd.function import PRECISIONS, RULES

ops = torch.ops.fused_ops
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
NORMS = (1, 2, math.inf)

# Whole rows, odd ones in tiles, with gaps between them, longer than are held, more than blocks
TRIPLET_LAYOUTS = {
    "whole": lambda make: make(70, 64),
    "odd": lambda make: make(700, 33),
    "odd and long": lambda make: make(300, 1001),
    "sliced": lambda make: make(70, 47)[:, 3:40],
    "long": lambda make: make(3, 40_003),
    "one": lambda make: make(300, 1),
}


def triplet(device: str, tool: str) -> Iterator[Callable]:
    alone = tool == "initcheck"
    layouts = [name for name in TRIPLET_LAYOUTS if not (alone and name == "long")]
    forms = [n for n, name in enumerate(_C.TRIPLET_FORMS) if not (alone and name == "split")]
    cases = itertools.product(layouts, DTYPES, NORMS)
    for number, (layout, dtype, p) in enumerate(cases):
        for form in forms:
            yield partial(_triplet_calls, layout, dtype, device, p, form, number, alone)
    yield partial(_triplet_step, device, alone)
    cases = itertools.product(TRIPLET_LAYOUTS, DTYPES, NORMS)
    for number, (layout, dtype, p) in enumerate(cases):
        yield partial(_indexed_calls, layout, dtype, device, p, number, alone)


def _triplet_calls(layout, dtype, device, p, form, number, alone):
    make = TRIPLET_LAYOUTS[layout]
    inputs = [make(partial(random_tensor, dtype, device)) for _ in range(3)]
    swap, reduction = number % 2 == 1, 0 if alone else number % 3
    arguments = (*inputs, 0.3, p, 1e-6, swap, reduction)
    settings = arguments[3:]
    needs_grad = [True, number % 5 > 0, number % 4 > 0]
    loss, state = ops.triplet_forward(*arguments, False, True, form)
    grad_loss = torch.ones_like(loss)
    ops.triplet_backward(grad_loss, *inputs, state, *settings, *needs_grad, form)
    if device != "cuda":
        return
    for upstream in (1, 1, 0.5):  # a guess that is missing, right and wrong
        results = ops.triplet_forward_with_gradients(*arguments, False, *needs_grad, form)
        loss, state, *gradients = results
        grad_loss = torch.full_like(loss, upstream)
        ops.triplet_correct_gradients(grad_loss, *inputs, state, *settings, *gradients, form)


def _triplet_step(device, alone):
    inputs = [random_tensor(torch.float32, device, 300, 7).requires_grad_() for _ in range(3)]
    loss = triplet_margin_loss(*inputs, swap=True, reduction="none" if alone else "mean")
    torch.autograd.grad(loss.sum(), inputs)


def _indexed_calls(layout, dtype, device, p, number, alone):
    """With shares of entries that a run of a row begins, ends and goes on in."""
    embeddings = TRIPLET_LAYOUTS[layout](partial(random_tensor, dtype, device))
    count = len(embeddings)
    indices = torch.randint(-count, count, (3, 40 + 7 * number), device=device)
    indices[0, ::2] = count // 2
    settings = 0.3, p, 1e-6, number % 2 == 1, 0 if alone else number % 3
    loss, state = ops.triplet_indexed_forward(embeddings, indices, *settings, False, True)
    for share in (0, 3, 1000):
        ops.triplet_indexed_backward(
            torch.ones_like(loss), embeddings, indices, state, *settings, share
        )


# One launch, tiles; then direct differences and tensor cores, and more dimensions of both
SVGD_SHAPES = [(1, 3), (65, 33), (300, 5), (1100, 2), (20, 700)]
SVGD_MANY = [(2100, 3), (2113, 64)]
SVGD_WIDE = [(2080, 128), (2064, 256), (2049, 300)]
PAPER = RULES.index("paper")
SVGD_PROBLEMS = [(4, 64, 32), (3, 130, 3), (2, 300, 5)]


def svgd(device: str, tool: str) -> Iterator[Callable]:
    for shape, dtype in itertools.product([*SVGD_SHAPES, *SVGD_PROBLEMS], DTYPES):
        yield partial(_svgd_calls, shape, dtype, device)
    many = [*SVGD_MANY, *SVGD_WIDE]
    if tool == "racecheck":  # which takes minutes where there are many dimensions
        many = SVGD_MANY
        for shape in SVGD_WIDE:
            yield partial(_forced_update, shape, device, -1, PRECISIONS.index("high"))
    for shape in many:
        yield partial(_svgd_calls, shape, torch.float32, device)
        for form in range(len(_C.SVGD_FORMS)):
            yield partial(_forced_update, shape, device, form, PRECISIONS.index("high"))
        for precision in range(len(PRECISIONS)):
            yield partial(_forced_update, shape, device, -1, precision)
        yield partial(_svgd_part, shape, device)
    for shape in [(131, 5), *many]:
        yield partial(_shared_median, shape, torch.float32, device, 2)
    yield partial(_shared_median, (131, 5), torch.float64, device, 2)


def _svgd_inputs(shape, dtype, device):
    """Columns of wider rows, which other numbers surround."""
    *rows, dim = shape
    wide = [random_tensor(dtype, device, *rows, dim + 3) for _ in range(2)]
    return [x[..., 1:-2] for x in wide]


def _svgd_calls(shape, dtype, device):
    particles, score = _svgd_inputs(shape, dtype, device)
    for kernel in ("rbf", "imq"):
        svgd_phi(particles, score, kernel=kernel)
        svgd_step(particles, score, 0.1, kernel=kernel, bandwidth=2.0)
    ties = particles.clone()
    ties[..., ties.shape[-2] // 5 :, :] = 1  # a zero median, for which a mean stands
    for rule in ("paper", "reference"):
        median_bandwidth(particles, rule)
        median_bandwidth(ties, rule)


def _forced_update(shape, device, form, precision):
    particles, score = _svgd_inputs(shape, torch.float32, device)
    try:
        ops.svgd_update(particles, score, None, 0, 0.0, 0, 1.0, None, precision, form, 0, None)
    except RuntimeError as error:
        assert "does not take" in str(error)


def _svgd_part(shape, device):
    """The updates of some of the particles."""
    particles, score = _svgd_inputs(shape, torch.float32, device)
    for kernel in range(2):
        ops.svgd_update(
            particles, score, None, -1, 2.0, kernel, 1.0, None, 1, -1, len(particles) // 3, 700
        )


def _shared_median(shape, dtype, device, shares):
    """By the rule that takes a mean of two, which is one more pass."""
    particles, _ = _svgd_inputs(shape, dtype, device)
    memories = [ops.svgd_share_memory(particles, shares) for _ in range(shares)]
    received = None
    for index in range(memories[0][1], memories[0][2] + 1):
        messages = [
            ops.svgd_share_pass(particles, memory, received, PAPER, index, share, shares)
            for share, (memory, _, _) in enumerate(memories)
        ]
        received = torch.stack(messages).sum(0)
    ops.svgd_share_bandwidth(particles, memories[0][0], received, PAPER, shares)
    ops.svgd_distances(particles)


# Anchors, references or 0 for the anchors themselves, dimensions and classes; more positives than
# are sorted at a time; more distances than one block of their matrix holds
BATCHES = [(70, 0, 33, 12), (300, 0, 5, 1), (65, 130, 64, 40), (1, 9, 3, 4), (257, 0, 1, 100)]
BATCHES_MANY = [(3, 2600, 3, 2), (2100, 0, 4, 2)]
BATCH_IN_BLOCKS = (65, 2**19, 2, 2**17)
MINING = (("all", False), ("semihard", False), ("semihard", True), ("hard", False), ("hard", True))


def batch_triplet(device: str, tool: str) -> Iterator[Callable]:
    cases = [
        *itertools.product(BATCHES, DTYPES, MINING),
        *itertools.product(BATCHES_MANY, [torch.float32], MINING),
        (BATCH_IN_BLOCKS, torch.float64, MINING[0]),
    ]
    for number, (batch, dtype, (mining, soft)) in enumerate(cases):
        yield partial(_batch_call, batch, dtype, device, number, mining=mining, soft=soft)


def _batch_call(batch, dtype, device, number, **settings):
    """Loss and gradients with the numbered distance and reduction, of columns of wider rows."""
    anchors, references, dim, classes = batch
    rows, labels = zip(
        *(
            (
                random_tensor(dtype, device, count, dim + 3)[:, 1:-2].requires_grad_(),
                torch.randint(classes, (count,), device=device),
            )
            for count in (anchors, references)
        ),
        strict=True,
    )
    if references > 0:
        settings |= {"reference_embeddings": rows[1], "reference_labels": labels[1]}
    settings["distance"] = ("euclidean", "squared", "cosine")[number % 3]
    settings["reduction"] = ("none", "mean", "mean_active", "sum")[number % 4]
    loss = batch_triplet_loss(rows[0], labels[0], **settings)
    loss.sum().backward()


def random_tensor(dtype, device, *shape):
    return torch.randn(shape, device=device).to(dtype)


OPS = {"triplet": triplet, "svgd": svgd, "batch_triplet": batch_triplet}


def run(op: str, device: str = "cuda", tool: str = "", part: int = 1, parts: int = 1) -> None:
    with fused_ops.set_fallback("error"):
        for call in itertools.islice(OPS[op](device, tool), part - 1, None, parts):
            print(call.func.__name__, *call.args, *call.keywords.values(), flush=True)
            call()


if __name__ == "__main__":
    torch.manual_seed(0)
    _, op, tool, share = sys.argv
    run(op, "cuda", tool, *map(int, share.split("/")))
    torch.cuda.synchronize()
    print(f"{op} {share}: all launched")
