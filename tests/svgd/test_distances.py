# SPDX-License-Identifier: BSD-3-Clause
"""The squared distances that the median selects from and the weights are made of."""

import numpy
import pytest
import torch

from .cases import DTYPES, distances_op, exact_distances, random_tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 31, 32, 33, 257, 1030])
@pytest.mark.parametrize("shift", [0, 1e3])
def test_distances(device, dim, dtype, shift):
    """pytorch#42479: every square is formed from a difference, wherever the origin is.

    A sum of n terms without sign is right to n roundings; blocks of 32 keep n small.
    """
    particles = (random_tensor(70, dim, dtype=torch.float64) + shift).to(device, dtype)
    particles[40] = particles[3]
    distances = distances_op(particles)
    assert distances.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(distances, distances.T)
    assert (distances.diagonal() == 0).all()
    assert distances[40, 3] == 0
    assert torch.equal(distances[40], distances[3])
    unit = torch.finfo(distances.dtype).eps / 2
    exact = exact_distances(particles)
    slack = (32 + dim / 32 + 3) * unit + (1e-13 if dtype == torch.float64 else 0)
    assert ((distances - exact).abs() <= slack * exact).all()


@pytest.mark.parametrize("shape", [(9, 1), (70, 33), (40, 1030)], ids=str)
def test_cpu_order_of_additions(shape):
    """Bit for bit what NumPy gets in the same order, with or without a fused multiply-add."""
    x = random_tensor(*shape, dtype=torch.float32)

    def in_order(multiply_add):
        totals = numpy.zeros((len(x), len(x)), numpy.float32)
        for block in range(0, x.shape[1], 32):
            sums = numpy.zeros_like(totals)
            for column in x.numpy().T[block : block + 32]:
                sums = multiply_add(column[:, None] - column[None, :], sums)
            totals += sums
        return torch.from_numpy(totals)

    def fused(difference, sums):  # float64 holds the square, and all but never rounds the sum twice
        return (difference.astype(numpy.float64) ** 2 + sums).astype(numpy.float32)

    found = distances_op(x)
    results = [in_order(lambda difference, sums: difference**2 + sums), in_order(fused)]
    assert any(torch.equal(found, result) for result in results)
