# SPDX-License-Identifier: BSD-3-Clause
"""Which calls leave the fused kernels, what is said about it, and that PyTorch then takes them."""

import math

import pytest
import torch

import fused_ops
from fused_ops import explain, set_fallback, set_gradients_in_forward, triplet_margin_loss

from .cases import (
    DTYPES,
    NORMS,
    assert_same_bits,
    random_inputs,
    recorded_ops,
    torch_loss,
)

OP = "fused_ops::triplet_forward"


class Subclass(torch.Tensor):
    """Has torch's default __torch_function__."""


def changed(position, change):
    def apply(inputs):
        inputs[position] = change(inputs[position])
        return inputs

    return apply


def each(change):
    return lambda inputs: [change(x) for x in inputs]


# name: (what becomes of the inputs, settings, text of the reason)
FALLBACKS = {
    "p": (list, {"p": 3}, "p=3 (kernels take 1.0, 2.0, inf)"),
    "p below 1": (list, {"p": 0.5}, "p=0.5 ("),
    "p -inf": (list, {"p": -math.inf}, "p=-inf ("),
    "broadcast rows": (changed(1, lambda x: x[:1]), {}, "shapes (6, 7), (1, 7), (6, 7) differ"),
    "broadcast dim": (changed(2, lambda x: x[:, :1]), {}, "(6, 1) differ"),
    "mixed dtypes": (changed(1, torch.Tensor.double), {}, "mixed dtypes"),
    "float and integer": (changed(2, torch.Tensor.int), {}, "mixed dtypes"),
    "integers": (each(torch.Tensor.int), {}, "dtype torch.int32 (kernels take float16,"),
    "complex": (each(lambda x: x + 1j), {}, "dtype torch.complex64"),
    "0-dimensional": (each(lambda x: x[0, 0]), {}, "0-dimensional"),
    "no rows": (each(lambda x: x[:0]), {}, "empty"),
    "no elements": (each(lambda x: x[:, :0]), {}, "empty"),
    "subclass": (changed(2, lambda x: x.as_subclass(Subclass)), {}, "Subclass is not a plain"),
    "meta": (each(lambda x: x.to("meta")), {}, "device meta"),
    "two reasons": (changed(0, torch.Tensor.double), {"p": 3}, "mixed dtypes"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_fallback_is_explained_forbidden_and_torch_s(device, name):
    change, settings, text = FALLBACKS[name]
    inputs = change(random_inputs(6, 7, device=device))
    dispatch = explain(triplet_margin_loss, *inputs, **settings)
    assert dispatch.path == "pytorch"
    assert dispatch.op == "triplet_margin_loss"
    assert any(text in reason for reason in dispatch.reasons)
    assert all(reason in str(dispatch) for reason in dispatch.reasons)
    with set_fallback("error"), pytest.raises(fused_ops.FallbackError) as error:
        triplet_margin_loss(*inputs, **settings)
    assert all(reason in str(error.value) for reason in dispatch.reasons)
    with recorded_ops() as ops:
        result = triplet_margin_loss(*inputs, **settings)
    assert "aten::triplet_margin_loss" in ops
    assert OP not in ops
    expected = torch_loss(*inputs, **settings)
    assert type(result) is type(expected)
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    if result.device.type != "meta":
        assert_same_bits([result], [expected])


@pytest.mark.parametrize("settings", [{}, {"p": 1, "swap": True, "reduction": "sum"}], ids=str)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_fused_call_is_explained_and_fused(device, grad, settings):
    inputs = [x.requires_grad_(grad) for x in random_inputs(6, 7, device=device)]
    dispatch = explain(triplet_margin_loss, *inputs, **settings)
    assert (dispatch.path, dispatch.reasons) == ("fused", ())
    assert dispatch.details["device"] == device
    assert dispatch.details["dtype"] == "float32"
    assert str(dispatch).startswith(f"triplet_margin_loss: fused (device={device}, dtype=float32")
    with set_fallback("error"), recorded_ops() as ops:
        triplet_margin_loss(*inputs, **settings)
    assert any(name.startswith(OP) for name in ops)
    assert not any("triplet_margin_loss" in name and name.startswith("aten") for name in ops)


@pytest.mark.parametrize("p", [*NORMS, 1.0, True], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_fused(device, dtype, p):
    inputs = random_inputs(6, 7, dtype=dtype, device=device)
    parameters = [torch.nn.Parameter(x) for x in inputs]
    for tensors in (inputs, parameters, [x[0] for x in inputs], [x.T for x in inputs]):
        assert explain(triplet_margin_loss, *tensors, p=p).path == "fused"


def test_profiler_shows_the_ops_with_their_shapes(device):
    inputs = [x.requires_grad_() for x in random_inputs(6, 7, device=device)]
    with (
        set_gradients_in_forward(False),
        torch.autograd.profiler.profile(record_shapes=True) as profile,
    ):
        triplet_margin_loss(*inputs).backward()
    shapes = {event.name: event.input_shapes for event in profile.function_events}
    assert shapes[OP][:3] == 3 * [[6, 7]]
    assert shapes["fused_ops::triplet_backward"][:4] == [[], *3 * [[6, 7]]]


def test_explain_runs_nothing(device):
    inputs = random_inputs(6, 7, device=device)
    with recorded_ops() as ops:
        explain(triplet_margin_loss, *inputs)
        explain(triplet_margin_loss, *inputs, p=3)
    assert OP not in ops
    assert "aten::triplet_margin_loss" not in ops


def test_layouts_other_than_strided_are_a_reason():
    for change in (torch.Tensor.to_sparse, torch.Tensor.to_mkldnn):
        inputs = [change(x) for x in random_inputs(6, 7)]
        assert f"layout {inputs[0].layout}" in str(explain(triplet_margin_loss, *inputs))


def test_set_fallback_restores_its_mode():
    assert set_fallback.mode == "allow"
    with set_fallback("error"):
        with pytest.raises(KeyError), set_fallback("allow"):
            assert set_fallback.mode == "allow"
            raise KeyError
        assert set_fallback.mode == "error"
    assert set_fallback.mode == "allow"
    set_fallback("error")  # for good
    try:
        assert set_fallback.mode == "error"
    finally:
        set_fallback("allow")


def test_set_fallback_refuses_other_modes():
    with pytest.raises(ValueError, match=r'expected "allow" or "error", got \'never\''):
        set_fallback("never")
    assert set_fallback.mode == "allow"


def test_explain_refuses_other_functions():
    with pytest.raises(TypeError, match=r"expected one of .*fused_ops\.triplet_margin_loss"):
        explain(torch_loss, *random_inputs(2, 2))
    with pytest.raises(TypeError):
        explain(None)
