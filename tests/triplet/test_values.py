# SPDX-License-Identifier: BSD-3-Clause
"""Losses and gradients against float64, over everything the kernels take."""

import math

import pytest
import torch

import fused_ops
from fused_ops import triplet_margin_loss

from .cases import (
    DTYPES,
    NORMS,
    REDUCTIONS,
    assert_same_bits,
    check_against_float64,
    leaves,
    loss_and_gradients,
    random_inputs,
    random_tensor,
    torch_loss,
)

pytestmark = pytest.mark.usefixtures("fused_only")


@pytest.mark.parametrize("shape", [(64, 33), (2, 5, 7, 20), (130,)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("swap", [False, True], ids=["plain", "swap"])
@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_path(device, dtype, p, swap, reduction, shape):
    inputs = random_inputs(*shape, dtype=dtype, device=device)
    settings = {"margin": 0.3, "p": p, "swap": swap, "reduction": reduction}
    loss = triplet_margin_loss(*inputs, **settings)
    assert loss.dtype == dtype
    assert loss.device == inputs[0].device
    assert loss.shape == (shape[:-1] if reduction == "none" else ())
    if reduction == "none" and len(shape) > 1:
        assert loss.min() == 0 < loss.max()  # both kinds of row are there
    grad_loss = random_tensor(*loss.shape, dtype=dtype, device=device, seed=5)
    check_against_float64(inputs, grad_loss, **settings)


@pytest.mark.parametrize("eps", [0, 1e-6, 0.5, -0.25])
@pytest.mark.parametrize("margin", [1e-6, 3, math.inf])
@pytest.mark.parametrize("p", NORMS)
def test_margin_and_eps(device, p, margin, eps):
    """A large eps tells the signed difference apart from its absolute value."""
    inputs = random_inputs(16, 9, device=device)
    settings = {"margin": margin, "p": p, "eps": eps, "swap": True, "reduction": "none"}
    if margin == math.inf:
        assert triplet_margin_loss(*inputs, **settings).isposinf().all()
    else:
        check_against_float64(inputs, **settings)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_reductions_keep_their_digits(device, dtype):
    """70,000 equal losses: their sum in float16 overflows, their mean must not."""
    inputs = [torch.full((70_000, 2), value, dtype=dtype, device=device) for value in (1, 3, 1)]
    mean = triplet_margin_loss(*inputs, p=math.inf, eps=0)
    assert mean.item() == 3
    if dtype != torch.float16:
        total = triplet_margin_loss(*inputs, p=math.inf, eps=0, reduction="sum")
        assert total == torch.tensor(210_000, dtype=dtype)


@pytest.mark.parametrize("dim", [1, 7, 64])
@pytest.mark.parametrize("value", [1e-6, 0.3, 0.7])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_errors_of_reductions_do_not_grow_with_the_rows(device, dtype, reduction, value, dim):
    """Equal losses, whose roundings are equal too and add up in a long chain."""
    inputs = [torch.zeros(100_003, dim, dtype=dtype, device=device)] * 3
    loss = triplet_margin_loss(*inputs, margin=value, eps=0, reduction=reduction).item()
    margin = torch.tensor(value, dtype=dtype).item()
    exact = margin if reduction == "mean" else math.fsum(100_003 * [margin])
    unit = {torch.float32: 2**-23, torch.float64: 64 * 2**-53}[dtype]
    assert abs(loss - exact) <= unit * exact


@pytest.mark.parametrize("p", NORMS)
def test_without_gradients_the_loss_is_the_same(device, p):
    inputs = random_inputs(20, 50, device=device)
    with_graph = triplet_margin_loss(*leaves(inputs), p=p, swap=True)
    assert with_graph.requires_grad
    with torch.no_grad():
        without = triplet_margin_loss(*leaves(inputs), p=p, swap=True)
    assert not without.requires_grad
    with torch.inference_mode():
        inferred = triplet_margin_loss(*inputs, p=p, swap=True)
    assert torch.equal(with_graph, without)
    assert torch.equal(with_graph, inferred)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"margin": 0.5, "p": 1, "eps": 1e-3, "swap": True, "reduction": "sum"},
        {"p": math.inf, "reduction": "none"},
        {"size_average": False},
        {"reduce": False},
        {"reduction": "elementwise_mean"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
@pytest.mark.filterwarnings("ignore:reduction='elementwise_mean':UserWarning")
def test_module_is_torch_s_with_the_function_inside(device, arguments):
    inputs = random_inputs(6, 10, device=device)
    module = fused_ops.TripletMarginLoss(**arguments)
    torch_module = torch.nn.TripletMarginLoss(**arguments)
    assert isinstance(module, torch.nn.TripletMarginLoss)
    assert vars(module).keys() == vars(torch_module).keys()
    assert repr(module) == repr(torch_module)
    results = loss_and_gradients(module, inputs)
    assert_same_bits(results, loss_and_gradients(triplet_margin_loss, inputs, **arguments))
    torch.testing.assert_close(results, loss_and_gradients(torch_module, inputs))


def test_positional_arguments_are_in_torch_s_order(device):
    inputs = random_inputs(6, 10, device=device)
    arguments = (0.5, 1, 0.1, True, None, None, "sum")
    torch.testing.assert_close(
        triplet_margin_loss(*inputs, *arguments), torch_loss(*inputs, *arguments)
    )
