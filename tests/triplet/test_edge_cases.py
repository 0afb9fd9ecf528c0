# SPDX-License-Identifier: BSD-3-Clause
"""Inputs that naive kernels get wrong, most of them taken from bug reports against others."""

import math

import pytest
import torch

from fused_ops import triplet_margin_loss

from .cases import (
    DTYPES,
    INPUTS,
    NORMS,
    check_by_hand,
    loss_and_gradients,
    random_inputs,
    torch_loss,
)

pytestmark = pytest.mark.usefixtures("fused_only")

half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


# NaN and inf


@pytest.mark.parametrize("place", [0, 32, 39, 70_000])
@pytest.mark.parametrize("which", range(3), ids=INPUTS)
@pytest.mark.parametrize("swap", [False, True], ids=["plain", "swap"])
@pytest.mark.parametrize("p", NORMS)
def test_nan_reaches_the_loss_and_no_other_row(device, p, swap, which, place):
    inputs = random_inputs(4, 70_001 if place == 70_000 else 40, device=device)
    clean = triplet_margin_loss(*inputs, p=p, swap=swap, reduction="none")
    inputs[which][1, place] = math.nan
    loss = triplet_margin_loss(*inputs, p=p, swap=swap, reduction="none")
    assert loss.isnan().tolist() == [False, True, False, False]
    assert torch.equal(loss[[0, 2, 3]], clean[[0, 2, 3]])
    for reduction in ("mean", "sum"):
        assert triplet_margin_loss(*inputs, p=p, swap=swap, reduction=reduction).isnan()


def spoiled_inputs(dim, value, device):
    """With the value in the last column: a row for each set of inputs that have it."""
    inputs = random_inputs(7, dim, device=device)
    for row in range(7):
        for bit, x in enumerate(inputs):
            if (row + 1) >> bit & 1:
                x[row, -1] = value
    return inputs


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("swap", [False, True], ids=["plain", "swap"])
@pytest.mark.parametrize("p", NORMS)
def test_non_finite_rows_are_as_torch_s(device, p, swap, value):
    """But for T6, a row whose loss is 0 (see below)."""
    inputs = spoiled_inputs(5, value, device)
    settings = {"p": p, "swap": swap, "reduction": "none"}
    results = loss_and_gradients(triplet_margin_loss, inputs, **settings)
    expected = loss_and_gradients(torch_loss, inputs, **settings)
    for gradient in expected[1:]:
        gradient[expected[0] == 0] = 0
    assert not expected[0].isfinite().all()
    torch.testing.assert_close(results, expected, equal_nan=True)


@pytest.mark.parametrize("p", NORMS)
def test_inactive_row_with_inf_has_zero_gradient(device, p):
    """T6. torch gives NaN there, 0 * inf: a deliberate difference."""
    rows = [[0.0, 1], [0, 2], [math.inf, 0]]
    check_by_hand(rows, device, p=p, loss=0.0, gradients=[[0.0, 0]] * 3)


