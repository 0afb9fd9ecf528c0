# SPDX-License-Identifier: BSD-3-Clause
"""Particles take the moments of densities, as well as independent draws would.

Those miss a mean by one standard deviation over sqrt(N), typically; fixed seeds make the particles'
errors, a fraction of that, the same in every run.
"""

import math

import pytest
import torch

from fused_ops import svgd_step

from .cases import KERNELS, RULES, random_tensor

pytestmark = pytest.mark.usefixtures("fused_only")

COUNT = 200
MOST = 1 / math.sqrt(COUNT)  # for a mean, in standard deviations of what is averaged
rules = pytest.mark.parametrize("rule", RULES)


def move(particles, score, steps, step_size, **settings):
    for _ in range(steps):
        particles = svgd_step(particles, score, step_size, **settings)
    assert particles.isfinite().all()
    return particles.double().cpu()


def covariance(particles):
    return torch.cov(particles.T, correction=0)


@rules
@pytest.mark.parametrize("kernel", KERNELS)
def test_standard_normal(device, kernel, rule):
    """Started three deviations away and twice as wide."""
    start = 3 + 2 * random_tensor(COUNT, 2, device=device)
    particles = move(start, lambda x: -x, 500, 1.0, bandwidth=rule, kernel=kernel)
    assert particles.mean(0).abs().max() <= MOST
    # The variance of x^2 is 2, that of x * y is 1.
    assert (covariance(particles) - torch.eye(2)).abs().max() <= math.sqrt(2) * MOST


@rules
def test_correlated_normal(device, rule):
    mean = torch.tensor([1.0, -2], device=device)
    shape = torch.tensor([[2.0, 1.2], [1.2, 1]], device=device)
    precision = torch.linalg.inv(shape)
    start = random_tensor(COUNT, 2, device=device)
    particles = move(start, lambda x: (mean - x) @ precision, 1000, 0.2, bandwidth=rule)
    deviations = shape.diagonal().sqrt().cpu()
    assert ((particles.mean(0) - mean.cpu()).abs() <= MOST * deviations).all()
    scaled = covariance(particles / deviations) - shape.cpu() / torch.outer(deviations, deviations)
    assert scaled.abs().max() <= math.sqrt(2) * MOST


@rules
def test_mixture_started_far_from_both_modes(device, rule):
    """Liu & Wang, figure 1: 1/3 N(-2, 1) + 2/3 N(2, 1) from N(-10, 1)."""
    weights = torch.tensor([1 / 3, 2 / 3], device=device)
    centres = torch.tensor([-2.0, 2], device=device)

    def score(x):
        membership = (weights.log() - (x - centres).square() / 2).softmax(1)
        return (membership * (centres - x)).sum(1, keepdim=True)

    start = -10 + random_tensor(COUNT, 1, device=device, seed=2)
    particles = move(start, score, 1000, 1.0, bandwidth=rule)
    # E x^2 = 5 and, for each mode, E x^4 = 16 + 6 * 4 + 3.
    assert abs(particles.mean() - 2 / 3) <= MOST * math.sqrt(5 - 4 / 9)
    assert abs(particles.square().mean() - 5) <= MOST * math.sqrt(43 - 25)
    assert 0.25 < (particles < 0).double().mean() < 0.42


@pytest.mark.parametrize("repulsion", [0.0, -1.0])
def test_without_repulsion_particles_collapse(device, repulsion):
    """What the moments above rest on."""
    start = random_tensor(COUNT, 2, device=device)
    particles = move(start, lambda x: -x, 500, 0.5, bandwidth=1.0, repulsion=repulsion)
    assert covariance(particles).trace() < 0.01
