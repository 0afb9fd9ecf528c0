# SPDX-License-Identifier: BSD-3-Clause
"""Memory in O(N * dim), SCORE#2 and CCM#1: beside what plain PyTorch takes, and for many particles.

On CPU the resident memory of a fresh process tells, at its highest; its allocator keeps what it has
had, so the call that takes least goes first.
"""

import subprocess
import sys

import pytest
import torch

from fused_ops import svgd_phi, svgd_step
from fused_ops.svgd import reference

from .cases import KERNELS, random_inputs

MEASURE = """
import re
import torch
from fused_ops import set_fallback, svgd_phi
from fused_ops.svgd import reference

def phi(particles, kernel):
    with set_fallback("error"):
        return svgd_phi(particles, -particles, kernel=kernel)

def plain(particles, kernel):
    h = reference.bandwidth(particles, "median")
    return reference.phi(particles, -particles, h, kernel, 1.0)

def resident(kind):
    with open("/proc/self/status") as status:
        return int(re.search(rf"Vm{kind}:\\s+(\\d+)", status.read())[1]) / 1024

torch.set_num_threads(2)
for function in (phi, plain):  # loads what it needs
    function(torch.randn(64, 32), "rbf")
for function, shape, kernel in (
    (phi, (1024, 32), "rbf"),
    (phi, (1024, 32), "imq"),
    (phi, (4000, 30), "rbf"),
    (plain, (1024, 32), "rbf"),
):
    particles = torch.randn(shape)
    before = resident("RSS")
    function(particles, kernel)
    print(resident("HWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_cpu_memory():
    """At most, for the highest may be that of a call before.

    The reference makes (N, N, dim) tensors, of 128 MB each here. An (N, N) matrix of the 4000
    particles would be 61 MB; they themselves are 0.5.
    """
    process = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    rbf, imq, many, plain = (float(line) for line in process.stdout.split())
    assert plain > 128
    assert rbf <= 0.05 * plain
    assert imq <= 0.05 * plain
    assert many <= 12


def cuda_megabytes(function):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


@pytest.mark.cuda
@pytest.mark.usefixtures("fused_only")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("count", "dim", "most"), [(65_536, 32, 300), (50_000, 30, 300)])
def test_cuda_memory_of_many_particles(count, dim, most, kernel):
    """(N, N) alone would be 10 GB and more."""
    inputs = random_inputs(count, dim, device="cuda")
    assert cuda_megabytes(lambda: svgd_phi(*inputs, kernel=kernel)) < most
    assert cuda_megabytes(lambda: svgd_step(*inputs, 0.1, kernel=kernel)) < most


@pytest.mark.cuda
@pytest.mark.usefixtures("fused_only")
@pytest.mark.parametrize("kernel", KERNELS)
def test_cuda_memory_beside_the_reference(kernel):
    particles, score = random_inputs(1024, 32, device="cuda")

    def plain():
        h = reference.bandwidth(particles, "median")
        return reference.phi(particles, score, h, kernel, 1.0)

    taken = cuda_megabytes(plain)
    assert taken > 128
    assert cuda_megabytes(lambda: svgd_phi(particles, score, kernel=kernel)) <= 0.05 * taken
