# SPDX-License-Identifier: BSD-3-Clause
"""Times that faults of other libraries were about, with room for a busy machine."""

import time

import pytest
import torch

from fused_ops import median_bandwidth

from .cases import random_tensor

pytestmark = [pytest.mark.usefixtures("fused_only"), pytest.mark.timing]


def seconds(device, function, repeats=20):
    """The fastest of some calls, which the rest of the machine disturbs least."""
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def test_median_is_faster_than_a_sort(device):
    """pytorch#51450, #75599. The distances to be sorted come for nothing here."""
    particles = random_tensor(5000 if device == "cuda" else 1500, 2, device=device)
    distances = torch.cdist(particles, particles).flatten()
    taken = seconds(device, lambda: median_bandwidth(particles))
    assert 3 * taken < seconds(device, lambda: distances.sort(), repeats=3)


@pytest.mark.parametrize("count", [1500, 2500])
def test_equal_keys_are_not_slow(device, count):
    """raft#1725: all keys in one bin, or in two, against random ones; twice the time is usual."""
    random = random_tensor(count, 2, device=device)
    taken = seconds(device, lambda: median_bandwidth(random))
    for particles in (torch.ones_like(random), (random > 0.5).float()):
        assert seconds(device, lambda x=particles: median_bandwidth(x)) < 4 * taken