@pytest.mark.parametrize("upstream", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("swap", [False, True], ids=["plain", "swap"])
@pytest.mark.parametrize("p", [1, 2])
def test_infinite_upstream_gradient_is_as_torch_s(device, p, swap, upstream):
    """A distance that the swap leaves out gives no 0 * inf, and one of zero gives one. The maximum
    norm is left out: torch also multiplies what is below the maximum."""
    inputs = random_inputs(6, 5, device=device)
    inputs[1][1], inputs[2][2] = inputs[0][1], inputs[0][2]
    inputs[1][3] = inputs[2][3] = inputs[0][3]
    settings = {"p": p, "swap": swap, "margin": 9.0, "eps": 0, "reduction": "none"}
    grad_loss = torch.full((6,), upstream, device=device)
    results = loss_and_gradients(triplet_margin_loss, inputs, grad_loss, **settings)
    expected = loss_and_gradients(torch_loss, inputs, grad_loss, **settings)
    torch.testing.assert_close(results, expected, equal_nan=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("swap", [False, True], ids=["plain", "swap"])
@pytest.mark.parametrize("p", NORMS)
def test_non_finite_single_elements_are_as_torch_s(device, p, swap, value):
    """x / |x| of p = 2 is no number there, sign(x) of p = 1 is. Kernels take one for the other."""
    inputs = spoiled_inputs(1, value, device)
    settings = {"p": p, "swap": swap, "margin": math.inf, "reduction": "none"}
    results = loss_and_gradients(triplet_margin_loss, inputs, **settings)
    expected = loss_and_gradients(torch_loss, inputs, **settings)
    torch.testing.assert_close(results, expected, equal_nan=True)


def test_nan_margin_passes_and_reaches_the_loss(device):
    inputs = random_inputs(3, 4, device=device)
    assert triplet_margin_loss(*inputs, margin=math.nan).isnan()


# The hinge, the swap and ties


def test_gradient_exactly_on_the_hinge(device):
    """Fault 2: a row is active where its unclamped loss is >= 0, not > 0."""
    rows = [[0.0, 0], [3, 4], [6, 8]]
    gradients = [[0.0, 0], [0.6, 0.8], [-0.6, -0.8]]
    check_by_hand(rows, device, margin=5, eps=0, loss=0.0, gradients=gradients)


def test_gradient_just_below_the_hinge_is_zero(device):
    rows = [[0.0, 0], [3, 4], [6, 8]]
    check_by_hand(rows, device, margin=4.9, eps=0, loss=0.0, gradients=[[0.0, 0]] * 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swap_tie_shares_half_and_half(device, dtype):
    """Fault 3: every pair of a duplicate anchor and positive is such a tie."""
    rows = [[0.0, 0], [0, 0], [3, 4]]
    gradients = [[0.3, 0.4], [0.3, 0.4], [-0.6, -0.8]]
    check_by_hand(rows, device, dtype, margin=10, eps=0, swap=True, loss=5.0, gradients=gradients)


@pytest.mark.parametrize(
    ("swap", "negative", "loss"),
    [(False, [3.0, 1], 0.8377223), (True, [3, 1], 3.0), (True, [0, 1], 3.0), (False, [0, 1], 3.0)],
)
def test_swap_takes_the_nearer_distance(device, swap, negative, loss):
    """Fault 4: neither ignored nor always positive to negative."""
    check_by_hand([[0.0, 0], [3, 0], negative], device, margin=1, eps=0, swap=swap, loss=loss)


def test_swap_measures_from_positive_to_negative(device):
    """With a large eps d(p, n) = 1.25 and d(n, p) = 0.75 differ, and so do both from d(a, n)."""
    check_by_hand([[9.0], [1], [0]], device, margin=1, eps=0.25, swap=True, loss=1 + 8.25 - 1.25)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_that_tie_for_the_maximum_share_the_gradient(device, dtype):
    """T5, with both signs."""
    rows = [[2.0, -2, 1, 2], [0, 0, 0, 0], [4, -2, 1, 2]]
    anchor = [1 / 3 + 1, -1 / 3, 0, 1 / 3]
    gradients = [anchor, [-1 / 3, 1 / 3, 0, -1 / 3], [-1.0, 0, 0, 0]]
    check_by_hand(rows, device, dtype, p=math.inf, eps=0, margin=1, loss=1.0, gradients=gradients)


@pytest.mark.parametrize("dim", [5, 33, 1030, 70_001])
def test_every_element_ties(device, dim):
    """As many ties as elements, across lanes, blocks and chunks."""
    inputs = [torch.full((2, dim), float(value), device=device) for value in (3, 1, 0)]
    loss, *gradients = loss_and_gradients(
        triplet_margin_loss, inputs, p=math.inf, margin=9, eps=0, reduction="none"
    )
    assert loss.tolist() == [8, 8]
    for gradient, value in zip(gradients, (0, -1, 1), strict=True):
        expected = torch.full_like(gradient, value / dim)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", NORMS)
def test_zero_is_the_only_gradient_at_distance_zero(device, p):
    """T4 with eps = 0: neither NaN nor a direction out of nothing."""
    check_by_hand([[1.0, 2]] * 3, device, p=p, eps=0, swap=True, loss=1.0, gradients=[[0.0, 0]] * 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_anchor_equal_to_positive_has_a_gradient_from_eps(device, dtype):
    """Fault 1: the difference is eps in each element, so its direction is 1/sqrt(dim)."""
    gradients = [[0.0] * 4, [-0.5] * 4, [0.5] * 4]
    check_by_hand([[0.0] * 4] * 3, device, dtype, loss=1.0, gradients=gradients)
    check_by_hand([[0.0] * 4] * 3, device, dtype, eps=0, loss=1.0, gradients=[[0.0] * 4] * 3)
