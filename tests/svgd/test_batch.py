# SPDX-License-Identifier: BSD-3-Clause
"""Independent problems in the leading dimensions, against one call for each."""

import math

import pytest
import torch

from fused_ops import explain, median_bandwidth, set_fallback, svgd_phi, svgd_step
from fused_ops.svgd.function import KERNELS, RULES

from .cases import DTYPES, assert_same_bits, check_phi, random_inputs, random_tensor, recorded_ops

pytestmark = pytest.mark.usefixtures("fused_only")

SHAPES = [(3, 1, 2), (5, 2, 1), (4, 64, 32), (2, 3, 40, 33), (2, 200, 7), (1, 20, 3), (2, 300, 5)]


def problems_of(shape, dtype=torch.float32, device="cpu"):
    inputs = random_inputs(math.prod(shape[:-1]), shape[-1], dtype, device)
    return [x.view(shape) for x in inputs]


def one_by_one(function, *tensors):
    problems = tensors[0].shape[:-2]
    flat = [x.reshape(-1, *x.shape[len(problems) :]) for x in tensors]
    results = torch.stack([function(*problem) for problem in zip(*flat, strict=True)])
    return results.view(*problems, *results.shape[1:])


def tolerance(dtype):
    least = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6, torch.float64: 1e-14}
    return {"rtol": least[dtype], "atol": least[dtype]}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_problem_is_by_itself(device, dtype, shape):
    x, score = problems_of(shape, dtype, device)
    before = x.clone(), score.clone()
    for kernel in KERNELS:
        for bandwidth in (*RULES, 1.5):
            settings = {"bandwidth": bandwidth, "kernel": kernel, "repulsion": 0.7}
            phi = svgd_phi(x, score, **settings)
            assert phi.shape == x.shape
            expected = one_by_one(lambda x, s, k=settings: svgd_phi(x, s, **k), x, score)
            torch.testing.assert_close(phi, expected, **tolerance(dtype))
            step = svgd_step(x, score, 0.3, **settings)
            expected = one_by_one(lambda x, s, k=settings: svgd_step(x, s, 0.3, **k), x, score)
            torch.testing.assert_close(step, expected, **tolerance(dtype))
    assert_same_bits(x, before[0])
    assert_same_bits(score, before[1])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_medians_have_the_bits_of_single_ones(device, dtype, rule):
    for shape in SHAPES:
        x, _ = problems_of(shape, dtype, device)
        first = (0,) * (len(shape) - 2)
        for kind in ("gaussian", "lattice", "equal", "mostly equal", "NaN", "far"):
            y = (2 * x).round() if kind == "lattice" else x + 1e3 if kind == "far" else x.clone()
            if kind == "equal":
                y[first] = 1
            elif kind == "mostly equal":
                y[first][: max(1, 4 * shape[-2] // 5)] = 1
            elif kind == "NaN":
                y[first][-1] = math.nan
            found = median_bandwidth(y, rule)
            assert found.shape == shape[:-2]
            expected = one_by_one(lambda x: median_bandwidth(x, rule), y)
            if kind == "mostly equal":
                # A mean, in float64 sums of another order, takes a zero median's place.
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)
            else:
                assert_same_bits(found, expected)


@pytest.mark.parametrize("count", [1, 2])
def test_no_number_comes_through(device, count):
    """Also of a particle that has no other to be compared with."""
    x, score = problems_of((3, count, 2), device=device)
    x[1, 0, 1] = math.nan
    phi = svgd_phi(x, score, bandwidth=1.0)
    assert phi[1, 0].isnan().any()
    assert phi[[0, 2]].isfinite().all()


def test_against_float64(device):
    x, score = problems_of((6, 64, 32), device=device)
    for problem, phi in enumerate(svgd_phi(x, score)):
        check_phi(phi, x[problem], score[problem])


def test_a_bandwidth_for_each_problem(device):
    x, score = problems_of((4, 20, 3), device=device)
    h = torch.tensor([0.5, 1.0, 2.0, 4.0], device=device)
    expected = one_by_one(lambda x, s, h: svgd_phi(x, s, bandwidth=h), x, score, h)
    torch.testing.assert_close(svgd_phi(x, score, bandwidth=h), expected, **tolerance(x.dtype))
    expected = one_by_one(lambda x, s: svgd_phi(x, s, bandwidth=h[2]), x, score)
    found = svgd_phi(x, score, bandwidth=h[2])
    torch.testing.assert_close(found, expected, **tolerance(x.dtype))
    with pytest.raises(ValueError, match=r"a 0-dim tensor or one of shape \(4,\) on"):
        svgd_phi(x, score, bandwidth=h[:3])


def test_layouts(device):
    x, score = problems_of((4, 20, 6), device=device)
    wide = torch.zeros(4, 20, 9, device=device)
    wide[..., 2:8] = x
    expected = svgd_phi(x, score)
    for view in (
        wide[..., 2:8],
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.mT.contiguous().mT,
    ):
        assert_same_bits(svgd_phi(view, score), expected)


def test_more_problems_than_a_grid_has_blocks(device):
    x, score = problems_of((70_001, 3, 2), device=device)
    phi = svgd_phi(x, score)
    for problem in (0, 1, 65_535, 65_536, 70_000):
        expected = svgd_phi(x[problem], score[problem])
        torch.testing.assert_close(phi[problem], expected, **tolerance(x.dtype))
    assert (median_bandwidth(x) > 0).all()


def test_is_one_op(device):
    x, score = problems_of((50, 16, 4), device=device)
    with recorded_ops() as names:
        svgd_phi(x, score)
    ops = {name for name in names if "::" in name and "empty" not in name}
    assert ops == {"fused_ops::svgd_update"}
    if device == "cuda":
        assert explain(svgd_phi, x, score).details["update"] == "batch"


def test_fallback_and_gradients(device):
    x, score = problems_of((2, 3, 10, 4), torch.float64, device)
    h = torch.rand(2, 3, device=device, dtype=torch.float64) + 1
    leaf = x.clone().requires_grad_()
    with set_fallback("allow"):
        for settings in ({}, {"bandwidth": h}, {"bandwidth": h[0, 0]}):
            phi = svgd_phi(leaf, score, **settings)
            torch.testing.assert_close(phi.detach(), svgd_phi(x, score, **settings))
            (gradient,) = torch.autograd.grad(phi.sum(), leaf)
            assert gradient.shape == x.shape and gradient.any()
        none = x[:0]
        assert svgd_phi(none, none).shape == (0, 3, 10, 4)
        assert median_bandwidth(leaf).shape == (2, 3)


def test_compiles_whole(device):
    torch._dynamo.reset()
    x, score = problems_of((3, 2, 12, 4), device=device)
    compiled = torch.compile(svgd_step, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x, score, 0.1), svgd_step(x, score, 0.1))


@pytest.mark.timing
def test_faster_than_a_loop():
    """1000 problems of 64 particles in 8 dimensions, as in Stein model-predictive control."""
    import time

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x = random_tensor(1000, 64, 8, device="cuda")

    def seconds(function):
        function()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(3):
            function()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    loop = seconds(lambda: [svgd_phi(problem, -problem) for problem in x.unbind()])
    assert loop > 20 * seconds(lambda: svgd_phi(x, -x))
