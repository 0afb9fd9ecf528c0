# SPDX-License-Identifier: BSD-3-Clause
"""Inputs without a spread, without particles, or with NaN and inf: defined, and never a hang."""

import math

import pytest
import torch

from fused_ops import median_bandwidth, set_fallback, svgd_phi, svgd_step
from fused_ops.svgd import reference

from .cases import (
    DTYPES,
    KERNELS,
    RULES,
    assert_same_bits,
    check_phi,
    random_inputs,
    random_tensor,
)

pytestmark = pytest.mark.usefixtures("fused_only")

rules = pytest.mark.parametrize("rule", RULES)
kernels = pytest.mark.parametrize("kernel", KERNELS)


@kernels
@rules
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3), (5, 0), (0, 0), (1, 0)], ids=str)
def test_nothing_in_nothing_out(device, shape, dtype, rule, kernel):
    empty = torch.ones(shape, dtype=dtype, device=device)
    settings = {"bandwidth": rule, "kernel": kernel}
    with set_fallback("allow"):
        for result in (
            svgd_phi(empty, empty, **settings),
            svgd_phi(empty, lambda x: -x, **settings),
            svgd_step(empty, empty, 0.1, **settings),
        ):
            assert (result.shape, result.dtype, result.device) == (shape, dtype, empty.device)
        assert median_bandwidth(empty, rule).item() == 1


@kernels
@pytest.mark.parametrize("bandwidth", [*RULES, 0.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_particle_follows_its_score(device, dtype, bandwidth, kernel):
    """numpyro#1601: K is 1 and its gradient 0."""
    particle, score = random_inputs(1, 7, dtype=dtype, device=device)
    assert_same_bits(svgd_phi(particle, score, bandwidth=bandwidth, kernel=kernel), score)


@kernels
@rules
@pytest.mark.parametrize("place", [0.0, 1e-30, 1 / 3, -7e7])
def test_identical_particles_take_the_mean_score(device, place, rule, kernel):
    """numpyro#1626."""
    score = random_tensor(50, 3, device=device)
    particles = torch.full_like(score, place)
    phi = svgd_phi(particles, score, bandwidth=rule, kernel=kernel)
    assert torch.equal(phi, phi[:1].expand_as(phi))
    expected = score.double().mean(0)
    assert (phi[0] - expected).abs().max() <= 1e-6  # 50 additions of numbers around 1


@kernels
@rules
@pytest.mark.parametrize("sizes", [(50, 200), (200, 50), (1, 99), (70, 70)], ids=str)
def test_collapsed_groups(device, sizes, rule, kernel):
    """hyppo#92, dowhy#1664: the median of d2 may be zero."""
    score = random_tensor(sum(sizes), 3, device=device)
    particles = torch.cat([torch.full((size, 3), float(i)) for i, size in enumerate(sizes)])
    particles = particles.to(device)
    phi = svgd_phi(particles, score, bandwidth=rule, kernel=kernel)
    check_phi(phi, particles, score, bandwidth=rule, kernel=kernel)
    first = phi[: sizes[0]]  # not to the bit: each is summed with its neighbours in memory
    assert (first - first[:1]).abs().max() <= 1e-6


@kernels
@pytest.mark.parametrize("bandwidth", [1e-44, 1e-300, 1e300])
def test_bandwidth_beyond_float32(device, bandwidth, kernel):
    """Each particle by itself, or all as one; with equal rows, for which 0 / h must stay 0."""
    particles, score = random_inputs(8, 3, device=device)
    particles[5] = particles[2]
    phi = svgd_phi(particles, score, bandwidth=bandwidth, kernel=kernel)
    if bandwidth < 1:
        expected = score / 8
        expected[[2, 5]] = (score[2] + score[5]) / 8
    else:
        expected = score.mean(0).expand_as(score)
    torch.testing.assert_close(phi, expected)


def test_subnormal_distances(device):
    particles = 1e-20 * random_tensor(20, 2, device=device)  # d2 is below the normal numbers
    phi = svgd_phi(particles, torch.ones_like(particles), repulsion=0.0)
    assert phi.isfinite().all()
    assert (phi > 0).all()


# NaN and inf

BAD_VALUES = (math.nan, math.inf, -math.inf)


@kernels
@pytest.mark.parametrize("value", BAD_VALUES)
@pytest.mark.parametrize("row", [0, 17, 129])
def test_bad_particle_as_in_the_reference(device, row, value, kernel):
    """The pattern of NaN in other rows, and what is finite in other columns."""
    particles, score = random_inputs(130, 3, device=device)
    particles[row, 1] = value
    for bandwidth in (*RULES, 0.7):
        h = bandwidth
        if isinstance(h, str):
            h = median_bandwidth(particles, h)
            torch.testing.assert_close(h, reference.bandwidth(particles, bandwidth), equal_nan=True)
            assert h.isnan() == math.isnan(value)
        phi = svgd_phi(particles, score, bandwidth=bandwidth, kernel=kernel)
        expected = reference.phi(particles, score, h, kernel, 1.0)
        # The distance of an infinite particle from itself is no number, which CUDA does not form.
        assert expected[row].isnan().all()
        assert phi[row].isnan().any()
        others = torch.arange(130, device=device) != row
        torch.testing.assert_close(
            phi[others], expected[others], equal_nan=True, rtol=1e-4, atol=1e-6
        )


@kernels
@pytest.mark.parametrize("value", BAD_VALUES)
def test_bad_score_spoils_its_column_alone(device, value, kernel):
    particles, score = random_inputs(130, 3, device=device)
    clean = svgd_phi(particles, score, kernel=kernel)
    score[70, 1] = value
    phi = svgd_phi(particles, score, kernel=kernel)
    expected = torch.full_like(phi[:, 1], value)
    torch.testing.assert_close(phi[:, 1], expected, equal_nan=True)
    # Not to the bit: it makes the CUDA kernels take their other form for a block of dimensions.
    torch.testing.assert_close(phi[:, ::2], clean[:, ::2], rtol=1e-5, atol=1e-6)


@rules
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 3, 65, 1024, 2049])
def test_nan_distance_makes_the_median_nan(device, count, dtype, rule):
    """Wherever it is, and however many there are: one row, and all."""
    particles = random_tensor(count, 2, dtype=dtype, device=device)
    for rows in (0, count - 1, slice(None)):
        spoiled = particles.clone()
        spoiled[rows, 1] = math.nan
        assert median_bandwidth(spoiled, rule).isnan()
    particles[:2, 0] = math.inf  # inf - inf
    assert median_bandwidth(particles, rule).isnan()


