# SPDX-License-Identifier: BSD-3-Clause
"""Tensors and modes that override what torch does."""

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fused_ops import explain, set_fallback, triplet_margin_loss

from .cases import error_of, loss_and_gradients, random_inputs, torch_loss


class WatchingMode(TorchFunctionMode):
    def __init__(self):
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class PassingMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_subclass_gets_its_own_torch_function(device):
    """Also one that is no tensor, as torch.nn.functional has it."""

    class Recorder:
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return function, kwargs["margin"]

    anchor, positive, _ = random_inputs(6, 7, device=device)
    for arguments in ((Recorder(), anchor, positive), (anchor, positive, Recorder())):
        assert triplet_margin_loss(*arguments, margin=3) == (torch_loss, 3)


def test_plain_subclass_without_overrides_is_fused(device):
    class Plain(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    inputs = [x.as_subclass(Plain) for x in random_inputs(6, 7, device=device)]
    assert explain(triplet_margin_loss, *inputs).path == "fused"


def test_torch_function_mode_sees_torch_s_function(device):
    inputs = random_inputs(6, 7, device=device)
    with WatchingMode() as mode:
        assert "__torch_function__ mode" in str(explain(triplet_margin_loss, *inputs))
        triplet_margin_loss(*inputs)
        with torch._C.DisableTorchFunction():
            assert explain(triplet_margin_loss, *inputs).path == "fused"
    assert torch_loss in mode.seen
    assert explain(triplet_margin_loss, *inputs).path == "fused"


def test_dispatch_mode_sees_the_op(device):
    class Mode(PassingMode):
        seen = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen += (function.name(),)
            return super().__torch_dispatch__(function, types, args, kwargs)

    with set_fallback("error"), Mode() as mode:
        triplet_margin_loss(*random_inputs(6, 7, device=device))
    assert "fused_ops::triplet_forward" in mode.seen


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_default_device_is_no_reason(device, default):
    inputs = random_inputs(6, 7, device=device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device(default))
        assert explain(triplet_margin_loss, *inputs).path == "fused"
        stack.enter_context(WatchingMode())
        assert explain(triplet_margin_loss, *inputs).path == "pytorch"
    torch.set_default_device(default)
    try:
        assert explain(triplet_margin_loss, *inputs).path == "fused"
        assert triplet_margin_loss(*inputs).device == inputs[0].device
    finally:
        torch.set_default_device(None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_left_to_torch(device, layout):
    parts = [torch.ones(3, 4, device=device), torch.ones(2, 4, device=device)]
    inputs = [torch.nested.nested_tensor(parts, layout=layout)] * 3
    assert explain(triplet_margin_loss, *inputs).path == "pytorch"
    assert error_of(triplet_margin_loss, *inputs)[0] is error_of(torch_loss, *inputs)[0]


def test_views_that_negate_are_read_as_they_are(device):
    """The imaginary part of a conjugate is a lazy negation, which raw memory does not show."""
    pairs = [torch.view_as_complex(torch.stack([x, x], -1)) for x in random_inputs(6, 7)]
    inputs = [pair.to(device).conj().imag for pair in pairs]
    assert inputs[0].is_neg()
    results = loss_and_gradients(triplet_margin_loss, inputs)
    torch.testing.assert_close(results, loss_and_gradients(torch_loss, inputs))
