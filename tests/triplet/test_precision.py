# SPDX-License-Identifier: BSD-3-Clause
"""Values at the ends of a type's range, and what 16-bit results keep."""

import math

import pytest
import torch

from fused_ops import explain, set_fallback, triplet_margin_loss

from .cases import (
    DTYPES,
    NORMS,
    check_by_hand,
    in_float64,
    loss_and_gradients,
    random_inputs,
    random_tensor,
    torch_loss,
)

pytestmark = pytest.mark.usefixtures("fused_only")

half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def test_a_tiny_eps_leaves_gradients_finite_in_16_bits(device):
    """Fault 12: 1e-12 is nothing in float16, and its square little in float32."""
    for p in NORMS:
        inputs = [torch.ones(3, 8, dtype=torch.float16, device=device)] * 3
        results = loss_and_gradients(triplet_margin_loss, inputs, p=p, eps=1e-12, swap=True)
        assert all(result.isfinite().all() for result in results)


def test_float16_differences_beyond_its_range(device):
    """Fault 10: 80,000 is inf in float16, where torch gives NaN."""
    check_by_hand([[4e4], [-4e4], [-4e4]], device, torch.float16, loss=1.0)


def test_float16_squares_beyond_its_range(device):
    check_by_hand([[3e2] * 4, [0] * 4, [0] * 4], device, torch.float16, loss=1.0)


def test_float32_squares_beyond_its_range_are_as_torch_s(device):
    """Fault 9: the distances would fit, their squares do not, and inf - inf is NaN."""
    inputs = [torch.full((1, 4), value, device=device) for value in (1e20, 0.0, 0.0)]
    loss = triplet_margin_loss(*inputs)
    assert loss.isnan()
    assert torch_loss(*inputs).isnan()


def check_equal_differences(rows, dim, device, dtype, p):
    """In whose sum all roundings are to one side."""
    inputs = [torch.full((rows, dim), x, dtype=dtype, device=device) for x in (0.1, 0.0, 0.1)]
    loss = triplet_margin_loss(*inputs, p=p, eps=0, reduction="none")
    exact = 1 + dim ** (1 / p) * inputs[0][0, 0].double()
    tolerance = 5e-6 if dtype == torch.float32 else 2e-14
    torch.testing.assert_close(loss.double(), exact.expand(rows), rtol=tolerance, atol=0)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [16_381, 70_001, 4_000_000])
def test_errors_do_not_grow_with_the_row(device, dim, dtype, p):
    check_equal_differences(3, dim, device, dtype, p)


@pytest.mark.cuda
@pytest.mark.parametrize("p", [1, 2])
def test_errors_of_more_long_rows_than_multiprocessors(p):
    check_equal_differences(140, 1_000_000, "cuda", torch.float32, p)


@pytest.mark.parametrize("value", [1e20, 1e-25])
def test_the_norm_of_one_element_squares_nothing(device, value):
    """torch takes its absolute value there, so nothing overflows or underflows."""
    inputs = [torch.full((1, 1), x, device=device) for x in (0.0, value, 0.0)]
    results = loss_and_gradients(triplet_margin_loss, inputs, eps=0)
    torch.testing.assert_close(results, loss_and_gradients(torch_loss, inputs, eps=0))
    assert results[2].item() == 1


@half
@pytest.mark.parametrize("p", NORMS)
def test_16_bit_batch_with_duplicate_rows(device, dtype, p):
    """Fault 14: finite, and as close to float64 as the result's type can be."""
    inputs = random_inputs(64, 128, dtype=dtype, device=device)
    inputs[1][:16] = inputs[0][:16]
    inputs[2][8:24] = inputs[0][8:24]
    results = loss_and_gradients(triplet_margin_loss, inputs, p=p, swap=True, reduction="none")
    exact = in_float64(inputs, p=p, swap=True, reduction="none")
    for result, truth in zip(results, exact, strict=True):
        torch.testing.assert_close(
            result.double(), truth, rtol=torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps
        )


@half
def test_16_bit_mean_is_rounded_once(device, dtype):
    """Losses of 0.4 and 0.9 steps above 1: the mean, 0.65, rounds up; that of 0 and 1 would not."""
    step = torch.finfo(dtype).eps
    anchor = torch.zeros(1000, 1, dtype=dtype, device=device)
    positive = torch.full_like(anchor, 0.4 * step)
    positive[::2] = 0.9 * step
    loss = triplet_margin_loss(anchor, positive, anchor, eps=0)
    assert loss.item() == 1 + step


@pytest.mark.parametrize("p", [0.05, 80.0, 3.0, 0.0, -math.inf, math.nan, 1.5], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_norms_are_torch_s_own(device, dtype, p):
    """Faults 7, 8 and 12: whatever the installed torch makes of them."""
    inputs = [x * 4 for x in random_inputs(8, 64, dtype=dtype, device=device)]
    with set_fallback("allow"):
        assert f"p={p} (" in str(explain(triplet_margin_loss, *inputs, p=p))
        results = triplet_margin_loss(*inputs, p=p)
    torch.testing.assert_close(results, torch_loss(*inputs, p=p), equal_nan=True, rtol=0, atol=0)


def test_random_rows_near_each_other(device):
    """Distances far below eps: no cancellation, since differences are formed directly."""
    anchor = random_tensor(32, 48, device=device)
    inputs = [anchor, anchor + 1e-6 * random_tensor(32, 48, device=device, seed=1), anchor + 1e-5]
    results = loss_and_gradients(triplet_margin_loss, inputs, eps=1e-12, margin=1e-6)
    exact = in_float64(inputs, eps=1e-12, margin=1e-6)
    torch.testing.assert_close([x.double() for x in results], exact, rtol=1e-4, atol=1e-7)
