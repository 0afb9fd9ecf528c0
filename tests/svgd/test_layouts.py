# SPDX-License-Identifier: BSD-3-Clause
"""Strides: sliced, unaligned, expanded, transposed, overlapping, far apart; inputs left alone."""

import pytest
import torch

from fused_ops import median_bandwidth, set_fallback, svgd_phi, svgd_step

from .cases import (
    DTYPES,
    KERNELS,
    RULES,
    assert_same_bits,
    random_inputs,
    random_tensor,
    recorded_ops,
)

pytestmark = pytest.mark.usefixtures("fused_only")

# name: whether it is read where it is, and how a (70, 10) matrix gets that layout
LAYOUTS = {
    "contiguous": (True, lambda x: x),
    "columns of wider rows": (True, lambda x: torch.cat([x, x + 9], -1)[:, :10]),
    "later columns": (True, lambda x: torch.cat([x + 9, x], -1)[:, 10:]),
    "unaligned": (True, lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)),
    "every other row": (True, lambda x: x.repeat_interleave(2, 0)[::2]),
    "one row for all": (True, lambda x: x[:1].expand(x.shape)),
    "overlapping rows": (True, lambda x: x.flatten().as_strided((70, 10), (3, 1))),
    "transposed": (False, lambda x: x.T.contiguous().T),
    "one column for all": (False, lambda x: x[:, :1].expand(x.shape)),
    "every other column": (False, lambda x: x.repeat_interleave(2, 1)[:, ::2]),
    "rows backwards": (True, lambda x: x.flip(0)),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("which", range(2), ids=["particles", "score"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(device, name, dtype, which):
    """The result of a copy without strides, bit for bit, and contiguous."""
    in_place, layout = LAYOUTS[name]
    inputs = random_inputs(70, 10, dtype=dtype, device=device)
    inputs[which] = layout(inputs[which])
    copies = [x.clone(memory_format=torch.contiguous_format) for x in inputs]
    for kernel in KERNELS:
        phi = svgd_phi(*inputs, kernel=kernel)
        assert phi.is_contiguous()
        assert_same_bits(phi, svgd_phi(*copies, kernel=kernel))
    step = svgd_step(*inputs, 0.1, bandwidth=1.5)
    assert_same_bits(step, svgd_step(*copies, 0.1, bandwidth=1.5))
    for rule in RULES:
        assert_same_bits(median_bandwidth(inputs[0], rule), median_bandwidth(copies[0], rule))
    with recorded_ops() as ops:
        svgd_phi(*inputs)
    copied = {"aten::clone", "aten::copy_", "aten::contiguous"} & ops
    assert bool(copied) == (not in_place), copied


@pytest.mark.parametrize("dim", [1, 3, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_single_rows_and_columns(device, dtype, dim):
    """Strides of dimensions of size 1 mean nothing."""
    inputs = random_inputs(5, dim, dtype=dtype, device=device)
    expected = svgd_phi(*inputs)
    for stride in (0, 1, 1000):
        if dim == 1:
            odd = [x.as_strided((5, 1), (1, stride)) for x in inputs]
            assert_same_bits(svgd_phi(*odd), expected)
        rows = [x[:1].as_strided((1, dim), (stride, 1)) for x in inputs]
        assert_same_bits(svgd_phi(*rows), inputs[1][:1])


@pytest.mark.parametrize("grad", [False, True], ids=["fused", "reference"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_inputs_are_never_modified(device, kernel, grad):
    inputs = [*random_inputs(70, 10, device=device), torch.tensor(0.7, device=device)]
    before = [x.clone() for x in inputs]
    if grad:
        inputs[0].requires_grad_()
    versions = [x._version for x in inputs]
    particles, score, h = inputs
    with set_fallback("allow"):
        results = [
            svgd_phi(particles, score, kernel=kernel),
            svgd_phi(particles, score, bandwidth=h, kernel=kernel),
            svgd_step(particles, score, 0.1, kernel=kernel),
            svgd_step(particles, score, 0.0, kernel=kernel),
            svgd_step(particles, lambda x: x, 0.1, kernel=kernel),
        ]
    for x, former, version in zip(inputs, before, versions, strict=True):
        assert torch.equal(x, former)
        assert x._version == version
    memory = {x.untyped_storage().data_ptr() for x in inputs}
    assert all(result.untyped_storage().data_ptr() not in memory for result in results)
    assert torch.equal(results[3], particles)


def test_one_tensor_as_particles_and_score(device):
    x = random_tensor(70, 10, device=device)
    assert_same_bits(svgd_phi(x, x), svgd_phi(x, x.clone()))


def test_views_that_negate_are_read_as_they_are(device):
    """The imaginary part of a conjugate is a lazy negation, which raw memory does not show."""
    plain = random_inputs(20, 3, device=device)
    pairs = [torch.view_as_complex(torch.stack([x, -x], -1)) for x in plain]
    inputs = [pair.conj().imag for pair in pairs]
    assert inputs[0].is_neg()
    assert_same_bits(svgd_phi(*inputs), svgd_phi(*plain))


def test_rows_more_than_2_to_the_31_elements_apart(device):
    """Only the pages that are read are ever backed by memory, on CPU."""
    apart = 2**30 + 8
    buffer = torch.empty(2 * apart + 64, dtype=torch.bfloat16, device=device)
    expected = random_inputs(3, 16, dtype=torch.bfloat16, device=device)
    inputs = [buffer[16 * i :].as_strided((3, 16), (apart, 1)) for i in range(2)]
    for x, values in zip(inputs, expected, strict=True):
        x.copy_(values)
    assert_same_bits(svgd_phi(*inputs), svgd_phi(*expected))
