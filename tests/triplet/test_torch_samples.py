# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch's own tests of its op, turned on ours: samples, error inputs, opcheck, gradcheck."""

import re

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck
from torch.testing._internal.common_methods_invocations import op_db

from fused_ops import triplet_margin_loss

from .cases import (
    DTYPES,
    NORMS,
    backward_op,
    correct_gradients_op,
    forward_op,
    forward_with_gradients_op,
    leaves,
    random_inputs,
)

(OP_INFO,) = [op for op in op_db if op.name == "nn.functional.triplet_margin_loss"]
DIFFERENTIABLE = (*DTYPES, torch.complex64, torch.complex128)


def compute(function, sample, *, widen=None):
    """The loss, and gradients where there are any."""
    inputs = [sample.input, *sample.args]
    if widen:
        inputs = leaves([x.to(widen) for x in inputs])
    loss = function(*inputs, **sample.kwargs)
    if not inputs[0].requires_grad:
        return [loss]
    gradients = torch.autograd.grad(loss, inputs, torch.ones_like(loss))
    return [loss.detach(), *gradients]


@pytest.mark.parametrize("dtype", sorted(OP_INFO.dtypes, key=str), ids=str)
def test_sample_inputs(device, dtype):
    """16-bit results are held to float32's, rounded, for torch's lose more."""
    samples = list(OP_INFO.sample_inputs(device, dtype, requires_grad=dtype in DIFFERENTIABLE))
    assert len(samples) >= 7
    for sample in samples:
        results = compute(triplet_margin_loss, sample)
        if dtype.itemsize == 2 and dtype.is_floating_point:
            expected = [x.to(dtype) for x in compute(OP_INFO.op, sample, widen=torch.float32)]
        else:
            expected = compute(OP_INFO.op, sample)
        torch.testing.assert_close(results, expected)


def test_sample_dtypes_are_all_here():
    assert OP_INFO.dtypes >= set(DIFFERENTIABLE) | {torch.uint8, torch.int8, torch.int64}


def test_error_inputs(device):
    errors = list(OP_INFO.error_inputs(device))
    assert len(errors) >= 8
    for error in errors:
        sample = error.sample_input
        with pytest.raises(error.error_type) as caught:
            triplet_margin_loss(sample.input, *sample.args, **sample.kwargs)
        assert re.search(error.error_regex, str(caught.value))


def test_gradcheck_of_samples(device):
    """First-order gradients of the kernels, the rest PyTorch's behind the same function."""
    samples = list(OP_INFO.sample_inputs(device, torch.float64, requires_grad=True))
    for sample in samples:
        inputs = (sample.input, *sample.args)

        def loss(*inputs, kwargs=sample.kwargs):
            return triplet_margin_loss(*inputs, **kwargs)

        assert gradcheck(
            loss, inputs, check_batched_grad=True, check_forward_ad=True, fast_mode=True
        )
        assert gradgradcheck(
            loss, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True
        )


@pytest.mark.parametrize("swap", [False, True], ids=["plain", "swap"])
@pytest.mark.parametrize("p", NORMS)
def test_gradcheck(device, p, swap):
    """Every element's gradient, not a random direction as above."""
    inputs = leaves(random_inputs(4, 3, dtype=torch.float64, device=device))

    def loss(*inputs):
        return triplet_margin_loss(*inputs, p=p, swap=swap, eps=0.1, reduction="none")

    assert gradcheck(loss, inputs)
    assert gradgradcheck(loss, inputs)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(("dtype", "p"), [(torch.float32, 2.0), (torch.bfloat16, torch.inf)])
def test_opcheck(device, dtype, p, reduction):
    utilities = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_static",
        "test_aot_dispatch_dynamic",
    )
    inputs = random_inputs(2, 3, 8, dtype=dtype, device=device)
    inputs[1] = inputs[1].transpose(0, 1).contiguous().transpose(0, 1)  # copied inside
    loss, state = forward_op(*inputs, 1.0, p, 1e-6, True, reduction, True, True)
    for float32_loss, save_state in ((False, False), (True, True)):
        arguments = (*inputs, 1.0, p, 1e-6, True, reduction, float32_loss, save_state)
        checked = opcheck(forward_op, arguments, test_utils=utilities)
        assert set(checked.values()) == {"SUCCESS"}
    arguments = (loss, *inputs, state, 1.0, p, 1e-6, True, reduction, True, False, True)
    checked = opcheck(backward_op, arguments, test_utils=utilities)
    assert set(checked.values()) == {"SUCCESS"}
    if device == "cuda":
        arguments = (*inputs, 1.0, p, 1e-6, True, reduction, True, True, False, True)
        # Gradients it does not form are memory as it came, which no other run repeats.
        checked = opcheck(forward_with_gradients_op, arguments, test_utils=utilities[:3])
        assert set(checked.values()) == {"SUCCESS"}
        loss, state, *gradients = forward_with_gradients_op(*arguments)
        arguments = (loss, *inputs, state, 1.0, p, 1e-6, True, reduction, *gradients)
        checked = opcheck(correct_gradients_op, arguments, test_utils=utilities)
        assert set(checked.values()) == {"SUCCESS"}
