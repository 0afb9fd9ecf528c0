# SPDX-License-Identifier: BSD-3-Clause
"""The launch policies of the CUDA kernels, each forced, and tensors beyond 2^31 elements."""

import itertools
import math

import pytest
import torch

from fused_ops import _C, explain, triplet_margin_loss

from .cases import (
    DTYPES,
    NORMS,
    REDUCTION_NUMBERS,
    REDUCTIONS,
    assert_as_exact_as_torch,
    assert_same_bits,
    backward_op,
    forward_op,
    loss_and_gradients,
    random_inputs,
    random_tensor,
)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fused_only")]

# One row and many, narrow and wide, vectors and none, more rows than gridDim.y, segments and tiles
# with rests
FORM_SHAPES = [
    (1, 8), (5, 33), (300, 257), (130, 1024), (70_001, 4), (3, 70_001), (2, 130_000),
    (34_001, 3), (17_001, 63), (91, 1001),
]  # fmt: skip


def run_form(form, inputs, grad_loss, *, margin=0.3, p=2, eps=1e-6, swap=False, reduction="none"):
    number = REDUCTION_NUMBERS[reduction]
    form = _C.TRIPLET_FORMS.index(form)
    loss, state = forward_op(*inputs, margin, p, eps, swap, number, False, True, form)
    return [
        loss,
        *backward_op(grad_loss, *inputs, state, margin, p, eps, swap, number, *3 * [True], form),
    ]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("shape", FORM_SHAPES, ids=str)
@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", _C.TRIPLET_FORMS)
def test_every_form(form, dtype, p, shape):
    inputs = random_inputs(*shape, dtype=dtype, device="cuda")
    for swap, reduction in itertools.product((False, True), REDUCTIONS):
        settings = {"margin": 0.3, "p": p, "swap": swap, "reduction": reduction}
        if reduction == "sum" and dtype == torch.float16 and shape[0] > 10_000:
            continue  # beyond its range
        loss_shape = shape[:-1] if reduction == "none" else ()
        grad_loss = random_tensor(*loss_shape, dtype=dtype, device="cuda", seed=3)
        results = run_form(form, inputs, grad_loss, **settings)
        assert_as_exact_as_torch(results, inputs, grad_loss, **settings)
        assert_same_bits(run_form(form, inputs, grad_loss, **settings), results)


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("form", _C.TRIPLET_FORMS)
@pytest.mark.parametrize("place", [0, 40_000, 99_999])
def test_every_form_passes_nan_on(form, p, place):
    for which in range(3):
        inputs = random_inputs(3, 100_000, device="cuda")
        inputs[which][1, place] = math.nan
        loss = run_form(form, inputs, torch.ones(3, device="cuda"), p=p, swap=True)[0]
        assert loss.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("form", _C.TRIPLET_FORMS)
def test_every_form_counts_ties(form):
    inputs = [torch.full((2, 70_001), value, device="cuda") for value in (3.0, 1.0, 0.0)]
    settings = {"p": math.inf, "eps": 0, "margin": 9}
    loss, *gradients = run_form(form, inputs, torch.ones(2, device="cuda"), **settings)
    assert loss.tolist() == [8, 8]
    for gradient, value in zip(gradients, (0, -1, 1), strict=True):
        expected = torch.full_like(gradient, value / 70_001)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", FORM_SHAPES, ids=str)
def test_chosen_form_is_one_of_the_forced(shape):
    inputs = random_inputs(*shape, device="cuda")
    grad_loss = torch.ones(shape[0], device="cuda")
    chosen = explain(triplet_margin_loss, *inputs, reduction="none").details["form"]
    results = loss_and_gradients(triplet_margin_loss, inputs, margin=0.3, reduction="none")
    assert_same_bits(results, run_form(chosen, inputs, grad_loss))


@pytest.mark.parametrize(
    ("whole", "packed", "layout"),
    [
        (True, True, lambda x: x),
        (True, False, lambda x: x[:1].expand(x.shape)),
        (True, True, lambda x: x[0, :32][None]),  # a lone row has no next one
        (False, True, lambda x: x[:, :33].contiguous()),
        (False, False, lambda x: x[:, :33]),
        (False, False, lambda x: x[:, 1:]),
        (False, False, lambda x: x.flatten()[1:-63].view(49, 64)),
    ],
)
def test_explain_knows_how_rows_lie(whole, packed, layout):
    inputs = [layout(x) for x in random_inputs(50, 64, device="cuda")]
    device = torch.cuda.get_device_properties(0)
    policy = _C.triplet_policy(
        *inputs[0].shape,
        element_size=4,
        whole=whole,
        packed=packed,
        multiprocessors=device.multi_processor_count,
        shared_memory=device.shared_memory_per_block_optin,
    )
    details = explain(triplet_margin_loss, *inputs).details
    assert details == {"device": "cuda", "dtype": "float32"} | policy


# Inputs that are off the 16-byte boundaries alike, each in its own way, and in steps of their own
OFFSETS = [(1, 1, 1), (0, 1, 2), (3, 0, 0)]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("dim", [1, 2, 7, 63, 64, 255, 1000, 4099, 16_381])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_off_the_boundaries(dtype, dim, offsets):
    for padding in (0, 1, 5):
        inputs = []
        for x, offset in zip(random_inputs(9, dim, dtype=dtype), offsets, strict=True):
            memory = torch.full((9 * (dim + padding) + 3,), math.nan, dtype=dtype, device="cuda")
            view = memory[offset:].as_strided((9, dim), (dim + padding, 1))
            inputs.append(view.copy_(x))
        for p in NORMS:
            settings = {"margin": 0.3, "p": p, "swap": True, "reduction": "sum"}
            results = loss_and_gradients(triplet_margin_loss, inputs, **settings)
            assert_as_exact_as_torch(results, inputs, **settings)


@pytest.mark.parametrize("form", [None, *_C.TRIPLET_FORMS])
def test_more_than_2_to_the_31_elements(form):
    """Fault 21. All rows but the last are zero, and have known losses and gradients."""
    rows, dim = 2**20 + 1, 2048
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 32e9:
        pytest.skip("needs 32 GB of free GPU memory")
    inputs = [torch.zeros(rows, dim, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    last = random_inputs(1, dim, dtype=torch.bfloat16, device="cuda")
    for x, row in zip(inputs, last, strict=True):
        x[-1:] = row
    ones = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(rows)
    if form is None:
        results = loss_and_gradients(triplet_margin_loss, inputs, ones, margin=9, reduction="none")
    else:
        results = run_form(form, inputs, ones, margin=9)
    del inputs
    expected = loss_and_gradients(triplet_margin_loss, last, ones[:1], margin=9, reduction="none")
    assert expected[0].item() > 0
    step = dim**-0.5
    for result, at_last, at_zero in zip(results, expected, (9, 0, -step, step), strict=True):
        torch.testing.assert_close(result[-1:], at_last)
        assert at_last.any()
        for part in result[:-1].split(2**18):
            assert (part == torch.tensor(at_zero, dtype=part.dtype, device="cuda")).all()
