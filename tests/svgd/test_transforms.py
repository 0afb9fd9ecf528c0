# SPDX-License-Identifier: BSD-3-Clause
"""torch.func, fake tensors, and what torch asks of custom ops."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from fused_ops import explain, median_bandwidth, svgd_phi, svgd_step
from fused_ops.svgd import reference

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


def phi_of_reference(particles, score):
    return reference.phi(particles, score, reference.bandwidth(particles, "paper"), "rbf", 1.0)


TRANSFORMS = {
    "grad": lambda f, x, s: torch.func.grad(lambda *y: f(*y).square().sum(), argnums=(0, 1))(x, s),
    "vjp": lambda f, x, s: torch.func.vjp(f, x, s)[1](s),
    "jvp": lambda f, x, s: torch.func.jvp(f, (x, s), (s, x)),
    "jacrev": lambda f, x, s: torch.func.jacrev(f)(x, s),
    "jacfwd": lambda f, x, s: torch.func.jacfwd(f)(x, s),
    "hessian": lambda f, x, s: torch.func.hessian(lambda y: f(y, s).square().sum())(x),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_those_of_the_reference(device, name):
    transform = TRANSFORMS[name]
    inputs = random_inputs(4, 2, dtype=torch.float64, device=device)
    said = []

    def phi(*inputs):
        said.append(str(explain(svgd_phi, *inputs)))
        return svgd_phi(*inputs, bandwidth="paper")

    result = transform(phi, *inputs)
    torch.testing.assert_close(result, transform(phi_of_reference, *inputs))
    assert said
    assert all("a torch.func transform is active" in text for text in said)
