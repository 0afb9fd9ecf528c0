# SPDX-License-Identifier: BSD-3-Clause
"""The kernelised Stein discrepancy: its definition, float64, published values, and its memory."""

import subprocess
import sys

import pytest
import torch

import fused_ops
from fused_ops import ksd, svgd_phi

from .cases import (
    DTYPES,
    KERNELS,
    RULES,
    assert_same_bits,
    bandwidth_by_sorting,
    exact_distances,
    random_inputs,
    random_tensor,
)

STATISTICS = ("u", "v")


def mean_of(matrix, statistic):
    if statistic == "v":
        return matrix.mean()
    return (matrix.sum() - matrix.trace()) / (len(matrix) * (len(matrix) - 1))


def exact_ksd(particles, score, *, bandwidth="median", kernel="rbf", statistic="u"):
    """In float64, from the (N, N) matrix of u."""
    x, s = particles.double() - particles.double().mean(0), score.double()
    distances = exact_distances(x)
    h = bandwidth_by_sorting(distances, bandwidth) if isinstance(bandwidth, str) else bandwidth
    dim, q = x.shape[1], distances / (2 * h)
    if kernel == "rbf":
        k = torch.exp(-q)
        slope, trace = k / h, k * (dim / h - distances / h**2)
    else:
        k = (1 + q) ** -0.5
        slope = k**3 / (2 * h)
        trace = slope * dim - 3 * k**5 * distances / (4 * h**2)
    # score_i . (x_i - x_j), of which the other gradient's term is the transpose
    along = (s * x).sum(1, keepdim=True) - s @ x.T
    return mean_of(k * (s @ s.T) + slope * (along + along.T) + trace, statistic)


def own_mean(score, h, kernel):
    """The mean of u_ii, which the terms are as large as."""
    dim = score.shape[1]
    return score.double().square().sum(1).mean() + dim / (h if kernel == "rbf" else 2 * h)


def ksd_by_definition(particles, score, h, kernel, statistic):
    """From the kernel alone: autograd takes its gradients and their divergence."""
    count, dim = particles.shape

    def k(x, y):
        q = (x - y).square().sum() / (2 * h)
        return torch.exp(-q) if kernel == "rbf" else (1 + q) ** -0.5

    u = particles.new_zeros(count, count)
    for i in range(count):
        for j in range(count):
            x, y = particles[i].clone().requires_grad_(), particles[j].clone().requires_grad_()
            k_x, k_y = torch.autograd.grad(k(x, y), (x, y), create_graph=True)
            trace = sum(torch.autograd.grad(k_x[d], y, retain_graph=True)[0][d] for d in range(dim))
            u[i, j] = k(x, y) * score[i] @ score[j] + score[i] @ k_y + score[j] @ k_x + trace
    return mean_of(u.detach(), statistic)


@pytest.mark.usefixtures("fused_only")
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_definition(kernel, statistic):
    particles, score = random_inputs(5, 3, dtype=torch.float64)
    settings = {"bandwidth": 0.8, "kernel": kernel, "statistic": statistic}
    expected = ksd_by_definition(particles, score, 0.8, kernel, statistic)
    torch.testing.assert_close(ksd(particles, score, **settings), expected)
    torch.testing.assert_close(exact_ksd(particles, score, **settings), expected)


# Six points, and the score of the normal distribution around (0.5, -0.25) with variance 1.5. The
# values are those of kgof, as it comes with sbibm 1.1.0 (sbibm.third_party.kgof), computed with
# numpy 2.4: KernelSteinTest(IsotropicNormal([0.5, -0.25], 1.5), k).compute_stat(data,
# return_ustat_gram=True), k being KGauss(0.8) or KIMQ(b=-0.5, c=1.0). "v" is the statistic over 6,
# "u" the mean of the returned matrix off its diagonal. stein_thinning 0.2.0 (vfk0_imq with the
# identity as linv) gives the same two values for imq to 15 digits.
PUBLISHED_POINTS = [[0.3, -1.2], [1.1, 0.4], [-0.7, 0.9], [2.0, -0.5], [-1.6, -0.8], [0.0, 1.7]]
PUBLISHED = {
    ("rbf", 0.8, "v"): 0.35910701240436405,
    ("rbf", 0.8, "u"): -0.29966417770735576,
    ("imq", 0.5, "v"): 0.3437200203771864,
    ("imq", 0.5, "u"): -0.21812856813996884,
}


