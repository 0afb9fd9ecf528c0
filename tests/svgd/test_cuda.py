# SPDX-License-Identifier: BSD-3-Clause
"""Streams, graphs, devices, TF32, launches of many blocks, and that the host never waits."""

import math

import pytest
import torch
from cuda_tools import capture, kernels_of

from fused_ops import explain, median_bandwidth, set_fallback, svgd_phi, svgd_step

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
)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fused_only")]

# Kept distances in small and large patches, computed ones; one chunk of dimensions and several
SHAPES = [(100, 2), (1024, 32), (1500, 100), (2500, 3), (4096, 100)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
kernels = pytest.mark.parametrize("kernel", KERNELS)


@kernels
@pytest.mark.parametrize("bandwidth", [*RULES, "tensor"])
@shapes
def test_graph_replays_on_new_inputs(shape, bandwidth, kernel):
    """Captured on a side stream; the bandwidth is found again at each replay."""
    particles, score = random_inputs(*shape, device="cuda")
    h = torch.tensor(2.0, device="cuda")
    settings = {"bandwidth": h if bandwidth == "tensor" else bandwidth, "kernel": kernel}

    def step():
        return [svgd_phi(particles, score, **settings), svgd_step(particles, score, 0.1)]

    graph, captured = capture(step)
    seen = set()
    for seed in (10, 20, 30):
        for x, new in zip((particles, score), random_inputs(*shape, seed=seed), strict=True):
            x.copy_(seed * new)
        h.fill_(seed)
        graph.replay()
        torch.cuda.synchronize()
        for result, expected in zip(captured, step(), strict=True):
            assert_same_bits(result, expected)
        seen.add(captured[0].norm().item())
    assert len(seen) == 3


@shapes
def test_side_stream_is_kept_to(shape):
    """The inputs are written there late: a kernel on another stream would read NaN."""
    new = random_inputs(*shape, device="cuda")
    expected = svgd_phi(*new), svgd_step(*new, 0.1, bandwidth="paper")
    late = [torch.full_like(x, math.nan) for x in new]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        for x, values in zip(late, new, strict=True):
            x.copy_(values)
        results = svgd_phi(*late), svgd_step(*late, 0.1, bandwidth="paper")
        torch.cuda.current_stream().synchronize()
    for result, other in zip(results, expected, strict=True):
        assert_same_bits(result, other)


@shapes
def test_scratch_memory_is_not_shared_between_streams(shape):
    """Two streams at once, each with its own distances and histograms."""
    inputs = [random_inputs(*shape, device="cuda", seed=seed) for seed in range(2)]
    expected = [svgd_phi(*x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(svgd_phi(*x))
        torch.cuda.synchronize()
        for result, other in zip(results, expected, strict=True):
            assert_same_bits(result, other)


@kernels
@shapes
def test_host_never_waits(shape, kernel):
    """Neither for a median nor for a bandwidth tensor."""
    inputs = random_inputs(*shape, device="cuda")
    h = torch.tensor(0.7, device="cuda", dtype=torch.float64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            h.item()
        for bandwidth in (*RULES, 0.7, h):
            settings = {"bandwidth": bandwidth, "kernel": kernel}
            svgd_phi(*inputs, **settings)
            svgd_step(*inputs, 0.1, **settings)
            explain(svgd_phi, *inputs, **settings)
        for rule in RULES:
            median_bandwidth(inputs[0], rule)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@shapes
def test_kernels_are_named_after_the_op(shape):
    """And nothing else runs but what clears their counters."""
    inputs = random_inputs(*shape, device="cuda")
    svgd_phi(*inputs)
    if not kernels_of(lambda: inputs[0] + 1):
        pytest.skip("the profiler sees no kernels here")
    names = kernels_of(lambda: svgd_phi(*inputs))
    assert any("svgd" in name for name in names)
    assert all("svgd" in name or "Memset" in name for name in names), names


@pytest.fixture
def tf32():
    former = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = former


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("grad", [False, True], ids=["fused", "reference"])
@pytest.mark.parametrize("shape", [(100, 2), (500, 100), (1024, 32)], ids=str)
def test_tf32_switch_changes_nothing(shape, grad):
    """pytorch#57690. TF32 products are wrong by about 3e-4."""
    particles, score = random_inputs(*shape, device="cuda")
    with set_fallback("allow"):
        phi = svgd_phi(particles.requires_grad_(grad), score).detach()
    check_phi(phi, particles.detach(), score)


@kernels
def test_many_rows_and_blocks(kernel):
    """pytorch#25045, #49928: N = 70,000 exceeds 65,535, in rows and in what splits them."""
    particles, score = random_inputs(70_000, 2, device="cuda")
    h = median_bandwidth(particles)
    phi = svgd_phi(particles, score, kernel=kernel)
    assert_same_bits(phi, svgd_phi(particles, score, bandwidth=h, kernel=kernel))
    rows = torch.cat([torch.arange(0, 70_000, 997), torch.arange(69_900, 70_000)]).cuda()
    check_phi(phi[rows], particles, score, bandwidth=h.item(), kernel=kernel, rows=rows)


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        *((dtype, 70_001) for dtype in DTYPES),
        (torch.float32, 64 * 65_536 + 1),  # more chunks than gridDim.y has room for
        (torch.float64, 16 * 65_536 + 1),
    ],
    ids=str,
)
def test_many_dimensions(dtype, dim):
    particles, score = random_inputs(3, dim, dtype=dtype, device="cuda")
    phi = svgd_phi(particles, score)
    exact = exact_phi(particles, score, bandwidth=median_bandwidth(particles).item())
    assert error_of_norm(phi, exact) <= TOLERANCES.get(dtype, torch.finfo(dtype).eps)


def test_more_than_2_to_the_31_elements():
    """Offsets of particles, scores and results; all rows but the last two are zero."""
    count, dim = 1025, 2**21
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of free GPU memory")
    particles, score = (
        torch.zeros(count, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    ends = random_inputs(2, dim, dtype=torch.bfloat16, device="cuda")
    particles[-2:], score[-2:] = ends
    h = torch.tensor(float(dim), device="cuda")
    phi = svgd_phi(particles, score, bandwidth=h)
    few = [torch.cat([x.new_zeros(1, dim), x]) for x in ends]
    weights = torch.exp(-torch.cdist(few[0].double(), few[0].double()).square() / (2 * dim))
    sources = torch.tensor([count - 2.0, 1, 1], device="cuda", dtype=torch.float64)
    x, s = (part.double() for part in few)
    weights = weights * sources
    exact = weights @ s + (weights.sum(1, keepdim=True) * x - weights @ x) / dim
    assert error_of_norm(phi[[0, -2, -1]], exact / count) <= torch.finfo(torch.bfloat16).eps
    assert torch.equal(phi[0], phi[-3])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@kernels
def test_tensors_on_a_device_that_is_not_current(kernel):
    inputs = random_inputs(300, 100, device="cuda:1")
    assert torch.cuda.current_device() == 0
    phi = svgd_phi(*inputs, kernel=kernel)
    assert phi.device == median_bandwidth(inputs[0]).device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    check_phi(phi, *inputs, kernel=kernel)
    with pytest.raises(ValueError, match="particles' cuda:1, got cuda:0"):
        svgd_phi(inputs[0], inputs[1].to("cuda:0"))
