# SPDX-License-Identifier: BSD-3-Clause
"""torch.func, fake tensors, and what torch asks of custom ops."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from fused_ops import median_bandwidth, svgd_phi, svgd_step

from .cases import (
    KERNEL_NUMBERS,
    KERNELS,
    RULE_NUMBERS,
    RULES,
    bandwidth_op,
    distances_op,
    random_inputs,
    random_tensor,
    update_op,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bandwidth", [*RULES, 0.7])
def test_opcheck_of_the_update(device, bandwidth, kernel, dtype):
    particles, score = random_inputs(9, 4, dtype=dtype, device=device)
    strided = torch.cat([score, score], 1)[:, :4]
    number = KERNEL_NUMBERS[kernel]
    tensor = torch.tensor(0.7, device=device) if bandwidth == 0.7 else None
    rule = RULE_NUMBERS.get(bandwidth, -1)
    for step_size in (None, 0.1):
        arguments = (particles, strided, tensor, rule, 0.0, number, -0.5, step_size)
        assert set(opcheck(update_op, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_opcheck_of_the_others(device, dtype):
    for particles in (random_tensor(9, 4, dtype=dtype, device=device), torch.ones(1, 1).to(device)):
        for rule in RULE_NUMBERS.values():
            assert set(opcheck(bandwidth_op, (particles, rule)).values()) == {"SUCCESS"}
        assert set(opcheck(distances_op, (particles,)).values()) == {"SUCCESS"}


@pytest.mark.usefixtures("fused_only")
def test_fake_results_are_like_the_real_ones(device):
    particles, score = random_inputs(9, 4, dtype=torch.bfloat16, device=device)
    particles = particles.T.contiguous().T
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(x) for x in (particles, score)]
        fake = [svgd_phi(*inputs), svgd_step(*inputs, 0.1), median_bandwidth(inputs[0])]
    real = [svgd_phi(particles, score), svgd_step(particles, score, 0.1)]
    for result, like in zip(fake, [*real, median_bandwidth(particles)], strict=True):
        assert (result.shape, result.dtype, result.device, result.stride()) == (
            like.shape,
            like.dtype,
            like.device,
            like.stride(),
        )


@pytest.mark.parametrize("bandwidth", [*RULES, 0.7])
def test_vmap_over_clouds(device, bandwidth):
    clouds, scores = random_tensor(2, 3, 8, 2, dtype=torch.float64, device=device).unbind()

    def phi(x, s):
        return svgd_phi(x, s, bandwidth=bandwidth, kernel="imq")

    expected = torch.stack([phi(x, s) for x, s in zip(clouds, scores, strict=True)])
    torch.testing.assert_close(torch.vmap(phi)(clouds, scores), expected)


def test_jacobians_agree(device):
    particles, score = random_inputs(4, 2, dtype=torch.float64, device=device)
    jacobians = [
        transform(lambda x: svgd_phi(x, score))(particles)
        for transform in (torch.func.jacrev, torch.func.jacfwd)
    ]
    assert jacobians[0].any()
    torch.testing.assert_close(*jacobians)
