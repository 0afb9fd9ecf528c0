# SPDX-License-Identifier: BSD-3-Clause
"""The same bits every time, with any number of threads and with any instruction set."""

import itertools
import math

import numpy
import pytest
import torch

from fused_ops import triplet_margin_loss

from .cases import NORMS, assert_same_bits, loss_and_gradients, random_inputs

pytestmark = pytest.mark.usefixtures("fused_only")


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize(
    ("repeats", "shape"), [(100, (100_000, 4)), (20, (3, 70_001)), (20, (300, 257))], ids=str
)
def test_repeats(device, repeats, shape, p):
    """Fault 27."""
    inputs = random_inputs(*shape, device=device)
    settings = {"p": p, "swap": True, "margin": 0.3}
    first = loss_and_gradients(triplet_margin_loss, inputs, **settings)
    assert all(result.any() for result in first)
    for _ in range(repeats - 1):
        assert_same_bits(loss_and_gradients(triplet_margin_loss, inputs, **settings), first)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3, 200_003), (4001, 65), (70_001, 3)], ids=str)
def test_cpu_threads(shape, dtype, p):
    """Large enough for several threads, and no multiple of anything."""
    inputs = random_inputs(*shape, dtype=dtype)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.get_num_threads() == threads
        results.append(loss_and_gradients(triplet_margin_loss, inputs, p=p, swap=True))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.usefixtures("poisoned_memory")
def test_deterministic_algorithms_may_be_demanded(device):
    inputs = random_inputs(50, 33, device=device)
    assert torch.are_deterministic_algorithms_enabled()
    results = loss_and_gradients(triplet_margin_loss, inputs)
    torch.use_deterministic_algorithms(False)
    assert_same_bits(results, loss_and_gradients(triplet_margin_loss, inputs))


def distances_in_lanes(x, y, eps, p):
    """|x - y + eps|_p of each row, in the order of the CPU kernel's additions."""
    lanes = 128 // x.itemsize
    totals = []
    for chunk in range(0, x.shape[1], 2048):
        differences = x[:, chunk : chunk + 2048] - y[:, chunk : chunk + 2048] + x.dtype.type(eps)
        magnitudes = differences**2 if p == 2 else abs(differences)
        sums = numpy.zeros((len(x), lanes), x.dtype)
        for first in range(0, magnitudes.shape[1], lanes):
            part = magnitudes[:, first : first + lanes]
            sums[:, : part.shape[1]] += part
        while sums.shape[1] > 1:
            half = sums.shape[1] // 2
            sums = sums[:, :half] + sums[:, half:]
        totals.append(sums[:, 0])
    while len(totals) > 1:
        pairs = itertools.zip_longest(totals[::2], totals[1::2], fillvalue=x.dtype.type(0))
        totals = [a + b for a, b in pairs]
    return numpy.sqrt(totals[0]) if p == 2 else totals[0]


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [3, 32, 100, 1030, 2049, 70_001])
def test_cpu_order_of_additions(dim, dtype, p):
    """Bit for bit what NumPy gets in the same order, with no fused multiply-add.

    The machine's instruction set cannot be chosen here, but one result for all of them follows.
    """
    inputs = random_inputs(20, dim, dtype=dtype)
    loss = triplet_margin_loss(*inputs, p=p, margin=math.e, reduction="none")
    anchor, positive, negative = (x.numpy() for x in inputs)
    nearest = distances_in_lanes(anchor, negative, 1e-6, p)
    unclamped = anchor.dtype.type(math.e) + distances_in_lanes(anchor, positive, 1e-6, p) - nearest
    assert torch.equal(loss, torch.from_numpy(numpy.maximum(unclamped, 0)))
    assert (loss > 0).sum() > 2