@pytest.mark.parametrize("kernel, h, statistic", PUBLISHED)
def test_published_values(device, kernel, h, statistic):
    particles = torch.tensor(PUBLISHED_POINTS, dtype=torch.float64, device=device)
    score = (particles.new_tensor([0.5, -0.25]) - particles) / 1.5
    result = ksd(particles, score, bandwidth=h, kernel=kernel, statistic=statistic)
    assert result.item() == pytest.approx(PUBLISHED[kernel, h, statistic], rel=1e-12)


@pytest.mark.usefixtures("fused_only")
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("shape", "bandwidth"),
    [(shape, h) for shape in ((2, 1), (65, 7), (200, 4), (90, 100)) for h in (*RULES, 1.5)]
    + [((700, 3), 1.5)],
    ids=str,
)
def test_float32_and_float64(device, shape, kernel, statistic, bandwidth):
    settings = {"bandwidth": bandwidth, "kernel": kernel, "statistic": statistic}
    for dtype, tolerance in ((torch.float32, 3e-7), (torch.float64, 1e-13)):
        particles, score = random_inputs(*shape, dtype=dtype, device=device)
        particles += 1e3  # the mean takes no part
        result = ksd(particles, score, **settings)
        assert (result.shape, result.dtype, result.device) == ((), dtype, particles.device)
        h = bandwidth
        if isinstance(h, str):
            h = bandwidth_by_sorting(exact_distances(particles), h).item()
        error = (result.double() - exact_ksd(particles, score, **settings)).abs()
        assert error <= tolerance * own_mean(score, h, kernel), error


@pytest.mark.usefixtures("fused_only")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_16_bits_are_accumulated_in_float32(device, dtype, kernel):
    particles, score = random_inputs(70, 5, dtype=dtype, device=device)
    result = ksd(particles, score, kernel=kernel)
    assert_same_bits(result, ksd(particles.float(), score.float(), kernel=kernel))


@pytest.mark.parametrize("kernel", KERNELS)
def test_telling_densities_apart(device, kernel):
    """Draws from N(0, I): "u" is around zero for their density, and far from it for another."""
    particles = random_tensor(500, 3, device=device)
    fitting, shifted = (ksd(particles, mean - particles, kernel=kernel) for mean in (0.0, 1.0))
    assert abs(fitting) < 0.05
    assert shifted > 0.3


@pytest.mark.usefixtures("fused_only")
@pytest.mark.parametrize("kernel", KERNELS)
def test_v_is_the_slope_of_a_small_step(device, kernel):
    """A step along phi lowers the Kullback-Leibler divergence at the rate v: what it adds to the
    mean log density, and to the entropy, which is its divergence."""
    particles = random_tensor(40, 2, dtype=torch.float64, device=device) * 2 + 1
    h = 1.3

    def phi_at(points):
        """phi of the particles, as a field at other points: theirs have a score of zero."""
        difference = points[:, None] - particles
        q = difference.square().sum(-1, keepdim=True) / (2 * h)
        k = torch.exp(-q) if kernel == "rbf" else (1 + q) ** -0.5
        slope = k / h if kernel == "rbf" else k**3 / (2 * h)
        return (k * -particles + slope * difference).mean(1)

    settings = {"bandwidth": h, "kernel": kernel}
    phi = svgd_phi(particles, -particles, **settings)
    torch.testing.assert_close(phi, phi_at(particles))
    eps = 1e-5
    rate = (-particles * phi).sum(1).mean()
    for d in range(2):
        offset = torch.zeros_like(particles)
        offset[:, d] = eps
        rate += ((phi_at(particles + offset) - phi_at(particles - offset)) / (2 * eps))[:, d].mean()
    torch.testing.assert_close(
        ksd(particles, -particles, statistic="v", **settings), rate, rtol=1e-7, atol=0
    )


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients(kernel, statistic):
    particles, score = random_inputs(6, 2, dtype=torch.float64)
    settings = {"bandwidth": 1.1, "kernel": kernel, "statistic": statistic}
    assert torch.autograd.gradcheck(
        lambda x, s: ksd(x, s, **settings),
        (particles.requires_grad_(), score.requires_grad_()),
    )
    with fused_ops.set_fallback("error"), pytest.raises(fused_ops.FallbackError, match="ksd has"):
        ksd(particles, score, **settings)


