# SPDX-License-Identifier: BSD-3-Clause
"""Derivatives of other kinds than the kernels'."""

import pytest
import torch
from torch.autograd import forward_ad

import fused_ops
from fused_ops import explain, set_fallback, triplet_margin_loss

from .cases import (
    NORMS,
    REDUCTIONS,
    leaves,
    random_inputs,
    torch_loss,
)

FUNCTIONS = (triplet_margin_loss, torch_loss)


def second_derivatives(function, inputs, needs_grad=(True, True, True), **settings):
    inputs = leaves(inputs, needs_grad)
    wanted = [x for x in inputs if x.requires_grad]
    loss = function(*inputs, **settings)
    first = torch.autograd.grad(loss.sum() ** 2, wanted, create_graph=True)
    penalty = sum((gradient**2).sum() for gradient in first)
    return [*first, *torch.autograd.grad(penalty, wanted)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("p", NORMS)
def test_differentiating_the_gradient_is_torch_s(device, p, reduction):
    """Fault 26."""
    inputs = random_inputs(5, 6, dtype=torch.float64, device=device)
    settings = {"p": p, "swap": True, "reduction": reduction}
    ours, expected = (second_derivatives(f, inputs, **settings) for f in FUNCTIONS)
    assert any(x.any() for x in expected[3:])
    torch.testing.assert_close(ours, expected)


def test_differentiating_the_gradient_of_some_inputs(device):
    inputs = random_inputs(5, 6, dtype=torch.float64, device=device)
    for needs_grad in ((True, False, False), (False, True, True)):
        ours, expected = (second_derivatives(f, inputs, needs_grad) for f in FUNCTIONS)
        torch.testing.assert_close(ours, expected)


def test_differentiating_the_gradient_of_one_tensor_given_thrice(device):
    x = random_inputs(5, 6, dtype=torch.float64, device=device)[0].requires_grad_()
    results = []
    for function in FUNCTIONS:
        loss = function(x, x.roll(1, 0), x, eps=0.1)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        results.append([first, *torch.autograd.grad((first**2).sum(), x)])
    torch.testing.assert_close(*results)


def test_differentiating_the_gradient_is_a_fallback(device):
    inputs = leaves(random_inputs(5, 6, device=device))
    loss = triplet_margin_loss(*inputs)
    with (
        set_fallback("error"),
        pytest.raises(fused_ops.FallbackError, match="gradient is to be differentiated"),
    ):
        torch.autograd.grad(loss, inputs, create_graph=True)


TRANSFORMS = {
    "grad": lambda f, a, p, n: torch.func.grad(f, argnums=(0, 1, 2))(a, p, n),
    "vmap": lambda f, a, p, n: torch.vmap(f)(a, p, n),
    "vmap of one": lambda f, a, p, n: torch.vmap(f, in_dims=(0, None, None))(a, p[0], n[0]),
    "vjp": lambda f, a, p, n: torch.func.vjp(f, a, p, n)[1](torch.ones_like(f(a, p, n))),
    "jvp": lambda f, a, p, n: torch.func.jvp(f, (a, p, n), (n, a, p)),
    "jacrev": lambda f, a, p, n: torch.func.jacrev(lambda x: f(x, p, n, reduction="none"))(a),
    "hessian": lambda f, a, p, n: torch.func.hessian(f)(a, p, n),
    "gradients of rows": lambda f, a, p, n: torch.vmap(torch.func.grad(f))(a, p, n),
    "functional hessian": lambda f, a, p, n: torch.autograd.functional.hessian(f, (a, p, n)),
    "vectorised jacobian": lambda f, a, p, n: torch.autograd.functional.jacobian(
        f, (a, p, n), vectorize=True, strategy="forward-mode"
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_functional_transforms_are_torch_s(device, name):
    inputs = random_inputs(5, 6, dtype=torch.float64, device=device)
    torch.testing.assert_close(*(TRANSFORMS[name](f, *inputs) for f in FUNCTIONS))


def test_transforms_are_a_reason(device):
    inputs = random_inputs(5, 6, device=device)
    said = []

    def loss(*inputs):
        said.append(str(explain(triplet_margin_loss, *inputs)))
        return triplet_margin_loss(*inputs)

    torch.func.grad(loss)(*inputs)
    torch.vmap(loss)(*inputs)
    assert len(said) == 2
    assert all("a torch.func transform is active" in text for text in said)


def test_forward_mode_is_torch_s(device):
    anchor, positive, negative = random_inputs(5, 6, dtype=torch.float64, device=device)
    with forward_ad.dual_level():
        assert explain(triplet_margin_loss, anchor, positive, negative).path == "fused"
        dual = forward_ad.make_dual(positive, negative)
        dispatch = explain(triplet_margin_loss, anchor, dual, negative)
        assert dispatch.reasons == ("forward-mode differentiation",)
        ours, expected = (
            forward_ad.unpack_dual(f(anchor, dual, negative, swap=True)) for f in FUNCTIONS
        )
    assert expected.tangent.any()
    torch.testing.assert_close(tuple(ours), tuple(expected))
