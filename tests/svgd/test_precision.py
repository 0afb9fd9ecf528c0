# SPDX-License-Identifier: BSD-3-Clause
"""The kernel function itself, distances far from the origin, and what 16-bit results keep."""

import pytest
import torch

from fused_ops import median_bandwidth, svgd_phi, svgd_step

from .cases import (
    DTYPES,
    KERNELS,
    check_phi,
    distances_op,
    error_of_norm,
    exact_phi,
    random_inputs,
    random_tensor,
)

pytestmark = pytest.mark.usefixtures("fused_only")

kernels = pytest.mark.parametrize("kernel", KERNELS)


def kernel_matrix(particles, h, kernel):
    """K, as phi without repulsion of unit scores; N is a power of two, so nothing is rounded."""
    count = len(particles)
    assert particles.shape == (count, count)
    assert count & (count - 1) == 0
    units = count * torch.eye(count, dtype=particles.dtype, device=particles.device)
    return svgd_phi(particles, units, bandwidth=h, kernel=kernel, repulsion=0.0)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [16, 128])
def test_kernel_matrix(device, count, dtype, kernel):
    """numpyro#1435, #1430: symmetric to the bit, exactly 1 at distance 0, and positive.

    The exponent may be wrong by two roundings, which e^-u multiplies by u; e^x itself and the rest
    by a few.
    """
    particles = random_tensor(count, count, dtype=dtype, device=device)
    particles[count // 2] = particles[1]
    h = 0.13 * count  # weights from 1 down to e^-15
    k = kernel_matrix(particles, h, kernel)
    assert torch.equal(k, k.T)
    assert (k.diagonal() == 1).all()
    assert k[1, count // 2] == 1
    u = distances_op(particles).double() / (2 * h)
    exact = torch.exp(-u) if kernel == "rbf" else (1 + u) ** -0.5
    assert ((k - exact).abs() <= (4 + 2 * u) * torch.finfo(dtype).eps * exact).all()


@pytest.mark.parametrize(("dtype", "lowest"), [(torch.float32, -87), (torch.float64, -708)])
def test_exp_over_its_whole_range(device, dtype, lowest):
    """d2 = k^2 of particles on a line, with h such that the last weight is just a normal number."""
    particles = torch.zeros(512, 512, dtype=dtype, device=device)
    particles[:, 0] = torch.arange(512)
    h = 511**2 / (2 * -lowest)
    k = kernel_matrix(particles, h, "rbf")
    u = torch.arange(512, dtype=torch.float64, device=device).square() / (2 * h)
    exact = torch.exp(-u)
    if dtype == torch.float64:  # exp of a rounded u, in torch as well
        assert ((k[0] - exact).abs() <= (4 + 3 * u) * 2**-52 * exact).all()
    else:
        # CUDA multiplies weights in two halves, whose last bit is 2^-38 of the largest weight.
        last_bit = 2**-38 if device == "cuda" else 0
        assert ((k[0] - exact).abs() <= (4 + 2 * u) * 2**-23 * exact + last_bit).all()
    if device == "cpu" or dtype == torch.float64:
        assert (k[0, -1] > 0) & (k[0, -1] < 1e-37)
    beyond = kernel_matrix(particles, h / 8, "rbf")  # to e^-696 and e^-5664
    assert beyond.isfinite().all()
    assert (beyond.diff() <= 0)[0].all()
    assert beyond[0, -1] == 0


@kernels
@pytest.mark.parametrize("shift", [1e3, -3e4])
def test_cloud_far_from_the_origin(device, shift, kernel):
    """scikit-learn#9354: held to the float64 phi of these very particles, as any other cloud is."""
    particles, score = random_inputs(200, 7, device=device)
    particles += shift
    check_phi(svgd_phi(particles, score, kernel=kernel), particles, score, kernel=kernel)


@kernels
@pytest.mark.parametrize("apart", [1e3, 1e6])
def test_two_tight_clusters_far_apart(device, apart, kernel):
    """Distances within a cluster would drown in |x|^2 + |y|^2 - 2xy; also in the repulsion."""
    particles, score = random_inputs(200, 7, device=device)
    particles[100:] += apart
    settings = {"bandwidth": 3.0, "kernel": kernel}
    check_phi(svgd_phi(particles, score, **settings), particles, score, **settings)
    alone = torch.zeros_like(score)
    check_phi(svgd_phi(particles, alone, **settings), particles, alone, **settings)


@kernels
def test_many_particles_lose_no_digits(device, kernel):
    """Sums of one sign over all N: one accumulator would be wrong by up to N roundings."""
    particles, score = random_inputs(4096, 2, device=device)
    score = score.abs() + 1
    settings = {"bandwidth": 50.0, "kernel": kernel, "repulsion": 0.0}
    rows = torch.arange(0, 4096, 41, device=device)
    phi = svgd_phi(particles, score, **settings)[rows]
    exact = exact_phi(particles, score, rows=rows, **settings)
    assert error_of_norm(phi, exact) <= 1e-6  # a naive sum loses about 1e-5


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@kernels
@pytest.mark.parametrize("shape", [(50, 6), (300, 33)], ids=str)
def test_16_bit_error_is_one_rounding(device, shape, dtype, kernel):
    """Half a unit of the result's type, and a little that float32 sums may tip over."""
    particles, score = random_inputs(*shape, dtype=dtype, device=device)
    info = torch.finfo(dtype)
    for result, exact in (
        (svgd_phi(particles, score, kernel=kernel), exact_phi(particles, score, kernel=kernel)),
        (
            svgd_step(particles, score, 0.25, kernel=kernel),
            particles.double() + 0.25 * exact_phi(particles, score, kernel=kernel),
        ),
    ):
        assert result.dtype == dtype
        allowed = 0.5 * info.eps * exact.abs() + info.smallest_normal * info.eps + 1e-5
        assert ((result - exact).abs() <= allowed).all()


def test_float16_sums_beyond_its_range(device):
    """Scores of 6e4 add up to more than float16 holds before their mean is taken."""
    particles = torch.zeros(100, 2, dtype=torch.float16, device=device)
    score = torch.full_like(particles, 6e4)
    assert torch.equal(svgd_phi(particles, score), score)
    particles[:50] = 300  # d2 is 180,000
    assert svgd_phi(particles, score).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("side", [0.999, 1.001])
@pytest.mark.parametrize("count", [100, 2100])
def test_either_side_of_centred_products(device, count, side, dtype):
    """Repulsion is split around the mean where no particle is further from it than sqrt(64 h)."""
    particles, score = random_inputs(count, 16, dtype=dtype, device=device)
    particles[0] *= 20
    furthest = (particles - particles.mean(0)).square().sum(1).max().item()
    check_phi(
        svgd_phi(particles, score, bandwidth=furthest / 64 * side),
        particles,
        score,
        bandwidth=furthest / 64 * side,
    )


@pytest.mark.parametrize("places", [0, 3, 10])
@pytest.mark.parametrize("count", [1152, 2304])
def test_highest_errs_at_most_twice_as_much_as_eager(device, count, places):
    """Two tight clusters, and one: roundings that all pairs share would not average out."""
    particles, score = random_inputs(count, 64, device=device)
    if places:
        particles *= 1 / places
        particles[::2] += places
        particles[1::2] -= places
    h = median_bandwidth(particles)
    rows = torch.arange(0, len(particles), 9, device=device)
    exact = exact_phi(particles, score, rows=rows, bandwidth=h.double())
    phi = svgd_phi(particles, score, bandwidth=h, precision="highest")[rows]
    differences = particles[rows, None] - particles
    weight = torch.exp(-differences.square().sum(-1) / (2 * h))
    repelled = (weight[:, :, None] * differences).sum(1) / h
    eager = (weight @ score + repelled) / len(particles)
    assert error_of_norm(phi, exact) <= 2 * error_of_norm(eager, exact)
