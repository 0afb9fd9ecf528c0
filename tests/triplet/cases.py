# SPDX-License-Identifier: BSD-3-Clause
"""Inputs, and the comparison with float64, for the tests of triplet_margin_loss."""

import math

import comparison
import torch
from comparison import recorded_ops as recorded_ops
from torch.nn.functional import triplet_margin_loss as torch_loss

from fused_ops import triplet_margin_loss

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NORMS = (1, 2, math.inf)
REDUCTIONS = ("none", "mean", "sum")
REDUCTION_NUMBERS = dict(zip(REDUCTIONS, range(3), strict=True))  # as the ops take them
INPUTS = ("anchor", "positive", "negative")

forward_op = torch.ops.fused_ops.triplet_forward.default
backward_op = torch.ops.fused_ops.triplet_backward.default
forward_with_gradients_op = torch.ops.fused_ops.triplet_forward_with_gradients.default
correct_gradients_op = torch.ops.fused_ops.triplet_correct_gradients.default


def random_tensor(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def random_inputs(*shape, dtype=torch.float32, device="cpu", seed=0):
    """Anchor, positive and negative without any structure: at margin 0.3 a third is inactive."""
    return list(random_tensor(3, *shape, dtype=dtype, device=device, seed=seed + 1).unbind())


def leaves(inputs, needs_grad=(True, True, True)):
    """The inputs as leaves of a new graph, with their memory and strides."""
    return [x.detach().requires_grad_(needed) for x, needed in zip(inputs, needs_grad, strict=True)]


def loss_and_gradients(function, inputs, grad_loss=None, **settings):
    """[loss, grad_anchor, grad_positive, grad_negative]."""
    inputs = leaves(inputs)
    loss = function(*inputs, **settings)
    if grad_loss is None:
        grad_loss = torch.ones_like(loss)
    return [loss.detach(), *torch.autograd.grad(loss, inputs, grad_loss.to(loss.dtype))]


def in_float64(inputs, grad_loss=None, **settings):
    if grad_loss is not None:
        grad_loss = grad_loss.double()
    return loss_and_gradients(torch_loss, [x.double() for x in inputs], grad_loss, **settings)


def assert_as_exact_as_torch(results, inputs, grad_loss=None, **settings):
    """Asserts that `results` are no further from float64 than twice what torch's own are.

    Where torch happens to be exact, one rounding to the result's type and four of the accumulation
    type are allowed. A loss is a difference of distances, so it is those that are rounded. Float64
    results are held against float64, which rounds as they do: they get 64.
    """
    exact = in_float64(inputs, grad_loss, **settings)
    eager = loss_and_gradients(torch_loss, inputs, grad_loss, **settings)
    p, eps = settings.get("p", 2), settings.get("eps", 1e-6)
    anchor, positive, negative = (x.double() for x in inputs)
    distances = [anchor - positive + eps, anchor - negative + eps, positive - negative + eps]
    scale = max(x.norm(p, dim=-1).max().item() for x in distances)
    if settings.get("reduction") == "sum":
        scale *= anchor.numel() / anchor.shape[-1]
    for name, result, torch_result, truth in zip(
        ("loss", *INPUTS), results, eager, exact, strict=True
    ):
        assert result.shape == truth.shape, name
        largest = truth.abs().max().item()
        info = torch.finfo(result.dtype)
        units = 64 * 2**-52 if result.dtype == torch.float64 else 4 * 2**-23
        rounding = info.eps * max(largest, info.smallest_normal)
        rounding += units * (scale if name == "loss" else largest)
        error = (result.double() - truth).abs().max().item()
        torch_error = (torch_result.double() - truth).abs().max().item()
        allowed = 2 * torch_error + rounding if math.isfinite(torch_error) else rounding
        assert error <= allowed, f"{name}: error {error}, torch's {torch_error}, at most {allowed}"


def check_against_float64(inputs, grad_loss=None, **settings):
    results = loss_and_gradients(triplet_margin_loss, inputs, grad_loss, **settings)
    assert_as_exact_as_torch(results, inputs, grad_loss, **settings)


def check_by_hand(inputs, device, dtype=torch.float32, *, loss, gradients=None, **settings):
    """Compares one row with values worked out by hand."""
    inputs = [torch.tensor([row], dtype=dtype, device=device) for row in inputs]
    results = loss_and_gradients(triplet_margin_loss, inputs, reduction="none", **settings)
    expected = [torch.tensor([loss], dtype=dtype, device=device)]
    if gradients is not None:
        expected += [torch.tensor([row], dtype=dtype, device=device) for row in gradients]
    tolerance = {"rtol": 4e-3, "atol": 1e-6} if dtype.itemsize == 2 else {}
    torch.testing.assert_close(results[: len(expected)], expected, **tolerance)


def assert_same_bits(results, expected):
    for result, other in zip(results, expected, strict=True):
        comparison.assert_same_bits(result, other)


def error_of(function, *args, **kwargs):
    """What is raised: (type, text)."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("no error was raised")
