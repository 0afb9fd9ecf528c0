# SPDX-License-Identifier: BSD-3-Clause
"""Particles that several processes share, against all of them in one."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import assert_passed, failures_on_ranks, needs_two_gpus, own, place

import fused_ops
from fused_ops import distributed
from fused_ops.svgd.function import KERNELS, RULES

from .cases import assert_same_bits, random_inputs, random_tensor

RANKS = [
    pytest.param((2, "gloo"), id="2 gloo"),
    pytest.param((3, "gloo"), id="3 gloo"),
    pytest.param((2, "nccl"), id="2 nccl", marks=[pytest.mark.cuda, needs_two_gpus]),
]

# The rest of this file up to the fixture runs in every process.


def splits(total):
    """How many particles each rank has: alike, uneven, and none in one."""
    ranks = dist.get_world_size()
    even = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    return even, [1] * (ranks - 1) + [total - ranks + 1], [0, *[total // (ranks - 1)] * (ranks - 1)]


def tolerance(dtype):
    return {torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-13}[dtype]


def check_median():
    for dtype in (torch.float16, torch.float32, torch.float64):
        for total, dim in ((6, 3), (90, 5)):
            x = random_tensor(total, dim, dtype=dtype, device=place())
            lattice = (2 * x).round()
            for rule in RULES:
                for everyone in (x, lattice):
                    for counts in splits(total):
                        found = distributed.median_bandwidth(own(everyone, counts), rule)
                        assert_same_bits(found, fused_ops.median_bandwidth(everyone, rule))


def check_phi_and_step():
    for dtype in (torch.float16, torch.float32, torch.float64):
        close = {"rtol": tolerance(dtype), "atol": tolerance(dtype)}
        x, score = random_inputs(90, 7, dtype, place())
        number = torch.tensor(2.0, device=place())
        for bandwidth in (*RULES, 1.5, number):
            for kernel in KERNELS:
                settings = {"bandwidth": bandwidth, "kernel": kernel, "repulsion": 0.7}
                phi = fused_ops.svgd_phi(x, score, **settings)
                step = fused_ops.svgd_step(x, score, 0.3, **settings)
                for counts in splits(90):
                    mine = own(x, counts), own(score, counts)
                    before = mine[0].clone()
                    found = distributed.svgd_phi(*mine, counts=counts, **settings)
                    torch.testing.assert_close(found, own(phi, counts), **close)
                    found = distributed.svgd_step(*mine, 0.3, **settings)
                    torch.testing.assert_close(found, own(step, counts), **close)
                    assert_same_bits(mine[0], before)


def check_many_particles():
    """On CUDA, those that tensor cores take."""
    total = 5000 if place().type == "cuda" else 600
    x, score = random_inputs(total, 64, device=place())
    counts = splits(total)[0]
    found = distributed.svgd_phi(own(x, counts), own(score, counts))
    expected = own(fused_ops.svgd_phi(x, score), counts)
    assert (found - expected).norm() < 2e-5 * expected.norm()
    again = distributed.svgd_phi(own(x, counts), own(score, counts))
    assert_same_bits(again, found)
    for everyone in (x, x.round()):
        found = distributed.median_bandwidth(own(everyone, counts), "reference")
        assert_same_bits(found, fused_ops.median_bandwidth(everyone, "reference"))


def check_score_function():
    x = random_tensor(20, 3, device=place())
    counts = splits(20)[1]
    seen = []

    def score(particles):
        seen.append(particles.shape)
        return -particles

    found = distributed.svgd_step(own(x, counts), score, 0.5)
    assert seen == [(counts[dist.get_rank()], 3)]
    torch.testing.assert_close(found, own(fused_ops.svgd_step(x, -x, 0.5), counts))


def check_one_particle():
    counts = [1] + [0] * (dist.get_world_size() - 1)
    x = torch.full((1, 2), 3.0, device=place())
    found = distributed.svgd_phi(own(x, counts), own(-x, counts))
    torch.testing.assert_close(found, own(-x, counts))


def check_no_particles():
    nothing = torch.empty(0, 3, device=place())
    assert distributed.svgd_phi(nothing, nothing).shape == (0, 3)
    flat = torch.empty(2, 0, device=place())
    assert distributed.svgd_step(flat, flat, 0.1).shape == (2, 0)


def check_nan():
    x = random_tensor(30, 2, device=place())
    x[29] = math.nan
    assert distributed.median_bandwidth(own(x, splits(30)[0])).isnan()


def check_groups():
    """A process alone in its group has all particles."""
    rank = dist.get_rank()
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    x, score = random_inputs(40 + rank, 3, device=place())
    found = distributed.svgd_phi(x, score, group=groups[rank])
    torch.testing.assert_close(found, fused_ops.svgd_phi(x, score))


def check_errors():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = random_tensor(4, 3, device=place())
    with pytest.raises(ValueError, match="particles: expected one dim in all processes, got"):
        distributed.median_bandwidth(x[:, : 2 + (rank > 0)])
    for counts in ([4] * (ranks - 1), [5] * ranks):
        with pytest.raises(ValueError, match="counts: expected one for each of"):
            distributed.svgd_phi(x, x, counts=counts)
    with pytest.raises(ValueError, match="require no grad"):
        distributed.svgd_phi(x.clone().requires_grad_(), x)
    with pytest.raises(ValueError, match="score: expected the particles' shape"):
        distributed.svgd_phi(x, x[1:])
    with pytest.raises(TypeError, match="step_size: expected a number"):
        distributed.svgd_step(x, x, "1")


def check_without_kernels():
    """What runs in PyTorch there too."""
    x, score = random_inputs(12, 3, device=place())
    counts = splits(12)[0]
    expected = fused_ops.svgd_phi(x, score)
    native, fused_ops._support.native = fused_ops._support.native, None
    try:
        found = distributed.svgd_phi(own(x, counts), own(score, counts))
    finally:
        fused_ops._support.native = native
    torch.testing.assert_close(found, own(expected, counts))


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.fixture(scope="module")
def failures(request, tmp_path_factory):
    ranks, backend = request.param
    return failures_on_ranks(CHECKS, ranks, tmp_path_factory.mktemp("ranks"), backend)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("failures", RANKS, indirect=True)
def test_on_ranks(failures, check):
    assert_passed(failures, check)
