# SPDX-License-Identifier: BSD-3-Clause
"""Many calls, and too little memory."""

import re
import subprocess
import sys

import pytest
import torch
from every_op import make_inputs, run_every_op

from fused_ops import svgd_phi, triplet_margin_loss

pytestmark = pytest.mark.usefixtures("fused_only")

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")


def resident_bytes():
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status.read())[1])


@linux
@pytest.mark.slow
def test_100_000_calls_leave_no_memory_behind(device):
    """Of several shapes, dtypes and settings; host and device memory after each tenth."""
    inputs = [
        make_inputs(device, dtype, [(rows, dim)])
        for dtype in (torch.float32, torch.bfloat16)
        for rows, dim in ((3, 1), (8, 16), (20, 33), (64, 7))
    ]
    calls_of_a_round = 8  # a loss with gradients, phi, a step, a median, and the discrepancy's
    curve = []
    for _ in range(11):
        for number in range(10_000 // calls_of_a_round):
            run_every_op(inputs[number % len(inputs)])
        on_device = 0
        if device == "cuda":
            torch.cuda.synchronize()
            on_device = torch.cuda.memory_reserved()
        curve.append((resident_bytes(), on_device))
    print("resident and reserved MB:", [(h >> 20, d >> 20) for h, d in curve])
    # The first tenth loads and caches.
    assert curve[-1][0] - curve[1][0] < 4 * 2**20, curve
    assert curve[-1][1] == curve[1][1], curve


OUT_OF_MEMORY = """
import re, resource
import torch
from fused_ops import (
    median_bandwidth, set_fallback, svgd_phi, triplet_margin_loss, triplet_margin_loss_indexed
)

set_fallback("error")
torch.set_num_threads(1)
few = torch.randn(3, 8, 4).unbind()
before = svgd_phi(*few[:2]), triplet_margin_loss(*few)
particles = torch.randn(400_000, 64)
embeddings = [torch.randn(300_000, 32).requires_grad_() for _ in range(3)]
loss = triplet_margin_loss(*embeddings)
rows = torch.randn(3, 8, requires_grad=True)
indexed = triplet_margin_loss_indexed(rows, *torch.randint(3, (3, 4_300_000)))


def leave(megabytes):
    with open("/proc/self/status") as status:
        size = 1024 * int(re.search(r"VmSize:\\s+(\\d+)", status.read())[1])
    resource.setrlimit(resource.RLIMIT_AS, (size + megabytes * 2**20, resource.RLIM_INFINITY))


for megabytes in (8, 60, 97):
    for call in (
        lambda: torch.autograd.grad(loss, embeddings, retain_graph=True),  # 3 x 37 MB
        lambda: torch.autograd.grad(indexed, rows, retain_graph=True),  # 98 MB on the way
        lambda: svgd_phi(particles, particles, bandwidth=1.0),  # 98 MB, and twice that on the way
        lambda: median_bandwidth(particles),  # 98 MB on the way
    ):
        leave(megabytes)
        try:
            call()
            print("no error")
        except RuntimeError as error:
            print(error)
after = svgd_phi(*few[:2]), triplet_margin_loss(*few)
assert all(torch.equal(x, y) for x, y in zip(before, after))
"""


@linux
def test_too_little_memory_on_the_cpu():
    """In the middle of a call too: an error that says so, and a process that goes on."""
    process = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert len(lines) == 12
    assert all("out of memory. Tried to allocate" in line for line in lines), lines


@pytest.mark.cuda
def test_too_little_memory_on_cuda():
    few = make_inputs("cuda")
    before = run_every_op(few)
    # Of 512 MB each, so that what the allocator has left over does not count.
    particles = torch.randn(2_000_000, 64, device="cuda")
    embeddings = [torch.randn(2_000_000, 64, device="cuda").requires_grad_() for _ in range(3)]
    loss = triplet_margin_loss(*embeddings)
    loss.backward(retain_graph=True)  # the gradients that the forward has formed
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        for megabytes in (100, 600, 1200):
            most = torch.cuda.memory_reserved() + megabytes * 2**20
            torch.cuda.set_per_process_memory_fraction(most / total)
            calls = [lambda: torch.autograd.grad(loss, embeddings, retain_graph=True)]
            if megabytes < 1000:  # phi, and as much and more on the way
                calls += [lambda: svgd_phi(particles, particles, bandwidth=1.0)]
            for call in calls:
                with pytest.raises(RuntimeError, match="CUDA out of memory"):
                    call()
                torch.cuda.empty_cache()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for result, other in zip(run_every_op(few), before, strict=True):
        assert torch.equal(result, other)
