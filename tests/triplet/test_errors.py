# SPDX-License-Identifier: BSD-3-Clause
"""Bad arguments: of the function in torch's words, of the ops in ours."""

import math

import numpy
import pytest
import torch

import fused_ops
from fused_ops import triplet_margin_loss

from .cases import backward_op, error_of, forward_op, random_inputs, torch_loss


def ones(*shape, **options):
    return torch.ones(shape, **options)


GOOD = (ones(3, 4),) * 3
BAD_CALLS = {
    "reduction": (GOOD, {"reduction": "abc"}),
    "zero margin": (GOOD, {"margin": 0}),
    "negative margin": (GOOD, {"margin": -1.5}),
    "reduction before margin": (GOOD, {"reduction": "abc", "margin": -1}),
    "margin before dimensions": ((ones(3), ones(3, 4), ones(3, 4)), {"margin": -1}),
    "dimensions": ((ones(3), ones(3, 4), ones(3, 4)), {}),
    "dimensions before sizes": ((ones(5), ones(3, 4), ones(3, 5)), {}),
    "sizes of the positive": ((ones(3, 4), ones(3, 5), ones(3, 4)), {}),
    "sizes of the negative": ((ones(3, 4), ones(3, 4), ones(2, 4)), {"swap": True}),
    "bool inputs": ((ones(3, 4, dtype=torch.bool),) * 3, {}),
    "a list": (([1.0], ones(1), ones(1)), {}),
    "None": ((ones(1), ones(1), None), {}),
    "p as text": (GOOD, {"p": "2"}),
    "no p": (GOOD, {"p": None}),
    "no eps": (GOOD, {"eps": None}),
    "swap as text": (GOOD, {"swap": "yes"}),
    "no swap": (GOOD, {"swap": None}),
    "no margin": (GOOD, {"margin": None}),
    "a margin that wants a gradient": (GOOD, {"margin": torch.ones((), requires_grad=True)}),
    "sparse inputs": ((ones(3, 4).to_sparse(),) * 3, {}),
    "meta and cpu": ((ones(3, 4), ones(3, 4, device="meta"), ones(3, 4)), {}),
}


@pytest.mark.parametrize("fallback", ["allow", "error"])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_errors_are_torch_s(device, name, fallback):
    inputs, settings = BAD_CALLS[name]
    inputs = [
        x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x
        for x in inputs
    ]
    expected = error_of(torch_loss, *inputs, **settings)
    with fused_ops.set_fallback(fallback):
        assert error_of(triplet_margin_loss, *inputs, **settings) == expected


def test_margin_texts(device):
    inputs = random_inputs(3, 4, device=device)
    with pytest.raises(ValueError, match=r"^margin must be greater than 0, got -1$"):
        triplet_margin_loss(*inputs, margin=-1)
    expected = r"^TripletMarginLoss: expected margin to be greater than 0, got 0 instead$"
    with pytest.raises(ValueError, match=expected):
        fused_ops.TripletMarginLoss(margin=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"margin": True},
        {"margin": torch.tensor(1.0)},
        {"margin": numpy.float32(0.5)},
        {"p": True},
        {"p": torch.tensor(2.0)},
        {"p": numpy.float32(math.inf)},
        {"eps": 0},
        {"eps": torch.tensor(0.5)},
    ],
    ids=str,
)
def test_scalars_of_every_kind_that_torch_takes(device, settings):
    inputs = random_inputs(3, 4, device=device)
    result = triplet_margin_loss(*inputs, **settings)
    torch.testing.assert_close(result, torch_loss(*inputs, **settings))


@pytest.mark.parametrize("arguments", [{"size_average": True}, {"reduce": False}], ids=str)
def test_deprecated_arguments_warn_once_and_win(device, arguments):
    inputs = random_inputs(3, 4, device=device)
    for p in (2, 3):  # fused and not
        with pytest.warns(UserWarning, match="size_average and reduce args") as caught:
            loss = triplet_margin_loss(*inputs, p=p, reduction="abc", **arguments)
        assert len(caught) == 1
        with pytest.warns(UserWarning):
            expected = torch_loss(*inputs, p=p, reduction="abc", **arguments)
        torch.testing.assert_close(loss, expected)


# The ops check for themselves: nothing that reaches them may read memory that is not there.


def forward_arguments(device, **changes):
    anchor, positive, negative = random_inputs(5, 6, device=device)
    arguments = {"anchor": anchor, "positive": positive, "negative": negative}
    arguments |= {"margin": 1.0, "p": 2.0, "eps": 1e-6, "swap": False, "reduction": 1}
    return arguments | {"float32_loss": False, "save_state": True} | changes


