# SPDX-License-Identifier: BSD-3-Clause
"""Autocast, where torch's op is on the list of those that run in float32."""

import pytest
import torch

from fused_ops import set_fallback, triplet_margin_loss

from .cases import (
    DTYPES,
    NORMS,
    REDUCTIONS,
    assert_same_bits,
    loss_and_gradients,
    random_inputs,
    random_tensor,
    recorded_ops,
    torch_loss,
)

half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("p", [*NORMS, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_is_torch_s(device, dtype, p, reduction):
    """Fault 15: results in float32 (float64 of float64), gradients in the inputs' dtype."""
    inputs = random_inputs(20, 33, dtype=dtype, device=device)
    settings = {"p": p, "swap": True, "margin": 0.3, "reduction": reduction}
    grad_loss = random_tensor(*([20] if reduction == "none" else []), device=device, seed=3)
    with torch.autocast(device, torch.bfloat16), set_fallback("allow" if p == 3 else "error"):
        results = loss_and_gradients(triplet_margin_loss, inputs, grad_loss, **settings)
        expected = loss_and_gradients(torch_loss, inputs, grad_loss, **settings)
    assert results[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(gradient.dtype == dtype for gradient in results[1:])
    torch.testing.assert_close(results[0], expected[0], rtol=1e-5, atol=3e-5)  # of distances to 40
    torch.testing.assert_close(results[1:], expected[1:])


@half
def test_autocast_reads_16_bits_directly(device, dtype):
    inputs = random_inputs(20, 33, dtype=dtype, device=device)
    with torch.autocast(device), recorded_ops() as ops:
        triplet_margin_loss(*inputs)
    with torch.autocast(device), recorded_ops() as torch_ops:
        torch_loss(*inputs)
    casts = {"aten::to", "aten::_to_copy", "aten::copy_"}
    assert casts <= torch_ops
    assert not casts & ops


@half
def test_autocast_loss_keeps_what_16_bits_lose(device, dtype):
    inputs = random_inputs(20, 33, dtype=dtype, device=device)
    with torch.autocast(device):
        wide = triplet_margin_loss(*inputs)
        with torch.autocast(device, enabled=False):
            narrow = triplet_margin_loss(*inputs)
    assert (wide.dtype, narrow.dtype) == (torch.float32, dtype)
    assert torch.equal(wide.to(dtype), narrow)
    assert wide != narrow
    torch.testing.assert_close(wide, triplet_margin_loss(*(x.float() for x in inputs)))


@half
def test_autocast_of_another_device_is_none_of_ours(dtype):
    inputs = random_inputs(4, 5, dtype=dtype)
    with torch.autocast("cuda" if torch.cuda.is_available() else "xpu", torch.float16):
        assert triplet_margin_loss(*inputs).dtype == torch_loss(*inputs).dtype == dtype


@half
def test_autocast_gradient_that_is_differentiated(device, dtype):
    inputs = random_inputs(8, 9, dtype=dtype, device=device)
    results = []
    for function in (triplet_margin_loss, torch_loss):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.autocast(device):
            loss = function(*leaves)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        penalty = sum((gradient.float() ** 2).sum() for gradient in first)
        results.append([*first, *torch.autograd.grad(penalty, leaves)])
    assert all(x.dtype == dtype for x in results[0])
    torch.testing.assert_close(*results)


def test_autocast_of_mixed_dtypes_is_left_to_torch(device):
    anchor, positive, negative = random_inputs(8, 9, device=device)
    inputs = [anchor.half(), positive, negative.bfloat16()]
    with torch.autocast(device):
        results = loss_and_gradients(triplet_margin_loss, inputs)
        assert_same_bits(results, loss_and_gradients(torch_loss, inputs))
    assert results[0].dtype == torch.float32
