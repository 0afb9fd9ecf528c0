# SPDX-License-Identifier: BSD-3-Clause
"""What the functions take in the place of each argument."""

import numpy
import pytest
import torch

from fused_ops import median_bandwidth, svgd_phi, svgd_step

from .cases import DTYPES, RULES, assert_same_bits, random_inputs, random_tensor

CALLS = {
    "svgd_phi": svgd_phi,
    "svgd_step": lambda particles, score, **settings: svgd_step(particles, score, 0.1, **settings),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@calls
def test_score_callable_is_called_once_with_the_particles(device, call):
    """numpyro#1947. Detached, so that it may run autograd; the result is that of its tensor."""
    particles = random_tensor(20, 3, device=device).requires_grad_()
    seen = []

    def score(x):
        seen.append(x)
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            return torch.autograd.grad(-leaf.square().sum() / 2, leaf)[0]

    with torch.no_grad():
        result = call(particles, score)
    (x,) = seen
    assert not x.requires_grad
    assert torch.equal(x, particles)
    assert_same_bits(result, call(particles.detach(), -particles.detach()))
    call(particles, score)
    assert len(seen) == 2
    assert not seen[1].requires_grad


def test_score_module(device):
    """A tensor that can be called is a tensor, and a module is a function."""
    particles = random_tensor(20, 3, device=device)
    module = torch.nn.Linear(3, 3, device=device)
    with torch.no_grad():
        assert_same_bits(svgd_phi(particles, module), svgd_phi(particles, module(particles)))

    class Callable(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        def __call__(self, x):
            raise AssertionError("was called")

    score = -particles
    assert_same_bits(svgd_phi(particles, score.as_subclass(Callable)), svgd_phi(particles, score))


@pytest.mark.usefixtures("fused_only")
@calls
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kinds_of_bandwidth(device, dtype, call):
    """The same h as a name, a tensor of whichever dtype, and a number."""
    inputs = random_inputs(40, 3, dtype=dtype, device=device)
    for rule in RULES:
        h = median_bandwidth(inputs[0], rule)
        by_name = call(*inputs, bandwidth=rule)
        for same in (h, h.double(), h.item()):
            assert_same_bits(call(*inputs, bandwidth=same), by_name)
    assert_same_bits(call(*inputs), call(*inputs, bandwidth="median"))
    two = call(*inputs, bandwidth=2)
    assert not torch.equal(two, call(*inputs))
    halves = torch.full((3, 3), 2.0, device=device)[1, 1]
    for same in (2.0, halves, halves.half(), halves.bfloat16(), numpy.float64(2)):
        assert_same_bits(call(*inputs, bandwidth=same), two)


def test_defaults_are_the_paper_s_sign_and_kernel(device):
    inputs = random_inputs(10, 3, device=device)
    settings = {"bandwidth": "median", "kernel": "rbf", "repulsion": 1.0}
    assert_same_bits(svgd_phi(*inputs), svgd_phi(*inputs, **settings))
    for change in ({"bandwidth": "paper"}, {"kernel": "imq"}, {"repulsion": -1}):
        assert not torch.equal(svgd_phi(*inputs), svgd_phi(*inputs, **settings | change))
    with pytest.raises(TypeError):
        svgd_phi(*inputs, "paper")
