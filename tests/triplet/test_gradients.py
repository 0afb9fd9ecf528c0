# SPDX-License-Identifier: BSD-3-Clause
"""How gradients are asked for. Their values are in test_values.py."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fused_ops import set_fallback, set_gradients_in_forward, triplet_margin_loss
from fused_ops.triplet import ops

from .cases import (
    DTYPES,
    INPUTS,
    NORMS,
    REDUCTIONS,
    assert_same_bits,
    backward_op,
    check_against_float64,
    leaves,
    loss_and_gradients,
    random_inputs,
    random_tensor,
)

pytestmark = pytest.mark.usefixtures("fused_only")

SUBSETS = [subset for subset in itertools.product([False, True], repeat=3) if any(subset)]


@pytest.mark.parametrize("needs_grad", SUBSETS, ids=str)
@pytest.mark.parametrize("p", NORMS)
def test_only_the_wanted_gradients_are_formed(device, p, needs_grad, monkeypatch):
    inputs = random_inputs(30, 65, device=device)
    settings = {"p": p, "swap": True, "margin": 0.3}
    every = loss_and_gradients(triplet_margin_loss, inputs, **settings)[1:]
    shapes = []

    def watched(*arguments):
        gradients = backward_op(*arguments)
        shapes.append([tuple(gradient.shape) for gradient in gradients])
        return gradients

    monkeypatch.setattr(ops, "backward", watched)
    wanted = leaves(inputs, needs_grad)
    with set_gradients_in_forward(False):
        triplet_margin_loss(*wanted, **settings).backward()
    assert shapes == [[(30, 65) if needed else (0,) for needed in needs_grad]]
    for x, needed, gradient in zip(wanted, needs_grad, every, strict=True):
        if needed:
            assert torch.equal(x.grad, gradient)
        else:
            assert x.grad is None


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(9, 515), (257, 1), (3, 70_001), (1, 31)], ids=str)
def test_every_element_is_written(device, dtype, shape):
    """Also those of inactive rows, which are not read."""
    inputs = random_inputs(*shape, dtype=dtype, device=device)
    inputs[2][::2] += 50  # far negatives: nothing to learn
    gradients = loss_and_gradients(triplet_margin_loss, inputs, reduction="none")[1:]
    for gradient in gradients:
        assert (gradient[::2] == 0).all()
        assert gradient.isfinite().all()
    check_against_float64(inputs, reduction="none")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_upstream_gradient_scales(device, reduction):
    """Powers of two, which no rounding can hide."""
    inputs = random_inputs(12, 20, device=device)
    loss, *gradients = loss_and_gradients(triplet_margin_loss, inputs, reduction=reduction)
    scaled = loss_and_gradients(
        triplet_margin_loss, inputs, torch.full_like(loss, -8), reduction=reduction
    )
    assert_same_bits(scaled[1:], [-8 * gradient for gradient in gradients])
    assert all(gradient.any() for gradient in gradients)


def test_zero_upstream_gradient(device):
    inputs = random_inputs(12, 20, device=device)
    zero = torch.zeros(12, device=device)
    gradients = loss_and_gradients(triplet_margin_loss, inputs, zero, reduction="none")[1:]
    assert not any(gradient.any() for gradient in gradients)


def test_gradients_accumulate_and_repeat(device):
    inputs = leaves(random_inputs(5, 6, device=device))
    loss = triplet_margin_loss(*inputs)
    loss.backward(retain_graph=True)
    once = [x.grad.clone() for x in inputs]
    loss.backward()
    assert_same_bits([x.grad for x in inputs], [2 * gradient for gradient in once])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("position", range(3), ids=INPUTS)
def test_changing_an_input_before_the_backward_is_an_error(device, position):
    """The backward reads the inputs again, so it must not read others in their place."""
    inputs = [x * 1 for x in leaves(random_inputs(5, 6, device=device))]
    loss = triplet_margin_loss(*inputs)
    inputs[position].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_frozen_inputs_may_come_from_inference_mode(device):
    """As a teacher's embeddings do."""
    anchor, positive, negative = random_inputs(5, 6, device=device)
    with torch.inference_mode():
        frozen = negative.clone()
    anchor.requires_grad_()
    (gradient,) = torch.autograd.grad(triplet_margin_loss(anchor, positive, negative), anchor)
    with set_fallback("allow"):  # autograd saves no such tensor, so this may run in PyTorch
        loss = triplet_margin_loss(anchor, positive, frozen)
    torch.testing.assert_close(torch.autograd.grad(loss, anchor), (gradient,))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(device, use_reentrant):
    inputs = random_inputs(5, 6, device=device)
    expected = loss_and_gradients(triplet_margin_loss, inputs)

    def checkpointed(*inputs):
        return checkpoint(triplet_margin_loss, *inputs, use_reentrant=use_reentrant)

    results = leaves(inputs)
    loss = checkpointed(*results)
    loss.backward()  # the only way through a re-entrant one
    assert_same_bits([loss.detach(), *(x.grad for x in results)], expected)


def test_saved_tensor_hooks(device):
    """They see the inputs and the state, and the backward reads what they return."""
    inputs = random_inputs(5, 6, device=device)
    expected = loss_and_gradients(triplet_margin_loss, inputs)
    with torch.autograd.graph.save_on_cpu():
        assert_same_bits(loss_and_gradients(triplet_margin_loss, inputs), expected)
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.cpu().numpy().copy()

    def unpack(array):
        return torch.from_numpy(array).to(device)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert_same_bits(loss_and_gradients(triplet_margin_loss, inputs), expected)
    assert packed.count((5, 6)) == 3


def test_losses_that_meet_in_one_graph(device):
    """Inputs that are not leaves, and a loss that is used twice."""
    inputs = leaves(random_inputs(8, 16, device=device))
    normalised = [torch.nn.functional.normalize(x, dim=-1) for x in inputs]
    loss = triplet_margin_loss(*normalised, reduction="none")
    gradients = torch.autograd.grad(loss.mean() + (loss**2).sum(), inputs)
    doubles = leaves([x.double() for x in inputs])
    normalised = [torch.nn.functional.normalize(x, dim=-1) for x in doubles]
    loss = torch.nn.functional.triplet_margin_loss(*normalised, reduction="none")
    expected = torch.autograd.grad(loss.mean() + (loss**2).sum(), doubles)
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient.double(), other, rtol=1e-5, atol=1e-6)


def test_batched_upstream_gradients(device):
    """torch.autograd.functional.jacobian(vectorize=True) sends a vmapped gradient."""
    inputs = random_inputs(5, 6, device=device)
    grad_losses = random_tensor(4, 5, device=device, seed=9)
    tensors = leaves(inputs)
    loss = triplet_margin_loss(*tensors, reduction="none")
    batched = torch.autograd.grad(loss, tensors, grad_losses, is_grads_batched=True)
    for i, grad_loss in enumerate(grad_losses):
        single = loss_and_gradients(triplet_margin_loss, inputs, grad_loss, reduction="none")[1:]
        torch.testing.assert_close([gradient[i] for gradient in batched], single)
