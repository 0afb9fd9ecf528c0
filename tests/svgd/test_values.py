# SPDX-License-Identifier: BSD-3-Clause
"""phi and the step against float64, over everything the kernels take."""

import math

import pytest
import torch

from fused_ops import median_bandwidth, svgd_phi, svgd_step
from fused_ops.svgd import reference

from .cases import (
    DTYPES,
    KERNELS,
    RULES,
    TOLERANCES,
    assert_same_bits,
    check_phi,
    error_of_norm,
    exact_phi,
    random_inputs,
    recorded_ops,
)

pytestmark = pytest.mark.usefixtures("fused_only")

DIMS = (1, 2, 3, 7, 31, 32, 33, 64, 100, 257, 1030)
# One particle and few, tiles of 64, and each count at which a policy changes, with its neighbours.
COUNTS = (1, 2, 3, 5, 63, 64, 65, 130, 700)
SWITCHES = (1023, 1024, 1025, 2047, 2048, 2049)
GRID = [("cpu", count, dim) for count in COUNTS for dim in DIMS]
GRID += [("cpu", count, 3) for count in SWITCHES] + [("cpu", 4096, 1), ("cpu", 4096, 33)]
GRID += [
    pytest.param("cuda", count, dim, marks=pytest.mark.cuda)
    for count in (*COUNTS, *SWITCHES, 4096)
    for dim in DIMS
]


def phi_by_definition(particles, score, h, kernel, repulsion):
    """The sum over pairs, where autograd takes the kernel's gradient."""
    phi = torch.zeros_like(particles)
    for i, x_i in enumerate(particles):
        for x_j, score_j in zip(particles, score, strict=True):
            x_j = x_j.clone().requires_grad_()
            u = (x_i - x_j).square().sum() / (2 * h)
            k = torch.exp(-u) if kernel == "rbf" else (1 + u) ** -0.5
            (gradient,) = torch.autograd.grad(k, x_j)
            phi[i] += (k.detach() * score_j + repulsion * gradient) / len(particles)
    return phi


@pytest.mark.parametrize("repulsion", [1.0, -0.5])
@pytest.mark.parametrize("kernel", KERNELS)
def test_everything_agrees_with_the_definition(kernel, repulsion):
    """The kernels, the reference, and the oracle of the other tests, each for itself."""
    particles, score = random_inputs(7, 3, dtype=torch.float64)
    settings = {"bandwidth": 0.8, "kernel": kernel, "repulsion": repulsion}
    expected = phi_by_definition(particles, score, 0.8, kernel, repulsion)
    for function in (svgd_phi, reference.phi, exact_phi):
        torch.testing.assert_close(function(particles, score, **settings), expected)


@pytest.mark.parametrize("rule", RULES)
def test_reference_has_the_oracle_s_bandwidth(rule):
    for count in (1, 2, 3, 6, 7):
        particles, score = random_inputs(count, 3, dtype=torch.float64)
        h = reference.bandwidth(particles, rule)
        expected = exact_phi(particles, score, bandwidth=rule)
        torch.testing.assert_close(reference.phi(particles, score, h, "rbf", 1.0), expected)


@pytest.mark.parametrize(("device", "count", "dim"), GRID)
def test_float32_error_is_small_whatever_the_shape(device, count, dim):
    particles, score = random_inputs(count, dim, device=device, seed=count + dim)
    settings = {}
    if device == "cpu" and count > 130:  # where float64 takes its time: some rows
        rows = torch.linspace(0, count - 1, 100).long()
        settings = {"rows": rows, "bandwidth": median_bandwidth(particles).item()}
    for kernel in KERNELS:
        phi = svgd_phi(particles, score, kernel=kernel)
        assert (phi.shape, phi.dtype, phi.device) == (score.shape, score.dtype, score.device)
        check_phi(phi[settings.get("rows", ...)], particles, score, kernel=kernel, **settings)


