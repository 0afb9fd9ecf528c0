# SPDX-License-Identifier: BSD-3-Clause
"""Precision: what it promises on ordinary data and on data that tensor cores would spoil."""

import math

import pytest
import torch

from fused_ops import svgd_phi, svgd_step
from fused_ops.svgd import reference

from .cases import (
    KERNELS,
    assert_same_bits,
    error_of_norm,
    exact_phi,
    random_inputs,
    random_tensor,
)

PRECISIONS = {"highest": 2e-5, "high": 2e-5, "medium": 1e-3}  # error of phi on Gaussian particles
precisions = pytest.mark.parametrize("precision", PRECISIONS)
fused_only = pytest.mark.usefixtures("fused_only")


@fused_only
def test_unknown_precision(device):
    particles, score = random_inputs(5, 3, device=device)
    for call in (svgd_phi, lambda *x, **settings: svgd_step(*x, 0.1, **settings)):
        with pytest.raises(ValueError, match="precision: expected one of highest, high, medium"):
            call(particles, score, precision="low")


@fused_only
@precisions
def test_few_particles_lose_nothing(device, precision):
    """On the CPU, which has one way, and where few particles take one launch."""
    for count, dim in ((300, 33), (1000, 32), (2000, 64)):
        particles, score = gaussian_inputs(count, dim, device=device)
        exact = exact_phi(particles, score)
        phi = svgd_phi(particles, score, precision=precision)
        eager = reference.phi(
            particles, score, reference.bandwidth(particles, "median"), "rbf", 1.0
        )
        factor = 2 if precision == "highest" else 4
        assert error_of_norm(phi, exact) <= factor * error_of_norm(eager, exact) + 2e-7


def gaussian_inputs(count, dim, dtype=torch.float32, device="cuda"):
    particles = random_tensor(count, dim, dtype=dtype, device=device)
    return particles, -particles + 0.1 * random_tensor(
        count, dim, dtype=dtype, device=device, seed=1
    )


def clusters(count, dim, distance, spread):
    x = spread * random_tensor(count, dim, device="cuda")
    x[::2] += distance
    x[1::2] -= distance
    return x


AWKWARD = {
    "shifted": lambda n, d: random_tensor(n, d, device="cuda") + 1e3,
    "anisotropic": lambda n, d: (
        random_tensor(n, d, device="cuda") * torch.logspace(0, math.log10(300), d, device="cuda")
    ),
    "far tight clusters": lambda n, d: clusters(n, d, 10, 0.1),
    "clusters": lambda n, d: clusters(n, d, 3, 0.3),
    "heavy tail": lambda n, d: (
        random_tensor(n, d, device="cuda")
        / random_tensor(n, 3, device="cuda", seed=5).square().mean(1, keepdim=True).sqrt()
    ),
    "lattice": lambda n, d: (2 * random_tensor(n, d, device="cuda")).round(),
    "collapsed": lambda n, d: torch.cat(
        [torch.ones(n - n // 5, d, device="cuda"), random_tensor(n // 5, d, device="cuda")]
    ),
    "two values": lambda n, d: clusters(n, d, 1, 0),
    "tiny": lambda n, d: 1e-6 * random_tensor(n, d, device="cuda"),
    "huge": lambda n, d: 1e6 * random_tensor(n, d, device="cuda"),
}


@pytest.mark.cuda
@fused_only
class TestOnCuda:
    @precisions
    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("dim", [1, 3, 16, 33, 64, 100, 128, 200, 256, 300])
    @pytest.mark.parametrize("count", [2049, 4500])
    def test_gaussian_particles(self, count, dim, kernel, precision):
        particles, score = gaussian_inputs(count, dim)
        settings = {"kernel": kernel, "bandwidth": float(dim)}
        phi = svgd_phi(particles, score, precision=precision, **settings)
        error = error_of_norm(phi, exact_phi(particles, score, **settings))
        assert error <= PRECISIONS[precision]
        assert_same_bits(phi, svgd_phi(particles, score, precision=precision, **settings))

    @pytest.mark.parametrize("precision", ["highest", "high"])
    @pytest.mark.parametrize("data", AWKWARD)
    def test_awkward_particles(self, data, precision):
        particles = AWKWARD[data](4100, 64)
        score = random_tensor(4100, 64, device="cuda", seed=2)
        phi = svgd_phi(particles, score, precision=precision)
        assert error_of_norm(phi, exact_phi(particles, score)) <= 1e-4

    @precisions
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_16_bit_particles(self, dtype, precision):
        particles, score = gaussian_inputs(3000, 48, dtype)
        phi = svgd_phi(particles, score, precision=precision)
        exact = exact_phi(particles, score, bandwidth=svgd_bandwidth(particles))
        assert error_of_norm(phi, exact) <= torch.finfo(dtype).eps + PRECISIONS[precision]

    @precisions
    def test_step_and_strides(self, precision):
        wide = random_tensor(3000, 130, device="cuda")
        particles, score = wide[:, 1:65], wide[:, 65:129]
        settings = {"precision": precision, "bandwidth": 20.0, "repulsion": -0.5}
        phi = svgd_phi(particles.contiguous(), score.contiguous(), **settings)
        assert_same_bits(svgd_phi(particles, score, **settings), phi)
        step = svgd_step(particles, score, 0.25, **settings)
        torch.testing.assert_close(step, particles + 0.25 * phi, rtol=1e-6, atol=1e-6)

    @precisions
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_what_is_no_number_is_passed_on(self, bad, precision):
        particles, score = gaussian_inputs(2500, 32)
        score[7, 3] = bad
        phi = svgd_phi(particles, score, bandwidth=30.0, precision=precision)
        assert not phi[:, 3].isfinite().any()
        particles[7, 3] = bad
        assert not svgd_phi(particles, score, precision=precision).isfinite().all(1).any()

    @precisions
    @pytest.mark.parametrize("bandwidth", [1e-30, 1e30])
    def test_extreme_bandwidths(self, bandwidth, precision):
        particles, score = gaussian_inputs(2500, 32)
        settings = {"bandwidth": bandwidth, "repulsion": 0.0}
        phi = svgd_phi(particles, score, precision=precision, **settings)
        error = error_of_norm(phi, exact_phi(particles, score, **settings))
        assert error <= PRECISIONS[precision]


def svgd_bandwidth(particles):
    return torch.ops.fused_ops.svgd_bandwidth(particles, 0).item()