def backward_arguments(device, **changes):
    arguments = forward_arguments(device)
    arguments |= {"state": forward_op(**arguments)[1], "grad_loss": torch.ones((), device=device)}
    for name in ("float32_loss", "save_state"):
        del arguments[name]
    needs_grad = {f"{name}_needs_grad": True for name in ("anchor", "positive", "negative")}
    return arguments | needs_grad | changes


BAD_INPUTS = {
    "p": ({"p": 3.0}, "p: expected 1, 2 or inf, got 3"),
    "p nan": ({"p": math.nan}, "p: expected 1, 2 or inf, got nan"),
    "reduction": ({"reduction": 5}, "reduction: expected .* got 5"),
    "negative reduction": ({"reduction": -1}, "reduction: expected .* got -1"),
    "rows": ({"positive": ones(4, 6)}, "positive: expected size 5 in dimension 0 .* got 4"),
    "dim": ({"negative": ones(5, 7)}, "negative: expected size 6 in dimension 1 .* got 7"),
    "dimensions": ({"negative": ones(6)}, "negative: expected 2 dimensions .* got 1"),
    "dtype": ({"positive": ones(5, 6).double()}, "positive: expected the dtype of anchor"),
    "kind": ({x: ones(5, 6).int() for x in ("anchor", "positive", "negative")}, "float16"),
    "empty": ({x: ones(0, 6) for x in ("anchor", "positive", "negative")}, "one element"),
    "no dim": ({x: ones(5, 0) for x in ("anchor", "positive", "negative")}, "one element"),
    "scalar": ({x: ones() for x in ("anchor", "positive", "negative")}, "one dimension"),
}
BAD_GRADIENTS = {
    "state size": ({"state": ones(4 + 4 * 2)}, "state: expected"),  # a header and rows of 2
    "state of another norm": ({"p": math.inf}, "state: expected"),
    "state without swap": ({"swap": True}, "state: expected"),
    "state dtype": ({"state": ones(4 + 5 * 2).half()}, "state: expected"),
    "mean of rows": ({"grad_loss": ones(5)}, "grad_loss: expected .* 1 elements, got 5"),
    "no mean": ({"reduction": 0}, "grad_loss: expected .* 5 elements, got 1"),
    "gradient dtype": ({"grad_loss": ones().double()}, "grad_loss: expected the dtype"),
}


def on(device, changes):
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_ops_refuse_bad_inputs(device, name):
    changes, message = BAD_INPUTS[name]
    changes = on(device, changes)
    with pytest.raises(RuntimeError, match=message):
        forward_op(**forward_arguments(device, **changes))
    with pytest.raises(RuntimeError, match=message):
        backward_op(**backward_arguments(device, **changes))


@pytest.mark.parametrize("name", BAD_GRADIENTS)
def test_backward_op_refuses_bad_gradients(device, name):
    changes, message = BAD_GRADIENTS[name]
    with pytest.raises(RuntimeError, match=message):
        backward_op(**backward_arguments(device, **on(device, changes)))


def test_ops_take_the_arguments_that_the_bad_ones_were_made_of(device):
    assert forward_op(**forward_arguments(device))[0].isfinite()
    assert all(gradient.any() for gradient in backward_op(**backward_arguments(device)))


@pytest.mark.cuda
@pytest.mark.parametrize("form", [-2, 3])
def test_ops_refuse_unknown_forms(form):
    with pytest.raises(RuntimeError, match=f"form: expected -1 to 2, got {form}"):
        forward_op(**forward_arguments("cuda", form=form))
    with pytest.raises(RuntimeError, match=f"form: expected -1 to 2, got {form}"):
        backward_op(**backward_arguments("cuda", form=form))


@pytest.mark.cuda
def test_tensors_on_two_devices():
    anchor, positive, negative = random_inputs(5, 6, device="cuda")
    arguments = (anchor, positive.cpu(), negative)
    assert error_of(triplet_margin_loss, *arguments) == error_of(torch_loss, *arguments)
    with pytest.raises(RuntimeError, match="positive: expected the device of anchor"):
        forward_op(**forward_arguments("cuda", positive=positive.cpu()))
    with pytest.raises(RuntimeError, match="grad_loss: expected"):
        backward_op(**backward_arguments("cuda", grad_loss=torch.ones(())))