@pytest.mark.parametrize("bandwidth", [*RULES, 1.5])
@pytest.mark.parametrize("repulsion", [1.0, -2.5, 0.0])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(6, 4), (75, 33), (130, 70)], ids=str)
def test_every_setting(device, shape, dtype, kernel, repulsion, bandwidth):
    particles, score = random_inputs(*shape, dtype=dtype, device=device)
    settings = {"bandwidth": bandwidth, "kernel": kernel, "repulsion": repulsion}
    check_phi(svgd_phi(particles, score, **settings), particles, score, **settings)
    step = svgd_step(particles, score, 0.3, **settings)
    exact = particles.double() + 0.3 * exact_phi(particles, score, **settings)
    assert error_of_norm(step, exact) <= TOLERANCES[dtype]


def benchmark_entry(particles):
    """SteinVariationalGradient as benchmarks of generated kernels have it: a target N(0, I).

    Its gradient is that in x_b, and its sum over a, not b, so particles attract each other.
    """
    count = len(particles)
    differences = particles[:, None, :] - particles[None, :, :]
    squared = differences.square().sum(-1)
    h = squared.median().clamp(min=1e-5) / max(math.log(count), 1.0)
    k = torch.exp(-squared / (2 * h))
    gradients = k[:, :, None] * differences / h
    return (k @ -particles + gradients.sum(0)) / count


@pytest.mark.parametrize("seed", range(3))
def test_benchmark_entry(device, seed):
    particles = random_inputs(1024, 32, device=device, seed=seed)[0]
    phi = svgd_phi(particles, -particles, repulsion=-1.0)
    expected = benchmark_entry(particles)
    assert (phi - expected).abs().max() <= 5e-7
    assert (svgd_phi(particles, -particles) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_particles_move_apart(device, kernel):
    """At 0.1 and -0.1, with no score and h = 1: d2 is 0.04, and the sum has one term."""
    particles = torch.tensor([[0.1], [-0.1]], device=device)
    score = torch.zeros_like(particles)
    slope = math.exp(-0.02) if kernel == "rbf" else 1.02**-1.5 / 2
    for repulsion in (1.0, -1.0, 0.0):
        settings = {"bandwidth": 1.0, "kernel": kernel, "repulsion": repulsion}
        phi = svgd_phi(particles, score, **settings)
        expected = [[repulsion * slope * 0.2 / 2], [-repulsion * slope * 0.2 / 2]]
        torch.testing.assert_close(phi, torch.tensor(expected, device=device))
        spread = svgd_step(particles, score, 0.5, **settings)
        assert (spread[0] - spread[1] - 0.2).sign().item() == repulsion


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", [3, 70])
@pytest.mark.parametrize("count", [31, 63, 64, 255, 1023, 1024, 2047, 2048])
def test_particle_out_of_reach_takes_no_part(device, count, dim, kernel):
    """One more particle, whose weight is zero, may lead to another path and to no other sum."""
    particles, score = random_inputs(count + 1, dim, device=device)
    particles[-1] = 1e4 if kernel == "rbf" else 1e20
    settings = {"bandwidth": 0.6 * dim, "kernel": kernel}
    phi = svgd_phi(particles[:-1], score[:-1], **settings)
    more = svgd_phi(particles, score, **settings)[:-1] * ((count + 1) / count)
    # A few roundings of single terms, which the order of additions may change; from 2049 particles
    # on what the default precision promises, of a mean that the one has moved.
    most = 1e-6 if count < 2048 else TOLERANCES[torch.float32]
    assert error_of_norm(more, phi.double()) <= most


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shape", [(3, 2), (130, 33), (2049, 5)], ids=str)
def test_16_bits_are_read_as_they_are_and_rounded_once(device, shape, dtype, kernel):
    particles, score = random_inputs(*shape, dtype=dtype, device=device)
    with recorded_ops() as ops:
        phi = svgd_phi(particles, score, kernel=kernel)
        step = svgd_step(particles, score, 0.1, kernel=kernel)
        h = median_bandwidth(particles)
    assert not {"aten::to", "aten::_to_copy", "aten::copy_"} & ops
    wide = particles.float(), score.float()
    assert h.dtype == torch.float32
    assert_same_bits(h, median_bandwidth(wide[0]))
    assert_same_bits(phi, svgd_phi(*wide, kernel=kernel).to(dtype))
    assert_same_bits(step, svgd_step(*wide, 0.1, kernel=kernel).to(dtype))
