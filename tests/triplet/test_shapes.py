# SPDX-License-Identifier: BSD-3-Clause
"""Any last dimension, any leading dimensions, many rows and none."""

import math

import pytest
import torch

from fused_ops import set_fallback, triplet_margin_loss

from .cases import (
    DTYPES,
    NORMS,
    REDUCTIONS,
    check_against_float64,
    loss_and_gradients,
    random_inputs,
    random_tensor,
    torch_loss,
)

pytestmark = pytest.mark.usefixtures("fused_only")

poisoned = pytest.mark.usefixtures("poisoned_memory")

WIDTHS = [1, 2, 3, 7, 31, 32, 33, 64, 100, 257, 1030, 65_536, 65_537, 200_003]


@poisoned
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("dim", WIDTHS)
def test_widths(device, dtype, p, dim):
    inputs = random_inputs(3, dim, dtype=dtype, device=device)
    grad_loss = random_tensor(3, dtype=dtype, device=device, seed=7)
    check_against_float64(inputs, grad_loss, p=p, swap=True, margin=2.0, reduction="none")


@poisoned
@pytest.mark.parametrize("shape", [(70_001, 3), (3, 23_000, 10)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_more_rows_than_a_grid_has_blocks(device, shape, reduction):
    inputs = random_inputs(*shape, device=device)
    check_against_float64(inputs, margin=0.3, reduction=reduction)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((2, 3, 4, 5), (2, 3, 4)), ((5,), ()), ((4, 5), (4,)), ((1, 1), (1,)), ((3, 1, 2), (3, 1))],
)
def test_norm_is_over_the_last_dimension(device, shape, expected):
    """Fault 17."""
    inputs = random_inputs(*shape, device=device)
    loss = triplet_margin_loss(*inputs, reduction="none")
    assert loss.shape == expected
    torch.testing.assert_close(loss, torch_loss(*inputs, reduction="none"))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_batch(device, dtype, reduction):
    """Fault 20: no rows, and so no launch."""
    with set_fallback("allow"):
        inputs = [torch.zeros(0, 4, dtype=dtype, device=device)] * 3
        loss, *gradients = loss_and_gradients(triplet_margin_loss, inputs, reduction=reduction)
    assert loss.shape == ((0,) if reduction == "none" else ())
    assert loss.dtype == dtype
    assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
    assert all(gradient.shape == (0, 4) for gradient in gradients)
    if device == "cuda":
        torch.cuda.synchronize()


def test_rows_of_no_elements(device):
    inputs = [torch.zeros(3, 0, device=device)] * 3
    with set_fallback("allow"):
        assert triplet_margin_loss(*inputs, margin=2).item() == 2
        with pytest.raises(RuntimeError, match="cannot compute the inf norm"):
            triplet_margin_loss(*inputs, p=math.inf)
