# SPDX-License-Identifier: BSD-3-Clause
"""Gradients through the reference, to which calls with inputs that require them go."""

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from fused_ops import median_bandwidth, svgd_phi, svgd_step

from .cases import DTYPES, KERNELS, RULES, error_of_norm, random_inputs, random_tensor

kernels = pytest.mark.parametrize("kernel", KERNELS)
rules = pytest.mark.parametrize("rule", RULES)


def leaves(*inputs):
    return [x.detach().requires_grad_() for x in inputs]


@kernels
@rules
@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_gradcheck_through_the_rules(device, count, rule, kernel):
    """Odd and even counts, whose median is of one distance or two."""
    inputs = leaves(*random_inputs(count, 2, dtype=torch.float64, device=device))
    settings = {"bandwidth": rule, "kernel": kernel, "repulsion": 0.7}
    assert gradcheck(lambda x, s: svgd_phi(x, s, **settings), inputs)
    assert gradcheck(lambda x, s: svgd_step(x, s, 0.3, **settings), inputs)
    assert gradcheck(lambda x: median_bandwidth(x, rule), inputs[:1])


@kernels
def test_gradcheck_through_a_bandwidth_tensor(device, kernel):
    inputs = random_inputs(5, 2, dtype=torch.float64, device=device)
    inputs = leaves(*inputs, inputs[0].new_tensor(0.8))
    for needed in ((True, True, True), (False, False, True), (False, True, False)):
        chosen = [x.requires_grad_(n) for x, n in zip(leaves(*inputs), needed, strict=True)]
        assert gradcheck(lambda x, s, h: svgd_phi(x, s, bandwidth=h, kernel=kernel), chosen)
        assert gradcheck(lambda x, s, h: svgd_step(x, s, 0.3, bandwidth=h, kernel=kernel), chosen)


@kernels
def test_gradients_of_gradients(device, kernel):
    inputs = leaves(*random_inputs(4, 2, dtype=torch.float64, device=device))
    assert gradgradcheck(lambda x, s: svgd_phi(x, s, kernel=kernel), inputs)


@kernels
@rules
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_and_without_gradients_phi_is_the_same(device, dtype, rule, kernel):
    inputs = random_inputs(30, 5, dtype=dtype, device=device)
    settings = {"bandwidth": rule, "kernel": kernel}
    fused = svgd_phi(*inputs, **settings)
    inputs = leaves(*inputs)
    phi = svgd_phi(*inputs, **settings)
    assert phi.dtype == dtype
    # float32 sums in another order, then a rounding that they may tip over
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}.get(dtype, torch.finfo(dtype).eps)
    assert error_of_norm(phi.detach(), fused.double()) <= tolerance
    for gradient in torch.autograd.grad(phi.square().sum(), inputs):
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()
        assert gradient.any()


@rules
@pytest.mark.parametrize("exponent", [-60, -20, 20, 60])
def test_bandwidth_of_the_reference_scales_too(device, exponent, rule):
    """As the kernels' does, in float32: neither squares of squares nor floors."""
    for count in (6, 7):
        particles = random_tensor(count, 3, device=device) * 2.0**exponent
        expected = median_bandwidth(particles, rule)
        (particles,) = leaves(particles)
        torch.testing.assert_close(
            median_bandwidth(particles, rule).detach(), expected, rtol=1e-6, atol=0
        )


def test_gradient_of_16_bits_is_that_of_float32(device):
    """Computed in float32 between the two roundings."""
    narrow = leaves(*random_inputs(30, 5, dtype=torch.bfloat16, device=device))
    wide = leaves(*(x.float() for x in narrow))
    gradients = []
    for inputs in (narrow, wide):
        phi = svgd_phi(*inputs)
        gradients.append(torch.autograd.grad(phi, inputs, torch.ones_like(phi)))
    for result, expected in zip(*gradients, strict=True):
        assert error_of_norm(result, expected.double()) <= torch.finfo(torch.bfloat16).eps


@kernels
@rules
def test_gradient_with_coinciding_particles_is_finite(device, rule, kernel):
    """Of two rows, and of all: the median's square root must not be differentiated at zero."""
    for particles in (random_tensor(6, 2, device=device), torch.zeros(6, 2, device=device)):
        particles[1] = particles[0]
        inputs = leaves(particles, random_tensor(6, 2, device=device, seed=1))
        phi = svgd_phi(*inputs, bandwidth=rule, kernel=kernel)
        for gradient in torch.autograd.grad(phi.square().sum(), inputs):
            assert gradient.isfinite().all()


def test_score_function_sees_no_graph(device):
    """Gradients go through the particles, not through the score at them."""
    (particles,) = leaves(random_tensor(10, 2, device=device))
    (gradient,) = torch.autograd.grad(svgd_phi(particles, lambda x: -x).sum(), particles)
    score = -particles.detach()
    (expected,) = torch.autograd.grad(svgd_phi(particles, score).sum(), particles)
    assert torch.equal(gradient, expected)


def offloaded(*inputs):
    with torch.autograd.graph.save_on_cpu():
        return svgd_phi(*inputs)


WITHOUT_MEMORY = {
    "checkpoint": lambda *inputs: checkpoint(svgd_phi, *inputs, use_reentrant=False),
    "re-entrant": lambda *inputs: checkpoint(svgd_phi, *inputs, use_reentrant=True),
    "offloaded": offloaded,
}


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_activation_checkpointing_and_offloading(device, name):
    """A re-entrant forward sees no gradients, and so is fused."""
    gradients = []
    for function in (svgd_phi, WITHOUT_MEMORY[name]):
        inputs = leaves(*random_inputs(10, 2, device=device))
        function(*inputs).square().sum().backward()
        gradients.append([x.grad for x in inputs])
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("which", range(3), ids=["particles", "score", "bandwidth"])
def test_forward_mode(device, which):
    """A tangent of any input reaches the result."""
    inputs = random_inputs(5, 2, dtype=torch.float64, device=device)
    inputs.append(inputs[0].new_tensor(0.8))
    tangent = random_tensor(*inputs[which].shape, dtype=torch.float64, device=device, seed=9)

    def phi(x):
        particles, score, h = *inputs[:which], x, *inputs[which + 1 :]
        return svgd_phi(particles, score, bandwidth=h)

    step = 1e-6
    plain = inputs[which]
    expected = (phi(plain + step * tangent) - phi(plain - step * tangent)) / (2 * step)
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(phi(forward_ad.make_dual(plain, tangent)))
        assert result.tangent is not None
        torch.testing.assert_close(result.tangent, expected, rtol=1e-6, atol=1e-8)