@kernels
@rules
@pytest.mark.parametrize("place", [1e30, math.inf])
def test_distances_all_beyond_float32(device, place, rule, kernel):
    particles = place * torch.tensor([[1.0], [-1], [0]], device=device)
    expected = reference.bandwidth(particles, rule)
    torch.testing.assert_close(median_bandwidth(particles, rule), expected, equal_nan=True)
    assert svgd_phi(particles, particles, bandwidth=rule, kernel=kernel).isnan().all()


@kernels
@pytest.mark.parametrize("repulsion", BAD_VALUES)
def test_bad_repulsion_and_bad_bandwidth_tensor_reach_the_result(device, repulsion, kernel):
    inputs = random_inputs(5, 2, device=device)
    assert svgd_phi(*inputs, repulsion=repulsion, kernel=kernel).isnan().all()
    h = torch.tensor(math.nan, device=device)
    assert svgd_phi(*inputs, bandwidth=h, kernel=kernel).isnan().all()
    assert not svgd_step(*inputs, repulsion, kernel=kernel).isfinite().any()


@pytest.mark.usefixtures("poisoned_memory")
@kernels
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (65, 33), (130, 70), (2049, 3)], ids=str)
def test_all_memory_is_written(device, shape, kernel):
    """Both the result's and that which the passes keep between them."""
    particles, score = random_inputs(*shape, device=device)
    for rule in RULES:
        h = median_bandwidth(particles, rule).item()
        settings = {"kernel": kernel, "rows": slice(None, None, 37)}
        phi = svgd_phi(particles, score, bandwidth=rule, kernel=kernel)
        assert phi.isfinite().all()
        check_phi(phi[::37], particles, score, bandwidth=h, **settings)


@kernels
def test_neighbours_of_the_input_are_not_read(device, kernel):
    """NaN before and after the rows, and beside them."""
    particles, score = random_inputs(66, 5, device=device)
    expected = svgd_phi(particles, score, kernel=kernel)
    fenced = torch.full((2, 70, 9), math.nan, device=device)
    fenced[0, 2:68, 2:7], fenced[1, 2:68, 2:7] = particles, score
    inside = fenced[:, 2:68, 2:7]
    assert_same_bits(svgd_phi(*inside, kernel=kernel), expected)