def test_inputs(device):
    """A function as score, a bandwidth tensor, particles at one place, one particle, NaN."""
    particles = random_tensor(20, 3, device=device)
    kept = particles.clone()
    assert_same_bits(ksd(particles, torch.neg), ksd(particles, -particles))
    h = torch.tensor(0.7, dtype=torch.float64, device=device)
    assert_same_bits(
        ksd(particles, torch.neg, bandwidth=h), ksd(particles, torch.neg, bandwidth=h.float())
    )
    assert_same_bits(particles, kept)
    same = particles[:1].expand(4, 3)
    own = particles[0].square().sum() + 3  # h is 1
    torch.testing.assert_close(ksd(same, torch.neg), own)
    torch.testing.assert_close(ksd(particles[:1], torch.neg, statistic="v"), own)
    assert ksd(torch.full_like(particles, torch.nan), torch.neg).isnan()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"particles": torch.ones(3)}, ValueError, r"particles: .*\(N, dim\), got \(3,\)"),
        ({"particles": torch.ones(2, 4, 3)}, ValueError, r"particles: .*, got \(2, 4, 3\)"),
        ({"score": torch.ones(4, 2)}, ValueError, r"score: .* \(4, 3\), got \(4, 2\)"),
        ({"bandwidth": "mean"}, ValueError, "median, paper, reference, got 'mean'"),
        ({"kernel": "gauss"}, ValueError, "kernel: expected one of rbf, imq, got 'gauss'"),
        ({"statistic": "w"}, ValueError, "statistic: expected one of u, v, got 'w'"),
        ({"particles": torch.ones(1, 3), "score": torch.ones(1, 3)}, ValueError, "least 2 .* 1"),
        ({"particles": torch.ones(0, 3), "score": torch.ones(0, 3), "statistic": "v"}, ValueError,
         "particles: expected at least 1 .* got 0"),
    ],
)  # fmt: skip
def test_errors(changes, error, text):
    with pytest.raises(error, match=text):
        ksd(**{"particles": torch.ones(4, 3), "score": torch.ones(4, 3)} | changes)


def test_explain():
    particles, score = random_inputs(9, 3)
    assert str(fused_ops.explain(ksd, particles, score)).startswith("ksd: fused (device=cpu")
    assert "trace=pytorch" in str(fused_ops.explain(ksd, particles, score, kernel="imq"))
    assert fused_ops.explain(ksd, particles.requires_grad_(), score).path == "pytorch"


MEASURE = """
import re
import torch
from fused_ops import ksd

def resident(kind):
    with open("/proc/self/status") as status:
        return int(re.search(rf"Vm{kind}:\\s+(\\d+)", status.read())[1]) / 1024

torch.set_num_threads(2)
for kernel in ("rbf", "imq"):  # loads what it needs
    ksd(torch.randn(64, 8), torch.neg, kernel=kernel)
particles = torch.randn(4000, 8)
for kernel in ("rbf", "imq"):
    before = resident("RSS")
    ksd(particles, torch.neg, kernel=kernel)
    print(resident("HWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_cpu_memory():
    """An (N, N) matrix would be 61 MB."""
    process = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    for megabytes in process.stdout.split():
        assert float(megabytes) <= 30


@pytest.mark.cuda
@pytest.mark.usefixtures("fused_only")
@pytest.mark.parametrize("kernel", KERNELS)
def test_many_particles_on_cuda(kernel):
    particles = random_tensor(5000, 20)
    settings = {"kernel": kernel, "bandwidth": 9.0}
    result = ksd(particles.cuda(), torch.neg, **settings).cpu()
    error = (result - ksd(particles, torch.neg, **settings)).abs()
    assert error <= 1e-6 * own_mean(particles, 9.0, kernel)


@pytest.mark.cuda
@pytest.mark.usefixtures("fused_only")
@pytest.mark.parametrize("kernel", KERNELS)
def test_cuda_memory_and_no_waiting(kernel):
    """An (N, N) matrix would be 10 GB."""
    inputs = random_inputs(50_000, 30, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = ksd(*inputs, kernel=kernel)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.isfinite()
    assert (torch.cuda.max_memory_allocated() - before) / 2**20 < 300
