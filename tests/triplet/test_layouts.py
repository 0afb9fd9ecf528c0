# SPDX-License-Identifier: BSD-3-Clause
"""Strides: sliced, unaligned, expanded, transposed, overlapping, far apart."""

import pytest
import torch

from fused_ops import triplet_margin_loss

from .cases import (
    DTYPES,
    INPUTS,
    assert_same_bits,
    check_against_float64,
    loss_and_gradients,
    random_inputs,
    random_tensor,
    recorded_ops,
    torch_loss,
)

pytestmark = pytest.mark.usefixtures("fused_only")

poisoned = pytest.mark.usefixtures("poisoned_memory")

# name: whether it is read where it is, and how a tensor (4, 6, 10) gets that layout
LAYOUTS = {
    "contiguous": (True, lambda x: x),
    "columns of wider rows": (True, lambda x: torch.cat([x, x + 9], -1)[..., :10]),
    "later columns": (True, lambda x: torch.cat([x + 9, x], -1)[..., 10:]),
    "unaligned": (True, lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)),
    "every other row": (True, lambda x: x.repeat_interleave(2, 1)[:, ::2]),
    "one matrix of several": (True, lambda x: torch.stack([x, x + 9], 2)[:, :, 0]),
    "one row for all": (True, lambda x: x[0, 0].expand(x.shape)),
    "one row each": (False, lambda x: x[:, :1].expand(x.shape)),
    "one batch for all": (False, lambda x: x[:1].expand(x.shape)),
    "leading dimensions swapped": (False, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    "last dimension strided": (False, lambda x: x.mT.contiguous().mT),
    "last dimension expanded": (False, lambda x: x[..., :1].expand(x.shape)),
    "overlapping rows": (True, lambda x: x.flatten().as_strided((4, 6, 10), (18, 3, 1))),
}


@poisoned
@pytest.mark.parametrize("which", range(3), ids=INPUTS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(device, name, which):
    in_place, layout = LAYOUTS[name]
    inputs = random_inputs(4, 6, 10, device=device)
    inputs[which] = layout(inputs[which])
    settings = {"margin": 0.3, "swap": True, "reduction": "none"}
    grad_loss = random_tensor(4, 6, device=device, seed=7)
    check_against_float64(inputs, grad_loss, **settings)
    gradients = loss_and_gradients(triplet_margin_loss, inputs, grad_loss, **settings)[1:]
    assert all(gradient.is_contiguous() for gradient in gradients)
    with recorded_ops() as ops:
        triplet_margin_loss(*inputs, **settings)
    copies = {"aten::clone", "aten::copy_", "aten::contiguous"} & ops
    assert bool(copies) == (not in_place), copies


@poisoned
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [5, 64, 257])
@pytest.mark.parametrize("offset", [1, 3])
def test_unaligned_starts(device, dtype, dim, offset):
    """Rows start anywhere, also where their length is a multiple of a vector."""
    buffer = torch.stack(random_inputs(7, dim, dtype=dtype, device=device)).flatten()
    inputs = [torch.cat([buffer[:offset], part])[offset:].view(7, dim) for part in buffer.chunk(3)]
    assert inputs[0].data_ptr() % 16
    check_against_float64(inputs, reduction="none", margin=0.3)


GRADIENTS = {
    "of a sum": lambda g: g.flatten()[0].expand(g.shape),
    "strided": lambda g: g.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda g: g.mT.contiguous().mT,
    "of a row each": lambda g: g[:, :1].expand(g.shape),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_layouts_of_the_upstream_gradient(device, dtype, name):
    inputs = random_inputs(4, 6, 10, dtype=dtype, device=device)
    grad_loss = GRADIENTS[name](random_tensor(4, 6, dtype=dtype, device=device, seed=7))
    assert not grad_loss.is_contiguous()
    results = loss_and_gradients(triplet_margin_loss, inputs, grad_loss, reduction="none")
    plain = loss_and_gradients(
        triplet_margin_loss, inputs, grad_loss.contiguous(), reduction="none"
    )
    assert_same_bits(results, plain)
    check_against_float64(inputs, grad_loss, reduction="none")


@pytest.mark.parametrize("swap", [False, True], ids=["plain", "swap"])
@pytest.mark.parametrize("places", [(0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 0, 0)], ids=str)
def test_one_tensor_in_several_places(device, places, swap):
    """Its gradients add up."""
    tensors = random_inputs(6, 10, device=device)[:2]
    results = []
    for function in (triplet_margin_loss, torch_loss):
        leaves = [x.clone().requires_grad_() for x in tensors]
        function(*(leaves[place] for place in places), swap=swap, eps=0.01).backward()
        results.append([leaf.grad for leaf in leaves if leaf.grad is not None])
    torch.testing.assert_close(*results)


def test_rows_more_than_2_to_the_31_elements_apart(device):
    """Only the pages that are read are ever backed by memory, on CPU."""
    apart = 2**30 + 8
    buffer = torch.empty(2 * apart + 64, dtype=torch.bfloat16, device=device)
    expected = random_inputs(3, 16, dtype=torch.bfloat16, device=device)
    inputs = [buffer[16 * i :].as_strided((3, 16), (apart, 1)) for i in range(3)]
    for x, values in zip(inputs, expected, strict=True):
        x.copy_(values)
    results = loss_and_gradients(triplet_margin_loss, inputs, reduction="none")
    plain = loss_and_gradients(triplet_margin_loss, expected, reduction="none")
    assert_same_bits(results, plain)
