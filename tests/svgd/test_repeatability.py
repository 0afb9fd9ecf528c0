# SPDX-License-Identifier: BSD-3-Clause
"""The same bits every time, and with any number of threads."""

import pytest
import torch

from fused_ops import median_bandwidth, svgd_phi, svgd_step

from .cases import KERNELS, RULES, assert_same_bits, random_inputs

pytestmark = pytest.mark.usefixtures("fused_only")

kernels = pytest.mark.parametrize("kernel", KERNELS)


@pytest.mark.usefixtures("two_threads")
@kernels
@pytest.mark.parametrize(
    ("repeats", "shape"),
    [(100, (1, 1)), (100, (257, 33)), (100, (600, 5)), (20, (2049, 2))],
    ids=str,
)
def test_repeats(device, repeats, shape, kernel):
    inputs = random_inputs(*shape, device=device)
    first = svgd_phi(*inputs, kernel=kernel)
    assert first.any()
    for _ in range(repeats - 1):
        assert_same_bits(svgd_phi(*inputs, kernel=kernel), first)


@pytest.mark.cuda
@kernels
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(1024, 32), (2049, 100), (4096, 64)], ids=str)
def test_repeats_of_many(shape, rule, kernel):
    inputs = random_inputs(*shape, device="cuda")
    inputs[0][: shape[0] * 4 // 5] = 1  # a zero median, for the mean is a sum over blocks
    for particles in (inputs[0], random_inputs(*shape, device="cuda", seed=5)[0]):
        settings = {"bandwidth": rule, "kernel": kernel}
        first = svgd_phi(particles, inputs[1], **settings)
        for _ in range(99):
            assert_same_bits(svgd_phi(particles, inputs[1], **settings), first)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(701, 33), (999, 4), (2051, 2)], ids=str)
def test_cpu_threads(shape, dtype):
    """Large enough for several threads, and no multiple of anything."""
    particles, score = random_inputs(*shape, dtype=dtype)
    collapsed = particles.clone()
    collapsed[: shape[0] * 4 // 5] = 1  # a zero median, for the mean is a sum over blocks
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.get_num_threads() == threads
        results.append(
            [
                median_bandwidth(collapsed),
                svgd_phi(particles, score, kernel="rbf"),
                svgd_step(particles, score, 0.1, bandwidth="paper", kernel="imq"),
            ]
        )
    for others in results[1:]:
        for result, expected in zip(others, results[0], strict=True):
            assert_same_bits(result, expected)


@pytest.mark.usefixtures("poisoned_memory")
def test_deterministic_algorithms_may_be_demanded(device):
    inputs = random_inputs(50, 33, device=device)
    assert torch.are_deterministic_algorithms_enabled()
    phi = svgd_phi(*inputs)
    torch.use_deterministic_algorithms(False)
    assert_same_bits(phi, svgd_phi(*inputs))
